"""One run: a ResNet trained by one arm at one learning rate from one seed.

An arm is compiled once for all its rates and seeds, which are arguments of the compiled step.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from examples.kit.scores import summary
from examples.paper.arms import Arm
from examples.paper.vision.augment import crop_and_flip
from examples.paper.vision.cifar import Labelled
from examples.paper.vision.images import Images
from examples.paper.vision.resnet import MODELS, ResNet

EVALUATED = 1000  # images at once, at most


@dataclasses.dataclass(frozen=True)
class Task:
    """What all runs of a comparison have in common.

    Attributes:
        model: A key of `MODELS`.
        epochs: Passes over the training images.
        batch_size: Images a step, B; what is left of an epoch is not trained on.
        warmup: Part of the steps, linear from 0; a cosine to 0 follows.
        dtype: Of the computation.
    """

    model: str
    epochs: int
    batch_size: int
    warmup: float
    dtype: str


class State(NamedTuple):
    """What a step changes.

    Attributes:
        params: What the optimizer moves.
        stats: Running means and variances of batch normalisation, which it never sees.
        opt_state: The optimizer's.
        step: Steps done, int32 ().
    """

    params: optax.Params
    stats: Any
    opt_state: optax.OptState
    step: Array


class Trainer:
    """Runs a task; keeps what it has compiled for the next run."""

    def __init__(self, task: Task, data: Images):
        """Compiles nothing yet.

        Raises:
            ValueError: If the training images are fewer than a batch.
        """
        if task.batch_size > len(data.train.labels):
            raise ValueError(
                f"a batch of {task.batch_size}, but only {len(data.train.labels)} training images"
            )
        self.task = task
        self.data = data
        self.mean, self.std = data.statistics()
        self.steps_per_epoch = len(data.train.labels) // task.batch_size
        self.steps = task.epochs * self.steps_per_epoch
        config = dataclasses.replace(MODELS[task.model], dtype=task.dtype)
        self._make = functools.partial(ResNet, config, data.channels, data.classes)
        abstract = nnx.eval_shape(lambda: self._make(rngs=nnx.Rngs(0)))
        self.graphdef, _, _ = nnx.split(abstract, nnx.Param, nnx.BatchStat)
        self._steps: dict[str, Any] = {}  # compiled, by arm

    def run(self, name: str, arm: Arm, learning_rate: float, seed: int) -> dict[str, Any]:
        """Trains once.

        Args:
            name: The arm's name; runs of one name share one compiled step.
            arm: How to build the optimizer.
            learning_rate: The schedule's peak.
            seed: Of initialisation, order, augmentation and coins.

        Returns:
            What a record's "results" hold.
        """
        start = time.perf_counter()
        rate, key = jnp.float32(learning_rate), jnp.uint32(seed)
        images, labels = map(jnp.asarray, self.data.train)
        train_step = self._steps.setdefault(name, self.make_step(arm))
        params, stats = self.initial(seed)
        opt_state = jax.jit(self.optimizer(arm, rate, key).init)(params)
        state = State(params, stats, opt_state, jnp.int32(0))

        losses: list[float] = []  # of each epoch
        scores: list[float] = []  # at the end of each epoch
        for epoch in order(len(labels), self.task.batch_size, self.task.epochs, seed):
            pending = []
            for chosen in epoch:
                state, loss = train_step(state, images, labels, chosen, rate, key)
                pending.append(loss)
            losses.append(float(np.mean(jax.device_get(pending))))
            if not math.isfinite(losses[-1]):
                break
            if found := summary(state.opt_state):
                scores.append(float(found["alignment_mean"]))
        valid, test = (self.evaluate(state, part) for part in (self.data.valid, self.data.test))
        diverged = not (math.isfinite(losses[-1]) and math.isfinite(valid["loss"]))
        return {
            "valid_loss": math.inf if diverged else valid["loss"],
            "valid_accuracy": valid["accuracy"],
            "test_loss": test["loss"],
            "test_accuracy": test["accuracy"],
            "train_loss_last": losses[-1],
            "diverged": diverged,
            "epochs": len(losses),
            "steps": len(losses) * self.steps_per_epoch,
            "curve": [round(loss, 4) for loss in losses],
            "alignment": scores[-1] if scores else None,
            "alignment_over_training": float(np.mean(scores)) if scores else None,
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "seconds": round(time.perf_counter() - start, 1),
        }

    def initial(self, seed: int) -> tuple[optax.Params, Any]:
        """Draws the parameters and resets the running statistics."""
        _, params, stats = nnx.split(self._make(rngs=nnx.Rngs(seed)), nnx.Param, nnx.BatchStat)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(stats)

    def optimizer(
        self, arm: Arm, learning_rate: Array, key: Array
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the arm with its schedule; the peak may be traced."""
        warmup = round(self.task.warmup * self.steps)
        unit = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, self.steps)
        tx = arm.build(lambda step: learning_rate * unit(step), key)
        return optax.with_extra_args_support(tx)

    def make_step(self, arm: Arm) -> Any:
        """Returns the jitted step of an arm; it takes over the buffers of the state."""

        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(state: State, images, labels, chosen, learning_rate, key):
            tx = self.optimizer(arm, learning_rate, key)
            x = images[chosen]
            if self.data.augment:
                x = crop_and_flip(jax.random.fold_in(jax.random.key(key), state.step), x)

            def loss(params: optax.Params) -> tuple[Array, Any]:
                logits, stats = self.forward(params, state.stats, x, train=True)
                return jnp.mean(cross_entropy(logits, labels[chosen])), stats

            (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return State(params, stats, opt_state, state.step + 1), value

        return train_step

    def forward(self, params: optax.Params, stats: Any, images: Array, train: bool):
        """Logits of uint8 images (B, H, W, C), and the running statistics afterwards."""
        model = nnx.merge(self.graphdef, params, stats)
        x = (images.astype(jnp.float32) - self.mean[None, None, None]) / self.std[None, None, None]
        logits = model(x, train)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    @functools.cached_property
    def _score(self) -> Any:
        @jax.jit
        def score(params: optax.Params, stats: Any, images: Array, labels: Array):
            logits, _ = self.forward(params, stats, images, train=False)
            right = jnp.argmax(logits, axis=-1) == labels
            return jnp.sum(cross_entropy(logits, labels)), jnp.sum(right)

        return score

    def evaluate(self, state: State, part: Labelled) -> dict[str, float]:
        """Mean loss and share of right answers, with the running statistics."""
        sums = [
            self._score(
                state.params,
                state.stats,
                part.images[start : start + EVALUATED],
                part.labels[start : start + EVALUATED],
            )
            for start in range(0, len(part.labels), EVALUATED)
        ]
        loss, right = np.sum(jax.device_get(sums), axis=0, dtype=np.float64) / len(part.labels)
        return {"loss": float(loss), "accuracy": float(right)}


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The loss of each image, (B,)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def order(count: int, batch_size: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """Yields the images of each epoch's batches, int32 (batches, B)."""
    rng = np.random.default_rng(seed)
    whole = count - count % batch_size
    for _ in range(epochs):
        yield rng.permutation(count)[:whole].reshape(-1, batch_size).astype(np.int32)
