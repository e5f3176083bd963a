"""The trainer's command line."""

import argparse
import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

from examples.kit import training_options
from examples.kit.options import Parser, SettingsError, default, jsonable, need, platform
from examples.kit.training_options import knowing
from examples.nanomoe.config import PRESETS, RECIPES
from examples.nanomoe.train_config import TrainConfig


def parse(argv: Sequence[str]) -> TrainConfig:
    """Returns the configuration that a command line means.

    Raises:
        SettingsError: For options that are wrong or don't go together.
    """
    return resolve(parser().parse(argv))


def parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="python -m examples.nanomoe.train",
        description="Trains a mixture of experts on text, with or without Magma.",
    )
    add = knowing(parser.add_argument)
    add("--preset", choices=PRESETS)
    add("--dtype")
    add("--data")
    add("--tokenizer")
    add("--batch-size")
    add("--accumulate")
    add("--seq-len")
    add("--optimizer", choices=["adam", "adamw", "muon"], default="adamw", help="(%(default)s)")
    add("--magma", help="apply Magma to attention, MLPs and experts")
    add("--control")
    add("--multiplier")
    add("--experts-as-blocks", action="store_true", help="a coin and a score for each expert")
    add("--survival-prob")
    add("--temperature")
    add("--mask-key")
    add("--lazy")
    add("--learning-rate")
    add("--steps")
    add("--warmup")
    add("--weight-decay", help="of matrices, decoupled (0; adamw and muon: 0.1)")
    add("--clip", default=1.0)
    add("--seed")
    add("--log-every")
    add("--eval-every")
    add("--out")
    return parser


def resolve(args: argparse.Namespace) -> TrainConfig:
    """Fills in what depends on other options or on the device, and returns the configuration.

    Raises:
        SettingsError: For options that don't go together.
    """
    if args.experts_as_blocks and not args.magma:
        raise SettingsError("--experts-as-blocks needs --magma, and does nothing without; add it")
    if args.magma and args.control:
        raise SettingsError("--magma and --control exclude each other")
    need(args, args.control, "--control", "multiplier")
    need(args, args.magma or args.control, "--magma", "survival_prob", "temperature")
    if args.survival_prob == "alignment":
        need(args, args.magma, "--magma", "survival_prob")
    need(args, args.magma, "--magma", "mask_key", "lazy")
    default(args, "weight_decay", 0.0 if args.optimizer == "adam" else 0.1)
    training_options.complete(args, RECIPES[args.preset], platform())

    model = dataclasses.replace(PRESETS[args.preset], dtype=args.dtype)
    if args.seq_len > model.length:
        raise SettingsError(f"--seq-len {args.seq_len} is more than the {model.length} positions")
    if args.batch_size % args.accumulate:
        raise SettingsError(
            f"--accumulate {args.accumulate} does not cut --batch-size {args.batch_size} evenly"
        )
    if args.out is not None and args.out.is_dir() and any(args.out.iterdir()):
        raise SettingsError(f"{args.out} is not empty; give another --out")
    masking = "magma" if args.magma else "control" if args.control else "none"
    return TrainConfig(
        preset=args.preset,
        model=model,
        text=training_options.text(args),
        optimizer=training_options.optimizer(args, masking, b2=0.95),
        accumulate=args.accumulate,
        experts_as_blocks=args.experts_as_blocks,
        out=args.out,
        log_every=args.log_every,
        eval_every=args.eval_every,
        options=MappingProxyType(jsonable(args)),
    )
