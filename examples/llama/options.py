"""The trainer's command line."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

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
from examples.llama.config import PRESETS, RECIPES
from examples.llama.sharding import AXES

# These may change when a run goes on: they don't touch the parameters, beyond rounding. Which data
# it is, its digest says, not its path.
FREE_SETTINGS = {
    "data",
    "tokenizer",
    "attention",
    "out",
    "resume",
    "mesh",
    "mesh_axes",
    "accumulate",
    "distributed",
    "host_timeout",
    "checkpoint_every",
    "eval_every",
    "eval_batches",
    "log_every",
    "prompt",
    "sample_temperature",
}


def mesh(text: str) -> dict[str, int]:
    """Parses sizes of mesh axes, such as ``data=2,fsdp=4``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes:
            raise argparse.ArgumentTypeError(f"{part!r}: give each of {', '.join(AXES)} once")
        sizes[name] = int(whole(1)(size))
    return sizes


def hosts(text: str) -> tuple[str, int, int]:
    """Parses the first host's address, the number of hosts and this host's number."""
    parts = text.split(",")
    if len(parts) != 3 or ":" not in parts[0]:
        raise argparse.ArgumentTypeError(f"{text!r} is not ADDRESS:PORT,COUNT,NUMBER")
    count, index = int(whole(1)(parts[1])), int(whole(0)(parts[2]))
    if index >= count:
        raise argparse.ArgumentTypeError(f"host {index} of {count}: numbers start at 0")
    return parts[0], count, index


def parser() -> Parser:
    """Returns the parser of the command line."""
    count, positive, seed = whole(1), number(0.0, above=True), whole(0)
    parser = Parser(
        prog="python -m examples.llama.train",
        description="Trains a Llama on text, with or without Magma.",
    )

    add = parser.add_argument_group("model").add_argument
    add("--preset", choices=PRESETS, default="nano", help="size of the model (%(default)s)")
    add("--scan-layers", action="store_true", help="stack the layers: compiles faster")
    add("--remat", action="store_true", help="recompute layers in the backward pass")
    add("--dtype", choices=["float32", "bfloat16"], help="of the computation (float32 on CPUs)")
    add("--attention", choices=["xla", "cudnn"], help="implementation (cudnn for bfloat16 on GPUs)")

    add = parser.add_argument_group("data").add_argument
    add("--data", help="what examples.kit.data.load.load reads (the Python standard library)")
    add("--tokenizer", help="path of a tokenizer.json (bytes, or the data's own)")
    add("--packing", choices=["concat", "document"], default="concat", help="rows (%(default)s)")
    add("--batch-size", type=count, help="sequences a step, over all devices (by preset)")
    add("--seq-len", type=count, help="tokens a sequence (by preset)")

    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=LEARNING_RATES, default="adam", help="the base (%(default)s)")
    add("--magma", action="store_true", help="apply Magma to attention and MLP matrices")
    add("--skip-update", action="store_true", help="apply SkipUpdate to them")
    add("--survival-prob", type=probability, help="of a masked block, or 'alignment' (0.5)")
    add("--temperature", type=positive, help="Magma's (2.0)")
    add("--mask-key", type=seed, help="seed of the coins (--seed)")
    add("--learning-rate", type=positive, help="peak (by optimizer; only Adam's was tuned)")
    add("--steps", type=count, help="steps to train (by preset); more with --resume extend a run")
    add("--warmup", type=whole(0), help="steps of linear warm-up (a tenth of --steps)")
    add("--weight-decay", type=number(0.0), help="decoupled (0.1 for adamw, else 0)")
    add("--clip", type=number(0.0), default=0.0, help="largest gradient norm; 0: any (%(default)s)")
    add("--seed", type=seed, default=0, help="of parameters and data order (%(default)s)")

    add = parser.add_argument_group("run").add_argument
    add("--out", type=local_path, help="folder of the run (a fresh one under runs/)")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--checkpoint-every", type=count, default=100, help="steps (%(default)s)")
    add("--eval-every", type=count, default=100, help="steps (%(default)s)")
    add("--eval-batches", type=count, default=8, help="of each but the last (%(default)s)")
    add("--log-every", type=count, default=10, help="steps (%(default)s)")
    add("--prompt", default="def ", help="start of the sampled lines (%(default)r)")
    add("--sample-temperature", type=positive, default=0.8, help="(%(default)s)")

    add = parser.add_argument_group("devices and hosts").add_argument
    add("--mesh", type=mesh, default={}, help="data=2,fsdp=2,tensor=1 (all devices on data)")
    add("--mesh-axes", choices=["auto", "explicit"], default="auto", help="type (%(default)s)")
    add("--accumulate", type=count, default=1, help="micro-batches a batch (%(default)s)")
    add_host_options(add)
    return parser


