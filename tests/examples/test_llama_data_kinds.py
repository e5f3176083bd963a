"""Tests of files that are not what their suffix says."""

import gzip
import io
import json
import lzma
import random
import zipfile

import pytest
from llama_sources import error_of, lines_of, load, read, text_of, write_shard

from examples.kit.data import stream as data_stream

PROSE = "Some words of good text, as many as are needed. " * 200
NOISE = random.Random(0).randbytes(100_000)
WITHOUT_ZEROS = bytes(random.Random(0).choices(range(1, 256), k=100_000))


def zipped():
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", PROSE)
    return archive.getvalue()


NO_TEXT = {
    "gzip": (gzip.compress(PROSE.encode(), mtime=0), "a gzip file; unpack it"),
    "xz": (lzma.compress(PROSE.encode()), "an xz file; unpack it"),
    "zip": (zipped(), "a zip archive; unpack it"),
    "PDF": (b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n" * 50, "a PDF"),
    "Parquet": (b"PAR1" + PROSE.encode() + b"PAR1", "a Parquet file"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    "UTF-16": (PROSE.encode("utf-16"), "UTF-16; convert it to UTF-8"),
    "UTF-16 without a mark": (PROSE.encode("utf-16-le"), "line 1: not a text file"),
    "UTF-32": (PROSE.encode("utf-32"), "UTF-16; convert it to UTF-8"),
    "Chinese in UTF-16": ("中文语料的读取".encode("utf-16-be") * 200, "line 1: not a text file"),
    "Latin-1": (("Größe, Länge und Höhe\n" * 99).encode("latin-1"), "line 1: not a text file"),
    "noise": (NOISE, "not a text file"),
    "noise after text": (b"good text here \n" * 700 + NOISE, "not a text file"),
    "noise without zeros": (b"good text\n" * 900 + WITHOUT_ZEROS, "line 901: not a text file"),
    "a little noise in much text": (
        b"good text\n" * 100_000 + WITHOUT_ZEROS[:4000] + b"good text\n" * 100_000,
        "not a text file, or a damaged one",
    ),
    "a hole": (b"good text\n" * 9000 + b"\0" * 4096 + b"good text\n" * 9000, "line 9001: not a"),
    "records": (lines_of(["a", "b"]).encode(), "JSON records, not prose"),
    "records of other keys": (b'{"content": "a"}\n{"content": "b"}\n', "JSON records, not prose"),
    "records with spaces": (b'\n {"a": 1}\r\n\r\n {"a": 2}\r\n', "JSON records, not prose"),
    "records after a mark": (b"\xef\xbb\xbf" + lines_of("ab").encode(), "JSON records, not prose"),
    "one record": (b'{"text": "a", "id": 3}', "JSON records, not prose"),
    "an array of records": (json.dumps([{"text": "a"}] * 9, indent=1).encode(), "JSON records"),
}


@pytest.mark.parametrize("suffix", [".txt", ".json"])
@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_text_is_refused(tmp_path, kind, suffix):
    content, expected = NO_TEXT[kind]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    message = error_of(path)
    assert message.startswith(f"{path}: ") and expected in message
    if suffix == ".txt":
        (tmp_path / "b.txt").write_text(PROSE)
        assert error_of(tmp_path) == message


@pytest.mark.parametrize(
    "content",
    [
        PROSE,
        "\ufeff" + PROSE,
        "<!DOCTYPE html>\n<html><body>" + PROSE,
        '{"a": 1}\n' + PROSE,
        '{"text": 1}\n' + PROSE,
        "{}\n[]\n" + PROSE,
        "[1, 2]\n" + PROSE,
        '{"a": 1}\n{"b": 2}\n' + PROSE,
        "[" * 100_000 + PROSE,
        "数据不会丢失。" * 3000,
        "\ufffd" * 3000,
        "\x0c\x1b[1m" + PROSE,
    ],
)
def test_what_is_text_is_read_as_it_is(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    loaded = load(tmp_path / "a.txt")
    assert "replaced" not in loaded.name
    cut = len(content) - round(0.05 * len(content))
    targets = [i for batch in loaded.valid() for row in batch["targets"] for i in row.tolist()]
    assert [i for i in targets if i >= 0] == [*content[cut:].encode()[1:], 256]


def test_a_few_bytes_outside_utf8_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.c").write_bytes(b"/* Andr\xe9, Ren\xe9 */ int x;\n" + PROSE.encode())
    (tmp_path / "b.c").write_bytes(b"/* \xe9 */ int y;\n")
    assert "2 files, 0.0 MB, 3 bytes outside UTF-8 replaced" in load(tmp_path).name


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_are_documents(tmp_path, suffix):
    write_shard(tmp_path / f"a{suffix}", map(text_of, range(300)))
    write_shard(tmp_path / "a.json.gz", map(text_of, range(300)))
    loaded, expected = load(tmp_path / f"a{suffix}"), load(tmp_path / "a.json.gz")
    assert read(loaded) == read(expected)
    assert "1 file of JSON lines" in loaded.name and "url" not in " ".join(read(loaded))


NO_LINES = {
    "Parquet": (b"PAR1" + NOISE[:99], "line 1: a Parquet file"),
    "zip": (zipped(), "line 1: a zip archive"),
    "gzip": (gzip.compress(lines_of(["a"] * 9).encode(), mtime=0), "line 1: a gzip file"),
    "UTF-16": (lines_of(["a"] * 9).encode("utf-16"), "line 1: UTF-16"),
    "prose": (PROSE.encode(), "line 1: not JSON"),
    "an array of lines": (json.dumps([{"text": "a"}] * 9, indent=1).encode(), "line 1: not JSON"),
    "an array": (json.dumps([{"text": "a"}] * 9).encode(), 'line 1: a list, so no "text"'),
    "Latin-1": (b'{"text": "caf\xe9"}\n', "line 1: not JSON"),
    "noise": (NOISE, "line 1: not JSON"),
    "nothing": (b"", "empty (0 bytes)"),
    "empty lines": (b"\n\n", "no documents"),
}


@pytest.mark.parametrize("kind", NO_LINES)
def test_what_is_no_json_lines_is_refused(tmp_path, kind):
    content, expected = NO_LINES[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    message = error_of(path)
    assert message.startswith(f"{path}: ") and expected in message


def test_a_first_document_longer_than_the_search_for_held_out_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(data_stream, "_SCAN_CHARACTERS", 20_000)
    long, short = "long " * 5000, [text_of(i) for i in range(60)]
    write_shard(tmp_path / "short.json.gz", short)
    write_shard(tmp_path / "long.json.gz", [long, long + "2", *short])
    loaded = load(tmp_path / "long.json.gz")
    train, valid = read(loaded, 1200)
    assert "long" in train and "long" not in valid
    assert valid == read(load(tmp_path / "short.json.gz"))[1]  # The choice is as without it.

    write_shard(tmp_path / "long.json.gz", [long, long + "2"])
    message = error_of(tmp_path / "long.json.gz")
    assert "no document under 20,000 characters, so none can be held out" in message


def test_a_validation_split_without_documents_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["some words"] * 99}).to_parquet(tmp_path / "train.parquet")
    datasets.Dataset.from_dict({"text": ["", " "]}).to_parquet(tmp_path / "validation.parquet")
    assert "no documents in its validation split" in error_of(f"hf:{tmp_path}")
