"""Proposition 1, the descent lemma and effective smoothness, measured (paper, sections 2 and 5).

    python -m examples.paper.section5_theory            # a small Llama on the Python library's text
    python -m examples.paper.section5_theory --plot     # figure, from the records alone

Proposition 1. With delta the base's update and delta~ = m delta / p (SkipUpdate), block by block,

    E l(theta - delta~) - l(theta - delta) = sum_b R_b + O(|delta|^3)
    R_b = (1 - p) / (2 p) delta_b' H_bb delta_b                       (the geometric regulariser)

Descent lemma. For SGD with g masked, over p, and times the score s,

    E l(theta_next) <= l(theta) - eta E g' S grad l + eta^2 / (2 p) sum_b L_b E |s_b g_b|^2
    rho_b = E |s_b g_b|^2 / E |g_b|^2,   effective smoothness of block b: rho_b L_b / p

The lemma as stated leaves out curvature between blocks; `counterexample` breaks it in two numbers.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike

from examples.kit import records
from examples.kit.console import print_error, say
from examples.kit.data.load import load
from examples.kit.figure import Figure
from examples.kit.loss import cross_entropy
from examples.kit.options import Parser, number, whole
from examples.kit.paths import by_path
from examples.kit.step import apply
from examples.llama.config import LlamaConfig
from examples.llama.model import Llama
from examples.paper import RESULTS
from examples.paper.drawing import add_figure_options, records_to_draw, save
from magma_optax import attention_and_mlp, skip_update, with_magma

Params = dict[str, jax.Array]  # by path; a masked leaf is a block
Loss = Callable[[Params], jax.Array]
SCALES = (1.0, 0.5, 0.25, 0.125)  # of the update, to see the remainder vanish


# ---------------------------------------------------------------------------------------------
# Curvature of blocks


def hessian_product(loss: Loss, params: Params, v: Params) -> Params:
    """H v."""
    return jax.jvp(jax.grad(loss), (params,), (v,))[1]


def only(block: ArrayLike, tree: Params, blocks: Sequence[str]) -> Params:
    """`tree` with zeros outside the block of that number."""
    number = {path: index for index, path in enumerate(blocks)}
    return {path: jnp.where(number.get(path, -1) == block, x, 0) for path, x in tree.items()}


def geometric_regularizer(
    loss: Loss, params: Params, delta: Params, p: float, blocks: Sequence[str]
) -> dict[str, jax.Array]:
    """R_b = (1 - p) / (2 p) delta_b' H_bb delta_b of each block."""

    def curvature(block: jax.Array) -> jax.Array:
        v = only(block, delta, blocks)
        return optax.tree.vdot(v, hessian_product(loss, params, v))

    values = (1 - p) / (2 * p) * jax.lax.map(curvature, jnp.arange(len(blocks)))
    return dict(zip(blocks, values, strict=True))


def smoothness(
    loss: Loss, params: Params, blocks: Sequence[str], steps: int = 20
) -> dict[str, jax.Array]:
    """The eigenvalue of each H_bb largest in size, by power iteration: a local stand-in for L_b."""

    def largest(block: jax.Array) -> jax.Array:
        def step(v: Params, _: None) -> tuple[Params, jax.Array]:
            hv = only(block, hessian_product(loss, params, v), blocks)
            norm = optax.tree.norm(hv)
            return optax.tree.scale(1 / jnp.where(norm > 0, norm, 1), hv), norm

        v = only(block, optax.tree.random_like(jax.random.key(0), params), blocks)
        v = optax.tree.scale(1 / optax.tree.norm(v), v)
        return jax.lax.scan(step, v, None, steps)[1][-1]

    return dict(zip(blocks, jax.lax.map(largest, jnp.arange(len(blocks))), strict=True))


# ---------------------------------------------------------------------------------------------
# Proposition 1