def add_host_options(add: Callable[..., Any]) -> None:
    """Adds what says which hosts there are."""
    add(
        "--distributed",
        type=hosts,
        nargs="?",
        const=(),
        metavar="ADDRESS:PORT,COUNT,NUMBER",
        help="one process a host; without a value, as the cluster's environment says",
    )
    add("--host-timeout", type=whole(1), default=100, help="seconds; then a silent host is lost")


def host_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parses these options alone, whatever the others are; without `--distributed` if it can't."""
    parser = Parser(add_help=False)
    add_host_options(parser.add_argument)
    try:
        return parser.parse_known_args(argv)[0]
    except SettingsError:
        return argparse.Namespace(distributed=None)


def resolve(args: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Fills in what depends on other options or on the device.

    Args:
        args: As parsed.
        saved: The configuration of the run that goes on. Its length, warm-up and dtype stay where
            none is given: their defaults depend on the other options or on the device.

    Raises:
        SettingsError: For options that don't go together.
    """
    if args.magma and args.skip_update:
        raise SettingsError("--magma and --skip-update exclude each other")
    need(args, args.magma, "--magma", "temperature")
    if args.survival_prob == "alignment":
        need(args, args.magma, "--magma", "survival_prob")
    masked = args.magma or args.skip_update
    need(args, masked, "--magma or --skip-update", "survival_prob", "mask_key")
    if args.distributed is not None and args.out is None:
        raise SettingsError("--distributed needs --out, one folder that all hosts see")
    if args.resume and args.out is None:
        raise SettingsError("--resume needs --out, the folder of the run to go on with")

    for name in ("steps", "warmup", "dtype"):
        default(args, name, (saved or {}).get(name))
    for name, value in dataclasses.asdict(RECIPES[args.preset]).items():
        default(args, name, value)
    default(args, "warmup", args.steps // 10)
    default(args, "learning_rate", LEARNING_RATES[args.optimizer][args.magma])
    default(args, "weight_decay", 0.1 if args.optimizer == "adamw" else 0.0)
    default(args, "survival_prob", 0.5)
    default(args, "temperature", 2.0)
    default(args, "mask_key", args.seed)
    default(args, "dtype", "float32" if platform() == "cpu" else "bfloat16")
    flash = platform() == "gpu" and args.dtype == "bfloat16"
    default(args, "attention", "cudnn" if flash else "xla")

    if args.warmup >= args.steps:
        raise SettingsError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
    args.mesh = whole_mesh(args.mesh, jax.device_count())
    rows = args.mesh["data"] * args.mesh["fsdp"]
    if args.batch_size % rows:
        raise SettingsError(
            f"--batch-size {args.batch_size} is not a multiple of the {rows} devices "
            "that its rows are spread over (data times fsdp)"
        )
    if args.batch_size % (rows * args.accumulate):
        raise SettingsError(
            f"--accumulate {args.accumulate} does not cut --batch-size {args.batch_size} "
            f"into multiples of {rows} rows (data times fsdp)"
        )
    if args.attention == "cudnn" and (platform(), args.dtype) != ("gpu", "bfloat16"):
        raise SettingsError("--attention cudnn needs a GPU and --dtype bfloat16")
    return args


def whole_mesh(sizes: dict[str, int], devices: int) -> dict[str, int]:
    """Completes the sizes of the mesh: `data` takes the devices that are left, others 1.

    Raises:
        SettingsError: If the product isn't the number of devices.
    """
    others = math.prod(size for name, size in sizes.items() if name != "data")
    full = {name: 1 for name in AXES} | {"data": max(1, devices // others)} | sizes
    if math.prod(full.values()) != devices:
        given = ",".join(f"{name}={size}" for name, size in full.items())
        raise SettingsError(f"--mesh {given} is not made of all {devices} devices")
    return full


def masking(args: argparse.Namespace) -> str:
    """Returns what is done to the attention and MLP updates."""
    return "magma" if args.magma else "skip" if args.skip_update else "none"


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that decide the parameters, ready for JSON."""
    return {name: value for name, value in vars(args).items() if name not in FREE_SETTINGS}
