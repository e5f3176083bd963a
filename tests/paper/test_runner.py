"""The runner: workers that only pretend, on devices that are not there."""

import io
import math
import subprocess
import threading
import time
import types

import pytest

from examples.kit import records
from examples.paper import runner
from examples.paper.search import Run, Search, best
from examples.paper.tasks.llama import Task

TASK = Task("nano", steps=20, batch_size=4, seq_len=16, dtype="float32")


class Pretender:
    """A worker whose loss depends on the rate alone; counts what it is given."""

    given: list[tuple[str, Run]] = []  # noqa: RUF012 - renewed by the fixture
    pause = 0.0
    broken = ""
    failure = runner.WorkerError("out of memory")

    def __init__(self, environment):
        self.device = environment["DEVICE"]
        self.alive = True

    def run(self, module, task, run):
        self.given.append((self.device, run))
        time.sleep(self.pause)
        if run.arm == self.broken:
            raise self.failure
        loss = abs(math.log2(run.learning_rate / 0.002)) + 3
        results = {"valid_loss": loss, "train_loss_last": loss, "diverged": False}
        return {"results": results | {"tokens_per_second": 1}, "device": "pretended"}

    def kill(self):
        self.alive = False

    close = kill


@pytest.fixture
def pretender(monkeypatch):
    monkeypatch.setattr(Pretender, "given", [])
    monkeypatch.setattr(runner, "Worker", Pretender)
    return Pretender


def run_sweep(tmp_path, arms, devices=2, deadline=math.inf):
    searches = [Search(arm, 0.004) for arm in arms]
    state = runner.Sweep(
        "examples.paper.table1_llama", TASK, searches, tmp_path / "r.jsonl", deadline
    )
    status = runner.execute(state, [{"DEVICE": str(i)} for i in range(devices)])
    return status, state


def test_a_sweep_over_two_devices_runs_everything_once(tmp_path, pretender, monkeypatch):
    monkeypatch.setattr(pretender, "pause", 0.05)
    status, state = run_sweep(tmp_path, ["a", "b", "c"])
    runs = [run for _, run in pretender.given]
    assert status == 0 and len(runs) == len(set(runs)) == 3 * (4 + 2)
    assert {device for device, _ in pretender.given} == {"0", "1"}
    assert all(best(state.records, arm).learning_rate == 0.002 for arm in "abc")
    # Each device begins with an arm of its own and stays with it.
    assert len({run.arm for device, run in pretender.given[:6] if device == "0"}) == 1

    pretender.given.clear()
    assert run_sweep(tmp_path, ["a", "b", "c"])[0] == 0
    assert not pretender.given
    assert len(records.read(tmp_path / "r.jsonl")) == 18


def test_a_broken_arm_is_given_up_and_the_others_finish(tmp_path, pretender, monkeypatch, capfd):
    monkeypatch.setattr(pretender, "broken", "a")
    status, state = run_sweep(tmp_path, ["a", "b"], devices=1)
    assert status == 1
    assert [run.arm for _, run in pretender.given].count("a") == 1
    assert len(state.records) == 6
    assert "out of memory" in capfd.readouterr().err


def test_a_task_that_cant_be_trained_ends_the_sweep(tmp_path, pretender, monkeypatch, capfd):
    monkeypatch.setattr(pretender, "broken", "a")
    monkeypatch.setattr(pretender, "failure", runner.RefusalError("text.txt: no such file"))
    status, state = run_sweep(tmp_path, ["a", "b"], devices=1)
    assert status == 1 and len(pretender.given) == 1 and not state.records
    assert capfd.readouterr().err == "error: text.txt: no such file\n"


def test_a_file_that_cant_be_written_ends_the_sweep(tmp_path, pretender, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner.records, "append", full)
    status, state = run_sweep(tmp_path, ["a", "b", "c"])
    assert status == 1 and not state.records and len(pretender.given) <= 2
    assert "r.jsonl can't be written ([Errno 28]" in capfd.readouterr().err


def test_a_worker_that_cant_be_started_fails_its_run(tmp_path, monkeypatch, capfd):
    def missing(environment):
        raise FileNotFoundError("no interpreter")

    monkeypatch.setattr(runner, "Worker", missing)
    status, state = run_sweep(tmp_path, ["a", "b"])
    assert status == 1 and {run.arm for run in state.failed} == {"a", "b"}
    assert "no interpreter" in capfd.readouterr().err


def test_a_torn_reply_is_an_error_of_the_worker(monkeypatch):
    worker = object.__new__(runner.Worker)
    pipes = types.SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO('{"results": {"va\n'))
    worker._process = pipes
    with pytest.raises(runner.WorkerError, match=r"wrote '{\"results\": {\"va\\n' instead"):
        worker.run("module", TASK, Run("a", 1.0, 0))


def test_no_run_starts_that_would_end_after_the_deadline(tmp_path, pretender, monkeypatch, capfd):
    clock = [0.0]
    watch = types.SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)

    def run(self, module, task, run, answer=pretender.run):
        clock[0] += 10.0
        return answer(self, module, task, run)

    monkeypatch.setattr(runner, "time", watch)
    monkeypatch.setattr(pretender, "run", run)
    status, _ = run_sweep(tmp_path, ["a", "b"], devices=1, deadline=29.0)
    assert status == 0 and len(pretender.given) == 2  # the third would have ended at 30
    assert "time limit" in capfd.readouterr().out


def test_what_is_still_running_at_the_deadline_is_killed(tmp_path, pretender, monkeypatch):
    killed = threading.Event()

    def hang(self, module, task, run):
        assert killed.wait(300)
        raise runner.WorkerError("the worker ended")

    monkeypatch.setattr(pretender, "run", hang)
    monkeypatch.setattr(pretender, "kill", lambda self: killed.set())
    status, state = run_sweep(tmp_path, ["a"], devices=1, deadline=time.monotonic() + 0.5)
    assert status == 0 and not state.records and not state.failed


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("2,3", ["2", "3"]), ("GPU-a", ["GPU-a"])]
)
def test_each_worker_sees_one_gpu(monkeypatch, visible, names):
    count = len(names)
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: f"a warning\ngpu {count}\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    platform, environments = runner.find_devices()
    assert platform == "gpu"
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == names
