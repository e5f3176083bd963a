"""The Nano MoE, with model and losses of `examples.nanomoe`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from examples.kit.data.load import Data, load
from examples.kit.loss import perplexity
from examples.kit.step import Batch, cut, gradient
from examples.nanomoe.config import PRESETS
from examples.nanomoe.model import NanoMoE, count_parameters
from examples.nanomoe.step import make_losses
from examples.paper.tasks.text import identified
from examples.paper.trainer import Pass

B2 = 0.95
WEIGHT_DECAY = 0.1  # decoupled, of matrices; part of the update that Magma masks
CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Task:
    """What all runs of a comparison have in common.

    Attributes:
        preset: A key of `examples.nanomoe.config.PRESETS`.
        steps: Steps, S.
        warmup: Steps of linear warm-up from 0; a cosine to a tenth of the peak follows.
        batch_size: Rows a step, B.
        accumulate: Micro-batches that a batch is computed in; tokens compete within one.
        seq_len: Tokens a row, T.
        dtype: Of the computation; parameters, router and optimizer state are float32.
        data: What `examples.kit.data.load` reads.
        digest: What identifies the text, see `examples.paper.tasks.text`: folders can share a name.
    """

    preset: str
    steps: int
    warmup: int
    batch_size: int
    accumulate: int
    seq_len: int
    dtype: str
    data: str | None = None
    digest: str = ""

    def settings(self) -> dict[str, Any]:
        """Returns what a record says about the task: all that a run's outcome depends on."""
        settings = identified(dataclasses.asdict(self))
        decay = {"weight_decay": WEIGHT_DECAY, "clip": CLIP, "b2": B2}
        return {"experiment": "nano_moe"} | settings | decay

    def open(self) -> "Problem":
        """Reads the data.

        Raises:
            DataError: If it can't be used.
        """
        return Problem(self)


class Problem:
    """A mixture of experts, its text and its losses; see `examples.paper.trainer.Problem`."""

    validations = 1

    def __init__(self, task: Task):
        """Reads the data in the order of seed 0, and the validation split."""
        self.task = task
        self.steps = task.steps
        self.work = {"tokens": task.batch_size * task.seq_len}
        self.schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, task.warmup, task.steps, 0.1)
        self._data: dict[int, Data] = {}  # by seed
        self.valid = list(self.data(0).valid())
        preset = PRESETS[task.preset]
        vocab_size = max(preset.vocab_size, self.data(0).vocab_size)
        self.config = dataclasses.replace(preset, vocab_size=vocab_size, dtype=task.dtype)
        self._loss, valid_loss = make_losses(self.config)
        self._valid_loss = jax.jit(valid_loss)

    def data(self, seed: int) -> Data:
        """The text in the order of `seed`."""
        if seed not in self._data:
            self._data[seed] = load(
                self.task.data,
                seq_len=self.task.seq_len,
                batch_size=self.task.batch_size,
                seed=seed,
            )
        return self._data[seed]

    def batches(self, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches of "inputs" and "targets", int32 (B, T), without end."""
        return iter(self.data(seed).train)

    def initial(self, seed: int) -> tuple[optax.Params, Any]:
        """Draws the parameters.

        Not jitted: a GPU's compiler takes about a second for each draw, so here one for each shape.
        """
        return nnx.to_pure_dict(nnx.state(NanoMoE(self.config, rngs=nnx.Rngs(seed)))), {}

    def backward(self, params: optax.Params, variables: Any, batch: Batch) -> Pass:
        """Computes loss and gradient of a batch (B, T), each the mean over its micro-batches."""
        parts = self.task.accumulate
        _, grads, aux = gradient(self._loss, params, cut(batch, parts))
        loss, routing = aux["loss"].mean(), aux["routing"]
        seen = {"dropped": routing.dropped.mean(), "load": routing.load.mean(0)}
        return Pass(loss, optax.tree.scale(1 / parts, grads), variables, seen)

    def evaluate(self, params: optax.Params, variables: Any) -> dict[str, float]:
        """Returns loss and perplexity on the whole validation split."""
        sums = [self._valid_loss(params, batch) for batch in self.valid]
        nll, count = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
        loss = float(nll / count)
        return {"valid_loss": loss, "perplexity": perplexity(loss)}

    def describe(self, seen: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the router's drops, the busiest expert's share, and the active parameters."""
        shapes = nnx.eval_shape(lambda: self.initial(0)[0])
        return {
            "active_parameters": count_parameters(shapes, self.config)[1],
            "dropped": float(np.mean(seen["dropped"])),
            "busiest": float(np.max(np.mean(seen["load"], axis=0))),
        }
