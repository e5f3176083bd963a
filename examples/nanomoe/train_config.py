"""All that decides a training run of nanoMoE."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.kit.optimizers import OptimizerConfig
from examples.kit.text import Text
from examples.nanomoe.config import NanoMoEConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A run, as the command line says it once all defaults are filled in.

    Attributes:
        preset: The model's name.
        model: Its shape; the vocabulary is the data's where that has more tokens.
        text: What it learns.
        optimizer: How.
        accumulate: Micro-batches that a batch is computed in.
        experts_as_blocks: Whether each expert has a coin and a score of its own.
        out: The run's folder; None for a fresh one.
        log_every: Steps between records.
        eval_every: Steps between validations.
        options: All options by name, ready for JSON; to record.
    """

    preset: str
    model: NanoMoEConfig
    text: Text
    optimizer: OptimizerConfig
    accumulate: int
    experts_as_blocks: bool
    out: Path | None
    log_every: int
    eval_every: int
    options: Mapping[str, Any]
