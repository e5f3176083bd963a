"""What identifies data: a digest of what was read, alike on every machine.

Nothing in it is computed in floating point, and nothing depends on where the files lie or when they
were written.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import grain
import numpy as np

from examples.kit.data.error import DataError

_AT_ONCE = 1 << 24


def digest(parts: Iterable[str | bytes | np.ndarray]) -> str:
    """Returns 32 hexadecimal digits for a sequence of texts, bytes and flat arrays of token ids.

    An array counts by its dtype and its values, in little-endian order, so it is the same mapped
    from a file or held in memory. Other parts, or the same in another order, give another digest.
    """
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        kind = content.dtype.name if isinstance(content, np.ndarray) else type(part).__name__
        whole.update(f"{kind} {len(content)}:".encode())  # So that no two sequences run together.
        if isinstance(content, np.ndarray):
            for start in range(0, len(content), _AT_ONCE):
                piece = content[start : start + _AT_ONCE]
                whole.update(piece.astype(piece.dtype.newbyteorder("<"), copy=False).tobytes())
        else:
            whole.update(content)
    return whole.hexdigest()


class IdentifiedDataset(grain.IterDataset):
    """A dataset whose iterator goes on only with the data that its state was taken from."""

    def __init__(self, dataset: grain.IterDataset, name: str, digest: str):
        """Puts `digest` into the states of `dataset`; errors call the data `name`."""
        super().__init__(dataset)
        self._name = name
        self._digest = digest

    def __iter__(self) -> grain.DatasetIterator:
        """Returns the iterator of the dataset, with the digest in its states."""
        return _IdentifiedIterator(iter(self._parent), self._name, self._digest)


class _IdentifiedIterator(grain.DatasetIterator):
    def __init__(self, iterator: grain.DatasetIterator, name: str, digest: str):
        super().__init__(iterator)
        self._name = name
        self._digest = digest

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {**self._parent.get_state(), "data": self._digest}

    def set_state(self, state: dict[str, Any]) -> None:
        place = {key: value for key, value in state.items() if key != "data"}
        # A state without a digest is one of before there were digests.
        if (found := state.get("data", self._digest)) != self._digest:
            raise DataError(
                f"{self._name}: not the data that the state was taken from (digest {found} there, "
                f"{self._digest} here): files, tokenizer or split changed since; bring the old "
                "ones back, or start anew"
            )
        if place.keys() != self._parent.get_state().keys():
            raise DataError(
                f"{self._name}: the state was taken from data of another kind or packing; go on "
                "with that, or start anew"
            )
        self._parent.set_state(place)
