"""The table and the figure of the negative control's records.

python -m examples.paper.negative_control_report examples/paper/results/negative_control.jsonl
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.paper import records
from examples.paper.llama_report import arm_names, by_task, draw
from examples.paper.sweep import Record, select, summarise

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


def spread(results: Sequence[float], digits: int) -> str:
    """Writes median and range."""
    low, middle, high = min(results), statistics.median(results), max(results)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


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
        print(f"{title}\n\n{table(found)}\n")
        draw(left, found, title)
        left.set(ylabel="validation loss (nats an image)", yscale="log")
        draw_accuracy(right, found)
    path = args.figure or args.records.with_suffix(".png")
    figure.savefig(path, dpi=80)
    print(f"figure: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
