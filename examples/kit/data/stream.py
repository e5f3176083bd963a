"""Documents too many for memory: read in order, shuffled within a window, packed as they come.

Everything here resumes exactly: the state of an iterator is the place of a document in its
source and how much was used since, so restoring skips to it and reads one shuffle window again.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from examples.kit.data.codec import Codec
from examples.kit.data.error import DataError
from examples.kit.data.rows import Batching, document_row, to_batch

HELD_OUT = 0.01
WINDOW = 1000  # Documents a shuffle window.
_SCAN_CHARACTERS = 64_000_000  # Read in search of held-out documents.
_SAMPLE_TOKENS = 1_000_000  # Of the training text, to be counted.
_VALID_TOKENS = 1_000_000  # Held in memory for evaluation.

_KINDS = {
    type(None): "null",
    bool: "a truth value",
    int | float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}

State = dict[str, Any]
Keep = Callable[[str], bool]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A source of documents.

    Attributes:
        name: What a person calls it.
        digest: What identifies its files.
        train: One pass over all training documents, for a look at their beginning.
        valid: One pass over all held-out documents, or None if the source sets none apart.
        resume: Endless (state, document) pairs of this host's share, those for which `keep`
            holds, from after the document that a state came with, or from the start for {}.
    """

    name: str
    digest: str
    train: Callable[[], Iterator[str]]
    valid: Callable[[], Iterator[str]] | None
    resume: Callable[[State, Keep], Iterator[tuple[State, str]]]


@dataclasses.dataclass(frozen=True)
class Opening:
    """What the beginning of a stream tells.

    Attributes:
        keep: Says of a document whether it is for training.
        valid: Held-out ids, (n,) uint16 or uint32.
        sample: Ids of the first training documents, (n,) uint16 or uint32.
        documents: How many documents `sample` has.
        is_all: Whether `sample` has all training documents.
    """

    keep: Keep
    valid: np.ndarray
    sample: np.ndarray
    documents: int
    is_all: bool


def require_text(text: object, where: str) -> str:
    """Returns `text`, the value of a row's "text".

    Raises:
        DataError: If it is no string; the message begins with `where`.
    """
    if isinstance(text, str):
        return text
    raise DataError(f'{where}: "text" is {kind_of_value(text)}, not a string; leave that row out')


def kind_of_value(value: object) -> str:
    """Returns what a person calls a value of JSON."""
    return next(
        (kind for of, kind in _KINDS.items() if isinstance(value, of)), f"a {type(value).__name__}"
    )


def open_stream(stream: Stream, codec: Codec) -> Opening:
    """Reads the beginning of a stream, the same on all hosts.

    A source without a split of its own holds out documents by a hash of their text: `HELD_OUT` of
    them all, or if none of the first 64 million characters has such a hash, the one that comes
    nearest. Documents of more than that before any other are passed over in the choice. Evaluation
    has at most 1 million tokens, of documents from the beginning.

    Args:
        stream: The source.
        codec: Its vocabulary.

    Raises:
        DataError: If the source cannot be read, or has nothing to train on or to hold out.
    """
    if stream.valid is not None:
        threshold, held_out = -1.0, stream.valid()  # All of `train` is for training.
    else:
        threshold, texts = _hold_out(stream.train())
        if not texts:
            raise DataError(
                f"{stream.name}: no document under {_SCAN_CHARACTERS:,} characters, so none can be "
                "held out; cut the documents, or set some apart for validation"
            )
        held_out = iter(texts)

    def keep(text: str) -> bool:
        return _share(text) > threshold

    kept = filter(keep, stream.train())
    sample = _encode_up_to(kept, codec, _SAMPLE_TOKENS)
    if not sample:
        raise DataError(f"{stream.name}: no documents to train on; use more of them")
    valid = _encode_up_to(held_out, codec, _VALID_TOKENS)
    if not valid:
        raise DataError(f"{stream.name}: no documents in its validation split; put some there")
    return Opening(
        keep,
        np.concatenate([np.empty(0, codec.dtype), *valid])[:_VALID_TOKENS],
        np.concatenate(sample),
        len(sample),
        is_all=next(kept, None) is None,
    )


