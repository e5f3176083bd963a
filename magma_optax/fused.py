"""The old place of `magma_optax.experimental.fused`; it goes with version 0.3."""

import warnings

from magma_optax.experimental.fused import FusedAdam, fused_adam

__all__ = ["FusedAdam", "fused_adam"]

warnings.warn(
    "magma_optax.fused is magma_optax.experimental.fused now: import fused_adam from there",
    DeprecationWarning,
    stacklevel=2,
)
