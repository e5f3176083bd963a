"""The table and the learning-rate curves of a sweep's records.

    python -m examples.paper.llama_report examples/paper/results/llama_40m.jsonl

prints a table for each task in the file and draws the curves beside it.
"""

import argparse
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.paper import records
from examples.paper.sweep import Record, Row, losses, summarise

OWN = ("arm", "learning_rate", "seed")  # settings of one run; the others are the task's
HEAD = "| arm | best rate | interior | median loss | min to max | perplexity | seeds | alignment |"
RULE = "|---|---|---|---|---|---|---|---|"


def table(found: Sequence[Record], arms: Sequence[str] | None = None) -> str:
    """Returns the table as Markdown, one line an arm.

    Args:
        found: Records of one task.
        arms: Which arms, in this order; by default all, the best first.
    """
    names = arms or arm_names(found)
    rows = [row for name in names if (row := summarise(found, name))]
    if arms is None:
        rows.sort(key=lambda row: row.median)
    return "\n".join([HEAD, RULE, *map(line, rows)])


def line(row: Row) -> str:
    """Returns a row of the table; a best rate on the edge is marked, since it settles nothing."""
    if not math.isfinite(row.best.loss):
        return f"| {row.arm} | diverged at every rate | | | | | | |"
    cells = [
        row.arm,
        f"{row.best.learning_rate:g}",
        "yes" if row.best.interior else "**no, edge**",
        f"{row.median:.4f}",
        f"{min(row.losses):.4f} to {max(row.losses):.4f}",
        f"{math.exp(row.median):.2f}",
        str(len(row.losses)),
        "" if row.alignment is None else f"{row.alignment:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def arm_names(found: Sequence[Record]) -> list[str]:
    """Names of the arms, in the order in which they were first recorded."""
    return list(dict.fromkeys(record["settings"]["arm"] for record in found))


def draw(axes: Axes, found: Sequence[Record], title: str) -> None:
    """Draws validation loss over learning rate, one line an arm, other seeds as points."""
    markers, colors = itertools.cycle("osv^D<>pX"), itertools.cycle(colormaps["tab20"].colors)
    for name in arm_names(found):
        grid = {rate: loss for rate, loss in losses(found, name).items() if math.isfinite(loss)}
        rates = sorted(grid)
        color = next(colors)
        axes.plot(
            rates, [grid[rate] for rate in rates], next(markers) + "-", color=color, label=name
        )
        others = [
            (record["settings"]["learning_rate"], float(record["results"]["valid_loss"]))
            for record in found
            if record["settings"]["arm"] == name and record["settings"]["seed"] != 0
        ]
        axes.plot(*zip(*others, strict=True), ".", color=color) if others else None
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss (nats a token)")
    axes.set_title(textwrap.fill(title, 95), fontsize="small")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def by_task(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Groups records by the settings that all runs of a sweep share."""
    groups: dict[str, list[Record]] = {}
    for record in found:
        shared = {name: value for name, value in record["settings"].items() if name not in OWN}
        groups.setdefault(json.dumps(shared), []).append(record)
    return groups


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and writes the figure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="a file of records")
    parser.add_argument("--figure", type=Path, help="the figure (default: beside the records)")
    args = parser.parse_args(argv)
    groups = by_task(records.read(args.records))
    if not groups:
        sys.exit(f"error: {args.records} has no records")
    figure = Figure(figsize=(8.5, 5 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axes, (task, found) in zip(panels, groups.items(), strict=True):
        title = ", ".join(f"{name} {value}" for name, value in json.loads(task).items())
        print(f"{title}\n\n{table(found)}\n")
        draw(axes, found, title)
    path = args.figure or args.records.with_suffix(".png")
    figure.savefig(path, dpi=120)
    print(f"curves: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
