"""The sweep of the paper's Table 1: its options, its task, and the whole in real processes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paper_records import record, write_words

from examples.kit import records
from examples.paper import RESULTS, command, report, runner, table1_llama
from examples.paper.arms import ARMS
from examples.paper.search import Search, select
from examples.paper.tasks.llama import Task

ROOT = Path(__file__).parents[2]
TASK = Task("nano", steps=20, batch_size=4, seq_len=16, dtype="float32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("text"), 20_000)


def test_the_command_line_says_where_searches_begin_or_which_rates_are_run():
    def searches(*options):
        parser = command.make_parser("")
        command.add_search_options(parser, "records")
        args = parser.parse_args(["--seeds", "2", *options])
        return command.searches_of(args, ARMS, ["adam", "muon"])

    ours = ARMS["muon"].centre
    assert searches("--centre", "adam=0.03") == [Search("adam", 0.03, 2), Search("muon", ours, 2)]
    fixed = searches("--fixed-rate", "1e-3", "0.064")
    assert [(s.arm, s.centre) for s in fixed] == [
        (arm, rate) for rate in (1e-3, 0.064) for arm in ("adam", "muon")
    ]
    assert all(search.fixed and search.seeds == 2 for search in fixed)


def test_records_of_other_tasks_dont_count():
    ours, theirs = record("a", 0.1, 1.0), record("a", 0.1, 1.0)
    ours["settings"] |= TASK.settings()
    theirs["settings"] |= dataclasses.replace(TASK, steps=21).settings()
    assert select([ours, theirs, record("a", 0.1, 1.0)], TASK.settings()) == [ours]


def test_a_recorded_run_counts_however_often_it_was_validated():
    often = dataclasses.replace(TASK, validations=9).settings()
    assert often == TASK.settings() and "validations" not in often


def test_the_task_is_recorded_without_the_folders_above_the_data():
    settings = dataclasses.replace(TASK, data="/some/where/corpus").settings()
    assert settings["data"] == "corpus"
    assert json.loads(json.dumps(settings)) == settings


def make_task(folder):
    parser = command.make_parser("")
    table1_llama.add_task_options(parser)
    return table1_llama.make_task(parser.parse_args(["--data", str(folder)]), "cpu")


def test_micro_batches_that_do_not_cut_a_batch_are_one_line(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_devices", lambda: ("cpu", [{}]))
    assert table1_llama.main(["--batch-size", "4", "--micro-batches", "3"]) == 1
    assert "--micro-batches 3 does not cut --batch-size 4" in capsys.readouterr().err


def test_no_device_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    assert table1_llama.main([]) == 1
    assert "JAX finds no devices (JAX_PLATFORMS='nonsense')" in capsys.readouterr().err


def test_folders_of_one_name_are_two_tasks(tmp_path):
    for place in ("mine", "yours"):
        (tmp_path / place / "corpus").mkdir(parents=True)
        (tmp_path / place / "corpus" / "a.txt").write_text(f"What is {place} is {place}. " * 99)
    mine, yours = (make_task(tmp_path / place / "corpus") for place in ("mine", "yours"))
    assert mine.settings()["data"] == yours.settings()["data"]
    assert mine.settings()["digest"] != yours.settings()["digest"]
    assert make_task(tmp_path / "mine" / "corpus") == mine


def test_the_records_of_the_package_name_their_text_by_digest():
    for file in RESULTS.glob("*.jsonl"):
        for settings in (found["settings"] for found in records.read(file)):
            if settings.get("data", "").startswith("corpus"):
                assert len(settings["digest"]) == 32


def options(text, out):
    sizes = ["--steps", "100", "--batch-size", "4", "--seq-len", "32", "--reach", "2"]
    return ["--data", text, "--out", str(out), "--arms", "adam", "--seeds", "2", *sizes]


def test_a_sweep_ends_and_repeated_does_nothing(text, tmp_path, monkeypatch, capfd):
    out = tmp_path / "records.jsonl"
    arguments = options(text, out)
    program = [sys.executable, "-m", "examples.paper.table1_llama", *arguments]
    # Stopped after the first record, by a signal it hears and then by one that it can't.
    for number, code in [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]:
        before = len(records.read(out))
        with subprocess.Popen(
            program, cwd=ROOT, env=os.environ | {"COMMIT": "abc"}, stderr=subprocess.PIPE
        ) as process:
            while len(records.read(out)) == before and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(number)
            process.stderr.read()  # ends when the worker, which holds it too, is gone
        assert process.returncode == code
        assert before < len(records.read(out)) <= before + 2

    monkeypatch.setattr(command, "find_devices", lambda: ("cpu", [{}]))
    assert table1_llama.main(arguments) == 0
    found = records.read(out)
    runs = [tuple(record["settings"].items()) for record in found]
    assert len(runs) == len(set(runs)) >= 3
    assert found[0]["provenance"]["command"].startswith(
        "python -m examples.paper.table1_llama --data"
    )
    assert found[0]["provenance"]["commit"] == "abc"
    assert "| adam |" in capfd.readouterr().out

    content = out.read_bytes()
    monkeypatch.setattr(runner, "Worker", None)  # none is started
    assert table1_llama.main(arguments) == 0
    assert out.read_bytes() == content

    assert report.main([str(out)]) == 0
    assert out.with_suffix(".png").stat().st_size > 1000


def test_an_unknown_arm_is_refused_by_name():
    with pytest.raises(SystemExit, match="no arm 'adamm'; there are adam, "):
        table1_llama.main(["--arms", "adamm"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seeds 0", "--seeds: must be at least 1"),
        ("--centre adam=x", "--centre: 'x' is not a number"),
        ("--reach 0.5", "--reach: must be at least 1"),
        ("--time-limit -1", "--time-limit: must be at least 0"),
        ("--fixed-rate 0.1 --reach 2", "--reach does nothing beside --fixed-rate"),
        ("--out gs://bucket/records", "'gs://bucket/records' is an address"),
        ("--arms adm", "no arm 'adm'; there are adam, "),
        ("--arms adam --centre adm=1", "no arm 'adm'; there are adam, "),
    ],
)
def test_a_wrong_option_is_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        table1_llama.main(options.split())
    error = capsys.readouterr().err + str(stop.value.code)
    assert message in error and error.strip().count("\n") <= 1
