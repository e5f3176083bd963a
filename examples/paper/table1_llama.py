"""The paper's Table 1: optimizers with and without Magma pre-train a Llama, each at its best rate.

    python -m examples.paper.table1_llama

trains the `nano` size on the text that comes with Python in two minutes on two CPU cores. On GPUs,
one process each:

    python -m examples.paper.table1_llama --size 40m --data FOLDER \
        --arms adam,adam+magma,adam+constant --time-limit 900

The paper's own sizes are `60m`, `130m`, `350m` and `1b`, with its steps and batch of 512;
`--data FOLDER --packing document` reads C4's shards as it does. Repeating a command goes on where
it stopped; what is recorded is not run again. `python -m examples.paper.report FILE` shows the
tables and draws the curves. Arms beyond the paper, such as `adam+aligned@0.1386`, are spelled out
in `examples.paper.beyond`.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from examples.kit.options import Parser, SettingsError, whole
from examples.paper import RESULTS
from examples.paper.arms import ARMS, BASES
from examples.paper.beyond import Beyond
from examples.paper.command import (
    add_arms_option,
    add_search_options,
    conduct,
    make_parser,
    names_of,
)
from examples.paper.experiment import Experiment
from examples.paper.tasks.llama import SIZES, STEPS, Task
from examples.paper.tasks.text import digest_of

EXPERIMENT = Experiment("examples.paper.table1_llama", Task, Beyond(ARMS, BASES))
CONTROLLED = ("adam", "adam+magma", "adam+constant")


def add_task_options(parser: Parser) -> None:
    """Adds what says which Llama is trained, on what and how long."""
    add, count = parser.add_argument, whole(1)
    add("--size", choices=SIZES, default="nano", help="of the model (%(default)s)")
    add("--data", help="what examples.kit.data.load reads (default: Python's own text)")
    add("--packing", choices=["concat", "document"], default="concat", help="rows of documents")
    add("--steps", type=count, help="of training (default: by size)")
    add("--batch-size", type=count, help="rows a step (default: by size)")
    add("--micro-batches", type=count, default=1, help="parts of a batch, to save memory")
    add("--seq-len", type=count, help="tokens a row (default: by size)")
    add("--dtype", choices=["float32", "bfloat16"], help="of the computation (float32 on CPUs)")
    add("--validations", type=count, default=1, help="during a run, the end included (%(default)s)")


def make_task(args: argparse.Namespace, platform: str) -> Task:
    """Fills in what the options leave to the size and the platform, and reads the text.

    Raises:
        DataError: If the text can't be used.
        SettingsError: If the micro-batches don't make up a batch.
    """
    return dataclasses.replace(unread_task(args, platform), digest=digest_of(args.data))


def unread_task(args: argparse.Namespace, platform: str) -> Task:
    """Returns the task without its text's digest.

    Raises:
        SettingsError: If the micro-batches don't make up a batch.
    """
    recipe = STEPS[args.size]
    rows = args.batch_size or recipe.batch_size
    if rows % args.micro_batches:
        raise SettingsError(
            f"--micro-batches {args.micro_batches} does not cut --batch-size {rows}: give a divisor"
        )
    return Task(
        args.size,
        steps=args.steps or recipe.steps,
        batch_size=rows,
        seq_len=args.seq_len or recipe.seq_len,
        dtype=args.dtype or ("float32" if platform == "cpu" else "bfloat16"),
        data=args.data,
        packing=args.packing,
        micro_batches=args.micro_batches,
        validations=args.validations,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that the command line asks for; returns the exit status."""
    parser = make_parser(__doc__)
    add_task_options(parser)
    add_search_options(parser, "examples/paper/results/llama_SIZE.jsonl")
    add_arms_option(parser, CONTROLLED)
    args = parser.parse_args(argv)
    out = RESULTS / f"llama_{args.size}.jsonl"
    return conduct(EXPERIMENT, parser, args, names_of(args, ARMS), make_task, out)


if __name__ == "__main__":
    sys.exit(main())
