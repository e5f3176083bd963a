"""A base's update in two parts: its new state now, the directions once the coins are known.

The direction of a dropped block is thrown away. Where it is what a step costs, as Muon's
orthogonalization is, leaving it out makes the step cheaper than the base's own. Nothing is known of
the base but its update function: that is traced, and what only one leaf's direction needs is put
into a branch on the leaf's coin. Where a leaf holds many blocks, the surviving ones are cut out and
computed in a loop.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from magma_optax._blocks.cutting import Cut
from magma_optax._blocks.mesh import vary
from magma_optax._blocks.paths import NamedTree, distinct
from magma_optax._lazy.apart import check_apart
from magma_optax._lazy.blocks import Blocks, Index, MixesError, blocks_of
from magma_optax._lazy.doubled import ShardedError, trace_doubled
from magma_optax._lazy.program import Program, Values
from magma_optax._lazy.split import split

_ENOUGH = 2**21  # Elements of a block that are work enough for a device.
_BATCH = 4  # Smaller blocks are computed together.

Directions = Callable[[Mapping[str, jax.Array]], NamedTree]


def update_lazily(
    inner: optax.GradientTransformationExtraArgs,
    cuts: dict[str, Cut],
    arguments: tuple[Any, Any, Any],
    extra_args: Mapping[str, Any],
) -> tuple[Directions, Any]:
    """Advance the state of a base; its directions are computed when asked for.

    Args:
      inner: the base.
      cuts: how each masked leaf is cut.
      arguments: gradients, state and parameters.
      extra_args: for the base.

    Returns:
      A function of the coins m_t, by path, that returns the base's updates, with anything finite in
      the place of dropped blocks; and the new state.

    Raises:
      ValueError: the base is not separable by leaf, or by block; with the path.
    """
    update = functools.partial(inner.update, **extra_args)
    program = Program.trace(update, *arguments)
    lazy = LazyUpdate(update, inner.init, cuts, arguments, program)
    return lazy.directions, lazy.new_state()


def check_separable(
    inner: optax.GradientTransformationExtraArgs, cuts: dict[str, Cut], params: Any, state: Any
) -> None:
    """Raise what `update_lazily` would; nothing if the update needs what only a real step has."""
    arguments = params, state, params
    try:
        program = Program.trace(inner.update, *arguments)
    except Exception:  # A fault of the base itself shows again at the real update.
        return
    LazyUpdate(inner.update, inner.init, cuts, arguments, program)


class LazyUpdate:
    """One update of a base, traced and split."""

    def __init__(
        self,
        update: Callable[..., Any],
        init: Callable[[Any], Any],
        cuts: dict[str, Cut],
        arguments: tuple[Any, Any, Any],
        program: Program,
    ) -> None:
        """Split it; nothing is computed yet. Errors: those of `update_lazily`.

        Args:
          update: the base's, with its extra arguments.
          init: the base's.
          cuts: how each masked leaf is cut.
          arguments: gradients, state and parameters.
          program: ``update``, traced for them.
        """
        self._program = program
        self._delta, self._state = program.shapes
        paths = distinct([path for path, _ in NamedTree(self._delta).pairs])
        self._direction = dict(zip(paths, program.outputs[: len(paths)], strict=True))
        gradients, state, _ = (len(jax.tree.leaves(tree)) for tree in arguments)
        arrays = [*program.inputs[:gradients], *program.inputs[gradients + state :]]
        masked = [path for path in self._direction if path in cuts]
        self._always, self._alone = split(program, self._direction, masked, arrays)
        _check_devices({path: cuts[path] for path in self._alone})
        self._cuts, self._arguments = cuts, arguments
        self._blocks = self._find_blocks(functools.partial(trace_doubled, update, init, arguments))
        self._values: Values = {}

    def _find_blocks(self, trace: Callable[[dict[str, int]], Program]) -> dict[str, Blocks]:
        sizes = {path: blocks_of(self._cuts[path]) for path in self._alone}
        doubled = {}
        for number in sorted({number for of_leaf in sizes.values() for number in of_leaf}):
            doubled[number] = self._with_more_blocks(
                trace,
                {
                    p: self._cuts[p].axes[number]
                    for p, of_leaf in sizes.items()
                    if number in of_leaf
                },
            )
        found = {}
        for path, of_leaf in sizes.items():
            if not of_leaf:
                continue
            try:
                programs = {number: doubled[number] for number in of_leaf}
                found[path] = Blocks(self._program, programs, of_leaf)
                check_apart(
                    found[path], self._alone[path], self._direction[path], self._cuts[path].axes
                )
            except MixesError as error:
                raise ValueError(_MIXES.format(path, error)) from error
        return found

    def _with_more_blocks(
        self, trace: Callable[[dict[str, int]], Program], axes: dict[str, int]
    ) -> Program:
        """Trace the update for twice as many blocks along these axes of leaves, by path."""
        path = next(iter(axes))
        try:
            program = trace(axes)
        except ShardedError as error:
            raise ValueError(_SHARDED.format(error)) from error
        except Exception as error:  # Whatever a base raises for shapes that it does not expect.
            said = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            refusal = ValueError(_NOT_BY_BLOCK.format(path, said))
            refusal.__cause__ = error
        else:
            if self._program.steps_like(program):
                return program
            reason = "steps that depend on the number of blocks"
            refusal = ValueError(_MIXES.format(path, reason))
        for each, axis in axes.items() if len(axes) > 1 else ():  # Which leaf is it?
            self._with_more_blocks(trace, {each: axis})
        raise refusal

    def new_state(self) -> Any:
        """Compute all that does not wait for a coin."""
        given = map(jnp.asarray, jax.tree.leaves(self._arguments))
        values = self._program.known | dict(zip(self._program.inputs, given, strict=True))
        self._values = values | self._program.run(self._always, values)
        leaves = [self._values[value] for value in self._program.outputs[len(self._direction) :]]
        return jax.tree.unflatten(jax.tree.structure(self._state), leaves)

    def directions(self, m: Mapping[str, jax.Array]) -> NamedTree:
        """Compute the base's updates, but for the dropped blocks."""

        def of(path: str, value: int) -> jax.Array:
            if path in self._blocks:
                return self._by_block(path, m[path])
            if path in self._alone:
                return self._of_leaf(path, m[path])
            return self._values[value]

        leaves = [of(path, value) for path, value in self._direction.items()]
        return NamedTree(jax.tree.unflatten(jax.tree.structure(self._delta), leaves))

    def _of_leaf(self, path: str, m: jax.Array) -> jax.Array:
        value = self._direction[path]

        def compute() -> jax.Array:
            return self._program.run(self._alone[path], self._values)[value]

        return jax.lax.cond(m.reshape(()), compute, lambda: _zeros(self._program.types[value]))

    def _by_block(self, path: str, m: jax.Array) -> jax.Array:
        """Survivors, one by one, or in batches where blocks are small.

        What the last batch lacks is filled up with dropped blocks, or with survivors once more: a
        batch of another size would be another body to compile.
        """
        blocks, cut, steps = self._blocks[path], self._cuts[path], self._alone[path]
        value = self._direction[path]
        read, shared = blocks.read_by(steps), self._values
        size = 1 if math.prod(blocks.shape(value)) >= _ENOUGH else min(_BATCH, cut.size)
        order = jnp.argsort(~m.ravel())  # survivors first
        places = jnp.stack(jnp.unravel_index(order, cut.shape), axis=1).astype(np.int32)

        def compute(index: Sequence[Index]) -> Iterable[jax.Array]:
            parts = [{x: blocks.cut_out(x, shared[x], i) for x in read} for i in index]
            if len(parts) == 1 or not read:  # where nothing is read, all directions are the same
                return [blocks.run(steps, shared | parts[0])[value]] * len(parts)
            given = jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts)
            return jax.vmap(lambda given: blocks.run(steps, shared | given)[value])(given)

        def add(n: jax.Array, found: jax.Array) -> jax.Array:
            # A start beyond the last whole batch is moved back to it.
            start = n * np.int32(size), np.int32(0)
            batch = jax.lax.dynamic_slice(
                places, start, (size, len(cut.axes)), allow_negative_indices=False
            )
            index = [tuple(place) for place in batch]
            for i, block in zip(index, compute(index), strict=True):
                starts: list[Any] = [np.int32(0)] * cut.ndim
                for axis, at in zip(cut.axes, i, strict=True):
                    starts[axis] = at
                found = jax.lax.dynamic_update_slice(
                    found, block, starts, allow_negative_indices=False
                )
            return found

        batches = -(-jnp.sum(m, dtype=np.int32) // np.int32(size))
        found = _zeros(self._program.types[value])
        return jax.lax.fori_loop(np.int32(0), batches, add, found)


def _check_devices(cuts: Mapping[str, Cut]) -> None:
    """Refuse a part of `shard_map`'s mesh that is not its own, where devices toss unlike coins.

    There XLA may put a collective into a branch that not all devices take, and they would wait for
    ever.
    """
    mesh = jax.sharding.get_abstract_mesh()
    others = [n for n in mesh.axis_names if n not in mesh.manual_axes and mesh.shape[n] > 1]
    for path, cut in cuts.items():
        if others and any(name in mesh.manual_axes for name in cut.axis_names):
            raise ValueError(_PARTLY_MANUAL.format(path, ", ".join(map(repr, others))))


def _zeros(kind: Any) -> jax.Array:
    """Zeros of a type: its shape, dtype, sharding and variation over devices."""
    sharding = kind.sharding if any(kind.sharding.spec) else None
    zeros = jnp.zeros(kind.shape, kind.dtype, out_sharding=sharding)
    return vary(zeros, kind.manual_axis_type.varying)


_NOT_BY_BLOCK = (
    "lazy: the base cannot be asked for the direction of one block of {!r}. For twice as many "
    "blocks it raises {}. Use lazy=False"
)
_SHARDED = "lazy: one block cannot be left out alone: {}. Or use lazy=False"
_PARTLY_MANUAL = (
    "lazy: each device tosses its own coins for its own blocks of {!r} (axis_name), so devices "
    "leave out different directions. Over mesh axes that shard_map leaves to JAX, here {}, they "
    "could wait for each other without end: give shard_map all axes of the mesh, or use lazy=False"
)
_MIXES = (
    "lazy: the base's direction of {!r} mixes the blocks of the leaf, or is not known to keep them "
    "apart (in {}), so one block's cannot be left out: use blocks='leaf' or lazy=False"
)
