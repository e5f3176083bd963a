"""The options that trainers share, and the parts of a configuration that these make.

A trainer's own `options.py` lists all it takes, says what is other there, and alone sees what
`argparse` returns.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from examples.kit.optimizers import LEARNING_RATES, Masking, OptimizerConfig
from examples.kit.options import (
    SettingsError,
    default,
    local_path,
    number,
    probability,
    whole,
)
from examples.kit.text import Text

COUNT = {"type": whole(1)}
STEPS = COUNT | {"help": "steps (%(default)s)"}
POSITIVE = {"type": number(0.0, above=True)}
SEED = {"type": whole(0)}
SHARED: dict[str, dict[str, Any]] = {
    "--preset": {"default": "nano", "help": "size of the model (%(default)s)"},
    "--dtype": {"choices": ["float32", "bfloat16"], "help": "of the computation (float32 on CPUs)"},
    "--data": {"help": "what examples.kit.data.load.load reads (the Python standard library)"},
    "--tokenizer": {"help": "path of a tokenizer.json (bytes, or the data's own)"},
    "--batch-size": COUNT | {"help": "sequences a step (by preset)"},
    "--accumulate": COUNT | {"help": "micro-batches a batch (by preset)"},
    "--seq-len": COUNT | {"help": "tokens a sequence (by preset)"},
    "--magma": {"action": "store_true"},
    "--survival-prob": {"type": probability, "help": "of a masked block, or 'alignment' (0.5)"},
    "--temperature": POSITIVE | {"help": "Magma's (2.0)"},
    "--mask-key": SEED | {"help": "seed of the coins (--seed)"},
    "--lazy": {
        "action": "store_const",
        "const": True,
        "help": "compute no direction for a dropped block: cheaper on muon",
    },
    "--control": {
        "action": "store_true",
        "help": "in Magma's place, multiply these updates by a constant: what to compare it with",
    },
    "--multiplier": POSITIVE | {"help": "of --control (Magma's mean: 0.277 for Adam)"},
    "--learning-rate": POSITIVE | {"help": "peak (by preset and optimizer)"},
    "--steps": COUNT | {"help": "steps to train (by preset)"},
    "--warmup": {"type": whole(0), "help": "steps of linear warm-up (by preset)"},
    "--weight-decay": {"type": number(0.0)},
    "--clip": {"type": number(0.0), "help": "largest gradient norm; 0: any (%(default)s)"},
    "--seed": SEED | {"default": 0, "help": "of parameters and data order (%(default)s)"},
    "--out": {"type": local_path, "help": "folder of the run (a fresh one under runs/)"},
    "--eval-every": STEPS | {"default": 100},
    "--log-every": STEPS | {"default": 10},
}


def knowing(add_argument: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `add_argument` with what it isn't told of an option that trainers share."""
    return lambda name, **own: add_argument(name, **SHARED.get(name, {}) | own)


def complete(args: argparse.Namespace, recipe: Any, kind: str) -> None:
    """Fills in what the preset, the base, the seed or the device decide.

    Args:
        args: The options; what was given stays.
        recipe: How the preset is trained, a dataclass with options as its fields.
        kind: The kind of device, ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Raises:
        SettingsError: If the warm-up is longer than the training.
    """
    for name, value in dataclasses.asdict(recipe).items():
        default(args, name, value)
    default(args, "learning_rate", LEARNING_RATES[args.optimizer][args.magma or args.control])
    default(args, "survival_prob", 0.5)
    default(args, "temperature", 2.0)
    default(args, "mask_key", args.seed)
    default(args, "dtype", "float32" if kind == "cpu" else "bfloat16")
    if args.warmup >= args.steps:
        raise SettingsError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")


def text(args: argparse.Namespace, **own: Any) -> Text:
    """Returns the choice of text, with a trainer's `own` fields."""
    return Text(args.data, args.tokenizer, args.seq_len, args.batch_size, args.seed, **own)


def optimizer(args: argparse.Namespace, masking: Masking, **own: Any) -> OptimizerConfig:
    """Returns the optimizer's configuration, with a trainer's `own` fields."""
    return OptimizerConfig(
        name=args.optimizer,
        learning_rate=args.learning_rate,
        steps=args.steps,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        clip=args.clip,
        masking=masking,
        survival_prob=args.survival_prob,
        temperature=args.temperature,
        mask_key=args.mask_key,
        multiplier=args.multiplier,
        lazy=bool(args.lazy),
        **own,
    )
