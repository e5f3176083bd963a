"""Data sets of the Hugging Face hub, streamed by the `datasets` package."""

import dataclasses
import gzip
import os
import re
import traceback
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from examples.kit.data.digest import digest
from examples.kit.data.error import DataError, first_line
from examples.kit.data.files import find_files, fingerprint
from examples.kit.data.rows import Batching
from examples.kit.data.stream import Keep, State, Stream, require_text

if TYPE_CHECKING:
    import datasets

PREFIX = "hf:"

_INSTALL = "pip install 'magma_optax[hf]'"
# What `datasets` takes for data wherever it finds it. A .json or .txt file can be about the data.
_FORMATS = (".arrow", ".csv", ".json.gz", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_SAVED_TO_DISK = ("state.json", "dataset_dict.json")
_EXCERPT = 80  # Characters of a row.


@dataclasses.dataclass(frozen=True)
class _Source:
    """A data set as it was opened.

    Attributes:
        path: What the user called it.
        name: One line for a person.
        files: The addresses of its files.
        splits: Its splits by name.
        digest: What identifies its files.
    """

    path: str
    name: str
    files: list[str]
    splits: "datasets.IterableDatasetDict"
    digest: str


def hub_stream(path: str, batching: Batching) -> Stream:
    """Returns the documents in the column "text" of a data set.

    Trains on its split "train"; "validation" is the held-out split if there is one. The order of
    the files changes each epoch. Hosts share out whole files if their number divides evenly, else
    the documents of each.

    Args:
        path: `hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER` with files in a format the hub knows.
        batching: Says which share is this host's.

    Raises:
        DataError: If `datasets` is not installed, there is no such data set, it has no split
            "train" or column "text", or a file is empty or left out; while reading, if it cannot
            be read.
    """
    source = _open(path)
    splits = source.splits
    if "train" not in splits:
        raise DataError(f'{path}: no split "train" among {", ".join(splits)}; use another data set')
    train, valid = splits["train"], splits.get("validation")

    def resume(state: State, keep: Keep) -> Iterator[tuple[State, str]]:
        return _resume(source, train, batching, state, keep)

    return Stream(
        source.name,
        source.digest,
        lambda: _read(source, train, "train"),
        (lambda: _read(source, valid, "validation")) if valid is not None else None,
        resume,
    )


def _open(path: str) -> _Source:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{path}: streaming it needs the extra: {_INSTALL}") from None
    name, config = path.removeprefix(PREFIX), None
    is_folder = os.path.isdir(name)
    if not is_folder and ":" in name:
        name, config = name.split(":", 1)
        is_folder = os.path.isdir(name)
    if not name.strip():
        raise DataError(f"{path}: no name; give hf:NAME, hf:NAME:CONFIG or hf:FOLDER")
    if any(os.path.exists(os.path.join(name, file)) for file in _SAVED_TO_DISK):
        raise DataError(
            f"{path}: written by `save_to_disk`, which has another format; use `to_parquet`"
        )
    folder = Path(name) if is_folder else None
    files: list[tuple[str, str]] = []  # Split and address.
    try:
        builder = datasets.load_dataset_builder(name, config)
        by_split = builder.config.data_files or {}
        files += sorted((str(split), file) for split in by_split for file in by_split[split])
        identity = digest(part for file in files for part in _identity(*file, folder))
        splits = builder.as_streaming_dataset()
    except DataError:
        raise
    except Exception as error:  # Every format and file system has its own.
        if file := _file_of(error, [file for _, file in files]):
            raise _unreadable(file, error) from error
        what = (
            "no data that `datasets` can read"
            if is_folder
            else "no such data set, or the hub is out of reach"
        )
        raise DataError(f"{path}: {what} ({_summary(error)})") from error
    taken = [file for _, file in files]
    left_out = _left_out(path, folder, taken) if folder else 0
    note = f", but {left_out:,} of its data files, which `datasets` leaves out" if left_out else ""
    return _Source(path, f"{path}, streamed{note}", taken, splits, identity)


def _identity(split: str, file: str, folder: Path | None) -> tuple[str, str, str]:
    """Returns a file's split, its name and what tells its content, wherever it lies."""
    import fsspec

    if folder is not None:
        place, name = os.path.split(file)
        place = os.path.relpath(os.path.realpath(place), folder.resolve())
        content = fingerprint(Path(file))
        if file.endswith(".gz") and not _unpacks_to_something(Path(file)):
            raise DataError(f"{file}: a gzip file of nothing; fetch it again, or remove it")
        return split, Path(place, name).as_posix(), content
    system, place = fsspec.url_to_fs(file)
    size = str(system.info(place)["size"])
    # Without the commit, which is another as soon as somebody edits the data set's README.
    name = re.sub("@[0-9a-f]{40}(?=/)", "", file)
    if size == "0":
        raise DataError(f"{name}: empty (0 bytes); use another data set")
    return split, name, size


def _left_out(path: str, folder: Path, files: list[str]) -> int:
    """Returns how many data files of a folder `datasets` doesn't take, by format or by name.

    Raises:
        DataError: If a folder or file cannot be read, or `datasets` does not enter a folder, as
            it is a link.
    """
    taken = {os.path.realpath(file) for file in files}
    suffixes = tuple({Path(file).suffix for file in files if Path(file).suffix} | set(_FORMATS))
    left_out = [
        file for file in find_files(folder, suffixes) if os.path.realpath(file) not in taken
    ]
    for file in left_out:
        above = [folder / part for part in file.relative_to(folder).parents][:-1]
        if link := next((place for place in above if place.is_symlink()), None):
            raise DataError(
                f"{path}: `datasets` does not enter the linked folder {link}; put a folder there"
            )
    return len(left_out)


def _unpacks_to_something(file: Path) -> bool:
    try:
        with gzip.open(file) as content:
            return bool(content.read(1))
    except (OSError, EOFError, zlib.error):
        return True  # Whoever reads it will say what is wrong.


def _resume(
    source: _Source,
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
        for text in _read(source, mine):
            if keep(text):
                found = True
                yield {"epoch": epoch, "place": mine.state_dict()}, text
        if not found:
            raise DataError(
                f"{source.path}: no documents for host {host} of {hosts}; use fewer hosts"
            )
        epoch, place = epoch + 1, None


def _read(
    source: _Source, dataset: "datasets.IterableDataset", split: str | None = None
) -> Iterator[str]:
    """Yields the texts of a data set; errors count its rows if it is all of `split`, in order."""
    rows = iter(dataset)
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # Every format and file system has its own.
            where = _file_of(error, source.files) or source.path
            raise _unreadable(where, error) from error
        if row is None:
            return
        number += 1
        where = f"row {number:,} of {split}" if split else f"the row {str(row)[:_EXCERPT]}"
        if "text" not in row:
            columns = ", ".join(row)
            raise DataError(
                f'{source.path}: no column "text" among {columns}; use another data set'
            )
        if (text := require_text(row["text"], f"{source.path}: {where}")).strip():
            yield text


def _unreadable(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: cannot be read ({_summary(error)}); fetch it again")


def _summary(error: Exception) -> str:
    """Returns an exception's message; of a long one, which quotes a schema, both ends."""
    lines = str(error).splitlines()
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else first_line(error)


def _file_of(error: Exception, files: Iterable[str]) -> str | None:
    """Returns which of `files` was being read: a function on the way to the failure holds it."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if isinstance(value, str):
                if found := next((file for file in files if file in value), None):
                    return found
    return None
