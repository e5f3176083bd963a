"""An update traced for parameters with twice as many blocks along one axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from magma_optax._blocks.paths import NamedTree
from magma_optax._lazy.program import Program


class ShardedError(ValueError):
    """A mesh shards an axis that indexes blocks."""


def trace_doubled(
    update: Callable[..., Any],
    init: Callable[[Any], Any],
    arguments: tuple[Any, Any, Any],
    axes: dict[str, int],
) -> Program:
    """Trace a base's update for larger parameters.

    Args:
      update: the base's.
      init: the base's, which tells the shapes of such parameters' state.
      arguments: gradients, state and parameters (or None) as they are.
      axes: by path, the axis of a leaf that is to be twice as long.

    Raises:
      ShardedError: a mesh shards such an axis.
      Exception: whatever the base raises for such parameters.
    """
    gradients, state, params = arguments

    def double(path: str, x: Any) -> Any:
        if path not in axes:
            return x
        shape = list(jnp.shape(x))
        shape[axes[path]] *= 2
        return _of_shape(path, x, shape)

    larger, larger_params = NamedTree(gradients).map(double), NamedTree(params).map(double)
    of_init = jax.eval_shape(init, larger if params is None else larger_params)
    first = next(iter(axes))
    larger_state = jax.tree.map(
        lambda x, like: _of_shape(first, x, jnp.shape(like)), state, of_init
    )
    return Program.trace(update, larger, larger_state, larger_params)


def _of_shape(path: str, x: Any, shape: Any) -> Any:
    """Return the type that ``x`` has, but of this shape."""
    kind = jax.typeof(x)
    for axis, (size, wanted) in enumerate(zip(kind.shape, shape, strict=True)):
        if wanted != size and kind.sharding.spec[axis] is not None:
            raise ShardedError(
                f"mesh axis {kind.sharding.spec[axis]!r} shards the axis of {path!r} that indexes "
                "blocks. Inside shard_map use stacked(axis, axis_name=...): each device has its own"
            )
    return kind.update(shape=tuple(shape))
