"""The tables and the figure of an experiment's records.

    python -m examples.paper.report examples/paper/results/llama_40m.jsonl

prints two tables for each task in the file and draws its losses beside it: each arm at its best
rate, and each arm at every rate. `--against ARM` prints a third, in which seed 0 chooses each arm's
rate and the other seeds alone say how good it is, seed by seed beside ARM.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples.kit import records
from examples.kit.console import say
from examples.kit.figure import Axes, Figure, SubFigure, colormaps
from examples.kit.options import local_path
from examples.paper.search import (
    RATIO,
    TUNED,
    Record,
    losses,
    losses_by_seed,
    select,
    summarise,
    valid_loss,
)

OWN = ("arm", "learning_rate", "seed")  # settings of one run; the others are the task's
HEADROOM = 0.1  # of a panel above the best of the worst arm, in its loss


class Column(NamedTuple):
    """How a result is shown.

    Attributes:
        title: Of the column.
        digits: After the point.
        scale: What the result is multiplied by.
    """

    title: str
    digits: int
    scale: float = 1.0


class Style(NamedTuple):
    """How an arm is drawn, as matplotlib takes it."""

    marker: str
    color: Any
    linestyle: str


COLUMNS = {
    "valid_loss": Column("validation loss", 4),
    "perplexity": Column("perplexity", 2),
    "test_loss": Column("test loss", 4),
    "test_accuracy": Column("test accuracy, %", 2, 100.0),
}


# ---------------------------------------------------------------------------------------------
# Tables


def tables(found: Sequence[Record], arms: Sequence[str] | None = None) -> str:
    """Returns both tables as Markdown.

    Args:
        found: Records of one task.
        arms: Which arms, in this order; by default all, the best first.
    """
    names = [name for name in arms or arm_names(found) if name in arm_names(found)]
    if arms is None:
        names.sort(key=lambda name: summarise(found, name).median)
    return (
        f"{best_table(found, names)}\n\nmedian validation loss (seeds) at each learning rate; seed "
        f"{TUNED} alone chose the rates above\n\n"
        f"{rate_table(found, names)}"
    )


def best_table(found: Sequence[Record], names: Sequence[str]) -> str:
    """Returns each arm at the rate that seed 0 chose: medians over the seeds (min to max)."""
    shown = {name: column for name, column in COLUMNS.items() if values(found, name)}
    titles = [column.title for column in shown.values()]
    heads = ["arm", "best rate", "interior", *titles, "seeds", "score"]
    lines = [heads, ["---"] * len(heads)]
    return markdown([*lines, *(best_line(found, name, shown) for name in names)])


def best_line(found: Sequence[Record], arm: str, shown: Mapping[str, Column]) -> list[str]:
    """Returns an arm's cells; a best rate on the edge is marked, since it settles nothing."""
    row = summarise(found, arm)
    if not math.isfinite(row.best.loss):
        return [arm, "diverged at every rate", *[""] * (len(shown) + 3)]
    runs = select(found, {"arm": arm, "learning_rate": row.best.learning_rate})
    cells = [covered(runs, name, column) for name, column in shown.items()]
    scores = values(runs, "alignment_over_training") or values(runs, "alignment")
    return [
        arm,
        f"{row.best.learning_rate:g}",
        "yes" if row.best.interior else "**no, edge**",
        *cells,
        str(len(row.losses)),
        f"{statistics.mean(scores):.3f}" if scores else "",
    ]


def rate_table(found: Sequence[Record], names: Sequence[str]) -> str:
    """Returns each arm's median validation loss (seeds) by rate, and what the medians choose.

    One seed chooses the rate that `best_table` shows; here one can see what more seeds say.
    """
    grids = {name: losses_by_rate(found, name) for name in names}
    rates = sorted({rate for grid in grids.values() for rate in grid})
    heads = ["arm", *(f"{rate:g}" for rate in rates), "lowest at"]
    accuracy = COLUMNS["test_accuracy"] if values(found, "test_accuracy") else None
    if accuracy:
        heads.append(f"{accuracy.title}, there")
    lines = [heads, ["---"] * len(heads)]
    for name, grid in grids.items():
        cells = [
            f"{statistics.median(grid[rate]):.4f} ({len(grid[rate])})" if rate in grid else ""
            for rate in rates
        ]
        medians = comparable(found, name)
        rate = settled(medians)
        edge = "" if {rate / RATIO, rate * RATIO} <= medians.keys() else " **(edge)**"
        line = [name, *cells, f"{rate:g}{edge}"]
        if accuracy:
            runs = select(found, {"arm": name, "learning_rate": rate})
            line.append(covered(runs, "test_accuracy", accuracy))
        lines.append(line)
    return markdown(lines)


