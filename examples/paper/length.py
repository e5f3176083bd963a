"""How an arm's gap to Adam changes with the length of a run, from the records of the 40M Llama.

    python -m examples.paper.length

prints a table and draws a figure. Each arm, and Adam, is taken at the best rate of seed 0 for each
length. What was recorded on other data is a line of its own in the table and joins the same curve.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from examples.kit import records
from examples.kit.console import say
from examples.kit.figure import Axes, Figure
from examples.kit.options import Parser, local_path
from examples.paper import RESULTS
from examples.paper.drawing import save
from examples.paper.report import markdown
from examples.paper.search import Record, best, losses, losses_by_seed, select

FILES = ("llama_40m.jsonl", "llama_60m.jsonl")  # of one model: the data's vocabulary is small
BASE = "adam"
ARMS = (
    *("adam+magma", "adam+constant", "adam+constant*mask", "c_adam"),
    *("adam+constant@0.0693", "c_adam+constant@0.1386"),
)


class Point(NamedTuple):
    """An arm beside Adam at one length.

    Attributes:
        arm: Its name.
        tokens: Of the run.
        data: What it read.
        rates: The arm's best learning rate and Adam's.
        gaps: Its validation loss less Adam's, for each seed that both have.
        interior: Whether both rates lie between two worse ones.
    """

    arm: str
    tokens: int
    data: str
    rates: tuple[float, float]
    gaps: list[float]
    interior: bool


def points(found: Sequence[Record], arms: Iterable[str] = ARMS) -> list[Point]:
    """Returns the points of the arms, the shortest runs first."""
    lengths = {(tokens_of(record), record["settings"]["data"]) for record in found}
    made = []
    for tokens, data in sorted(lengths):
        alike = [record for record in select(found, {"data": data}) if tokens_of(record) == tokens]
        if not losses(alike, BASE):
            continue
        base = best(alike, BASE, allow_edge=True)
        theirs = losses_by_seed(alike, BASE, base.learning_rate)
        for arm in arms:
            if not losses(alike, arm):
                continue
            chosen = best(alike, arm, allow_edge=True)
            ours = losses_by_seed(alike, arm, chosen.learning_rate)
            made.append(
                Point(
                    arm,
                    tokens,
                    data,
                    rates=(chosen.learning_rate, base.learning_rate),
                    gaps=[ours[seed] - theirs[seed] for seed in ours if seed in theirs],
                    interior=chosen.interior and base.interior,
                )
            )
    return made


def tokens_of(record: Record) -> int:
    """Returns how many tokens a run was trained on, repeats counted."""
    settings = record["settings"]
    return settings["steps"] * settings["batch_size"] * settings["seq_len"]


def table(made: Sequence[Point]) -> str:
    """Returns the points as Markdown."""
    heads = ["tokens", "data", "arm", "best rate", "Adam's", "both interior", "gap, by seed"]
    lines = [
        [
            *(f"{point.tokens / 1e6:.0f} M", point.data, point.arm),
            *(f"{rate:g}" for rate in point.rates),
            "yes" if point.interior else "no",
            ", ".join(f"{gap:+.3f}" for gap in point.gaps),
        ]
        for point in made
    ]
    return markdown([heads, ["---"] * len(heads), *lines])


def draw(axes: Axes, made: Sequence[Point]) -> None:
    """Draws the medians as lines and each seed as a mark, hollow where a rate is on the edge."""
    for number, arm in enumerate(dict.fromkeys(point.arm for point in made)):
        mine, color = [point for point in made if point.arm == arm], f"C{number}"
        medians = [statistics.median(point.gaps) for point in mine]
        axes.plot([point.tokens for point in mine], medians, color=color, label=arm)
        for point in mine:
            face = color if point.interior else "none"
            xs = [point.tokens] * len(point.gaps)
            axes.scatter(xs, point.gaps, s=24, facecolors=face, edgecolors=color, zorder=3)
    ticks = sorted({point.tokens for point in made})
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens of training", ylabel="validation loss less Adam's")
    axes.set_xticks(ticks, [f"{tokens / 1e6:.0f} M" for tokens in ticks])
    axes.minorticks_off()
    axes.legend()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and draws the figure; returns the exit status."""
    parser = Parser(prog="python -m examples.paper.length", description=__doc__.split("\n")[0])
    add, image = parser.add_argument, Path("docs/images/length.png")
    add("--figure", type=local_path, default=image, help="where to draw (%(default)s)")
    args = parser.parse_args(argv)
    made = points([record for name in FILES for record in records.read(RESULTS / name)])
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    draw(figure.subplots(), made)
    say(table(made))
    say(f"\ndrawn to {save(figure, args.figure, dpi=100)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
