"""Whether a direction keeps the blocks of a leaf apart, so that one can be computed alone.

Every step between what is cut and the direction must do the same for any number of blocks, and be
one that is known to treat each index along the axes of blocks alike.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from magma_optax._lazy.blocks import Blocks, MixesError
from magma_optax._lazy.primitives import (
    ALONG,
    BY_SHAPE,
    ELEMENTWISE,
    OF_MATRICES,
    SIZES,
    WITH_DERIVATIVES,
)
from magma_optax._lazy.program import Step

_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})


def check_apart(
    blocks: Blocks, numbers: Collection[int], direction: int, axes: Sequence[int]
) -> None:
    """Raise a MixesError unless one block's direction is made of its own parts alone.

    Args:
      blocks: those of one leaf.
      numbers: the steps that make the direction.
      direction: the value.
      axes: those of the leaf that index blocks, by number.
    """
    for value in blocks.read_by(numbers):
        if any(len(held) > 1 for held in blocks.axes(value)):
            raise MixesError("shapes")  # Two axes of blocks in one: their order does not show.
    _check(blocks, numbers)
    held = {number: axis for axis, of in enumerate(blocks.axes(direction)) for number in of}
    if held != {number: axes[number] for number in blocks.sizes}:
        raise MixesError("the order of its axes")


def _check(blocks: Blocks, numbers: Iterable[int]) -> None:
    for number in numbers:
        step = blocks.whole.steps[number]
        if not (_keeps_apart(blocks, step) and _is_alike(blocks, step)):
            raise MixesError(step.name)
        for value in (*step.inputs, *step.outputs):
            _check_type(blocks, value)
        for body in blocks.bodies(step):
            if any(map(body.holds, body.whole.known)):
                raise MixesError(f"a constant inside {step.name}")
            _check(body, range(len(body.whole.steps)))


def _check_type(blocks: Blocks, value: int) -> None:
    """Raise a MixesError for what a part of it could not be."""
    kind = blocks.whole.types[value]
    spec = kind.sharding.spec if any(blocks.axes(value)) else ()
    if any(held and name for held, name in zip(blocks.axes(value), spec, strict=False)):
        raise MixesError("a reshard of blocks onto a mesh axis")
    if str(kind.dtype) in _WIDE and jnp.result_type(float) == jnp.float32:
        raise MixesError("64-bit numbers inside enable_x64")


def _is_alike(blocks: Blocks, step: Step) -> bool:
    """Whether a step does the same for other numbers of blocks, sizes of results apart."""
    if step.name in WITH_DERIVATIVES:  # Its body tells.
        return True
    others = [other.steps[step.number].eqn.params for other in blocks.doubled.values()]
    return all(
        name in SIZES or _is_body(value) or all(other[name] == value for other in others)
        for name, value in step.eqn.params.items()
    )


def _keeps_apart(blocks: Blocks, step: Step) -> bool:
    inputs = [axes for axes in map(blocks.axes, step.inputs) if any(axes)]
    outputs = [any(axes) for axes in map(blocks.axes, step.outputs)]
    name, params = step.name, step.eqn.params
    if name in ("scan", "while", "cond") or name in WITH_DERIVATIVES:
        return True  # Their bodies tell; a scan over blocks is of another length for more.
    if not inputs:  # Made of what all blocks share: the same for each, or made for all at once.
        return name == "broadcast_in_dim" or not any(outputs)
    if not all(outputs):
        return False
    along = {axis for axes in inputs for axis, numbers in enumerate(axes) if numbers}
    if name in ALONG:
        named = params[ALONG[name]]
        return not along & set(named if isinstance(named, tuple) else (named,))
    if name in OF_MATRICES:
        return all(axis < len(axes) - 2 for axes in inputs for axis in along)
    if name == "reshape":
        return params["dimensions"] is None and _reshapes_in_order(blocks, step)
    return name in ELEMENTWISE or name in BY_SHAPE


def _reshapes_in_order(blocks: Blocks, step: Step) -> bool:
    """Whether axes of blocks come first among the axes that are split or merged with them."""
    before, after = step.inputs[0], step.outputs[0]
    shapes = [blocks.whole.types[value].shape for value in (before, after)]
    return all(
        _held(blocks, before, first) == _held(blocks, after, second)
        and _blocks_come_first(blocks, before, first)
        and _blocks_come_first(blocks, after, second)
        for first, second in _groups(*shapes)
    )


def _held(blocks: Blocks, value: int, group: range) -> list[int]:
    axes = blocks.axes(value)
    return [number for axis in group for number in axes[axis]]


def _blocks_come_first(blocks: Blocks, value: int, group: range) -> bool:
    whole, axes, one = blocks.whole.types[value].shape, blocks.axes(value), blocks.shape(value)
    inside = False  # whether an axis within blocks has been passed
    for axis in group:
        if axes[axis] and inside:
            return False
        inside = inside or (one if axes[axis] else whole)[axis] > 1
    return True


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Return the shortest runs of axes that a reshape maps onto each other."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start, first, left, right = i, j, 1, 1
        while (i == start or j == first or left != right) and (i < len(before) or j < len(after)):
            if j == len(after) or (i < len(before) and left <= right):
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups.append((range(start, i), range(first, j)))
    return groups


def _is_body(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr) or (
        isinstance(value, tuple) and any(map(_is_body, value))
    )
