"""Names of leaves: one string a leaf, the same in every container that holds it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def path_string(key_path: Sequence[Any]) -> str:
    """Join a JAX key path with slashes: ``layers/0/self_attn/q_proj/kernel``.

    Dict keys, attributes and indices read alike, so that a dict, a dataclass, a flax ``State`` and
    its pure dict name a leaf identically. A last attribute ``value`` is the box that flax puts
    around an array (``nnx.Variable``, linen ``Partitioned``), not a part of the name.
    """
    names = [_entry_name(entry) for entry in key_path]
    if len(names) > 1 and isinstance(key_path[-1], GetAttrKey) and names[-1] == "value":
        names.pop()
    return "/".join(names)


def _entry_name(entry: Any) -> str:
    match entry:
        case DictKey(key=key) | FlattenedIndexKey(key=key):
            return str(key)
        case SequenceKey(idx=index):
            return str(index)
        case GetAttrKey(name=name):
            return name
        case _:
            return str(entry).strip(".[]'\"")


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of ``tree`` by their path string, in tree order.

    ``None`` and ``optax.MaskedNode()`` hold no leaf and do not appear.

    Raises:
      ValueError: two leaves share a path.
    """
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = path_string(key_path)
        if path in leaves:
            raise ValueError(
                f"two leaves have the same path {path!r} (keys are compared as text, and '/' "
                "separates them): Magma names blocks by path, so rename one of the two"
            )
        leaves[path] = leaf
    return leaves


def map_by_path(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    """Replace every leaf by ``fn(path, leaf)``, keeping the containers."""
    return jax.tree_util.tree_map_with_path(
        lambda key_path, leaf: fn(path_string(key_path), leaf), tree
    )
