"""Precision: float32 at least, whatever the parameters are, and no promotion left to JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def widen(x: jax.Array) -> jax.Array:
    """Cast floats narrower than float32 to float32; leave wider and complex arrays."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def widen_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Cast all to the dtype that holds each, float32 at least."""
    dtypes = [widen(x).dtype for x in arrays]
    dtype = functools.reduce(np.promote_types, dtypes)  # NumPy's promotion is never strict.
    return tuple(x.astype(dtype) for x in arrays)


def mix(a: Any, x: jax.Array, b: Any, y: jax.Array) -> jax.Array:
    """A x + b y, in the dtype that holds both; numbers are rounded to it."""
    x, y = widen_together(x, y)
    return jnp.asarray(a, x.dtype) * x + jnp.asarray(b, y.dtype) * y


def inner(x: jax.Array, y: jax.Array) -> jax.Array:
    """Elements whose sum is Re <x, y>."""
    if jnp.iscomplexobj(x):
        return x.real * y.real + x.imag * y.imag
    return x * y
