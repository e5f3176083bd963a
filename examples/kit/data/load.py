"""Text for the Llama example: one call that returns batches, from whatever source.

`load()` reads the Python standard library; `load(path)` reads text files, C4 shards, token files
or a data set of the Hugging Face hub. See `load` for the formats.
"""

import dataclasses
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grain
import numpy as np

from examples.kit.data.codec import Codec, byte_codec, tokenizer_codec
from examples.kit.data.digest import IdentifiedDataset, digest
from examples.kit.data.error import DataError, one_line
from examples.kit.data.files import is_there, read_status, require_file
from examples.kit.data.hub import PREFIX, hub_stream
from examples.kit.data.rows import (
    PACKINGS,
    Batching,
    count_ids,
    make_rows,
    train_dataset,
    unigram_entropy,
    valid_batches,
)
from examples.kit.data.shards import find_shards, shard_stream
from examples.kit.data.stream import Stream, open_stream, stream_dataset
from examples.kit.data.text import hold_out, read_files, read_standard_library
from examples.kit.data.tokens import find_tokenizer, is_token_file, is_token_folder, read_tokens

__all__ = ["Data", "DataError", "load", "vocabulary"]


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches of a text and what is needed to speak about them.

    Attributes:
        name: One line for a person.
        vocab_size: Number of token ids.
        train: Endless {"inputs": (B, T) int32, "targets": (B, T) int32}; a target of -1 bears no
            loss. Its iterator has `get_state()` and `set_state(state)`, and resumes with exactly
            the batches that would have come; a state is JSON-serialisable.
        valid: One pass over this host's share of the held-out split, in the same shapes, the last
            batch filled up with rows of target -1. All hosts yield the same number of batches.
        unigram_entropy: Cross-entropy of the held-out targets under add-one unigram counts of the
            training tokens (of a stream's first 1 million), in nats a token. What learns more than
            how frequent each token is scores below it.
        digest: 32 hexadecimal digits that identify what was read, to compare on resume and between
            hosts: the same on every machine and for every seed, packing, row length, batch size and
            number of hosts. Of files in memory and of token files it covers the tokenizer, all
            training ids and all held-out ids. Of a stream it covers the tokenizer, the name, size
            and end of each file (on the hub name and size), the training ids at the beginning (up
            to 1 million) and the held-out ids.
        encode: Text to ids; of a prompt, a tokenizer without an unknown token may leave out what
            it does not know.
        decode: Ids to text.
    """

    name: str
    vocab_size: int
    train: grain.IterDataset
    valid: Callable[[], Iterator[dict[str, np.ndarray]]]
    unigram_entropy: float
    digest: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load(
    path: str | None = None,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    tokenizer: str | None = None,
    packing: str = "concat",
    process_index: int | None = None,
    process_count: int | None = None,
) -> Data:
    """Loads a text as batches.

    `path` may be:
      - None: prose and code of the Python standard library, some 10 MB, nothing to download.
      - A text file, or a folder of them (the suffixes are in `data_text.SUFFIXES`). About 5 % of
        the characters are held out, by whole files where there are small enough ones.
      - A `*.json.gz` file of C4, or a folder of them; `*validation*` files are held out.
      - A `*.jsonl` or `*.jsonl.gz` file, of lines such as C4's.
      - A folder with `train.bin` or `train.bin.xz`, and `val.bin`: little-endian ids, uint16, or
        uint32 where the vocabulary has more than 65,536 ids, with their `tokenizer.json` in it or
        above it. Without `val.bin` the last 5 % are held out.
      - `hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER`: streamed by the `datasets` package.

    The first of token files, `*.json.gz` and text files that a folder has is what is read of it;
    other suffixes are ignored. Linked folders are read, folders whose names begin with a dot are
    not.

    Text is encoded with `tokenizer`, or a `tokenizer.json` in the folder of `path`; without them
    its ids are its UTF-8 bytes, and 256 ends a document. JSON lines and the hub are streamed:
    shuffled within windows of 1,000 documents, held out by a hash of the text (1 %) where the
    source has no validation split, and evaluated on at most 1 million tokens. Anything else is held
    in memory or mapped, and shuffled as a whole.

    Args:
        path: What to read.
        seq_len: Tokens a row, T.
        batch_size: Rows a batch on this host, B.
        seed: Seed of the order. Not of the split, which is always the same.
        tokenizer: Path of a `tokenizer.json` of the `tokenizers` package.
        packing: "concat" joins documents and cuts windows; "document" makes each a row, truncated
            or padded.
        process_index: This host's number; by default `jax.process_index()`.
        process_count: Number of hosts; by default `jax.process_count()`.

    Returns:
        The data.

    Raises:
        DataError: If the data cannot be used. Its message is one line.
    """
    if packing not in PACKINGS:
        raise DataError(f"packing {packing!r}: no such packing; use {' or '.join(PACKINGS)}")
    for option, value in (("--data", path), ("--tokenizer", tokenizer)):
        if value is not None and not value.strip():
            raise DataError(
                f"{option} {value!r}: names nothing; give a path, or leave {option} out"
            )
    if process_index is None or process_count is None:
        import jax  # Here, since it starts the accelerator.

        process_index = jax.process_index() if process_index is None else process_index
        process_count = jax.process_count() if process_count is None else process_count
    # Below what grain's seeds can hold, with room for one more each epoch.
    seed %= 1 << 31
    batching = Batching(seq_len, batch_size, packing, seed, process_index, process_count)

    codec = _codec(path, tokenizer)
    if path is None:
        return _from_texts(*read_standard_library(), codec, batching)
    if path.startswith(PREFIX):
        return _from_stream(hub_stream(path, batching), codec, batching)
    place = Path(path)
    if _has_tokens(place):
        return _from_tokens(f"{path}: token files", *read_tokens(place, codec), codec, batching)
    if find_shards(place):
        return _from_stream(shard_stream(place, batching), codec, batching)
    return _from_texts(*read_files(place), codec, batching)


def vocabulary(path: str | None, tokenizer: str | None) -> int:
    """Returns `Data.vocab_size` of what `load` would read, without reading it.

    Args:
        path: As for `load`.
        tokenizer: As for `load`.

    Raises:
        DataError: If there is no such data or tokenizer.
    """
    return _codec(path, tokenizer).vocab_size


def _codec(path: str | None, tokenizer: str | None) -> Codec:
    if path is None or path.startswith(PREFIX):
        return byte_codec() if tokenizer is None else tokenizer_codec(Path(tokenizer))
    place = Path(path)
    folder = place if _is_folder(place) else place.parent
    if not (_is_folder(place) or _has_tokens(place)):
        require_file(place)
    if tokenizer is not None:
        return tokenizer_codec(Path(tokenizer))
    if _has_tokens(place):
        return tokenizer_codec(find_tokenizer(folder))
    if is_there(folder / "tokenizer.json"):
        return tokenizer_codec(folder / "tokenizer.json")
    return byte_codec()


def _is_folder(place: Path) -> bool:
    return stat.S_ISDIR(read_status(place).st_mode)


def _has_tokens(place: Path) -> bool:
    return is_token_file(place) or (_is_folder(place) and is_token_folder(place))


def _from_texts(name: str, texts: dict[str, list[str]], codec: Codec, batching: Batching) -> Data:
    train, valid = map(codec.encode_documents, hold_out(texts))
    return _from_tokens(name, train, valid, codec, batching)


def _from_tokens(
    name: str, train: np.ndarray, valid: np.ndarray, codec: Codec, batching: Batching
) -> Data:
    pad_id = codec.end_of_document
    rows = make_rows(train, batching, pad_id)
    batching.require_one_batch(name, len(train), len(rows))
    return _data(
        f"{name}, {len(train):,} training tokens",
        train_dataset(rows, batching, pad_id),
        count_ids(train, codec.vocab_size),
        digest([codec.digest, train, valid]),
        valid,
        codec,
        batching,
    )


def _from_stream(stream: Stream, codec: Codec, batching: Batching) -> Data:
    opening = open_stream(stream, codec)
    if opening.is_all:
        batching.require_one_batch(stream.name, len(opening.sample), opening.documents)
    return _data(
        stream.name,
        stream_dataset(stream, codec, batching, opening.keep),
        count_ids(opening.sample, codec.vocab_size),
        digest([codec.digest, stream.digest, opening.sample, opening.valid]),
        opening.valid,
        codec,
        batching,
    )


def _data(
    name: str,
    train: grain.IterDataset,
    train_counts: np.ndarray,
    identity: str,
    valid: np.ndarray,
    codec: Codec,
    batching: Batching,
) -> Data:
    rows = make_rows(valid, batching, codec.end_of_document)
    if not len(rows):
        raise DataError(
            f"{name}: nothing is left to hold out for evaluation ({len(valid):,} held-out tokens); "
            "use more text"
        )
    name = one_line(f"{name}, {codec.name}")
    return Data(
        name,
        codec.vocab_size,
        IdentifiedDataset(train, name, identity),
        lambda: valid_batches(rows, batching, codec.end_of_document),
        unigram_entropy(train_counts, rows),
        identity,
        codec.encode,
        codec.decode,
    )
