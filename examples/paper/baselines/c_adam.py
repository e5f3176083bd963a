"""Cautious Adam: the coordinates in which Adam and the gradient disagree stay where they are."""

import jax
import jax.numpy as jnp
import optax

from examples.paper.baselines.matrices import matrix_axes


def cautious(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    r"""Zeroes the coordinates of an update that oppose the gradient, and scales up the others.

    .. math::
        \phi = 1[u \odot g > 0], \qquad
        u \leftarrow \frac{u \odot \phi}{\max(\operatorname{mean}(\phi),\, 10^{-3})}

    with u the direction of `inner` (uphill, no learning rate) and the mean over each matrix.

    Args:
        inner: A direction, such as ``optax.scale_by_adam()``.

    Returns:
        A transformation with the state of `inner`.

    References:
        Liang et al., `Cautious Optimizers <https://arxiv.org/abs/2411.16085>`_, 2024.
    """
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates, state, params=None, **extra_args):
        direction, state = inner.update(updates, state, params, **extra_args)
        return jax.tree.map(_agreeing, direction, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _agreeing(u: jax.Array, g: jax.Array) -> jax.Array:
    phi = jnp.sign(u) * jnp.sign(g) > 0  # a product of the values themselves may underflow
    share = jnp.mean(phi, matrix_axes(u), dtype=jnp.float32, keepdims=True)
    return jnp.where(phi, u / jnp.maximum(share, 1e-3), 0).astype(u.dtype)


def scale_by_c_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of Cautious Adam; uphill, no learning rate.

    m > 0 where Adam's direction is, so masking that by its own sign is the paper's 1[m g > 0].

    Args:
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the root of the second moment.

    Returns:
        A transformation with Adam's state, whose ``mu`` `magma_optax.with_magma` can read.
    """
    return cautious(optax.scale_by_adam(b1, b2, eps))
