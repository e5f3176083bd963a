"""Rows of tokens and batches of rows, for data that fits in memory or a memory map.

A row has `seq_len + 1` ids, (seq_len + 1,) int32, with -1 where a short document leaves it empty.
"""

import dataclasses
from collections.abc import Iterator

import grain
import numpy as np

from examples.kit.data.error import DataError

PAD = -1
PACKINGS = ("concat", "document")


@dataclasses.dataclass(frozen=True)
class Batching:
    """How documents become this host's batches.

    Attributes:
        seq_len: Predicted tokens a row, T.
        batch_size: Rows a batch on this host, B.
        packing: "concat" (documents joined, cut into windows) or "document" (one a row).
        seed: Seed of every shuffle, the same on all hosts.
        process_index: This host's number.
        process_count: Number of hosts.
    """

    seq_len: int
    batch_size: int
    packing: str
    seed: int
    process_index: int
    process_count: int

    @property
    def global_batch_size(self) -> int:
        """Rows a batch over all hosts."""
        return self.batch_size * self.process_count

    def require_one_batch(self, name: str, tokens: int, documents: int) -> None:
        """Raises a `DataError` unless all hosts together can fill one batch.

        Args:
            name: What to call the data.
            tokens: How many training tokens there are.
            documents: How many training documents there are.
        """
        rows = self.global_batch_size
        needed = rows * (self.seq_len + 1)
        if self.packing == "concat" and tokens < needed:
            raise DataError(
                f"{name}, {tokens:,} training tokens, but one batch needs {needed:,} "
                f"= {rows} rows * ({self.seq_len} + 1); use more text or a smaller batch"
            )
        if self.packing == "document" and documents < rows:
            raise DataError(
                f"{name}, {documents:,} training documents, but one batch needs {rows:,}; "
                'use more documents, a smaller batch or packing "concat"'
            )


class Windows:
    """Rows for "concat": windows that share one token, so every token but the first is a target."""

    def __init__(self, tokens: np.ndarray, seq_len: int):
        """Cuts `tokens`, (n,) of any unsigned type, without copying them."""
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, -(-(len(self._tokens) - 1) // self._seq_len))

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Returns windows, (len(indices), seq_len + 1) int32; only the very last can be short."""
        places = indices[:, None] * self._seq_len + np.arange(self._seq_len + 1)
        rows = self._tokens[np.minimum(places, len(self._tokens) - 1)].astype(np.int32)
        return np.where(places < len(self._tokens), rows, PAD)


class Documents:
    """Rows for "document": one document each, truncated or padded."""

    def __init__(self, tokens: np.ndarray, seq_len: int, end_of_document: int):
        """Finds the documents of `tokens`, (n,) of any unsigned type, without copying them."""
        ends = np.append(np.flatnonzero(tokens == end_of_document) + 1, len(tokens))
        starts = np.append(0, ends[:-1])
        whole = ends - starts > 1  # An empty document has nothing to predict.
        self._bounds = np.stack([starts[whole], ends[whole]], axis=1)
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        """Returns the number of documents that are not empty."""
        return len(self._bounds)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Returns documents, (len(indices), seq_len + 1) int32."""
        bounds = self._bounds[indices]
        return np.stack([document_row(self._tokens[i:j], self._seq_len) for i, j in bounds])


Rows = Windows | Documents


def document_row(document: np.ndarray, seq_len: int) -> np.ndarray:
    """Returns the row of one document, (seq_len + 1,) int32, truncated or padded with PAD."""
    row = np.full(seq_len + 1, PAD, np.int32)
    kept = document[: seq_len + 1]
    row[: len(kept)] = kept
    return row


def make_rows(tokens: np.ndarray, batching: Batching, end_of_document: int) -> Rows:
    """Returns the rows of a flat token array, (n,) of any unsigned type."""
    if batching.packing == "document":
        return Documents(tokens, batching.seq_len, end_of_document)
    return Windows(tokens, batching.seq_len)


def to_batch(rows: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
    """Splits rows into what the model reads and what it should say.

    Args:
        rows: (B, T + 1) int32.
        pad_id: The id that stands in for PAD in the inputs, where nothing is predicted.

    Returns:
        "inputs" (B, T) int32 and "targets" (B, T) int32; a target of -1 bears no loss.
    """
    inputs = rows[:, :-1]
    return {"inputs": np.where(inputs == PAD, pad_id, inputs), "targets": rows[:, 1:].copy()}


def train_dataset(rows: Rows, batching: Batching, pad_id: int) -> grain.IterDataset:
    """Returns endless batches of this host's share, reshuffled each epoch.

    All hosts shuffle alike and take every `process_count`-th row, so they share no row within an
    epoch. What is left after the last full batch is dropped; it differs from epoch to epoch.
    """
    used = len(rows) - len(rows) % batching.global_batch_size
    return (
        grain.MapDataset.range(len(rows))
        .seed(batching.seed)
        .shuffle()
        .slice(slice(batching.process_index, used, batching.process_count))
        .repeat()
        .batch(batching.batch_size, drop_remainder=True)
        .map(lambda indices: to_batch(rows.take(indices), pad_id))
        # Memory needs no reading ahead.
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )


def valid_batches(rows: Rows, batching: Batching, pad_id: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields this host's share of all rows once, as many batches as on every other host."""
    for start in range(0, len(rows), batching.global_batch_size):
        first = start + batching.process_index * batching.batch_size
        indices = np.arange(first, min(first + batching.batch_size, len(rows)))
        batch = np.full((batching.batch_size, batching.seq_len + 1), PAD, np.int32)
        if len(indices):
            batch[: len(indices)] = rows.take(indices)
        yield to_batch(batch, pad_id)


def unigram_entropy(train_counts: np.ndarray, rows: Rows) -> float:
    """Returns what a model that knows only how frequent each token is would score.

    Args:
        train_counts: (vocab_size,) occurrences of each id in the training tokens.
        rows: The held-out rows.

    Returns:
        Cross-entropy of the held-out targets under add-one counts, in nats a token.
    """
    vocab_size = len(train_counts)
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(rows), 1024):
        targets = rows.take(np.arange(start, min(start + 1024, len(rows))))[:, 1:]
        counts += np.bincount(targets[targets != PAD], minlength=vocab_size)
    nats = np.log(train_counts.sum() + vocab_size) - np.log(train_counts + 1.0)
    return float(counts @ nats / counts.sum())


def count_ids(tokens: np.ndarray, size: int) -> np.ndarray:
    """Returns how often each id occurs, (at least `size`,) int64, in pieces that fit in memory."""
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), 1 << 22):
        piece = np.bincount(tokens[start : start + (1 << 22)], minlength=len(counts))
        counts = np.pad(counts, (0, len(piece) - len(counts))) + piece
    return counts
