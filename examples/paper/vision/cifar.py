"""CIFAR-10 from the folders that its authors distribute, for Python or binary.

Both hold five files of training images and one of test images. An image is 3072 bytes: 32 rows of
32 pixels in red, then in green, then in blue.
"""

import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.kit.data.error import DataError, first_line

PYTHON, BINARY = "cifar-10-batches-py", "cifar-10-batches-bin"
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
TEST = "test_batch"
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32


class Labelled(NamedTuple):
    """Images and their classes.

    Attributes:
        images: uint8 (n, H, W, C).
        labels: int32 (n,).
    """

    images: np.ndarray
    labels: np.ndarray


def read(folder: Path) -> tuple[Labelled, Labelled]:
    """Reads the training and the test images.

    Args:
        folder: ``cifar-10-batches-py``, ``cifar-10-batches-bin``, or a folder that has one of them.

    Raises:
        DataError: If files are missing or damaged; names them and the fix.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; unpack CIFAR-10 from {SOURCE} there")
    for name in (PYTHON, BINARY):
        if (folder / name).is_dir():
            folder = folder / name
            break
    suffix = ".bin" if any(folder.glob("*.bin")) else ""
    paths = [folder / f"{name}{suffix}" for name in [*TRAIN, TEST]]
    missing = [path.name for path in paths if not path.is_file()]
    if len(missing) == len(paths):
        raise DataError(
            f"{folder}: neither {PYTHON} nor {BINARY}; unpack CIFAR-10 from {SOURCE} there"
        )
    if missing:
        raise DataError(
            f"{folder}: incomplete, without {', '.join(missing)}; unpack CIFAR-10 from {SOURCE} "
            "there again"
        )
    *train, test = map(read_binary if suffix else read_python, paths)
    return Labelled(*map(np.concatenate, zip(*train, strict=True))), test


def read_binary(path: Path) -> Labelled:
    """Reads a file of records of a byte for the label and the bytes of the image."""
    data = np.fromfile(path, np.uint8)
    if not data.size or data.size % (1 + PIXELS):
        raise DataError(
            f"{path}: {data.size} bytes are no whole number of records of {1 + PIXELS}; unpack "
            f"CIFAR-10 from {SOURCE} again"
        )
    records = data.reshape(-1, 1 + PIXELS)
    return labelled(path, records[:, 1:], records[:, 0])


def read_python(path: Path) -> Labelled:
    """Reads a dictionary that Python 2 pickled, with "data" and "labels"."""
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, encoding="latin1").load()
        data, labels = np.asarray(content["data"]), np.asarray(content["labels"])
    except Exception as error:  # damaged pickles raise anything
        raise DataError(
            f"{path}: no batch of CIFAR-10 ({first_line(error)}); unpack it from {SOURCE} again"
        ) from None
    return labelled(path, data, labels)


class ArraysOnly(pickle.Unpickler):
    """Unpickles arrays and what Python has built in, and runs no code from the file."""

    def find_class(self, module: str, name: str):
        """Finds what an array is made of."""
        of_arrays = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if of_arrays or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def labelled(path: Path, data: np.ndarray, labels: np.ndarray) -> Labelled:
    """Brings (n, 3072) into the order (n, 32, 32, 3), and checks the labels."""
    if data.shape != (len(labels), PIXELS) or data.dtype != np.uint8:
        raise DataError(
            f"{path}: {len(labels)} labels, but images of shape {data.shape} and {data.dtype}; "
            f"unpack CIFAR-10 from {SOURCE} again"
        )
    if labels.max() > 9:
        raise DataError(f"{path}: label {labels.max()}, but CIFAR-10 has 0 to 9")
    images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Labelled(np.ascontiguousarray(images), labels.astype(np.int32))
