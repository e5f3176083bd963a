"""Blocks: which leaves are masked, and how each of them is cut into blocks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magma_optax._paths import leaves_by_path, named_leaves, none_paths

Where = Callable[[str, jax.ShapeDtypeStruct], bool] | Any
BlockAxes = Callable[[str, jax.ShapeDtypeStruct], int | Sequence[int]]
AxisName = str | tuple[str, ...] | None

GRANULARITIES: dict[str, Callable[[int], Sequence[int]]] = {
    "leaf": lambda ndim: (),
    "row": lambda ndim: range(ndim - 1),
    "column": lambda ndim: [axis for axis in range(ndim) if axis != ndim - 2],
    "element": range,
}


@dataclasses.dataclass(frozen=True)
class stacked:
    """Cut leaves into the slices along ``axis``: scanned layers, experts, the parts of a fused QKV.

    Each slice is a block of its own, with its own coin and its own score::

        magma(where=attention_and_mlp, blocks=stacked(0))  # scanned layers
        magma(where=experts, blocks=stacked((0, 1)))  # experts of scanned layers
        magma(where=experts, blocks=stacked(0, axis_name="expert"))  # sharded, in shard_map

    It cuts every leaf that ``where`` takes. A function ``(path, leaf) -> axes`` chooses by leaf.

    Attributes:
      axis: the axis or axes that index blocks; negative axes count from the end.
      axis_name: the mesh axis over which ``axis`` is sharded inside ``shard_map``, if it is: block
        indices are offset by the device's place, and inner products are not summed over that mesh
        axis. With several ``axis``, one name (or None) for each.
    """

    axis: int | Sequence[int]
    axis_name: str | Sequence[str | None] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        axes = _axes_of("stacked: axis", self.axis)
        if not axes:
            raise TypeError(f"stacked: axis must be an int or ints, got {self.axis!r}")
        names = _as_tuple(self.axis_name)
        if not all(name is None or isinstance(name, str) for name in names):
            raise TypeError(
                "stacked: axis_name must be one mesh axis, or None, for each axis, got "
                f"{self.axis_name!r}"
            )
        if self.axis_name is not None and len(axes) != len(names):
            raise ValueError(
                f"stacked: axis {self.axis!r} and axis_name {self.axis_name!r} differ in length: "
                "give one mesh axis name, or None, for each axis"
            )

    def __call__(self, path: str, leaf: jax.ShapeDtypeStruct) -> int | Sequence[int]:
        """Return the axes that index the blocks of ``leaf``."""
        return self.axis


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one leaf is cut.

    Attributes:
      axes: the axes that index separate blocks, ascending; () for one block.
      shape: their sizes, on this device: the shape of the leaf's scores and coins.
      ndim: rank of the leaf.
      axis_names: the mesh axis that shards each of ``axes`` inside ``shard_map``, or None.
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...]
    ndim: int
    axis_names: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """Number of blocks on this device."""
        return math.prod(self.shape)

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum a leaf-shaped array over each block: shape of the leaf -> ``shape``."""
        return jnp.sum(x, axis=tuple(a for a in range(self.ndim) if a not in self.axes))

    def expand(self, per_block: jax.Array) -> jax.Array:
        """Give a number, or an array of ``shape``, the axes to broadcast against the leaf."""
        if per_block.ndim == 0:
            return per_block
        return jnp.expand_dims(per_block, tuple(a for a in range(self.ndim) if a not in self.axes))

    def indices(self) -> jax.Array:
        """Row-major index of each block within the whole leaf: uint32 (size,)."""
        if not any(self.axis_names):
            return jax.lax.iota(jnp.uint32, self.size)
        index = jnp.zeros(self.shape, jnp.uint32)
        for place, (size, name) in enumerate(zip(self.shape, self.axis_names, strict=True)):
            along = jax.lax.broadcasted_iota(jnp.uint32, self.shape, place)
            whole = size
            if name is not None:
                along += jax.lax.axis_index(name).astype(jnp.uint32) * np.uint32(size)
                whole *= jax.lax.axis_size(name)
            index = index * np.uint32(whole) + along
        return index.ravel()


