"""Adam and Magma on a linear transformer with light and heavy tails (paper, 4.3 and figure 3).

    python -m examples.paper.figure3_heavy_tails           # what a CPU core does in some minutes
    python -m examples.paper.figure3_heavy_tails --full    # the paper's 10,000 steps; wants a GPU
    python -m examples.paper.figure3_heavy_tails --plot    # figures, from the records alone

The benchmark of Ahn et al. (2310.01082): regress y on x in context. Shapes: d = 5, n = 20 examples
and one query a sequence, B sequences, L = 3 layers, one head.

    z_i = (x_i, y_i),  z_query = (x, 0)         Z <- Z + P Z M Z' Q Z / n         y ~ -z_query[d+1]

With G = Z M Z' / n over the n examples, a (d+1) x (d+1) matrix, and A = I + P G Q', a layer is
z_query <- A z_query, G <- A G A': the same function of P and Q without any Z. Matrices have the
batch as their last axis.

Every arm has the same learning rates, batches and coins.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from examples.kit import records
from examples.kit.console import print_error, say
from examples.kit.figure import Figure
from examples.kit.options import Parser, number, whole
from examples.kit.step import apply
from examples.paper import RESULTS
from examples.paper.drawing import add_figure_options, multiple_of, records_to_draw, save
from magma_optax import skip_update, stacked, with_magma

TAILS = ("light", "heavy")
# `constant` and `constant_mask` come after `magma`, whose mean scores they take.
ARMS = ("adam", "magma", "damping", "skip_update", "constant", "constant_mask", "magma_single")
SURVIVAL = 0.5  # probability p of a block's update
D, N, LAYERS, BATCH = 5, 20, 3, 1000
RATES = [0.02 * 2**i for i in range(5)]
FULL_RATES = [0.0025 * 2**i for i in range(9)]
COLORS = dict(zip(ARMS, ("C0", "C3", "C1", "C2", "C4", "C5", "C9"), strict=True))
LOSS_EVERY, CURVATURE_EVERY, LAST = 50, 250, 5  # the last 5 losses are averaged

Params = dict[str, jax.Array]  # {"PQ": (L, 2, d, d)}, P before Q
Batch = tuple[jax.Array, jax.Array, jax.Array]  # G (d+1, d+1, B), query (d+1, 1, B), y (B,)


# ---------------------------------------------------------------------------------------------
# The problem


def init(key: jax.Array) -> Params:
    """Entries of standard deviation 0.05."""
    return {"PQ": 0.05 * jax.random.normal(key, (LAYERS, 2, D, D))}


def draw(key: jax.Array, heavy: ArrayLike, size: int = BATCH) -> Batch:
    """A batch of regressions y = w'x with w ~ N(0, I).

    Light tails: x ~ N(0, I). Heavy: x uniform on the sphere times the root of Gamma(0.1, scale 10).
    """
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (size, N + 1, D))

    def stretch(x: jax.Array) -> jax.Array:
        radius = jnp.sqrt(10 * jax.random.gamma(keys[1], 0.1, (size, N + 1, 1)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True) * radius

    x = jax.lax.cond(heavy, stretch, lambda x: x, x)
    y = jnp.einsum("bnd,bd->bn", x, jax.random.normal(keys[2], (size, D)))
    return reduce_sequences(x, y)


def reduce_sequences(x: jax.Array, y: jax.Array) -> Batch:
    """What the loss needs of the sequences x (B, n+1, d), y (B, n+1)."""
    z = jnp.concatenate([x, y[..., None]], axis=-1)[:, :N]  # (B, n, d+1)
    query = jnp.pad(x[:, N].T, ((0, 1), (0, 0)))  # (d+1, B)
    return jnp.einsum("bni,bnj->ijb", z, z) / N, query[:, None], y[:, N]


def loss(params: Params, batch: Batch) -> jax.Array:
    """Mean squared error of the query's prediction."""
    gram, query, y = batch
    for layer, (p, q) in enumerate(params["PQ"]):
        p = jnp.pad(p, (0, 1)).at[D, D].set(1.0)[..., None]  # (d+1, d+1, 1)
        q = jnp.pad(q, (0, 1))[..., None]
        a = jnp.eye(D + 1)[..., None] + matmul(matmul(p, gram), q.swapaxes(0, 1))
        query = matmul(a, query)
        if layer < LAYERS - 1:
            gram = matmul(matmul(a, gram), a.swapaxes(0, 1))
    return jnp.mean((query[D, 0] + y) ** 2)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of small matrices (i, k, B) and (k, j, B): sums that run along the batch."""
    return sum(a[:, k, None] * b[None, k] for k in range(a.shape[1]))


def condition_numbers(params: Params, batch: Batch) -> jax.Array:
    """The Hessian's robust condition number by its diagonal and by its eigenvalues, (2,).

    The largest over the median of absolute values: of the diagonal in the code of Ahn et al., of
    the eigenvalues in the text of the paper.
    """
    gradient = jax.grad(lambda flat: loss({"PQ": flat.reshape(params["PQ"].shape)}, batch))
    flat = params["PQ"].ravel()
    hessian = each(lambda v: jax.jvp(gradient, (flat,), (v,))[1])(jnp.eye(flat.size))
    values = jnp.stack([jnp.diagonal(hessian), jnp.linalg.eigvalsh(hessian)])
    return jnp.max(jnp.abs(values), axis=1) / jnp.median(jnp.abs(values), axis=1)


# ---------------------------------------------------------------------------------------------
# The optimizers


def optimizer(
    arm: str, rate: Any, key: jax.Array, multipliers: jax.Array
) -> optax.GradientTransformation:
    """Adam with betas (0.9, 0.9) on clipped gradients, and what is done to its updates.

    Args:
        arm: One of `ARMS`. Blocks are P and Q of each layer, or all as one in ``magma_single``.
        rate: Learning rate.
        key: Of the coins.
        multipliers: (L, 2), p times Magma's mean score of each block. As every block is masked
            here, one constant for all would be no more than another learning rate.
    """
    adam = optax.adam(rate, 0.9, 0.9)
    six = stacked((0, 1))
    mask = skip_update(SURVIVAL, blocks=six, key=key)
    scaled = optax.chain(adam, scale_blocks(multipliers))
    arms = {
        "adam": lambda: adam,
        "magma": lambda: with_magma(adam, SURVIVAL, blocks=six, key=key),
        "damping": lambda: with_magma(adam, 1.0, blocks=six),
        "skip_update": lambda: optax.chain(adam, mask),
        "constant": lambda: scaled,
        "constant_mask": lambda: optax.chain(scaled, mask),
        "magma_single": lambda: with_magma(adam, SURVIVAL, key=key),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), arms[arm]())


def scale_blocks(factors: jax.Array) -> optax.GradientTransformation:
    """Multiplies the update of each layer's P and Q by its factor, (L, 2)."""
    return optax.stateless(lambda updates, _: {"PQ": updates["PQ"] * factors[..., None, None]})


