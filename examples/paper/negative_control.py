"""The paper's negative control: an image classifier, where Magma should not help.

    python -m examples.paper.negative_control

trains a small ResNet on scikit-learn's digits in minutes on one CPU core. The paper's own
experiment, a ResNet-50 on CIFAR-10 for 100 epochs, is

    python -m examples.paper.negative_control --model resnet50 --data FOLDER --epochs 100

with FOLDER as CIFAR-10's authors distribute it. Every arm is tuned alike, on validation images that
are neither trained on nor reported. Repeating a command goes on where it stopped, and runs nothing
that is recorded. `python -m examples.paper.negative_control_report FILE` shows tables and a figure.

The paper gives two accuracies and the number of epochs. All else is chosen here: batches,
augmentation, schedule and decay, and that every convolution and dense kernel is a block of Magma's.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from examples.kit.console import say
from examples.kit.optimizers import path_string
from examples.kit.options import Parser, whole
from examples.paper import RESULTS
from examples.paper.arms import Arm, magma, plain, then
from examples.paper.baselines.controls import constant, constant_times_mask
from examples.paper.in_process import add_options, execute
from examples.paper.negative_control_report import by_rate, table
from examples.paper.searches import at_rates, make_searches
from examples.paper.vision import images
from examples.paper.vision.resnet import MODELS
from examples.paper.vision.train import Task, Trainer
from magma_optax import skip_update

WEIGHT_DECAY = 0.05  # decoupled, of kernels; part of the update that Magma masks
MEAN_MULTIPLIER = 0.269  # of Magma here: p = 0.5 times its mean score on the digits, 0.537
CENTRE = 4e-3  # the search of every arm begins at this or twice this rate: one grid for all


def kernels(path: str, leaf: Any) -> bool:
    """Selects convolution and dense kernels; not biases nor batch normalisation."""
    del leaf
    return path.split("/")[-1] == "kernel"


def adamw() -> optax.GradientTransformation:
    """AdamW without learning rate."""

    def decays(params: optax.Params) -> optax.Params:
        return jax.tree.map_with_path(lambda path, x: kernels(path_string(path), x), params)

    return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(WEIGHT_DECAY, decays))


ARMS = {
    "adamw": Arm(plain(adamw), CENTRE),
    "adamw+magma": Arm(magma(adamw, where=kernels), 2 * CENTRE),
    "adamw+skip": Arm(then(adamw, lambda key: skip_update(0.5, where=kernels, key=key)), CENTRE),
    "adamw+constant": Arm(then(adamw, lambda _: constant(MEAN_MULTIPLIER, kernels)), 2 * CENTRE),
    "adamw+constant*mask": Arm(
        then(adamw, lambda key: constant_times_mask(2 * MEAN_MULTIPLIER, 0.5, kernels, key=key)),
        2 * CENTRE,
    ),
    "adamw+damping": Arm(magma(adamw, where=kernels, survival_prob=1.0), 2 * CENTRE),
}


def parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, whole(1)
    add("--data", type=Path, help="CIFAR-10's folder, for Python or binary (default: digits)")
    add("--model", choices=MODELS, default="small", help="(%(default)s)")
    add("--epochs", type=count, default=30, help="(%(default)s)")
    add("--batch-size", type=count, help="images a step (digits: 32, CIFAR-10: 128)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the computation")
    add("--rates", type=numbers, default=[], help="also run all seeds at each of these, A,B,...")
    add_options(parser, ARMS, seeds=5, out=RESULTS / "negative_control.jsonl")
    return parser


def numbers(text: str) -> list[float]:
    """Reads numbers between commas."""
    return [float(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing and prints the table; returns the exit status."""
    args = parser().parse_args(argv)
    names = args.arms.split(",")
    searches = make_searches(args, ARMS, names)
    batch_size = args.batch_size or (32 if args.data is None else 128)
    task = Task(args.model, args.epochs, batch_size, warmup=0.05, dtype=args.dtype)
    try:
        data = images.load(args.data)
        trainer = Trainer(task, data)
    except ValueError as error:  # a DataError, or fewer images than a batch
        sys.exit(f"error: {error}")
    settings = {
        "experiment": "negative_control",
        "data": data.name,
        "weight_decay": WEIGHT_DECAY,
        "mean_multiplier": MEAN_MULTIPLIER,
        **dataclasses.asdict(task),
    }
    searches += at_rates(searches, args.rates)
    found = execute(
        searches,
        settings,
        args.out,
        lambda run: trainer.run(run.arm, ARMS[run.arm], run.learning_rate, run.seed),
        args.time_limit,
    )
    say(f"records: {args.out}\n\n{table(found, names)}")
    say(f"\nmedian validation loss (seeds)\n\n{by_rate(found, names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
