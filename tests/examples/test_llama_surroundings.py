"""The trainers where they are run: threads, notebooks, odd terminals and environments, Ctrl-C."""

import asyncio
import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from examples.kit import console, hosts, interrupts, metrics
from examples.kit import plot as kit_plot
from examples.llama import train
from examples.llama.config import PRESETS

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    "llama.train",
    "nanomoe.train",
    "benchmark.optimizer",
    "paper.appendix_ablations",
    "paper.appendix_resnet",
    "paper.figure2_nano_moe",
    "paper.figure3_heavy_tails",
    "paper.figure4_quadratics",
    "paper.report",
    "paper.section5_theory",
    "paper.table1_llama",
]


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """To compile sooner, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=1))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("some words of text " * 2000)
    return path


def options(corpus, out, *more):
    common = "--preset tiny --batch-size 8 --seq-len 16 --steps 3 --magma"
    return [*common.split(), "--data", str(corpus), "--out", str(out), *more]


# ---------------------------------------------------------------------------------------------
# Threads and notebooks


def test_a_run_in_a_thread(corpus, tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    statuses = []
    thread = threading.Thread(
        target=lambda: statuses.append(train.main(options(corpus, tmp_path / "run")))
    )
    thread.start()
    thread.join()
    assert statuses == [0]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_run_inside_an_event_loop_as_in_a_notebook(corpus, tmp_path):
    async def cell(*more):
        return train.main(options(corpus, tmp_path / "run", *more))

    assert asyncio.run(cell()) == 0
    assert asyncio.run(cell("--resume", "--steps", "4")) == 0


def test_wrong_options_do_not_end_the_calling_program(capsys):
    assert train.main(["-f", "kernel.json"]) == 2  # a notebook's own arguments
    [line] = capsys.readouterr().err.splitlines()
    assert line == "error: unrecognized arguments: -f kernel.json"


# ---------------------------------------------------------------------------------------------
# Environments


def test_every_program_is_imported_and_draws_under_any_backend(tmp_path):
    code = f"""
import importlib, os, warnings
for program in {PROGRAMS}:
    importlib.import_module("examples." + program)
from examples.kit.figure import Figure
Figure().savefig({str(tmp_path / "figure.png")!r})
assert os.environ["MPLBACKEND"] == "of_a_notebook"
"""
    env = os.environ | {"MPLBACKEND": "of_a_notebook"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=1200)
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_a_backend_that_is_there_stays_the_one_of_other_figures():
    code = "import examples.kit.plot, matplotlib; print(matplotlib.rcParams['backend'])"
    env = os.environ | {"MPLBACKEND": "svg"}
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True)
    assert shown.strip() == "svg"


def test_a_run_outlives_its_terminal_and_odd_settings(corpus, tmp_path):
    """Nobody reads on after the first line, the text can't be shown, no transfer is implicit."""
    env = {
        "PYTHONIOENCODING": "ascii",
        "MPLBACKEND": "of_a_notebook",
        "JAX_TRANSFER_GUARD": "disallow",
        "OPENBLAS_NUM_THREADS": "1",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
        "PYTHONWARNINGS": "error",
    }
    argv = options(corpus, tmp_path / "run", "--prompt", "ä\u2603", "--accumulate", "2")
    with subprocess.Popen(
        [sys.executable, "-m", "examples.llama.train", *argv],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().startswith("tiny: ")
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(timeout=1200) == 0, error
    assert "Traceback" not in error and "warning: " not in error
    assert metrics.read(tmp_path / "run")[-1]["step"] == 3
    assert (tmp_path / "run" / "curves.png").exists()


def test_nano_moe_transfers_nothing_implicitly_and_needs_no_terminal(corpus, tmp_path):
    argv = "--preset tiny --magma --steps 3 --warmup 1 --eval-every 1".split()
    argv += ["--data", str(corpus), "--out", str(tmp_path / "run")]
    closed = ["bash", "-c", 'exec "$@" >&- 2>&-', "-"]
    env = os.environ | {"JAX_TRANSFER_GUARD": "disallow", "PYTHONWARNINGS": "error"}
    command = [*closed, sys.executable, "-m", "examples.nanomoe.train", *argv]
    assert subprocess.run(command, cwd=ROOT, env=env, timeout=1200).returncode == 0
    assert metrics.read(tmp_path / "run")[-1]["step"] == 3


def test_a_backend_of_jax_that_is_not_there_is_one_line(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "nonesuch"}
    command = [sys.executable, "-m", "examples.llama.train", "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: JAX finds no device: ")
    assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------------------------------------
# What is printed


class Stream(io.TextIOWrapper):
    """A terminal of a given encoding that fails as it is told to."""

    def __init__(self, encoding="utf-8", failure=None):
        super().__init__(io.BytesIO(), encoding, write_through=True)
        self.failure = failure

    def write(self, text):
        if self.failure:
            raise self.failure
        return super().write(text)

    @property
    def written(self):
        return self.buffer.getvalue().decode(self.encoding)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "caf\\xe9 \\u2603 \\ud800\n"), ("utf-8", "café \u2603 \\ud800\n")],
)
def test_what_cannot_be_shown_is_escaped(monkeypatch, encoding, shown):
    monkeypatch.setattr(sys, "stdout", stream := Stream(encoding))
    console.say("café \u2603 \ud800")
    assert stream.written == shown


