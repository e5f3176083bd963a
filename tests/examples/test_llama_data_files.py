"""Tests of how the Llama example finds its data: nothing in a folder is left out without a word."""

import errno
import os
import socket

import pytest
from llama_sources import (
    error_of,
    fail_to_read,
    load,
    read,
    text_of,
    write_shard,
    write_tokens,
    write_words,
)


def write_text(path, i=0):
    path.write_text(text_of(i, words=300))


def write_json(path, i=0):
    write_shard(path, (text_of(100 * i + j) for j in range(50)))


# A file that is read, how to write it, and what its data's name says of two of them.
KINDS = [("a.txt", write_text, "2 files"), ("a.json.gz", write_json, "2 shards")]
each_kind = pytest.mark.parametrize(("name", "write", "two"), KINDS)


@each_kind
def test_a_linked_folder_is_read_like_any_other(tmp_path, name, write, two):
    plain, linked, other = (tmp_path / part for part in ("plain", "linked", "other"))
    for folder in (plain, linked, other):
        folder.mkdir()
    for folder in (plain, linked):
        write(folder / name)
    (plain / "more").mkdir()
    write(plain / "more" / name, 1)
    write(other / name, 1)
    (linked / "more").symlink_to(other)
    assert two in load(linked).name
    assert load(linked).digest == load(plain).digest
    assert read(load(linked)) == read(load(plain))


@each_kind
def test_links_in_a_circle_are_read_once(tmp_path, name, write, two):
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "deep").mkdir(parents=True)
    other.mkdir()
    write(folder / name)
    write(other / name, 1)
    before = load(folder).digest
    (folder / "itself").symlink_to(folder)
    (folder / "deep/above").symlink_to("..")
    (folder / "again").symlink_to("deep")
    assert load(folder).digest == before
    (folder / "other").symlink_to(other)
    (folder / "twice").symlink_to(other)
    (other / "back").symlink_to(folder)
    assert two in load(folder).name


def test_a_file_inside_a_folder_keeps_its_own_name_beside_a_link_to_it(tmp_path):
    """The order and the held-out split hang on names, so a link may not change them."""
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()
        for i in range(30):
            (tmp_path / folder / f"{i}.txt").write_text(text_of(i))
    before = load(tmp_path).digest
    (tmp_path / "a").symlink_to("b")
    assert load(tmp_path).digest == before


@each_kind
def test_a_folder_named_like_a_file_is_a_folder(tmp_path, name, write, two):
    write(tmp_path / name)
    (tmp_path / f"b{name}").mkdir()
    write(tmp_path / f"b{name}" / name, 1)
    assert two in load(tmp_path).name


@each_kind
def test_an_empty_folder_named_like_a_file_is_no_file(tmp_path, name, write, two):
    (tmp_path / name).mkdir()
    assert "no train.bin, *.json.gz or text files in it" in error_of(tmp_path)


@each_kind
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_what_cannot_be_read_is_named_with_the_cause(tmp_path, monkeypatch, name, write, two, code):
    write(tmp_path / name)
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / name, 1)
    for path in (tmp_path / "more", tmp_path / "more" / name):
        with monkeypatch.context() as patch:
            fail_to_read(patch, path, code)
            message = error_of(tmp_path)
            assert message.startswith(f"{path}: cannot be read ({os.strerror(code)})")
            if path.is_file():
                assert error_of(path) == message


def test_permissions_are_respected(tmp_path):
    write_text(tmp_path / "a.txt")
    (tmp_path / "more").mkdir()
    write_text(tmp_path / "more/b.txt")
    (tmp_path / "more").chmod(0)
    try:
        if os.access(tmp_path / "more", os.R_OK):
            pytest.skip("who runs this reads everything")
        assert "more: cannot be read (Permission denied)" in error_of(tmp_path)
        assert "b.txt: cannot be read (Permission denied)" in error_of(tmp_path / "more/b.txt")
    finally:
        (tmp_path / "more").chmod(0o700)


@each_kind
def test_links_that_lead_nowhere_are_named(tmp_path, name, write, two):
    write(tmp_path / name)
    before = load(tmp_path).digest
    for link in ("c.pdf", ".hidden"):  # Neither is read where it leads somewhere.
        (tmp_path / link).symlink_to("gone")
    assert load(tmp_path).digest == before
    for link in (f"b{name}", "folder"):
        (tmp_path / link).symlink_to("gone")
        assert f"{link}: a link to gone, which is not there" in error_of(tmp_path)
        assert f"{link}: a link to gone, which is not there" in error_of(tmp_path / link)
        (tmp_path / link).unlink()
    (tmp_path / "circle").symlink_to("circle")
    assert "circle: cannot be read (Too many levels of symbolic links)" in error_of(tmp_path)


@each_kind
def test_pipes_and_sockets_are_no_files(tmp_path, monkeypatch, name, write, two):
    write(tmp_path / name)
    pipe = tmp_path / f"b{name}"
    os.mkfifo(pipe)
    assert f"b{name}: a named pipe, not a file" in error_of(tmp_path)
    assert f"b{name}: a named pipe, not a file" in error_of(pipe)
    pipe.unlink()
    monkeypatch.chdir(tmp_path)  # The address of a socket is short.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(pipe.name)
        assert f"b{name}: a socket, not a file" in error_of(tmp_path)
    pipe.unlink()
    (tmp_path / "others.sock").symlink_to("/dev/null")
    assert "1 " in load(tmp_path).name  # Of another suffix.
    assert "/dev/null: a device, not a file" in error_of("/dev/null")


