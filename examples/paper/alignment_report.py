"""Tables and figure of the records of `examples.paper.alignment`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.kit.figure import Axes, Figure, colormaps
from examples.paper.drawing import save
from examples.paper.report import markdown
from examples.paper.white_noise import (
    cosine_before,
    cosine_now,
    score,
)

KINDS = ("q", "k", "v", "o", "gate", "up", "down")
COLORS = dict(zip(KINDS, colormaps["tab10"].colors, strict=False))
LINES = ("-", "--", ":", "-.")  # of the bases

Record = dict[str, Any]


def kind_of(path: str) -> str:
    """Returns which matrix of a layer a block is: q, k, v, o, gate, up or down."""
    return path.split("/")[-2].removesuffix("_proj")


def layer_of(path: str) -> str:
    """Returns the number of a block's layer."""
    return path.split("/")[1]


def mean_by(of: Callable[[str], str], values: Mapping[str, float]) -> dict[str, float]:
    """Returns means of values by block over those alike: in `kind_of` or `layer_of`."""
    groups: dict[str, list[float]] = {}
    for path, value in values.items():
        groups.setdefault(of(path), []).append(value)
    return {name: float(np.mean(found)) for name, found in groups.items()}


def select(found: Sequence[Record], **settings: Any) -> list[Record]:
    """Returns the records with these settings, by step and batch size."""
    chosen = [r for r in found if all(r["settings"].get(k) == v for k, v in settings.items())]
    return sorted(chosen, key=lambda r: (r["settings"]["step"], r["settings"].get("rows", 0)))


def bases(found: Sequence[Record]) -> list[str]:
    """Returns the bases, in the order in which they were first recorded."""
    return list(dict.fromkeys(record["settings"]["base"] for record in found))


def later(found: Sequence[Record]) -> list[Record]:
    """Returns those of the second half of the run."""
    return [r for r in found if 2 * r["settings"]["step"] >= r["settings"]["steps"]]


def over_points(found: Sequence[Record], name: str) -> dict[str, float]:
    """Returns a quantity of each block, in the mean over records."""
    paths = found[0]["results"][name]
    return {path: float(np.mean([r["results"][name][path] for r in found])) for path in paths}


# ---------------------------------------------------------------------------------------------
# Tables


def tables(found: Sequence[Record]) -> str:
    """Returns the tables of the page as Markdown, each under its title."""
    parts = {
        "Along the run": run_table(found),
        "As the batch grows": batch_table(found),
        "By kind of matrix": group_table(found, kind_of, "matrix", KINDS),
        "By layer": group_table(found, layer_of, "layer"),
    }
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts.items() if table)


def run_table(found: Sequence[Record]) -> str:
    """Returns a row for each point of each run: means over blocks (lowest to highest)."""
    heads = ["base", "step", "loss", r"$\cos(\mu_t, g_t)$", "white noise", "score"]
    heads += [r"$\cos(\mu_{t-1}, g_t)$"]
    lines = []
    for base in bases(found):
        for record in select(found, measured="run", base=base):
            settings, results = record["settings"], record["results"]
            lines.append([
                base, f"{settings['step']}", f"{results['loss']:.2f}",
                spread(results["now"]), f"{results['null']:.3f}",
                f"{np.mean(score(list(results['now'].values()))):.4f}",
                spread(results["before"]),
            ])  # fmt: skip
    return with_heads(heads, lines)


def batch_table(found: Sequence[Record]) -> str:
    """Returns a row for each batch size: signal to noise, and the cosines, means over blocks.

    Those of a long EMA follow from the ratio of each block. Beside the batch of the run stands what
    was seen along the run at that point.
    """
    symbol = r"$\cos(\mu_{t-1}, g_t)$"
    heads = ["base", "step", "tokens", "signal to noise", f"{symbol}, long average"]
    heads += ["short average", "along the run", "score at rest"]
    lines = []
    for base in bases(found):
        for record in select(found, measured="frozen", base=base):
            settings, results = record["settings"], record["results"]
            before = long_average(results, settings["b1"])
            runs = select(found, measured="run", base=base, step=settings["step"])
            moving = runs and of_the_run(record)
            lines.append([
                base, f"{settings['step']}", f"{tokens_of(record):,}",
                with_error(*mean_ratio(results)), f"{before.mean():.3f}",
                f"{mean(results['before']):.3f}",
                f"{mean(runs[0]['results']['before']):.3f}" if moving else "",
                f"{score(cosine_now(before, settings['b1'])).mean():.4f}",
            ])  # fmt: skip
    return with_heads(heads, lines)


