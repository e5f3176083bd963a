"""Text to token ids and back: plain bytes, or a tokenizer.json of the `tokenizers` package."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.kit.data.digest import digest
from examples.kit.data.error import DataError, first_line
from examples.kit.data.files import is_there, read_bytes, require_file
from examples.kit.data.kind import kind_of
from examples.kit.data.spelling import Spelling

_BYTES = 256
_AT_ONCE = 1000  # Texts whose ids are Python lists at the same time.
_MOST_IDS = 1 << 24  # More than any vocabulary has; a model of more would not fit anywhere.
_SAMPLING = ("dropout", "alpha", "nbest_size")  # What makes a model of `tokenizers` draw at random.
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
        require: Raises a `DataError` for text of which encoding would leave something out.
        decode: Ids to text; `end_of_document` is dropped.
    """

    name: str
    digest: str
    vocab_size: int
    end_of_document: int
    encode: Callable[[str], list[int]]
    encode_many: Callable[[Sequence[str]], Iterable[list[int]]]
    require: Callable[[str], None]
    decode: Callable[[Sequence[int]], str]

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest of uint16 and uint32 that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode_document(self, text: str) -> np.ndarray:
        """Returns the ids of `text` and `end_of_document`, (n,) uint16 or uint32."""
        self.require(text)
        return np.array([*self.encode(text), self.end_of_document], self.dtype)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the ids of all `texts`, each closed by `end_of_document`, as one flat array."""
        documents = [np.empty(0, self.dtype)]
        for start in range(0, len(texts), _AT_ONCE):
            piece = texts[start : start + _AT_ONCE]
            for text in piece:
                self.require(text)
            many = self.encode_many(piece)
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

    def require(text: str) -> None:
        """Accepts every text."""

    return Codec(
        name="bytes",
        digest=digest(["bytes"]),
        vocab_size=_BYTES + 1,
        end_of_document=_BYTES,
        encode=encode,
        encode_many=encode_many,
        require=require,
        decode=decode,
    )


def tokenizer_codec(path: Path) -> Codec:
    """Returns the codec of a tokenizer.json.

    A tokenizer that draws its pieces at random (BPE dropout, Unigram sampling) is used without
    that, so that the same text has the same ids again; the codec's name says so.

    Args:
        path: A file in the format of the `tokenizers` package.

    Raises:
        DataError: If the file is missing or damaged, has no end-of-text token, or the
            `tokenizers` package is not installed. The codec raises it for text that the tokenizer
            cannot encode.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(f"{path}: reading it needs `pip install tokenizers`") from None
    if not is_there(path):
        raise DataError(f"{path}: no such tokenizer file; give the path of a tokenizer.json")
    if path.is_dir():
        raise DataError(f"{path}: a folder; give the path of the tokenizer.json in it")
    require_file(path)
    content = read_bytes(path)
    with _errors_of_the_package(f"{path}: not a tokenizer.json", kind_of(content)):
        settings = json.loads(content)
        tokenizer = Tokenizer.from_str(content.decode())
    # A tokenizer.json can carry the padding, truncation and markers of its first use. Text that
    # merely mentions a special token must not become one: it would end the document.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    sampling = [name for name in _SAMPLING if getattr(tokenizer.model, name, None) is not None]
    for name in sampling:
        setattr(tokenizer.model, name, None)

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > _MOST_IDS:
        raise DataError(
            f"{path}: ids up to {size - 1:,} for {len(vocabulary):,} tokens; number them from 0 "
            f"to at most {_MOST_IDS - 1:,}"
        )
    end = next((vocabulary[token] for token in _END_OF_TEXT if token in vocabulary), None)
    if end is None:
        raise DataError(f"{path}: no end-of-text token; add one of {', '.join(_END_OF_TEXT)}")
    spelling = Spelling(tokenizer, path)
    refusal = f"{path}: cannot encode the text with it, use one that knows all of it"

    def encode(text: str) -> list[int]:
        with _errors_of_the_package(refusal):
            return tokenizer.encode(_sound(text), add_special_tokens=False).ids

    def encode_many(texts: Sequence[str]) -> Iterable[list[int]]:
        with _errors_of_the_package(refusal):
            sound = [_sound(text) for text in texts]
            encoded = tokenizer.encode_batch_fast(sound, add_special_tokens=False)
        return (one.ids for one in encoded)

    def require(text: str) -> None:
        with _errors_of_the_package(refusal):
            spelling.require(_sound(text))

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([int(i) for i in ids])

    return Codec(
        name=f"{path.name} of {size:,} ids" + "".join(f", without its {one}" for one in sampling),
        digest=digest([_canonical(settings)]),
        vocab_size=size,
        end_of_document=end,
        encode=encode,
        encode_many=encode_many,
        require=require,
        decode=decode,
    )


@contextlib.contextmanager
def _errors_of_the_package(message: str, cause: str | None = None) -> Iterator[None]:
    """Raises a `DataError` of `message` and the cause, by default the exception's own words."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit):
        raise
    # The package raises bare `Exception`, and for a panic of Rust a `BaseException`.
    except BaseException as error:
        raise DataError(f"{message} ({cause or first_line(error)})") from error


def _canonical(settings: dict[str, Any]) -> str:
    """Returns what a tokenizer.json says, without its layout and without what is not used of it."""
    model = settings["model"] | dict.fromkeys(_SAMPLING)
    used = settings | {"model": model, "padding": None, "truncation": None}
    return json.dumps(used, sort_keys=True)


def _sound(text: str) -> str:
    """Replaces lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
