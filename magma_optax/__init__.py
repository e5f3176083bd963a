"""Magma and SkipUpdate: masked updates for Optax optimizers.

Joo et al., "On Surprising Effectiveness of Masking Updates in Adaptive Optimizers", 2026.
"""

from magma_optax._blocks import stacked
from magma_optax._describe import Masking, describe_masking
from magma_optax._magma import magma
from magma_optax._predicates import attention, attention_and_mlp, mlp
from magma_optax._skip_update import skip_update
from magma_optax._state import MagmaState, summarize
from magma_optax._with_magma import with_magma

__all__ = [
    "MagmaState",
    "Masking",
    "attention",
    "attention_and_mlp",
    "describe_masking",
    "magma",
    "mlp",
    "skip_update",
    "stacked",
    "summarize",
    "with_magma",
]
__version__ = "0.1.0"
