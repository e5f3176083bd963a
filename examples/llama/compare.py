"""Says whether Magma helps an optimizer on your own text, beside the control that tells why.

    python -m examples.llama.compare --data FILE_OR_FOLDER --optimizer adam

trains a small Llama with the optimizer as it is, with Magma, with SkipUpdate, and with attention
and MLP updates times a constant: Magma's mean effect without its coins and scores. Each gets the
same search: learning rates in steps of two until the best lies between two worse ones, all from
seed 0. Then each runs at its best rate from seeds that chose nothing; what is compared are these,
seed by seed, as the same seed reads the same text in the same order. Under ten minutes on two CPU
cores; on GPUs the runs are spread over all of them, and larger sizes make sense: `--size 40m`.

The runs, the curves and the verdict are in the folder `--out`. Repeating the command goes on where
it stopped.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from examples.kit.console import print_error, print_warning, say
from examples.kit.data.error import DataError
from examples.kit.figure import Figure
from examples.kit.optimizers import LEARNING_RATES, MOMENTUM_DECAYS, direction
from examples.kit.options import Parser, SettingsError, local_path, number, seconds, whole
from examples.kit.records import data_name
from examples.llama import verdict
from examples.paper import RESULTS, report, table1_llama
from examples.paper.arms import Arm, family, then
from examples.paper.experiment import Experiment
from examples.paper.runner import Sweep, execute, find_devices
from examples.paper.search import RATIO, Search, summarise
from examples.paper.tasks import llama as laboratory
from examples.paper.tasks.text import read
from magma_optax import attention_and_mlp, control, mean_multiplier

OPTIMIZERS = [name for name in LEARNING_RATES if name != "adamw"]  # adam, without decay
FACTORS = {"/4": 0.25, "/2": 0.5, "": 1.0, "*2": 2.0}  # of the constant, where it is tuned


def arms_of(name: str) -> dict[str, Arm]:
    """Returns what is compared on an optimizer; what shrinks updates begins at twice its rate."""

    def base():
        return direction(name)

    rate = LEARNING_RATES[name][0]
    arms = family(name, base, rate)

    def constant(factor: float) -> Arm:
        multiplier = factor * mean_multiplier(MOMENTUM_DECAYS[name])
        return Arm(then(base, lambda _: control(multiplier, where=attention_and_mlp)), RATIO * rate)

    return {
        **{arm: arms[arm] for arm in (name, f"{name}+magma", f"{name}+skip")},
        **{f"{name}+constant{sign}": constant(factor) for sign, factor in FACTORS.items()},
    }


@dataclasses.dataclass(frozen=True)
class Task(laboratory.Task):
    """A Llama on a text that is known by its digest, Python's own too."""

    def settings(self) -> dict[str, Any]:
        """Returns what a record says about the task."""
        return super().settings() | {"experiment": "llama_compare"}


ARMS = {arm: made for name in OPTIMIZERS for arm, made in arms_of(name).items()}
EXPERIMENT = Experiment("examples.llama.compare", Task, ARMS)


