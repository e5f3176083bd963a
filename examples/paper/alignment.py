"""How gradients of the Llama agree with their moments, beside what white noise gives.

    python -m examples.paper.alignment                             # `nano`, on a CPU
    python -m examples.paper.alignment --size 40m --data FOLDER    # on a GPU
    python -m examples.paper.alignment --size 40m --report         # its records as tables
    python -m examples.paper.alignment --size 40m --plot           # and as a figure

Trains the bare base as `table1_llama` does and looks on, block by block, in two ways:

- Along the run: cos(mu_t, g_t) and cos(mu_{t-1}, g_t) of consecutive steps around each point.
- At some points the parameters stand still, and gradients of fresh batches are compared: those of
  a quarter of the training batch, of one, of 4 and of 16. Nothing but the text differs between
  them, so what they share is the mean gradient and the rest is noise. The run then goes on as if
  nobody had looked.

A repeated command measures what is not recorded yet; it trains again up to the last point of that.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import dataclasses
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
from examples.kit.data.error import DataError
from examples.kit.optimizers import LEARNING_RATES, MOMENTUM_DECAYS, direction
from examples.kit.options import Parser, SettingsError, number, platform, whole
from examples.paper import RESULTS
from examples.paper.alignment_report import plot, tables
from examples.paper.arms import Arm
from examples.paper.cosines import (
    BEFORE,
    NOW,
    blocks_of,
    inner_products,
    last_cosines,
    signal_to_noise,
    watch,
)
from examples.paper.drawing import add_figure_options, records_to_draw
from examples.paper.table1_llama import add_task_options, make_task
from examples.paper.tasks.llama import Problem, Task
from examples.paper.trainer import State, Trainer, stacked
from examples.paper.white_noise import noise_cosine

RATES = {"adam": 1e-3, "muon": 4e-3}  # the best ones of the 40m size
POINTS = (1 / 30, 1 / 20, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the run; a tenth ends the warm-up
FROZEN = (0.1, 0.4, 1.0)
GROWTH = (0.25, 1, 4, 16)  # batch sizes at parameters that stand still, in training batches
FRESH = 1_000  # added to the seed: another order of the text

Setting = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured on one run.

    Attributes:
        task: The Llama, its text and its length.
        base: A key of `MOMENTUM_DECAYS`.
        learning_rate: The schedule's peak.
        seed: Of initial parameters and order of the text.
        window: Consecutive steps that end at a point.
        points: Steps after which the run is looked at, multiples of `window`.
        frozen: Those of them at which batches are compared.
        rows: Batch sizes that are compared, each a multiple of the first.
        gradients: How many of each size.
    """

    task: Task
    base: str
    learning_rate: float
    seed: int
    window: int
    points: tuple[int, ...]
    frozen: tuple[int, ...]
    rows: tuple[int, ...]
    gradients: int

    @property
    def b1(self) -> float:
        """Decay of the base's first moment."""
        return MOMENTUM_DECAYS[self.base]

    def along(self, step: int) -> Setting:
        """Returns the settings of the record of a point of the run."""
        return self._setting("run", step) | {"window": self.window}

    def still(self, step: int, rows: int) -> Setting:
        """Returns the settings of the record of a batch size at a point."""
        return self._setting("frozen", step) | {"rows": rows, "gradients": self.gradients}

    def settings(self) -> list[Setting]:
        """Returns those of all records, in the order in which they are measured."""
        return [
            setting
            for step in self.points
            for setting in [
                self.along(step),
                *(self.still(step, rows) for rows in self.rows if step in self.frozen),
            ]
        ]

    def _setting(self, measured: str, step: int) -> Setting:
        own = {"base": self.base, "learning_rate": self.learning_rate, "seed": self.seed}
        place = {"measured": measured, "step": step, "b1": self.b1}
        return self.task.settings() | {"experiment": "alignment"} | own | place


