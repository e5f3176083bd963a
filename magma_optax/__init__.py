"""Magma and SkipUpdate: masked updates for Optax optimizers.

Joo et al., "On Surprising Effectiveness of Masking Updates in Adaptive Optimizers", 2026.
"""

from magma_optax._blocks.cutting import stacked
from magma_optax._blocks.predicates import attention, attention_and_mlp, mlp
from magma_optax._doors.control import control, mean_multiplier
from magma_optax._doors.describe import Masking, describe_masking
from magma_optax._doors.magma import magma
from magma_optax._doors.skip_update import skip_update
from magma_optax._doors.summary import summarize
from magma_optax._doors.with_magma import WithMagmaState, with_magma
from magma_optax._doors.with_skip_update import with_skip_update
from magma_optax._step.algorithm import Score
from magma_optax._step.state import MagmaState

__all__ = [
    "MagmaState",
    "Masking",
    "Score",
    "WithMagmaState",
    "attention",
    "attention_and_mlp",
    "control",
    "describe_masking",
    "magma",
    "mean_multiplier",
    "mlp",
    "skip_update",
    "stacked",
    "summarize",
    "with_magma",
    "with_skip_update",
]
__version__ = "0.2.0"
