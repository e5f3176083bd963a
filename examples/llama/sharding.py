"""Where parameters, optimizer state and activations live on a mesh of devices.

The mesh has three axes. `data` and `fsdp` share out the rows of a batch; `fsdp` also shares out
the parameters, which are gathered where they are used; `tensor` splits attention heads, the MLP's
width and the vocabulary. The same rules serve any mesh: an axis of size 1 does nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.kit.mesh import device_mesh
from examples.kit.options import SettingsError
from examples.kit.paths import path_string
from examples.kit.step import cut
from examples.llama.config import LlamaConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # the mesh axes over which the rows of a batch are spread

# What the dimensions of a parameter are, by the end of its path. What is not listed (the norms'
# vectors) is replicated, and so is a leading axis of stacked layers.
DIMENSIONS = {
    "embed_tokens/embedding": ("vocabulary", "hidden"),
    "q_proj/kernel": ("hidden", "heads"),
    "k_proj/kernel": ("hidden", "kv_heads"),
    "v_proj/kernel": ("hidden", "kv_heads"),
    "o_proj/kernel": ("heads", "hidden"),
    "gate_proj/kernel": ("hidden", "width"),
    "up_proj/kernel": ("hidden", "width"),
    "down_proj/kernel": ("width", "hidden"),
    "lm_head/kernel": ("hidden", "vocabulary"),
}
MESH_AXIS = {
    "hidden": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "width": "tensor",
    "vocabulary": "tensor",
}

Module = TypeVar("Module", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings of everything that a training step takes and returns.

    Attributes:
        mesh: The devices, with the axes `AXES`.
        rows: Of a batch cut into micro-batches (N, B / N, T).
        replicated: Of scalars, scores, coins' key and metrics.
        params: Like the parameters.
        opt_state: Like the optimizer's state: what is shaped like a parameter lies like it.
    """

    mesh: Mesh
    rows: NamedSharding
    replicated: NamedSharding
    params: optax.Params
    opt_state: optax.OptState


