"""SGG: learning rates scaled by cluster of the momentum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.kit.checks import check_count, check_decay
from examples.paper.baselines.matrices import flat_matrices

LLOYD_STEPS = 10


class SggState(NamedTuple):
    """State of `sgg`."""

    count: jax.Array  # shape=(), dtype=int32
    labels: optax.Updates  # cluster of each element; like the parameters, dtype=int8
    scale: optax.Updates  # S of each cluster; (matrices, K), dtype=float32
    inner_state: Any


def adam_momentum(inner_state: Any) -> optax.Updates:
    """The one ``mu`` in an optimizer's state.

    Raises:
        ValueError: If there is none, or more than one.
    """
    found = optax.tree.get_all_with_path(inner_state, "mu")
    if len(found) != 1:
        raise ValueError(f"the base keeps {len(found)} moments called mu, not 1: give `momentum`")
    return found[0][1]


def sgg(
    inner: optax.GradientTransformation,
    clusters: int = 3,
    *,
    interval: int = 500,
    decay: float = 0.99,
    low: float = 0.1,
    high: float = 10.0,
    momentum: Callable[[Any], optax.Updates] = adam_momentum,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each element of an update by a factor of its cluster.

    On steps T, 2T, ... the elements of each matrix are clustered by momentum m (1-D k-means), and

    .. math::
        D_{lc} = \operatorname*{median}_{i \in c} |m_i - \bar m_l|, \qquad
        D = \operatorname*{median}_{l, i} |m_i - \bar m_l|, \qquad
        S_{lc} \leftarrow \operatorname{clip}\Bigl(
            \lambda S_{lc} + (1 - \lambda) \frac{D}{D_{lc} + 10^{-8}},\; 0.1,\; 10 \Bigr)

    Elements keep their cluster until the next clustering, and S starts at 1. Clusters are in the
    order of their centres, so that S goes on from one clustering to the next. The paper clusters
    by mini-batch k-means, which is random; here Lloyd's algorithm starts at equal distances within
    one standard deviation of the mean. An empty cluster keeps its S. A median of an even number is
    the lower of the middle two, as torch's. D is read as a median over elements, not over the
    clusters of all layers.

    D is over the leaves that the link sees: inside `matrices.on_matrices`, the matrices.

    Args:
        inner: A direction that keeps a momentum of the shape of the parameters.
        clusters: K.
        interval: T.
        decay: lambda.
        low: Least S.
        high: Largest S.
        momentum: From the new state of `inner` to its momentum.

    Returns:
        The wrapped direction; uphill if `inner` is.

    Raises:
        ValueError: For numbers out of range, here; in ``update`` for a momentum that is not shaped
            like the parameters.

    References:
        Li et al., `Taming LLMs by Scaling Learning Rates with Gradient Grouping
        <https://arxiv.org/abs/2506.01049>`_, 2025.
    """
    check_count("clusters", clusters, least=2)
    check_count("interval", interval)
    check_decay("decay", decay)
    if not 0 < low <= 1 <= high:
        raise ValueError(f"low and high must lie around 1, got {low!r} and {high!r}")
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        return SggState(
            count=jnp.zeros([], jnp.int32),
            labels=optax.tree.zeros_like(params, dtype=jnp.int8),
            scale=jax.tree.map(
                lambda p: jnp.ones((flat_matrices(p).shape[0], clusters), jnp.float32), params
            ),
            inner_state=inner.init(params),
        )

    def regroup(m, scale):
        """New labels and S, for lists of (matrices, elements)."""
        labels = [k_means(x, clusters) for x in m]
        deviations = [jnp.abs(x - jnp.mean(x, -1, keepdims=True)) for x in m]
        everywhere = [jnp.ones(d.shape, bool) for d in deviations]
        D, _ = lower_median(deviations, everywhere)
        S = []
        for d, label, old in zip(deviations, labels, scale, strict=True):
            columns = []
            for c in range(clusters):
                D_lc, n = jax.vmap(lambda d, inside: lower_median([d], [inside]))(d, label == c)
                new = decay * old[:, c] + (1 - decay) * D / (D_lc + 1e-8)
                columns.append(jnp.where(n > 0, jnp.clip(new, low, high), old[:, c]))
            S.append(jnp.stack(columns, -1))
        return labels, S

    def update_fn(updates, state, params=None, **extra_args):
        t = optax.safe_increment(state.count)
        directions, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        u, structure = jax.tree.flatten(directions)
        m = jax.tree.leaves(momentum(inner_state))
        if [x.shape for x in m] != [x.shape for x in u]:
            raise ValueError(
                f"the momentum has shapes {[x.shape for x in m]}, the updates "
                f"{[x.shape for x in u]}"
            )
        m = [flat_matrices(x).astype(jnp.float32) for x in m]
        labels = [flat_matrices(x) for x in jax.tree.leaves(state.labels)]
        scale = jax.tree.leaves(state.scale)
        labels, scale = jax.lax.cond(
            t % interval == 0, lambda: regroup(m, scale), lambda: (labels, scale)
        )
        u = [
            (x * jnp.take_along_axis(s, label.astype(jnp.int32), -1).reshape(x.shape)).astype(
                x.dtype
            )
            for x, s, label in zip(u, scale, labels, strict=True)
        ]
        labels = [label.reshape(x.shape) for label, x in zip(labels, u, strict=True)]
        state = SggState(t, structure.unflatten(labels), structure.unflatten(scale), inner_state)
        return structure.unflatten(u), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def k_means(x: jax.Array, clusters: int) -> jax.Array:
    """Clusters of the numbers of each row, by Lloyd's algorithm.

    Args:
        x: Numbers, shape (rows, n).
        clusters: K.

    Returns:
        For each number 0 to K - 1, ascending with the centres; int8, shape (rows, n).
    """
    spread = jnp.linspace(-1.0, 1.0, clusters, dtype=jnp.float32)[None, :]
    centres = jnp.mean(x, -1, keepdims=True) + jnp.std(x, -1, keepdims=True) * spread

    def nearest(centres):
        """In one dimension the nearest centre is the number of midpoints below."""
        midpoints = (centres[:, 1:] + centres[:, :-1]) / 2
        return sum((x > midpoints[:, c, None]).astype(jnp.int8) for c in range(clusters - 1))

    def lloyd(_, centres):
        labels = nearest(centres)
        inside = [labels == c for c in range(clusters)]
        n = jnp.stack([jnp.sum(i, -1) for i in inside], -1)
        total = jnp.stack([jnp.sum(jnp.where(i, x, 0), -1) for i in inside], -1)
        return jnp.where(n > 0, total / jnp.maximum(n, 1), centres)

    return nearest(jax.lax.fori_loop(0, LLOYD_STEPS, lloyd, centres))


def lower_median(arrays: list[jax.Array], inside: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Median of non-negative float32 numbers, exact and without sorting or joining arrays.

    Bit patterns of non-negative floats are in the order of the floats, so the median is found bit
    by bit: the largest pattern that no more than half of the numbers are below.

    Args:
        arrays: The numbers.
        inside: Which of them count.

    Returns:
        The median (0 of none) and how many numbers count.
    """
    patterns = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays]
    n = sum(jnp.sum(i) for i in inside)

    def try_bit(place, found):
        candidate = found | jnp.left_shift(jnp.int32(1), 30 - place)
        below = sum(
            jnp.sum((pattern < candidate) & i) for pattern, i in zip(patterns, inside, strict=True)
        )
        return jnp.where(below <= (n - 1) // 2, candidate, found)

    found = jax.lax.fori_loop(0, 31, try_bit, jnp.int32(0))
    return jax.lax.bitcast_convert_type(found, jnp.float32), n
