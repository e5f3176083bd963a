"""A base's update as a program: what it computes, step by step, of its inputs."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from magma_optax._lazy.primitives import CALLS, COLLECTIVES, WITH_DERIVATIVES

Values = dict[int, Any]


class Step(NamedTuple):
    """One primitive operation between values, which are known by number.

    Attributes:
      number: its place in the program.
      eqn: the operation.
      inputs: its values.
      outputs: what it makes.
      bodies: what a loop repeats, or what a branch chooses from.
    """

    number: int
    eqn: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: tuple["Program", ...]

    @property
    def name(self) -> str:
        """The primitive's."""
        return self.eqn.primitive.name

    @property
    def names(self) -> set[str]:
        """The primitives' names, of a call with derivatives of its own those of its body."""
        if self.name not in WITH_DERIVATIVES:
            return {self.name}
        return {name for body in self.bodies for step in body.steps for name in step.names}

    @property
    def runs_always(self) -> bool:
        """Whether no device may leave it out: it has effects, or devices wait for each other."""
        inside = () if self.name == "shard_map" else self.bodies  # All devices are in that.
        return (
            bool(self.eqn.effects)
            or self.name in COLLECTIVES
            or any(step.runs_always for body in inside for step in body.steps)
        )

    def bind(self, arguments: Sequence[Any], **params: Any) -> Sequence[Any]:
        """Compute it, with other parameters where ``params`` says so."""
        primitive = self.eqn.primitive
        with self.eqn.ctx.manager:
            made = primitive.bind(*arguments, **primitive.get_bind_params(self.eqn.params | params))
        return made if primitive.multiple_results else [made]


class Program:
    """A traced function, in which calls are opened so that their parts come apart.

    Two programs of one function, traced for arguments of other shapes, number their steps and
    values alike as long as the function does not choose by shape.

    Attributes:
      steps: in order.
      types: the abstract value (shape, dtype, sharding) of every value, by its number.
      known: constants and numbers, by the value's number.
      inputs: the arguments.
      outputs: the results.
      shapes: the tree of the results, where a Python function was traced.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], shapes: Any = None) -> None:
        self.steps: list[Step] = []
        self.types: list[Any] = []
        self.known: Values = {}
        self.shapes = shapes
        self.inputs = self._new(jaxpr.invars)
        self.outputs = self._add(jaxpr, consts, self.inputs)
        self._maker = {value: n for n, step in enumerate(self.steps) for value in step.outputs}

    @classmethod
    def trace(cls, function: Callable[..., Any], *args: Any) -> Self:
        """Trace a function of trees; inputs and outputs are their leaves."""
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        return cls(closed.jaxpr, closed.consts, shapes)

    def _new(self, variables: Iterable[Any]) -> list[int]:
        first = len(self.types)
        self.types += [variable.aval for variable in variables]
        return list(range(first, len(self.types)))

    def _add(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        of_consts = self._new(jaxpr.constvars)
        self.known.update(zip(of_consts, consts, strict=True))
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers.update(zip(jaxpr.constvars, of_consts, strict=True))

        def read(atom: Any) -> int:
            if not isinstance(atom, Literal):
                return numbers[atom]
            (value,) = self._new([atom])
            self.known[value] = atom.val
            return value

        for eqn in jaxpr.eqns:
            values = tuple(map(read, eqn.invars))
            bodies = list(_bodies(eqn))
            if eqn.primitive.name in CALLS:
                outputs = self._add(*bodies[0], values)
            else:
                outputs = self._new(eqn.outvars)
                programs = tuple(Program(*body) for body in bodies)
                self.steps.append(Step(len(self.steps), eqn, values, tuple(outputs), programs))
            numbers.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def steps_like(self, other: "Program") -> bool:
        """Whether both programs have the same steps between the same values, shapes apart."""
        return len(self.steps) == len(other.steps) and all(
            (a.name, a.inputs, a.outputs, len(a.bodies))
            == (b.name, b.inputs, b.outputs, len(b.bodies))
            and all(x.steps_like(y) for x, y in zip(a.bodies, b.bodies, strict=True))
            for a, b in zip(self.steps, other.steps, strict=True)
        )

    def maker(self, value: int) -> Step | None:
        """Return the step that makes a value; None for inputs and constants."""
        return self.steps[self._maker[value]] if value in self._maker else None

    def needed(self, values: Iterable[int], given: Collection[int] = ()) -> set[int]:
        """Return the numbers of the steps that ``values`` come from, but for steps ``given``."""
        found: set[int] = set()
        pending = list(values)
        while pending:
            step = self._maker.get(pending.pop())
            if step is not None and step not in found and step not in given:
                found.add(step)
                pending += self.steps[step].inputs
        return found

    def reached(self, values: Iterable[int]) -> set[int]:
        """Return the values that depend on ``values``, themselves included."""
        found = set(values)
        for step in self.steps:
            if not found.isdisjoint(step.inputs):
                found.update(step.outputs)
        return found

    def read_by(self, numbers: Collection[int]) -> set[int]:
        """Return the values that these steps read and do not make themselves, constants too."""
        made = {value for n in numbers for value in self.steps[n].outputs}
        return {value for n in numbers for value in self.steps[n].inputs} - made

    def run(
        self,
        numbers: Iterable[int],
        values: Values,
        compute: Callable[[Step, list[Any]], Sequence[Any]] = Step.bind,
    ) -> Values:
        """Compute these steps from ``values``; returns what they make.

        Args:
          numbers: the steps.
          values: what they read and do not make.
          compute: how one is computed of its arguments.
        """
        made: Values = {}

        def read(value: int) -> Any:
            return made[value] if value in made else values.get(value, self.known.get(value))

        for number in sorted(numbers):
            step = self.steps[number]
            made.update(zip(step.outputs, compute(step, [*map(read, step.inputs)]), strict=True))
        return made


def _bodies(eqn: JaxprEqn) -> Iterable[tuple[Jaxpr, Sequence[Any]]]:
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if isinstance(body, ClosedJaxpr):
                yield body.jaxpr, body.consts
            elif isinstance(body, Jaxpr):
                yield body, ()
