"""A ResNet that classifies images: the paper's negative control."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from examples.kit.data.error import DataError
from examples.kit.step import Batch, cut, gradient
from examples.paper.trainer import Pass
from examples.paper.vision import images
from examples.paper.vision.augment import crop_and_flip
from examples.paper.vision.cifar import Labelled
from examples.paper.vision.resnet import MODELS, ResNet

WEIGHT_DECAY = 0.05  # decoupled, of kernels; part of the update that Magma masks
MEAN_MULTIPLIER = 0.269  # of Magma here: p = 0.5 times its mean score on the digits, 0.537
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
        data: CIFAR-10's folder; None for scikit-learn's digits.
    """

    model: str
    epochs: int
    batch_size: int
    warmup: float
    dtype: str
    data: str | None = None

    def settings(self) -> dict[str, Any]:
        """Returns what a record says about the task: all that a run's outcome depends on."""
        return {
            "experiment": "negative_control",
            **dataclasses.asdict(self),
            "data": "digits" if self.data is None else "cifar10",
            "weight_decay": WEIGHT_DECAY,
            "mean_multiplier": MEAN_MULTIPLIER,
        }

    def open(self) -> "Problem":
        """Reads the data.

        Raises:
            DataError: If it can't be used, or has fewer images than a batch.
        """
        return Problem(self, images.load(None if self.data is None else Path(self.data)))


class Problem:
    """A ResNet, its images and its loss; see `examples.paper.trainer.Problem`."""

    validations = 1

    def __init__(self, task: Task, data: images.Images):
        """Cuts the epochs into steps.

        Raises:
            DataError: If the training images are fewer than a batch.
        """
        count = len(data.train.labels)
        if task.batch_size > count:
            raise DataError(f"a batch of {task.batch_size}, but only {count} training images")
        self.task = task
        self.data = data
        self.mean, self.std = data.statistics()
        self.steps = task.epochs * (count // task.batch_size)
        self.work = {"images": task.batch_size}
        warmup = round(task.warmup * self.steps)
        self.schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, self.steps)
        config = dataclasses.replace(MODELS[task.model], dtype=task.dtype)
        self._make = functools.partial(ResNet, config, data.channels, data.classes)
        abstract = nnx.eval_shape(lambda: self._make(rngs=nnx.Rngs(0)))
        self.graphdef, _, _ = nnx.split(abstract, nnx.Param, nnx.BatchStat)
        self._score = jax.jit(self.score)

    def batches(self, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches of "images", uint8 (B, H, W, C), and "labels", int32 (B,).

        With them "seed" and "step", numbers, which decide the augmentation.
        """
        found, labels = self.data.train
        epochs = order(len(labels), self.task.batch_size, self.task.epochs, seed)
        for step, chosen in enumerate(chosen for epoch in epochs for chosen in epoch):
            yield {
                "images": found[chosen],
                "labels": labels[chosen],
                "seed": np.uint32(seed),
                "step": np.int32(step),
            }

    def initial(self, seed: int) -> tuple[optax.Params, Any]:
        """Draws the parameters and resets the running statistics."""
        _, params, stats = nnx.split(self._make(rngs=nnx.Rngs(seed)), nnx.Param, nnx.BatchStat)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(stats)

    def backward(self, params: optax.Params, variables: Any, batch: Batch) -> Pass:
        """Computes the mean loss of a batch, its gradient, and the running statistics."""
        x = batch["images"]
        if self.data.augment:
            key = jax.random.fold_in(jax.random.key(batch["seed"]), batch["step"])
            x = crop_and_flip(key, x)

        def loss(params: optax.Params, batch: Batch) -> tuple[Array, Any]:
            logits, stats = self.forward(params, variables, batch["images"], train=True)
            return jnp.mean(cross_entropy(logits, batch["labels"])), stats

        found = gradient(loss, params, cut({"images": x, "labels": batch["labels"]}, 1))
        return Pass(found.loss, found.grads, jax.tree.map(lambda x: x[0], found.aux), {})

    def forward(self, params: optax.Params, stats: Any, images: Array, train: bool):
        """Logits of uint8 images (B, H, W, C), and the running statistics afterwards."""
        model = nnx.merge(self.graphdef, params, stats)
        x = (images.astype(jnp.float32) - self.mean[None, None, None]) / self.std[None, None, None]
        logits = model(x, train)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def evaluate(self, params: optax.Params, variables: Any) -> dict[str, float]:
        """Returns mean loss and accuracy on the validation and on the test images."""
        parts = {"valid": self.data.valid, "test": self.data.test}
        found: dict[str, float] = {}
        for name, part in parts.items():
            loss, accuracy = self.evaluate_part(params, variables, part)
            found |= {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
        return found

    def describe(self, seen: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns nothing."""
        return {}

    def evaluate_part(
        self, params: optax.Params, stats: Any, part: Labelled
    ) -> tuple[float, float]:
        """Mean loss and share of right answers, with the running statistics."""
        sums = []
        for start in range(0, len(part.labels), EVALUATED):
            some = slice(start, start + EVALUATED)
            sums.append(self._score(params, stats, part.images[some], part.labels[some]))
        loss, right = np.sum(jax.device_get(sums), axis=0, dtype=np.float64) / len(part.labels)
        return float(loss), float(right)

    def score(self, params: optax.Params, stats: Any, images: Array, labels: Array):
        """Sum of the losses, and number of right answers."""
        logits, _ = self.forward(params, stats, images, train=False)
        right = jnp.argmax(logits, axis=-1) == labels
        return jnp.sum(cross_entropy(logits, labels)), jnp.sum(right)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The loss of each image, (B,)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def order(count: int, batch_size: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """Yields the images of each epoch's batches, int32 (batches, B)."""
    rng = np.random.default_rng(seed)
    whole = count - count % batch_size
    for _ in range(epochs):
        yield rng.permutation(count)[:whole].reshape(-1, batch_size).astype(np.int32)
