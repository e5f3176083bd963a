"""The table and the learning-rate curves of a sweep's records.

    python -m examples.paper.llama_report examples/paper/results/llama_40m.jsonl

prints a table for each task in the file and draws the curves beside it.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.kit import records
from examples.kit.console import say
from examples.kit.figure import Axes, Figure, SubFigure, colormaps
from examples.kit.options import local_path
from examples.paper.sweep import TUNED, Record, Row, losses, summarise

OWN = ("arm", "learning_rate", "seed")  # settings of one run; the others are the task's
HEAD = "| arm | best rate | interior | median loss | min to max | perplexity | seeds | alignment |"
HEADROOM = 0.1  # of a panel, nats
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


def draw(figure: SubFigure, found: Sequence[Record], title: str) -> None:
    """Draws validation loss over learning rate: a panel a base, a line an arm."""
    panels = families(arm_names(found))
    figure.suptitle(textwrap.fill(title, 110), fontsize="small")
    axes = figure.subplots(math.ceil(len(panels) / 2), min(2, len(panels)), squeeze=False).ravel()
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    kinds = {  # what is done to the base: it looks alike in all panels
        name: name.removeprefix(family) for family, names in panels.items() for name in names
    }
    order = list(dict.fromkeys(kinds.values()))
    styles = [*zip("osv^D<>pX*", colormaps["tab10"].colors, strict=True)]
    style = {name: styles[order.index(kind) % len(styles)] for name, kind in kinds.items()}
    for ax, (family, names) in zip(axes, panels.items(), strict=False):
        names = sorted(names, key=lambda name: order.index(kinds[name]))
        draw_family(ax, found, {name: style[name] for name in names})
        # Above the panel: within, it covers lines.
        ax.legend(
            title=family, fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1)
        )


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Groups arms by their base; those that are alone on theirs share the last group."""
    bases = [re.split("[+/]", name)[0] for name in names]
    groups: dict[str, list[str]] = {base: [] for base in bases if bases.count(base) > 1}
    for base, name in zip(bases, names, strict=True):
        groups.setdefault(base if base in groups else "others", []).append(name)
    return groups


def draw_family(axes: Axes, found: Sequence[Record], style: Mapping[str, tuple[str, Any]]) -> None:
    """Draws each arm's tuning seed as a line and the other seeds as points.

    The panel ends a little above the best of the worst arm: diverging runs leave it.
    """
    worst, tried = -math.inf, set()
    for name, (marker, color) in style.items():
        grid = {rate: loss for rate, loss in losses(found, name).items() if math.isfinite(loss)}
        rates = sorted(grid)
        worst = max([worst, *sorted(grid.values())[:1]])
        tried.update(rates)
        axes.plot(rates, [grid[rate] for rate in rates], marker=marker, color=color, label=name)
        others = [
            (record["settings"]["learning_rate"], float(record["results"]["valid_loss"]))
            for record in found
            if record["settings"]["arm"] == name and record["settings"]["seed"] != TUNED
        ]
        axes.plot(*zip(*others, strict=True), ".", color=color) if others else None
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss (nats a token)")
    axes.minorticks_off()
    axes.set_xticks(sorted(tried), [f"{rate:g}" for rate in sorted(tried)])
    if math.isfinite(worst):
        axes.set_ylim(top=worst + HEADROOM)


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
    parser.add_argument(
        "--figure", type=local_path, help="the figure (default: beside the records)"
    )
    args = parser.parse_args(argv)
    groups = by_task(records.read(args.records))
    if not groups:
        sys.exit(f"error: {args.records} has no records")
    heights = [math.ceil(len(families(arm_names(found))) / 2) for found in groups.values()]
    figure = Figure(figsize=(10, 4 * sum(heights)), layout="constrained")
    parts = figure.subfigures(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    for part, (task, found) in zip(parts, groups.items(), strict=True):
        title = ", ".join(f"{name} {value}" for name, value in json.loads(task).items())
        say(f"{title}\n\n{table(found)}\n")
        draw(part, found, title)
    path = args.figure or args.records.with_suffix(".png")
    figure.savefig(path, dpi=120)
    say(f"curves: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
