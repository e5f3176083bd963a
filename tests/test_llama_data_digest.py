"""Tests of `Data.digest`: it identifies what was read, and nothing else moves it."""

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.llama import data

ROOT = Path(__file__).parents[1]
VOCABULARY = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, 300)}


def digest(path, **kwargs):
    defaults = dict(seq_len=16, batch_size=4, process_index=0, process_count=1)
    return data.load(str(path), **(defaults | kwargs)).digest


def text_of(i):
    return " ".join(f"d{i}w{j}" for j in range(40))


def write_tokenizer(path, vocabulary=VOCABULARY):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


def write_shard(path, texts):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def write_text(folder):
    for i in range(40):
        (folder / f"{i}.md").write_text(text_of(i))


def write_tokens(folder):
    write_tokenizer(folder / "tokenizer.json")
    rng = np.random.default_rng(0)
    for name, count in (("train", 3000), ("val", 300)):
        ids = rng.integers(2, 300, count).astype("<u2")
        ids[49::50] = 0  # The end of a document.
        ids.tofile(folder / f"{name}.bin")


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
        "import sys\nfrom examples.llama import data\n"
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
    path = write_tokenizer(tmp_path / "tokenizer.json")
    found.add(digest(tmp_path))
    parts = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(dict(reversed(list(parts.items()))), indent=7))
    assert digest(tmp_path) in found
    write_tokenizer(path, VOCABULARY | {"w2": 3, "w3": 2})  # The same ids, that mean other words.
    found.add(digest(tmp_path))
    assert len(found) == 3
