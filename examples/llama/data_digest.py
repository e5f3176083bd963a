"""What identifies data: a digest of what was read, alike on every machine.

Nothing in it is computed in floating point, and nothing depends on where the files lie or when they
were written.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

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