@pytest.mark.parametrize(
    "failure", [BrokenPipeError(), OSError(28, "No space left"), ValueError("closed file")]
)
def test_an_output_that_fails_is_let_go(monkeypatch, failure):
    monkeypatch.setattr(sys, "stdout", Stream(failure=failure))
    console.say("nobody hears it")
    monkeypatch.setattr(sys, "stdout", None)
    console.say("nor this")


def test_a_terminal_that_is_slow_at_the_moment_is_kept(monkeypatch):
    readable, writable = os.pipe()
    with open(readable) as reader, open(writable, "w") as terminal:
        slow = {"write.side_effect": BlockingIOError(), "fileno.return_value": writable}
        monkeypatch.setattr(sys, "stdout", mock.Mock(**slow))
        console.say("nobody hears it")
        print("later", file=terminal, flush=True)
        assert reader.readline() == "later\n"


def test_a_run_does_not_fail_for_want_of_a_picture(monkeypatch, capsys):
    def plot(*_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(kit_plot, "plot", plot)
    kit_plot.draw(Path("run"), 1.0, 0.55)
    warning = "warning: the curves could not be drawn (RuntimeError: no fonts)\n"
    assert capsys.readouterr().err == warning


def test_errors_and_samples_have_no_control_characters(capsys):
    console.print_error("two\nlines\x1b[31m in\x07 one")
    assert capsys.readouterr().err == "error: two lines\\x1b[31m in\\x07 one\n"
    assert console.printable("a\tb\nc\r\x00é") == "a\tb\nc\\r\\x00é"


# ---------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_during_imports_is_one_line(tmp_path, program):
    for package in ("jax", "numpy", "matplotlib"):  # whichever comes first takes its time
        (tmp_path / f"{package}.py").write_text(
            "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
        )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", f"examples.{program}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert error == "error: SIGINT: ended before it was done\n"
    assert process.returncode == 130


def test_a_second_ctrl_c_ends_at_once_also_inside_a_library():
    code = """
import ctypes, time
from examples.kit import interrupts
interrupts.end_at_once()
with interrupts.StopSignal(lambda: "steps after 40 are lost") as stop:
    print("running", flush=True)
    while stop.number is None:
        time.sleep(0.01)
    print("noted", flush=True)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # waits for ever; no signal wakes it, so Python's handlers don't run
    time.sleep(60)
"""
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for said in ("running\n", "noted\n"):
            assert process.stdout.readline() == said
            process.send_signal(number)
        _, error = process.communicate(timeout=300)
        name = signal.Signals(number).name
        assert error.split("\n")[-2] == f"error: {name}: steps after 40 are lost"
        assert f"{name}: stopping; once more ends at once" in error
        assert process.returncode == 128 + number


def test_a_second_ctrl_c_says_which_steps_the_trainer_loses(corpus, tmp_path, monkeypatch):
    def press_twice(stop, step):
        if step == 3:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        return stop

    monkeypatch.setattr(hosts, "agree_to_stop", press_twice)
    argv = options(corpus, tmp_path / "run", "--checkpoint-every", "1", "--steps", "9")
    said = "steps after [12] are lost; go on with: python -m examples.llama.train --preset tiny "
    with pytest.raises(KeyboardInterrupt, match=said + ".*--resume"):
        train.main(argv)


def test_a_second_ctrl_c_interrupts_a_notebook():
    before = signal.getsignal(signal.SIGINT)
    with interrupts.StopSignal(lambda: "steps after 40 are lost") as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt, match="steps after 40 are lost"):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
