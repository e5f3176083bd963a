"""Spreads a sweep's runs over the devices, one process each, and records them as they finish.

One process, this one, writes. A run is lost only if it was in flight when the sweep was stopped.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.kit import console, records
from examples.kit.console import print_error, say
from examples.kit.interrupts import StopSignal
from examples.kit.options import SettingsError
from examples.paper.search import Record, Run, Search, missing_of_all, select
from examples.paper.trainer import Task

ROOT = Path(__file__).parents[2]
MARGIN = 1.1  # a run must fit with so much time to spare


class WorkerError(RuntimeError):
    """The worker's process ended, or the run failed in it."""


class RefusalError(WorkerError):
    """No run of the task can be trained; the message says why in one line."""


class Worker:
    """A process that trains on one device."""

    def __init__(self, environment: dict[str, str]):
        """Starts it.

        Args:
            environment: What makes it see its device alone.
        """
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.paper.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def run(self, module: str, task: Task, run: Run) -> dict[str, Any]:
        """Trains and returns {"results": ..., "device": ...}.

        Args:
            module: Where the experiment stands.
            task: One of its tasks.
            run: What to train.

        Raises:
            WorkerError: If it could not.
        """
        request = {
            "module": module,
            "task": dataclasses.asdict(task),
            "run": dataclasses.asdict(run),
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise WorkerError(f"the worker ended: {error}") from error
        if not line:
            raise WorkerError(f"the worker ended with status {self._process.wait()}")
        try:
            reply = json.loads(line)
        except ValueError:
            raise WorkerError(f"the worker wrote {line!r} instead of a result") from None
        if "refusal" in reply:
            raise RefusalError(reply["refusal"])
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def kill(self) -> None:
        """Ends it at once, whatever it does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it and frees the pipes, once nobody reads from them."""
        self.kill()
        with contextlib.suppress(OSError):  # a request that it never read
            self._process.stdin.close()
        self._process.stdout.close()

    @property
    def alive(self) -> bool:
        """Whether it can take another run."""
        return self._process.poll() is None


class Sweep:
    """All state that the devices' threads share; every method takes the lock where needed."""

    def __init__(
        self,
        module: str,
        task: Task,
        searches: Sequence[Search],
        out: Path,
        deadline: float = math.inf,
    ):
        """Reads what is recorded already.

        Args:
            module: Where the experiment stands.
            task: What all runs have in common.
            searches: The arms, most urgent first.
            out: The file of records.
            deadline: `time.monotonic()` after which nothing runs.
        """
        self.module = module
        self.task = task
        self.searches = searches
        self.out = out
        self.deadline = deadline
        self.records: list[Record] = select(records.read(out), task.settings())
        self.failed: dict[Run, str] = {}
        self.postponed: set[Run] = set()  # wouldn't finish in time
        self.stopped = False
        self.refusal: str | None = None  # why no run can be trained
        self.unwritten: OSError | None = None  # why a run could not be recorded
        self._active: dict[int, Run] = {}  # by device
        self._last: dict[int, str] = {}  # arm that a device has compiled and ran last
        self._walls: dict[str, float] = {}  # longest run of an arm so far, seconds
        self._change = threading.Condition()

    def take(self, device: int) -> Run | None:
        """Waits for a run for a device; None when there is nothing left for it."""
        with self._change:
            while not self.stopped:
                now = self._possible(device)
                if now:
                    self._active[device] = now[0]
                    return now[0]
                if not self._active:
                    return None
                self._change.wait(1.0)  # what is in flight may call for more
            return None

    def finish(self, device: int, run: Run, reply: dict[str, Any], wall: float) -> None:
        """Records a run; where that fails, as on a full disk, nothing runs any more."""
        with self._change:
            del self._active[device]
            self._last[device] = run.arm
            self._walls[run.arm] = max(wall, self._walls.get(run.arm, 0.0))
            settings = self.task.settings() | dataclasses.asdict(run)
            try:
                record = records.append(self.out, settings, reply["results"], reply["device"])
                self.records.append(record)
            except OSError as error:
                self.unwritten, self.stopped = error, True
            self._change.notify_all()
        say(f"{describe(run)}: {outcome(reply['results'])}, {wall:.0f} s")

    def fail(self, device: int, run: Run, error: Exception) -> None:
        """Gives up a run, and with it the rest of its arm's search, or of all."""
        with self._change:
            del self._active[device]
            if isinstance(error, RefusalError):
                self.refusal, self.stopped = str(error), True
            elif not self.stopped:
                self.failed[run] = str(error)
                print(f"{describe(run)}: failed\n{error}", file=console.stderr, flush=True)
            self._change.notify_all()

    def stop(self) -> None:
        """Lets no run start any more."""
        with self._change:
            self.stopped = True
            self._change.notify_all()

    def _possible(self, device: int) -> list[Run]:
        """What the device could run now, best first.

        A device stays with the arm that it has compiled; failing that, it takes one that no other
        device works on, so that each is compiled once.
        """
        broken = {run.arm for run in self.failed}
        active = set(self._active.values())
        others = {run.arm for run in active}
        waiting = [
            run
            for run in missing_of_all(self.searches, self.records)
            if run not in active and run.arm not in broken
        ]
        self.postponed = {run for run in waiting if not self._fits(run)}
        waiting = [run for run in waiting if run not in self.postponed]
        return sorted(  # stable: the arms' order decides between equals
            waiting, key=lambda run: (run.arm != self._last.get(device), run.arm in others)
        )

    def _fits(self, run: Run) -> bool:
        """Whether the run would finish in time, as far as known."""
        if not self._walls:
            return time.monotonic() < self.deadline
        wall = self._walls.get(run.arm, max(self._walls.values()))
        return time.monotonic() + MARGIN * wall < self.deadline


def execute(sweep: Sweep, environments: Sequence[dict[str, str]]) -> int:
    """Runs a sweep to its end, its deadline, SIGTERM or SIGINT; returns the exit status.

    Args:
        sweep: What to run.
        environments: For each device the environment in which a worker sees it alone.
    """
    workers: dict[int, Worker] = {}

    def serve(device: int) -> None:
        """Keeps one device busy."""
        while (run := sweep.take(device)) is not None:
            start = time.monotonic()
            try:
                if device in workers and not workers[device].alive:
                    workers.pop(device).close()
                if device not in workers:
                    workers[device] = Worker(environments[device])
                reply = workers[device].run(sweep.module, sweep.task, run)
            except (WorkerError, OSError) as error:  # OSError: it could not be started
                sweep.fail(device, run, error)
            else:
                sweep.finish(device, run, reply, time.monotonic() - start)

    threads = [
        threading.Thread(target=serve, args=(device,), daemon=True)
        for device in range(len(environments))
    ]
    with StopSignal(lambda: "ended at once; the same command goes on") as stop:
        for thread in threads:
            thread.start()
        late = False
        while any(thread.is_alive() for thread in threads) and not (stop.number or late):
            time.sleep(0.05)
            late = time.monotonic() > sweep.deadline
        sweep.stop()
        while any(thread.is_alive() for thread in threads):  # one may be starting a worker
            for worker in list(workers.values()):
                worker.kill()
            threads[0].join(0.1)
        for worker in workers.values():
            worker.close()
    if stop.number:
        say(f"{signal.Signals(stop.number).name}: stopped; the same command goes on")
        return 128 + stop.number
    if sweep.refusal:
        print_error(sweep.refusal)
        return 1
    if sweep.unwritten:
        print_error(
            f"stopped, as {sweep.out} can't be written ({sweep.unwritten}); the same command goes "
            "on from what is recorded"
        )
        return 1
    if late or sweep.postponed:
        say("time limit: stopped; the same command goes on")
    return 1 if sweep.failed else 0


def find_devices() -> tuple[str, list[dict[str, str]]]:
    """The platform, and for each device the environment in which a worker sees it alone.

    Another process looks, since JAX takes the memory of whatever it has seen.

    Raises:
        SettingsError: If there is none.
    """
    code = "import jax; print(jax.default_backend(), jax.local_device_count())"
    try:
        answer = subprocess.check_output([sys.executable, "-c", code], text=True)
    except subprocess.CalledProcessError:  # it has said why
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise SettingsError(f"JAX finds no devices (JAX_PLATFORMS={platforms!r})") from None
    platform, count = answer.split()[-2:]
    if platform != "gpu":  # one process: CPU runs share the cores anyway
        return platform, [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(int(count))]
    return platform, [{"CUDA_VISIBLE_DEVICES": name} for name in names]


def describe(run: Run) -> str:
    """Names a run on one line."""
    return f"{run.arm}, learning rate {run.learning_rate:g}, seed {run.seed}"


def outcome(results: dict[str, Any]) -> str:
    """Says on one line how a run ended."""
    if results["diverged"]:
        return "diverged"
    speed = [
        f"{value:,} {name.removesuffix('_per_second')}/s"
        for name, value in results.items()
        if name.endswith("_per_second")
    ]
    losses = [
        f"validation loss {results['valid_loss']:.4f}",
        f"training loss {results['train_loss_last']:.4f}",
    ]
    return ", ".join(losses + speed)