# ---------------------------------------------------------------------------------------------
# Runs


def train(
    seed: jax.Array,
    rates: jax.Array,
    multipliers: jax.Array,
    heavy: jax.Array,
    arm: str,
    steps: int,
) -> tuple[jax.Array, Params, jax.Array]:
    """One run for each rate, on the same batches; the seed decides start, batches and coins.

    Returns:
        Loss on a fixed batch (steps / 50, R), parameters at the same times, and the mean of Magma's
        scores over the run (R, ...), 1 without Magma.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    coins = jax.random.key_data(keys[1])
    fixed = fixed_batch(heavy)

    def begin(rate: jax.Array) -> Any:
        params = init(keys[0])
        state = optimizer(arm, rate, coins, multipliers).init(params)
        return params, state, jnp.zeros_like(score(state))

    def one(carry: Any, rate: jax.Array, batch: Batch) -> Any:
        params, state, total = carry
        tx = optimizer(arm, rate, coins, multipliers)
        params, state = apply(tx, jax.grad(loss)(params, batch), state, params)
        return params, state, total + score(state)

    def step(carry: Any, key: jax.Array) -> Any:
        batch = draw(key, heavy)
        return each(lambda pair: one(*pair, batch))((carry, rates)), None

    def interval(carry: Any, keys: jax.Array) -> Any:
        carry, _ = jax.lax.scan(step, carry, keys)
        losses = each(lambda params: loss(params, fixed))(carry[0])
        return carry, (losses, carry[0])

    batches = jax.random.split(keys[2], (steps // LOSS_EVERY, LOSS_EVERY))
    (_, _, total), (losses, params) = jax.lax.scan(interval, jax.vmap(begin)(rates), batches)
    return losses, params, total / steps


def fixed_batch(heavy: ArrayLike) -> Batch:
    """The batch on which losses and Hessians are compared, the same for all runs."""
    return draw(jax.random.key(2**31), heavy)


def score(state: Any) -> jax.Array:
    """Magma's scores, (L, 2) or (); 1 without Magma."""
    return optax.tree.get(state, "alignment", default={}).get("PQ", jnp.ones(()))


def each(function: Any) -> Any:
    """`function` over the leading axis: all at once on an accelerator, in turn on a CPU's cache."""
    if jax.default_backend() == "cpu":
        return functools.partial(jax.lax.map, function)
    return jax.vmap(function)


