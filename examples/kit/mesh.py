"""Meshes of devices: which device stands where."""

from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def device_mesh(
    shape: Sequence[int],
    axes: Sequence[str],
    types: Sequence[AxisType],
    devices: Sequence[jax.Device],
) -> Mesh:
    """Returns a mesh of `devices`, its neighbours being neighbours on TPU's network.

    Args:
        shape: The size of every axis; their product is the number of devices.
        axes: Their names. Where the devices form several TPU slices, only the first axis runs
            between slices.
        types: Auto or Explicit, for each.
        devices: Those of this program, or of a topology to compile for.

    Raises:
        ValueError: If the first axis isn't a multiple of the number of slices.
    """
    if devices[0].platform != "tpu":
        return jax.make_mesh(shape, axes, axis_types=types, devices=devices)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if shape[0] % slices:
        raise ValueError(
            f"{axes[0]}={shape[0]} is not a multiple of the {slices} slices; between slices the "
            f"network is slow, so only {axes[0]} may run there"
        )
    within = (shape[0] // slices, *shape[1:])
    # An axis may take a part of a direction of the network, as 2 of 8 chips.
    if slices > 1:
        between = (slices, *[1] * (len(shape) - 1))
        grid = mesh_utils.create_hybrid_device_mesh(
            within, between, devices, allow_split_physical_axes=True
        )
    else:
        grid = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    return Mesh(grid, axes, axis_types=types)
