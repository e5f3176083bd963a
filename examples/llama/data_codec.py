"""Text to token ids and back: plain bytes, or a tokenizer.json of the `tokenizers` package."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from examples.llama.data_digest import digest
from examples.llama.data_error import DataError, first_line

_BYTES = 256
_AT_ONCE = 1000  # Texts whose ids are Python lists at the same time.
_END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


@dataclasses.dataclass(frozen=True)
class Codec:
    """A vocabulary with its two directions.

    Attributes:
        name: What a person calls it: "bytes" or "tokenizer.json of 16,384 ids".
        digest: What identifies it.
        vocab_size: Number of ids; every id is below it.
        end_of_document: The id that closes every document.
        encode: Text to ids, without `end_of_document`.
        encode_many: The same for many texts at once.
        decode: Ids to text; `end_of_document` is dropped.
    """

    name: str
    digest: str
    vocab_size: int
    end_of_document: int
    encode: Callable[[str], list[int]]
    encode_many: Callable[[Sequence[str]], Iterable[list[int]]]
    decode: Callable[[Sequence[int]], str]

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest of uint16 and uint32 that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode_document(self, text: str) -> np.ndarray:
        """Returns the ids of `text` and `end_of_document`, (n,) uint16 or uint32."""
        return np.array([*self.encode(text), self.end_of_document], self.dtype)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the ids of all `texts`, each closed by `end_of_document`, as one flat array."""
        documents = [np.empty(0, self.dtype)]
        for start in range(0, len(texts), _AT_ONCE):
            many = self.encode_many(texts[start : start + _AT_ONCE])
            documents += (np.array([*ids, self.end_of_document], self.dtype) for ids in many)
        return np.concatenate(documents)


def byte_codec() -> Codec:
    """Returns the codec of UTF-8 bytes: ids 0 to 255, and 256 for the end of a document."""

    def encode(text: str) -> list[int]:
        return list(_sound(text).encode())

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < _BYTES).decode(errors="replace")

    def encode_many(texts: Sequence[str]) -> Iterable[list[int]]:
        return map(encode, texts)

    return Codec("bytes", digest(["bytes"]), _BYTES + 1, _BYTES, encode, encode_many, decode)


def tokenizer_codec(path: Path) -> Codec:
    """Returns the codec of a tokenizer.json.

    Args:
        path: A file in the format of the `tokenizers` package.

    Raises:
        DataError: If the file is missing or damaged, has no end-of-text token, or the
            `tokenizers` package is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(f"{path}: reading it needs `pip install tokenizers`") from None
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file; give the path of a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises bare `Exception`.
        raise DataError(f"{path}: not a tokenizer.json ({first_line(error)})") from error
    # A tokenizer.json can carry the padding, truncation and markers of its first use. Text that
    # merely mentions a special token must not become one: it would end the document.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    end = next((vocabulary[token] for token in _END_OF_TEXT if token in vocabulary), None)
    if end is None:
        raise DataError(f"{path}: no end-of-text token; add one of {', '.join(_END_OF_TEXT)}")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(_sound(text), add_special_tokens=False).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([int(i) for i in ids])

    def encode_many(texts: Sequence[str]) -> Iterable[list[int]]:
        sound = [_sound(text) for text in texts]
        return (one.ids for one in tokenizer.encode_batch_fast(sound, add_special_tokens=False))

    name, identity = f"{path.name} of {size:,} ids", digest([_canonical(path.read_bytes())])
    return Codec(name, identity, size, end, encode, encode_many, decode)


def _canonical(content: bytes) -> str:
    """Returns what a tokenizer.json says, without its layout and without what is not used of it."""
    parts = {**json.loads(content), "padding": None, "truncation": None}
    return json.dumps(parts, sort_keys=True)


def _sound(text: str) -> str:
    """Replaces lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
