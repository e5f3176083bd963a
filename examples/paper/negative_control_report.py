"""The table and the figure of the negative control's records.

python -m examples.paper.negative_control_report examples/paper/results/negative_control.jsonl
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.kit import records
from examples.kit.console import say
from examples.kit.figure import Axes, Figure
from examples.kit.options import local_path
from examples.paper.llama_report import arm_names, by_task
from examples.paper.sweep import RATIO, Record, select, summarise, valid_loss

HEAD = "| arm | best rate | interior | valid. loss | test loss | test accuracy, % | seeds | score |"
RULE = "|---|---|---|---|---|---|---|---|"


def table(found: Sequence[Record], arms: Sequence[str] | None = None) -> str:
    """Returns the table as Markdown: medians over the seeds at the best rate (min to max).

    Args:
        found: Records of one task.
        arms: Which arms, in this order; by default all.
    """
    lines = [line(found, name) for name in arms or arm_names(found)]
    return "\n".join([HEAD, RULE, *filter(None, lines)])


def line(found: Sequence[Record], arm: str) -> str | None:
    """Returns a row of the table; a best rate on the edge is marked, since it settles nothing."""
    row = summarise(found, arm)
    if row is None:
        return None
    rate = row.best.learning_rate
    scores = values(found, arm, "alignment_over_training", rate)
    cells = [
        arm,
        f"{rate:g}",
        "yes" if row.best.interior else "**no, edge**",
        spread(row.losses, 4),
        spread(values(found, arm, "test_loss", rate), 4),
        spread([100 * share for share in values(found, arm, "test_accuracy", rate)], 2),
        str(len(row.losses)),
        f"{statistics.mean(scores):.3f}" if scores else "",
    ]
    return f"| {' | '.join(cells)} |"


def values(found: Sequence[Record], arm: str, name: str, rate: float) -> list[float]:
    """A result of every seed of an arm at a rate, where there is one."""
    runs = select(found, {"arm": arm, "learning_rate": rate})
    results = [record["results"][name] for record in runs]
    return [float(result) for result in results if result is not None]


def by_rate(found: Sequence[Record], arms: Sequence[str] | None = None) -> str:
    """Returns every arm's median validation loss (seeds) by rate, and what the medians choose.

    One seed chooses the rate that `table` shows; here one can see what more seeds say.
    """
    names = [name for name in arms or arm_names(found) if name in arm_names(found)]
    rates = sorted({record["settings"]["learning_rate"] for record in found})
    heads = ["arm", *(f"{rate:g}" for rate in rates), "lowest at", "test accuracy there, %"]
    lines = [heads, ["---"] * len(heads)]
    for name in names:
        losses = grid(found, name)
        cells = [
            f"{statistics.median(losses[rate]):.4f} ({len(losses[rate])})" if rate in losses else ""
            for rate in rates
        ]
        rate = settled(losses)
        edge = "" if {rate / RATIO, rate * RATIO} <= complete(losses).keys() else " **(edge)**"
        shares = [100 * share for share in values(found, name, "test_accuracy", rate)]
        lines.append([name, *cells, f"{rate:g}{edge}", spread(shares, 2)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def complete(losses: Mapping[float, list[float]]) -> dict[float, float]:
    """The median loss at each rate that was run from the most seeds."""
    most = max(map(len, losses.values()))
    return {rate: statistics.median(seen) for rate, seen in losses.items() if len(seen) == most}


def settled(losses: Mapping[float, list[float]]) -> float:
    """The rate with the lowest median loss of those that were run from the most seeds."""
    medians = complete(losses)
    return min(medians, key=medians.__getitem__)


def grid(found: Sequence[Record], arm: str) -> dict[float, list[float]]:
    """Validation losses of an arm's seeds, by rate."""
    losses: dict[float, list[float]] = {}
    for record in select(found, {"arm": arm}):
        losses.setdefault(record["settings"]["learning_rate"], []).append(valid_loss(record))
    return losses


def spread(results: Sequence[float], digits: int) -> str:
    """Writes median and range."""
    low, middle, high = min(results), statistics.median(results), max(results)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def draw_losses(axes: Axes, found: Sequence[Record]) -> None:
    """Draws validation loss over learning rate: seeds as points, a line through the medians.

    The line leaves out rates that were run from fewer seeds than others.
    """
    markers = itertools.cycle("osv^D<>pX")
    rates = sorted({record["settings"]["learning_rate"] for record in found})
    for name in arm_names(found):
        points = grid(found, name)
        middle = sorted((rate, x) for rate, x in complete(points).items() if math.isfinite(x))
        seeds = [(rate, x) for rate, seen in points.items() for x in seen if math.isfinite(x)]
        if middle:
            [drawn] = axes.plot(*zip(*middle, strict=True), next(markers) + "-", label=name)
            axes.plot(*zip(*seeds, strict=True), ".", color=drawn.get_color(), alpha=0.35)
    axes.set(xscale="log", xlabel="peak learning rate", yscale="log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_ylabel("validation loss, nats an image (line: median)")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.03, 0.05, 0.1, 0.2, 0.5, 1, 2) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend(fontsize="small")


def draw_accuracy(axes: Axes, found: Sequence[Record]) -> None:
    """Draws test accuracies at the rate of the lowest median loss, and their median as a bar."""
    names = arm_names(found)
    for place, name in enumerate(names):
        rate = settled(grid(found, name))
        shares = [100 * share for share in values(found, name, "test_accuracy", rate)]
        axes.plot(shares, [place] * len(shares), "o", alpha=0.6)
        axes.plot(statistics.median(shares), place, "k|", markersize=18)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="test accuracy, %, at the rate of the lowest median loss")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and writes the figure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="a file of records")
    parser.add_argument(
        "--figure", type=local_path, help="the figure (default: beside the records)"
    )
    args = parser.parse_args(argv)
    groups = by_task(records.read(args.records))
    if not groups:
        sys.exit(f"error: {args.records} has no records")
    figure = Figure(figsize=(12, 4.5 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (left, right), (task, found) in zip(panels, groups.items(), strict=True):
        title = ", ".join(f"{name} {value}" for name, value in json.loads(task).items())
        say(f"{title}\n\n{table(found)}\n\nmedian validation loss (seeds)\n\n{by_rate(found)}\n")
        draw_losses(left, found)
        left.set_title(title, fontsize="small", loc="left")
        draw_accuracy(right, found)
    path = args.figure or args.records.with_suffix(".png")
    figure.savefig(path, dpi=80)
    say(f"figure: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
