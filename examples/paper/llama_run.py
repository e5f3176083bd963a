"""One run: a Llama trained by one arm at one learning rate from one seed.

An arm is compiled once for all its rates and seeds, which are arguments of the compiled step.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from examples.kit import scores
from examples.kit.data.load import Data, load
from examples.kit.loss import cross_entropy
from examples.kit.records import data_name
from examples.llama.config import PRESETS, RECIPES, LlamaConfig, Recipe
from examples.llama.model import Llama
from examples.paper.arms import Arm

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
LAST = 100  # steps in `train_loss_last`, but no more than a tenth of the run
CHUNK = 50  # steps a dispatch, at most
CURVE = 30  # points of the loss curve, at most

Batch = dict[str, Array]  # "inputs", "targets": int32 (B, T); target -1 has no loss


@dataclasses.dataclass(frozen=True)
class Task:
    """What all runs of a sweep have in common.

    Attributes:
        size: A key of `SIZES`.
        steps: Steps, S.
        batch_size: Rows a step, B.
        micro_batches: Into how many parts a batch is cut to save memory.
        seq_len: Tokens a row, T.
        data: What `examples.kit.data.load.load` reads.
        packing: How it makes rows of documents.
        dtype: Of the computation; parameters and optimizer state are float32.
        validations: How often the validation loss is measured, evenly spaced, the end included.
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

    def settings(self) -> dict[str, Any]:
        """What a record says about the task: all that a run's outcome depends on."""
        settings = dataclasses.asdict(self) | {"data": data_name(self.data)}
        del settings["validations"]  # looking at a run doesn't change it
        return {"experiment": "llama_c4"} | settings