class Laboratory:
    """Trains and measures; keeps what it has read and compiled for the next base."""

    def __init__(self, task: Task):
        """Reads the data.

        Raises:
            DataError: If it can't be used.
        """
        self.trainer = Trainer(task)
        self.problem: Problem = self.trainer.problem
        self._products = jax.jit(
            lambda params, batches, slots, sizes: inner_products(
                self.problem, params, batches, slots, sizes
            ),
            static_argnums=3,
        )

    def run(self, plan: Plan, missing: Sequence[Setting], out: Path) -> bool:
        """Trains up to the last point of what is missing and records it on the way.

        Args:
            plan: What is measured.
            missing: The settings that have no record yet, some of the plan's.
            out: The file of records.

        Returns:
            Whether the losses stayed finite.
        """
        start = time.perf_counter()
        problem, trainer = self.problem, self.trainer
        rate, key = jnp.float32(plan.learning_rate), jnp.uint32(plan.seed)
        params, variables = problem.initial(plan.seed)
        paths = list(blocks_of(params))
        chunks = stacked(problem.batches(plan.seed), plan.window)
        first = next(chunks)
        init, train = trainer.compile(watched(plan), params, variables, first, rate, key)
        state = State(params, variables, init(params, rate, key))
        del params  # the first chunk takes its buffers
        last = max(setting["step"] for setting in missing)
        chunks = itertools.chain([first], chunks)
        for step in range(plan.window, last + 1, plan.window):
            state, seen = train(state, next(chunks), rate, key)
            here = [setting for setting in missing if setting["step"] == step]
            if not here:
                continue
            losses = np.asarray(seen["loss"])
            if not np.isfinite(losses).all():
                return False
            compared = [s for s in here if s["measured"] == "frozen"]
            gram = self.compare(plan, state.params) if compared else {}
            for setting in here:
                if setting["measured"] == "run":
                    found = optax.tree.get(state.opt_state, "cosines")
                    results = {"loss": float(losses.mean())}
                    results |= along_the_run(plan, step, np.asarray(found), paths)
                else:
                    size = plan.rows.index(setting["rows"])
                    results = at_rest(plan, {path: gram[path][size] for path in paths})
                    results["tokens"] = setting["rows"] * plan.task.seq_len
                records.append(out, setting, rounded(results))
                say(line(setting, results, time.perf_counter() - start))
        return True

    def compare(self, plan: Plan, params: optax.Params) -> dict[str, np.ndarray]:
        """Returns the inner products of fresh gradients, by path (sizes, K, K)."""
        batches, slots = self.fresh(plan)
        return jax.device_get(self._products(params, batches, slots, len(plan.rows)))

    def fresh(self, plan: Plan) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the text of K gradients in micro-batches, and the size that each completes.

        The same at every point, so that points differ in their parameters alone.
        """
        smallest, largest = plan.rows[0], plan.rows[-1]
        total = plan.gradients * largest
        source = self.problem.batches(plan.seed + FRESH)
        drawn = list(itertools.islice(source, math.ceil(total / plan.task.batch_size)))
        shape = plan.gradients, largest // smallest, smallest, plan.task.seq_len
        batches = {
            name: np.concatenate([batch[name] for batch in drawn])[:total].reshape(shape)
            for name in drawn[0]
        }
        ends = np.array(plan.rows) // smallest
        return batches, np.searchsorted(ends, np.arange(1, ends[-1] + 1)).astype(np.int32)


def watched(plan: Plan) -> Arm:
    """The bare base, its gradients looked at on their way in."""

    def build(learning_rate: Any, key: Any) -> optax.GradientTransformation:
        del key  # no coins
        base = optax.chain(direction(plan.base), optax.scale_by_learning_rate(learning_rate))
        return optax.chain(watch(plan.b1, plan.window), base)

    return Arm(build, plan.learning_rate)


def along_the_run(plan: Plan, step: int, seen: np.ndarray, paths: Sequence[str]) -> dict[str, Any]:
    """Returns what a record says of the steps up to `step`: means and standard errors by block.

    Args:
        plan: What is measured.
        step: The last of the steps.
        seen: The cosines, (window, 2, blocks).
        paths: Names of the blocks.
    """
    steps = np.arange(step - plan.window + 1, step + 1)
    mean = seen.mean(axis=0, dtype=np.float64)
    error = seen.std(axis=0, dtype=np.float64, ddof=1) / math.sqrt(plan.window)
    name = lambda values: dict(zip(paths, values.tolist(), strict=True))  # noqa: E731
    return {
        "null": float(noise_cosine(plan.b1, steps).mean()),
        "now": name(mean[NOW]),
        "now_error": name(error[NOW]),
        "before": name(mean[BEFORE]),
        "before_error": name(error[BEFORE]),
    }


def at_rest(plan: Plan, gram: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns what a record says of a batch size.

    Args:
        plan: What is measured.
        gram: Inner products of the gradients by block, (K, K).
    """
    found = {path: last_cosines(products, plan.b1) for path, products in gram.items()}
    ratios = {path: signal_to_noise(products) for path, products in gram.items()}
    return {
        "null": float(noise_cosine(plan.b1, plan.gradients)),
        "now": {path: float(now.mean()) for path, (now, _) in found.items()},
        "before": {path: float(before.mean()) for path, (_, before) in found.items()},
        "signal_to_noise": {path: float(ratio) for path, (ratio, _) in ratios.items()},
        "signal_to_noise_error": {path: float(error) for path, (_, error) in ratios.items()},
    }


def rounded(results: Any) -> Any:
    """Returns results to five digits."""
    return jax.tree.map(lambda x: float(f"{x:.5g}"), results)


