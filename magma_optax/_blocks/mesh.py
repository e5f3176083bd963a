"""What JAX's types tell of devices: shardings on Explicit meshes, variation in ``shard_map``."""

from collections.abc import Collection, Sequence

import jax
from jax.sharding import NamedSharding

from magma_optax._blocks.cutting import AxisName, Cut


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes of ``shard_map`` along which ``x`` may differ from device to device.

    Empty where JAX does not track them: with ``check_vma=False`` and outside ``shard_map``.
    """
    return jax.typeof(x).manual_axis_type.varying


def vary_like(leaf: jax.Array, scores: jax.Array, axis_names: Sequence[str | None]) -> jax.Array:
    """Let the first scores of ``leaf`` differ along those ``axis_names`` along which it does."""
    return vary(scores, varying_axes(leaf).intersection(axis_names) if any(axis_names) else ())


def vary(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """Let ``x`` differ from device to device along these mesh axes of ``shard_map``."""
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def typed_like(path: str, new: jax.Array, old: jax.Array) -> jax.Array:
    """Reshard a block's new value as the one in the state, so that a state's types never change.

    Args:
      path: the leaf, for the error.
      new: array of the shape of ``old``.
      old: array from the state.

    Raises:
      ValueError: devices of ``shard_map`` would disagree on ``new`` where they agreed on ``old``.
    """
    if apart := sorted(varying_axes(new) - varying_axes(old)):
        axes = ", ".join(map(repr, apart))
        raise ValueError(
            f"{path!r}: devices along mesh axis {axes} would each get a score of their own, but "
            f"the state holds one for all. If the leaf is sharded over it, add {axes} to axis_name "
            "(or, where a block axis is sharded, use stacked(axis, axis_name=...)). If the leaf is "
            f"replicated, take the gradient's mean before update: jax.lax.pmean(grads, {axes}). If "
            "each device trains a model of its own, let the scores vary: "
            f"jax.lax.pcast(state.alignment, {axes}, to='varying')"
        )
    spec, sharding = jax.typeof(old).sharding.spec, jax.typeof(new).sharding
    if sharding.spec == spec:  # Always so on Auto meshes.
        return new
    return jax.sharding.reshard(new, NamedSharding(sharding.mesh, spec))


def sum_over_mesh(
    sums: dict[str, tuple[jax.Array, ...]], cuts: dict[str, Cut], axis_name: AxisName
) -> dict[str, tuple[jax.Array, ...]]:
    """Sum over the mesh axes that shard a block, in one collective for each set of axes.

    Args:
      sums: what each device summed of its part of every block, by path.
      cuts: the masked leaves.
      axis_name: mesh axes that shard the leaves inside ``shard_map``.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, cut in cuts.items():
        axes = tuple(name for name in names if name not in cut.axis_names)
        varying = frozenset[str]().union(*map(varying_axes, sums[path]))
        if varying:  # A leaf sharded over some of the axes: JAX refuses to sum over the others.
            axes = tuple(name for name in axes if name in varying)
        groups.setdefault(axes, []).append(path)
    total = {}
    for axes, paths in groups.items():
        group = {path: sums[path] for path in paths}
        total |= jax.lax.psum(group, axes) if axes else group
    return total
