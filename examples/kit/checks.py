"""Refusals of wrong arguments, with the value; JAX arrays, which may be traced, pass."""

from collections.abc import Callable
from typing import Any

import jax


def check_decay(name: str, value: Any) -> None:
    """Refuses a decay rate outside [0, 1)."""
    _check(name, value, lambda x: 0 <= x < 1, "in [0, 1)")


def check_positive(name: str, value: Any) -> None:
    """Refuses a number that is not greater than 0."""
    _check(name, value, lambda x: x > 0, "greater than 0")


def check_probability(name: str, value: Any) -> None:
    """Refuses a number outside (0, 1]."""
    _check(name, value, lambda x: 0 < x <= 1, "in (0, 1]")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuses all but an integer of at least `least`."""
    _check(name, value, lambda n: n == int(n) and n >= least, f"an integer of at least {least}")


def _check(name: str, value: Any, holds: Callable[[Any], bool], says: str) -> None:
    if not isinstance(value, jax.Array) and not holds(value):
        raise ValueError(f"{name} must be {says}, got {value!r}")
