"""The Llama that the paper pre-trains, at its sizes and at two smaller ones."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from examples.kit.data.load import Data, load
from examples.kit.loss import cross_entropy, perplexity
from examples.kit.step import Batch, cut, gradient
from examples.llama.config import PRESETS, RECIPES, LlamaConfig, Recipe
from examples.llama.model import Llama
from examples.paper.tasks.text import identified
from examples.paper.trainer import Pass, stack

# The paper's sizes, one that two GPUs sweep in minutes, and one for two CPU cores. The
# vocabulary is the data's.
SIZES = {
    "nano": LlamaConfig(257, 64, 172, 4, 2),
    "40m": LlamaConfig(16_384, 512, 1376, 8, 8),
    **{name: PRESETS[name] for name in ("60m", "130m", "350m", "1b")},
}
STEPS = {
    "nano": Recipe(16, 64, 100),
    "40m": Recipe(256, 256, 1500),
    **{name: RECIPES[name] for name in ("60m", "130m", "350m", "1b")},
}
WARMUP = 0.1  # of the steps, linear from 0; a cosine to a tenth of the peak follows


@dataclasses.dataclass(frozen=True)
class Task:
    """What all runs of a comparison have in common.

    Attributes:
        size: A key of `SIZES`.
        steps: Steps, S.
        batch_size: Rows a step, B.
        micro_batches: Into how many parts a batch is cut to save memory.
        seq_len: Tokens a row, T.
        data: What `examples.kit.data.load` reads.
        packing: How it makes rows of documents.
        dtype: Of the computation; parameters and optimizer state are float32.
        validations: How often the validation loss is measured, evenly spaced, the end included.
        digest: What identifies the text, see `examples.paper.tasks.text`: folders can share a name.
    """

    size: str
    steps: int
    batch_size: int
    seq_len: int
    dtype: str
    data: str | None = None
    packing: str = "concat"
    micro_batches: int = 1
    validations: int = 1
    digest: str = ""

    def settings(self) -> dict[str, Any]:
        """Returns what a record says about the task: all that a run's outcome depends on."""
        settings = identified(dataclasses.asdict(self))
        del settings["validations"]  # looking at a run doesn't change it
        return {"experiment": "llama_c4"} | settings

    def open(self) -> "Problem":
        """Reads the data.

        Raises:
            DataError: If it can't be used.
        """
        return Problem(self)


class Problem:
    """A Llama, its text and its loss; see `examples.paper.trainer.Problem`."""

    def __init__(self, task: Task):
        """Reads the data in the order of seed 0, and the validation split."""
        self.task = task
        self.steps = task.steps
        self.validations = task.validations
        self.work = {"tokens": task.batch_size * task.seq_len}
        warmup = round(WARMUP * task.steps)
        self.schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, task.steps, 0.1)
        self._data: dict[int, Data] = {}  # by seed
        rows = task.batch_size // task.micro_batches
        valid = stack(list(self.data(0).valid()))
        self.valid = {name: x.reshape(-1, rows, x.shape[-1]) for name, x in valid.items()}
        flash = jax.default_backend() == "gpu" and task.dtype == "bfloat16"
        # Layers apart, so that each matrix is a block of its own.
        self.config = dataclasses.replace(
            SIZES[task.size],
            vocab_size=self.data(0).vocab_size,
            dtype=task.dtype,
            attention="cudnn" if flash else "xla",
        )
        model = nnx.eval_shape(lambda: Llama(self.config, rngs=nnx.Rngs(0)))
        self.graphdef = nnx.split(model)[0]
        self._mean_loss = jax.jit(self.mean_loss)

    def data(self, seed: int) -> Data:
        """The text in the order of `seed`."""
        if seed not in self._data:
            self._data[seed] = load(
                self.task.data,
                seq_len=self.task.seq_len,
                batch_size=self.task.batch_size,
                seed=seed,
                packing=self.task.packing,
            )
        return self._data[seed]

    def batches(self, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches of "inputs" and "targets", int32 (B, T), without end."""
        return iter(self.data(seed).train)

    def initial(self, seed: int) -> tuple[optax.Params, Any]:
        """Draws the parameters.

        Not jitted: one draw for each shape compiles in seconds, all draws together in minutes.
        """
        return nnx.to_pure_dict(nnx.state(Llama(self.config, rngs=nnx.Rngs(seed)))), {}

    def backward(self, params: optax.Params, variables: Any, batch: Batch) -> Pass:
        """Computes the mean loss over the tokens of a batch (B, T), and its gradient."""
        count = jnp.maximum(jnp.sum(batch["targets"] >= 0, dtype=jnp.float32), 1)

        def share(params: optax.Params, micro: Batch) -> tuple[Array, None]:
            return self.loss(params, micro)[0] / count, None

        found = gradient(share, params, cut(batch, self.task.micro_batches))
        return Pass(found.loss, found.grads, variables, {})

    def evaluate(self, params: optax.Params, variables: Any) -> dict[str, float]:
        """Returns loss and perplexity on the whole validation split."""
        loss = float(self._mean_loss(params, self.valid))
        return {"valid_loss": loss, "perplexity": perplexity(loss)}

    def describe(self, seen: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns nothing."""
        return {}

    def mean_loss(self, params: optax.Params, batches: Batch) -> Array:
        """Mean loss over all tokens of (batches, B, T)."""
        nll, count = jax.lax.map(lambda batch: self.loss(params, batch), batches)
        return jnp.sum(nll) / jnp.sum(count)

    def loss(self, params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        """Sum of the losses of a batch (B, T) and their number."""
        logits = nnx.merge(self.graphdef, params)(batch["inputs"])  # (B, T, V)
        return cross_entropy(logits, batch["targets"])
