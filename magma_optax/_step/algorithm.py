"""Algorithm 1 of the paper: score, coin and masked update of every block.

    s~_t = sigmoid(cossim(mu_t, g_t) / tau)
    s_t  = 0.9 s_{t-1} + 0.1 s~_t
    m_t  ~ Bernoulli(p)
    Delta_t <- s_t m_t Delta_t

All is by the path of a leaf: ``mu``, ``g`` and ``delta`` hold arrays of the leaf's shape; ``s``,
``s_tilde``, ``m`` and ``p`` hold one number per block, in arrays of the cut's shape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from magma_optax._blocks.cutting import Cut
from magma_optax._blocks.mesh import sum_over_mesh, typed_like
from magma_optax._blocks.paths import NamedTree
from magma_optax._step.coins import uniforms
from magma_optax._step.numbers import inner, widen, widen_together
from magma_optax._step.options import Options
from magma_optax._step.state import MagmaState, next_step

Leaves = dict[str, jax.Array]
PerBlock = dict[str, jax.Array]
Sums = tuple[jax.Array, ...]


class Moments(NamedTuple):
    """What blocks are scored by: mu_t, g_t and mu_{t-1} of every masked leaf."""

    mu: Leaves
    g: Leaves
    previous_mu: Leaves


class Score(NamedTuple):
    """How the raw score s~_t of a block follows from mu_t, g_t and mu_{t-1}.

    It has two parts, so that the sums of all blocks cross a mesh in one collective. Magma's own,
    where nothing is complex::

        Score(
            products=lambda mu, g, previous_mu: (mu * g, mu * mu, g * g),
            of_sums=lambda sums, tau: jax.nn.sigmoid(cossim(sums) / tau),
        )

    Attributes:
      products: (mu, g, previous mu) -> arrays of their shape, which are summed over each block. The
        three are arrays of one shape and one dtype, float32 at least.
      of_sums: (sums, tau) -> s~, float32, of the shape of each sum: the block's. Where it is NaN
        the block keeps its score.
    """

    products: Callable[[jax.Array, jax.Array, jax.Array], Sums]
    of_sums: Callable[[Sums, jax.Array], jax.Array]


def _cosine_products(mu: jax.Array, g: jax.Array, previous_mu: jax.Array) -> Sums:
    del previous_mu
    return inner(mu, g), inner(mu, mu), inner(g, g)


def cossim(sums: Sums) -> jax.Array:
    """<mu, g> / (|mu| |g|) from the sums <mu, g>, <mu, mu> and <g, g>, without an epsilon.

    Returns:
      float32 in [-1, 1]: 0 where a vector is zero, NaN where a sum is not finite.
    """
    mu_g, mu_mu, g_g = sums
    # Two inverse roots: the product mu_mu * g_g would underflow for vectors of norm 1e-10.
    cosine = jnp.clip(mu_g * _inverse_root(mu_mu) * _inverse_root(g_g), -1.0, 1.0)
    return jnp.where(jnp.isfinite(mu_g + mu_mu + g_g), cosine, jnp.nan).astype(jnp.float32)


def _inverse_root(square: jax.Array) -> jax.Array:
    """1 / sqrt(square), and 0 at 0, where the derivative is 0 too."""
    positive = square > 0
    # Not rsqrt, whose derivative in JAX divides by the square: infinite from vectors of 5e-13 on.
    return jnp.where(positive, 1.0 / jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)


ALIGNMENT = Score(_cosine_products, lambda sums, tau: jax.nn.sigmoid(cossim(sums) / tau))


def masked_step(
    options: Options,
    state: MagmaState,
    scores: NamedTree,
    cuts: dict[str, Cut],
    directions: Callable[[PerBlock], NamedTree],
    moments: Moments | None = None,
) -> tuple[Any, PerBlock, MagmaState]:
    """Score every block, toss its coin, mask its update.

    Args:
      options: tau, p and the rest.
      state: the state after the step before.
      scores: its scores s_{t-1}, named.
      cuts: how each masked leaf is cut.
      directions: from the coins m_t to the updates of the base; where a block is dropped they may
        be anything.
      moments: mu and g; None for SkipUpdate, which scores nothing.

    Returns:
      The masked updates, the coins m_t, and the state after this step but for its momentum.
    """
    sums = block_sums(options, cuts, moments) if moments else {}
    s, m, factors = score_and_toss(options, state, scores.leaves, cuts, sums)
    delta = directions(m)

    def mask(path: str, x: jax.Array) -> jax.Array:
        return _mask(cuts[path], x, m[path], factors[path]) if path in cuts else x

    state = state._replace(step=next_step(state.step), alignment=scores.replace(s))
    return delta.map(mask), m, state


def block_sums(options: Options, cuts: dict[str, Cut], moments: Moments) -> dict[str, Sums]:
    """Sum the products of the score over every block, and over the devices that share it."""
    sums = {}
    for path, cut in cuts.items():
        wide = widen_together(*(leaves[path] for leaves in moments))
        products, shape = options.score.products(*wide), jnp.shape(wide[0])
        if not isinstance(products, tuple) or any(jnp.shape(x) != shape for x in products):
            raise ValueError(_PRODUCTS.format(path, shape, jax.tree.map(jnp.shape, products)))
        sums[path] = tuple(cut.sum(product) for product in products)
    return sum_over_mesh(sums, cuts, options.axis_name)


def score_and_toss(
    options: Options,
    state: MagmaState,
    before: PerBlock,
    cuts: dict[str, Cut],
    sums: dict[str, Sums],
) -> tuple[PerBlock, PerBlock, dict[str, jax.Array | None]]:
    """s_t, m_t and what a surviving update is multiplied by.

    A block keeps its score where s~_t is NaN: its gradient is not finite, or cosine and tau are 0.

    Returns:
      s_t (float32; empty without ``sums``), m_t (bool), and the factors (float32; None for none).
    """
    by_alignment = isinstance(options.survival_prob, str)
    fixed_p = None if by_alignment else options.at_step("survival_prob", state.step)
    tau = options.at_step("temperature", state.step)
    decay = options.at_step("score_decay", state.step)
    rest = 1 - decay
    s: PerBlock = {}
    p: dict[str, Any] = dict.fromkeys(cuts, fixed_p)
    for path in sums:
        s_tilde = options.score.of_sums(sums[path], tau)
        if jnp.shape(s_tilde) != cuts[path].shape:
            raise ValueError(_OF_SUMS.format(path, cuts[path].shape, jnp.shape(s_tilde)))
        s_tilde = typed_like(path, jnp.asarray(s_tilde, jnp.float32), before[path])
        known = jnp.isfinite(s_tilde)
        s[path] = jnp.where(known, decay * before[path] + rest * s_tilde, before[path])
        if by_alignment:
            p[path] = jnp.where(known, s_tilde, before[path])
    drawn = uniforms(state.key, state.step, cuts)
    m = {path: drawn[path] < p[path] for path in cuts}
    return s, m, {path: _factor(options, s.get(path), p[path]) for path in cuts}


def _factor(options: Options, s: jax.Array | None, p: Any) -> jax.Array | None:
    if options.rescale:
        return (s if options.damping else 1) / p
    return s if options.damping else None


def _mask(cut: Cut, delta: Any, m: jax.Array, factor: jax.Array | None) -> jax.Array:
    """M factor delta: exactly zero where m is, even if delta is not finite; of delta's dtype."""
    delta = jnp.asarray(delta)
    if factor is not None:
        wide = widen(delta)
        delta = (wide * cut.expand(factor).astype(wide.dtype)).astype(delta.dtype)
    return jnp.where(cut.expand(m), delta, jnp.zeros((), delta.dtype))


_PRODUCTS = (
    "score: products must return a tuple of arrays of the shape of mu, which are then summed over "
    "each block; for {!r}, of shape {}, it returned shapes {}"
)
_OF_SUMS = (
    "score: of_sums must return one number per block; for {!r}, whose blocks have shape {}, it "
    "returned shape {}"
)
