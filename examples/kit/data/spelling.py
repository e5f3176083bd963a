"""Finds text that a tokenizer would leave out without a word.

A BPE model without an unknown token drops characters that it has no token for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from examples.kit.data.error import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Spelling:
    """The characters that a tokenizer can spell, learnt as they come."""

    def __init__(self, tokenizer: "Tokenizer", path: Path):
        """Looks at the model of `tokenizer`, which `path` holds."""
        from tokenizers.models import BPE

        model = tokenizer.model
        self._tokenizer = tokenizer
        self._path = path
        self._drops = isinstance(model, BPE) and model.unk_token is None
        self._known: set[str] = set()

    def require(self, text: str) -> None:
        """Raises a `DataError` if some of `text` has no token and would be dropped."""
        if not self._drops:
            return
        for char in set(text) - self._known:
            # A character alone can look different from how it does in the text.
            if any(self._dropped(char)) and (lost := next(self._dropped(text), None)):
                raise DataError(
                    f"{self._path}: has no token for {lost!r} and none for what it does not know, "
                    "so it would leave it out; use a byte-level tokenizer, or add such a token"
                )
            self._known.add(char)

    def _dropped(self, text: str) -> Iterator[str]:
        if normalizer := self._tokenizer.normalizer:
            text = normalizer.normalize_str(text)
        pieces = [text]
        if pre_tokenizer := self._tokenizer.pre_tokenizer:
            pieces = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        return (char for char in dict.fromkeys("".join(pieces)) if not self._spells(char))

    def _spells(self, char: str) -> bool:
        model = self._tokenizer.model
        prefix, suffix = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
        forms = (char, prefix + char, char + suffix, prefix + char + suffix)
        if any(model.token_to_id(form) is not None for form in forms):
            return True
        spelt = (f"<0x{byte:02X}>" for byte in char.encode())
        return model.byte_fallback and all(model.token_to_id(byte) is not None for byte in spelt)
