"""AdamW and Magma on two quadratics with the same eigenvalues (paper, section 4.4 and figure 4).

    python -m examples.paper.figure4_quadratics            # the whole grid on one CPU core
    python -m examples.paper.figure4_quadratics --plot     # figures, from the records alone

    l(w) = w' H w / 2,   H = blockdiag(U_1 E_1 U_1', U_2 E_2 U_2', U_3 E_3 U_3'),   X = H^(1/2)

Each step sees k of the 9 rows of X. `grouped` has eigenvalues of one scale in each block,
`interleaved` has one of every scale. The paper calls the first homogeneous and the second
heterogeneous; its source (Orvieto & Gower, 2505.21829) has these labels the other way round.

The paper does not give k, the number of steps, the start or the schedule: all are crossed here.
Every arm has the same learning rates, the same rows and the same coins.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import functools
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.kit import records
from examples.kit.console import print_error, say
from examples.kit.figure import Figure
from examples.kit.options import Parser, number, whole
from examples.kit.step import apply
from examples.paper import RESULTS
from examples.paper.drawing import add_figure_options, multiple_of, records_to_draw, save
from magma_optax import skip_update, with_magma

EIGENVALUES = {
    "grouped": ((1, 2, 3), (99, 100, 101), (4998, 4999, 5000)),
    "interleaved": ((1, 99, 4998), (2, 100, 4999), (3, 101, 5000)),
}
SCHEDULES = ("constant", "cosine")
# `constant` and `constant_mask` come after `magma`, whose mean scores they take.
ARMS = ("adamw", "magma", "damping", "skip_update", "constant", "constant_mask")
P = 0.5  # survival probability
POINTS = 25  # times at which a run is looked at
SMALLEST = 1e-36  # losses below are beyond float32

Weights = dict[str, jax.Array]  # three blocks of (3,)


# ---------------------------------------------------------------------------------------------
# The problem


def design(eigenvalues: jax.Array, key: jax.Array) -> jax.Array:
    """X = H^(1/2), block by block.

    Args:
        eigenvalues: (3, 3), a row for each block.
        key: Of the rotations, one for each block, uniform on O(3).

    Returns:
        (3, 3, 3): block, row within the block, column.
    """
    q, r = jnp.linalg.qr(jax.random.normal(key, (3, 3, 3)))
    u = q * jnp.sign(jnp.diagonal(r, axis1=1, axis2=2))[:, None, :]
    return jnp.einsum("bie,be,bje->bij", u, jnp.sqrt(eigenvalues), u)


def draw_rows(key: jax.Array, rows: jax.Array, steps: int) -> jax.Array:
    """Which `rows` of the 9 rows each step sees, without replacement: bool (steps, 3, 3)."""
    order = jnp.argsort(jax.random.uniform(key, (steps, 9)), axis=1)
    return (jnp.argsort(order, axis=1) < rows).reshape(steps, 3, 3)


def loss(w: Weights, x: jax.Array) -> jax.Array:
    """|X w|^2 / 2, over all rows."""
    return jnp.sum(residuals(w, x) ** 2) / 2


def minibatch_loss(w: Weights, x: jax.Array, seen: jax.Array) -> jax.Array:
    """(9 / k) |X_S w|^2 / 2: its mean over the choice of rows is the loss."""
    return 9 / jnp.sum(seen) * jnp.sum(jnp.where(seen, residuals(w, x), 0) ** 2) / 2


def residuals(w: Weights, x: jax.Array) -> jax.Array:
    """X w, (3, 3)."""
    return jnp.einsum("bij,bj->bi", x, jnp.stack([w["0"], w["1"], w["2"]]))


# ---------------------------------------------------------------------------------------------
# The optimizers


def optimizer(
    arm: str, rate: Any, key: jax.Array, multipliers: jax.Array, betas: tuple[float, float]
) -> optax.GradientTransformation:
    """AdamW without decay, and what is done to its updates.

    Args:
        arm: One of `ARMS`.
        rate: Learning rate or schedule.
        key: Of the coins.
        multipliers: (3,), p times Magma's mean score of each block. As every block is masked here,
            one constant for all would be no more than another learning rate.
        betas: Decay rates of AdamW's two moments.
    """
    base = optax.adamw(rate, *betas, weight_decay=0.0)
    if arm == "adamw":
        return base
    if arm == "magma":
        return with_magma(base, P, key=key)
    if arm == "damping":
        return with_magma(base, 1.0)
    if arm == "skip_update":
        return optax.chain(base, skip_update(P, key=key))
    if arm == "constant":
        return optax.chain(base, scale_blocks(multipliers))
    if arm == "constant_mask":
        return optax.chain(base, scale_blocks(multipliers), skip_update(P, key=key))
    raise ValueError(f"arm must be one of {', '.join(ARMS)}, got {arm!r}")


def scale_blocks(factors: jax.Array) -> optax.GradientTransformation:
    """Multiplies the update of block b by factors[b]."""
    scale = lambda updates: {b: u * factors[int(b)] for b, u in updates.items()}  # noqa: E731
    return optax.stateless(lambda updates, params: scale(updates))


def scores(state: Any) -> jax.Array:
    """Magma's score of each block, (3,); 1 without Magma."""
    alignment = optax.tree.get(state, "alignment", default={})
    return jnp.stack([alignment[b] for b in "012"]) if alignment else jnp.ones(3)


