"""Controls: Magma's parts one at a time, and constants in the place of its mean multiplier.

Magma multiplies the attention and MLP updates by about s p on average (0.55 x 0.5), and leaves
embeddings, head and norms at the full rate. Each control keeps one part of that:

=========================================  ===============  =====  =======
control                                    mean multiplier  coins  damping
=========================================  ===============  =====  =======
``magma_optax.control(0.277)``             s p              no     no
``constant_times_mask(0.554, 0.5)``        s p              yes    no
``damping_only(inner)``                    s                no     yes
``damping_only(inner, c=0.5)``             s p              no     yes
=========================================  ===============  =====  =======

All of them may stand anywhere after the base, before or after the learning rate.
"""

from typing import Any

import optax
from jax.typing import ArrayLike

from examples.paper.baselines.matrices import Where
from magma_optax import attention_and_mlp, control, skip_update, with_magma


def constant_times_mask(
    c: ArrayLike,
    survival_prob: ArrayLike = 0.5,
    where: Where = attention_and_mlp,
    *,
    key: ArrayLike = 0,
    blocks: Any = "leaf",
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies the updates of the selected leaves by a constant and a coin.

    .. math:: u \leftarrow c\, m_t u, \qquad m_t \sim \operatorname{Bernoulli}(p)

    The coins are Magma's for the same key. There is no 1 / p, so the mean multiplier is c p.

    Args:
        c: The constant.
        survival_prob: p, a number in (0, 1].
        where: ``(path, leaf) -> bool``; other leaves pass bit for bit.
        key: Seed of the coins.
        blocks: What shares a coin, as in `magma_optax.skip_update`.

    Returns:
        A link of a chain.

    Raises:
        ValueError: As `magma_optax.skip_update`.
    """
    masked = skip_update(survival_prob, where=where, key=key, blocks=blocks)
    return optax.chain(masked, control(c * survival_prob, where=where))  # skip_update divides by p


def damping_only(
    inner: optax.GradientTransformation,
    temperature: ArrayLike = 2.0,
    where: Where = attention_and_mlp,
    *,
    c: ArrayLike = 1.0,
    blocks: Any = "leaf",
) -> optax.GradientTransformationExtraArgs:
    r"""Magma without coins: the updates of the selected leaves times c s_t.

    .. math:: u \leftarrow c\, s_t u, \qquad s_t = 0.9\, s_{t-1} + 0.1\, \tilde s_t

    ``c = 1`` is damping alone, `magma_optax.with_magma` with a survival probability of 1; its
    multiplier is 1 / p times Magma's mean. ``c = p`` has Magma's mean multiplier, coins apart.

    Args:
        inner: The base, a direction or with its learning rate.
        temperature: Magma's tau.
        where: ``(path, leaf) -> bool``; other leaves pass bit for bit.
        c: The constant.
        blocks: What shares a score, as in `magma_optax.with_magma`.

    Returns:
        The wrapped base.

    Raises:
        ValueError: As `magma_optax.with_magma`.
    """
    damped = with_magma(inner, 1.0, temperature, where=where, blocks=blocks)
    return optax.chain(damped, control(c, where=where))
