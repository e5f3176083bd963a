"""The state of Magma."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from magma_optax._blocks import Blocks
from magma_optax._mesh import vary_like
from magma_optax._paths import leaves_by_path


class MagmaState(NamedTuple):
    """State of `magma` and `skip_update`, and the part ``magma`` of `with_magma`'s: arrays only.

    Attributes:
      step: number of updates so far; int32, shape ().
      key: raw threefry key data; uint32, shape (2,). Coins are a function of key, step, path and
        block index, so a restored state goes on with the same stream. Never cast a state that
        holds a key, as ``optax.tree.cast(state, jnp.bfloat16)`` would.
      alignment: the score s_t of every block: a flat dict from the leaf's path
        (``"layers/0/mlp/up_proj/kernel"``) to a float32 array, of shape () for ``blocks="leaf"`` or
        of the sizes of the axes that index blocks. Empty for `skip_update`.
      momentum: what Magma remembers of past gradients, shaped like the parameters, with
        ``optax.MaskedNode()`` at leaves that need none; None if no leaf needs any and the base has
        no masks of its own.
    """

    step: jax.Array
    key: jax.Array
    alignment: Any
    momentum: Any


def init_state(
    params: Any, key: Any, blocks: dict[str, Blocks], initial_score: Any, momentum: Any
) -> MagmaState:
    """Build the state before the first update, in buffers that nothing else holds."""
    score = jnp.asarray(initial_score, jnp.float32)
    leaves = leaves_by_path(params)
    # Copies: two leaves must not share a buffer, or they cannot be donated.
    alignment: Any = {
        path: vary_like(leaves[path], jnp.array(jnp.broadcast_to(score, cut.shape)), cut.axis_names)
        for path, cut in blocks.items()
    }
    if not jax.tree.leaves(params):
        # What `optax.tree.map_params` passes to find parameter-shaped parts. One leaf here marks
        # the scores as none of them.
        alignment = jnp.array(score)
    return MagmaState(jnp.zeros((), jnp.int32), jnp.array(key), alignment, momentum)


def check_kind(state: Any, kind: type) -> None:
    """Raise a ValueError if ``state`` is not the tuple that ``init`` returned."""
    if not isinstance(state, kind):
        raise ValueError(
            f"update expects a {kind.__name__}, got a {type(state).__name__}: the state of another "
            "optimizer, or a checkpoint restored without a target, which comes back as dicts and "
            "lists; restore onto jax.eval_shape(tx.init, params)"
        )


def check_state(state: MagmaState, blocks: dict[str, Blocks]) -> None:
    """Raise a ValueError that names the leaf where the state and the updates differ."""
    scores = state.alignment if isinstance(state.alignment, dict) else {}
    for path in [*blocks, *scores]:
        if path in blocks and path in scores:
            continue
        where = "updates but not in the state" if path in blocks else "state but not in the updates"
        raise ValueError(
            f"block {path!r} is in the {where}: the state comes from other parameters, `where` or "
            "`blocks`. Call init with these, or see the docs on adding parameters to a checkpoint"
        )
    for path, cut in blocks.items():
        if (shape := jnp.shape(scores[path])) != cut.shape:
            raise ValueError(
                f"{path!r} has scores of shape {shape} in the state but blocks of shape "
                f"{cut.shape} in the updates: the state comes from another `blocks` or shape"
            )


def summarize(opt_state: Any) -> dict[str, jax.Array]:
    """Summarise the alignment scores found anywhere in an optimizer state, for logging.

    Looks through chain, masked, partition, MultiSteps, inject_hyperparams and the like, and may be
    called inside jit. The state must hold `MagmaState` tuples; one that was restored as plain dicts
    has none.

    Args:
      opt_state: an optimizer state.

    Returns:
      ``alignment_mean``, ``alignment_min``, ``alignment_max``: float32 (), over all blocks of all
      Magma transformations; ``num_blocks``: int32 (), at most 2**31 - 1. An empty dict where there
      are no scores: `skip_update` keeps none, as it never looks at the gradient.
    """
    found = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, MagmaState))
    scores = [
        score
        for state in found
        if isinstance(state, MagmaState) and isinstance(state.alignment, dict)
        for score in jax.tree.leaves(state.alignment)
    ]
    if not scores:
        return {}
    # Leaf by leaf first: scores may be sharded, each in its own way.
    size = sum(score.size for score in scores)
    return {
        "alignment_mean": jnp.sum(jnp.stack([jnp.sum(score) for score in scores])) / float(size),
        "alignment_min": jnp.min(jnp.stack([jnp.min(score) for score in scores])),
        "alignment_max": jnp.max(jnp.stack([jnp.max(score) for score in scores])),
        "num_blocks": jnp.asarray(min(size, 2**31 - 1), jnp.int32),
    }


def next_step(step: jax.Array) -> Any:
    """Count one update; stays at the largest int32 rather than wrap."""
    return optax.safe_increment(step)