def cosines(mu: Weights, g: Weights) -> jax.Array:
    """cos(mu, g) of each block, (3,); NaN where a block has no gradient."""

    def unit(x: jax.Array) -> jax.Array:
        x = x / jnp.max(jnp.abs(x))  # squares of what is left at the end would be 0 in float32
        return x / jnp.linalg.norm(x)

    return jnp.stack([jnp.vdot(unit(mu[b]), unit(g[b])) for b in g])


# ---------------------------------------------------------------------------------------------
# Runs


def train(
    eigenvalues: jax.Array,
    rows: jax.Array,
    seed: jax.Array,
    rate: jax.Array,
    multipliers: jax.Array,
    *,
    arm: str,
    schedule: str,
    steps: int,
    betas: tuple[float, float],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One run from w = (1, ..., 1); the seed decides rotations, rows and coins.

    Returns:
        At `POINTS` times the loss, (POINTS,), and the means since the time before of cos(mu, g),
        over the steps at which the block has a gradient (NaN without any), and of the score s of
        each block, both (POINTS, 3).
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    x, seen = design(eigenvalues, keys[0]), draw_rows(keys[1], rows, steps)
    rate_at = rate if schedule == "constant" else optax.cosine_decay_schedule(rate, steps)
    tx = optimizer(arm, rate_at, keys[2], multipliers, betas)
    w = {str(b): jnp.ones(3) for b in range(3)}

    def step(carry: Any, seen: jax.Array) -> Any:
        w, state, total, count, score = carry
        g = jax.grad(minibatch_loss)(w, x, seen)
        w, state = apply(tx, g, state, w)
        cosine = cosines(optax.tree.get(state, "mu"), g)
        total, count = total + jnp.nan_to_num(cosine), count + ~jnp.isnan(cosine)
        return (w, state, total, count, score + scores(state)), None

    def interval(carry: Any, seen: jax.Array) -> Any:
        begin = (*carry, *jnp.zeros((3, 3)))
        (w, state, total, count, score), _ = jax.lax.scan(step, begin, seen)
        return (w, state), (loss(w, x), total / count, score / len(seen))

    seen = seen.reshape(POINTS, steps // POINTS, 3, 3)
    return jax.lax.scan(interval, (w, tx.init(w)), seen)[1]


@functools.partial(jax.jit, static_argnames=("arm", "schedule", "steps", "betas"))
def sweep(
    eigenvalues: jax.Array,
    rows: jax.Array,
    seeds: jax.Array,
    rates: jax.Array,
    multipliers: jax.Array,
    **static: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`train` for every seed and rate: axes (seed, rate, ...)."""
    one = lambda seed, rate: train(eigenvalues, rows, seed, rate, multipliers, **static)  # noqa: E731
    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(seeds, rates)


def measure(setting: dict[str, Any]) -> dict[str, Any]:
    """Every arm at every rate in one setting: what is recorded of each.

    ``below_adamw`` is the share of seeds, with one rotation and the same rows, in which the final
    loss is below AdamW's, each arm at its best rate.
    """
    seeds, rates = jnp.arange(setting["seeds"]), rate_grid(setting["rates"])
    eigenvalues = jnp.array(EIGENVALUES[setting["case"]], jnp.float32)
    multipliers, adamw, results = jnp.ones(3), np.inf, {}
    for arm in ARMS:  # `adamw` first
        losses, cosine, score = map(
            np.asarray,
            sweep(
                eigenvalues,
                setting["rows"],
                seeds,
                rates,
                multipliers,
                arm=arm,
                schedule=setting["schedule"],
                steps=setting["steps"],
                betas=tuple(setting["betas"]),
            ),
        )
        drawn = setting["steps"] == 2000 and setting["schedule"] == "constant"
        results[arm] = summary(rates, losses)
        final = losses[:, results[arm]["best"], -1]  # (seeds,)
        adamw = final if arm == "adamw" else adamw
        results[arm]["below_adamw"] = rounded(np.mean(final < adamw), 3)
        if arm in ("adamw", "magma"):
            results[arm] |= details(losses, cosine, results[arm]["best"], trajectory=drawn)
        if arm == "magma":
            best = results[arm]["best"]
            mean_score = np.median(score[:, best].mean(axis=1), axis=0)
            results[arm]["score"] = rounded(mean_score, 4)
            multipliers = jnp.array(P * mean_score)
    return results


def rate_grid(rates: tuple[float, float, int]) -> jax.Array:
    """Learning rates from the first to the second number, evenly spaced in their logarithms."""
    low, high, number = rates
    return jnp.array(np.geomspace(low, high, number), jnp.float32)


def log10(losses: np.ndarray) -> np.ndarray:
    """Logarithms of losses; inf where a run diverged."""
    return np.log10(np.maximum(np.where(np.isnan(losses), np.inf, losses), SMALLEST))


def summary(rates: jax.Array, losses: np.ndarray) -> dict[str, Any]:
    """Quartiles over the seeds at the rate of lowest median final loss.

    Args:
        rates: (R,).
        losses: (seeds, R, POINTS).
    """
    logs = log10(losses[:, :, -1])
    best = int(np.argmin(np.median(logs, axis=0)))
    return {
        "best": best,
        "rate": float(f"{rates[best]:.3g}"),
        "interior": 0 < best < len(rates) - 1,
        "log10_loss": rounded(quartiles(logs[:, best]), 3),
    }


def details(
    losses: np.ndarray, cosine: np.ndarray, best: int, *, trajectory: bool
) -> dict[str, Any]:
    """What is drawn: medians by rate and, if wanted, loss and alignment over time at the best.

    Args:
        losses: (seeds, R, POINTS).
        cosine: (seeds, R, POINTS, 3).
        best: Place of the best rate.
        trajectory: Whether to keep the course over time.
    """
    logs = log10(losses)
    result = {"log10_median_by_rate": rounded(np.median(logs[:, :, -1], axis=0), 2)}
    if trajectory:
        result["log10_loss_over_time"] = rounded(quartiles(logs[:, best]), 2)
        cosine = np.ma.masked_invalid(cosine[:, best])  # of the seeds that still move
        result["cosine_over_time"] = rounded(cosine.mean(axis=0).filled(np.nan).T, 3)
    return result


def quartiles(values: np.ndarray) -> np.ndarray:
    """Quartiles over the first axis; each is one of the values, so that inf does no harm."""
    return np.percentile(values, (25, 50, 75), axis=0, method="nearest")


def rounded(array: Any, digits: int) -> Any:
    """`array` as nested lists of few digits."""
    return np.round(np.asarray(array, np.float64), digits).tolist()


# ---------------------------------------------------------------------------------------------
# Tables and figures, from the records alone


def ratio(record: dict[str, Any], arm: str, base: str = "adamw") -> float:
    """Median final loss of `arm` over that of `base`, each at its best rate."""
    results = record["results"]
    return 10 ** (float(results[arm]["log10_loss"][1]) - float(results[base]["log10_loss"][1]))


def table(recorded: list[dict[str, Any]]) -> str:
    """AdamW's median loss and every other arm's ratio to it, a row a setting."""
    names = "".join(f" {arm:>13}" for arm in ARMS[1:])
    lines = [f"{'betas':>12} {'case':>11} k {'schedule':>8} {'steps':>5} {'AdamW':>10}{names}"]
    for record in recorded:
        s, results = record["settings"], record["results"]
        edge = {arm: " " if results[arm]["interior"] else "*" for arm in ARMS}
        line = f"{s['betas']!s:>12} {s['case']:>11} {s['rows']} {s['schedule']:>8} {s['steps']:5}"
        line += f" {10 ** results['adamw']['log10_loss'][1]:9.2e}{edge['adamw']}"
        ratios = "".join(f" {ratio(record, arm):12.3g}{edge[arm]}" for arm in ARMS[1:])
        lines.append(line + ("  0 in float32, all arms alike" if at_floor(record) else ratios))
    lines.append("Losses over AdamW's, each arm at its best rate (* at the edge of the grid)")
    return "\n".join(lines)


def plot_trajectories(recorded: list[dict[str, Any]], folder: Path) -> Path | None:
    """The paper's figure: losses above, alignment by block below, a column a case.

    Rows per step are the largest recorded of the settings whose course over time was kept, and
    betas the last.
    """
    kept = [r for r in recorded if "cosine_over_time" in r["results"]["magma"]]
    if not kept:
        return None
    betas = kept[-1]["settings"]["betas"]
    rows = max(r["settings"]["rows"] for r in kept)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for record in kept:
        s = record["settings"]
        if s["betas"] != betas or s["rows"] != rows:
            continue
        top, bottom = axes[:, list(EIGENVALUES).index(s["case"])]
        times = np.arange(1, POINTS + 1) * s["steps"] / POINTS
        for arm, color, style in (("adamw", "C0", "--"), ("magma", "C3", "-")):
            result = record["results"][arm]
            low, median, high = 10 ** np.array(result["log10_loss_over_time"], float)
            top.plot(times, median, color=color, label=f"{arm}, rate {result['rate']:g}")
            top.fill_between(times, low, high, color=color, alpha=0.2, linewidth=0)
            for block, cosine in enumerate(result["cosine_over_time"]):
                label = f"{arm}, block {block + 1}"
                bottom.plot(times, cosine, style, color=color, alpha=1 - block / 4, label=label)
        top.set(title=f"{s['case']}, {rows} of 9 rows a step", yscale="log", ylabel="loss")
        bottom.set(xlabel="step", ylabel="mean cos(mu, g)")
        top.legend(fontsize="small")
        bottom.legend(fontsize="x-small", ncols=2)
    return save(figure, folder / "quadratics.png", dpi=72)


def plot_ratios(recorded: list[dict[str, Any]], folder: Path) -> Path:
    """Final loss over AdamW's in every setting, a panel an arm."""
    arms = ("magma", "skip_update", "constant_mask", "damping", "constant")
    columns = sorted({(r["settings"]["schedule"], r["settings"]["steps"]) for r in recorded})
    lines = sorted({line_of(r) for r in recorded})
    figure = Figure(figsize=(13.5, 1.8 + 0.27 * len(lines)), layout="constrained")
    axes = figure.subplots(1, len(arms), sharey=True)
    for panel, arm in zip(axes, arms, strict=True):
        logs = np.full((len(lines), len(columns)), np.nan)
        for r in recorded:
            row = lines.index(line_of(r))
            column = columns.index((r["settings"]["schedule"], r["settings"]["steps"]))
            value = ratio(r, arm)
            logs[row, column] = math.nan if at_floor(r) else math.log10(value)
            text = "0/0" if at_floor(r) else f"{value:.0f}" if value >= 10 else f"{value:.2g}"
            color = "white" if abs(logs[row, column]) > 0.6 else "black"
            panel.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
        panel.imshow(logs, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
        panel.set_title(arm)
        labels = [f"{schedule} {steps}" for schedule, steps in columns]
        panel.set_xticks(range(len(columns)), labels, fontsize=7, rotation=90)
    names = [f"{betas}  {case}  k = {rows}" for betas, case, rows in lines]
    axes[0].set_yticks(range(len(lines)), names, fontsize=8)
    figure.suptitle("Median final loss / AdamW's, each at its best rate (0/0: both reach zero)")
    return save(figure, folder / "quadratics_ratios.png", dpi=66)


def line_of(record: dict[str, Any]) -> tuple[tuple[float, ...], str, int]:
    """Betas, case and rows."""
    s = record["settings"]
    return tuple(s["betas"]), s["case"], s["rows"]


def most_seeds(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the records of one setting that with the most seeds."""
    best: dict[str, dict[str, Any]] = {}
    for record in sorted(recorded, key=lambda record: record["settings"]["seeds"]):
        best[repr(record["settings"] | {"seeds": None})] = record
    return list(best.values())


def at_floor(record: dict[str, Any]) -> bool:
    """Whether AdamW and Magma both reach the smallest loss, so that no ratio means anything."""
    floor = math.log10(SMALLEST) + 0.01
    return all(float(record["results"][arm]["log10_loss"][1]) < floor for arm in ("adamw", "magma"))


# ---------------------------------------------------------------------------------------------
# Command line


def parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="python -m examples.paper.figure4_quadratics",
        description="AdamW and Magma on two quadratics with the same eigenvalues.",
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=EIGENVALUES, default=list(EIGENVALUES))
    add("--rows", nargs="+", type=int, choices=range(1, 10), default=[1, 2, 3], help="k, of 9")
    add("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    add("--steps", nargs="+", type=multiple_of(POINTS), default=[500, 2000], help="(500 2000)")
    add("--betas", nargs=2, type=number(0.0), default=[0.9, 0.999], help="AdamW's (0.9 0.999)")
    add("--seeds", type=whole(1), default=60, help="a sixth from 10000 steps on (%(default)s)")
    add("--lowest-rate", type=number(0.0, above=True), default=1e-4, help="(%(default)s)")
    add("--highest-rate", type=number(0.0, above=True), default=10.0, help="(%(default)s)")
    add("--rates", type=whole(2), default=61, help="number of learning rates (%(default)s)")
    add("--full", action="store_true", help="also 10000 steps and betas (0.95, 0.95)")
    add_figure_options(parser, RESULTS / "quadratics.jsonl")
    return parser


def settings(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every setting that the options ask for."""
    if not args.lowest_rate < args.highest_rate:
        raise ValueError(f"--lowest-rate {args.lowest_rate} must be below {args.highest_rate}")
    steps, betas = list(args.steps), [list(args.betas)]
    if args.full:
        steps, betas = [500, 2000, 10000], [[0.9, 0.999], [0.95, 0.95]]
    grid = itertools.product(steps, betas, args.schedules, args.cases, args.rows)
    return [
        {
            "experiment": "quadratics",
            "case": case,
            "rows": rows,
            "schedule": schedule,
            "steps": steps,
            "betas": betas,
            "seeds": args.seeds if steps < 10_000 else math.ceil(args.seeds / 6),
            "rates": [args.lowest_rate, args.highest_rate, args.rates],
        }
        for steps, betas, schedule, case, rows in grid
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is not recorded yet, or draws."""
    options = parser()
    args = options.parse_args(argv)
    if args.full:
        options.refuse_idle(args, "beside --full", "steps", "betas")
    if recorded := records_to_draw(options, args):
        recorded = most_seeds(recorded)
        say(plot_trajectories(recorded, args.images))
        say(plot_ratios(recorded, args.images))
        return 0
    try:
        asked = settings(args)
    except ValueError as error:
        print_error(f"{error}")
        return 2
    done = [record["settings"] for record in records.read(args.out)]
    missing = [setting for setting in asked if setting not in done]
    say(f"{len(asked) - len(missing)} of {len(asked)} settings are in {args.out}")
    start = time.perf_counter()
    for count, setting in enumerate(missing, 1):
        record = records.append(args.out, setting, measure(setting))
        what = " ".join(f"{key}={setting[key]}" for key in ("case", "rows", "schedule", "steps"))
        clock = f"{count}/{len(missing)} {time.perf_counter() - start:5.0f} s"
        say(f"{clock} {what}: Magma / AdamW {ratio(record, 'magma'):.3g}")
    say(table([record for record in records.read(args.out) if record["settings"] in asked]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
