"""Cuts: how a leaf is cut into blocks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

BlockAxes = Callable[[str, jax.ShapeDtypeStruct], int | Sequence[int]]
AxisName = str | tuple[str, ...] | None
Granularity = Literal["leaf", "row", "column", "element"] | BlockAxes

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
class Cut:
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


def cut_leaf(path: str, leaf: jax.ShapeDtypeStruct, blocks: Granularity) -> Cut:
    """Return how the leaf at ``path`` is cut.

    Raises:
      TypeError: the axes are no ints.
      ValueError: an axis is out of range or repeated.
    """
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
    return Cut(tuple(named), shape, ndim, tuple(named.values()))


def _axes_of(name: str, value: Any) -> tuple[int, ...]:
    axes = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in axes):
        raise TypeError(f"{name} must be an int or ints, got {value!r}")
    return tuple(map(int, axes))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if value is None or isinstance(value, int | str) else tuple(value)
