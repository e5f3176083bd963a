"""What of an update the new state needs, and what each direction needs beyond that."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from magma_optax._lazy.primitives import CHEAP, SCALING
from magma_optax._lazy.program import Program


class Split(NamedTuple):
    """The steps of a base's update, by number.

    Attributes:
      always: what is computed whatever the coins say: the new state, the directions of leaves that
        are not masked, and those that cost less than a branch.
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
    effects = [n for n, step in enumerate(program.steps) if step.eqn.effects]
    of_effects = [value for n in effects for value in program.steps[n].inputs]
    always = {*effects, *program.needed([*state, *of_effects])}
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

    def names(path: str) -> set[str]:
        return {program.steps[number].name for number in alone[path]}

    if masked and all(names(path) <= SCALING for path in masked):
        raise ValueError(_NOTHING_LEFT.format(masked[0]))
    alone = {path: numbers for path, numbers in alone.items() if not names(path) <= CHEAP}
    rest = [numbers for path, numbers in beyond.items() if path not in alone]
    return Split(always.union(*rest), alone)


_MIXES = (
    "lazy: the base computes the directions of {!r} and {!r} together, as a norm over all leaves "
    "or tied leaves do, so neither can be left out: put that part around the wrapper, as in "
    "optax.chain(with_magma(base, lazy=True), the_rest), or use lazy=False"
)
_NOTHING_LEFT = (
    "lazy: the base's new state needs the direction of {!r}, or the direction is the state or the "
    "gradient times a number, so there is nothing to leave out for a dropped block: use lazy=False"
)
