r"""Scores with a range: what scores a block by alignment without a sigmoid that flattens it.

On white noise, that is on gradients that are independent from step to step, mu_t and g_t of a large
block have the cosine

.. math:: c_0 = \sqrt{1 - \beta_1^2},

since mu_t contains g_t. Magma's sigmoid turns what cosines a language model has into scores within
0.003 of each other. The scores here are 1 on white noise, and powers of what differs from it.
They fit both doors of Magma: ``magma(score=...)`` and ``with_magma(score=...)``, with an
``initial_score`` of 1. A cosine with a zero vector is NaN, and the block keeps its score.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from examples.paper.baselines.matrices import Where
from magma_optax import Score, WithMagmaState, attention_and_mlp, control, with_magma


def noise_cosine(b1: float) -> float:
    """Returns the cosine of mu_t and g_t on white noise.

    Args:
        b1: Decay of mu.
    """
    return math.sqrt(1 - b1**2)


def aligned(b1: float = 0.9, power: float = 2.0) -> Score:
    r"""Scores a block by the cosine that Magma reads, over that of white noise.

    .. math:: \tilde s_t = \max(\cos(\mu_t, g_t), 0)^k \, / \, c_0^k

    At most :math:`c_0^{-k}`, where gradients don't change: 5.3 for k = 2 and b1 = 0.9.

    Args:
        b1: Decay of mu.
        power: k.
    """

    def of_sums(sums: tuple[jax.Array, ...], tau: jax.Array) -> jax.Array:
        del tau
        return (_positive(_cosine(sums)) / noise_cosine(b1)) ** power

    return Score(lambda mu, g, previous_mu: (mu * g, mu * mu, g * g), of_sums)


def previous(b1: float = 0.9, power: float = 2.0) -> Score:
    r"""Scores a block by the cosine with mu_{t-1}, which doesn't contain g_t: 0 on white noise.

    .. math:: \tilde s_t = \max(1 + k \, \beta_1^3 \cos(\mu_{t-1}, g_t) / c_0, 0)

    To first order in the cosine this is `aligned` of the same power: where :math:`|\mu_{t-1}|` is
    that of white noise, :math:`\cos(\mu_t, g_t)` is :math:`c_0 + \beta_1^3 \cos(\mu_{t-1}, g_t)`.
    A line, since an exponential reaches 28 where gradients don't change (k = 2, b1 = 0.9).

    Args:
        b1: Decay of mu.
        power: k.
    """

    def of_sums(sums: tuple[jax.Array, ...], tau: jax.Array) -> jax.Array:
        del tau
        return _positive(1 + power * b1**3 / noise_cosine(b1) * _cosine(sums))

    def products(mu: jax.Array, g: jax.Array, previous_mu: jax.Array) -> tuple[jax.Array, ...]:
        del mu
        return previous_mu * g, previous_mu * previous_mu, g * g

    return Score(products, of_sums)


def _cosine(sums: tuple[jax.Array, ...]) -> jax.Array:
    mu_g, mu_mu, g_g = sums
    # Two roots: the product of the squares would underflow for vectors of norm 1e-10.
    return (mu_g / jnp.sqrt(mu_mu) / jnp.sqrt(g_g)).astype(jnp.float32)


def _positive(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)  # passes NaN


def relative(
    inner: optax.GradientTransformation,
    *,
    score: Score,
    where: Where = attention_and_mlp,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Damps by the score over the mean score of all blocks, so that the mean multiplier is 1.

    .. math:: u^{(b)} \leftarrow \frac{s^{(b)}_t}{\operatorname{mean}_{b'} s^{(b')}_t} m_t u^{(b)}

    A run's gradients agree more at its beginning, in all blocks alike. Dividing by the mean leaves
    what tells blocks apart.

    Args:
        inner: The base.
        score: What is averaged into a block's score.
        where: ``(path, leaf) -> bool``; other leaves pass bit for bit.
        **options: Of `magma_optax.with_magma`.

    Returns:
        The wrapped base, with the state of `magma_optax.with_magma`.
    """
    wrapped = with_magma(inner, where=where, score=score, **options)

    def update_fn(
        updates: optax.Updates,
        state: WithMagmaState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ):
        updates, state = wrapped.update(updates, state, params, **extra_args)
        shrink = control(1 / _mean(state.magma.alignment), where=where)
        updates, _ = shrink.update(updates, optax.EmptyState(), params)
        return updates, state

    return optax.GradientTransformationExtraArgs(wrapped.init, update_fn)


def _mean(scores: Any) -> ArrayLike:
    """The mean over the blocks of all leaves."""
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(scores)]
    return jnp.mean(jnp.concatenate(leaves))