def mean_over_coins(
    loss: Loss, params: Params, delta: Params, p: float, blocks: Sequence[str], draws: int
) -> tuple[jax.Array, jax.Array]:
    """E l(theta - delta~) - l(theta - delta) and its standard error, by coins of `skip_update`.

    The first-order term, whose mean over coins is zero, is taken off each draw: without it the
    noise would hide the curvature.
    """
    tx = skip_update(p, where=lambda path, leaf: path in blocks)
    state = tx.init(params)
    dense = optax.tree.sub(params, delta)
    value, gradient = jax.value_and_grad(loss)(dense)

    def difference(step: jax.Array) -> jax.Array:
        masked, _ = tx.update(delta, state._replace(step=step))
        away = optax.tree.sub(delta, masked)  # (theta - delta~) - (theta - delta)
        moved = loss(optax.tree.add(dense, away)) - value
        return moved - optax.tree.vdot(gradient, away)

    samples = jax.lax.map(difference, jnp.arange(draws, dtype=jnp.int32))
    return jnp.mean(samples), jnp.std(samples) / jnp.sqrt(draws)


@functools.partial(jax.jit, static_argnames=("loss_of", "p", "blocks", "draws"))
def proposition(
    loss_of: Any, params: Params, delta: Params, batch: Any, *, p: float, blocks: Any, draws: int
) -> dict[str, Any]:
    """Both sides of Proposition 1 for the update times each of `SCALES`."""
    loss = lambda params: loss_of(params, batch)  # noqa: E731
    regularizer = geometric_regularizer(loss, params, delta, p, blocks)
    scaled = lambda c: optax.tree.scale(c, delta)  # noqa: E731
    mean = lambda c: mean_over_coins(loss, params, scaled(c), p, blocks, draws)  # noqa: E731
    measured, error = jax.lax.map(mean, jnp.array(SCALES))
    predicted = jnp.array(SCALES) ** 2 * sum(regularizer.values())
    decrease = loss(params) - loss(optax.tree.sub(params, delta))
    return {
        "measured": measured,
        "error": error,
        "predicted": predicted,
        "decrease": decrease,
        "regularizer": regularizer,
    }


# ---------------------------------------------------------------------------------------------
# Descent lemma


@functools.partial(jax.jit, static_argnames=("loss_of", "tx", "p", "blocks", "draws"))
def descent(
    loss_of: Any,
    params: Params,
    state: Any,
    batches: Any,
    *,
    tx: optax.GradientTransformation,
    eta: float,
    p: float,
    blocks: Any,
    draws: int,
) -> dict[str, Any]:
    """The terms of the descent lemma at one step; E over the `batches` is exact.

    The objective is the mean loss of the batches, and the blocks alone move.

    Args:
        loss_of: Loss of (params, batch).
        params: theta.
        state: Of `tx`.
        batches: Trees with a leading axis (K, ...).
        tx: SGD under Magma, rescaled by 1 / p.
        eta: SGD's rate.
        p: Survival probability.
        blocks: Paths of the blocks.
        draws: Coins tossed for each batch to measure E l(theta_next).

    Returns:
        The loss; the lemma's two terms, ``descent`` and ``penalty``; in place of the penalty, the
        exact second-order terms ``within`` blocks and ``between`` them; the mean ``decrease``
        measured and its ``error`` by coins; ``alpha`` and ``penalty_ratio``, the two terms over
        those of plain SGD; ``best_decrease_ratio``, the decrease that the lemma promises at its
        best eta, over plain SGD's; and by block the score, rho / p and L.
    """
    objective = lambda params: jnp.mean(jax.lax.map(lambda b: loss_of(params, b), batches))  # noqa: E731
    mean_gradient = jax.grad(objective)(params)

    def terms(batch: Any, steps: jax.Array) -> Any:
        g = jax.grad(loss_of)(params, batch)
        s = by_path(optax.tree.get(tx.update(g, state, params)[1], "alignment"))
        descents = {b: jnp.vdot(g[b], mean_gradient[b]) for b in blocks}
        squares = {b: jnp.vdot(g[b], g[b]) for b in blocks}

        v = {path: s[path] * x if path in blocks else jnp.zeros_like(x) for path, x in g.items()}
        curvature = lambda v: optax.tree.vdot(v, hessian_product(objective, params, v))  # noqa: E731
        each = jax.lax.map(lambda b: curvature(only(b, v, blocks)), jnp.arange(len(blocks)))
        within, between = jnp.sum(each), curvature(v) - jnp.sum(each)

        def next_loss(step: jax.Array) -> jax.Array:
            updates, _ = tx.update(g, optax.tree.set(state, step=step), params)
            moves = {b: params[b] + updates[b] for b in blocks}
            return objective({**params, **moves})

        return s, descents, squares, within, between, jax.lax.map(next_loss, steps)

    count = len(jax.tree.leaves(batches)[0])
    # Coins follow from the step: each draw of each batch takes one of its own.
    draw = jnp.arange(count * draws, dtype=jnp.int32).reshape(count, draws)
    steps = optax.tree.get(state, "step") + draw
    of_batch = lambda pair: terms(*pair)  # noqa: E731
    s, descents, squares, within, between, next_losses = jax.lax.map(of_batch, (batches, steps))
    big_l = smoothness(objective, params, blocks)
    rho = {b: jnp.mean(s[b] ** 2 * squares[b]) / jnp.mean(squares[b]) for b in blocks}
    sgd_descent = sum(jnp.mean(descents[b]) for b in blocks)
    sgd_penalty = sum(big_l[b] * jnp.mean(squares[b]) for b in blocks)
    alpha = sum(jnp.mean(s[b] * descents[b]) for b in blocks) / sgd_descent
    ratio = sum(rho[b] / p * big_l[b] * jnp.mean(squares[b]) for b in blocks) / sgd_penalty
    value = objective(params)
    return {
        "loss": value,
        "descent": eta * alpha * sgd_descent,
        "penalty": eta**2 / 2 * ratio * sgd_penalty,
        "within": eta**2 / (2 * p) * jnp.mean(within),
        "between": eta**2 / 2 * jnp.mean(between),
        "decrease": value - jnp.mean(next_losses),
        "error": jnp.sqrt(jnp.mean(jnp.var(next_losses, axis=1, ddof=1)) / next_losses.size),
        "alpha": alpha,
        "penalty_ratio": ratio,
        "best_decrease_ratio": alpha**2 / ratio,
        "score": {b: jnp.mean(s[b]) for b in blocks},
        "rho_over_p": {b: rho[b] / p for b in blocks},
        "L": big_l,
    }


