"""Tests of the data pipeline of the Llama example."""

import ast
import gzip
import inspect
import itertools
import json
import lzma
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from llama_sources import BATCH_SIZE, SEQ_LEN, error_of, load, text_of, write_shard

from examples.kit.data import load as data
from examples.kit.data import stream as data_stream
from examples.kit.data import text as data_text
from examples.kit.data.text import hold_out, split_docstrings

CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
SMALL = ["text", "tokens", "shards", "shards_held_out", "hub_json", "hub_parquet"]
ALL = ["library", *SMALL]


@pytest.fixture
def shards(tmp_path):
    """Four training shards of 30 documents and one for validation."""
    for s in range(4):
        texts = [text_of(100 * s + i) for i in range(30)]
        write_shard(tmp_path / f"c4-train.0000{s}-of-00004.json.gz", texts)
    valid = tmp_path / "c4-validation.00000-of-00001.json.gz"
    write_shard(valid, [text_of(1000 + i) for i in range(10)])
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path_factory):
    """Returns the path of a small tokenizer with an end-of-text token that is not id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text_of(i) for i in range(20)], trainer)
    tokenizer.enable_truncation(8)  # What a tokenizer.json may carry and must not matter.
    tokenizer.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_tokens(folder, tokenizer, documents=60):
    """Writes train.bin and val.bin of `documents` and 10 documents, ended by id 1."""
    rng = np.random.default_rng(0)
    for name, count in (("train.bin", documents), ("val.bin", 10)):
        texts = [rng.integers(2, 280, rng.integers(1, 60)) for _ in range(count)]
        flat = np.concatenate([np.append(text, 1) for text in texts]).astype("<u2")
        flat.tofile(folder / name)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return folder


@pytest.fixture(params=SMALL)
def source(request, tmp_path, tokenizer, monkeypatch):
    """Each kind of source; all but the library are small enough for several epochs."""
    if request.param == "library":
        monkeypatch.setattr(data_text, "_MAX_LIBRARY_CHARACTERS", 1_000_000)
        return None
    if request.param == "text":
        for i in range(40):
            (tmp_path / f"{i}.md").write_text(text_of(i))
    if request.param == "tokens":
        write_tokens(tmp_path, tokenizer)
    if request.param.startswith("shards"):
        request.getfixturevalue("shards")
        if request.param == "shards_held_out":
            (tmp_path / "c4-validation.00000-of-00001.json.gz").unlink()
    if request.param == "hub_json":
        pytest.importorskip("datasets")
        write_shard(tmp_path / "train-00000-of-00002.json.gz", map(text_of, range(30)))
        write_shard(tmp_path / "train-00001-of-00002.json.gz", map(text_of, range(30, 60)))
        write_shard(tmp_path / "validation-00000-of-00001.json.gz", map(text_of, range(90, 95)))
    if request.param == "hub_parquet":
        datasets = pytest.importorskip("datasets")
        for s in range(2):
            rows = {"text": [text_of(i) for i in range(30 * s, 30 * s + 30)]}
            table = datasets.Dataset.from_dict(rows)
            table.to_parquet(tmp_path / f"train-0000{s}-of-00002.parquet")
    return f"hf:{tmp_path}" if request.param.startswith("hub") else str(tmp_path)


def words_of(loaded, batches):
    """Returns the words that are whole in any row, given text of `text_of`."""
    words = set()
    for batch in batches:
        for row in batch["targets"]:
            words |= set(loaded.decode(row[row >= 0].tolist()).split(" ")[1:-1])
    return words


def assert_same(left, right):
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("source", ALL, indirect=True)
@pytest.mark.parametrize("packing", ["concat", "document"])
def test_resumes_exactly(source, packing, monkeypatch):
    monkeypatch.setattr(data_stream, "WINDOW", 50)
    loaded = load(source, packing=packing)
    iterator = iter(loaded.train)
    # Several epochs and shuffle windows, but for the library, which has 60,000 rows an epoch.
    states, batches = [iterator.get_state()], []
    for batch in itertools.islice(iterator, 240):
        batches.append(batch)
        states.append(iterator.get_state())
    assert states[-1] == iterator.get_state()

    resumed = iter(load(source, packing=packing).train)
    for start in (0, 1, 7, 12, 13, 90, 201):
        resumed.set_state(json.loads(json.dumps(states[start])))
        assert json.loads(json.dumps(resumed.get_state())) == json.loads(json.dumps(states[start]))
        for expected in batches[start : start + 30]:
            assert_same(next(resumed), expected)


def test_going_back_with_the_same_iterator(source):
    iterator = iter(load(source).train)
    for _ in range(5):
        next(iterator)
    state = iterator.get_state()
    expected = [next(iterator) for _ in range(20)]
    iterator.set_state(state)
    for batch in expected:
        assert_same(next(iterator), batch)


@pytest.mark.parametrize("source", ALL, indirect=True)
@pytest.mark.parametrize("packing", ["concat", "document"])
def test_batches_have_the_promised_form(source, packing):
    loaded = load(source, packing=packing)
    train = list(itertools.islice(loaded.train, 5))
    valid = list(loaded.valid())
    for batch in train + valid:
        assert set(batch) == {"inputs", "targets"}
        for array in batch.values():
            assert array.shape == (BATCH_SIZE, SEQ_LEN) and array.dtype == np.int32
        assert batch["inputs"].min() >= 0 and batch["inputs"].max() < loaded.vocab_size
        assert batch["targets"].min() >= -1 and batch["targets"].max() < loaded.vocab_size
        inner = batch["targets"][:, :-1]
        np.testing.assert_array_equal(inner[inner >= 0], batch["inputs"][:, 1:][inner >= 0])
    assert all((batch["targets"] >= 0).any() for batch in train + valid)
    assert "\n" not in loaded.name
    # Above uniform by no more than what few counts of random ids can do.
    assert 0 < loaded.unigram_entropy < 1.05 * np.log(loaded.vocab_size)
    for again in loaded.valid():  # A second pass is the same.
        assert_same(again, valid.pop(0))


# Not of token files, whose held-out split is a file of its own.
@pytest.mark.parametrize("source", [name for name in SMALL if name != "tokens"], indirect=True)
def test_training_never_meets_the_held_out_split(source):
    loaded = load(source, seq_len=64)
    valid = words_of(loaded, loaded.valid())
    train = words_of(loaded, itertools.islice(loaded.train, 600))
    assert valid and train and not valid & train


@pytest.mark.parametrize("process_count", [2, 3])
def test_hosts_share_out_the_data(source, process_count, monkeypatch):
    monkeypatch.setattr(data_stream, "WINDOW", BATCH_SIZE)  # So that no window spans two epochs.
    hosts = [
        load(source, packing="document", process_index=i, process_count=process_count)
        for i in range(process_count)
    ]
    single = load(source, packing="document")
    valid = [list(host.valid()) for host in hosts]
    assert len({len(batches) for batches in valid}) == 1

    def rows(batches):
        real = [row for batch in batches for row in batch["targets"] if (row >= 0).any()]
        return sorted(map(tuple, real))

    assert sorted(row for batches in valid for row in rows(batches)) == rows(single.valid())
    # Less than an epoch of any host; all sources have at least 36 training documents.
    batches = 36 // (BATCH_SIZE * process_count)
    train = [set(rows(itertools.islice(host.train, batches))) for host in hosts]
    assert sum(map(len, train)) == len(set().union(*train)) == process_count * batches * BATCH_SIZE


def test_few_shards_are_shared_out_by_line(tmp_path):
    write_shard(tmp_path / "only.json.gz", map(text_of, range(60)))
    hosts = [load(tmp_path, process_index=i, process_count=2) for i in range(2)]
    first, second = (
        {word.split("w")[0] for word in words_of(host, itertools.islice(host.train, 600))}
        for host in hosts
    )
    assert len(first) + len(second) >= 58 and not first & second


def test_concat_visits_every_token_once_an_epoch(tmp_path, tokenizer):
    write_tokens(tmp_path, tokenizer)
    tokens = np.fromfile(tmp_path / "train.bin", "<u2")
    loaded = load(tmp_path, batch_size=1)
    epoch_length = -(-(len(tokens) - 1) // SEQ_LEN)
    epochs = [[], []]
    iterator = iter(loaded.train)
    for epoch in epochs:
        for batch in itertools.islice(iterator, epoch_length):
            target = batch["targets"][0]
            epoch.append(tuple(target[target >= 0].tolist()))
    windows = {tuple(tokens[1 + i : 1 + i + SEQ_LEN]) for i in range(0, len(tokens) - 1, SEQ_LEN)}
    assert set(epochs[0]) == set(epochs[1]) == windows
    assert epochs[0] != epochs[1]


def test_validation_has_every_token_of_val_bin_once(tmp_path, tokenizer):
    write_tokens(tmp_path, tokenizer)
    targets = np.concatenate([batch["targets"].ravel() for batch in load(tmp_path).valid()])
    tokens = np.fromfile(tmp_path / "val.bin", "<u2")
    np.testing.assert_array_equal(targets[targets >= 0], tokens[1:])


def test_document_packing_of_tokens(tmp_path, tokenizer):
    write_tokens(tmp_path, tokenizer)
    tokens = np.fromfile(tmp_path / "val.bin", "<u2").astype(np.int32)
    documents = np.split(tokens, np.flatnonzero(tokens == 1)[:-1] + 1)
    rows = [row for b in load(tmp_path, packing="document").valid() for row in b["targets"]]
    for row, document in zip(rows, documents, strict=False):
        expected = document[1 : 1 + SEQ_LEN]
        np.testing.assert_array_equal(row[: len(expected)], expected)
        assert (row[len(expected) :] == -1).all()
    assert len(documents) <= len(rows) and all((row == -1).all() for row in rows[len(documents) :])


def test_stream_joins_documents_without_loss(tmp_path, monkeypatch):
    """Within an epoch the rows put end to end are the documents, each closed by id 256."""
    monkeypatch.setattr(data_stream, "WINDOW", 20)
    texts = [text_of(i, words=i % 5 + 1) for i in range(200)]
    write_shard(tmp_path / "train.json.gz", texts)
    write_shard(tmp_path / "validation.json.gz", ["something else"])
    loaded = load(tmp_path, batch_size=1)
    ids = []
    for batch in itertools.islice(loaded.train, 100):
        ids += [batch["inputs"][0, 0], *batch["targets"][0]]
    text = "".join("\0" if i == 256 else chr(i) for i in ids)
    seen = text.split("\0")[:-1]
    assert len(seen) > 80 and len(set(seen)) == len(seen) and set(seen) <= set(texts)
    assert seen != sorted(seen, key=texts.index)


def test_seed_changes_the_order_alone(source):
    one, same, other = (load(source, seed=seed) for seed in (1, 1, 2))
    assert_same(next(iter(one.train)), next(iter(same.train)))
    assert (next(iter(one.train))["inputs"] != next(iter(other.train))["inputs"]).any()
    for left, right in zip(one.valid(), other.valid(), strict=True):
        assert_same(left, right)


def test_unigram_entropy_is_that_of_add_one_counts(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 2000)
    loaded = load(tmp_path / "a.txt")
    # Of 4,000 characters 200 are held out; ids: 3,800 and an end, 200 and an end.
    probability = np.array([1901, 1901, 2]) / (3801 + 257)
    share = np.array([99, 100, 1]) / 200
    assert loaded.unigram_entropy == pytest.approx(-share @ np.log(probability))


def test_standard_library_is_prose_and_code():
    loaded = load(seq_len=512, batch_size=64)
    assert loaded.vocab_size == 257
    text = "".join(
        loaded.decode(row.tolist())
        for b in itertools.islice(loaded.train, 8)
        for row in b["inputs"]
    )
    assert "    return " in text and "def " in text and " the " in text
    megabytes = float(loaded.name.split(" MB")[0].split()[-1])
    assert 5 < megabytes < 12.5
    assert 2.5 < loaded.unigram_entropy < 3.8
    assert load(seq_len=512, batch_size=64).name == loaded.name


def test_docstrings_are_cut_out_and_nothing_is_lost():
    source = '''"""Module
