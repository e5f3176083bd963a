"""The table and the figure of the negative control's records.

python -m examples.paper.negative_control_report examples/paper/results/negative_control.jsonl
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.paper import records
from examples.paper.llama_report import arm_names, by_task
from examples.paper.sweep import Record, select, summarise, valid_loss

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
    scores = values(found, arm, "alignment_over_training")
    cells = [
        arm,
        f"{row.best.learning_rate:g}",
        "yes" if row.best.interior else "**no, edge**",
        spread(row.losses, 4),
        spread(values(found, arm, "test_loss"), 4),
        spread([100 * share for share in values(found, arm, "test_accuracy")], 2),
        str(len(row.losses)),
        f"{statistics.mean(scores):.3f}" if scores else "",
    ]
    return f"| {' | '.join(cells)} |"


def values(found: Sequence[Record], arm: str, name: str) -> list[float]:
    """A result of every seed at the arm's best rate, where there is one."""
    rate = summarise(found, arm).best.learning_rate
    at_best = select(found, {"arm": arm, "learning_rate": rate})
    results = [record["results"][name] for record in at_best]
    return [float(result) for result in results if result is not None]


def by_rate(found: Sequence[Record], arms: Sequence[str] | None = None) -> str:
    """Returns the median validation loss of every arm at every rate, and the number of seeds.

    One seed chooses the rate that `table` shows; here one can see what more seeds say.
    """
    names = [name for name in arms or arm_names(found) if name in arm_names(found)]
    losses = {name: grid(found, name) for name in names}
    rates = sorted({rate for seen in losses.values() for rate in seen})
    lines = ["| arm |" + "".join(f" {rate:g} |" for rate in rates), "|---" * (len(rates) + 1) + "|"]
    for name, seen in losses.items():
        cells = [
            f"{statistics.median(seen[rate]):.4f} ({len(seen[rate])})" if rate in seen else ""
            for rate in rates
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


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


def draw_losses(axes: Axes, found: Sequence[Record], title: str) -> None:
    """Draws the median validation loss over learning rate, one line an arm, seeds as points."""
    markers = itertools.cycle("osv^D<>pX")
    for name in arm_names(found):
        points = sorted(grid(found, name).items())
        middle = [(rate, statistics.median(losses)) for rate, losses in points]
        [drawn] = axes.plot(*zip(*middle, strict=True), next(markers) + "-", label=name)
        seeds = [(rate, loss) for rate, losses in points for loss in losses]
        axes.plot(*zip(*seeds, strict=True), ".", color=drawn.get_color(), alpha=0.3)
    axes.set(xscale="log", xlabel="peak learning rate", yscale="log")
    axes.set_ylabel("validation loss, nats an image (line: median)")
    axes.set_title(title, fontsize="x-small")
    axes.legend(fontsize="small")


def draw_accuracy(axes: Axes, found: Sequence[Record]) -> None:
    """Draws each seed's test accuracy at the best rate, one line an arm, the median as a bar."""
    names = arm_names(found)
    for place, name in enumerate(names):
        shares = [100 * share for share in values(found, name, "test_accuracy")]
        axes.plot(shares, [place] * len(shares), "o", alpha=0.6)
        axes.plot(statistics.median(shares), place, "k|", markersize=18)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="test accuracy at the best rate, % (a point a seed, bar: median)")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and writes the figure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="a file of records")
    parser.add_argument("--figure", type=Path, help="the figure (default: beside the records)")
    args = parser.parse_args(argv)
    groups = by_task(records.read(args.records))
    if not groups:
        sys.exit(f"error: {args.records} has no records")
    figure = Figure(figsize=(12, 4.5 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (left, right), (task, found) in zip(panels, groups.items(), strict=True):
        title = ", ".join(f"{name} {value}" for name, value in json.loads(task).items())
        print(f"{title}\n\n{table(found)}\n\nmedian validation loss (seeds)\n\n{by_rate(found)}\n")
        draw_losses(left, found, title)
        draw_accuracy(right, found)
    path = args.figure or args.records.with_suffix(".png")
    figure.savefig(path, dpi=80)
    print(f"figure: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
