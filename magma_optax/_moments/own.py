"""Magma's own first moments: an EMA of the gradients."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from magma_optax._blocks.paths import NamedTree
from magma_optax._step.numbers import mix, widen


def init_momentum(params: NamedTree, paths: Collection[str], dtype: Any = None) -> Any:
    """Zeros at ``paths``, in ``dtype`` or the parameter's own, and ``MaskedNode()`` elsewhere."""
    return params.map(
        lambda path, leaf: (
            jnp.zeros_like(leaf, dtype=_dtype_for(leaf, dtype))
            if path in paths
            else optax.MaskedNode()
        )
    )


def update_momentum(momentum: jax.Array, gradient: jax.Array, b1: Any) -> jax.Array:
    """mu_t = b1 mu_{t-1} + (1 - b1) g_t, in float32 or wider; elements with non-finite g stay."""
    return keep_finite(gradient, mix(b1, momentum, 1 - b1, gradient), widen(momentum))


def from_gradient(
    gradient: jax.Array, momentum: jax.Array, b1: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mu, g, what to remember) from a gradient, or from an update that is gradient-like."""
    mu = update_momentum(momentum, gradient, b1)
    return mu, gradient, mu


def keep_finite(gradient: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """``new`` where the gradient is finite, else ``old``: one NaN must not poison an average."""
    return jnp.where(jnp.isfinite(gradient), new, old.astype(new.dtype))


def replace_momentum(momentum: NamedTree, new: dict[str, jax.Array]) -> Any:
    """Store ``new`` in the containers and dtypes of ``momentum``; what is not in it stays."""
    return momentum.map(lambda path, x: new[path].astype(x.dtype) if path in new else x)


def _dtype_for(leaf: Any, dtype: Any) -> Any:
    if dtype is None:
        return jnp.result_type(leaf)  # Said, so that of a weakly typed leaf it is strong.
    if not jnp.iscomplexobj(leaf):
        return dtype
    return jnp.complex128 if jnp.dtype(dtype).itemsize > 4 else jnp.complex64