text."""
x = """
not a docstring
"""
y = 1
"""
after
"""
def f():
    r\'\'\'Of f.\'\'\'
    return "not \\""" + x
'''
    prose, code = split_docstrings(source)
    assert prose == "Module\ntext.\n\nafter\n\nOf f."
    assert (
        code
        == '''
x = """
not a docstring
"""
y = 1

def f():

    return "not \\""" + x
'''
    )

    for module in ("argparse", "heapq", "random", "textwrap"):
        source = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text(encoding="utf-8")
        prose, code = split_docstrings(source)
        assert len(prose) + len(code) > 0.8 * len(source)
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, nodes)]
        docstrings = [doc for node in nodes if (doc := ast.get_docstring(node))]
        # Those in single quotes stay in the code; escapes look different in the source.
        docstrings = [doc for doc in docstrings if f'"""{doc[:20]}' in source and "\\" not in doc]
        assert docstrings and all(inspect.cleandoc(doc) in prose for doc in docstrings)
        assert all(f"\n{line}\n" in code for line in source.splitlines() if line[:4] == "def ")


def test_hold_out_takes_whole_names_where_it_can():
    groups = {f"{i}.txt": [f"prose {i} " * 50, f"code {i} " * 50] for i in range(100)}
    train, valid = hold_out(groups)
    assert 0.02 < sum(map(len, valid)) / sum(map(len, train)) < 0.06
    assert sorted(train + valid) == sorted(text for texts in groups.values() for text in texts)
    for name, texts in groups.items():
        assert len(set(texts) & set(valid)) in (0, 2), name

    train, valid = hold_out({"a": ["x" * 100], "b": ["y" * 200]})
    assert (train, valid) == (["x" * 95, "y" * 190], ["x" * 5, "y" * 10])


def test_a_note_beside_a_large_text_is_not_all_that_is_held_out():
    train, valid = hold_out({"text": ["x" * 1000], "note": ["y" * 20]})
    assert (train, valid) == (["x" * 950, "y" * 19], ["x" * 50, "y"])
    train, valid = hold_out({"text": ["x" * 1000], "note": ["y" * 30]})  # more than half of 5 %
    assert (train, valid) == (["x" * 1000], ["y" * 30])


def test_bytes_and_back(tmp_path):
    (tmp_path / "a.txt").write_text(text_of(0))
    loaded = load(tmp_path)
    text = "naïve — 数 \ud800"
    assert loaded.decode([*loaded.encode(text), 256]) == text.replace("\ud800", "?")


def test_tokenizer_encodes_text_sources(shards, tokenizer):
    loaded = load(shards, tokenizer=str(tokenizer))
    assert loaded.vocab_size == 280 and "280 ids" in loaded.name
    text = "d1w2 d3w4 <|endoftext|> and more than eight tokens"
    ids = loaded.encode(text)
    assert 1 not in ids and loaded.decode([*ids, 1]) == text
    assert any((batch["targets"] == 1).any() for batch in loaded.valid())

    beside = shards / "tokenizer.json"
    beside.write_bytes(tokenizer.read_bytes())
    assert load(shards).vocab_size == 280


def test_packed_token_files_and_the_tokenizer_above(tmp_path, tokenizer):
    folder = tmp_path / "small"
    folder.mkdir()
    write_tokens(folder, tokenizer)
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    raw = next(iter(load(folder).train))
    (folder / "train.bin.xz").write_bytes(lzma.compress((folder / "train.bin").read_bytes()))
    (folder / "train.bin").unlink()
    assert_same(next(iter(load(folder).train)), raw)
    (folder / "val.bin").unlink()
    assert sum(1 for _ in load(folder).valid()) >= 1


def test_real_tokens():
    if not CORPUS.is_dir():
        pytest.skip("needs ../shared/corpus, token files of real text")
    loaded = load(CORPUS / "small", seq_len=256)
    assert loaded.vocab_size == 16384
    assert loaded.unigram_entropy == pytest.approx(7.3581, abs=1e-3)  # Its README says so.
    text = loaded.decode(next(iter(loaded.train))["inputs"][0].tolist())
    assert len(text) > 500 and " the " in text


def test_errors_of_paths(tmp_path):
    assert "nowhere: no such file or folder" in error_of(tmp_path / "nowhere")
    assert "no train.bin" in error_of(tmp_path)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0")
    assert "no train.bin" in error_of(tmp_path)
    assert "not a text file" in error_of(tmp_path / "a.png")
    (tmp_path / "b.txt").write_text("")
    assert "empty" in error_of(tmp_path)
    assert "empty" in error_of(tmp_path / "b.txt")


def test_errors_of_short_texts(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("x" * 60)
    assert "58 training tokens" in error_of(file) and "68 = 4 rows * (16 + 1)" in error_of(file)
    assert "1 training documents" in error_of(file, packing="document")
    write_shard(tmp_path / "a.json.gz", ["x" * 20, "y" * 20])
    assert "21 training tokens" in error_of(tmp_path)
    write_shard(tmp_path / "a.json.gz", ["x" * 2000])
    assert "no documents to train on" in error_of(tmp_path)
    write_shard(tmp_path / "a.json.gz", [])
    assert "no documents to train on" in error_of(tmp_path)
    write_shard(tmp_path / "a.json.gz", ["x" * 2000, "y" * 2000])
    with pytest.raises(data.DataError, match="use fewer hosts"):
        for i in range(2):  # One of the two lines is held out.
            next(iter(load(tmp_path, process_index=i, process_count=2).train))


def test_errors_of_packing(tmp_path):
    assert "'dense'" in error_of(packing="dense")


def test_errors_of_token_files(tmp_path, tokenizer):
    write_tokens(tmp_path, tokenizer)
    (tmp_path / "tokenizer.json").unlink()
    assert "no tokenizer.json" in error_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "not a tokenizer.json" in error_of(tmp_path)
    assert "no such tokenizer" in error_of(tmp_path, tokenizer=str(tmp_path / "none.json"))
    parts = json.loads(tokenizer.read_text())
    parts["added_tokens"] = []
    parts["model"]["vocab"]["renamed"] = parts["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    assert "no end-of-text token" in error_of(tmp_path)

    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    np.array([5, 280, 7], "<u2").tofile(tmp_path / "val.bin")
    assert "val.bin: holds id 280" in error_of(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"")
    assert "val.bin: empty" in error_of(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"abc")
    assert "3 bytes are not uint16" in error_of(tmp_path)
    (tmp_path / "train.bin").unlink()
    (tmp_path / "train.bin.xz").write_bytes(b"abc")
    assert "train.bin.xz: damaged" in error_of(tmp_path)


@pytest.mark.parametrize("line", ["{not json", '{"body": "no text"}', '"a string"'])
def test_errors_of_lines_in_shards(tmp_path, line):
    shard = tmp_path / "a.json.gz"
    with gzip.open(shard, "wt") as file:
        file.writelines(json.dumps({"text": text_of(i)}) + "\n" for i in range(30))
        file.write(line + "\n")
    assert "a.json.gz: line 31" in error_of(tmp_path)


def test_errors_of_damaged_shards_name_the_line(shards):
    shard = shards / "c4-train.00002-of-00004.json.gz"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    message = error_of(shards)
    assert "00002-of-00004.json.gz: line " in message and "damaged gzip" in message
    shard.write_bytes(b"no gzip at all")
    assert "00002-of-00004.json.gz: line 1: damaged gzip" in error_of(shards)


def test_damage_met_while_training_is_reported_alike(shards):
    loaded = load(shards)
    (shards / "c4-train.00001-of-00004.json.gz").write_bytes(b"no gzip at all")
    with pytest.raises(data.DataError, match=r"00001-of-00004\.json\.gz: line 1"):
        for _ in itertools.islice(loaded.train, 1000):
            pass


def test_only_validation_shards(shards):
    for shard in shards.glob("*train*"):
        shard.unlink()
    assert "only validation shards" in error_of(shards)


def test_errors_of_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    assert "no such data set" in error_of(f"hf:{tmp_path}/nothing")
    write_shard(tmp_path / "test.json.gz", ["text"] * 100)
    assert 'no split "train"' in error_of(f"hf:{tmp_path}")
    with gzip.open(tmp_path / "train.json.gz", "wt") as file:
        file.write('{"body": "no text"}\n')
    assert 'no column "text" among body' in error_of(f"hf:{tmp_path}")
    (tmp_path / "train.json.gz").write_bytes(b"no gzip at all")
    assert str(tmp_path) in error_of(f"hf:{tmp_path}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "magma_optax[hf]" in error_of(f"hf:{tmp_path}")
