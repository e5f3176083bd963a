"""Compiles the Llama trainer's step for a TPU slice, and prints what Magma and SkipUpdate add.

    python -m examples.scaling.tpu_step --aot v5e:8x8 --preset 1b --mesh fsdp=64 --scan-layers

Takes the trainer's options; each row of the table is its whole step, from tokens to new
parameters, with another masking. Nothing is run and no TPU is needed, only the package `libtpu`.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence

from examples.kit import optimizers
from examples.kit.aot import topology
from examples.kit.aot.program import Program, added, by_kind
from examples.kit.options import SettingsError
from examples.llama.aot import programs, with_vocabulary
from examples.llama.options import parser, resolve
from examples.llama.step import decays, layer_blocks
from examples.llama.train_config import TrainConfig
from examples.scaling.comparison import print_table, status

TITLES = (
    *("step", "memory per device", "added", "collectives in a run", "added", "sent per device"),
    *("added", "FLOP", "bytes accessed", "CPU time to compile", "to the base's"),
)
MASKINGS = {"base": "none", "SkipUpdate": "skip", "Magma": "magma"}


def cells(program: Program, base: Program) -> list[str]:
    """One line of the table; FLOP and bytes accessed are relative to `base`, the bare base's."""
    return [
        f"{program.memory / 2**30:.3f} GiB",
        f"{program.memory - base.memory:,} B",
        by_kind(program.runs),
        added(program, base),
        f"{program.sent / 1e9:.3f} GB",
        f"{program.sent - base.sent:,} B",
        f"{program.flops / base.flops:.4f}",
        f"{program.bytes_accessed / base.bytes_accessed:.4f}",
        f"{program.seconds:.0f} s",
        f"{program.seconds / base.seconds:.2f}",
    ]


def compare(config: TrainConfig) -> None:
    """Compile the step with each masking and print the table.

    Raises:
      SettingsError: without a topology, or for one that the mesh doesn't suit.
      DataError: if the data or the tokenizer that decides the vocabulary isn't there.
    """
    if config.devices.topology is None:
        raise SettingsError("name the slice with --aot, such as --aot v5p:4x4x4")
    model = with_vocabulary(config)
    print(topology.describe(config.devices.topology))

    def step(masking: optimizers.Masking) -> Program:
        chosen = dataclasses.replace(config.optimizer, masking=masking)
        tx, _ = optimizers.make(chosen, layer_blocks(model.scan_layers), decays)
        return programs(config, model, tx)["train step"]()

    steps = {name: functools.partial(step, masking) for name, masking in MASKINGS.items()}
    print_table(TITLES, steps, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parser("python -m examples.scaling.tpu_step")
    return status(lambda: compare(resolve(options.parse(argv))))


if __name__ == "__main__":
    sys.exit(main())
