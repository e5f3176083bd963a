"""What the experiments' command lines share: which runs to make, where to record them, how long."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from examples.kit.console import print_error, say
from examples.kit.data.error import DataError
from examples.kit.options import Parser, SettingsError, local_path, number, seconds, whole
from examples.paper import report
from examples.paper.arms import Arm
from examples.paper.experiment import Experiment
from examples.paper.runner import Sweep, execute, find_devices
from examples.paper.search import Search
from examples.paper.trainer import Task


def make_parser(description: str) -> Parser:
    """Returns a parser that shows a module's docstring as it is."""
    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_search_options(parser: Parser, out: str, seeds: int = 3) -> None:
    """Adds what says which runs to make.

    Args:
        parser: Gets ``--seeds``, ``--reach``, ``--centre``, ``--fixed-rate``, ``--out`` and
            ``--time-limit``.
        out: The default of ``--out``, for the help.
        seeds: The default of ``--seeds``.
    """
    add = parser.add_argument
    add("--seeds", type=whole(1), default=seeds, help="runs at the best rate (%(default)s)")
    add("--reach", type=number(1.0), default=32.0, help="factor from the centre that ends a search")
    add(
        "--centre", type=centre, action="append", default=[], metavar="ARM=RATE", help="begin there"
    )
    add(
        "--fixed-rate", type=number(0.0, above=True), nargs="+", default=[], metavar="RATE",
        help="run every arm at each of these learning rates, without a search",
    )  # fmt: skip
    add("--out", type=local_path, help=f"JSON lines ({out})")
    add("--time-limit", type=seconds, default=math.inf, help="seconds; no run ends later")


def add_arms_option(parser: Parser, arms: Iterable[str]) -> None:
    """Adds ``--arms`` with its default."""
    parser.add_argument(
        "--arms", default=",".join(arms), help="names, most urgent first, or all (%(default)s)"
    )


def centre(text: str) -> tuple[str, float]:
    """Parses an arm and the learning rate at which its search begins."""
    name, _, rate = text.partition("=")
    return name, number(0.0, above=True)(rate)


def names_of(args: argparse.Namespace, arms: Mapping[str, Arm]) -> list[str]:
    """Returns the arms that ``--arms`` names."""
    return list(arms) if args.arms == "all" else args.arms.split(",")


def searches_of(
    args: argparse.Namespace, arms: Mapping[str, Arm], names: Sequence[str]
) -> list[Search]:
    """Returns each arm's search, most urgent first, or one for each of its fixed rates.

    Raises:
        SystemExit: For an arm that doesn't exist.
    """
    centres = dict(args.centre)
    for name in [*names, *centres]:
        try:
            arms[name]
        except KeyError:
            sys.exit(f"error: no arm {name!r}; there are {', '.join(arms)}")
        except SettingsError as error:  # a name that spells its arm out, wrongly
            sys.exit(f"error: {error}")
    if args.fixed_rate:
        return [
            Search(name, rate, args.seeds, args.reach, fixed=True)
            for rate in args.fixed_rate
            for name in names
        ]
    return [
        Search(name, centres.get(name, arms[name].centre), args.seeds, args.reach) for name in names
    ]


def conduct(
    experiment: Experiment,
    parser: Parser,
    args: argparse.Namespace,
    names: Sequence[str],
    make_task: Callable[[argparse.Namespace, str], Task],
    out: Path,
) -> int:
    """Makes the runs that are missing of `names` and prints the report; returns the exit status.

    Args:
        experiment: Has the arms.
        parser: Gave `args`.
        args: Has the options of `add_search_options`.
        names: The arms to run, most urgent first.
        make_task: From `args` and JAX's platform to the task.
        out: The file of records, where ``--out`` names none.
    """
    deadline = time.monotonic() + args.time_limit
    if args.fixed_rate:
        parser.refuse_idle(args, "beside --fixed-rate", "centre", "reach")
    searches = searches_of(args, experiment.arms, names)
    try:
        platform, devices = find_devices()
        task = make_task(args, platform)
    except (DataError, SettingsError) as error:
        print_error(str(error))
        return 1
    out = args.out or out
    say(f"{len(devices)} worker(s) on {platform}, records in {out}")
    try:
        state = Sweep(experiment.module, task, searches, out, deadline)
    except ValueError as error:  # a damaged file of records
        sys.exit(f"error: {error}")
    status = execute(state, devices)
    if state.records:
        say(report.tables(state.records, names))
    return status
