"""C4 as it is published, and its like: JSON lines, `{"text": ...}` each, gzipped or not."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from examples.kit.data.digest import digest
from examples.kit.data.error import DataError, first_line
from examples.kit.data.files import find_files, fingerprint, read_bytes
from examples.kit.data.kind import ENOUGH, kind_of
from examples.kit.data.rows import Batching
from examples.kit.data.stream import Keep, State, Stream, kind_of_value, require_text
from examples.kit.data.text import LINES

SUFFIX = ".json.gz"

_LONGEST_LINE = 1 << 28  # Bytes.


def find_shards(path: Path) -> list[Path]:
    """Returns `path` if it is a shard, or the shards in it, sorted; [] if there are none.

    In a folder, these are its `*.json.gz`; a file may also be a `*.jsonl` or `*.jsonl.gz`.
    """
    if path.is_dir():
        return find_files(path, (SUFFIX,))
    return [path] if path.name.endswith((SUFFIX, *LINES)) else []


def shard_stream(path: Path, batching: Batching) -> Stream:
    """Returns the documents of a shard or of a folder of them.

    Shards with "validation" in their name are the held-out split. Their order changes each epoch.
    Hosts share out whole shards, or if there are too few of them, the lines of each.

    Args:
        path: A file of JSON lines, or a folder of `*.json.gz`.
        batching: Says which share is this host's.

    Raises:
        DataError: If all shards are for validation, or one is empty or cannot be read; while
            reading, if a shard is damaged or has no documents.
    """
    shards = find_shards(path)
    prints = [fingerprint(shard) for shard in shards]
    valid = [shard for shard in shards if path.is_dir() and "validation" in shard.name]
    train = [shard for shard in shards if shard not in set(valid)]
    if not train:
        raise DataError(f"{path}: only validation shards; add shards to train on")

    def resume(state: State, keep: Keep) -> Iterator[tuple[State, str]]:
        return _resume(path, train, batching, state, keep)

    names = [shard.relative_to(path).as_posix() for shard in shards]
    files = f"shards *{SUFFIX}" if path.is_dir() else "file of JSON lines"
    return Stream(
        f"{path}: {len(train):,} {files}",
        digest(part for file in zip(names, prints, strict=True) for part in file),
        lambda: _read_all(train),
        (lambda: _read_all(valid)) if valid else None,
        resume,
    )


def _resume(
    path: Path, shards: Sequence[Path], batching: Batching, state: State, keep: Keep
) -> Iterator[tuple[State, str]]:
    """Implements `Stream.resume`; a state is an epoch, a place in its order and a line."""
    host, hosts = batching.process_index, batching.process_count
    by_shard = len(shards) >= hosts
    mine = shards[host::hosts] if by_shard else shards

    epoch, place, line = (state.get(key, 0) for key in ("epoch", "place", "line"))
    found = bool(state)
    while True:
        order = np.random.default_rng([batching.seed, epoch]).permutation(len(mine))
        for i in range(place, len(mine)):
            for number, text in _read(mine[order[i]], skip=line):
                if (by_shard or number % hosts == host) and keep(text):
                    found = True
                    yield {"epoch": epoch, "place": i, "line": number + 1}, text
            line = 0
        if not found:
            raise DataError(f"{path}: no documents for host {host} of {hosts}; use fewer hosts")
        epoch, place = epoch + 1, 0


def _read_all(shards: Sequence[Path]) -> Iterator[str]:
    return (text for shard in shards for _, text in _read(shard))


def _read(shard: Path, skip: int = 0) -> Iterator[tuple[int, str]]:
    """Yields (line number from 0, text) of the documents after the first `skip` lines."""
    number, found = skip, skip > 0
    try:
        with gzip.open(shard) if shard.suffix == ".gz" else shard.open("rb") as stream:
            for number, line in enumerate(itertools.islice(_lines(stream), skip, None), skip):
                text = _parse(line, shard, number)
                if text.strip():
                    found = True
                    yield number, text
            number += 1
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        kind = None if number else _plain(read_bytes(shard, size=ENOUGH))
        where = f"{shard}: line {number + 1}"
        if kind:
            raise DataError(f"{where}: no gzip, but {kind}") from error
        raise DataError(
            f"{where}: damaged gzip ({first_line(error)}); fetch the shard again and start a new "
            "run: one that began with the damaged shard goes on with no other"
        ) from error
    except OSError as error:
        raise DataError(f"{shard}: cannot be read ({first_line(error)})") from error
    if not found:
        raise DataError(
            f"{shard}: no documents to train on or to evaluate with; fetch it again, or remove it"
        )


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yields lines; one that is too long for memory ends after its beginning."""
    return iter(lambda: stream.readline(_LONGEST_LINE + 1), b"")


def _plain(head: bytes) -> str | None:
    """Returns what a file named .gz is that is no gzip file, or None if it is not known."""
    if head.lstrip().startswith(b"{"):
        return "plain JSON lines; name it *.jsonl or pack it with gzip"
    if head.lstrip().startswith(b"<"):
        return "a web page; fetch the shard again"
    return None if head.startswith(b"\x1f\x8b") else kind_of(head)


def _parse(line: bytes, shard: Path, number: int) -> str:
    where = f"{shard}: line {number + 1}"
    if len(line) > _LONGEST_LINE:
        raise DataError(
            f"{where}: longer than {_LONGEST_LINE >> 20} MiB; write one document a line"
        )
    if not line.strip():
        return ""
    try:
        document = json.loads(line)
    except RecursionError as error:
        raise DataError(f"{where}: nested too deep; fetch the shard again") from error
    except ValueError as error:
        kind = kind_of(line) or f"not JSON ({first_line(error)}); fetch the shard again"
        raise DataError(f"{where}: {kind}") from error
    if not isinstance(document, dict):
        kind = kind_of_value(document)
        raise DataError(f'{where}: {kind}, so no "text"; give lines such as {{"text": "..."}}')
    if "text" not in document:
        keys = ", ".join(document)[:80] or "no keys"
        raise DataError(f'{where}: no "text" among {keys}; give lines such as {{"text": "..."}}')
    return require_text(document["text"], where)