def fresh_table(found: Sequence[Record], names: Sequence[str], against: str) -> str:
    """Returns each arm's losses on the seeds that chose nothing, and how far from another arm.

    Args:
        found: Records of one task.
        names: Which arms.
        against: The arm that the others are compared with, seed by seed.
    """
    heads = ["arm", "best rate", "interior", f"seed {TUNED}", "fresh seeds", "number",
             f"against {against}, seed by seed"]  # fmt: skip
    lines = [heads, ["---"] * len(heads)]
    other = fresh_losses(found, against)
    for name in names:
        best, fresh = summarise(found, name).best, fresh_losses(found, name)
        shared = [seed for seed in fresh if seed in other and name != against]
        line = [name, f"{best.learning_rate:g}", "yes" if best.interior else "**no, edge**"]
        line += [f"{best.loss:.4f}", spread([*fresh.values()], COLUMNS["valid_loss"])]
        line += [str(len(fresh)), ", ".join(f"{fresh[s] - other[s]:+.3f} ({s})" for s in shared)]
        lines.append(line)
    return markdown(lines)


def fresh_losses(found: Sequence[Record], arm: str) -> dict[int, float]:
    """Returns the losses at the rate that seed 0 chose, of all other seeds, by seed."""
    seen = losses_by_seed(found, arm, summarise(found, arm).best.learning_rate)
    return {seed: loss for seed, loss in seen.items() if seed != TUNED}


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Joins cells to a table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spread(results: Sequence[float], column: Column) -> str:
    """Writes median and range; of one result, that one; of none, nothing."""
    if not results:
        return ""
    shown = sorted(column.scale * result for result in results)
    low, middle, high = (
        f"{x:.{column.digits}f}" for x in (shown[0], statistics.median(shown), shown[-1])
    )
    return middle if len(shown) == 1 else f"{middle} ({low} to {high})"


def values(found: Sequence[Record], name: str) -> list[float]:
    """Returns a result of every record that has it."""
    results = [record["results"].get(name) for record in found]
    return [float(result) for result in results if result is not None]


def covered(runs: Sequence[Record], name: str, column: Column) -> str:
    """Writes a result of these runs, and how many have it if not all do: one may have diverged."""
    seen = values(runs, name)
    part = f", {len(seen)} of {len(runs)} runs" if 0 < len(seen) < len(runs) else ""
    return spread(seen, column) + part


def losses_by_rate(found: Sequence[Record], arm: str) -> dict[float, list[float]]:
    """Returns the validation losses of an arm's seeds, by rate."""
    grid: dict[float, list[float]] = {}
    for record in select(found, {"arm": arm}):
        grid.setdefault(record["settings"]["learning_rate"], []).append(valid_loss(record))
    return grid


def complete(grid: Mapping[float, list[float]]) -> dict[float, float]:
    """Returns the median loss at each rate that was run from the most seeds."""
    most = max(map(len, grid.values()))
    return {rate: statistics.median(seen) for rate, seen in grid.items() if len(seen) == most}


def comparable(found: Sequence[Record], arm: str) -> dict[float, float]:
    """Returns losses of the same seeds at each rate: medians of the most, or those of one seed.

    Where the other seeds ran at one rate alone, that is the seed that chose the rate.
    """
    medians = complete(losses_by_rate(found, arm))
    return medians if len(medians) > 1 else losses(found, arm, TUNED) or medians


def settled(medians: Mapping[float, float]) -> float:
    """Returns the rate with the lowest loss of those that can be compared."""
    return min(medians, key=medians.__getitem__)


def arm_names(found: Sequence[Record]) -> list[str]:
    """Returns the names of the arms, in the order in which they were first recorded."""
    return list(dict.fromkeys(record["settings"]["arm"] for record in found))