def line(setting: Setting, results: dict[str, Any], seconds: float) -> str:
    """Says in a line what a record found, in the mean over blocks."""
    mean = {name: np.mean(list(results[name].values())) for name in ("now", "before")}
    rows = f", {setting['rows']} rows" if "rows" in setting else ""
    return (
        f"{seconds:5.0f} s {setting['base']} step {setting['step']}{rows}: cos(mu_t, g_t) "
        f"{mean['now']:.4f} (noise {results['null']:.4f}), cos(mu_t-1, g_t) {mean['before']:+.4f}"
    )


# ---------------------------------------------------------------------------------------------
# Command line


def base_and_rate(text: str) -> tuple[str, float]:
    """Parses ``adam`` or ``adam=1e-3``."""
    name, _, rate = text.partition("=")
    if name not in LEARNING_RATES:
        known = ", ".join(LEARNING_RATES)
        raise argparse.ArgumentTypeError(f"no base {name!r}; there are {known}")
    if rate:
        return name, number(0.0, above=True)(rate)
    if name not in RATES:
        raise argparse.ArgumentTypeError(f"{name} needs a rate, as in {name}=1e-3")
    return name, RATES[name]


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="python -m examples.paper.alignment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, whole(1)
    add_task_options(parser)
    add(
        "--bases", type=base_and_rate, nargs="+", metavar="NAME[=RATE]",
        default=list(RATES.items()), help="with their peak learning rates (adam=1e-3 muon=4e-3)",
    )  # fmt: skip
    add("--window", type=whole(2), default=25, help="steps that end at a point (%(default)s)")
    add("--points", type=count, nargs="+", help="steps to look at (default: 8 along the run)")
    add("--frozen", type=count, nargs="+", help="points to compare batches at (default: three)")
    add("--rows", type=count, nargs="+", help="of the batches (default: 1/4, 1, 4 and 16 of one)")
    add("--gradients", type=whole(3), default=16, help="of each batch size (%(default)s)")
    add("--seed", type=whole(0), default=0, help="of parameters and text (%(default)s)")
    add("--report", action="store_true", help="print the records as tables instead of running")
    add_figure_options(parser, RESULTS / "alignment_SIZE.jsonl")
    return parser


def make_plans(args: argparse.Namespace, task: Task) -> list[Plan]:
    """Returns a plan for each base.

    Raises:
        SettingsError: If points or batch sizes don't fit.
    """
    window, steps, batch = args.window, task.steps, task.batch_size
    if steps < window:
        raise SettingsError(f"--window {window} is longer than the run of {steps} steps")
    frozen = args.frozen or args.points or on_the_way(FROZEN, steps, window)
    points = args.points or on_the_way(POINTS, steps, window)
    for name, given in (("--points", points), ("--frozen", frozen)):
        for step in given:
            if step % window or step > steps:
                raise SettingsError(
                    f"{name} {step} must be a multiple of --window {window}, at most {steps}"
                )
    rows = args.rows or [max(1, round(share * batch)) for share in GROWTH]
    if rows != sorted(set(rows)) or any(size % rows[0] for size in rows):
        shown = " ".join(map(str, rows))
        raise SettingsError(f"--rows {shown} must rise, and be multiples of the first")
    points = sorted({*points, *frozen})
    shared = (window, tuple(points), tuple(sorted(set(frozen))), tuple(rows), args.gradients)
    return [Plan(task, base, rate, args.seed, *shared) for base, rate in args.bases]


def on_the_way(shares: Sequence[float], steps: int, window: int) -> list[int]:
    """Returns shares of a run in steps, as multiples of `window` that lie within it."""
    most = steps // window
    return sorted({window * min(most, max(1, round(share * steps / window))) for share in shares})


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is not recorded yet, or shows the records; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.refuse_idle(args, "in this program", "validations")
    args.out = args.out.with_name(args.out.name.replace("SIZE", args.size))
    try:
        if args.report:
            say(tables(read(args)))
            return 0
        if recorded := records_to_draw(parser, args):
            say(plot(recorded, args.images))
            return 0
        return measure(args)
    except (DataError, SettingsError) as error:
        print_error(str(error))
        return 2


def read(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the records.

    Raises:
        SettingsError: If there are none, or a line is damaged.
    """
    try:
        found = records.read(args.out)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if not found:
        raise SettingsError(f"no records in {args.out}")
    return found


def measure(args: argparse.Namespace) -> int:
    """Measures what is not recorded yet; returns the exit status."""
    plans = make_plans(args, make_task(args, platform()))
    done = [record["settings"] for record in records.read(args.out)]
    laboratory = None
    for plan in plans:
        asked = plan.settings()
        missing = [setting for setting in asked if setting not in done]
        say(f"{plan.base}: {len(asked) - len(missing)} of {len(asked)} are in {args.out}")
        if not missing:
            continue
        laboratory = laboratory or Laboratory(plan.task)
        if not laboratory.run(plan, missing, args.out):
            print_error(f"{plan.base} diverged at rate {plan.learning_rate:g}; give a lower one")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