def counterexample(eta: float = 0.1, p: float = 0.5, s: float = 0.5) -> dict[str, float]:
    """The two sides of the descent lemma for l = (x + y)^2 / 2 at (1, 1), blocks x and y, L = 1.

    The gradient is exact and the score constant, so nothing but the coins is random.
    """
    g = 2.0
    step = eta * s * g / p
    pairs = [(x, y) for x in (0, 1) for y in (0, 1)]
    chance = lambda m: p if m else 1 - p  # noqa: E731
    left = sum(chance(x) * chance(y) * (2 - step * (x + y)) ** 2 / 2 for x, y in pairs)
    right = 2 - eta * s * 2 * g**2 + eta**2 / (2 * p) * 2 * (s * g) ** 2
    return {"expected_loss": left, "bound": right}


# ---------------------------------------------------------------------------------------------
# A small transformer


def make_model(config: LlamaConfig, seed: int) -> tuple[Callable[[Params, Any], jax.Array], Params]:
    """Mean loss of (params, batch) and parameters by path."""
    graphdef, state = nnx.split(Llama(config, rngs=nnx.Rngs(seed)))
    paths = [path for path, _ in nnx.to_flat_state(state)]
    name = lambda path: "/".join(map(str, path))  # noqa: E731
    params = {name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}

    def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        flat = [(path, nnx.Param(params[name(path)])) for path in paths]
        model = nnx.merge(graphdef, nnx.from_flat_state(flat))
        total, count = cross_entropy(model(batch["inputs"]), batch["targets"])
        return total / count

    return loss, params


def masked_blocks(params: Params) -> tuple[str, ...]:
    """Paths of the attention and MLP matrices."""
    return tuple(path for path, x in params.items() if attention_and_mlp(path, x))


