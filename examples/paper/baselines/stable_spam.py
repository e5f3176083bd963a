"""Stable-SPAM: Adam on gradients without spikes, restarted at intervals."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.kit.checks import check_count, check_decay
from examples.paper.baselines.matrices import matrix_axes, zero_per_matrix


class ClipState(NamedTuple):
    """State of `adaptive_clip`."""

    count: jax.Array  # shape=(), dtype=int32
    largest: optax.Updates  # EMA of max |g|; one float32 a matrix, broadcasts against the leaf


def adaptive_clip(gamma: float = 0.999) -> optax.GradientTransformation:
    r"""AdaClip: scales the elements above a running threshold so that the largest meets it.

    .. math::
        T_t = \gamma T_{t-1} + (1 - \gamma) \max |g_t|, \qquad
        g_i \leftarrow \frac{g_i}{\max |g_t|} \hat T_t \text{ where } |g_i| > \hat T_t,
        \qquad \hat T_t = \frac{T_t}{1 - \gamma^t}

    Args:
        gamma: Decay rate of the threshold.

    Returns:
        A link before the optimizer.
    """
    check_decay("gamma", gamma)

    def init_fn(params):
        return ClipState(jnp.zeros([], jnp.int32), jax.tree.map(zero_per_matrix, params))

    def update_fn(updates, state, params=None):
        del params
        t = optax.safe_increment(state.count)
        g_max = jax.tree.map(
            lambda g: jnp.max(jnp.abs(g), matrix_axes(g), keepdims=True).astype(jnp.float32),
            updates,
        )
        largest = optax.tree.update_moment(g_max, state.largest, gamma, 1)
        threshold = optax.tree.bias_correction(largest, gamma, t)

        def clip(g, g_max, threshold):
            spike = jnp.abs(g) > threshold
            return jnp.where(spike, g * (threshold / g_max), g).astype(g.dtype)

        return jax.tree.map(clip, updates, g_max, threshold), ClipState(t, largest)

    return optax.GradientTransformation(init_fn, update_fn)


class NormState(NamedTuple):
    """State of `adaptive_norm`."""

    count: jax.Array  # shape=(), dtype=int32
    norm: optax.Updates  # EMA of ||g||; one float32 a matrix, broadcasts against the leaf
    norm_squared: optax.Updates  # EMA of ||g||^2; likewise


def adaptive_norm(
    gamma1: float = 0.7, gamma2: float = 0.9, eps: float = 1e-8
) -> optax.GradientTransformation:
    r"""AdaGN: gives each gradient a norm that is a ratio of moments of past norms.

    .. math::
        m_t = \gamma_1 m_{t-1} + (1 - \gamma_1) \|g_t\|, \qquad
        v_t = \gamma_2 v_{t-1} + (1 - \gamma_2) \|g_t\|^2, \qquad
        g \leftarrow \frac{g}{\|g\|} \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon}

    A gradient of zero stays zero.

    Args:
        gamma1: Decay rate of the norm.
        gamma2: Decay rate of its square.
        eps: Added to the root.

    Returns:
        A link before the optimizer.
    """
    check_decay("gamma1", gamma1)
    check_decay("gamma2", gamma2)

    def init_fn(params):
        return NormState(
            count=jnp.zeros([], jnp.int32),
            norm=jax.tree.map(zero_per_matrix, params),
            norm_squared=jax.tree.map(zero_per_matrix, params),
        )

    def update_fn(updates, state, params=None):
        del params
        t = optax.safe_increment(state.count)
        norms = jax.tree.map(
            lambda g: jnp.sqrt(
                jnp.sum(jnp.square(g.astype(jnp.float32)), matrix_axes(g), keepdims=True)
            ),
            updates,
        )
        m = optax.tree.update_moment(norms, state.norm, gamma1, 1)
        v = optax.tree.update_moment(norms, state.norm_squared, gamma2, 2)
        m_hat = optax.tree.bias_correction(m, gamma1, t)
        v_hat = optax.tree.bias_correction(v, gamma2, t)

        def rescale(g, norm, m_hat, v_hat):
            target = m_hat / (jnp.sqrt(v_hat) + eps)
            return (g * jnp.where(norm > 0, target / norm, 0)).astype(g.dtype)

        return jax.tree.map(rescale, updates, norms, m_hat, v_hat), NormState(t, m, v)

    return optax.GradientTransformation(init_fn, update_fn)


class RestartState(NamedTuple):
    """State of `restart_every`."""

    count: jax.Array  # shape=(), dtype=int32
    inner_state: Any


def restart_every(
    inner: optax.GradientTransformation, interval: int
) -> optax.GradientTransformation:
    """Gives `inner` a fresh state before steps `interval`, 2 `interval`, ... (from 1).

    Args:
        inner: What starts anew, its bias correction included.
        interval: Steps from one restart to the next.

    Returns:
        The wrapped transformation.

    Raises:
        ValueError: For an `interval` below 2, which would leave no moments.
    """
    check_count("interval", interval, least=2)

    def init_fn(params):
        return RestartState(jnp.zeros([], jnp.int32), inner.init(params))

    def update_fn(updates, state, params=None):
        t = optax.safe_increment(state.count)
        fresh = inner.init(updates if params is None else params)
        inner_state = optax.tree.where(t % interval == 0, fresh, state.inner_state)
        updates, inner_state = inner.update(updates, inner_state, params)
        return updates, RestartState(t, inner_state)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_stable_spam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    gamma1: float = 0.7,
    gamma2: float = 0.9,
    gamma3: float = 0.999,
    interval: int = 1000,
) -> optax.GradientTransformation:
    r"""The direction of Stable-SPAM; uphill, no learning rate.

    .. math:: g \to \operatorname{AdaClip} \to \operatorname{AdaGN} \to \operatorname{Adam}

    with Adam restarted every `interval` steps; the statistics of clip and norm go on. Applies to
    every parameter.

    Args:
        b1: Decay rate of Adam's first moment.
        b2: Decay rate of Adam's second moment.
        eps: Added to the roots of Adam and AdaGN.
        gamma1: Decay rate of the norm.
        gamma2: Decay rate of the norm's square.
        gamma3: Decay rate of the largest element.
        interval: Steps between restarts (the paper's Delta T).

    Returns:
        The chain.

    Raises:
        ValueError: For decay rates outside [0, 1) and an `interval` below 2.

    References:
        Huang et al., `Stable-SPAM <https://arxiv.org/abs/2502.17055>`_, 2025.
    """
    return optax.chain(
        adaptive_clip(gamma3),
        adaptive_norm(gamma1, gamma2, eps),
        restart_every(optax.scale_by_adam(b1, b2, eps), interval),
    )
