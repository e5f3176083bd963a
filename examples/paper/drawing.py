"""What the experiments that draw their own figures share: options, and how a picture is written."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.kit import records
from examples.kit.figure import Figure
from examples.kit.options import Parser, local_path, whole


def add_figure_options(parser: Parser, out: Path) -> None:
    """Adds ``--out`` with its default, ``--plot`` and ``--images``."""
    add, images = parser.add_argument, Path("docs/images")
    add("--out", type=local_path, default=out, help="file of records (%(default)s)")
    add("--plot", action="store_true", help="draw the records instead of running")
    add("--images", type=local_path, default=images, help="of the figures (%(default)s)")


def records_to_draw(parser: Parser, args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Returns the records that ``--plot`` draws; None where it isn't given.

    Raises:
        SystemExit: If there are none, or if ``--images`` is given without ``--plot``.
    """
    if not args.plot:
        parser.refuse_idle(args, "without --plot", "images")
        return None
    found = records.read(args.out)
    if not found:
        parser.exit(2, f"error: no records in {args.out}\n")
    return found


def multiple_of(count: int) -> Callable[[str], int]:
    """Returns a parser of numbers of steps that `count` divides."""

    def parse(text: str) -> int:
        steps = int(whole(1)(text))
        if steps % count:
            raise argparse.ArgumentTypeError(f"must be a multiple of {count}, got {steps}")
        return steps

    return parse


def save(figure: Figure, path: Path, dpi: int) -> Path:
    """Writes a figure and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path
