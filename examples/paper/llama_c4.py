"""The paper's Table 1: optimizers with and without Magma pre-train a Llama, each at its best rate.

    python -m examples.paper.llama_c4

trains the `nano` size on the text that comes with Python in two minutes on two CPU cores. On GPUs,
one process each:

    python -m examples.paper.llama_c4 --size 40m --data FOLDER \
        --arms adam,adam+magma,adam+constant --time-limit 900

The paper's own sizes are `60m`, `130m`, `350m` and `1b`, with its steps and batch of 512;
`--data FOLDER --packing document` reads C4's shards as it does. Repeating a command goes on where
it stopped; what is recorded is not run again. `python -m examples.paper.llama_report FILE` shows
the tables and draws the curves.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence

from examples.kit.console import say
from examples.kit.options import Parser, local_path, number, seconds, whole
from examples.paper import RESULTS
from examples.paper.arms import ARMS, Arm
from examples.paper.llama_report import table
from examples.paper.llama_run import SIZES, STEPS, Task
from examples.paper.runner import Sweep, execute, find_devices
from examples.paper.searches import add_search_options, at_rates, make_searches
from examples.paper.sweep import Search

CONTROLLED = "adam,adam+magma,adam+constant"


def parser(description: str | None = __doc__) -> Parser:
    """Returns the options that sweeps of the Llama share."""
    parser = Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count, positive = parser.add_argument, whole(1), number(0.0, above=True)
    add("--size", choices=SIZES, default="nano", help="of the model")
    add(
        "--data",
        help="text, C4 shards or tokens; see examples/kit/data/load.py (default: Python's)",
    )
    add("--packing", choices=["concat", "document"], default="concat", help="rows of documents")
    add("--steps", type=count, help="of training (default: by size)")
    add("--batch-size", type=count, help="rows a step (default: by size)")
    add("--micro-batches", type=count, default=1, help="parts of a batch, to save memory")
    add("--seq-len", type=count, help="tokens a row (default: by size)")
    add("--dtype", choices=["float32", "bfloat16"], help="of the computation (float32 on CPUs)")
    add("--validations", type=count, default=1, help="during a run, the end included (%(default)s)")
    add_search_options(parser)
    add(
        "--fixed-rate", type=positive, nargs="+", default=[], metavar="RATE",
        help="run every arm at each of these learning rates, without a search",
    )  # fmt: skip
    add(
        "--out",
        type=local_path,
        help="JSON lines (default: examples/paper/results/llama_SIZE.jsonl)",
    )
    add("--time-limit", type=seconds, default=math.inf, help="seconds; no run ends later")
    return parser


def refuse_idle(options: Parser, args: argparse.Namespace) -> None:
    """Refuses what says how to search where nothing is searched."""
    if args.fixed_rate:
        options.refuse_idle(args, "beside --fixed-rate", "centre", "reach")


def sweep(args: argparse.Namespace, arms: Mapping[str, Arm], names: Sequence[str]) -> int:
    """Runs what is missing of `names` and prints the table; returns the exit status.

    Args:
        args: Options of `parser`.
        arms: All arms that there are.
        names: Those to run, most urgent first.
    """
    deadline = time.monotonic() + args.time_limit
    searches = searches_of(args, arms, names)
    platform, devices = find_devices()
    task = make_task(args, platform)
    out = args.out or RESULTS / f"llama_{args.size}.jsonl"
    say(f"{len(devices)} worker(s) on {platform}, records in {out}")
    state = Sweep(task, searches, out, deadline)
    status = execute(state, devices)
    say(table(state.records, names))
    return status


def make_task(args: argparse.Namespace, platform: str) -> Task:
    """Fills in what the options leave to the size and the platform."""
    recipe = STEPS[args.size]
    return Task(
        args.size,
        steps=args.steps or recipe.steps,
        batch_size=args.batch_size or recipe.batch_size,
        seq_len=args.seq_len or recipe.seq_len,
        dtype=args.dtype or ("float32" if platform == "cpu" else "bfloat16"),
        data=args.data,
        packing=args.packing,
        micro_batches=args.micro_batches,
        validations=args.validations,
    )


def searches_of(
    args: argparse.Namespace, arms: Mapping[str, Arm], names: Sequence[str]
) -> list[Search]:
    """Returns each arm's search, or one for each of its fixed rates."""
    searches = make_searches(args, arms, names)
    return at_rates(searches, args.fixed_rate) if args.fixed_rate else searches


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep that the command line asks for; returns the exit status."""
    options = parser()
    options.add_argument("--arms", default=CONTROLLED, help="names, most urgent first, or all")
    args = options.parse_args(argv)
    refuse_idle(options, args)
    names = list(ARMS) if args.arms == "all" else args.arms.split(",")
    return sweep(args, ARMS, names)


if __name__ == "__main__":
    sys.exit(main())
