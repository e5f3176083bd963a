"""All that decides a training run of the Llama."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.kit.optimizers import OptimizerConfig
from examples.kit.text import Text
from examples.llama.config import LlamaConfig

# These may change when a run goes on: they don't touch the parameters, beyond rounding. Which data
# it is, its digest says, not its path.
FREE_SETTINGS = {
    "data",
    "tokenizer",
    "attention",
    "out",
    "resume",
    "mesh",
    "mesh_axes",
    "accumulate",
    "aot",
    "distributed",
    "host_timeout",
    "checkpoint_every",
    "eval_every",
    "eval_batches",
    "log_every",
    "prompt",
    "sample_temperature",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run keeps and shows.

    Attributes:
        out: Its folder; None for a fresh one.
        resume: Go on with the run in it.
        log_every: Steps between records.
        eval_every: Steps between validations.
        eval_batches: Held-out batches of each validation but the last, which takes all.
        checkpoint_every: Steps between checkpoints.
        prompt: Start of the sampled lines.
        sample_temperature: Divides their logits.
    """

    out: Path | None
    resume: bool
    log_every: int
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    prompt: str
    sample_temperature: float


@dataclasses.dataclass(frozen=True)
class Devices:
    """How the devices share the work.

    Attributes:
        mesh: The size of every axis of the mesh, by name.
        explicit: Whether its axes are Explicit ones.
        accumulate: Micro-batches that a batch is computed in.
        topology: The TPU slice to compile for, without training; None to train.
    """

    mesh: Mapping[str, int]
    explicit: bool
    accumulate: int
    topology: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A run, as the command line says it once all defaults are filled in.

    Attributes:
        preset: The model's name.
        model: Its shape; the vocabulary is the data's in the end.
        text: What it learns.
        optimizer: How.
        run: What is kept of it.
        devices: Where.
        options: All options by name, ready for JSON; to read and to record.
    """

    preset: str
    model: LlamaConfig
    text: Text
    optimizer: OptimizerConfig
    run: Run
    devices: Devices
    options: Mapping[str, Any]

    def decisive(self) -> dict[str, Any]:
        """Returns the options that decide the parameters, which a checkpoint compares."""
        return {name: value for name, value in self.options.items() if name not in FREE_SETTINGS}
