"""The paper's ablation "sparse momentum": a dropped block's base state does not advance."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from magma_optax._blocks import Blocks
from magma_optax._paths import leaves_by_path, map_by_path


def hold_dropped(
    inner: optax.GradientTransformation,
    new_state: Any,
    old_state: Any,
    params: Any,
    blocks: dict[str, Blocks],
    coins: dict[str, jax.Array],
) -> Any:
    """Return ``new_state`` with what belongs to dropped blocks as it was in ``old_state``.

    What belongs to no parameter, such as a step count, advances.
    """
    new_leaves, treedef = jax.tree.flatten(new_state)
    owners = find_owners(inner, old_state, params, blocks)
    held = [
        new
        if path is None
        else jnp.where(_coin(blocks[path], coins[path], jnp.shape(new)), new, old)
        for path, new, old in zip(owners, new_leaves, jax.tree.leaves(old_state), strict=True)
    ]
    return jax.tree.unflatten(treedef, held)


def find_owners(
    inner: optax.GradientTransformation, state: Any, params: Any, blocks: dict[str, Blocks]
) -> list[str | None]:
    """Return the masked parameter to which each leaf of ``state`` belongs, or None.

    Raises:
      ValueError: blocks lie within a leaf, but its state is not shaped like it (factored moments).
    """
    names = optax.tree.map_params(
        inner,
        lambda copy: map_by_path(lambda path, _: path, copy),
        state,
        transform_non_params=lambda other: jax.tree.map(lambda _: False, other),
        is_leaf=lambda _: True,  # The function gets a whole copy of the parameters' tree.
    )
    shapes = {path: jnp.shape(leaf) for path, leaf in leaves_by_path(params, blocks).items()}
    owners: list[str | None] = []
    for owner, leaf in zip(jax.tree.leaves(names), jax.tree.leaves(state), strict=True):
        owners.append(owner if owner in blocks else None)
        if owner in blocks and blocks[owner].axes and jnp.shape(leaf) != shapes[owner]:
            raise ValueError(
                f"sparse_state: the base keeps a state of shape {jnp.shape(leaf)} for {owner!r} of "
                f"shape {shapes[owner]}, which cannot be held block by block: use blocks='leaf'"
            )
    return owners


def _coin(cut: Blocks, coin: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return cut.expand(coin) if len(shape) == cut.ndim else coin
