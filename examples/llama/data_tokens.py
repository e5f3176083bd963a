"""Token files: flat streams of little-endian uint16 ids with a tokenizer.json beside them."""

import lzma
from pathlib import Path

import numpy as np

from examples.llama.data_codec import Codec
from examples.llama.data_error import DataError
from examples.llama.data_rows import count_ids
from examples.llama.data_text import HELD_OUT

_DTYPE = np.dtype("<u2")
_LARGEST = 1 << 16


def is_token_folder(folder: Path) -> bool:
    """Says whether `folder` holds a train.bin or a train.bin.xz."""
    return _find(folder, "train") is not None


def find_tokenizer(folder: Path) -> Path:
    """Returns the tokenizer.json of a token folder: in it, or in the folder above it.

    Raises:
        DataError: If there is none.
    """
    for place in (folder, folder.absolute().parent):
        if (place / "tokenizer.json").is_file():
            return place / "tokenizer.json"
    raise DataError(f"{folder}: no tokenizer.json in it or above it; name one with --tokenizer")


def read_tokens(folder: Path, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """Reads train.bin and val.bin, or holds out the end of train.bin where there is no val.bin.

    Either may carry the suffix .xz, and is then unpacked into memory; else it is mapped.

    Args:
        folder: A folder for which `is_token_folder` holds.
        codec: The vocabulary the ids belong to.

    Returns:
        Training ids and held-out ids, (n,) uint16 each.

    Raises:
        DataError: If a file is empty or damaged or holds an id outside the vocabulary.
    """
    train = _read(_find(folder, "train"), codec)
    valid_file = _find(folder, "val")
    if valid_file is not None:
        return train, _read(valid_file, codec)
    cut = len(train) - round(HELD_OUT * len(train))
    return train[:cut], train[cut:]


def _find(folder: Path, stem: str) -> Path | None:
    files = (folder / f"{stem}.bin", folder / f"{stem}.bin.xz")
    return next((file for file in files if file.is_file()), None)


def _read(file: Path, codec: Codec) -> np.ndarray:
    tokens = _unpack(file) if file.suffix == ".xz" else _map(file)
    ids = np.flatnonzero(count_ids(tokens, _LARGEST))
    if ids[-1] >= codec.vocab_size:
        raise DataError(
            f"{file}: holds id {ids[-1]}, but {codec.name} ends at {codec.vocab_size - 1}; "
            "put the tokenizer.json that made the file beside it"
        )
    return tokens


def _unpack(file: Path) -> np.ndarray:
    try:
        with lzma.open(file) as stream:
            content = stream.read()
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{file}: damaged ({error}); fetch it again") from error
    _require_whole(file, len(content))
    return np.frombuffer(content, _DTYPE)


def _map(file: Path) -> np.ndarray:
    _require_whole(file, file.stat().st_size)
    return np.memmap(file, _DTYPE, mode="r")


def _require_whole(file: Path, size: int) -> None:
    if size == 0:
        raise DataError(f"{file}: empty; write uint16 token ids to it")
    if size % _DTYPE.itemsize:
        raise DataError(f"{file}: {size:,} bytes are not uint16 token ids; write the file again")
