"""The paper's ablation "sparse momentum": a dropped block's base state does not advance."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from magma_optax._blocks.cutting import Cut
from magma_optax._blocks.paths import NamedTree


def hold_dropped(
    inner: optax.GradientTransformation,
    new_state: Any,
    old_state: Any,
    params: NamedTree,
    cuts: dict[str, Cut],
    m: dict[str, jax.Array],
) -> Any:
    """Return ``new_state`` with what belongs to dropped blocks as it was in ``old_state``.

    What belongs to no parameter, such as a step count, advances.
    """
    new_leaves, treedef = jax.tree.flatten(new_state)
    owners = find_owners(inner, old_state, params, cuts)
    held = [
        new if path is None else jnp.where(_coin(cuts[path], m[path], jnp.shape(new)), new, old)
        for path, new, old in zip(owners, new_leaves, jax.tree.leaves(old_state), strict=True)
    ]
    return jax.tree.unflatten(treedef, held)


def hold_blocks(
    new: dict[str, jax.Array],
    old: dict[str, jax.Array],
    cuts: dict[str, Cut],
    m: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Return ``new`` with dropped blocks as they were in ``old``; both by path."""
    return {path: jnp.where(cuts[path].expand(m[path]), x, old[path]) for path, x in new.items()}


def find_owners(
    inner: optax.GradientTransformation, state: Any, params: NamedTree, cuts: dict[str, Cut]
) -> list[str | None]:
    """Return the masked parameter to which each leaf of ``state`` belongs, or None.

    Raises:
      ValueError: blocks lie within a leaf, but its state is not shaped like it (factored moments).
    """
    names = optax.tree.map_params(
        inner,
        lambda copy: NamedTree(copy).map(lambda path, _: path),
        state,
        transform_non_params=lambda other: jax.tree.map(lambda _: False, other),
        is_leaf=lambda _: True,  # The function gets a whole copy of the parameters' tree.
    )
    owners: list[str | None] = []
    for name, leaf in zip(jax.tree.leaves(names), jax.tree.leaves(state), strict=True):
        owner = None if name is False else _parameter_of(name, params)
        owners.append(owner if owner in cuts else None)
        if owner not in cuts or not cuts[owner].axes:
            continue
        if jnp.shape(leaf) != (shape := jnp.shape(params.leaves[owner])):
            raise ValueError(
                f"sparse_state: the base keeps a state of shape {jnp.shape(leaf)} for {owner!r} of "
                f"shape {shape}, which cannot be held block by block: use blocks='leaf'"
            )
    return owners


def _parameter_of(name: str, params: NamedTree) -> str:
    """The parameter at or above ``name``: a base may keep a list for each."""
    while name and name not in params.leaves:
        name = name.rpartition("/")[0]
    return name


def _coin(cut: Cut, coin: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return cut.expand(coin) if len(shape) == cut.ndim else coin
