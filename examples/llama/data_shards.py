"""C4 as it is published: shards of gzipped JSON lines, `{"text": ...}` each."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from examples.llama.data_digest import digest
from examples.llama.data_error import DataError
from examples.llama.data_rows import Batching
from examples.llama.data_stream import Keep, State, Stream

SUFFIX = ".json.gz"


def find_shards(path: Path) -> list[Path]:
    """Returns `path` if it is a shard, or the shards in it, sorted; [] if there are none."""
    if path.is_dir():
        return sorted(path.rglob(f"*{SUFFIX}"))
    return [path] if path.name.endswith(SUFFIX) else []


def shard_stream(path: Path, batching: Batching) -> Stream:
    """Returns the documents of a shard or of a folder of them.

    Shards with "validation" in their name are the held-out split. Their order changes each epoch.
    Hosts share out whole shards, or if there are too few of them, the lines of each.

    Args:
        path: A `*.json.gz` file, or a folder of them.
        batching: Says which share is this host's.

    Raises:
        DataError: If all shards are for validation or, while reading, if a shard is damaged.
    """
    shards = find_shards(path)
    valid = [shard for shard in shards if path.is_dir() and "validation" in shard.name]
    train = [shard for shard in shards if shard not in set(valid)]
    if not train:
        raise DataError(f"{path}: only validation shards; add shards to train on")

    def resume(state: State, keep: Keep) -> Iterator[tuple[State, str]]:
        return _resume(path, train, batching, state, keep)

    return Stream(
        f"{path}: {len(train):,} shards *{SUFFIX}",
        digest(_identity(path, shards)),
        lambda: _read_all(train),
        (lambda: _read_all(valid)) if valid else None,
        resume,
    )


def _identity(path: Path, shards: Sequence[Path]) -> Iterator[str]:
    for shard in shards:
        yield from (shard.relative_to(path).as_posix(), str(shard.stat().st_size))


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
    number = skip
    try:
        with gzip.open(shard) as lines:
            for number, line in enumerate(itertools.islice(lines, skip, None), skip):
                text = _parse(line, shard, number)
                if text.strip():
                    yield number, text
            number += 1
    except (OSError, EOFError, zlib.error) as error:
        where = f"{shard}: line {number + 1}"
        raise DataError(f"{where}: damaged gzip ({error}); fetch the shard again") from error


def _parse(line: bytes, shard: Path, number: int) -> str:
    where = f"{shard}: line {number + 1}"
    if not line.strip():
        return ""
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); fetch the shard again") from error
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: no "text"; give lines such as {{"text": "..."}}')
    return text
