"""The state of Magma."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from magma_optax._blocks import Blocks
from magma_optax._caller import warn
from magma_optax._mesh import vary_like
from magma_optax._paths import (
    is_below,
    leaves_by_path,
    map_by_path,
    nest,
    none_paths,
)


class MagmaState(NamedTuple):
    """State of `magma` and `skip_update`, and the part ``magma`` of `with_magma`'s: arrays only.

    Attributes:
      step: number of updates so far; int32, shape (). After 2**31 - 1 it goes on from -2**31, so
        that coins do not repeat; schedules then see 2**31 - 1.
      key: raw threefry key data; uint32, shape (2,). Coins are a function of key, step, path and
        block index, so a restored state goes on with the same stream. Never cast a state that
        holds a key, as ``optax.tree.cast(state, jnp.bfloat16)`` would.
      alignment: the score s_t of every block: nested dicts with a level per component of the
        leaf's path, ``alignment["layers"]["0"]["mlp"]["up_proj"]["kernel"]``, down to a float32
        array, of shape () for ``blocks="leaf"`` or of the sizes of the axes that index blocks.
        Empty for `skip_update`. States of 0.1 have one level, ``alignment["layers/0/..."]``; they
        are read and continued as they are.
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
    leaves = leaves_by_path(params, blocks)
    # Copies: two leaves must not share a buffer, or they cannot be donated.
    scores = {
        path: vary_like(leaves[path], jnp.array(jnp.broadcast_to(score, cut.shape)), cut.axis_names)
        for path, cut in blocks.items()
    }
    alignment: Any = nest(scores)
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


def scores_by_path(state: MagmaState) -> dict[str, jax.Array]:
    """Return the scores of ``state`` by path."""
    return leaves_by_path(state.alignment) if isinstance(state.alignment, dict) else {}


def replace_scores(state: MagmaState, scores: dict[str, jax.Array]) -> Any:
    """Return ``state.alignment`` with ``scores``; a block without a new score keeps the old one."""
    return map_by_path(lambda path, old: scores.get(path, old), state.alignment)


def check_state(state: MagmaState, blocks: dict[str, Blocks], updates: Any) -> None:
    """Raise a ValueError that names the leaf where the state and the updates differ.

    A block whose update is None, a frozen leaf's, may be missing from ``blocks``.
    """
    scores = scores_by_path(state)
    frozen = none_paths(updates)
    for path in [*blocks, *scores]:
        if (path in blocks or is_below(path, frozen)) and path in scores:
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
      Magma transformations; ``num_blocks``: int32 (), at most 2**31 - 1. An empty dict, with a
      warning, where there are no scores: `skip_update` keeps none, as it never looks at the
      gradient.

    Warns:
      UserWarning: there are no scores, or `optax.MultiSteps` stands before Magma in one chain.
    """
    states = _find(MagmaState, opt_state)
    scores = [score for state in states for score in scores_by_path(state).values()]
    if not scores:
        warn(f"summarize found no scores: {_why_no_scores(states)}")
        return {}
    if _accumulates_first(opt_state):
        warn(
            "optax.MultiSteps stands before magma in a chain, so Magma scores and tosses coins at "
            "every micro-step: put it around the whole, optax.MultiSteps(with_magma(base), k)"
        )
    # Leaf by leaf first: scores may be sharded, each in its own way.
    size = sum(score.size for score in scores)
    return {
        "alignment_mean": jnp.sum(jnp.stack([jnp.sum(score) for score in scores])) / float(size),
        "alignment_min": jnp.min(jnp.stack([jnp.min(score) for score in scores])),
        "alignment_max": jnp.max(jnp.stack([jnp.max(score) for score in scores])),
        "num_blocks": jnp.asarray(min(size, 2**31 - 1), jnp.int32),
    }


def _find(kind: type, tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _why_no_scores(states: list[MagmaState]) -> str:
    if not states:
        return (
            "the state holds no MagmaState. Pass the optimizer's state as init or update returned "
            "it; one restored without a target has dicts and lists instead"
        )
    if all(state.momentum is None for state in states):
        return "skip_update keeps none, as it never looks at the gradient"
    return "no leaf carries a block"


def _accumulates_first(node: Any) -> bool:
    """Whether a chain in ``node`` holds a state of MultiSteps before one of Magma."""
    if isinstance(node, optax.MultiStepsState):  # What is inside it sees whole batches.
        return False
    children, _ = jax.tree_util.default_registry.flatten_one_level(node) or ((), None)
    accumulates = False
    for child in children if type(node) is tuple else ():
        if accumulates and _find(MagmaState, child):
            return True
        accumulates = accumulates or bool(accumulators(child))
    return any(map(_accumulates_first, children))


def accumulators(state: Any) -> list[Any]:
    """Return the states in ``state`` of what collects gradients over several micro-steps."""
    return _find(optax.MultiStepsState, state)


def next_step(step: jax.Array) -> jax.Array:
    """Count one update; int32, from the largest to the smallest."""
    return jnp.asarray(step) + np.int32(1)