@functools.partial(jax.jit, static_argnames=("arm", "steps"))
def sweep(
    seeds: jax.Array, rates: jax.Array, multipliers: jax.Array, heavy: ArrayLike, **static: Any
) -> Any:
    """`train` for every seed: a leading axis (seed, ...)."""
    return each(lambda seed: train(seed, rates, multipliers, heavy, **static))(seeds)


@jax.jit
def curvature(params: Params, heavy: ArrayLike) -> jax.Array:
    """`condition_numbers` on the fixed batch of a (seed, time) array of parameters: (..., 2)."""
    fixed = fixed_batch(heavy)
    # Each Hessian takes 0.2 GB on an accelerator, so the times of a run take their turn.
    in_time = functools.partial(jax.lax.map, lambda params: condition_numbers(params, fixed))
    return each(in_time)(params)


def measure(setting: dict[str, Any], magma_scores: np.ndarray | None) -> dict[str, Any]:
    """One arm at every rate, and the Hessian's condition along the runs at the best.

    Args:
        setting: What is recorded as settings.
        magma_scores: Magma's mean scores at its best rate, for the arms that take constants.
    """
    seeds, rates = jnp.arange(setting["seeds"]), jnp.array(setting["rates"], jnp.float32)
    multipliers = jnp.ones((LAYERS, 2)) if magma_scores is None else SURVIVAL * magma_scores
    heavy = setting["tails"] == "heavy"
    losses, params, scores = sweep(
        seeds, rates, multipliers, heavy, arm=setting["arm"], steps=setting["steps"]
    )
    losses, scores = np.asarray(losses), np.asarray(scores)  # (seeds, times, R), (seeds, R, ...)

    final = np.where(np.isnan(losses), np.inf, losses)[:, -LAST:].mean(axis=1)  # (seeds, R)
    medians = np.median(final, axis=0)
    best = int(np.argmin(medians))
    every = CURVATURE_EVERY // LOSS_EVERY
    at_best = {"PQ": params["PQ"][:, every - 1 :: every, best]}  # (seeds, times, L, 2, d, d)
    diagonal, eigenvalue = np.moveaxis(np.asarray(curvature(at_best, heavy)), -1, 0)
    thin = max(1, losses.shape[1] // 50)
    return {
        "best": best,
        "rate": setting["rates"][best],
        "interior": 0 < best < len(rates) - 1,
        "loss": digits(quartiles(final[:, best])),
        "loss_by_seed": digits(final[:, best]),
        "median_loss_by_rate": digits(medians),
        "loss_over_time": digits(quartiles(losses[:, thin - 1 :: thin, best])),
        "loss_steps": LOSS_EVERY * thin,
        "score": digits(np.median(scores[:, best], axis=0)),
        "diagonal_over_time": digits(quartiles(diagonal)),
        "eigenvalue_over_time": digits(quartiles(eigenvalue)),
    }


def quartiles(values: np.ndarray) -> np.ndarray:
    """Quartiles over the first axis."""
    return np.percentile(values, (25, 50, 75), axis=0)


def digits(values: np.ndarray) -> Any:
    """`values` as nested lists of numbers of four digits."""
    shorten = lambda value: float(f"{value:.4g}")  # noqa: E731
    return np.vectorize(shorten, otypes=[object])(values).tolist()


# ---------------------------------------------------------------------------------------------
# Tables and figures, from the records alone


def table(recorded: list[dict[str, Any]]) -> str:
    """Final loss, its ratio to Adam's and the last condition numbers, a row a record."""
    head = f"{'tails':>5} {'arm':>13} {'steps':>5} seeds {'rate':>7} {'loss (quartiles)':>29}"
    lines = [f"{head} {'/ Adam':>7} {'diagonal':>9} {'eigenvalue':>10}"]
    adam = {key(record, arm=None): record for record in recorded if arm_of(record) == "adam"}
    for record in recorded:
        s, r = record["settings"], record["results"]
        low, median, high = map(float, r["loss"])
        base = adam.get(key(record, arm=None))
        ratio = median / float(base["results"]["loss"][1]) if base else float("nan")
        line = f"{s['tails']:>5} {s['arm']:>13} {s['steps']:5} {s['seeds']:5}"
        line += f" {r['rate']:6g}{' ' if r['interior'] else '*'}"
        line += f" {median:9.4g} ({low:8.4g}, {high:8.4g}) {ratio:7.3f}"
        last = [float(r[name][1][-1]) for name in ("diagonal_over_time", "eigenvalue_over_time")]
        lines.append(line + f" {last[0]:9.4g} {last[1]:10.4g}")
    lines.append("Each arm at its best rate (* at the edge of the grid)")
    return "\n".join(lines)


def arm_of(record: dict[str, Any]) -> str:
    """The record's arm."""
    return record["settings"]["arm"]


def key(record: dict[str, Any], **changes: Any) -> str:
    """A record's settings with `changes`, to look others up by."""
    return repr(sorted((record["settings"] | changes).items()))


def size(record: dict[str, Any]) -> tuple[int, int, int]:
    """How much a record's runs are: steps, number of rates and seeds."""
    s = record["settings"]
    return s["steps"], len(s["rates"]), s["seeds"]


def plot(recorded: list[dict[str, Any]], folder: Path) -> Path:
    """Draws the largest recorded runs: loss and both condition numbers of every arm."""
    largest = max(map(size, recorded))
    drawn = [record for record in recorded if size(record) == largest]
    rows = {
        "loss_over_time": "loss",
        "diagonal_over_time": "max / median |diag H|",
        "eigenvalue_over_time": "max / median |eigenvalue of H|",
    }
    figure = Figure(figsize=(9, 9), layout="constrained")
    shown = [tails for tails in TAILS if any(r["settings"]["tails"] == tails for r in drawn)]
    axes = figure.subplots(len(rows), len(shown), sharex=True, squeeze=False)
    for record in drawn:
        s, r = record["settings"], record["results"]
        for row, name in enumerate(rows):
            every = r["loss_steps"] if name == "loss_over_time" else CURVATURE_EVERY
            low, median, high = np.array(r[name], float)
            steps = every * np.arange(1, len(median) + 1)
            panel = axes[row, shown.index(s["tails"])]
            label = f"{s['arm']}, rate {r['rate']:g}"
            panel.plot(steps, median, color=COLORS[s["arm"]], label=label, linewidth=1.2)
            if s["arm"] in ("adam", "magma"):
                panel.fill_between(steps, low, high, color=COLORS[s["arm"]], alpha=0.2, lw=0)
    for row, label in enumerate(rows.values()):
        for column, tails in enumerate(shown):
            axes[row, column].set(yscale="log", ylabel=label)
            axes[0, column].set_title(f"{tails} tails")
            axes[0, column].legend(fontsize="x-small")
            axes[-1, column].set_xlabel("step")
    figure.suptitle(f"Linear transformer, median of {largest[2]} seeds (quartiles of two arms)")
    return save(figure, folder / "linear_transformer.png", dpi=62)


# ---------------------------------------------------------------------------------------------
# Command line


def parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="python -m examples.paper.figure3_heavy_tails",
        description="Adam and Magma on a linear transformer with light and heavy tails.",
    )
    add, rate = parser.add_argument, number(0.0, above=True)
    add("--tails", nargs="+", choices=TAILS, default=list(TAILS))
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="constants take Magma's scores")
    add("--steps", type=multiple_of(CURVATURE_EVERY), default=500, help="(%(default)s)")
    add("--seeds", type=whole(1), default=2, help="runs at each rate (%(default)s)")
    add("--rates", nargs="+", type=rate, default=RATES, help="learning rates (0.02 to 0.32)")
    add("--full", action="store_true", help="10000 steps, 6 seeds, 9 rates: wants a GPU")
    add_figure_options(parser, RESULTS / "linear_transformer.jsonl")
    return parser


