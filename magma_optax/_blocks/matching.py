"""Matching a tree to the updates by path, whatever its containers are."""

from collections.abc import Collection

import jax
import jax.numpy as jnp

from magma_optax._blocks.paths import NamedTree


def match(
    tree: NamedTree, updates: NamedTree, paths: Collection[str], name: str
) -> dict[str, jax.Array]:
    """Return the leaves of ``tree`` at ``paths``.

    Args:
      tree: gradients or moments; may have leaves that ``updates`` lack (``optax.masked``).
      updates: the incoming updates, for the shapes.
      paths: the blocks' leaves.
      name: what to call ``tree`` in an error.

    Raises:
      ValueError: a leaf is missing or of another shape; names the first such path.
    """
    tree.refuse_twins(paths)
    leaves, shapes = tree.leaves, updates.leaves
    for path in paths:
        if path not in leaves:
            others = [p for p in leaves if p not in shapes] or list(leaves)
            wrappers = (
                "; inside wrappers that rearrange them (optax.flatten, split_real_and_imaginary) "
                "use with_magma"
            )
            instead = f"; it has {others[0]!r}, which they do not" if others else ", which is empty"
            raise ValueError(
                f"`{name}` differs from the updates, first at {path!r}: there is no such leaf in "
                f"`{name}`{instead}. It must have the structure of the updates"
                f"{wrappers if name == 'grad' else ''}"
            )
        if jnp.shape(leaves[path]) != jnp.shape(shapes[path]):
            raise ValueError(
                f"`{name}` differs from the updates, first at {path!r}: shape "
                f"{jnp.shape(leaves[path])} instead of {jnp.shape(shapes[path])}"
            )
    return tree.arrays(paths)
