"""What a file is by its first bytes, whatever its name says."""

ENOUGH = 4096  # Bytes that `kind_of` looks at.

_LEAST_TEXT = 64
_PRINTABLE = frozenset(b"\t\n\f\r" + bytes(range(32, 127)))

# Signatures of at least four bytes, which no sequence of token ids begins with by accident.
_SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer, not the file; run `git lfs pull`",
    b"PK\3\4": "a zip archive; unpack it",
    b"\xfd7zXZ\0": "an xz file; unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd file; unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"\x04\x22\x4d\x18": "an lz4 file; unpack it",
    b"PAR1": "a Parquet file; read its folder with hf:FOLDER",
    b"ARROW1": "an Arrow file; read its folder with hf:FOLDER",
    b"\x93NUMPY": "a NumPy file; write the bare ids with `ids.tofile(...)`",
    b"\x89HDF": "an HDF5 file; convert it to text",
    b"%PDF-": "a PDF; convert it to text",
    b"{\\rtf": "an RTF document; convert it to text",
    b"\x89PNG": "a picture; leave it out",
    b"\x7fELF": "a program; leave it out",
    b"SQLite format 3\0": "a database; write its text to a file",
}
# Too short to be told from token ids.
_SHORT_SIGNATURES = {
    b"\x1f\x8b": "a gzip file; unpack it",
    b"BZh": "a bzip2 file; unpack it",
    b"\xff\xfe": "UTF-16; convert it to UTF-8",
    b"\xfe\xff": "UTF-16; convert it to UTF-8",
}


def kind_of(head: bytes) -> str | None:
    """Returns what a file is and what to do about it, or None if it may be text or token ids.

    Args:
        head: The beginning of the file.
    """
    return unmistakable_kind_of(head) or _starts(head, _SHORT_SIGNATURES)


def unmistakable_kind_of(head: bytes) -> str | None:
    """Does what `kind_of` does, but only for signatures that token ids cannot have."""
    return _starts(head, _SIGNATURES)


def is_plain_text(head: bytes) -> bool:
    """Says whether `head` is ASCII text and long enough to be sure."""
    return len(head) >= _LEAST_TEXT and _PRINTABLE.issuperset(head)


def _starts(head: bytes, signatures: dict[bytes, str]) -> str | None:
    return next((kind for start, kind in signatures.items() if head.startswith(start)), None)