def run_proposition(args: argparse.Namespace, missing: Callable[[dict], bool]) -> None:
    """Trains with Adam under SkipUpdate and measures both sides of Proposition 1 on the way."""
    loss, params, batches = setup(args)
    blocks = masked_blocks(params)
    base = optax.adam(args.adam_rate)
    tx = optax.chain(base, skip_update(0.5, where=attention_and_mlp))
    state = tx.init(params)
    move = jax.jit(functools.partial(apply, tx))
    gradient, base_update = jax.jit(jax.grad(loss)), jax.jit(base.update)
    for step in range(args.steps + 1):
        batch = next(batches)
        g = gradient(params, batch)
        for p in args.survival_probs:
            setting = describe(args, "proposition") | {"step": step, "p": p}
            if step and step % args.every == 0 and missing(setting):
                delta = optax.tree.scale(-1, base_update(g, state[0])[0])
                sides = proposition(
                    loss, params, delta, batch, p=p, blocks=blocks, draws=args.draws
                )
                record(args.out, setting, sides)
        params, state = move(g, state, params)


def run_descent(args: argparse.Namespace, missing: Callable[[dict], bool]) -> None:
    """Trains with SGD under rescaled Magma and measures the descent lemma on the way."""
    loss, params, batches = setup(args)
    blocks = masked_blocks(params)
    tx = with_magma(optax.sgd(args.sgd_rate), 0.5, rescale=True, where=attention_and_mlp)
    state = tx.init(params)
    objective = jax.tree.map(lambda *x: jnp.stack(x), *[next(batches) for _ in range(8)])
    gradient = jax.jit(jax.grad(loss))
    move = jax.jit(functools.partial(apply, tx))
    for step in range(args.steps + 1):
        setting = describe(args, "descent") | {"step": step, "p": 0.5, "batches": 8, "draws": 16}
        if step and step % args.every == 0 and missing(setting):
            terms = descent(
                loss, params, state, objective,
                tx=tx, eta=args.sgd_rate, p=0.5, blocks=blocks, draws=16,
            )  # fmt: skip
            record(args.out, setting, terms)
        # The eight batches are the whole data set, so that the lemma's E is over what trains.
        batch = jax.tree.map(lambda x, i=step: x[i % 8], objective)
        params, state = move(gradient(params, batch), state, params)


def setup(args: argparse.Namespace) -> Any:
    """Loss, parameters and batches."""
    data = load(seq_len=args.length, batch_size=args.batch_size, seed=args.seed)
    config = LlamaConfig(data.vocab_size, args.width, 2 * args.width, 2, args.layers)
    return *make_model(config, args.seed), iter(data.train)


def describe(args: argparse.Namespace, experiment: str) -> dict[str, Any]:
    """The options that decide the numbers of an experiment."""
    names = ["layers", "width", "batch_size", "length", "seed"]
    names += ["adam_rate", "draws"] if experiment == "proposition" else ["sgd_rate"]
    settings = {name: getattr(args, name) for name in names}
    return {"experiment": experiment, "data": records.data_name(None)} | settings


def record(path: Path, setting: dict[str, Any], results: Any) -> None:
    """Appends the record and prints its numbers."""
    short = lambda x: np.vectorize(lambda y: float(f"{y:.4g}"), otypes=[object])(x)  # noqa: E731
    results = jax.tree.map(lambda x: short(np.asarray(x)).tolist(), results)
    records.append(path, setting, results)
    say({key: setting[key] for key in ("experiment", "step", "p")})
    for key, value in results.items():
        if not isinstance(value, dict):
            say(f"    {key}: {value}")


# ---------------------------------------------------------------------------------------------
# Figure, from the records alone


