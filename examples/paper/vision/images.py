"""Images to classify, in three fixed parts: to train on, to choose the rate by, and to report."""

import dataclasses
from pathlib import Path

import numpy as np

from examples.paper.vision import cifar
from examples.paper.vision.cifar import Labelled

SPLIT = 0  # seed of the split, the same for all runs


@dataclasses.dataclass(frozen=True)
class Images:
    """A data set.

    Attributes:
        name: One word.
        train: To train on.
        valid: To choose the learning rate by.
        test: To report; decides nothing.
        augment: Whether training images are cropped and flipped at random.
        classes: Number of classes.
    """

    name: str
    train: Labelled
    valid: Labelled
    test: Labelled
    augment: bool
    classes: int = 10

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train.images.shape[-1]

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel of the training images, float32 (C,)."""
        images = self.train.images
        mean = images.mean((0, 1, 2), dtype=np.float64)
        return mean.astype(np.float32), images.std((0, 1, 2), dtype=np.float64).astype(np.float32)


def load(folder: Path | None) -> Images:
    """Loads CIFAR-10 from `folder`, or scikit-learn's digits without one.

    Raises:
        DataError: If the folder is not CIFAR-10.
    """
    return digits() if folder is None else cifar10(folder)


def digits() -> Images:
    """The 1797 handwritten digits of 8x8 pixels in scikit-learn, 599 in each part."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = found.images.astype(np.uint8)[..., None]  # 0 to 16
    everything = Labelled(images, found.target.astype(np.int32))
    test, rest = split(everything, 599)
    valid, train = split(rest, 599)
    return Images("digits", train, valid, test, augment=False)


def cifar10(folder: Path) -> Images:
    """CIFAR-10; a tenth of its training images choose the rate: 45,000, 5,000 and 10,000."""
    found, test = cifar.read(folder)
    valid, train = split(found, len(found.labels) // 10)
    return Images("cifar10", train, valid, test, augment=True)


def split(found: Labelled, count: int) -> tuple[Labelled, Labelled]:
    """Draws `count` examples; returns them and the others."""
    order = np.random.default_rng(SPLIT).permutation(len(found.labels))
    first, rest = order[:count], order[count:]
    return (
        Labelled(found.images[first], found.labels[first]),
        Labelled(found.images[rest], found.labels[rest]),
    )
