"""Data sets of the Hugging Face hub, streamed by the `datasets` package."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from examples.llama.data_digest import digest
from examples.llama.data_error import DataError, first_line
from examples.llama.data_rows import Batching
from examples.llama.data_stream import Keep, State, Stream

if TYPE_CHECKING:
    import datasets

PREFIX = "hf:"

_INSTALL = "pip install 'magma_optax[hf]'"


def hub_stream(path: str, batching: Batching) -> Stream:
    """Returns the documents in the column "text" of a data set.

    Trains on its split "train"; "validation" is the held-out split if there is one. The order of
    the files changes each epoch. Hosts share out whole files if their number divides evenly, else
    the documents of each.

    Args:
        path: `hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER` with files in a format the hub knows.
        batching: Says which share is this host's.

    Raises:
        DataError: If `datasets` is not installed, there is no such data set, or it has no split
            "train" or column "text"; while reading, if it cannot be read.
    """
    files, splits = _load(path)
    if "train" not in splits:
        raise DataError(f'{path}: no split "train" among {", ".join(splits)}; use another data set')
    train, valid = splits["train"], splits.get("validation")

    def resume(state: State, keep: Keep) -> Iterator[tuple[State, str]]:
        return _resume(path, train, batching, state, keep)

    return Stream(
        f"{path}, streamed",
        digest(files),
        lambda: _read(path, train),
        (lambda: _read(path, valid)) if valid is not None else None,
        resume,
    )


def _load(path: str) -> "tuple[list[str], datasets.IterableDatasetDict]":
    """Returns what identifies the files, and the splits."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{path}: streaming it needs the extra: {_INSTALL}") from None
    name, config = path.removeprefix(PREFIX), None
    if not Path(name).is_dir() and ":" in name:
        name, config = name.split(":", 1)
    try:
        builder = datasets.load_dataset_builder(name, config)
        return list(_identity(Path(name), builder)), builder.as_streaming_dataset()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path}: no such data set, or the hub is out of reach ({first_line(error)})"
        ) from error


def _identity(root: Path, builder: "datasets.DatasetBuilder") -> Iterator[str]:
    """Yields split, name and size of every file of a folder, or its address and revision."""
    for split, files in sorted((builder.config.data_files or {}).items(), key=str):
        for file, origin in zip(files, files.origin_metadata, strict=True):
            if root.is_dir():
                name = os.path.relpath(file, root.resolve())
                yield from (str(split), name, str(os.path.getsize(file)))
            else:
                yield from (str(split), file, *origin)


def _resume(
    path: str,
    dataset: "datasets.IterableDataset",
    batching: Batching,
    state: State,
    keep: Keep,
) -> Iterator[tuple[State, str]]:
    """Implements `Stream.resume`; a state is an epoch and what `datasets` makes its state."""
    from datasets.distributed import split_dataset_by_node

    host, hosts = batching.process_index, batching.process_count
    epoch, place = state.get("epoch", 0), state.get("place")
    found = bool(state)
    while True:
        # A fresh object: `datasets` keeps the place of the iteration on it.
        mine = split_dataset_by_node(dataset, host, hosts)
        mine.set_epoch(1 + batching.seed + epoch)  # Epoch 0 alone would not be shuffled.
        if place is not None:
            mine.load_state_dict(place)
        for text in _read(path, mine):
            if keep(text):
                found = True
                yield {"epoch": epoch, "place": mine.state_dict()}, text
        if not found:
            raise DataError(f"{path}: no documents for host {host} of {hosts}; use fewer hosts")
        epoch, place = epoch + 1, None


def _read(path: str, dataset: "datasets.IterableDataset") -> Iterator[str]:
    try:
        for example in dataset:
            if not isinstance(example.get("text"), str):
                raise DataError(f'{path}: no column "text" among {", ".join(example)}')
            if example["text"].strip():
                yield example["text"]
    except DataError:
        raise
    except Exception as error:  # Every format and file system has its own.
        raise DataError(f"{path}: cannot be read ({first_line(error)})") from error
