"""MGUP: larger steps for the coordinates that agree most with the gradient, small ones else."""

import math

import jax
import jax.numpy as jnp
import optax

from examples.kit.checks import check_positive, check_probability
from examples.paper.baselines.matrices import flat_matrices


def mgup(
    inner: optax.GradientTransformation, tau: float = 0.5, gamma: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each coordinate of an update by its rank in agreement with the gradient.

    .. math::
        u \leftarrow \phi \odot u, \qquad \phi_i = \begin{cases}
            1 / \tau & i \text{ among the } \lfloor \tau d \rfloor
                       \text{ largest of } u \odot g \\
            \gamma & \text{otherwise}
        \end{cases}

    with u the direction of `inner` (uphill, no learning rate) and d the elements of one matrix.
    Among equals the first in memory win. The paper's theory has gamma = tau; its code's advice is
    0.1 to 0.5.

    Args:
        inner: A direction, such as ``optax.scale_by_adam()``.
        tau: Share of the coordinates that get 1 / tau; a Python number.
        gamma: Factor of the others.

    Returns:
        A transformation with the state of `inner`.

    Raises:
        ValueError: For `tau` outside (0, 1] and `gamma` of 0 or less.

    References:
        Chang and Yuan, `MGUP: A Momentum-Gradient Alignment Update Policy`, NeurIPS 2025.
    """
    check_probability("tau", tau)
    check_positive("gamma", gamma)
    inner = optax.with_extra_args_support(inner)

    def scale(u: jax.Array, g: jax.Array) -> jax.Array:
        agreement = flat_matrices(u.astype(jnp.float32) * g.astype(jnp.float32))
        order = jnp.argsort(agreement, axis=-1, descending=True)
        rank = jnp.argsort(order, axis=-1).reshape(u.shape)
        phi = jnp.where(rank < math.floor(tau * agreement.shape[-1]), 1 / tau, gamma)
        return (phi * u).astype(u.dtype)

    def update_fn(updates, state, params=None, **extra_args):
        direction, state = inner.update(updates, state, params, **extra_args)
        return jax.tree.map(scale, direction, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