def find_blocks(
    tree: Any, where: Where | None, blocks: str | BlockAxes, params: Any = None
) -> dict[str, Blocks]:
    """Return how each masked leaf is cut, by path.

    Integer, boolean and empty leaves carry no block, nor does None.

    Args:
      tree: parameters or updates.
      where: None for all leaves, ``(path, ShapeDtypeStruct) -> bool``, or a tree of bools (which
        may be a prefix of ``tree``).
      blocks: a granularity or ``(path, ShapeDtypeStruct) -> axes``.
      params: the parameters (or gradients), if ``tree`` is updates: a leaf's dtype is its
        parameter's. (A base may turn the gradient of an integer into a float.)

    Raises:
      ValueError: ``where`` selects nothing or misses a leaf, an axis is out of range, or a block
        shares its path with another leaf.
      TypeError: a leaf is no array.
    """
    candidates = candidate_leaves(tree, params)
    selects = _selector(where)
    selected = {path: leaf for path, leaf in candidates.items() if selects(path, leaf)}
    # With frozen leaves, whose gradients are None, those that `where` selects may all be frozen.
    if candidates and not selected and not none_paths(tree):
        raise ValueError(
            f"`where` selects none of the {len(candidates)} leaves; it saw {_some(candidates)}. "
            "Write a predicate (path, leaf) -> bool that fits these paths, or leave `where` out"
        )
    leaves_by_path(tree, selected)  # Refuses two leaves with one path.
    return {path: _cut(path, leaf, blocks) for path, leaf in selected.items()}


def candidate_leaves(tree: Any, params: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the leaves of ``tree`` that can carry blocks: arrays of floats that are not empty."""
    typed = dict(named_leaves(params))
    candidates = {}
    for path, leaf in named_leaves(tree):
        dtypes = [_dtype(path, x) for x in (leaf, typed.get(path, leaf))]
        struct = jax.ShapeDtypeStruct(jnp.shape(leaf), dtypes[1])
        if all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes) and struct.size:
            candidates[path] = struct
    return candidates


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
    for path, value in named_leaves(where):
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


def is_predicate(where: Any) -> bool:
    """Tell a predicate from a tree of bools."""
    # An Equinox module of bools can be called too, but its leaves cannot.
    return callable(where) and all(map(callable, jax.tree.leaves(where)))


def _ask(predicate: Callable[..., Any], path: str, leaf: jax.ShapeDtypeStruct) -> Any:
    try:
        return predicate(path, leaf)
    except Exception as error:
        error.add_note(f"`where` was asked about the path {path!r}, a string, and the leaf {leaf}")
        raise


def _cut(path: str, leaf: jax.ShapeDtypeStruct, blocks: str | BlockAxes) -> Blocks:
    ndim = len(leaf.shape)
    axes = GRANULARITIES[blocks](ndim) if isinstance(blocks, str) else blocks(path, leaf)
    axes = _axes_of(f"blocks: the axes of {path!r}", axes)
    names = _as_tuple(getattr(blocks, "axis_name", None) or (None,) * len(axes))
    if not all(-ndim <= axis < ndim for axis in axes):
        raise ValueError(f"blocks: axes {axes} are out of range for {path!r} of shape {leaf.shape}")
    named = dict(sorted(zip((axis % ndim for axis in axes), names, strict=True)))
    if len(named) != len(axes):
        raise ValueError(f"blocks: axes {axes} repeat one axis of {path!r} of shape {leaf.shape}")
    shape = tuple(leaf.shape[axis] for axis in named)
    return Blocks(tuple(named), shape, ndim, tuple(named.values()))


def _axes_of(name: str, value: Any) -> tuple[int, ...]:
    axes = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in axes):
        raise TypeError(f"{name} must be an int or ints, got {value!r}")
    return tuple(map(int, axes))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if value is None or isinstance(value, int | str) else tuple(value)


def _some(paths: Any, limit: int = 8) -> str:
    names = [repr(path) for path in paths]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if names[limit:] else "")