class Trainer:
    """Runs a task; keeps what it has compiled and read for the next run."""

    def __init__(self, task: Task):
        """Compiles and reads nothing yet."""
        self.task = task
        self._compiled: dict[str, tuple[Any, Any]] = {}  # init and train_chunk by arm
        self._data: dict[int, Data] = {}  # by seed

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

    @functools.cached_property
    def config(self) -> LlamaConfig:
        """The model's shape; layers apart, so that each matrix is a block of its own."""
        flash = jax.default_backend() == "gpu" and self.task.dtype == "bfloat16"
        return dataclasses.replace(
            SIZES[self.task.size],
            vocab_size=self.data(0).vocab_size,
            dtype=self.task.dtype,
            attention="cudnn" if flash else "xla",
        )

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef:
        """The model's structure."""
        return nnx.split(nnx.eval_shape(lambda: Llama(self.config, rngs=nnx.Rngs(0))))[0]

    @functools.cached_property
    def valid(self) -> Batch:
        """The whole validation split, (batches, B / micro-batches, T)."""
        rows = self.task.batch_size // self.task.micro_batches
        stacked = stack(list(self.data(0).valid()))
        return {name: x.reshape(-1, rows, x.shape[-1]) for name, x in stacked.items()}

    def run(self, name: str, arm: Arm, learning_rate: float, seed: int) -> dict[str, Any]:
        """Trains once.

        Args:
            name: The arm's name; runs of one name share one compiled step.
            arm: How to build the optimizer.
            learning_rate: The schedule's peak.
            seed: Of initialisation, order of the data and coins.

        Returns:
            What a record's "results" hold.
        """
        start = time.perf_counter()
        steps = self.task.steps
        chunk = max(n for n in range(1, CHUNK + 1) if steps % n == 0)
        rate, key = jnp.float32(learning_rate), jnp.uint32(seed)
        batches = chunks(self.data(seed), chunk)
        params = self.initial(seed)
        if name not in self._compiled:
            self._compiled[name] = self.compile(arm, params, rate, key, chunk)
        init, train_chunk = self._compiled[name]
        opt_state = init(params, rate, key)

        looks = evenly(steps // chunk, self.task.validations)
        looked: list[list[float]] = []  # [step, validation loss]
        looking = 0.0  # seconds
        clock = time.perf_counter()
        pending: list[Array] = []  # losses still on the device
        losses: list[float] = []
        for done in range(1, steps // chunk + 1):
            params, opt_state, loss = train_chunk(params, opt_state, next(batches), rate, key)
            pending.append(loss)
            if len(pending) > 1:  # look back by one chunk, so that the device never waits
                losses += np.asarray(pending.pop(0)).tolist()
                if not math.isfinite(losses[-1]):
                    break
            if done in looks:
                jax.block_until_ready(params)
                opened = time.perf_counter()
                looked.append([done * chunk, float(self.evaluate(params, self.valid))])
                looking += time.perf_counter() - opened
        for loss in pending:
            losses += np.asarray(loss).tolist()
        seconds = time.perf_counter() - clock - looking
        finite = all(map(math.isfinite, losses))
        valid_loss = float(self.evaluate(params, self.valid)) if finite else math.inf
        return {
            **outcome(losses, valid_loss, steps, opt_state),
            "valid_curve": [
                [step, round(loss, 4)] for step, loss in [*looked, [len(losses), valid_loss]]
            ],
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "seconds": round(time.perf_counter() - start, 1),
            "tokens_per_second": round(
                len(losses) * self.task.batch_size * self.task.seq_len / seconds
            ),
        }

    def initial(self, seed: int) -> optax.Params:
        """Draws the parameters.

        Not jitted: one draw for each shape compiles in seconds, all draws together in minutes.
        """
        return nnx.to_pure_dict(nnx.state(Llama(self.config, rngs=nnx.Rngs(seed))))

    def optimizer(
        self, arm: Arm, learning_rate: Array, key: Array
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the arm with its schedule; the peak may be traced."""
        steps = self.task.steps
        unit = optax.warmup_cosine_decay_schedule(0.0, 1.0, round(WARMUP * steps), steps, 0.1)
        tx = arm.build(lambda step: learning_rate * unit(step), key)
        return optax.with_extra_args_support(tx)

    def compile(
        self, arm: Arm, params: optax.Params, learning_rate: Array, key: Array, chunk: int
    ) -> tuple[Any, Any]:
        """Compiles an arm for all learning rates and seeds.

        Returns:
            ``init(params, learning_rate, key) -> opt_state`` and ``train_chunk(params, opt_state,
            batches, learning_rate, key) -> params, opt_state, losses``, which trains for `chunk`
            steps and takes over the buffers of the first two.
        """

        @jax.jit
        def init(params: optax.Params, learning_rate: Array, key: Array) -> optax.OptState:
            return self.optimizer(arm, learning_rate, key).init(params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_chunk(params, opt_state, batches: Batch, learning_rate: Array, key: Array):
            tx = self.optimizer(arm, learning_rate, key)

            def step(carry: tuple[optax.Params, optax.OptState], batch: Batch):
                params, opt_state = carry
                loss, grads = self.value_and_grad(params, batch)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), loss

            (params, opt_state), losses = jax.lax.scan(step, (params, opt_state), batches)
            return params, opt_state, losses

        opt_state = jax.eval_shape(init, params, learning_rate, key)
        batches = jax.ShapeDtypeStruct((chunk, self.task.batch_size, self.task.seq_len), jnp.int32)
        batches = {"inputs": batches, "targets": batches}
        lowered = train_chunk.lower(params, opt_state, batches, learning_rate, key)
        return init, lowered.compile()

    def value_and_grad(self, params: optax.Params, batch: Batch) -> tuple[Array, optax.Params]:
        """Mean loss over the tokens of a batch (B, T), and its gradient."""
        count = jnp.maximum(jnp.sum(batch["targets"] >= 0, dtype=jnp.float32), 1)

        @jax.value_and_grad
        def value_and_grad(params: optax.Params, micro: Batch) -> Array:
            return self.loss(params, micro)[0] / count

        parts = self.task.micro_batches
        if parts == 1:
            return value_and_grad(params, batch)

        def add(total: tuple[Array, optax.Params], micro: Batch):
            return optax.tree.add(total, value_and_grad(params, micro)), None

        micro = {name: x.reshape(parts, -1, x.shape[-1]) for name, x in batch.items()}
        start = jnp.zeros(()), optax.tree.zeros_like(params)
        return jax.lax.scan(add, start, micro)[0]

    @functools.cached_property
    def evaluate(self) -> Any:
        """Returns the jitted mean loss over all tokens of (batches, B, T)."""

        @jax.jit
        def evaluate(params: optax.Params, batches: Batch) -> Array:
            nll, count = jax.lax.map(lambda batch: self.loss(params, batch), batches)
            return jnp.sum(nll) / jnp.sum(count)

        return evaluate

    def loss(self, params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        """Sum of the losses of a batch (B, T) and their number."""
        logits = nnx.merge(self.graphdef, params)(batch["inputs"])  # (B, T, V)
        return cross_entropy(logits, batch["targets"])


def chunks(data: Data, steps: int) -> Iterator[Batch]:
    """Yields the training batches of `steps` steps at a time, (steps, B, T)."""
    batches = iter(data.train)
    while True:
        yield stack([next(batches) for _ in range(steps)])


def stack(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Joins batches (B, T) on a new leading axis."""
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def outcome(
    losses: list[float], valid_loss: float, steps: int, opt_state: optax.OptState
) -> dict[str, Any]:
    """Returns how a run ended: losses, whether it diverged, and the mean score.

    Args:
        losses: Of every step that was done.
        valid_loss: At the end; not finite for a run that diverged.
        steps: That were to be done.
        opt_state: Holds the scores, if there are any.
    """
    diverged = not math.isfinite(valid_loss)
    valid_loss = math.inf if diverged else valid_loss
    last = float(np.mean(losses[-min(LAST, -(-steps // 10)) :]))
    found = scores.summary(opt_state)
    return {
        "valid_loss": valid_loss,
        "perplexity": math.inf if valid_loss > 700 else math.exp(valid_loss),
        "train_loss_last": last if math.isfinite(last) else math.inf,
        "diverged": diverged,
        "steps": len(losses),
        "curve": curve(losses),
        "alignment": float(found["alignment_mean"]) if found and not diverged else None,
    }


def evenly(dispatches: int, parts: int) -> set[int]:
    """After which of a run's dispatches one of `parts` evenly spaced parts ends, but for the last.

    A run of fewer dispatches has a part for each.
    """
    return {round(part * dispatches / parts) for part in range(1, parts)} - {0, dispatches}


def curve(losses: list[float]) -> list[list[float]]:
    """At most `CURVE` points [step, mean loss since the point before]."""
    ends = np.unique(np.linspace(0, len(losses), CURVE + 1).astype(int)[1:])
    starts = [0, *ends[:-1]]
    return [
        [int(end), round(float(np.mean(losses[start:end])), 4)]
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
