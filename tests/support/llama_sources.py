"""Data to load, and what stands in its way, for the tests of the Llama example's data."""

import builtins
import functools
import gzip
import io
import itertools
import json
import os

import numpy as np
import pytest

from examples.kit.data import load as data

SEQ_LEN = 16
BATCH_SIZE = 4


def load(path=None, **kwargs):
    defaults = dict(seq_len=SEQ_LEN, batch_size=BATCH_SIZE, process_index=0, process_count=1)
    return data.load(None if path is None else str(path), **(defaults | kwargs))


def text_of(i, words=40):
    """Returns document `i`: words that say which document and which place they come from."""
    return " ".join(f"d{i}w{j}" for j in range(words))


def write_text(folder):
    """Writes 40 documents, a file each."""
    for i in range(40):
        (folder / f"{i}.md").write_text(text_of(i))


def lines_of(texts):
    return "".join(json.dumps({"text": text, "url": "https://a.b"}) + "\n" for text in texts)


def write_shard(path, texts):
    """Writes JSON lines, gzipped if the name says so."""
    content = lines_of(texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_words(path, size=300, unk="<unk>", **ids):
    """Writes a tokenizer.json that knows the words w2, w3, ... by their number."""
    path.write_text(_words(size, unk, tuple(ids.items())))
    return path


@functools.cache
def _words(size, unk, ids):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, size)} | dict(ids)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def write_tokens(folder, size=300, dtype="<u2"):
    """Writes train.bin and val.bin of 3,000 and 300 ids, and their tokenizer.json."""
    write_words(folder / "tokenizer.json", size)
    rng = np.random.default_rng(0)
    for name, count in (("train", 3000), ("val", 300)):
        ids = rng.integers(2, size, count)
        ids[49::50] = 0  # The end of a document.
        ids.astype(dtype).tofile(folder / f"{name}.bin")


def read(loaded, batches=200):
    """Returns the texts of training batches and of all evaluation batches."""
    sides = itertools.islice(loaded.train, batches), loaded.valid()
    return [
        " ".join(loaded.decode(row.tolist()) for batch in side for row in batch["inputs"])
        for side in sides
    ]


def error_of(*args, batches=200, **kwargs):
    """Returns the one line that loading and reading ends with."""
    with pytest.raises(data.DataError) as raised:
        for _ in itertools.islice(load(*args, **kwargs).train, batches):
            pass
    message = str(raised.value)
    assert message.isprintable()
    return message


def fail_to_read(monkeypatch, path, code):
    """Lets every attempt to open a file or to list a folder fail, whoever runs the test."""

    def failing(function):
        def fail(place, *args, **kwargs):
            if isinstance(place, str | os.PathLike) and os.fspath(place) == str(path):
                raise OSError(code, os.strerror(code), str(path))
            return function(place, *args, **kwargs)

        return fail

    for module, name in ((builtins, "open"), (io, "open"), (os, "scandir")):
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
