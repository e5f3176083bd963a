"""Tests of `Data.digest`: it identifies what was read, and nothing else moves it."""

import gzip
import json
import lzma
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from llama_sources import (
    error_of,
    load,
    text_of,
    write_shard,
    write_text,
    write_tokens,
    write_words,
)

from examples.kit.data import stream as data_stream

ROOT = Path(__file__).parents[2]


def digest(path, **kwargs):
    return load(path, **kwargs).digest


def write_shards(folder):
    for s in range(3):
        write_shard(folder / f"c4-train.{s}.json.gz", map(text_of, range(30 * s, 30 * s + 30)))
    write_shard(folder / "c4-validation.json.gz", map(text_of, range(1000, 1010)))


WRITERS = {"text": write_text, "tokens": write_tokens, "shards": write_shards, "hub": write_shards}


@pytest.fixture(params=WRITERS)
def source(request, tmp_path):
    """Yields the folder and what `load` takes for it."""
    if request.param == "hub":
        pytest.importorskip("datasets")
    (tmp_path / "source").mkdir()
    WRITERS[request.param](tmp_path / "source")
    return tmp_path / "source", "hf:" * (request.param == "hub") + str(tmp_path / "source")


def test_only_the_data_moves_it(source, tmp_path):
    folder, path = source
    expected = digest(path)
    assert len(expected) == 32 and int(expected, 16)
    for other in (
        dict(seed=3),
        dict(seq_len=8, batch_size=2),
        dict(packing="document"),
        dict(process_index=1, process_count=3),
    ):
        assert digest(path, **other) == expected, other
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    folder.rename(tmp_path / "elsewhere")
    assert digest(path.replace("/source", "/elsewhere")) == expected


def test_it_does_not_depend_on_threads_or_cpu(tmp_path):
    write_tokens(tmp_path)
    code = (
        "import sys\nfrom examples.kit.data import load as data\n"
        "print(data.load(sys.argv[1], seq_len=16, batch_size=4, "
        "process_index=0, process_count=1).digest)"
    )
    for environment in (
        {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem", "PYTHONHASHSEED": "1"},
        {"OPENBLAS_NUM_THREADS": "2", "OPENBLAS_CORETYPE": "Haswell", "PYTHONHASHSEED": "2"},
    ):
        command = [sys.executable, "-c", code, str(tmp_path)]
        said = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
        )
        assert said.stdout.strip() == digest(tmp_path), said.stderr


def test_another_text_another_file_or_one_less_move_it(tmp_path):
    write_text(tmp_path)
    found = {digest(tmp_path)}
    (tmp_path / "7.md").write_text(text_of(7).replace("w3", "w4"))
    found.add(digest(tmp_path))
    (tmp_path / "40.md").write_text(text_of(40))
    found.add(digest(tmp_path))
    (tmp_path / "0.md").unlink()
    found.add(digest(tmp_path))
    (tmp_path / "1.md").rename(tmp_path / "x.md")  # Another order, and maybe another split.
    found.add(digest(tmp_path))
    assert len(found) == 5


def test_another_token_or_split_moves_it(tmp_path):
    write_tokens(tmp_path)
    found = {digest(tmp_path)}
    train = np.fromfile(tmp_path / "train.bin", "<u2")
    content = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin.xz").write_bytes(lzma.compress(content))
    (tmp_path / "train.bin").unlink()
    assert {digest(tmp_path)} == found  # Packing the file changes nothing that is read.
    (tmp_path / "train.bin.xz").unlink()
    train[2000] ^= 1
    train.tofile(tmp_path / "train.bin")
    found.add(digest(tmp_path))
    np.append(train, 5).astype("<u2").tofile(tmp_path / "train.bin")
    found.add(digest(tmp_path))
    np.full(300, 5, "<u2").tofile(tmp_path / "val.bin")
    found.add(digest(tmp_path))
    (tmp_path / "val.bin").unlink()
    found.add(digest(tmp_path))
    assert len(found) == 5


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_other_shards_move_it(tmp_path, prefix):
    if prefix:
        pytest.importorskip("datasets")
    write_shards(tmp_path)
    path = f"{prefix}{tmp_path}"
    found = {digest(path)}
    shard = tmp_path / "c4-train.2.json.gz"
    write_shard(shard, map(text_of, range(60, 91)))  # Replaced by a longer one.
    found.add(digest(path))
    write_shard(tmp_path / "c4-train.3.json.gz", map(text_of, range(200, 230)))
    found.add(digest(path))
    (tmp_path / "c4-train.3.json.gz").rename(tmp_path / "c4-train.4.json.gz")
    found.add(digest(path))
    shard.unlink()
    found.add(digest(path))
    write_shard(tmp_path / "c4-validation.json.gz", map(text_of, range(2000, 2010)))
    found.add(digest(path))
    (tmp_path / "c4-validation.json.gz").unlink()
    found.add(digest(path))
    assert len(found) == 7