def by_task(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Groups records by the settings that all runs of a sweep share."""
    groups: dict[str, list[Record]] = {}
    for record in found:
        shared = {name: value for name, value in record["settings"].items() if name not in OWN}
        groups.setdefault(json.dumps(shared), []).append(record)
    return groups


# ---------------------------------------------------------------------------------------------
# Figure


def panels(found: Sequence[Record]) -> int:
    """Returns how many panels a task has: one per base, and one of test accuracies."""
    return len(families(arm_names(found))) + bool(values(found, "test_accuracy"))


def draw(figure: SubFigure, found: Sequence[Record], title: str) -> None:
    """Draws validation loss over learning rate, a panel per base, and test accuracies."""
    groups = families(arm_names(found))
    count = panels(found)
    # Names of folders are no formulas.
    figure.suptitle(textwrap.fill(title, 110), fontsize="small", parse_math=False)
    axes = figure.subplots(math.ceil(count / 2), min(2, count), squeeze=False).ravel()
    for ax in axes[count:]:
        ax.set_visible(False)
    kinds = {  # what is done to the base: it looks alike in all panels
        name: name.removeprefix(family) for family, names in groups.items() for name in names
    }
    order = list(dict.fromkeys(kinds.values()))
    looks = [*zip("osv^D<>pX*", colormaps["tab10"].colors, strict=True)]
    styles = [Style(*look, line) for line in ("-", "--", ":", "-.") for look in looks]
    style = {name: styles[order.index(kind) % len(styles)] for name, kind in kinds.items()}
    for ax, (family, names) in zip(axes, groups.items(), strict=False):
        names = sorted(names, key=lambda name: order.index(kinds[name]))
        draw_family(ax, found, {name: style[name] for name in names})
        # Above the panel: within, it covers lines.
        ax.legend(
            title=family, fontsize="x-small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1)
        )
    if count > len(groups):
        draw_accuracy(axes[len(groups)], found, style)


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Groups arms by their base; those that are alone on theirs share the last group."""
    bases = [re.split("[+/]", name)[0] for name in names]
    groups: dict[str, list[str]] = {base: [] for base in bases if bases.count(base) > 1}
    for base, name in zip(bases, names, strict=True):
        groups.setdefault(base if base in groups else "others", []).append(name)
    return groups


def draw_family(axes: Axes, found: Sequence[Record], style: Mapping[str, Style]) -> None:
    """Draws a line for each arm, and its seeds as points.

    The line goes through the medians where several rates were run from several seeds, else through
    the seed that chose the rate. The panel ends a little above the best of the worst arm: diverging
    runs leave it.
    """
    worst, tried = -math.inf, set()
    for name, (marker, color, dashes) in style.items():
        grid = losses_by_rate(found, name)
        medians = complete(grid)
        if len(medians) == 1 or max(map(len, grid.values())) == 1:
            medians = losses(found, name, TUNED)
        line = sorted((rate, loss) for rate, loss in medians.items() if math.isfinite(loss))
        worst = max([worst, *sorted(loss for _, loss in line)[:1]])
        tried.update(rate for rate, _ in line)
        axes.plot(*(zip(*line, strict=True) if line else [[], []]), marker=marker, color=color,
                  linestyle=dashes, label=name)  # fmt: skip
        points = [(rate, loss) for rate, seen in grid.items() if len(seen) > 1 for loss in seen]
        points = [(rate, loss) for rate, loss in points if math.isfinite(loss)]
        axes.plot(*zip(*points, strict=True), ".", color=color, alpha=0.5) if points else None
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss (nats)")
    axes.minorticks_off()
    axes.set_xticks(sorted(tried), [f"{rate:g}" for rate in sorted(tried)])
    if math.isfinite(worst):
        axes.set_ylim(top=worst + HEADROOM)


def draw_accuracy(axes: Axes, found: Sequence[Record], style: Mapping[str, Style]) -> None:
    """Draws test accuracies at the rate of the lowest median loss, and their median as a bar."""
    names = arm_names(found)
    for place, name in enumerate(names):
        rate = settled(comparable(found, name))
        runs = select(found, {"arm": name, "learning_rate": rate})
        shares = [100 * share for share in values(runs, "test_accuracy")]
        if shares:
            axes.plot(shares, [place] * len(shares), "o", color=style[name].color, alpha=0.6)
            axes.plot(statistics.median(shares), place, "k|", markersize=18)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="test accuracy, %, at the lowest median loss")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and writes the figure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="a file of records")
    parser.add_argument(
        "--figure", type=local_path, help="the figure (default: beside the records)"
    )
    parser.add_argument("--against", metavar="ARM", help="compare fresh seeds with this arm's")
    args = parser.parse_args(argv)
    try:
        groups = by_task(records.read(args.records))
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not groups:
        sys.exit(f"error: {args.records} has no records")
    arms = {name: None for found in groups.values() for name in arm_names(found)}
    if args.against and args.against not in arms:
        sys.exit(f"error: no run of {args.against!r} is recorded; there are {', '.join(arms)}")
    heights = [math.ceil(panels(found) / 2) for found in groups.values()]
    figure = Figure(figsize=(10, 4 * sum(heights)), layout="constrained")
    parts = figure.subfigures(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    for part, (task, found) in zip(parts, groups.items(), strict=True):
        shared = json.loads(task)
        title = ", ".join(f"{name} {shared[name]}" for name in shared if name != "digest")
        say(f"{title}\n\n{tables(found)}\n")
        if args.against in (names := arm_names(found)):
            say(f"fresh seeds\n\n{fresh_table(found, names, args.against)}\n")
        draw(part, found, title)
    path = args.figure or args.records.with_suffix(".png")
    figure.savefig(path, dpi=100)
    say(f"figure: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
