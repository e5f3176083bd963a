"""One run: a model trained by one arm, at one learning rate, from one seed.

An arm is compiled once for all its rates and seeds, which are arguments of the compiled step.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from examples.kit import scores
from examples.kit.step import Batch, apply
from examples.paper.arms import Arm

LAST = 100  # steps in `train_loss_last`, but no more than a tenth of the run
CHUNK = 50  # steps a dispatch, at most
CURVE = 30  # points of the loss curve, at most


class Pass(NamedTuple):
    """What one batch gives.

    Attributes:
        loss: Mean over the batch, float32 ().
        grads: Its gradient.
        variables: The model's variables afterwards.
        seen: What else is to be known about the step, by name.
    """

    loss: Array
    grads: optax.Updates
    variables: Any
    seen: dict[str, Array]


class Problem(Protocol):
    """A model with its data and its loss, ready to be trained.

    Attributes:
        steps: Steps of a run.
        schedule: From the number of steps done to the share of the peak learning rate.
        validations: How often the model is evaluated, evenly spaced, the end included.
        work: What a step processes, by unit: tokens or images.
    """

    steps: int
    schedule: optax.Schedule
    validations: int
    work: Mapping[str, int]

    def batches(self, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields the batches of a run, at least one for each step."""
        ...

    def initial(self, seed: int) -> tuple[optax.Params, Any]:
        """Draws the parameters, and the variables that no optimizer moves."""
        ...

    def backward(self, params: optax.Params, variables: Any, batch: Batch) -> Pass:
        """Computes loss and gradient of a batch; traced."""
        ...

    def evaluate(self, params: optax.Params, variables: Any) -> dict[str, float]:
        """Returns what a record says about a model, its ``"valid_loss"`` first."""
        ...

    def describe(self, seen: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns what a record says about the last steps, from `Pass.seen` of each."""
        ...


class Task(Protocol):
    """What all runs of a comparison have in common; a frozen dataclass of JSON's types."""

    def settings(self) -> dict[str, Any]:
        """Returns what a record says about the task: all that a run's outcome depends on."""
        ...

    def open(self) -> Problem:
        """Reads the data.

        Raises:
            DataError: If it can't be used.
        """
        ...


class State(NamedTuple):
    """What a step changes."""

    params: optax.Params
    variables: Any
    opt_state: optax.OptState


class Trainer:
    """Runs a task; keeps what it has read and compiled for the next run."""

    def __init__(self, task: Task):
        """Reads the data.

        Raises:
            DataError: If it can't be used.
        """
        self.problem = task.open()
        self._compiled: dict[str, tuple[Any, Any]] = {}  # init and train_chunk by arm

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
        problem = self.problem
        chunk = max(n for n in range(1, CHUNK + 1) if problem.steps % n == 0)
        dispatches = problem.steps // chunk
        rate, key = jnp.float32(learning_rate), jnp.uint32(seed)
        batches = stacked(problem.batches(seed), chunk)
        params, variables = problem.initial(seed)
        if name not in self._compiled:
            first = next(batches)
            batches = itertools.chain([first], batches)
            self._compiled[name] = self.compile(arm, params, variables, first, rate, key)
        init, train_chunk = self._compiled[name]
        state = State(params, variables, init(params, rate, key))

        looks = evenly(dispatches, problem.validations)
        looked: list[list[float]] = []  # [step, validation loss]
        looking = 0.0  # seconds
        clock = time.perf_counter()
        pending: list[dict[str, Array]] = []  # what is seen of a chunk, still on the device
        seen: list[dict[str, np.ndarray]] = []
        for done in range(1, dispatches + 1):
            state, now = train_chunk(state, next(batches), rate, key)
            pending.append(now)
            if len(pending) > 1:  # look back by one chunk, so that the device never waits
                seen.append(jax.device_get(pending.pop(0)))
                if not math.isfinite(seen[-1]["loss"][-1]):
                    break
            if done in looks:
                jax.block_until_ready(state)
                opened = time.perf_counter()
                evaluated = problem.evaluate(state.params, state.variables)
                looked.append([done * chunk, evaluated["valid_loss"]])
                looking += time.perf_counter() - opened
        seen += jax.device_get(pending)
        seconds = time.perf_counter() - clock - looking

        losses = np.concatenate([now["loss"] for now in seen]).tolist()
        evaluated = {"valid_loss": math.inf}
        if all(map(math.isfinite, losses)):
            evaluated = problem.evaluate(state.params, state.variables)
        if diverged := not math.isfinite(evaluated["valid_loss"]):
            evaluated = {"valid_loss": math.inf}
        looked.append([len(losses), evaluated["valid_loss"]])
        last = float(np.mean(losses[-min(LAST, -(-problem.steps // 10)) :]))
        steps_a_second = len(losses) / seconds
        return {
            **evaluated,
            "train_loss_last": last if math.isfinite(last) else math.inf,
            "diverged": diverged,
            "steps": len(losses),
            "curve": curve(losses),
            "valid_curve": [[step, round(loss, 4)] for step, loss in looked],
            **mean_scores(seen, diverged),
            **problem.describe(seen[-1]),
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "seconds": round(time.perf_counter() - start, 1),
            **{
                f"{unit}_per_second": round(count * steps_a_second)
                for unit, count in problem.work.items()
            },
        }

    def optimizer(
        self, arm: Arm, learning_rate: Array, key: Array
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the arm with its schedule; the peak may be traced."""
        tx = arm.build(lambda step: learning_rate * self.problem.schedule(step), key)
        return optax.with_extra_args_support(tx)

    def compile(
        self,
        arm: Arm,
        params: optax.Params,
        variables: Any,
        batches: dict[str, np.ndarray],
        learning_rate: Array,
        key: Array,
    ) -> tuple[Any, Any]:
        """Compiles an arm for all learning rates and seeds.

        Args:
            arm: The arm.
            params: The parameters.
            variables: The model's other variables.
            batches: Of one chunk, each array (steps, B, ...).
            learning_rate: Any.
            key: Any.

        Returns:
            ``init(params, learning_rate, key) -> opt_state`` and ``train_chunk(state, batches,
            learning_rate, key) -> state, seen``, which takes over the buffers of `state`.
        """

        @jax.jit
        def init(params: optax.Params, learning_rate: Array, key: Array) -> optax.OptState:
            return self.optimizer(arm, learning_rate, key).init(params)

        @functools.partial(jax.jit, donate_argnums=0)
        def train_chunk(state: State, batches: Batch, learning_rate: Array, key: Array):
            tx = self.optimizer(arm, learning_rate, key)

            def step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
                found = self.problem.backward(state.params, state.variables, batch)
                params, opt_state = apply(tx, found.grads, state.opt_state, state.params)
                now = {"loss": found.loss, **found.seen}
                if score := scores.summary(opt_state):
                    now["alignment"] = score["alignment_mean"]
                return State(params, found.variables, opt_state), now

            return jax.lax.scan(step, state, batches)

        opt_state = jax.eval_shape(init, params, learning_rate, key)
        state = State(params, variables, opt_state)
        return init, train_chunk.lower(state, batches, learning_rate, key).compile()


def stacked(
    batches: Iterator[dict[str, np.ndarray]], steps: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of `steps` steps at a time, (steps, B, ...)."""
    while chunk := list(itertools.islice(batches, steps)):
        yield stack(chunk)


def stack(batches: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Joins batches (B, ...) on a new leading axis."""
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def mean_scores(seen: list[dict[str, np.ndarray]], diverged: bool) -> dict[str, float | None]:
    """Returns the mean score of all blocks, at the end and over training; None without scores."""
    if diverged or "alignment" not in seen[-1]:
        return {"alignment": None, "alignment_over_training": None}
    means = np.concatenate([now["alignment"] for now in seen])
    return {"alignment": float(means[-1]), "alignment_over_training": float(np.mean(means))}


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
