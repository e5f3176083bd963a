"""Tests of token files of the Llama example: the vocabulary says how wide an id is."""

import gzip
import io
import lzma
import random
import zipfile

import numpy as np
import pytest
from llama_sources import error_of, load, write_tokens, write_words

PACKED = gzip.compress(random.Random(0).randbytes(1000), mtime=0)
LARGE = 70_000  # Some ids are beyond uint16.


def pack(path):
    """Replaces a file by its .xz."""
    packed = path.with_name(f"{path.name}.xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    return packed


each_packing = pytest.mark.parametrize("packed", [False, True], ids=["bin", "xz"])
# Splits and packings are read alike: each once.
each_split_and_packing = pytest.mark.parametrize(
    ("name", "packed"), [("train", False), ("val", True)], ids=["train.bin", "val.xz"]
)


@each_packing
def test_a_large_vocabulary_has_uint32_files(tmp_path, packed):
    write_tokens(tmp_path, LARGE, "<u4")
    train, valid = (np.fromfile(tmp_path / f"{name}.bin", "<u4") for name in ("train", "val"))
    assert train.max() > 1 << 16
    if packed:
        for name in ("train", "val"):
            pack(tmp_path / f"{name}.bin")
    loaded = load(tmp_path)
    assert "3,000 training tokens" in loaded.name
    targets = np.concatenate([batch["targets"].ravel() for batch in loaded.valid()])
    np.testing.assert_array_equal(targets[targets >= 0], valid[1:])
    windows = {tuple(train[i : i + 16].tolist()) for i in range(0, 3000 - 16, 16)}
    batches = iter(loaded.train)
    seen = {tuple(row.tolist()) for _ in range(40) for row in next(batches)["inputs"]}
    assert len(seen) > 100 and len(seen - windows) <= 1  # The last window is short.


def test_65536_ids_are_the_most_for_uint16(tmp_path):
    write_tokens(tmp_path, 1 << 16)
    assert "3,000 training tokens" in load(tmp_path).name
    write_words(tmp_path / "tokenizer.json", (1 << 16) + 1)
    assert "as it seems, uint16" in error_of(tmp_path)
    write_tokens(tmp_path, (1 << 16) + 1, "<u4")
    assert "3,000 training tokens" in load(tmp_path).name


def test_without_val_bin_the_end_is_held_out(tmp_path):
    write_tokens(tmp_path, LARGE, "<u4")
    (tmp_path / "val.bin").unlink()
    train = np.fromfile(tmp_path / "train.bin", "<u4")
    targets = np.concatenate([batch["targets"].ravel() for batch in load(tmp_path).valid()])
    np.testing.assert_array_equal(targets[targets >= 0], train[-150:][1:])


@each_split_and_packing
@pytest.mark.parametrize(
    ("size", "dtype", "expected"),
    [
        (300, "<u4", "every second uint16 is 0, so these are wider numbers"),
        (300, "<i8", "every second uint16 is 0, so these are wider numbers"),
        (300, ">u2", "holds id"),
        (LARGE, "<u2", "no uint32 ids but, as it seems, uint16"),
        (LARGE, "<i8", "every second uint32 is 0, so these are wider numbers"),
        (LARGE, ">u4", "no uint32 ids but"),
    ],
)
def test_files_of_another_width_are_refused(tmp_path, name, packed, size, dtype, expected):
    write_tokens(tmp_path, size, "<u4" if size == LARGE else "<u2")
    path = tmp_path / f"{name}.bin"
    np.random.default_rng(1).integers(2, size, 400).astype(dtype).tofile(path)
    if packed:
        path = pack(path)
    message = error_of(tmp_path)
    assert message.startswith(f"{path}: ") and expected in message


@each_split_and_packing
@pytest.mark.parametrize(
    ("size", "content", "expected"),
    [
        (300, b"", "empty; write uint16"),
        (300, b"abc", "3 bytes are not uint16 token ids of 2 bytes"),
        (LARGE, b"", "empty; write uint32"),
        (LARGE, b"abcdef", "6 bytes are not uint32 token ids of 4 bytes"),
        (300, b"\0" * 1000, "nothing but zeros"),
        (LARGE, b"\0" * 1000, "nothing but zeros"),
        (LARGE, b"\1\0\0\0" * 90 + b"\0\0\2\0", "holds id 131072, but tokenizer.json of 70,000"),
        (
            60_000,
            PACKED[:1000],
            "but a gzip file",
        ),
        (65_536, b"version https://git-lfs.github.com/spec/v1\n" * 2, "a Git LFS pointer"),
        (65_536, b"Plain text that was named like token ids. " * 4, "text, no token ids"),
        (300, b"Plain text that was named like token ids. " * 4, "text, no token ids"),
        (65_536, b"\x93NUMPY\x01\0" + b"\5\6" * 90, "a NumPy file"),
        (65_536, b"PAR1" + b"\5\6" * 90, "a Parquet file"),
    ],
)
def test_files_that_are_no_token_ids(tmp_path, name, packed, size, content, expected):
    write_tokens(tmp_path, size, "<u4" if size == LARGE else "<u2")
    path = tmp_path / f"{name}.bin"
    path.write_bytes(content)
    if packed:
        path = pack(path)
    message = error_of(tmp_path)
    assert message.startswith(f"{path}: ") and expected in message


def test_a_zip_archive_is_no_token_file(tmp_path):
    write_tokens(tmp_path, 1 << 16)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ids", b"\5\6" * 90)
    content = archive.getvalue()
    (tmp_path / "val.bin").write_bytes(content + b"\0" * (len(content) % 2))
    assert "val.bin: no token ids, but a zip archive; unpack it" in error_of(tmp_path)


def test_short_files_with_zeros_are_fine(tmp_path):
    """A few documents of one token each, where 0 ends a document."""
    write_tokens(tmp_path)
    np.array([5, 0, 6, 0, 7, 0], "<u2").tofile(tmp_path / "val.bin")
    targets = np.concatenate([batch["targets"].ravel() for batch in load(tmp_path).valid()])
    assert targets[targets >= 0].tolist() == [0, 6, 0, 7, 0]


def test_one_token_is_nothing_to_predict(tmp_path):
    write_tokens(tmp_path)
    np.array([5], "<u2").tofile(tmp_path / "val.bin")
    assert "nothing is left to hold out for evaluation (1 held-out tokens)" in error_of(tmp_path)


def test_val_bin_alone_is_refused(tmp_path):
    write_tokens(tmp_path)
    (tmp_path / "train.bin").unlink()
    (tmp_path / "README.md").write_text("Words. " * 200)
    assert "val.bin without train.bin" in error_of(tmp_path)


def test_the_file_that_is_named_is_the_one_that_is_read(tmp_path):
    write_tokens(tmp_path)
    plain = load(tmp_path).digest
    ids = np.fromfile(tmp_path / "train.bin", "<u2")
    (tmp_path / "train.bin.xz").write_bytes(lzma.compress(ids[::-1].tobytes()))
    assert load(tmp_path / "train.bin").digest == plain == load(tmp_path).digest
    assert load(tmp_path / "train.bin.xz").digest != plain
