"""Token files: flat streams of little-endian token ids with a tokenizer.json beside them.

The vocabulary decides how wide an id is: uint16 up to 65,536 ids, uint32 beyond. Nothing in the
file says so; what plainly was written in the other width is refused.
"""

import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from examples.kit.data.codec import Codec
from examples.kit.data.error import DataError, first_line
from examples.kit.data.files import is_there, read_bytes, require_file
from examples.kit.data.kind import ENOUGH, is_plain_text, kind_of, unmistakable_kind_of
from examples.kit.data.text import HELD_OUT

_TRAIN = ("train.bin", "train.bin.xz")
_VALID = ("val.bin", "val.bin.xz")
_AT_ONCE = 1 << 22
_LEAST_WIDE = 8  # Ids from which every second zero is no accident.


def is_token_file(path: Path) -> bool:
    """Says whether `path` is named train.bin or train.bin.xz and is no folder."""
    return path.name in _TRAIN and not path.is_dir()


def is_token_folder(folder: Path) -> bool:
    """Says whether `folder` holds token files, in whatever state they are."""
    return _find(folder, _TRAIN + _VALID) is not None


def find_tokenizer(folder: Path) -> Path:
    """Returns the tokenizer.json of a token folder: in it, or in the folder above it.

    Raises:
        DataError: If there is none.
    """
    for place in (folder, folder.absolute().parent):
        if is_there(place / "tokenizer.json"):
            return place / "tokenizer.json"
    raise DataError(f"{folder}: no tokenizer.json in it or above it; name one with --tokenizer")


def read_tokens(path: Path, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """Reads train.bin and val.bin, or holds out the end of train.bin where there is no val.bin.

    Either may carry the suffix .xz, and is then unpacked into memory; else it is mapped.

    Args:
        path: A train.bin or train.bin.xz, or a folder for which `is_token_folder` holds; there
            train.bin goes before train.bin.xz.
        codec: The vocabulary the ids belong to.

    Returns:
        Training ids and held-out ids, (n,) uint16 or uint32 each.

    Raises:
        DataError: If there is no train.bin, or a file is empty or damaged, cannot be read, holds
            an id outside the vocabulary, or was written in another width.
    """
    folder = path if path.is_dir() else path.parent
    train_file = _find(folder, _TRAIN) if path.is_dir() else path
    if train_file is None:
        raise DataError(f"{folder}: val.bin without train.bin; put train.bin beside it")
    train = _read(train_file, codec)
    valid_file = _find(folder, _VALID)
    if valid_file is not None:
        return train, _read(valid_file, codec)
    cut = len(train) - round(HELD_OUT * len(train))
    return train[:cut], train[cut:]


def _find(folder: Path, names: tuple[str, ...]) -> Path | None:
    files = (folder / name for name in names)
    return next((file for file in files if is_there(file)), None)


def _read(file: Path, codec: Codec) -> np.ndarray:
    content = _unpack(file) if file.suffix == ".xz" else _map(file)
    dtype = np.dtype(codec.dtype).newbyteorder("<")
    head = content[:ENOUGH].tobytes()
    if len(content) == 0:
        raise DataError(f"{file}: empty; write {dtype.name} token ids to it")
    if kind := unmistakable_kind_of(head):
        raise DataError(f"{file}: no token ids, but {kind}")
    if is_plain_text(head):
        raise DataError(f"{file}: text, no token ids; name it *.txt, or encode it")
    if len(content) % dtype.itemsize:
        raise DataError(
            f"{file}: {len(content):,} bytes are not {dtype.name} token ids of {dtype.itemsize} "
            "bytes; write the file again"
        )
    tokens = content.view(dtype)
    _require_width(file, tokens, codec)
    _require_known(file, tokens, codec, head)
    return tokens


def _unpack(file: Path) -> np.ndarray:
    require_file(file)
    packed = read_bytes(file)
    kind = None if packed.startswith(b"\xfd7zXZ\0") else kind_of(packed)
    parts = []
    try:
        # Not `lzma.open`, which takes a damaged second stream for the end of the file.
        while packed:
            stream = lzma.LZMADecompressor()
            parts.append(stream.decompress(packed))
            if not stream.eof:
                raise EOFError("it ends early")
            packed = stream.unused_data.lstrip(b"\0")
    except (lzma.LZMAError, EOFError) as error:
        if kind:
            raise DataError(f"{file}: no xz file, but {kind}") from error
        raise DataError(f"{file}: damaged ({first_line(error)}); fetch it again") from error
    return np.frombuffer(b"".join(parts), np.uint8)


def _map(file: Path) -> np.ndarray:
    try:
        return np.memmap(file, np.uint8, mode="r") if require_file(file) else np.empty(0, np.uint8)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({first_line(error)})") from error


def _require_width(file: Path, tokens: np.ndarray, codec: Codec) -> None:
    """Refuses a file whose every second id is 0: it holds wider numbers, or nothing."""
    if len(tokens) < 2 * _LEAST_WIDE or any(piece[1::2].any() for piece in _pieces(tokens)):
        return
    dtype = tokens.dtype.name
    if not any(piece.any() for piece in _pieces(tokens)):
        raise DataError(f"{file}: nothing but zeros; write the file again")
    raise DataError(
        f"{file}: every second {dtype} is 0, so these are wider numbers; write ids of "
        f"{codec.name} as little-endian {dtype}"
    )


def _require_known(file: Path, tokens: np.ndarray, codec: Codec, head: bytes) -> None:
    """Refuses ids outside the vocabulary."""
    largest = max(int(piece.max()) for piece in _pieces(tokens))
    if largest < codec.vocab_size:
        return
    if kind := kind_of(head):
        raise DataError(f"{file}: no token ids, but {kind}")
    unknown = sum(np.count_nonzero(piece >= codec.vocab_size) for piece in _pieces(tokens))
    if tokens.dtype.itemsize == 4 and unknown > len(tokens) // 2:
        raise DataError(
            f"{file}: no uint32 ids but, as it seems, uint16, which cannot hold all ids of "
            f"{codec.name}; write them as little-endian uint32"
        )
    raise DataError(
        f"{file}: holds id {largest}, but {codec.name} ends at {codec.vocab_size - 1}; "
        "put the tokenizer.json that made the file beside it"
    )


def _pieces(tokens: np.ndarray) -> Iterator[np.ndarray]:
    return (tokens[start : start + _AT_ONCE] for start in range(0, len(tokens), _AT_ONCE))
