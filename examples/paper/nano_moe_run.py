"""One run: a mixture of experts trained by one arm at one learning rate from one seed."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from examples.kit.data.load import Data, load
from examples.kit.records import data_name
from examples.nanomoe.config import PRESETS
from examples.nanomoe.model import NanoMoE, count_parameters
from examples.nanomoe.step import make_functions
from examples.paper.arms import Arm
from examples.paper.llama_run import outcome

FETCHED = 50  # steps whose losses are fetched together


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
        data: What `examples.kit.data.load.load` reads.
    """

    preset: str
    steps: int
    warmup: int
    batch_size: int
    accumulate: int
    seq_len: int
    dtype: str
    data: str | None = None

    def settings(self) -> dict[str, Any]:
        """What a record says about the task."""
        data = data_name(self.data)
        return {"experiment": "nano_moe"} | dataclasses.asdict(self) | {"data": data}


class Trainer:
    """Runs a task; keeps the steps that it has compiled for the next run of an arm."""

    def __init__(self, task: Task):
        """Opens the data once, for what all runs share.

        Raises:
            DataError: If it cannot be used.
        """
        self.task = task
        self._data: dict[int, Data] = {}  # by seed
        data = self.data(seed=0)
        self.valid = list(data.valid())
        preset = PRESETS[task.preset]
        vocab_size = max(preset.vocab_size, data.vocab_size)
        self.config = dataclasses.replace(preset, vocab_size=vocab_size, dtype=task.dtype)
        self._steps: dict[str, Callable] = {}  # by arm
        self._valid_step: Callable | None = None  # the same for all

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

    def optimizer(
        self, arm: Arm, learning_rate: float, seed: int
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the arm with its schedule.

        Peak and seed are kept in the optimizer's state, not in the compiled step, which therefore
        serves all of them.
        """
        steps, warmup = self.task.steps, self.task.warmup
        unit = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, steps, 0.1)

        def build(peak: float, key: int):
            return arm.build(lambda step: peak * unit(step), key)

        return optax.inject_hyperparams(build)(peak=learning_rate, key=seed)

    def initial(self, seed: int) -> optax.Params:
        """Draws the parameters.

        Not jitted: a GPU's compiler takes about a second for each draw, so here one for each shape.
        """
        return nnx.to_pure_dict(nnx.state(NanoMoE(self.config, rngs=nnx.Rngs(seed))))

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
        tx = self.optimizer(arm, learning_rate, seed)
        _, train_step, valid_step = make_functions(self.config, tx, seed, self.task.accumulate)
        train_step = self._steps.setdefault(name, train_step)
        self._valid_step = self._valid_step or valid_step
        params = self.initial(seed)
        opt_state = jax.jit(tx.init)(params)
        total, active = count_parameters(params, self.config)

        losses: list[float] = []
        batches = itertools.islice(self.data(seed).train, self.task.steps)
        clock = time.perf_counter()
        while pending := list(itertools.islice(batches, FETCHED)):
            seen = []
            for batch in pending:
                params, opt_state, now = train_step(params, opt_state, batch)
                seen.append(now)
            seen = jax.device_get(seen)
            losses += [float(now["loss"]) for now in seen]
            if not math.isfinite(losses[-1]):
                break
        seconds = time.perf_counter() - clock

        finite = all(map(math.isfinite, losses))
        valid_loss = self.evaluate(params) if finite else math.inf
        return {
            **outcome(losses, valid_loss, self.task.steps, opt_state),
            "dropped": float(np.mean([now["routing"].dropped for now in seen])),
            "busiest": float(np.max(np.mean([now["routing"].load for now in seen], axis=0))),
            "parameters": total,
            "active_parameters": active,
            "seconds": round(time.perf_counter() - start, 1),
            "tokens_per_second": round(  # an arm's first run compiles within this time
                len(losses) * self.task.batch_size * self.task.seq_len / seconds
            ),
        }

    def evaluate(self, params: optax.Params) -> float:
        """Mean loss over the tokens of the whole validation split."""
        sums = [self._valid_step(params, batch) for batch in self.valid]
        nll, count = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
        return float(nll / count)
