"""Compiles one optimizer update for a TPU slice and prints what Magma and SkipUpdate add to it.

    python -m examples.scaling.tpu_update v5e:8x8 --model 1b --mesh fsdp=64

Nothing is run and no TPU is needed, only the package `libtpu`. Each row of the table is one
update and its application to the parameters, all of them donated: the bare base, and the base with
SkipUpdate, `with_magma`, and `magma` as a link that gets the gradient. Traffic is what a device
reads from its memory (HBM) and writes to it, counted from the program.
"""

import argparse
import functools
import math
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

from examples.kit import optimizers
from examples.kit.aot import topology
from examples.kit.aot.program import Program, by_kind, compiled
from examples.kit.aot.traffic import LoopError
from examples.kit.mesh import device_mesh
from examples.kit.options import Parser, SettingsError, whole
from examples.scaling.comparison import print_table, status
from examples.scaling.models import EXPERTS, NAMES, axes, make
from examples.scaling.step import lower_update
from magma_optax import attention_and_mlp, describe_masking, magma, skip_update, with_magma

TITLES = (
    *("update", "HBM traffic per device", "to the base's", "memory per device", "added"),
    *("collectives", "sent per device", "largest array", "FLOP to the base's"),
    *("CPU time to compile", "to the base's"),
)


def layer_or_expert(path: str, leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Index blocks by layer, and by layer and expert where there are experts."""
    if "layers" not in path.split("/"):
        return ()
    return (0, 1) if "experts" in path.split("/") else (0,)


def updates(
    args: argparse.Namespace, blocks: optimizers.Blocks
) -> dict[str, optax.GradientTransformation]:
    """Return the base and the forms of masking by name."""
    moments = {"mu_dtype": jnp.bfloat16} if args.moment_dtype == "bfloat16" else {}
    if args.optimizer == "adam":
        base = optax.adam(1e-3, **moments)
    else:
        base = optax.chain(optimizers.direction(args.optimizer), optax.scale(-1e-3))
    options = {"where": attention_and_mlp, "blocks": blocks}
    forms = {
        args.optimizer: base,
        "skip_update": optax.chain(base, skip_update(**options)),
        "with_magma": with_magma(base, **options),
        "magma(grad=)": optax.chain(base, magma(**options)),
    }
    if args.optimizer == "muon":
        forms["with_magma, lazy"] = with_magma(base, lazy=True, **options)
    return forms


def cells(program: Program, base: Program) -> list[str]:
    """One line of the table, `base` being the bare base's program."""
    try:
        traffic = [f"{program.hbm_bytes / 1e9:.3f} GB"]
        traffic += [f"{program.hbm_bytes / base.hbm_bytes:.3f}"]
    except LoopError:  # The coins decide which branches are taken.
        traffic = ["varies", "varies"]
    return [
        *traffic,
        f"{program.memory / 2**30:.3f} GiB",
        f"{program.memory - base.memory:,} B",
        by_kind(program.runs),
        f"{program.sent:,} B",
        f"{max((op.largest for op in program.collectives), default=0):,} B",
        f"{program.flops / base.flops:.2f}",
        f"{program.seconds:.1f} s",
        f"{program.seconds / base.seconds:.2f}",
    ]


def mesh(text: str) -> dict[str, int]:
    """Parse sizes of mesh axes, such as ``fsdp=16,tensor=4``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name in sizes:
            raise argparse.ArgumentTypeError(f"{part!r}: {name} stands there twice")
        sizes[name] = int(whole(1)(size))
    return sizes


def parser() -> Parser:
    """Return the command line's parser."""
    parser = Parser(
        prog="python -m examples.scaling.tpu_update", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("topology", help="the slice, such as v5p:4x4x4, or v5e:8x8,slices=2")
    add("--model", choices=NAMES, default="1b", help="(%(default)s)")
    add("--mesh", type=mesh, required=True, help="its axes, such as fsdp=32,tensor=8")
    add("--layers", choices=["scanned", "separate"], default="scanned", help="(%(default)s)")
    add("--optimizer", choices=optimizers.LEARNING_RATES, default="adam", help="(%(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of parameters")
    add("--moment-dtype", choices=["float32", "bfloat16"], default="float32", help="of Adam's mu")
    add("--mesh-axes", choices=["auto", "explicit"], default="auto", help="type (%(default)s)")
    return parser


def compare(args: argparse.Namespace) -> None:
    """Compile all of them and print the table.

    Raises:
      SettingsError: for a topology that is unknown, or a mesh that isn't made of it.
    """
    devices, names = topology.devices(args.topology), axes(args.model)
    for axis in args.mesh:
        if axis not in names:
            raise SettingsError(f"--mesh {axis}: {args.model} has the axes {', '.join(names)}")
    if math.prod(args.mesh.values()) != len(devices):
        raise SettingsError(f"--mesh is not made of the {len(devices)} devices of {args.topology}")
    if args.moment_dtype == "bfloat16" and args.optimizer != "adam":
        raise SettingsError("--moment-dtype bfloat16 is for --optimizer adam alone")
    if args.layers == "separate" and args.model == EXPERTS:
        raise SettingsError(f"--model {EXPERTS} has stacked layers alone; leave --layers out")
    kind = AxisType.Explicit if args.mesh_axes == "explicit" else AxisType.Auto
    shape = tuple(args.mesh.get(axis, 1) for axis in names)
    try:
        made = device_mesh(shape, names, (kind,) * 3, devices)
    except ValueError as error:
        raise SettingsError(f"--mesh: {error}") from None
    model = make(args.model, made, args.dtype, args.layers == "separate")
    blocks = "leaf" if args.layers == "separate" else layer_or_expert
    print(topology.describe(args.topology))
    print(describe_masking(model.params, where=attention_and_mlp, blocks=blocks).summary)

    def update(tx: optax.GradientTransformation) -> Program:
        return compiled(lambda: lower_update(tx, model.params, model.specs, made))

    arms = updates(args, blocks).items()
    print_table(TITLES, {name: functools.partial(update, tx) for name, tx in arms}, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return status(lambda: compare(parser().parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