def stream_dataset(
    stream: Stream, codec: Codec, batching: Batching, keep: Keep
) -> grain.IterDataset:
    """Returns endless batches of this host's share of a stream."""
    documents = grain.experimental.WindowShuffleIterDataset(
        _ResumableDataset(lambda state: stream.resume(state, keep)),
        window_size=WINDOW,
        seed=batching.seed,
    ).map(codec.encode_document)
    if batching.packing == "document":
        rows = documents.map(lambda document: document_row(document, batching.seq_len))
    else:
        rows = _ConcatDataset(documents, batching.seq_len + 1)
    return rows.batch(batching.batch_size).map(lambda batch: to_batch(batch, codec.end_of_document))


class _ResumableDataset(grain.IterDataset):
    """The documents of a `Stream`."""

    def __init__(self, resume: Callable[[State], Iterator[tuple[State, str]]]):
        super().__init__()
        self._resume = resume

    def __iter__(self) -> grain.DatasetIterator:
        return _ResumableIterator(self._resume)


class _ResumableIterator(grain.DatasetIterator):
    def __init__(self, resume: Callable[[State], Iterator[tuple[State, str]]]):
        super().__init__()
        self._resume = resume
        self.set_state({})

    def __next__(self) -> str:
        self._state, document = next(self._documents)
        return document

    def get_state(self) -> State:
        return self._state

    def set_state(self, state: State) -> None:
        self._state = state
        self._documents = self._resume(state)


class _ConcatDataset(grain.IterDataset):
    """Documents joined and cut into rows of one length.

    grain's own `ConcatThenSplitIterDataset` loses a document when its state has been through
    JSON: it marks "nothing left over" with a tuple and does not know the list that comes back.
    """

    def __init__(self, documents: grain.IterDataset, length: int):
        super().__init__(documents)
        self._length = length

    def __iter__(self) -> grain.DatasetIterator:
        return _ConcatIterator(iter(self._parent), self._length)


class _ConcatIterator(grain.DatasetIterator):
    def __init__(self, documents: grain.DatasetIterator, length: int):
        super().__init__(documents)
        self._length = length
        self._before_document = documents.get_state()
        self._document = np.empty(0, np.int32)
        self._used = 0  # Tokens of `_document` that earlier rows took.

    def __next__(self) -> np.ndarray:
        row = np.empty(self._length, np.int32)
        filled = 0
        while filled < self._length:
            if self._used == len(self._document):
                self._before_document = self._parent.get_state()
                self._document = next(self._parent)
                self._used = 0
            piece = self._document[self._used : self._used + self._length - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._used += len(piece)
        return row

    def get_state(self) -> State:
        return {"before_document": self._before_document, "used": self._used}

    def set_state(self, state: State) -> None:
        self._before_document = state["before_document"]
        self._used = state["used"]
        self._parent.set_state(self._before_document)
        self._document = next(self._parent) if self._used else np.empty(0, np.int32)


def _hold_out(documents: Iterator[str]) -> tuple[float, list[str]]:
    """Returns the largest share that is held out and the documents up to it, if there are any."""
    candidates: list[tuple[float, str]] = []
    lowest: tuple[float, str] | None = None
    characters = 0
    for text in documents:
        if lowest is None and len(text) > _SCAN_CHARACTERS:
            continue
        characters += len(text)
        if characters > _SCAN_CHARACTERS:
            break
        share = _share(text)
        lowest = min(lowest or (share, text), (share, text))
        if share <= HELD_OUT:
            candidates.append((share, text))
    if candidates:
        return HELD_OUT, [text for _, text in candidates]
    return (lowest[0], [lowest[1]]) if lowest else (1.0, [])


def _share(text: str) -> float:
    """Returns a number in [0, 1) that is the same for the same text, evenly spread over texts."""
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _encode_up_to(documents: Iterator[str], codec: Codec, tokens: int) -> list[np.ndarray]:
    """Encodes documents until they have so many tokens; leaves the rest in the iterator."""
    encoded = []
    while tokens > 0 and (text := next(documents, None)) is not None:
        encoded.append(codec.encode_document(text))
        tokens -= len(encoded[-1])
    return encoded
