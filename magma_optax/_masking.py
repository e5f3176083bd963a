"""The step of Algorithm 1: scores, coins, and the masked update."""

from typing import Any

import jax
import jax.numpy as jnp

from magma_optax._alignment import widen
from magma_optax._blocks import Blocks
from magma_optax._coins import uniforms
from magma_optax._hyperparameters import Hyperparameters, at_step
from magma_optax._mesh import typed_like
from magma_optax._paths import map_by_path
from magma_optax._state import MagmaState, scores_by_path

PerBlock = dict[str, jax.Array]


def score_and_toss(
    hp: Hyperparameters,
    state: MagmaState,
    blocks: dict[str, Blocks],
    cosines: PerBlock,
) -> tuple[PerBlock, PerBlock, dict[str, jax.Array | None]]:
    """Algorithm 1 up to the multiplication, for every block.

        s~_t = sigmoid(cossim(mu_t, g_t) / tau)
        s_t  = 0.9 s_{t-1} + 0.1 s~_t
        m_t  ~ Bernoulli(p)

    A block keeps its score where s~_t is NaN: its gradient is not finite, or cosine and tau are 0.

    Returns:
      s_t (float32), m_t (bool) and the factor of a surviving update (float32; s_t with damping,
      over p if rescaled; None for neither), each by path.
    """
    tau = at_step("temperature", hp.temperature, state.step)
    decay = at_step("score_decay", hp.score_decay, state.step)
    rest = 1 - decay
    scores, probabilities, before = {}, {}, scores_by_path(state)
    for path, cosine in cosines.items():
        previous = before[path]
        cosine = typed_like(path, cosine, previous)
        alignment = jax.nn.sigmoid(cosine / tau)
        finite = jnp.isfinite(alignment)
        scores[path] = jnp.where(finite, decay * previous + rest * alignment, previous)
        if isinstance(hp.survival_prob, str):
            probabilities[path] = jnp.where(finite, alignment, previous)
    if not isinstance(hp.survival_prob, str):
        p = at_step("survival_prob", hp.survival_prob, state.step)
        probabilities = dict.fromkeys(blocks, p)

    coins = toss(state, blocks, probabilities)
    return scores, coins, {path: _factor(hp, scores[path], probabilities[path]) for path in blocks}


def _factor(hp: Hyperparameters, score: jax.Array, probability: jax.Array) -> jax.Array | None:
    if not hp.rescale:
        return score if hp.damping else None
    return (score if hp.damping else 1) / probability


def toss(state: MagmaState, blocks: dict[str, Blocks], probabilities: PerBlock) -> PerBlock:
    """m_t ~ Bernoulli(p) for every block; bool, by path."""
    drawn = uniforms(state.key, state.step, blocks)
    return {path: drawn[path] < probabilities[path] for path in blocks}


def mask_updates(
    updates: Any,
    blocks: dict[str, Blocks],
    coins: PerBlock,
    factors: dict[str, jax.Array | None],
) -> Any:
    """Delta <- m factor Delta for every block; other leaves are returned as they are.

    A dropped block is exactly zero, even where its update is not finite. Dtypes stay, and without
    a factor so do the bits of a surviving block.
    """

    def mask(path: str, delta: jax.Array) -> jax.Array:
        if path not in blocks:
            return delta
        delta, cut, factor = jnp.asarray(delta), blocks[path], factors[path]
        if factor is not None:
            wide = widen(delta)
            delta = (wide * cut.expand(factor).astype(wide.dtype)).astype(delta.dtype)
        return jnp.where(cut.expand(coins[path]), delta, jnp.zeros((), delta.dtype))

    return map_by_path(mask, updates)
