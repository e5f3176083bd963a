"""Names of leaves: one path string per leaf, the same in every container that holds it."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
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


class NamedTree:
    """A tree whose leaves are named, once.

    The box that flax puts around an array (``nnx.Variable``, linen ``Partitioned``) is not a part
    of the name. A field called ``value`` of anything else is.

    Attributes:
      pairs: (path, leaf) of every leaf, in tree order.
      leaves: the leaves by path. Of leaves that share a path, the last.
      frozen: the paths at which the tree holds None instead of a leaf, as ``eqx.partition`` does.
      masked: the paths at which it holds ``optax.MaskedNode()``.
    """

    def __init__(self, tree: Any) -> None:
        self._structure = jax.tree.structure(tree, is_leaf=_is_empty)
        self._named = list(_name(tree))
        self.pairs = [(path, leaf) for path, leaf in self._named if not _is_empty(leaf)]
        self.leaves = dict(self.pairs)
        self.frozen = [path for path, leaf in self._named if leaf is None]
        self.masked = [path for path, leaf in self._named if isinstance(leaf, optax.MaskedNode)]

    def arrays(self, paths: Collection[str]) -> dict[str, jax.Array]:
        """Return the leaves at ``paths``, as arrays."""
        return {path: jnp.asarray(self.leaves[path]) for path in paths}

    def refuse_twins(self, paths: Collection[str]) -> None:
        """Raise a ValueError if two leaves share one of ``paths``."""
        seen = set()
        for path, _ in self.pairs:
            if path in seen and path in paths:
                raise ValueError(
                    f"two leaves have the same path {path!r} (keys are compared as text, and '/' "
                    "separates them): Magma names blocks by path, so rename one of the two"
                )
            seen.add(path)

    def map(self, fn: Callable[[str, Any], Any]) -> Any:
        """Return the tree with every leaf replaced by ``fn(path, leaf)``."""
        return jax.tree.unflatten(
            self._structure,
            [leaf if _is_empty(leaf) else fn(path, leaf) for path, leaf in self._named],
        )

    def replace(self, new: Mapping[str, Any]) -> Any:
        """Return the tree with the leaves ``new``, by path; the others stay."""
        return self.map(lambda path, leaf: new.get(path, leaf))


def _name(tree: Any) -> Any:
    outer = jax.tree_util.tree_leaves_with_path(tree, lambda x: _is_empty(x) or _is_box(x))
    for key_path, node in outer:
        if not _is_box(node):
            yield path_string(key_path), node
            continue
        for end, leaf in jax.tree_util.tree_leaves_with_path(node, _is_empty):
            boxed = key_path and end == (GetAttrKey("value"),)
            yield path_string(key_path if boxed else (*key_path, *end)), leaf


def _is_empty(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _is_box(node: Any) -> bool:
    return _is_box_type(type(node))


@functools.cache
def _is_box_type(kind: type) -> bool:
    return any(c.__name__ in _BOXES and c.__module__.startswith("flax.") for c in kind.__mro__)


def is_below(path: str, parents: Collection[str]) -> bool:
    """Tell whether ``path`` is one of ``parents`` or lies inside one of them."""
    return any(path == parent or not parent or path.startswith(f"{parent}/") for parent in parents)


def distinct(paths: Sequence[str]) -> list[str]:
    """Tell leaves of one path apart: such leaves may be there as long as none is masked."""
    first: dict[str, int] = {}
    for n, path in enumerate(paths):
        first.setdefault(path, n)
    return [path if first[path] == n else f"{path} (leaf {n})" for n, path in enumerate(paths)]


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"a/b": x}`` as ``{"a": {"b": x}}``, in which every leaf has the same path.

    Serializers that join keys with a separator and split them again return such a dict as it was,
    as they do the parameters. Where one path goes on from another (``a`` and ``a/b``, both leaves)
    the longer one stays joined from there.
    """
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        node, parts, depth = root, path.split("/"), 0
        while depth < len(parts) - 1 and "/".join(parts[: depth + 1]) not in flat:
            node = node.setdefault(parts[depth], {})
            depth += 1
        node["/".join(parts[depth:])] = leaf
    return root
