"""The paper's figure 2: Adam, C-Adam and Muon train a Nano MoE, with and without Magma.

    python -m examples.paper.figure2_nano_moe

trains the `tiny` preset on the text that comes with Python, in minutes on one CPU core: it shows
that all works, not which is best. On GPUs, one process each:

    python -m examples.paper.figure2_nano_moe --preset paper --data FOLDER --steps 2000 \
        --arms all --time-limit 3000

The paper's own length is 50,000 steps of 491,520 tokens, the default of that preset. Magma has a
coin per tensor or per expert. Model and losses are those of `examples.nanomoe`. Repeating a command
goes on where it stopped, and runs nothing that is recorded; `python -m examples.paper.report FILE`
shows the tables and draws the curves. Arms beyond the paper, such as `adam+aligned@0.1386`, are
spelled out in `examples.paper.beyond`.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import sys
from collections.abc import Sequence

import optax
from jax.typing import ArrayLike

from examples.kit.optimizers import direction
from examples.kit.options import whole
from examples.nanomoe.config import PRESETS, RECIPES
from examples.nanomoe.step import expert_axis, matrices
from examples.paper import RESULTS
from examples.paper.arms import Arm, Base, Build, family, magma, plain
from examples.paper.baselines.c_adam import scale_by_c_adam
from examples.paper.beyond import Beyond
from examples.paper.command import (
    add_arms_option,
    add_search_options,
    conduct,
    make_parser,
    names_of,
)
from examples.paper.experiment import Experiment
from examples.paper.tasks.nano_moe import B2, CLIP, WEIGHT_DECAY, Task
from examples.paper.tasks.text import digest_of

CENTRE = 1.2e-3  # twice nanoMoE's own rate, which is thereby among the first three


def decayed(base: Base) -> Base:
    """The direction, and weight decay."""
    return lambda: optax.chain(base(), optax.add_decayed_weights(WEIGHT_DECAY, matrices))


def clipped(build: Build) -> Build:
    """Clips gradients first: Magma then sees those that the base sees."""

    def build_clipped(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        return optax.chain(optax.clip_by_global_norm(CLIP), build(learning_rate, key))

    return build_clipped


adam = decayed(lambda: direction("adam", B2))
c_adam = decayed(lambda: scale_by_c_adam(b2=B2))
muon = decayed(lambda: direction("muon", B2))

BASES: dict[str, Base] = {"adam": adam, "c_adam": c_adam, "muon": muon}
UNCLIPPED = {
    **family("adam", adam, CENTRE),
    "adam+magma/expert": Arm(magma(adam, blocks=expert_axis), 2 * CENTRE),
    "c_adam": Arm(plain(c_adam), CENTRE),
    **family("muon", muon, 2 * CENTRE),
}
ARMS = {name: Arm(clipped(arm.build), arm.centre) for name, arm in UNCLIPPED.items()}
EXPERIMENT = Experiment("examples.paper.figure2_nano_moe", Task, Beyond(ARMS, BASES, clipped))


def make_task(args: argparse.Namespace, platform: str) -> Task:
    """Fills in what the options leave to the preset and the platform.

    Raises:
        DataError: If the text can't be used.
    """
    recipe = RECIPES[args.preset]
    steps = args.steps or recipe.steps
    warmup = max(1, recipe.warmup * steps // recipe.steps) if args.warmup is None else args.warmup
    return Task(
        args.preset,
        steps=steps,
        warmup=warmup,
        batch_size=args.batch_size or recipe.batch_size,
        accumulate=args.accumulate or recipe.accumulate,
        seq_len=args.seq_len or recipe.seq_len,
        dtype=args.dtype or ("float32" if platform == "cpu" else "bfloat16"),
        data=args.data,
        digest=digest_of(args.data),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that the command line asks for; returns the exit status."""
    parser = make_parser(__doc__)
    add, count = parser.add_argument, whole(1)
    add("--preset", choices=PRESETS, default="tiny", help="size of the model (%(default)s)")
    add("--data", help="what examples.kit.data.load reads (default: Python's own text)")
    add("--steps", type=count, help="of training (default: by preset)")
    add("--warmup", type=whole(0), help="steps (default: by preset, scaled with --steps)")
    add("--batch-size", type=count, help="rows a step (default: by preset)")
    add("--accumulate", type=count, help="micro-batches a batch (default: by preset)")
    add("--seq-len", type=count, help="tokens a row (default: by preset)")
    add("--dtype", choices=["float32", "bfloat16"], help="of the computation (float32 on CPUs)")
    add_search_options(parser, "examples/paper/results/nano_moe.jsonl")
    add_arms_option(parser, ["all"])
    args = parser.parse_args(argv)
    names = names_of(args, ARMS)
    return conduct(EXPERIMENT, parser, args, names, make_task, RESULTS / "nano_moe.jsonl")


if __name__ == "__main__":
    sys.exit(main())
