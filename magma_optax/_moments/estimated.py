"""First moments and gradients estimated from the updates that arrive, where no gradient does."""

from typing import Any

import jax
import jax.numpy as jnp

from magma_optax._moments.own import keep_finite
from magma_optax._step.numbers import widen_together


def undo_momentum(
    delta: jax.Array, previous: jax.Array, b1: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mu, g, what to remember) from an update that is an EMA of something gradient-like.

    While the learning rate stays, g is about u_t - b1 u_{t-1}, up to a factor, which a cosine
    ignores.
    """
    u, last = widen_together(delta, previous)
    return u, u - jnp.asarray(b1, last.dtype) * last, keep_finite(u, u, last)
