"""LaProp: normalise by the second moment first, then average."""

import optax

from examples.llama.optimizers import rms


def scale_by_laprop(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-15
) -> optax.GradientTransformation:
    r"""The direction of LaProp; uphill, no learning rate.

    .. math::
        v_t = b_2 v_{t-1} + (1 - b_2) g_t^2, \qquad
        m_t = b_1 m_{t-1} + (1 - b_1) \frac{g_t}{\sqrt{v_t / (1 - b_2^t)} + \epsilon}, \qquad
        u_t = \frac{m_t}{1 - b_1^t}

    Two links of optax are all of it. The paper multiplies by the learning rate inside the average,
    which differs from this only while the rate changes.

    The average is one of normalised gradients: `magma_optax.with_magma` keeps its own mu, of raw
    ones.

    Args:
        b1: Decay rate of the average.
        b2: Decay rate of the second moment.
        eps: Added to the root of the second moment.

    Returns:
        The chain.

    References:
        Ziyin et al., `LaProp <https://arxiv.org/abs/2002.04839>`_, 2020.
    """
    return optax.chain(rms(b2, eps), optax.ema(b1))
