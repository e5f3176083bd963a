"""APOLLO: Adam's step sizes, one per channel, from a random low-rank sketch.

rollfast has an APOLLO for JAX, but with other defaults and for Python 3.12 and later only.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.kit.checks import check_count, check_decay, check_positive
from examples.paper.baselines.matrices import check_matrices, zero_per_matrix


class ApolloState(NamedTuple):
    """State of `scale_by_apollo`; for a matrix of m x n, m <= n, or its transpose."""

    count: jax.Array  # shape=(), dtype=int32
    mu: optax.Updates  # EMA of R = P^T G; (r, n), dtype=float32
    nu: optax.Updates  # EMA of R^2; (r, n), dtype=float32
    norm: optax.Updates  # norm of the last scaled gradient; (1, 1), dtype=float32; 0 before it


def scale_by_apollo(
    rank: int | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    *,
    alpha: float = 1.0,
    interval: int = 200,
    growth: float = 1.01,
    seed: int = 0,
) -> optax.GradientTransformation:
    r"""The direction of APOLLO; uphill, no learning rate (the paper's is 0.01).

    .. math::
        R_t = P^\top G_t, \qquad P_{ij} \sim N(0, 1/r), \qquad
        \tilde R_t = \frac{M_t}{\sqrt{V_t} + \epsilon}, \qquad
        s_j = \frac{\|\tilde R_{:,j}\|}{\|R_{:,j}\| + 10^{-8}}, \qquad
        u_t = \alpha \operatorname{limit}(G_t \operatorname{diag}(s))

    M and V are the moments of R. P shrinks the smaller side of G (of a square matrix the first,
    which is the inputs of a flax kernel: the channels are then outputs, as in the paper) and is
    drawn anew every `interval` steps, while the moments go on. The limiter keeps the norm from
    growing by more than `growth` a step. As in the authors' code, Adam's bias correction comes
    after the limiter, so that the shrinking correction does not count as growth. After a gradient
    of exactly zero the limiter lets the next one pass.

    For matrices only: see `matrices.on_matrices`.

    Args:
        rank: r, at most the smaller side; None for a quarter of that.
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        alpha: Factor of the direction.
        interval: Steps for which P is kept.
        growth: Largest ratio of successive norms.
        seed: Seed of P.

    Returns:
        The transformation.

    Raises:
        ValueError: For numbers out of range, here; in ``init`` for leaves that are no matrices and
            for a `rank` above the smaller side.

    References:
        Zhu et al., `APOLLO <https://arxiv.org/abs/2412.05270>`_, 2024.
    """
    if rank is not None:
        check_count("rank", rank)
    check_decay("b1", b1)
    check_decay("b2", b2)
    check_positive("alpha", alpha)
    check_count("interval", interval)
    check_positive("growth", growth)

    def init_fn(params):
        check_matrices("scale_by_apollo", params)
        for leaf in jax.tree.leaves(params):
            if rank is not None and rank > min(leaf.shape[-2:]):
                raise ValueError(f"rank {rank} exceeds the smaller side of a matrix {leaf.shape}")

        def moment(x):
            *batch, _, n = _wide(x).shape
            return jnp.zeros((*batch, _rank(x, rank), n), jnp.float32)

        return ApolloState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(moment, params),
            nu=jax.tree.map(moment, params),
            norm=jax.tree.map(zero_per_matrix, params),
        )

    def update_fn(updates, state, params=None):
        del params
        t = optax.safe_increment(state.count)
        P = projections(updates, rank, seed, state.count // interval)
        G = jax.tree.map(lambda g: _wide(g).astype(jnp.float32), updates)
        R = jax.tree.map(lambda p, g: jnp.swapaxes(p, -1, -2) @ g, P, G)
        mu = optax.tree.update_moment(R, state.mu, b1, 1)
        nu = optax.tree.update_moment(R, state.nu, b2, 2)

        def scale(g, r, m, v):
            adam = m / (jnp.sqrt(v) + eps)
            return g * (_norm(adam, -2) / (_norm(r, -2) + 1e-8))

        scaled = jax.tree.map(scale, G, R, mu, nu)
        norm = jax.tree.map(lambda x: _norm(x, (-2, -1)), scaled)
        excess = jax.tree.map(
            lambda new, old: jnp.where(
                old > 0, jnp.maximum(new / (old + 1e-8), growth) / growth, 1.0
            ),
            norm,
            state.norm,
        )
        correction = alpha * jnp.sqrt(1 - b2**t) / (1 - b1**t)
        directions = jax.tree.map(
            lambda g, u, x: (correction * _wide(u / x, like=g)).astype(g.dtype),
            updates,
            scaled,
            excess,
        )
        norm = jax.tree.map(lambda n, x: n / x, norm, excess)
        return directions, ApolloState(t, mu, nu, norm)

    return optax.GradientTransformation(init_fn, update_fn)


def projections(tree: optax.Updates, rank: int | None, seed: int, period: jax.Array):
    """P of every matrix for one period of `interval` steps, (m, r) with m the smaller side.

    A function of the seed, so that P needs no room in the state.
    """
    key = jax.random.fold_in(jax.random.key(seed), period)

    def draw(key, x):
        *batch, m, _ = _wide(x).shape
        r = _rank(x, rank)
        return jax.random.normal(key, (*batch, m, r), jnp.float32) / math.sqrt(r)

    return jax.tree.map(draw, optax.tree.split_key_like(key, tree), tree)


def _rank(x: jax.Array, rank: int | None) -> int:
    return max(1, min(x.shape[-2:]) // 4) if rank is None else rank


def _wide(x: jax.Array, like: jax.Array | None = None) -> jax.Array:
    """The matrix itself where `like` (x itself by default) is wide or square, else transposed."""
    rows, columns = (x if like is None else like).shape[-2:]
    return x if rows <= columns else jnp.swapaxes(x, -1, -2)


def _norm(x: jax.Array, axes: int | tuple[int, int]) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x, axes, keepdims=True))
