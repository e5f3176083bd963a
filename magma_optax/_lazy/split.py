"""What of an update the new state needs, and what each direction needs beyond that."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from magma_optax._lazy.primitives import CHEAP, SCALING
from magma_optax._lazy.program import Program


class Split(NamedTuple):
    """The steps of a base's update, by number.

    Attributes:
      always: what is computed whatever the coins say: the new state, the directions of leaves that
        are not masked, those that cost less than a branch, and what devices do together.
      alone: by path, what serves the direction of one masked leaf and nothing else.
    """

    always: set[int]
    alone: dict[str, set[int]]


def split(
    program: Program, directions: Mapping[str, int], masked: Sequence[str], arrays: Sequence[int]
) -> Split:
    """Tell what a dropped block's direction can leave out.

    Args:
      program: the base's update, whose outputs are the directions and then the new state.
      directions: by path, the value that is the direction of each leaf.
      masked: paths of the leaves that have blocks.
      arrays: the values that are gradients and parameters.

    Raises:
      ValueError: a direction serves the state, or the directions of two leaves share more than
        numbers.
    """
    state = program.outputs[len(directions) :]
    fixed = [n for n, step in enumerate(program.steps) if step.runs_always]
    of_fixed = [value for n in fixed for value in program.steps[n].inputs]
    always = {*fixed, *program.needed([*state, *of_fixed])}
    beyond = {path: program.needed([value], given=always) for path, value in directions.items()}
    owners: dict[int, str] = {}
    shared: set[int] = set()
    dependent = program.reached(arrays)
    for path, numbers in beyond.items():
        for number in numbers:
            owner = owners.setdefault(number, path)
            if owner == path:
                continue
            if not dependent.isdisjoint(program.steps[number].outputs):
                raise ValueError(_MIXES.format(path, owner))
            shared.add(number)
    always |= shared
    alone = {path: beyond[path] - shared for path in masked}

    if masked and all(_scales(program, number) for path in masked for number in alone[path]):
        raise ValueError(_NOTHING_LEFT.format(masked[0]))

    def is_cheap(numbers: set[int]) -> bool:
        return all(program.steps[number].names <= CHEAP for number in numbers)

    alone = {path: numbers for path, numbers in alone.items() if not is_cheap(numbers)}
    rest = [numbers for path, numbers in beyond.items() if path not in alone]
    return Split(always.union(*rest), alone)


def _scales(program: Program, number: int) -> bool:
    """Whether a step multiplies or divides an array by a number, or copies it."""

    def is_number(value: int) -> bool:
        maker = program.maker(value)
        return program.types[value].shape == () or (
            maker is not None and maker.name == "broadcast_in_dim" and is_number(maker.inputs[0])
        )

    step = program.steps[number]
    return step.name in SCALING and [*map(is_number, step.inputs)].count(False) <= 1


_MIXES = (
    "lazy: the base computes the directions of {!r} and {!r} together, as a norm over all leaves "
    "or tied leaves do, so neither can be left out: put that part around the wrapper, as in "
    "optax.chain(with_magma(base, lazy=True), the_rest), or use lazy=False"
)
_NOTHING_LEFT = (
    "lazy: the base's new state needs the direction of {!r}, or the direction is the state or the "
    "gradient times a number, so there is nothing to leave out for a dropped block: use lazy=False"
)
