"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

The SOAP_JAX package is no substitute: its second moment moves on every tenth step only.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.kit.checks import check_count, check_decay

_matmul = functools.partial(jnp.matmul, precision="highest")  # bases must stay orthogonal


class SoapState(NamedTuple):
    """State of `scale_by_soap`; for a matrix of m x n, all float32.

    A side that is not preconditioned has arrays of shape (0, 0).
    """

    count: jax.Array  # shape=(), dtype=int32
    mu: optax.Updates  # EMA of G; (m, n)
    nu: optax.Updates  # EMA of the square of the rotated G; (m, n)
    left: optax.Updates  # L, EMA of G G^T; (m, m)
    right: optax.Updates  # R, EMA of G^T G; (n, n)
    left_basis: optax.Updates  # Q_L, eigenvectors of L; (m, m)
    right_basis: optax.Updates  # Q_R, eigenvectors of R; (n, n)


def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    shampoo_decay: float = 0.95,
    interval: int = 10,
    largest_side: int = 10_000,
) -> optax.GradientTransformation:
    r"""The direction of SOAP; uphill, no learning rate.

    .. math::
        G' = Q_L^\top G\, Q_R, \qquad M = b_1 M + (1 - b_1) G, \qquad
        V = b_2 V + (1 - b_2) G'^2, \qquad
        u = Q_L \frac{Q_L^\top \hat M Q_R}{\sqrt{\hat V} + \epsilon} Q_R^\top

        L \leftarrow b\, L + (1 - b)\, G G^\top, \qquad
        R \leftarrow b\, R + (1 - b)\, G^\top G

    The first gradient gives L, R and, by eigendecomposition, Q_L and Q_R; its update is zero and
    it enters no moment, so that no gradient is rotated by a basis that it helped to make. On every
    `interval`-th step after it, and after the update, the bases take one step of the power method:
    columns by descending Q^T L Q, then the orthogonal factor of L Q; V's rows and columns move
    with them. Sides above `largest_side` are not preconditioned, and vectors by neither side: that
    is Adam.

    Args:
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        shampoo_decay: b, the decay rate of L and R.
        interval: Steps between changes of the bases.
        largest_side: Longer sides keep the identity for a basis.

    Returns:
        The transformation.

    Raises:
        ValueError: For numbers out of range.

    References:
        Vyas et al., `SOAP <https://arxiv.org/abs/2409.11321>`_, 2024.
    """
    for name, value in {"b1": b1, "b2": b2, "shampoo_decay": shampoo_decay}.items():
        check_decay(name, value)
    check_count("interval", interval)
    check_count("largest_side", largest_side)
    b = shampoo_decay

    def square(axis):
        def zeros(x):
            if x.ndim < 2 or x.shape[axis] > largest_side:
                return jnp.zeros((0, 0), jnp.float32)
            return jnp.zeros((*x.shape[:-2], x.shape[axis], x.shape[axis]), jnp.float32)

        return zeros

    def init_fn(params):
        return SoapState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=jnp.float32),
            left=jax.tree.map(square(-2), params),
            right=jax.tree.map(square(-1), params),
            left_basis=jax.tree.map(square(-2), params),
            right_basis=jax.tree.map(square(-1), params),
        )

    def update_fn(updates, state, params=None):
        del params
        first, t = state.count == 0, jnp.maximum(state.count, 1)
        G = optax.tree.cast(updates, jnp.float32)
        QL, QR = state.left_basis, state.right_basis

        mu = optax.tree.where(first, state.mu, optax.tree.update_moment(G, state.mu, b1, 1))
        rotated = jax.tree.map(_rotate, G, QL, QR)
        nu = optax.tree.where(first, state.nu, optax.tree.update_moment(rotated, state.nu, b2, 2))
        m_hat = optax.tree.bias_correction(mu, b1, t)
        v_hat = optax.tree.bias_correction(nu, b2, t)

        def direction(g, m, v, ql, qr):
            adam = _rotate(m, ql, qr) / (jnp.sqrt(v) + eps)
            return jnp.where(first, 0, _rotate(adam, _t(ql), _t(qr))).astype(g.dtype)

        directions = jax.tree.map(direction, updates, m_hat, v_hat, QL, QR)

        def left_gram(old, g):
            return b * old + (1 - b) * _matmul(g, _t(g)) if old.size else old

        def right_gram(old, g):
            return b * old + (1 - b) * _matmul(_t(g), g) if old.size else old

        L = jax.tree.map(left_gram, state.left, G)
        R = jax.tree.map(right_gram, state.right, G)

        def eigenvectors():
            return jax.tree.map(_eigenvectors, L), jax.tree.map(_eigenvectors, R), nu

        def power_step():
            rows, columns = jax.tree.map(_order, L, QL), jax.tree.map(_order, R, QR)
            left_basis = jax.tree.map(_power_step, L, QL, rows)
            right_basis = jax.tree.map(_power_step, R, QR, columns)
            return left_basis, right_basis, jax.tree.map(_permute, nu, rows, columns)

        now = jnp.where(first, 0, jnp.where(state.count % interval == 0, 1, 2))
        QL, QR, nu = jax.lax.switch(now, [eigenvectors, power_step, lambda: (QL, QR, nu)])
        count = optax.safe_increment(state.count)
        return directions, SoapState(count, mu, nu, L, R, QL, QR)

    return optax.GradientTransformation(init_fn, update_fn)


def _t(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _rotate(x: jax.Array, ql: jax.Array, qr: jax.Array) -> jax.Array:
    """Q_L^T X Q_R; a side without a basis stays."""
    x = _matmul(_t(ql), x) if ql.size else x
    return _matmul(x, qr) if qr.size else x


def _eigenvectors(gram: jax.Array) -> jax.Array:
    """In descending order of the eigenvalues."""
    return jnp.linalg.eigh(gram)[1][..., ::-1] if gram.size else gram


def _order(gram: jax.Array, q: jax.Array) -> jax.Array:
    """Columns of q by descending q^T gram q."""
    return jnp.argsort(jnp.sum(q * _matmul(gram, q), -2), axis=-1, descending=True)


def _power_step(gram: jax.Array, q: jax.Array, order: jax.Array) -> jax.Array:
    if not gram.size:
        return q
    columns = jnp.take_along_axis(_matmul(gram, q), order[..., None, :], -1)
    return jnp.linalg.qr(columns)[0]


def _permute(v: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    v = jnp.take_along_axis(v, rows[..., :, None], -2) if rows.size else v
    return jnp.take_along_axis(v, columns[..., None, :], -1) if columns.size else v
