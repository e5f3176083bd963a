"""Magma's own first moments: an EMA of the gradients, or of what stands for them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from magma_optax._paths import leaves_by_path, map_by_path, named_leaves


def init_momentum(params: Any, paths: Iterable[str], dtype: Any = None) -> Any:
    """Zeros at ``paths``, in ``dtype`` or the parameter's own, and ``MaskedNode()`` elsewhere."""
    paths = set(paths)
    return map_by_path(
        lambda path, leaf: (
            jnp.zeros_like(leaf, dtype=_dtype_for(leaf, dtype))
            if path in paths
            else optax.MaskedNode()
        ),
        params,
    )


def _dtype_for(leaf: Any, dtype: Any) -> Any:
    if dtype is None:
        return jnp.result_type(leaf)  # Said, so that of a weakly typed leaf it is strong.
    if not jnp.iscomplexobj(leaf):
        return dtype
    return jnp.complex128 if jnp.dtype(dtype).itemsize > 4 else jnp.complex64


def replace_momentum(momentum: Any, new: dict[str, jax.Array]) -> Any:
    """Store ``new`` in the containers and dtypes of ``momentum``; what is not in it stays."""
    return map_by_path(
        lambda path, old: new[path].astype(old.dtype) if path in new else old, momentum
    )


def masked_paths(momentum: Any) -> list[str]:
    """Return the paths of the parameters of which ``momentum`` keeps nothing."""
    nodes = named_leaves(momentum, lambda node: isinstance(node, optax.MaskedNode))
    return [path for path, node in nodes if isinstance(node, optax.MaskedNode)]


def match_blocks(tree: Any, updates: Any, paths: Iterable[str], name: str) -> dict[str, jax.Array]:
    """Return the leaves of ``tree`` at ``paths``, whatever its containers are.

    Args:
      tree: gradients or moments; may have leaves that ``updates`` lack (``optax.masked``).
      updates: the incoming updates, for the shapes.
      paths: the blocks' leaves.
      name: what to call ``tree`` in an error.

    Raises:
      ValueError: a leaf is missing or of another shape; names the first such path.
    """
    paths = list(paths)
    leaves, shapes = leaves_by_path(tree, paths), leaves_by_path(updates, paths)
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
    return {path: jnp.asarray(leaves[path]) for path in paths}