def plot(recorded: list[dict[str, Any]], folder: Path) -> Path:
    """Draws both sides of Proposition 1, the lemma's terms, and rho / p against L by block."""
    of = lambda kind: [r for r in recorded if r["settings"]["experiment"] == kind]  # noqa: E731
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for p, color in zip((0.25, 0.5, 0.75), ("C3", "C0", "C2"), strict=True):
        found = [r["results"] for r in of("proposition") if r["settings"]["p"] == p]
        if found:
            names = ("predicted", "measured", "error")
            x, y, error = (np.concatenate([r[name] for r in found]) for name in names)
            left.errorbar(x, y, 2 * error, fmt="o", color=color, markersize=4, label=f"p = {p:g}")
    line = [x for r in of("proposition") for x in r["results"]["predicted"]]
    left.plot(sorted(line), sorted(line), color="gray", linewidth=0.8, label="equal")
    left.set(xscale="log", yscale="log", title="Proposition 1 (bars: 2 standard errors)")
    left.set(xlabel="sum of R over blocks", ylabel="mean loss over coins, less the dense step's")
    left.legend()

    found = [r["results"] for r in of("descent")]
    array = lambda name: np.array([float(r[name]) for r in found])  # noqa: E731
    second_order = {
        "the lemma's, with the local L": array("penalty"),
        "exact, within and between blocks": array("within") + array("between"),
    }
    for label, term in second_order.items():
        x, y, error = array("descent") - term, array("decrease"), 2 * array("error")
        middle.errorbar(x, y, error, fmt="o", markersize=4, label=label)
    middle.set_xscale("symlog", linthresh=1e-3)
    middle.set_xticks([-0.1, 0, 0.01, 0.1])
    middle.set_yscale("symlog", linthresh=1e-3)  # a step may be uphill
    if found:
        ends = [array("decrease").min(), array("decrease").max()]
        middle.plot(ends, ends, color="gray", linewidth=0.8, label="equal")
        middle.set_ylim(min(0.0, 2 * ends[0]), 2 * ends[1])
    middle.set(title="Descent lemma, SGD under Magma")
    middle.set(xlabel="descent less second-order term", ylabel="measured decrease")
    middle.legend(
        fontsize="small", title="second-order term", loc="upper center", bbox_to_anchor=(0.5, -0.2)
    )

    seeds = sorted({r["settings"]["seed"] for r in of("descent")})
    for seed in seeds:
        found = [r["results"] for r in of("descent") if r["settings"]["seed"] == seed]
        x = [abs(r["L"][b]) for r in found for b in r["L"]]
        y = [r["rho_over_p"][b] for r in found for b in r["L"]]
        right.plot(x, y, "o", markersize=4, label=f"seed {seed}")
    right.set(xscale="log", ylim=(0.25, 0.8), title="Effective smoothness by block")
    right.set(xlabel="L (largest eigenvalue of the block)", ylabel="rho / p")
    right.axhspan(0.286, 0.775, color="gray", alpha=0.15, label="all that scores allow")
    right.legend(fontsize="small")
    return save(figure, folder / "theory.png", dpi=70)


# ---------------------------------------------------------------------------------------------
# Command line


def parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="python -m examples.paper.section5_theory",
        description="Proposition 1 and the descent lemma on a small transformer.",
    )
    add, count, positive = parser.add_argument, whole(1), number(0.0, above=True)
    add("--steps", type=count, default=200, help="of each training run (%(default)s)")
    add("--every", type=count, default=50, help="steps between measurements (%(default)s)")
    add("--draws", type=count, default=512, help="coins for a mean (%(default)s)")
    add("--layers", type=count, default=2, help="(%(default)s)")
    add("--width", type=count, default=32, help="a multiple of 4 (%(default)s)")
    add("--batch-size", type=count, default=8, help="(%(default)s)")
    add("--length", type=count, default=32, help="tokens a sequence (%(default)s)")
    add("--adam-rate", type=positive, default=3e-3, help="for Proposition 1 (%(default)s)")
    add("--sgd-rate", type=positive, default=0.5, help="for the descent lemma (%(default)s)")
    add(
        "--survival-probs",
        nargs="+",
        type=number(0.0, above=True, high=1.0),
        default=[0.25, 0.5, 0.75],
    )
    add("--seed", type=whole(0), default=0, help="of parameters and data (%(default)s)")
    add_figure_options(parser, RESULTS / "theory.jsonl")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is not recorded yet, or draws."""
    options = parser()
    args = options.parse_args(argv)
    if recorded := records_to_draw(options, args):
        say(plot(recorded, args.images))
        return 0
    if args.width % 4:
        print_error(f"--width must be a multiple of 4, got {args.width}")
        return 2
    done = [r["settings"] for r in records.read(args.out)]
    missing = lambda setting: setting not in done  # noqa: E731
    run_proposition(args, missing)
    run_descent(args, missing)
    sides = counterexample()
    say(
        "Lemma, l = (x + y)^2 / 2 at (1, 1), eta 0.1: expected loss "
        f"{sides['expected_loss']:.4f} exceeds the bound {sides['bound']:.4f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
