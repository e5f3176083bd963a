"""Warnings that point at the line of the person who called, not into a library between."""

import sys
import warnings

_BETWEEN = frozenset(["contextlib", "equinox", "flax", "functools", "jax", "magma_optax", "optax"])


def warn(message: str) -> None:
    """Give a UserWarning at the innermost line that is in none of the libraries."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
