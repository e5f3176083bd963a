"""One block of a leaf: where it lies in every array of an update, and the update of it alone.

An axis of blocks is found by doubling: the update is traced as it is, and once more for each of the
leaf's axes of blocks, for parameters with twice as many blocks along it. In both traces the same
steps make the same values, and what doubles in size indexes blocks. Every step from what is cut to
the direction must treat each index alike, and be one that is known to.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from magma_optax._blocks.cutting import Cut
from magma_optax._lazy.primitives import (
    ALONG,
    BY_SHAPE,
    ELEMENTWISE,
    OF_MATRICES,
    SIZES,
    WITH_DERIVATIVES,
)
from magma_optax._lazy.program import Program, Step, Values

_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})

Index = Sequence[jax.Array]  # of a block along each of its leaf's axes of blocks


class MixesError(Exception):
    """A step mixes blocks, or is not known to keep them apart; its primitive's name."""


class Blocks:
    """The blocks of one leaf in the values of a program."""

    def __init__(self, whole: Program, doubled: Mapping[int, Program], sizes: Mapping[int, int]):
        """Take programs that differ in shapes alone.

        Args:
          whole: the update as it is.
          doubled: by axis of blocks (its number within the cut): with twice as many along it.
          sizes: how many blocks there are along it.
        """
        self._whole, self._doubled, self._sizes = whole, doubled, sizes

    def axes(self, value: int) -> list[tuple[int, ...]]:
        """Return, for each axis of a value, the axes of blocks that it holds, slowest first.

        Raises:
          MixesError: the value holds some of them and not others, or in another order, or a part of
            a block.
        """
        shape = self._whole.types[value].shape
        held: list[tuple[int, ...]] = [()] * len(shape)
        for number, program in self._doubled.items():
            other = program.types[value].shape
            factors = [b / a if a else 1 for a, b in zip(shape, other, strict=False)]
            if len(other) != len(shape) or sorted(factors) not in (
                [1] * len(shape),
                sorted([1] * (len(shape) - 1) + [2]),
            ):
                raise MixesError("shapes")
            if 2 in factors:
                held[factors.index(2)] += (number,)
        if any(size % self._number(axis) for size, axis in zip(shape, held, strict=True)):
            raise MixesError("shapes")
        if [number for axis in held for number in axis] not in ([], sorted(self._doubled)):
            raise MixesError("shapes")
        return held

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of one block's part of a value."""
        sizes = self._whole.types[value].shape
        return tuple(
            size // self._number(axis) for size, axis in zip(sizes, self.axes(value), strict=True)
        )

    def _number(self, axis: Iterable[int]) -> int:
        """Return how many blocks an axis holds, by the axes of blocks in it."""
        return math.prod(self._sizes[number] for number in axis)

    def holds(self, value: int) -> bool:
        """Whether a value has a part for each block."""
        return any(self.axes(value))

    def cut_out(self, value: int, x: jax.Array, index: Index) -> jax.Array:
        """Return the part of a value, ``x``, that belongs to one block."""
        for axis, (numbers, size) in enumerate(
            zip(self.axes(value), self.shape(value), strict=True)
        ):
            for number in numbers:
                x = jax.lax.dynamic_slice_in_dim(x, index[number] * size, size, axis)
        return x

    def read_by(self, numbers: Collection[int]) -> list[int]:
        """Return what these steps read and do not make, as far as it has a part for each block."""
        return [x for x in self._whole.read_by(numbers) if self.holds(x)]

    def check(self, numbers: Collection[int], direction: int, axes: Sequence[int]) -> None:
        """Raise a MixesError unless one block's direction is made of its own parts alone.

        Args:
          numbers: the steps that make the direction.
          direction: the value.
          axes: those of the leaf that index blocks, by number.
        """
        for value in self.read_by(numbers):
            if any(len(held) > 1 for held in self.axes(value)):
                raise MixesError("shapes")  # Two axes of blocks in one: their order does not show.
        self._check(numbers)
        held = {number: axis for axis, of in enumerate(self.axes(direction)) for number in of}
        if held != {number: axes[number] for number in self._sizes}:
            raise MixesError("the order of its axes")

    def _check(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            step = self._whole.steps[number]
            if not (self._keeps_apart(step) and self._is_alike(step)):
                raise MixesError(step.name)
            for value in (*step.inputs, *step.outputs):
                self._check_type(value)
            for body in self._bodies(step):
                if any(map(body.holds, body._whole.known)):
                    raise MixesError(f"a constant inside {step.name}")
                body._check(range(len(body._whole.steps)))

    def _check_type(self, value: int) -> None:
        """Raise a MixesError for what a part of it could not be."""
        kind = self._whole.types[value]
        spec = kind.sharding.spec if any(self.axes(value)) else ()
        if any(held and name for held, name in zip(self.axes(value), spec, strict=False)):
            raise MixesError("a reshard of blocks onto a mesh axis")
        if str(kind.dtype) in _WIDE and jnp.result_type(float) == jnp.float32:
            raise MixesError("64-bit numbers inside enable_x64")

    def _is_alike(self, step: Step) -> bool:
        """Whether a step does the same for other numbers of blocks, sizes of results apart."""
        if step.name in WITH_DERIVATIVES:  # Its body tells.
            return True
        others = [other.steps[step.number].eqn.params for other in self._doubled.values()]
        return all(
            name in SIZES or _is_body(value) or all(other[name] == value for other in others)
            for name, value in step.eqn.params.items()
        )

    def run(self, numbers: Iterable[int], values: Values) -> Values:
        """Compute these steps for one block, as `Program.run` does for all."""
        return self._whole.run(numbers, values, self._compute)

    def _compute(self, step: Step, arguments: list[Any]) -> Sequence[Any]:
        if not any(map(self.holds, (*step.inputs, *step.outputs))):
            return step.bind(arguments)
        match step.name:
            case "broadcast_in_dim":
                return step.bind(arguments, shape=self.shape(step.outputs[0]))
            case "reshape":
                return step.bind(arguments, new_sizes=self.shape(step.outputs[0]))
        if step.name in WITH_DERIVATIVES:
            (body,) = self._bodies(step)
            return _without_derivative(step.name, body._results)(*arguments)
        if step.bodies:  # of a loop or a branch
            return step.bind(arguments, **self._params_of_block(step))
        return step.bind(arguments)

    def _params_of_block(self, step: Step) -> dict[str, Any]:
        """Return the parameters of a loop or a branch, with its bodies traced for one block."""
        bodies = iter(self._bodies(step))

        def trace(body: Any) -> Any:
            return next(bodies)._trace() if isinstance(body, ClosedJaxpr | Jaxpr) else body

        return {
            name: tuple(map(trace, value)) if name == "branches" else trace(value)
            for name, value in step.eqn.params.items()
        }

    def _trace(self) -> ClosedJaxpr:
        program = self._whole
        types = [program.types[x].update(shape=self.shape(x)) for x in program.inputs]
        return jax.make_jaxpr(self._results)(*types)

    def _results(self, *arguments: Any) -> list[Any]:
        program = self._whole
        given = program.known | dict(zip(program.inputs, arguments, strict=True))
        values = given | self.run(range(len(program.steps)), given)
        return [values[value] for value in program.outputs]

    def _bodies(self, step: Step) -> list["Blocks"]:
        def doubled(n: int) -> dict[int, Program]:
            return {k: other.steps[step.number].bodies[n] for k, other in self._doubled.items()}

        return [Blocks(body, doubled(n), self._sizes) for n, body in enumerate(step.bodies)]

    def _keeps_apart(self, step: Step) -> bool:
        inputs = [axes for axes in map(self.axes, step.inputs) if any(axes)]
        outputs = [any(axes) for axes in map(self.axes, step.outputs)]
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
            return params["dimensions"] is None and self._reshapes_in_order(step)
        return name in ELEMENTWISE or name in BY_SHAPE

    def _reshapes_in_order(self, step: Step) -> bool:
        """Whether axes of blocks come first among the axes that are split or merged with them."""
        before, after = step.inputs[0], step.outputs[0]
        shapes = [self._whole.types[value].shape for value in (before, after)]
        return all(
            self._held(before, first) == self._held(after, second)
            and self._blocks_come_first(before, first)
            and self._blocks_come_first(after, second)
            for first, second in _groups(*shapes)
        )

    def _held(self, value: int, group: range) -> list[int]:
        axes = self.axes(value)
        return [number for axis in group for number in axes[axis]]

    def _blocks_come_first(self, value: int, group: range) -> bool:
        whole, axes, one = self._whole.types[value].shape, self.axes(value), self.shape(value)
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


def _without_derivative(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that says so where it is differentiated."""
    function = jax.custom_jvp(function)

    @function.defjvp
    def _(*_: Any) -> Any:
        raise ValueError(
            "lazy: the direction of a leaf of several blocks cannot be differentiated, as it calls "
            f"a function with a derivative of its own ({name}): differentiate with lazy=False"
        )

    return function


def blocks_of(cut: Cut) -> dict[int, int]:
    """Return how many blocks lie along each axis of blocks that has more than one, by number."""
    return {number: size for number, size in enumerate(cut.shape) if size > 1}
