"""Names of leaves: one string per leaf, the same in every container that holds it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

# What flax puts around an array, by the names of these classes or of those they come from.
_BOXES = frozenset(["Variable", "VariableState", "AxisMetadata"])


def path_string(key_path: Sequence[Any]) -> str:
    """Join a JAX key path with slashes: ``layers/0/self_attn/q_proj/kernel``.

    Dict keys, attributes and indices read alike, so that a dict, a dataclass, a flax ``State`` and
    its pure dict name a leaf identically.
    """
    return "/".join(map(_entry_name, key_path))


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


def named_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda node: False
) -> list[tuple[str, Any]]:
    """Return (path string, leaf) of every leaf of ``tree``, in tree order.

    The box that flax puts around an array (``nnx.Variable``, linen ``Partitioned``) is not a part
    of the name. A field called ``value`` of anything else is. ``None`` and ``optax.MaskedNode()``
    hold no leaf and do not appear, unless ``is_leaf`` says so.
    """
    outer = jax.tree_util.tree_leaves_with_path(tree, lambda node: is_leaf(node) or _is_box(node))
    named = []
    for key_path, node in outer:
        inner = [((), node)]
        if _is_box(node):
            inner = jax.tree_util.tree_leaves_with_path(node, is_leaf)
        for end, leaf in inner:
            boxed = key_path and end == (GetAttrKey("value"),)
            named.append((path_string(key_path if boxed else (*key_path, *end)), leaf))
    return named


def _is_box(node: Any) -> bool:
    return _is_box_type(type(node))


@functools.cache
def _is_box_type(kind: type) -> bool:
    return any(c.__name__ in _BOXES and c.__module__.startswith("flax.") for c in kind.__mro__)


def leaves_by_path(tree: Any, paths: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the leaves of ``tree`` by their path string, in tree order.

    Args:
      tree: any tree.
      paths: which leaves must have a path of their own: all if None.

    Raises:
      ValueError: two leaves share one of ``paths``.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in named_leaves(tree):
        if path in leaves and (paths is None or path in paths):
            raise ValueError(
                f"two leaves have the same path {path!r} (keys are compared as text, and '/' "
                "separates them): Magma names blocks by path, so rename one of the two"
            )
        leaves[path] = leaf
    return leaves


def none_paths(tree: Any) -> list[str]:
    """Return the paths at which ``tree`` holds None: frozen leaves, as of ``eqx.partition``."""
    return [path for path, leaf in named_leaves(tree, lambda x: x is None) if leaf is None]


def is_below(path: str, parents: Iterable[str]) -> bool:
    """Tell whether ``path`` is one of ``parents`` or lies inside one of them."""
    return any(path == parent or not parent or path.startswith(f"{parent}/") for parent in parents)


def map_by_path(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    """Replace every leaf by ``fn(path, leaf)``, keeping the containers."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [fn(path, leaf) for path, leaf in named_leaves(tree)]
    )


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"a/b": x}`` as ``{"a": {"b": x}}``, in which every leaf has the same path.

    Serializers that join keys with a separator and split them again return such a dict as it was,
    as they do the parameters. Where one path goes on from another (``a`` and ``a/b``, both leaves)
    the longer one stays joined from there.
    """
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        node, parts = root, path.split("/")
        depth = 0
        while depth < len(parts) - 1 and "/".join(parts[: depth + 1]) not in flat:
            node = node.setdefault(parts[depth], {})
            depth += 1
        node["/".join(parts[depth:])] = leaf
    return root