def make_mesh(
    sizes: Mapping[str, int],
    explicit: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns a mesh of all devices.

    Args:
        sizes: The size of every axis in `AXES`; their product is the number of devices.
        explicit: Make `data` and `fsdp` Explicit axes, so that JAX checks every sharding while
            tracing. `tensor` stays Auto.
        devices: Those of a topology, to compile for; by default the ones that are there. Where
            they form several TPU slices, only `data` runs between slices.

    Raises:
        ValueError: If the size of `data` isn't a multiple of the number of slices.
    """
    kind = AxisType.Explicit if explicit else AxisType.Auto
    shape = [sizes[name] for name in AXES]
    devices = jax.devices() if devices is None else devices
    return device_mesh(shape, AXES, (kind, kind, AxisType.Auto), devices)


def mesh_and_share(
    sizes: Mapping[str, int],
    explicit: bool,
    rows: int,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Mesh, int, int]:
    """Returns `make_mesh` of the devices, and which share of a batch this process reads.

    Args:
        sizes: As for `make_mesh`.
        explicit: As for `make_mesh`.
        rows: Of a batch, over all processes.
        devices: As for `make_mesh`.

    Returns:
        The mesh, and what `reader` does.

    Raises:
        SettingsError: If the mesh doesn't suit the slices or the hosts.
    """
    try:
        mesh = make_mesh(sizes, explicit, devices)
        return mesh, *reader(mesh, rows)
    except ValueError as error:
        raise SettingsError(f"--mesh: {error}") from None


def describe(mesh: Mesh) -> str:
    """Names the devices and, where there are several, the mesh that they form."""
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return f"{mesh.size} device(s){hosts}{f': {axes}' if axes else ''}"


def make_layout(
    mesh: Mesh,
    config: LlamaConfig,
    tx: optax.GradientTransformation,
    params: optax.Params,
) -> Layout:
    """Applies the rules to a model and its optimizer.

    Args:
        mesh: From `make_mesh`.
        config: The model's sizes.
        tx: The optimizer.
        params: The parameters, or their `jax.ShapeDtypeStruct`.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map_with_path(
        lambda path, leaf: NamedSharding(mesh, parameter_spec(path, leaf.shape, config, mesh)),
        params,
    )
    return Layout(
        mesh,
        NamedSharding(mesh, PartitionSpec(None, ROWS)),
        replicated,
        shardings,
        state_shardings(tx, params, shardings, replicated),
    )


def parameter_spec(
    path: tuple[Any, ...], shape: tuple[int, ...], config: LlamaConfig, mesh: Mesh
) -> PartitionSpec:
    """Returns how a parameter is split; a dimension that doesn't divide is left whole.

    Args:
        path: The leaf's path in the tree of parameters.
        shape: Its shape.
        config: Says how many heads there are: a head is never cut.
        mesh: The devices.
    """
    names = path_string(path).split("/")
    dimensions = DIMENSIONS.get("/".join(names[-2:]), ())
    axes: list[str | None] = [None] * (len(shape) - len(dimensions))
    for name, size in zip(dimensions, shape[len(axes) :], strict=True):
        axis = MESH_AXIS[name]
        parts = {"heads": config.num_heads, "kv_heads": config.kv_heads}.get(name, size)
        axes.append(axis if parts % mesh.shape[axis] == 0 else None)
    return PartitionSpec(*axes) if dimensions else PartitionSpec()


def state_shardings(
    tx: optax.GradientTransformation,
    params: optax.Params,
    shardings: optax.Params,
    replicated: NamedSharding,
) -> optax.OptState:
    """Returns a sharding for each leaf of ``tx.init(params)``.

    `jit(tx.init)` alone would replicate the moments: zeros inherit no sharding.

    Args:
        tx: The optimizer.
        params: The parameters, or their `jax.ShapeDtypeStruct`.
        shardings: The parameters' shardings.
        replicated: Given to all that isn't shaped like its parameter: counters, scores, keys and
            Adafactor's row and column averages.
    """

    def like_parameter(leaf: Any, param: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, optax.MaskedNode):  # a parameter that this part doesn't handle
            return leaf
        return sharding if leaf.shape == param.shape else replicated

    state = jax.eval_shape(tx.init, params)
    with jax.transfer_guard("allow"):  # it calls tx.init, whose counters are arrays
        mapped = optax.tree.map_params(
            tx,
            like_parameter,
            state,
            params,
            shardings,
            transform_non_params=lambda _: replicated,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
    return jax.tree.broadcast(mapped, state)  # the scores' dictionary was one leaf


def reader(mesh: Mesh, count: int) -> tuple[int, int]:
    """Returns which share of each batch this process reads: its number and how many there are.

    Usually that is the process and the number of processes. Processes between which only the
    `tensor` axis runs hold the same rows and read the same share.

    Args:
        mesh: The devices.
        count: Rows of a batch, over all processes.

    Raises:
        ValueError: If the processes' rows overlap in part.
    """
    rows = NamedSharding(mesh, PartitionSpec(ROWS))
    held: dict[int, set[tuple[int, int]]] = {}
    for device, (index, *_) in rows.devices_indices_map((count,)).items():
        held.setdefault(device.process_index, set()).add(index.indices(count)[:2])
    shares = sorted({tuple(sorted(pieces)) for pieces in held.values()})
    if sum(len(share) for share in shares) != len({piece for s in shares for piece in s}):
        raise ValueError("the hosts would share rows in part; give tensor fewer devices")
    return shares.index(tuple(sorted(held[jax.process_index()]))), len(shares)


def place(batch: Mapping[str, np.ndarray], layout: Layout, count: int) -> dict[str, Array]:
    """Puts this host's rows (B / hosts, T) on its devices.

    Returns:
        The whole batch in `count` micro-batches, (count, B / count, T), each with rows of every
        device.
    """
    return {name: put(x, layout.rows) for name, x in cut(batch, count).items()}


def put(x: np.ndarray | np.generic, sharding: NamedSharding) -> Array:
    """Puts this host's part of an array on its devices and returns the whole array."""
    with jax.transfer_guard("allow"):  # it is meant; with several hosts JAX takes it for implicit
        return jax.make_array_from_process_local_data(sharding, x)


def zeros(params: optax.Params, layout: Layout) -> optax.Params:
    """Returns zeros that are split as the parameters are; for use inside a jitted function."""
    zeros = optax.tree.zeros_like(params)
    if is_explicit(layout.mesh):  # then zeros_like has seen to it
        return zeros
    return jax.lax.with_sharding_constraint(zeros, layout.params)


# ---------------------------------------------------------------------------------------------
# Inside the model. All look at the mesh in use (`jax.set_mesh`); without one they do nothing.


def spread(x: Array) -> Array:
    """Keeps activations spread by rows, (B, ...), as far as the rows divide."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = row_spec(x.shape[0])
    if spec is None:
        return x
    if is_explicit(mesh):
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def row_spec(rows: int) -> PartitionSpec | None:
    """Returns how `rows` rows are spread over the mesh in use; None without such a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return None
    divides = rows % math.prod(mesh.shape[axis] for axis in ROWS) == 0
    return PartitionSpec(ROWS) if divides else PartitionSpec()


def is_explicit(mesh: jax.sharding.AbstractMesh | Mesh) -> bool:
    """Says whether shardings are part of the types."""
    return AxisType.Explicit in mesh.axis_types


def gathered(module: Module) -> Module:
    """Returns `module` with its parameters gathered over `fsdp`, for use at once.

    With Auto axes the compiler does it. Explicit axes leave it to us, as rows and parameters are
    both spread over `fsdp`. The derivative scatters the gradient again.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not (set(AXES) <= set(mesh.axis_names) and is_explicit(mesh)):
        return module
    return with_parameters(module, lambda x: jax.sharding.reshard(x, PartitionSpec()))


def with_parameters(module: Module, function: Callable[[Array], Array]) -> Module:
    """Returns a copy of `module` with `function` of its parameters."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(function, state))


def embed(table: nnx.Embed, tokens: Array) -> Array:
    """Looks up `tokens` (B, T); the result (B, T, D) is spread by rows."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = row_spec(tokens.shape[0])
    if spec is None:
        return table(tokens)
    if is_explicit(mesh):  # a lookup wants to be told where its result goes
        return gathered(table)(tokens, out_sharding=spec)
    # Gathered over `fsdp`, or the compiler would cut the result by features first, then by rows.
    whole = PartitionSpec(PartitionSpec.UNCONSTRAINED, None)  # (V, D)
    return spread(
        with_parameters(table, lambda x: jax.lax.with_sharding_constraint(x, whole))(tokens)
    )