@pytest.mark.parametrize("write", [write_text, write_shards])
def test_another_tokenizer_moves_it_and_another_layout_of_its_file_does_not(tmp_path, write):
    write(tmp_path)
    found = {digest(tmp_path)}
    path = write_words(tmp_path / "tokenizer.json")
    found.add(digest(tmp_path))
    parts = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(list(parts.items()))), indent=7))
    assert digest(tmp_path) in found
    write_words(path, w2=3, w3=2)  # The same ids, that mean other words.
    found.add(digest(tmp_path))
    assert len(found) == 3


def test_a_changed_byte_deep_in_a_shard_moves_it(tmp_path, monkeypatch):
    """Beyond what is read at the beginning: by the checksum at the end of the file."""
    monkeypatch.setattr(data_stream, "_SAMPLE_TOKENS", 500)
    write_shards(tmp_path)
    shard, before = tmp_path / "c4-train.2.json.gz", digest(tmp_path)
    content = gzip.decompress(shard.read_bytes())
    packed = gzip.compress(content, 0)
    shard.write_bytes(packed)
    stored = digest(tmp_path)
    shard.write_bytes(gzip.compress(content, 0, mtime=1))
    assert digest(tmp_path) == stored  # The time of packing is no content.
    shard.write_bytes(gzip.compress(content.replace(b"d70w9 ", b"d70w8 "), 0))
    assert shard.stat().st_size == len(packed)
    assert len({before, stored, digest(tmp_path)}) == 3


def test_a_data_set_of_the_hub_is_known_by_names_and_sizes(monkeypatch):
    """Whatever its commit, which a change of the README moves too. No network is needed."""
    datasets, fsspec = pytest.importorskip("datasets"), pytest.importorskip("fsspec")
    disk = fsspec.filesystem("memory")

    def publish(commit, **files):
        folder = f"memory://a/b@{commit * 40}/en"
        for name, content in files.items():
            disk.pipe(f"{folder}/{name}.jsonl", content)

        class Builder:
            config = types.SimpleNamespace(
                data_files={"train": [f"{folder}/{name}.jsonl" for name in files]}
            )

            def as_streaming_dataset(self):
                rows = {"text": [text_of(i) for i in range(60)]}
                return {"train": datasets.Dataset.from_dict(rows).to_iterable_dataset()}

        monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config: Builder())

    found = []
    for files in (dict(x=b"12"), dict(x=b"123"), dict(x=b"12", y=b"1"), dict(z=b"12")):
        publish("0", **files)
        found.append(digest("hf:a/b"))
        publish("f", **files)
        assert digest("hf:a/b") == found[-1]
    assert len(set(found)) == 4
    publish("0", x=b"12", y=b"")
    assert "/en/y.jsonl: empty (0 bytes)" in error_of("hf:a/b")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("text", "eeb64a1f3768b28fa6745e22e371dadc"),
        ("tokens", "8b75ed9b03b472fb773a8d722df07794"),
        ("lines", "f52e60b483879fcfb405908b9447bde7"),
    ],
)
def test_ids_order_and_split_are_those_of_earlier_versions(tmp_path, kind, expected):
    """A run that goes on with a newer version compares digests of the older one."""
    path = tmp_path
    if kind == "text":
        write_text(tmp_path)
    if kind == "tokens":
        write_words(tmp_path / "tokenizer.json")
        (np.arange(9000) * 7919 % 300).astype("<u2").tofile(tmp_path / "train.bin")
    if kind == "lines":
        path = tmp_path / "a.jsonl"
        write_shard(path, map(text_of, range(300)))
    assert digest(path) == expected
