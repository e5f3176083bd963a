"""Print what Magma adds to an optimizer step of 1B, 70B and 1T parameters on 256 devices.

The steps are compiled from shapes for emulated devices and nothing is run. In seconds to minutes:

    python -m examples.scaling.collectives
"""

import math
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=256"

import jax
import optax
from jax.sharding import AxisType

from examples.scaling.hlo import Collective, collectives
from examples.scaling.models import Model, models
from examples.scaling.step import lower_update
from magma_optax import attention_and_mlp, with_magma

HEADER = (
    "| parameters | mesh | axis types | blocks | collectives of Adam | added by Magma "
    "| added bytes a device | largest array among them | largest parameter a device |"
)


def layer_or_expert(path: str, leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Index blocks by layer, and by layer and expert where there are experts."""
    return (0, 1) if "experts" in path.split("/") else (0,)


def row(model: Model, kind: str) -> str:
    """Compile a model's step with and without Magma; one line of the table."""
    mesh = jax.make_mesh(
        tuple(model.mesh.values()),
        tuple(model.mesh),
        axis_types=(AxisType[kind],) * len(model.mesh),
    )
    base = optax.adam(1e-3)
    tx = with_magma(base, where=attention_and_mlp, blocks=layer_or_expert)
    without, with_it = (
        collectives(lower_update(t, model.params, model.specs, mesh).compile().as_text())
        for t in (base, tx)
    )
    blocks = sum(
        x.size for x in jax.tree.leaves(jax.eval_shape(tx.init, model.params)[0].alignment)
    )
    cells = [
        f"{sum(x.size for x in jax.tree.leaves(model.params)):.3g}",
        " x ".join(f"{name}={size}" for name, size in model.mesh.items()),
        kind,
        f"{blocks:,}",
        str(len(without)),
        _describe(with_it[len(without) :]),
        f"{sum(op.bytes for op in with_it) - sum(op.bytes for op in without):,}",
        f"{max(op.largest for op in with_it):,} B",
        f"{_largest_shard(model):,} B",
    ]
    return f"| {' | '.join(cells)} |"


def _describe(ops: list[Collective]) -> str:
    kinds = sorted({op.kind for op in ops})
    return ", ".join(f"{sum(op.kind == kind for op in ops)} {kind}" for kind in kinds)


def _largest_shard(model: Model) -> int:
    def size(leaf: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
        parts = math.prod(model.mesh[name] for name in spec if name)
        return leaf.size * leaf.dtype.itemsize // parts

    return max(jax.tree.leaves(jax.tree.map(size, model.params, model.specs)))


def main() -> None:
    """Print the table as Markdown."""
    print(
        f"jax {jax.__version__}, optax {optax.__version__}, {jax.device_count()} emulated devices\n"
    )
    print(HEADER)
    print("|" + " --- |" * (HEADER.count("|") - 1))
    for model in models().values():
        for kind in ("Auto", "Explicit"):
            print(row(model, kind), flush=True)


if __name__ == "__main__":
    main()
