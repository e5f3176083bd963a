"""The trainer's command line."""

import argparse
import dataclasses

from examples.kit.optimizers import LEARNING_RATES
from examples.kit.options import (
    Parser,
    SettingsError,
    default,
    local_path,
    need,
    number,
    platform,
    probability,
    whole,
)
from examples.nanomoe.config import PRESETS, RECIPES


def parser() -> Parser:
    """Returns the parser of the command line."""
    count, positive, seed = whole(1), number(0.0, above=True), whole(0)
    parser = Parser(
        prog="python -m examples.nanomoe.train",
        description="Trains a mixture of experts on text, with or without Magma.",
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="nano", help="size of the model (%(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], help="of the computation (float32 on CPUs)")
    add("--data", help="what examples.kit.data.load.load reads (the Python standard library)")
    add("--tokenizer", help="path of a tokenizer.json (bytes, or the data's own)")
    add("--batch-size", type=count, help="sequences a step (by preset)")
    add("--accumulate", type=count, help="micro-batches a batch (by preset)")
    add("--seq-len", type=count, help="tokens a sequence (by preset)")
    add("--optimizer", choices=["adam", "adamw", "muon"], default="adamw", help="(%(default)s)")
    add("--magma", action="store_true", help="apply Magma to attention, MLPs and experts")
    add("--experts-as-blocks", action="store_true", help="a coin and a score for each expert")
    add("--survival-prob", type=probability, help="of a masked block, or 'alignment' (0.5)")
    add("--temperature", type=positive, help="Magma's (2.0)")
    add("--mask-key", type=seed, help="seed of the coins (--seed)")
    add("--learning-rate", type=positive, help="peak (by preset and optimizer)")
    add("--steps", type=count, help="steps to train (by preset)")
    add("--warmup", type=whole(0), help="steps of linear warm-up (by preset)")
    add("--weight-decay", type=number(0.0), help="of matrices, decoupled (0; adamw and muon: 0.1)")
    add("--clip", type=number(0.0), default=1.0, help="largest gradient norm; 0: any (%(default)s)")
    add("--seed", type=seed, default=0, help="of parameters and data order (%(default)s)")
    add("--log-every", type=count, default=10, help="steps (%(default)s)")
    add("--eval-every", type=count, default=100, help="steps (%(default)s)")
    add("--out", type=local_path, help="folder of the run (a fresh one under runs/)")
    return parser


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Fills in what depends on other options or on the device.

    Raises:
        SettingsError: For options that don't go together.
    """
    if args.experts_as_blocks and not args.magma:
        raise SettingsError("--experts-as-blocks needs --magma, and does nothing without; add it")
    need(args, args.magma, "--magma", "survival_prob", "temperature", "mask_key")
    for name, value in dataclasses.asdict(RECIPES[args.preset]).items():
        default(args, name, value)
    default(args, "learning_rate", LEARNING_RATES[args.optimizer][args.magma])
    default(args, "weight_decay", 0.0 if args.optimizer == "adam" else 0.1)
    default(args, "survival_prob", 0.5)
    default(args, "temperature", 2.0)
    default(args, "mask_key", args.seed)
    default(args, "dtype", "float32" if platform() == "cpu" else "bfloat16")

    positions = PRESETS[args.preset].length
    if args.seq_len > positions:
        raise SettingsError(f"--seq-len {args.seq_len} is more than the {positions} positions")
    if args.batch_size % args.accumulate:
        raise SettingsError(
            f"--accumulate {args.accumulate} does not cut --batch-size {args.batch_size} evenly"
        )
    if args.warmup >= args.steps:
        raise SettingsError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
    if args.out is not None and args.out.is_dir() and any(args.out.iterdir()):
        raise SettingsError(f"{args.out} is not empty; give another --out")
    return args
