"""Who called: warnings point at a person's line, not into a library between."""

import sys
import warnings

_BETWEEN = frozenset(["contextlib", "equinox", "flax", "functools", "jax", "magma_optax", "optax"])


def is_link() -> bool:
    """Tell whether the function that asks was called by ``optax.chain``."""
    caller = sys._getframe(2)
    module = caller.f_globals.get("__name__", "")
    return module.startswith("optax.") and "chain" in caller.f_code.co_qualname.partition(".")[0]


def warn(message: str) -> None:
    """Give a UserWarning at the innermost line that is in none of the libraries."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
