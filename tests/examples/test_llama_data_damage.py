"""Tests of damaged, empty and cut files in every format that the Llama example reads."""

import errno
import gzip
import json
import lzma
import os
import random

import pytest
from llama_sources import error_of, fail_to_read, lines_of, load, read, text_of, write_shard
from llama_sources import write_tokens as write_token_files

from examples.kit.data import shards as data_shards

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><body>429 Too Many Requests</body></html>\n"
NOISE = random.Random(0).randbytes(20_000)


def write_shards(folder, suffix="json.gz"):
    for s in range(3):
        texts = (text_of(100 * s + i) for i in range(100))
        write_shard(folder / f"c4-train.{s}.{suffix}", texts)
    write_shard(folder / f"c4-validation.0.{suffix}", map(text_of, range(1000, 1030)))


@pytest.fixture(params=["c4-train.0", "c4-train.1", "c4-validation.0"])
def shard(request, tmp_path):
    """Returns one of several good shards: the first, one in the middle, that of validation."""
    write_shards(tmp_path)
    return tmp_path / f"{request.param}.json.gz"


def overwrite(path, start, content):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def append(path, content):
    with path.open("ab") as file:
        file.write(content)


DAMAGES = {
    "empty": (lambda path: path.write_bytes(b""), "empty (0 bytes)"),
    "cut in half": (cut, "damaged gzip"),
    "cut at its end": (lambda path: cut(path, 0.999), "damaged gzip"),
    "overwritten": (lambda path: overwrite(path, 200, NOISE[:50]), "damaged gzip"),
    "followed by noise": (lambda path: append(path, b"noise"), "damaged gzip"),
    "followed by half a member": (
        lambda path: append(path, gzip.compress(lines_of([text_of(0)] * 9).encode())[:99]),
        "damaged gzip",
    ),
    "a gzip of nothing": (lambda path: path.write_bytes(gzip.compress(b"")), "no documents"),
    "a gzip of empty lines": (lambda path: path.write_bytes(gzip.compress(b"\n \n")), "no docum"),
    "a gzip of empty texts": (lambda path: write_shard(path, ["", " \n"]), "no documents"),
    "plain": (lambda path: path.write_bytes(lines_of(["a"] * 9).encode()), "no gzip, but plain"),
    "a pointer": (lambda path: path.write_bytes(LFS), "no gzip, but a Git LFS pointer"),
    "a web page": (lambda path: path.write_bytes(PAGE), "no gzip, but a web page"),
    "an xz": (lambda path: path.write_bytes(lzma.compress(NOISE)), "no gzip, but an xz file"),
    "noise": (lambda path: path.write_bytes(NOISE), "damaged gzip"),
    "a gzip of noise": (lambda path: path.write_bytes(gzip.compress(NOISE)), "line 1: not JSON"),
    "a gzip of a gzip": (
        lambda path: path.write_bytes(gzip.compress(path.read_bytes())),
        "line 1: a gzip file; unpack it",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named(shard, damage):
    change, expected = DAMAGES[damage]
    change(shard)
    message = error_of(shard.parent, batches=3000)
    assert message.startswith(f"{shard}: ") and expected in message
    assert error_of(shard) == message


def test_what_gzip_allows_is_read(tmp_path):
    write_shards(tmp_path)
    expected = read(load(tmp_path))
    shard = tmp_path / "c4-train.1.json.gz"
    lines = gzip.decompress(shard.read_bytes()).splitlines(keepends=True)
    members = [b"".join(lines[:30]), b"", b"".join(lines[30:]), b""]
    shard.write_bytes(b"".join(map(gzip.compress, members)) + b"\0" * 512)
    assert read(load(tmp_path)) == expected


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_errors_of_the_disk_are_reported_as_such(shard, monkeypatch, code):
    loaded = load(shard.parent)
    batches = iter(loaded.train)
    fail_to_read(monkeypatch, shard, code)
    expected = f"{shard}: cannot be read ({os.strerror(code)})"
    assert error_of(shard.parent) == expected
    if "train" in shard.name:  # The same while training.
        with pytest.raises(ValueError) as raised:
            for _ in range(3000):
                next(batches)
        assert str(raised.value) == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json.gz"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "cut', "not JSON"),
        ("\0\0\0\0", "not JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"text": ' + "[" * 100_000, "nested too deep"),
        ('{"text": null}', '"text" is null, not a string'),
        ('{"text": 5}', '"text" is a number, not a string'),
        ('{"text": ["a", "b"]}', '"text" is a list, not a string'),
        ('{"text": {"en": "a"}}', '"text" is an object, not a string'),
        ('{"body": "a", "url": "b"}', 'no "text" among body, url'),
        ("{}", 'no "text" among no keys'),
        ('"a string"', 'a string, so no "text"'),
        ("[1, 2]", 'a list, so no "text"'),
        ("1" * 5000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, suffix, line, expected):
    path = tmp_path / f"a{suffix}"
    content = (lines_of(map(text_of, range(60))) + line + "\n").encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    message = error_of(path)
    assert message.startswith(f"{path}: line 61: {expected}") and len(message) < 400


def test_a_line_that_does_not_fit_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(data_shards, "_LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.jsonl"
    just_right = json.dumps({"text": "x" * ((1 << 20) - 13)}) + "\n"
    assert len(just_right) == 1 << 20
    path.write_text(lines_of(map(text_of, range(60))) + just_right)
    load(path)
    append(path, just_right.replace("x", "xx", 1).encode())
    assert f"{path}: line 62: longer than 1 MiB" in error_of(path, batches=30_000)


@pytest.mark.parametrize("name", ["train", "val"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: path.write_bytes(b""), "empty"),
        (cut, "damaged"),
        (lambda path: cut(path, 0.999), "damaged"),
        (lambda path: overwrite(path, 100, NOISE[:50]), "damaged"),
        (lambda path: append(path, b"noise"), "damaged"),
        (lambda path: append(path, lzma.compress(NOISE)[:99]), "damaged"),
        (lambda path: append(path, b"?" + lzma.compress(NOISE)), "damaged"),
        (lambda path: path.write_bytes(lzma.compress(b"")), "empty"),
        (lambda path: path.write_bytes(lzma.compress(b"abc")), "3 bytes are not uint16"),
        (lambda path: path.write_bytes(LFS), "a Git LFS pointer"),
    ],
)
def test_damaged_packed_token_files(tmp_path, name, change, expected):
    write_token_files(tmp_path)
    path = tmp_path / f"{name}.bin.xz"
    path.write_bytes(lzma.compress((tmp_path / f"{name}.bin").read_bytes()))
    (tmp_path / f"{name}.bin").unlink()
    load(tmp_path)
    change(path)
    message = error_of(tmp_path)
    assert message.startswith(f"{path}: ") and expected in message


def test_what_xz_allows_is_read(tmp_path):
    write_token_files(tmp_path)
    expected = load(tmp_path).digest
    content = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").unlink()
    streams = [lzma.compress(part) for part in (content[:1001], b"", content[1001:])]
    (tmp_path / "train.bin.xz").write_bytes(b"\0\0\0\0".join(streams) + b"\0" * 8)
    assert load(tmp_path).digest == expected


@pytest.mark.parametrize("format", ["json.gz", "jsonl", "parquet"])
@pytest.mark.parametrize("split", ["train-0", "train-1", "validation-0"])
def test_damaged_files_of_the_hub(tmp_path, format, split):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    path = tmp_path / f"{split}.{format}"
    for name in ("train-0", "train-1", "train-2", "validation-0"):
        file, texts = tmp_path / f"{name}.{format}", [text_of(i) for i in range(60)]
        if format == "parquet":
            datasets.Dataset.from_dict({"text": texts}).to_parquet(file)
        else:
            write_shard(file, texts)
    whole = path.read_bytes()
    load(f"hf:{tmp_path}")
    changes = {
        "empty (0 bytes)": lambda: path.write_bytes(b""),
        "cannot be read": lambda: cut(path),
    }
    if format == "json.gz":
        changes["a gzip file of nothing"] = lambda: path.write_bytes(gzip.compress(b""))
        changes["Not a gzipped file"] = lambda: append(path, b"noise")
    if format != "parquet":
        if split != "train-0":  # The first file says which columns there are.
            changes["column names don't match"] = lambda: write_shard_of(path, {"body": "a"})
        changes['"text" is null'] = lambda: write_shard_of(path, {"text": None, "url": "u"})
    for expected, change in changes.items():
        path.write_bytes(whole)
        change()
        message = error_of(f"hf:{tmp_path}", batches=1000)
        where = f"hf:{tmp_path}: " if "null" in expected else f"{path}: "
        assert message.startswith(where) and expected in message, (expected, message)


def write_shard_of(path, row):
    """Writes good rows and a bad one."""
    content = (lines_of(map(text_of, range(60))) + json.dumps(row) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_rows_of_the_hub_without_a_string(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "train.jsonl"
    write_shard_of(path, {"text": None, "url": "u"})
    message = error_of(f"hf:{tmp_path}")
    assert f'hf:{tmp_path}: row 61 of train: "text" is null, not a string' in message
    path.write_text(json.dumps({"body": "a"}) + "\n")
    assert 'no column "text" among body' in error_of(f"hf:{tmp_path}")
    path.write_text(json.dumps({"text": 5}) + "\n")
    assert 'row 1 of train: "text" is a number, not a string' in error_of(f"hf:{tmp_path}")


def test_files_that_the_hub_code_would_leave_out(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "more").mkdir(parents=True)
    other.mkdir()
    write_shard(folder / "train-0.jsonl", map(text_of, range(60)))
    write_shard(folder / "more/train-1.jsonl", map(text_of, range(60)))
    write_shard(other / "train-2.jsonl", map(text_of, range(60)))
    before = load(f"hf:{folder}")
    assert f"hf:{folder}, streamed, bytes" == before.name
    (folder / "README.md").write_text("# About\n")
    assert load(f"hf:{folder}").digest == before.digest

    (folder / "linked").symlink_to(other)
    assert f"`datasets` does not enter the linked folder {folder}/linked" in error_of(
        f"hf:{folder}"
    )
    (folder / "linked").unlink()
    (folder / "train-3.jsonl").symlink_to("gone")
    assert "train-3.jsonl: a link to gone" in error_of(f"hf:{folder}")
    (folder / "train-3.jsonl").unlink()
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(folder / "train-4.parquet")
    assert "but 1 of its data files, which `datasets` leaves out" in load(f"hf:{folder}").name
    with monkeypatch.context() as patch:
        fail_to_read(patch, folder / "more", errno.EACCES)
        assert f"{folder}/more: cannot be read (Permission denied)" in error_of(f"hf:{folder}")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(other)
    assert "written by `save_to_disk`" in error_of(f"hf:{other}")


@pytest.mark.parametrize("path", ["hf:", "hf: ", "hf::en", "hf:a\0b", "hf:" + "x" * 300, "hf:-"])
def test_names_that_the_hub_cannot_have(path):
    pytest.importorskip("datasets")
    assert error_of(path).startswith(path.replace("\0", r"\x00") + ": no ")
