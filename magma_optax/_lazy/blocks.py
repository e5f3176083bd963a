"""One block of a leaf: where it lies in every array of an update, and the update of it alone.

An axis of blocks is found by doubling: the update is traced as it is, and once more for each of the
leaf's axes of blocks, for parameters with twice as many blocks along it. In both traces the same
steps make the same values, and what doubles in size indexes blocks. Whether the steps keep blocks
apart is told in `apart`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from magma_optax._blocks.cutting import Cut
from magma_optax._lazy.primitives import WITH_DERIVATIVES
from magma_optax._lazy.program import Program, Step, Values

Index = Sequence[jax.Array]  # of a block along each of its leaf's axes of blocks


class MixesError(Exception):
    """A step mixes blocks, or is not known to keep them apart; its primitive's name."""


class Blocks:
    """The blocks of one leaf in the values of a program.

    Attributes:
      whole: the update as it is.
      doubled: the same, by axis of blocks (its number within the cut), with twice as many along it.
      sizes: how many blocks there are along each axis of blocks, by number.
    """

    def __init__(self, whole: Program, doubled: Mapping[int, Program], sizes: Mapping[int, int]):
        """Take programs that differ in shapes alone."""
        self.whole, self.doubled, self.sizes = whole, doubled, sizes

    def axes(self, value: int) -> list[tuple[int, ...]]:
        """Return, for each axis of a value, the axes of blocks that it holds, slowest first.

        Raises:
          MixesError: the value holds some of them and not others, or in another order, or a part of
            a block.
        """
        shape = self.whole.types[value].shape
        held: list[tuple[int, ...]] = [()] * len(shape)
        for number, program in self.doubled.items():
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
        if [number for axis in held for number in axis] not in ([], sorted(self.doubled)):
            raise MixesError("shapes")
        return held

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of one block's part of a value."""
        sizes = self.whole.types[value].shape
        return tuple(
            size // self._number(axis) for size, axis in zip(sizes, self.axes(value), strict=True)
        )

    def _number(self, axis: Iterable[int]) -> int:
        """Return how many blocks an axis holds, by the axes of blocks in it."""
        return math.prod(self.sizes[number] for number in axis)

    def holds(self, value: int) -> bool:
        """Whether a value has a part for each block."""
        return any(self.axes(value))

    def cut_out(self, value: int, x: jax.Array, index: Index) -> jax.Array:
        """Return the part of a value, ``x``, that belongs to one block; its axes hold one each."""
        shape = self.shape(value)
        starts = [
            index[held[0]] * np.int32(size) if held else np.int32(0)
            for held, size in zip(self.axes(value), shape, strict=True)
        ]
        return jax.lax.dynamic_slice(x, starts, shape, allow_negative_indices=False)

    def read_by(self, numbers: Collection[int]) -> list[int]:
        """Return what these steps read and do not make, as far as it has a part for each block."""
        return [x for x in self.whole.read_by(numbers) if self.holds(x)]

    def run(self, numbers: Iterable[int], values: Values) -> Values:
        """Compute these steps for one block, as `Program.run` does for all."""
        return self.whole.run(numbers, values, self._compute)

    def _compute(self, step: Step, arguments: list[Any]) -> Sequence[Any]:
        if not any(map(self.holds, (*step.inputs, *step.outputs))):
            return step.bind(arguments)
        match step.name:
            case "broadcast_in_dim":
                return step.bind(arguments, shape=self.shape(step.outputs[0]))
            case "reshape":
                return step.bind(arguments, new_sizes=self.shape(step.outputs[0]))
        if step.name in WITH_DERIVATIVES:
            (body,) = self.bodies(step)
            return _without_derivative(step.name, body._results)(*arguments)
        if step.bodies:  # of a loop or a branch
            return step.bind(arguments, **self._params_of_block(step))
        return step.bind(arguments)

    def _params_of_block(self, step: Step) -> dict[str, Any]:
        """Return the parameters of a loop or a branch, with its bodies traced for one block."""
        bodies = iter(self.bodies(step))

        def trace(body: Any) -> Any:
            return next(bodies)._trace() if isinstance(body, ClosedJaxpr | Jaxpr) else body

        return {
            name: tuple(map(trace, value)) if name == "branches" else trace(value)
            for name, value in step.eqn.params.items()
        }

    def _trace(self) -> ClosedJaxpr:
        program = self.whole
        types = [program.types[x].update(shape=self.shape(x)) for x in program.inputs]
        return jax.make_jaxpr(self._results)(*types)

    def _results(self, *arguments: Any) -> list[Any]:
        program = self.whole
        given = program.known | dict(zip(program.inputs, arguments, strict=True))
        values = given | self.run(range(len(program.steps)), given)
        return [values[value] for value in program.outputs]

    def bodies(self, step: Step) -> list["Blocks"]:
        """Return the blocks in the bodies of a loop, a branch or a call."""

        def doubled(n: int) -> dict[int, Program]:
            return {k: other.steps[step.number].bodies[n] for k, other in self.doubled.items()}

        return [Blocks(body, doubled(n), self.sizes) for n, body in enumerate(step.bodies)]


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