def settings(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run that the options ask for, `magma` before the arms that take its scores."""
    steps, seeds, rates = args.steps, args.seeds, sorted(args.rates)
    if args.full:
        steps, seeds, rates = 10_000, 6, FULL_RATES
    arms = [arm for arm in ARMS if arm in args.arms]
    return [
        {
            "experiment": "linear_transformer",
            "tails": tails,
            "arm": arm,
            "steps": steps,
            "seeds": seeds,
            "rates": rates,
            "batch": BATCH,
        }
        for tails in args.tails
        for arm in arms
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is not recorded yet, or draws."""
    options = parser()
    args = options.parse_args(argv)
    if args.full:
        options.refuse_idle(args, "beside --full", "steps", "seeds", "rates")
    if recorded := records_to_draw(options, args):
        say(plot(recorded, args.images))
        return 0
    start = time.perf_counter()
    asked = settings(args)
    for count, setting in enumerate(asked, 1):
        done = {key(record): record for record in records.read(args.out)}
        name = f"{count}/{len(asked)} {setting['tails']} {setting['arm']}"
        if key({"settings": setting}) in done:
            say(f"{name}: recorded already")
            continue
        scores = None
        if setting["arm"] in ("constant", "constant_mask"):
            magma = done.get(key({"settings": setting}, arm="magma"))
            if magma is None:
                print_error(f"{setting['arm']} needs the record of magma first")
                return 2
            scores = np.array(magma["results"]["score"])
        record = records.append(args.out, setting, measure(setting, scores))
        clock = f"{time.perf_counter() - start:.0f} s"
        say(f"{name}: loss {record['results']['loss'][1]} after {clock}")
    wanted = {key({"settings": setting}) for setting in asked}
    say(table([record for record in records.read(args.out) if key(record) in wanted]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
