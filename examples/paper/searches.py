"""The searches that a command line asks for."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from examples.kit.options import Parser, number, whole
from examples.paper.arms import Arm, check_names
from examples.paper.sweep import Search


def add_search_options(parser: Parser, seeds: int = 3) -> None:
    """Adds ``--seeds`` (by default `seeds`), ``--reach`` and ``--centre``."""
    add = parser.add_argument
    add("--seeds", type=whole(1), default=seeds, help="runs at the best rate (%(default)s)")
    add("--reach", type=number(1.0), default=32.0, help="factor from the centre that ends a search")
    add(
        "--centre", type=centre, action="append", default=[], metavar="ARM=RATE", help="begin there"
    )


def centre(text: str) -> tuple[str, float]:
    """Parses an arm and the learning rate at which its search begins."""
    name, _, rate = text.partition("=")
    return name, number(0.0, above=True)(rate)


def at_rates(searches: Sequence[Search], rates: Sequence[float]) -> list[Search]:
    """Returns the arms and seeds of `searches` at each of `rates`, without a search."""
    return [
        dataclasses.replace(search, centre=rate, fixed=True)
        for rate in rates
        for search in searches
    ]


def make_searches(
    args: argparse.Namespace, arms: Mapping[str, Arm], names: Sequence[str]
) -> list[Search]:
    """Returns the search of each of `names`, most urgent first.

    Raises:
        SystemExit: For an arm that doesn't exist.
    """
    centres = dict(args.centre)
    check_names([*names, *centres], arms)
    return [
        Search(name, centres.get(name, arms[name].centre), args.seeds, args.reach) for name in names
    ]