def group_table(
    found: Sequence[Record], of: Callable[[str], str], title: str, order: Sequence[str] = ()
) -> str:
    """Returns a row for each group of blocks.

    Both cosines are those of the second half of the run. The signal to noise is that of the run's
    batch at the last point where parameters stood still.
    """
    columns = {}
    for base in bases(found):
        if chosen := later(select(found, measured="run", base=base)):
            for name, symbol in (("now", r"\mu_t"), ("before", r"\mu_{t-1}")):
                values = mean_by(of, over_points(chosen, name))
                columns[rf"{base}, $\cos({symbol}, g_t)$"] = values
        if still := [r for r in select(found, measured="frozen", base=base) if of_the_run(r)]:
            values = mean_by(of, still[-1]["results"]["signal_to_noise"])
            columns[f"{base}, signal to noise"] = values
    if not columns:
        return ""
    names = order or sorted(next(iter(columns.values())), key=int)
    lines = [[name, *(f"{column[name]:.3f}" for column in columns.values())] for name in names]
    return with_heads([title, *columns], lines)


def mean_ratio(results: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the mean signal to noise of the blocks and its standard error.

    Blocks share their batches, so their errors are taken as if they were one error.
    """
    return mean(results["signal_to_noise"]), mean(results["signal_to_noise_error"])


def long_average(results: Mapping[str, Any], b1: float, errors: float = 0.0) -> np.ndarray:
    """Returns cos(mu_{t-1}, g_t) of a long EMA of each block, its ratio so many errors higher."""
    names = "signal_to_noise", "signal_to_noise_error"
    ratios, error = (np.array(list(results[name].values())) for name in names)
    return cosine_before(ratios + errors * error, b1)


def of_the_run(record: Record) -> bool:
    """Whether a batch size that was compared is the one that trains."""
    return record["settings"]["rows"] == record["settings"]["batch_size"]


def tokens_of(record: Record) -> int:
    """Returns the tokens of a batch that was compared."""
    return record["settings"]["rows"] * record["settings"]["seq_len"]


def with_error(value: float, error: float) -> str:
    """Writes a ratio and its standard error, with fewer decimals the larger it is."""
    decimals = 4 - sum(value >= limit for limit in (0.1, 1, 10))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def mean(values: Mapping[str, float]) -> float:
    """Returns the mean over blocks."""
    return float(np.mean(list(values.values())))


def spread(values: Mapping[str, float]) -> str:
    """Writes the mean over blocks, and the lowest and highest block."""
    seen = list(values.values())
    return f"{np.mean(seen):.3f} ({min(seen):.3f} to {max(seen):.3f})"


def with_heads(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table; nothing where it has no lines."""
    return markdown([heads, ["---"] * len(heads), *lines]) if lines else ""


# ---------------------------------------------------------------------------------------------
# Figure


def plot(found: Sequence[Record], folder: Path) -> Path:
    """Draws both cosines along the run, one over batch size and one over layers."""
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    (now, before), (batches, layers) = figure.subplots(2, 2)
    lines = dict(zip(bases(found), LINES, strict=False))
    for base, line in lines.items():
        runs = select(found, measured="run", base=base)
        for kind in KINDS:
            style = {"linestyle": line, "color": COLORS[kind], "marker": ".", "label": kind}
            draw_kind(now, runs, kind, "now", style)
            draw_kind(before, runs, kind, "before", style)
            draw_layers(layers, later(runs), kind, style)
        draw_batches(batches, found, base, line)
    now.set(ylabel=r"$\cos(\mu_t, g_t)$ less that of white noise", title="What Magma scores")
    before.set(ylabel=r"$\cos(\mu_{t-1}, g_t)$", title="With the momentum of the step before")
    for axes in (now, before):
        axes.set(xlabel="step", xscale="log")
        name_ticks(axes, {r["settings"]["step"]: r["settings"]["step"] for r in found})
    batches.set(
        xlabel="tokens a batch", xscale="log", ylabel=r"$\cos(\mu_{t-1}, g_t)$, long average"
    )
    batches.set(title="As the batch grows, at parameters that stand still")
    tokens = {tokens_of(record) for record in select(found, measured="frozen")}
    name_ticks(batches, {x: f"{x / 1024:.0f}k" if x >= 1024 else f"{x:.0f}" for x in tokens})
    layers.set(xlabel="layer", ylabel=r"$\cos(\mu_{t-1}, g_t)$", title="Second half of the run")
    for axes in (now, before, batches, layers):
        axes.axhline(0, color="black", linewidth=0.8)
    layers.xaxis.get_major_locator().set_params(integer=True)
    share_limits(now, before)  # one scale, so that one sees which of them says more
    legends(layers, batches, lines)
    return save(figure, folder / "alignment.png", dpi=100)


def draw_kind(
    axes: Axes, runs: Sequence[Record], kind: str, name: str, style: Mapping[str, Any]
) -> None:
    """Draws a cosine of one kind of matrix over steps; that of this step less white noise."""
    points = [
        (
            record["settings"]["step"],
            mean_by(kind_of, record["results"][name])[kind]
            - (record["results"]["null"] if name == "now" else 0.0),
        )
        for record in runs
    ]
    axes.plot(*(zip(*points, strict=True) if points else [[], []]), **style)


def draw_layers(axes: Axes, runs: Sequence[Record], kind: str, style: Mapping[str, Any]) -> None:
    """Draws the cosine with the moment before of one kind of matrix over layers."""
    values = over_points(runs, "before") if runs else {}
    points = sorted((int(layer_of(path)), x) for path, x in values.items() if kind_of(path) == kind)
    axes.plot(*(zip(*points, strict=True) if points else [[], []]), **style)


def draw_batches(axes: Axes, found: Sequence[Record], base: str, line: str) -> None:
    """Draws the cosine with the moment before over batch size, a line for each point of a run.

    Crosses say what follows from the largest batch, if noise shrinks as one over the batch.
    Diamonds say what was seen along the run, filled for the first base.
    """
    still = select(found, measured="frozen", base=base)
    steps = sorted({record["settings"]["step"] for record in still})
    for place, step in enumerate(steps):
        here = select(still, step=step)
        b1, color = here[0]["settings"]["b1"], f"C{place}"
        tokens = np.array([tokens_of(record) for record in here])
        before, low, high = (
            np.array([long_average(record["results"], b1, k).mean() for record in here])
            for k in (0, -2, 2)
        )
        axes.errorbar(
            tokens, before, [before - low, high - before], linestyle=line, color=color,
            marker="o", markersize=4, label=f"{base}, step {step}",
        )  # fmt: skip
        largest = np.array(list(here[-1]["results"]["signal_to_noise"].values()))
        shares = tokens / tokens[-1]
        predicted = [cosine_before(share * largest, b1).mean() for share in shares]
        axes.plot(tokens, predicted, "x", color="black", markersize=5, zorder=3)
        fill = color if line == LINES[0] else "none"
        seen = [
            (tokens_of(record), mean(run["results"]["before"]))
            for record in here
            if of_the_run(record)
            for run in select(found, measured="run", base=base, step=step)
        ]
        for x, y in seen:
            axes.plot(x, y, "D", color=color, markerfacecolor=fill, markersize=6)


def name_ticks(axes: Axes, names: Mapping[float, Any]) -> None:
    """Puts ticks at these, and no others, on a logarithmic axis of abscissas.

    One that is too close to the next has no name.
    """
    axes.minorticks_off()
    places = sorted(names)
    crowded = {a for a, b in itertools.pairwise(places) if b < 1.3 * a}
    shown = ["" if place in crowded else str(names[place]) for place in places]
    axes.set_xticks(places, shown, fontsize="small")


def share_limits(first: Axes, second: Axes) -> None:
    """Gives two panels one scale."""
    limits = [*first.get_ylim(), *second.get_ylim()]
    for axes in (first, second):
        axes.set_ylim(min(limits), max(limits))


def legends(layers: Axes, batches: Axes, lines: Mapping[str, str]) -> None:
    """Names the colors of matrices and the lines of bases once."""
    handles, labels = layers.get_legend_handles_labels()
    chosen = dict(zip(labels, handles, strict=True))
    for base, line in lines.items():
        chosen[base] = layers.plot([], [], color="gray", linestyle=line)[0]
    chosen["white noise"] = layers.plot([], [], color="black", linewidth=0.8)[0]
    layers.legend(chosen.values(), chosen.keys(), fontsize="x-small", ncols=3)
    if batches.get_legend_handles_labels()[1]:
        low, high = batches.get_ylim()
        batches.set_ylim(low - 0.15 * (high - low), high)  # room for the legend
        meaning = "bars: 2 standard errors\ncrosses: if noise falls as 1 / batch"
        meaning += "\ndiamonds: along the run"
        batches.legend(
            fontsize="x-small", title=meaning, title_fontsize="x-small", loc="lower right", ncols=2
        )