def make_parser() -> Parser:
    """Returns the command line's parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table1_llama.add_task_options(parser)
    add = parser.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="the base (%(default)s)")
    add("--tune-multiplier", action="store_true", help="also try a quarter, half, twice of it")
    add("--seeds", type=whole(1), default=3, help="fresh ones at the best rates (%(default)s)")
    add("--reach", type=number(1.0), default=32.0, help="factor from the centre that ends a search")
    add("--out", type=local_path, help="folder (runs/compare-OPTIMIZER-SIZE-DATA)")
    add("--time-limit", type=seconds, default=math.inf, help="seconds; no run ends later")
    return parser


def names_of(args: argparse.Namespace) -> list[str]:
    """Returns the arms to compare, most urgent first."""
    signs = sorted(FACTORS, key=bool) if args.tune_multiplier else [""]  # the plain one first
    constants = [f"{args.optimizer}+constant{sign}" for sign in signs]
    return [args.optimizer, f"{args.optimizer}+magma", *constants, f"{args.optimizer}+skip"]


def folder_of(args: argparse.Namespace) -> Path:
    """Returns where the comparison is kept.

    Raises:
        SettingsError: If that is among the package's own records, or is a file.
    """
    data = "python" if args.data is None else data_name(args.data)
    out = args.out or Path("runs") / f"compare-{args.optimizer}-{args.size}-{data}"
    if out.resolve().is_relative_to(RESULTS.resolve()):
        raise SettingsError(f"--out {out} is where the package keeps its own records; name another")
    if out.exists() and not out.is_dir():
        raise SettingsError(f"--out {out} is a file; name a folder")
    return out


def make_task(args: argparse.Namespace, platform: str) -> Task:
    """Reads the text and returns what all runs have in common.

    Raises:
        DataError: If it can't be used.
    """
    task = table1_llama.unread_task(args, platform)
    if args.steps is None and args.size == "nano":
        task = dataclasses.replace(task, steps=300)
    data = read(
        task.data, seq_len=task.seq_len, batch_size=task.batch_size, packing=task.packing
    )  # fmt: skip
    say(data.name)
    return Task(**dataclasses.asdict(task) | {"digest": data.digest})


@contextlib.contextmanager
def watched(sweep: Sweep, names: Sequence[str]) -> Iterator[None]:
    """Shows what is known so far, on a terminal, below the lines of the runs."""
    if not sys.stdout.isatty():
        yield
        return

    def table() -> Table:
        shown = Table("arm", "best rate so far", "between two worse", "runs", "loss")
        for name in names:
            row = summarise(sweep.records, name)
            done = sum(record["settings"]["arm"] == name for record in list(sweep.records))
            cells = [f"{row.best.learning_rate:g}", "yes" if row.best.interior else "not yet",
                     str(done), f"{row.best.loss:.4f}"] if row else ["", "", "0", ""]  # fmt: skip
            shown.add_row(name, *cells)
        return shown

    with Live(get_renderable=table, refresh_per_second=1):
        yield


def conclude(sweep: Sweep, names: Sequence[str], seeds: int, folder: Path) -> None:
    """Prints the verdict, writes it down and draws the curves."""
    found = verdict.judge(sweep.records, names[0], names, seeds)
    say(f"\n{report.tables(sweep.records, names)}\n\n{verdict.table(found)}\n")
    say(f"runs, curves, verdict: {folder}")
    say(found.sentence)
    figure = Figure(figsize=(7, 5), layout="constrained")
    mine = [record for record in sweep.records if record["settings"]["arm"] in names]
    report.draw(figure.subfigures(), mine, f"{names[0]} on {data_name(sweep.task.data)}")
    try:
        text = json.dumps(dataclasses.asdict(found), indent=2) + "\n"
        (folder / "verdict.json").write_text(text)
        figure.savefig(folder / "curves.png", dpi=120)
    except OSError as error:  # a full disk: the verdict has been said
        print_warning(f"{folder} can't be written: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compares as the command line says; returns the exit status."""
    args = make_parser().parse_args(argv)
    deadline = time.monotonic() + args.time_limit
    names = names_of(args)
    try:
        folder = folder_of(args)
        platform, devices = find_devices()
        task = make_task(args, platform)
        folder.mkdir(parents=True, exist_ok=True)
        # Seed 0 chooses the rates; the others are the fresh ones.
        searches = [Search(name, ARMS[name].centre, args.seeds + 1, args.reach) for name in names]
        sweep = Sweep(EXPERIMENT.module, task, searches, folder / "records.jsonl", deadline)
    except (SettingsError, DataError, ValueError, OSError) as error:
        print_error(str(error))
        return 2
    say(f"{len(devices)} worker(s) on {platform}; {len(sweep.records)} runs are recorded already")
    with watched(sweep, names):
        status = execute(sweep, devices)
    if sweep.records:
        conclude(sweep, names, args.seeds, folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
