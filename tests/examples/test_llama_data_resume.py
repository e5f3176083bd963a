"""Tests that a place in the data is used with that data alone."""

import itertools
import json

import numpy as np
import pytest
from llama_sources import load, text_of, write_shard, write_text, write_tokens

from examples.kit.data import load as data
from examples.kit.data import stream as data_stream


def write_shards(folder):
    for s in range(3):
        write_shard(folder / f"c4-train.{s}.json.gz", map(text_of, range(100 * s, 100 * s + 60)))
    write_shard(folder / "c4-validation.json.gz", map(text_of, range(1000, 1010)))


WRITERS = {"text": write_text, "tokens": write_tokens, "shards": write_shards, "hub": write_shards}
each_packing = pytest.mark.parametrize("packing", ["concat", "document"])


@pytest.fixture(params=WRITERS)
def source(request, tmp_path, monkeypatch):
    """Returns a folder and what `load` takes for it."""
    if request.param == "hub":
        pytest.importorskip("datasets")
    monkeypatch.setattr(data_stream, "WINDOW", 10)
    WRITERS[request.param](tmp_path)
    return tmp_path, "hf:" * (request.param == "hub") + str(tmp_path)


def run(path, batches=60, after=30, **kwargs):
    """Returns a state after `batches` and the batches that follow."""
    iterator = iter(load(path, **kwargs).train)
    for _ in range(batches):
        next(iterator)
    return json.loads(json.dumps(iterator.get_state())), list(itertools.islice(iterator, after))


def go_on(path, state, **kwargs):
    iterator = iter(load(path, **kwargs).train)
    iterator.set_state(state)
    return list(itertools.islice(iterator, 30))


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        for name in ("inputs", "targets"):
            np.testing.assert_array_equal(one[name], other[name])


def change(folder, how):
    """Adds, removes, renames or changes a file that is read."""
    if (folder / "train.bin").exists():
        ids = np.fromfile(folder / "train.bin", "<u2")
        ids = {"added": np.append(ids, 5), "removed": ids[:-1], "renamed": ids[::-1]}.get(how, ids)
        ids[7] = 9 if how == "changed" else ids[7]
        ids.astype("<u2").tofile(folder / "train.bin")
        return
    last = sorted(folder.iterdir())[-2]  # Of shards the last for training.
    if how == "added":
        new = last.name.replace(".2.", ".3.") if ".2." in last.name else "new.md"
        (folder / new).write_bytes(last.read_bytes())
    if how == "removed":
        last.unlink()
    if how == "renamed":
        last.rename(last.with_name(last.name.replace("c4-train.2", "c4-train.7").replace("8", "x")))
    if how == "changed" and last.suffix == ".gz":
        # As many documents of as many letters; the file may well be as long.
        write_shard(last, (text_of(i).replace("w1 ", "w2 ") for i in range(200, 260)))
    elif how == "changed":
        last.write_text(last.read_text().replace("w1 ", "w2 "))


@each_packing
@pytest.mark.parametrize("how", ["added", "removed", "renamed", "changed"])
def test_a_state_is_refused_by_other_data(source, packing, how):
    folder, path = source
    state, _ = run(path, batches=3, after=0, packing=packing)
    before = load(path).digest
    change(folder, how)
    with pytest.raises(data.DataError) as raised:
        go_on(path, state, packing=packing)
    message = str(raised.value)
    assert message.startswith(f"{path}: ") or message.startswith(f"{path}, ")
    assert before in message and load(path).digest in message
    assert "not the data that the state was taken from" in message and message.isprintable()


@each_packing
def test_a_state_of_before_there_were_digests_is_accepted(source, packing):
    _, path = source
    state, expected = run(path, packing=packing)
    assert state.pop("data") == load(path).digest
    assert_same(go_on(path, state, packing=packing), expected)


def test_a_state_of_another_packing_or_kind_of_data_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "shards").mkdir()
    write_text(tmp_path / "text")
    write_shards(tmp_path / "shards")
    state, _ = run(tmp_path / "shards")
    with pytest.raises(data.DataError, match="data of another kind or packing"):
        go_on(tmp_path / "shards", state, packing="document")
    del state["data"]  # As the version before wrote it.
    with pytest.raises(data.DataError, match="data of another kind or packing"):
        go_on(tmp_path / "text", state)


def test_a_refused_state_leaves_the_iterator_where_it_is(tmp_path):
    write_shards(tmp_path)
    state, expected = run(tmp_path)
    iterator = iter(load(tmp_path).train)
    iterator.set_state(state)
    with pytest.raises(data.DataError):
        iterator.set_state(state | {"data": "0" * 32})
    assert_same(list(itertools.islice(iterator, 30)), expected)