def test_hidden_folders_and_other_suffixes_are_left_out_as_documented(tmp_path):
    write_text(tmp_path / "a.txt")
    before = load(tmp_path)
    (tmp_path / ".hidden").mkdir()
    write_text(tmp_path / ".hidden/b.txt")
    write_json(tmp_path / ".hidden/b.json.gz")
    (tmp_path / "table.csv").write_text("1,2\n")
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.4\n\0")
    assert (load(tmp_path).name, load(tmp_path).digest) == (before.name, before.digest)


def test_empty_files_and_json_lines_beside_text_are_counted(tmp_path):
    write_text(tmp_path / "a.txt")
    before = load(tmp_path)
    (tmp_path / "b.py").write_text("")
    (tmp_path / "c.txt").write_text(" \n")
    (tmp_path / "d.jsonl").write_text('{"text": "some"}\n')
    after = load(tmp_path)
    assert after.digest == before.digest
    assert "1 file, 0.0 MB, 2 empty files left out, 1 *.jsonl file not read" in after.name


def test_a_folder_of_json_lines_says_how_to_read_them(tmp_path):
    write_shard(tmp_path / "train.jsonl", map(text_of, range(50)))
    assert f"name one, such as train.jsonl, or give hf:{tmp_path}" in error_of(tmp_path)
    assert "1 file of JSON lines" in load(tmp_path / "train.jsonl").name


# Each stands for data or a tokenizer, so that the rest of the folder must not be read instead.
@pytest.mark.parametrize("name", ["train.bin", "train.bin.xz", "val.bin", "tokenizer.json"])
@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_token_files_and_tokenizers_that_are_no_files(tmp_path, name, what):
    write_tokens(tmp_path)
    write_text(tmp_path / "README.md")
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if name.startswith("train"):
        (tmp_path / "train.bin").unlink(missing_ok=True)
    if what == "link":
        path.symlink_to("gone")
    elif what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    expected = {"link": "a link to gone", "folder": "a folder", "pipe": "a named pipe"}[what]
    assert f"{path}: {expected}" in error_of(tmp_path)


def test_a_tokenizer_beside_text_that_cannot_be_used_is_no_reason_for_bytes(tmp_path, monkeypatch):
    write_text(tmp_path / "a.txt")
    (tmp_path / "tokenizer.json").symlink_to("gone")
    assert "tokenizer.json: a link to gone" in error_of(tmp_path)
    assert "tokenizer.json: a link to gone" in error_of(tmp_path / "a.txt")
    (tmp_path / "tokenizer.json").unlink()
    path = write_words(tmp_path / "tokenizer.json")
    fail_to_read(monkeypatch, path, errno.EACCES)
    assert f"{path}: cannot be read (Permission denied)" in error_of(tmp_path)


@pytest.mark.parametrize("name", ["train.bin", "train.bin.xz", "val.bin", "val.bin.xz"])
def test_token_files_that_cannot_be_read(tmp_path, monkeypatch, name):
    write_tokens(tmp_path)
    if name.endswith(".xz"):
        (tmp_path / name.removesuffix(".xz")).rename(tmp_path / name)
    fail_to_read(monkeypatch, tmp_path / name, errno.EIO)
    assert f"{name}: cannot be read (Input/output error)" in error_of(tmp_path)


def test_a_folder_that_may_be_listed_but_not_entered(tmp_path, monkeypatch):
    write_tokens(tmp_path)
    lstat = os.lstat

    def refuse(path, **kwargs):
        if os.fspath(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return lstat(path, **kwargs)

    monkeypatch.setattr(os, "lstat", refuse)
    monkeypatch.setattr("pathlib.Path.lstat", refuse)
    assert "train.bin: cannot be read (Permission denied)" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "--data '': names nothing"),
        (" ", "--data ' ': names nothing"),
        ("x" * 300, "cannot be read (File name too long)"),
        ("a\0b.txt", r"a\x00b.txt: cannot be read (embedded null byte)"),
        ("a\nb.txt", r"a\nb.txt: no such file or folder"),
        ("\udcff.txt", r"\udcff.txt: no such file or folder"),
        ("a.txt/b.txt", "a.txt/b.txt: no such file or folder"),
    ],
)
def test_names_that_cannot_be(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt")
    assert message in error_of(path)


def test_odd_names_are_fine(tmp_path):
    name = os.fsdecode(b"caf\xe9 \n.txt")  # No UTF-8, and two lines.
    write_text(tmp_path / name)
    write_text(tmp_path / "plain.txt", 1)
    assert "2 files" in load(tmp_path).name
    loaded = load(tmp_path / name)
    assert loaded.name.isprintable() and r"caf\udce9 \n.txt: 1 file" in loaded.name


@pytest.mark.parametrize("tokenizer", ["", "folder", "x" * 300, "a\0b"])
def test_tokenizers_that_cannot_be(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt")
    (tmp_path / "folder").mkdir()
    expected = {"": "--tokenizer '': names nothing", "folder": "folder: a folder; give the path"}
    message = error_of("a.txt", tokenizer=tokenizer)
    assert expected.get(tokenizer, "") in message
