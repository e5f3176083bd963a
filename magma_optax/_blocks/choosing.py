"""Choosing: which leaves are masked, as ``where`` says."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magma_optax._blocks.cutting import Cut, Granularity, cut_leaf
from magma_optax._blocks.paths import NamedTree

Where = Callable[[str, jax.ShapeDtypeStruct], bool] | Any


def find_cuts(
    tree: NamedTree, where: Where | None, blocks: Granularity, typed: NamedTree | None = None
) -> dict[str, Cut]:
    """Return how each masked leaf is cut, by path.

    Integer, boolean and empty leaves carry no block, nor does None.

    Args:
      tree: parameters or updates.
      where: None for all leaves, ``(path, ShapeDtypeStruct) -> bool``, or a tree of bools (which
        may be a prefix of ``tree``).
      blocks: a granularity or ``(path, ShapeDtypeStruct) -> axes``.
      typed: the parameters (or gradients), if ``tree`` is updates: a leaf's dtype is its
        parameter's. (A base may turn the gradient of an integer into a float.)

    Raises:
      ValueError: ``where`` selects nothing or misses a leaf, an axis is out of range, or a block
        shares its path with another leaf.
      TypeError: a leaf is no array.
    """
    candidates = candidate_leaves(tree, typed)
    selects = _selector(where)
    selected = {path: leaf for path, leaf in candidates.items() if selects(path, leaf)}
    # In an update, all that `where` selects may be frozen: their gradients are None.
    if candidates and not selected and not (typed and tree.frozen):
        raise ValueError(
            f"`where` selects none of the {len(candidates)} leaves; it saw {_some(candidates)}. "
            "Write a predicate (path, leaf) -> bool that fits these paths, or leave `where` out"
        )
    tree.refuse_twins(selected)
    return {path: cut_leaf(path, leaf, blocks) for path, leaf in selected.items()}


def candidate_leaves(
    tree: NamedTree, typed: NamedTree | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the leaves of ``tree`` that can carry blocks: arrays of floats that are not empty."""
    parameters = typed.leaves if typed else {}
    candidates = {}
    for path, leaf in tree.leaves.items():
        dtypes = [_dtype(path, x) for x in (leaf, parameters.get(path, leaf))]
        struct = jax.ShapeDtypeStruct(jnp.shape(leaf), dtypes[1])
        if all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes) and struct.size:
            candidates[path] = struct
    return candidates


def is_predicate(where: Any) -> bool:
    """Tell a predicate from a tree of bools."""
    # An Equinox module of bools can be called too, but its leaves cannot.
    return callable(where) and all(map(callable, jax.tree.leaves(where)))


def _dtype(path: str, leaf: Any) -> Any:
    try:
        return jnp.result_type(leaf)
    except TypeError:
        raise TypeError(
            f"the leaf {path!r} is {leaf!r}, which is no array: give a tree of arrays, such as "
            "eqx.filter(model, eqx.is_inexact_array) of an Equinox module"
        ) from None


def _selector(where: Where | None) -> Callable[[str, jax.ShapeDtypeStruct], Any]:
    if where is None:
        return lambda path, leaf: True
    if is_predicate(where):
        return lambda path, leaf: _ask(where, path, leaf)
    mask: dict[str, bool] = {}
    for path, value in NamedTree(where).pairs:
        if jnp.shape(value) != () or np.asarray(value).dtype != np.bool_:
            raise TypeError(
                "`where` must be a predicate (path, leaf) -> bool or a tree of bools, got "
                f"{value!r}{f' at {path!r}' if path else ''}"
            )
        mask[path] = mask.get(path, False) or bool(value)

    def selects(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
        prefix = path
        while prefix not in mask:
            if not prefix:
                entries = f"it has {_some(mask)}" if mask else "it is empty"
                raise ValueError(f"`where` has no entry for {path!r}; {entries}")
            prefix = prefix.rpartition("/")[0]
        return mask[prefix]

    return selects


def _ask(predicate: Callable[..., Any], path: str, leaf: jax.ShapeDtypeStruct) -> Any:
    try:
        return predicate(path, leaf)
    except Exception as error:
        error.add_note(f"`where` was asked about the path {path!r}, a string, and the leaf {leaf}")
        raise


def _some(paths: Any, limit: int = 8) -> str:
    names = [repr(path) for path in paths]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if names[limit:] else "")
