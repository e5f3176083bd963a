"""Carries a search out in this process: one thread a device, each run recorded as it ends."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from examples.kit import records
from examples.kit.console import say
from examples.kit.options import Parser, local_path, seconds
from examples.paper.searches import add_search_options
from examples.paper.sweep import Record, Run, Search, missing_of_all, select


def add_options(parser: Parser, arms: Iterable[str], seeds: int, out: Path) -> None:
    """Adds the options that say what to search for, where to record it and for how long.

    Args:
        parser: Gets ``--arms``, ``--out``, ``--time-limit`` and those of `add_search_options`.
        arms: Names of all arms.
        seeds: Default of ``--seeds``.
        out: Default of ``--out``.
    """
    add = parser.add_argument
    add("--arms", default=",".join(arms), help="names, most urgent first (default: all)")
    add_search_options(parser, seeds)
    add("--out", type=local_path, default=out, help="JSON lines")
    add("--time-limit", type=seconds, default=math.inf, help="seconds after which no run starts")


def execute(
    searches: Sequence[Search],
    settings: Mapping[str, Any],
    out: Path,
    train: Callable[[Run], dict[str, Any]],
    time_limit: float = math.inf,
) -> list[Record]:
    """Runs what the searches miss in the file of records.

    A run in flight when the process is stopped is lost; the same command goes on with the others.
    When a run fails, none starts any more, and what it raised is raised once the others are
    recorded.

    Args:
        searches: The arms, most urgent first.
        settings: What all runs have in common; records with other settings don't count.
        out: The file of records.
        train: From a run to its results, on JAX's default device.
        time_limit: Seconds after which no run starts.

    Returns:
        All records of these settings.
    """
    found = select(records.read(out), settings)
    deadline = time.monotonic() + time_limit
    free = jax.local_devices() if jax.default_backend() == "gpu" else jax.local_devices()[:1]
    active: dict[Future, tuple[Run, jax.Device]] = {}
    failure: BaseException | None = None
    with ThreadPoolExecutor(len(free)) as pool:
        while True:
            running = [run for run, _ in active.values()]
            waiting = [run for run in missing_of_all(searches, found) if run not in running]
            while free and waiting and not failure and time.monotonic() < deadline:
                run, device = waiting.pop(0), free.pop()
                active[pool.submit(on_device, device, train, run)] = run, device
            if not active:
                break
            for future in wait(active, return_when=FIRST_COMPLETED).done:
                run, device = active.pop(future)
                free.append(device)
                if error := future.exception():
                    error.add_note(f"in {run}")
                    failure = failure or error
                    continue
                identity = dict(settings) | dataclasses.asdict(run)
                found.append(records.append(out, identity, future.result(), device.device_kind))
                say(line(run, future.result()))
    if failure:
        raise failure
    if waiting:
        say("time limit: stopped; the same command goes on")
    return found


def on_device(device: jax.Device, train: Callable[[Run], dict[str, Any]], run: Run):
    """Trains on one device; the setting is the thread's own."""
    with jax.default_device(device):
        return train(run)


def line(run: Run, results: Mapping[str, Any]) -> str:
    """Says how a run ended."""
    outcome = "diverged"
    if not results["diverged"]:
        outcome = (
            f"validation loss {results['valid_loss']:.4f}, "
            f"training loss {results['train_loss_last']:.4f}"
        )
    return (
        f"{run.arm}, learning rate {run.learning_rate:g}, seed {run.seed}: {outcome}, "
        f"{results['seconds']:.0f} s"
    )
