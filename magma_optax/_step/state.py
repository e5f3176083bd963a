"""The state of Magma."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from magma_optax._blocks.cutting import Cut
from magma_optax._blocks.mesh import vary_like
from magma_optax._blocks.paths import NamedTree, is_below, nest


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
    params: NamedTree, key: Any, cuts: dict[str, Cut], initial_score: Any, momentum: Any
) -> MagmaState:
    """Build the state before the first update, in buffers that nothing else holds."""
    score = jnp.asarray(initial_score, jnp.float32)
    leaves = params.leaves
    # Copies: two leaves must not share a buffer, or they cannot be donated.
    scores = {
        path: vary_like(leaves[path], jnp.array(jnp.broadcast_to(score, cut.shape)), cut.axis_names)
        for path, cut in cuts.items()
    }
    # No leaf at all is what `optax.tree.map_params` passes to find parameter-shaped parts. One leaf
    # here marks the scores as none of them.
    alignment = nest(scores) if leaves else jnp.array(score)
    return MagmaState(jnp.zeros((), jnp.int32), jnp.array(key), alignment, momentum)


def check_kind(state: Any, kind: type) -> None:
    """Raise a ValueError if ``state`` is not the tuple that ``init`` returned."""
    if not isinstance(state, kind):
        raise ValueError(
            f"update expects a {kind.__name__}, got a {type(state).__name__}: the state of another "
            "optimizer, or a checkpoint restored without a target, which comes back as dicts and "
            "lists; restore onto jax.eval_shape(tx.init, params)"
        )


def check_scores(state: MagmaState, cuts: dict[str, Cut], updates: NamedTree) -> NamedTree:
    """Return the scores of ``state``, named, if they are those of ``cuts``.

    A block whose update is None, a frozen leaf's, may be missing from ``cuts``.

    Raises:
      ValueError: the state and the updates differ; it names the leaf.
    """
    named = NamedTree(state.alignment)
    scores = named.leaves if updates.pairs or updates.frozen else {}  # See `init_state`.
    for path in [*cuts, *scores]:
        if (path in cuts or is_below(path, updates.frozen)) and path in scores:
            continue
        where = "updates but not in the state" if path in cuts else "state but not in the updates"
        raise ValueError(
            f"block {path!r} is in the {where}: the state comes from other parameters, `where` or "
            "`blocks`. Call init with these, or see the docs on adding parameters to a checkpoint"
        )
    for path, cut in cuts.items():
        if (shape := jnp.shape(scores[path])) != cut.shape:
            raise ValueError(
                f"{path!r} has scores of shape {shape} in the state but blocks of shape "
                f"{cut.shape} in the updates: the state comes from another `blocks` or shape"
            )
    return named


def next_step(step: jax.Array) -> jax.Array:
    """Count one update; int32, from the largest to the smallest."""
    return jnp.asarray(step) + np.int32(1)
