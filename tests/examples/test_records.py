"""Records: what is written comes back, with what it takes to repeat it."""

import json
import subprocess

import pytest

from examples.kit import records


def test_a_record_comes_back_with_its_provenance(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    first = records.append(path, {"arm": "adam", "seed": 0}, {"loss": 1.5})
    second = records.append(path, {"arm": "magma", "seed": 0}, {"loss": [1.0, 2.0]})
    assert records.read(path) == [first, second]
    assert first["settings"] == {"arm": "adam", "seed": 0}
    assert first["results"] == {"loss": 1.5}
    expected = {"command", "commit", "date", "device", "python", "versions"}
    assert first["provenance"].keys() == expected
    assert first["provenance"]["versions"].keys() == set(records.PACKAGES)


def test_no_file_is_no_records(tmp_path):
    assert records.read(tmp_path / "none.jsonl") == []


def test_numbers_that_json_lacks_are_strings_that_float_reads(tmp_path):
    path = tmp_path / "results.jsonl"
    records.append(path, {}, {"loss": [float("nan"), float("inf"), {"least": -float("inf")}]})
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert strict["results"]["loss"] == ["nan", "inf", {"least": "-inf"}]
    assert float(strict["results"]["loss"][1]) == float("inf")


def test_an_unfinished_line_of_a_killed_run_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    records.append(path, {}, {"loss": 1.0})
    with path.open("a") as file:
        file.write('{"settings": {"arm"')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2 is no record"):
        records.read(path)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    records.append(path, {"arm": "a"}, {})
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        records.append(path, {"arm": "b"}, {})
    assert path.read_bytes() == before


def test_the_commit_is_marked_when_code_differs_but_not_for_results(tmp_path, monkeypatch):
    """In a repository of its own, laid out as this one."""
    monkeypatch.delenv("COMMIT", raising=False)
    module = tmp_path / "examples" / "paper" / "records.py"
    result = module.parent / "results" / "a.jsonl"
    benchmark = tmp_path / "examples" / "benchmark" / "results.jsonl"
    for folder in (result.parent, benchmark.parent):
        folder.mkdir(parents=True)
    monkeypatch.setattr(records, "__file__", str(module))
    assert records.commit() is None

    def git(*command):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True)

    module.write_text("1\n")
    for file in (result, benchmark):
        file.write_text("1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    clean = records.commit()
    assert len(clean) >= 7
    for file in (result, benchmark):
        file.write_text("2\n")
    assert records.commit() == clean
    module.write_text("2\n")
    assert records.commit() == clean + "+"
    monkeypatch.setenv("COMMIT", "named")
    assert records.commit() == "named"
