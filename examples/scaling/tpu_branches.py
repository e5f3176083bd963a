"""What a branch around Adam's parameters moves on a TPU, by TPU's own compiler; no TPU is needed.

    python -m examples.scaling.tpu_branches --shape 2048 5504

prints the arrays of a leaf's size that one update of it reads and writes: in Adam, and in Adam with
SkipUpdate inside a `jax.lax.cond`.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from examples.kit.aot import topology
from examples.kit.aot.program import Program, compiled
from examples.kit.branched_adam import FORMS, step_leaf
from examples.kit.options import Parser, whole
from examples.scaling.comparison import print_table, status

TITLES = ("update", "dropped", "survives", "mean at p = 0.5")
ADAM = "adam"


def program(name: str, shape: Sequence[int], device: jax.Device) -> Program:
    """Compile one donated update of a leaf."""

    def argument(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def update(p: Any, mu: Any, nu: Any, g: Any, factor: Any, count: Any) -> Any:
        if name == ADAM:  # The compiler takes the branch of a constant.
            factor = jnp.float32(1e-3)
        return step_leaf((p, mu, nu), g, factor, count, moments=FORMS.get(name, False))

    leaf = argument(*shape)
    given = (leaf, leaf, leaf, leaf, argument(), argument(dtype=jnp.int32))
    return compiled(lambda: jax.jit(update, donate_argnums=(0, 1, 2)).lower(*given))


def compare(args: Any) -> None:
    """Compile all forms and print the table."""
    device, size = topology.devices(args.topology)[0], 4 * math.prod(args.shape)

    def cells(made: Program, _: Program) -> list[str]:
        least, most = (moved / size for moved in made.hbm_range)
        return [f"{least:.2f}", f"{most:.2f}", f"{(least + most) / 2:.2f}"]

    print(f"float32 of {tuple(args.shape)} on one chip of {args.topology}, arrays moved")
    print_table(
        TITLES, {n: lambda n=n: program(n, args.shape, device) for n in (ADAM, *FORMS)}, cells
    )


def parser() -> Parser:
    """Return the command line's parser."""
    made = Parser(
        prog="python -m examples.scaling.tpu_branches", description=__doc__.split("\n")[0]
    )
    made.add_argument("--topology", default="v5p:2x2x1", help="the slice (%(default)s)")
    made.add_argument("--shape", nargs=2, type=whole(1), default=[2048, 5504], help="of the leaf")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return status(lambda: compare(parser().parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
