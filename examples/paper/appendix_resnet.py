"""The paper's negative control: an image classifier, where Magma should not help.

    python -m examples.paper.appendix_resnet

trains a small ResNet on scikit-learn's digits in minutes on one CPU core. The paper's own
experiment, a ResNet-50 on CIFAR-10 for 100 epochs, is

    python -m examples.paper.appendix_resnet --model resnet50 --data FOLDER --epochs 100

with FOLDER as CIFAR-10's authors distribute it. Every arm is tuned alike, on validation images that
are neither trained on nor reported. Repeating a command goes on where it stopped, and runs nothing
that is recorded. `python -m examples.paper.report FILE` shows tables and a figure.

The paper gives two accuracies and the number of epochs. All else is chosen here: batches,
augmentation, schedule and decay, and that every convolution and dense kernel is a block of Magma's.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import optax

from examples.kit.options import whole
from examples.kit.paths import path_string
from examples.paper import RESULTS
from examples.paper.arms import Arm, magma, plain, then
from examples.paper.baselines.controls import constant_times_mask
from examples.paper.command import (
    add_arms_option,
    add_search_options,
    conduct,
    make_parser,
    names_of,
)
from examples.paper.experiment import Experiment
from examples.paper.tasks.resnet import MEAN_MULTIPLIER, WEIGHT_DECAY, Task
from examples.paper.vision.resnet import MODELS
from magma_optax import control, skip_update

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
    "adamw+constant": Arm(
        then(adamw, lambda _: control(MEAN_MULTIPLIER, where=kernels)), 2 * CENTRE
    ),
    "adamw+constant*mask": Arm(
        then(adamw, lambda key: constant_times_mask(2 * MEAN_MULTIPLIER, 0.5, kernels, key=key)),
        2 * CENTRE,
    ),
    "adamw+damping": Arm(magma(adamw, where=kernels, survival_prob=1.0), 2 * CENTRE),
}
EXPERIMENT = Experiment("examples.paper.appendix_resnet", Task, ARMS)


def make_task(args: argparse.Namespace, platform: str) -> Task:
    """Fills in what the options leave to the data."""
    del platform  # float32 everywhere
    batch_size = args.batch_size or (32 if args.data is None else 128)
    return Task(args.model, args.epochs, batch_size, warmup=0.05, dtype=args.dtype, data=args.data)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that the command line asks for; returns the exit status."""
    parser = make_parser(__doc__)
    add, count = parser.add_argument, whole(1)
    add("--data", help="CIFAR-10's folder, for Python or binary (default: digits)")
    add("--model", choices=MODELS, default="small", help="(%(default)s)")
    add("--epochs", type=count, default=30, help="(%(default)s)")
    add("--batch-size", type=count, help="images a step (digits: 32, CIFAR-10: 128)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the computation")
    add_search_options(parser, "examples/paper/results/negative_control.jsonl", seeds=5)
    add_arms_option(parser, ["all"])
    args = parser.parse_args(argv)
    names = names_of(args, ARMS)
    return conduct(EXPERIMENT, parser, args, names, make_task, RESULTS / "negative_control.jsonl")


if __name__ == "__main__":
    sys.exit(main())
