"""The trainer's command line."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from examples.kit import training_options
from examples.kit.aot import topology
from examples.kit.optimizers import LEARNING_RATES, Masking
from examples.kit.options import (
    Parser,
    SettingsError,
    default,
    jsonable,
    need,
    number,
    platform,
    whole,
)
from examples.kit.training_options import knowing
from examples.llama.attention import LANES, takes_length
from examples.llama.config import PRESETS, RECIPES
from examples.llama.sharding import AXES
from examples.llama.train_config import Devices, Run, TrainConfig


class CommandLine:
    """What was typed on this host, to be compared with the others' and then resolved.

    Attributes:
        refusal: Why it can't be used; None if it can, as far as is known.
        distributed: Where the hosts meet, for `hosts.join`; None for a single host.
        host_timeout: Seconds after which a silent host is lost.
    """

    def __init__(self, argv: Sequence[str]):
        self.refusal: SettingsError | None = None
        try:
            self._args = parser().parse(argv)
        except SettingsError as error:
            self.refusal, self._args = error, host_options(argv)
        self.distributed: tuple[str, int, int] | tuple[()] | None = self._args.distributed
        if self._args.aot is not None:  # the other hosts are not there
            self.distributed = None
        self.host_timeout: int = self._args.host_timeout

    @property
    def resumed(self) -> Path | None:
        """The folder of the run to go on with; None for a new run."""
        return self._args.out if self._args.resume else None

    def common(self) -> dict[str, Any]:
        """Returns what every host has to be given alike, ready for JSON: all but paths."""
        own = {"distributed", "out", "data", "tokenizer"}
        typed = {name: x for name, x in jsonable(self._args).items() if name not in own}
        return typed | {"out is given": self._args.out is not None}

    def resolve(self, saved: Mapping[str, Any]) -> TrainConfig:
        """Returns the configuration; see the function of this name."""
        return resolve(self._args, saved)


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


def parser(program: str = "python -m examples.llama.train") -> Parser:
    """Returns the parser of the command line of `program`."""
    parser = Parser(prog=program, description="Trains a Llama on text, with or without Magma.")

    add = knowing(parser.add_argument_group("model").add_argument)
    add("--preset", choices=PRESETS)
    either = argparse.BooleanOptionalAction
    add("--scan-layers", action=either, help="stack the layers: compiles faster (8b, 70b)")
    add("--remat", action=either, help="recompute layers in the backward pass (8b, 70b)")
    add("--dtype")
    add("--attention", choices=["xla", "cudnn", "splash"],
        help="implementation (cudnn for bfloat16 on GPUs, splash on TPUs)")  # fmt: skip

    add = knowing(parser.add_argument_group("data").add_argument)
    add("--data")
    add("--tokenizer")
    add("--packing", choices=["concat", "document"], default="concat", help="rows (%(default)s)")
    add("--batch-size", help="sequences a step, over all devices (by preset)")
    add("--seq-len")

    add = knowing(parser.add_argument_group("optimizer").add_argument)
    add("--optimizer", choices=LEARNING_RATES, default="adam", help="the base (%(default)s)")
    add("--magma", help="apply Magma to attention and MLP matrices")
    add("--skip-update", action="store_true", help="apply SkipUpdate to them")
    add("--control")
    add("--multiplier")
    add("--survival-prob")
    add("--temperature")
    add("--mask-key")
    add("--lazy")
    add("--learning-rate", help="peak (by optimizer; only Adam's was tuned)")
    add("--steps", help="steps to train (by preset); more with --resume extend a run")
    add("--warmup", help="steps of linear warm-up (a tenth of --steps)")
    add("--weight-decay", help="decoupled (0.1 for adamw, else 0)")
    add("--clip", default=0.0)
    add("--seed")

    add = knowing(parser.add_argument_group("run").add_argument)
    add("--out")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--checkpoint-every", type=whole(1), default=100, help="steps (%(default)s)")
    add("--eval-every")
    add("--eval-batches", type=whole(1), default=8, help="of each but the last (%(default)s)")
    add("--log-every")
    add("--prompt", default="def ", help="start of the sampled lines (%(default)r)")
    add("--sample-temperature", type=number(0.0, above=True), default=0.8, help="(%(default)s)")

    add = knowing(parser.add_argument_group("devices and hosts").add_argument)
    add("--mesh", type=mesh, default={}, help="data=2,fsdp=2,tensor=1 (all devices on data)")
    add("--mesh-axes", choices=["auto", "explicit"], default="auto", help="type (%(default)s)")
    add("--accumulate", default=1, help="micro-batches a batch (%(default)s)")
    add(
        "--aot",
        metavar="TOPOLOGY",
        help="train nothing: compile for a TPU slice such as v5p:4x4x4, and print what it needs",
    )
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
    parser.set_defaults(aot=None)
    try:
        return parser.parse_known_args(argv)[0]
    except SettingsError:
        return argparse.Namespace(distributed=None, host_timeout=None, aot=None)


def resolve(args: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> TrainConfig:
    """Fills in what depends on other options or on the device, and returns the configuration.

    Args:
        args: As parsed.
        saved: The configuration of the run that goes on. Its length, warm-up and dtype stay where
            none is given: their defaults depend on the other options or on the device.

    Raises:
        SettingsError: For options that don't go together.
    """
    if args.magma + args.skip_update + args.control > 1:
        raise SettingsError("--magma, --skip-update and --control exclude each other")
    need(args, args.control, "--control", "multiplier")
    need(args, args.magma or args.control, "--magma", "temperature")
    if args.survival_prob == "alignment":
        need(args, args.magma, "--magma", "survival_prob")
    masked = args.magma or args.skip_update
    need(args, masked or args.control, "--magma or --skip-update", "survival_prob")
    need(args, masked, "--magma or --skip-update", "mask_key", "lazy")
    if args.distributed is not None and args.out is None:
        raise SettingsError("--distributed needs --out, one folder that all hosts see")
    if args.resume and args.out is None:
        raise SettingsError("--resume needs --out, the folder of the run to go on with")

    for name in ("steps", "warmup", "dtype"):
        default(args, name, (saved or {}).get(name))
    recipe = RECIPES[args.preset]
    default(args, "steps", recipe.steps)
    default(args, "warmup", args.steps // 10)
    default(args, "weight_decay", 0.1 if args.optimizer == "adamw" else 0.0)
    kind = "tpu" if args.aot else platform()  # first: it says so where JAX finds no device
    count = len(topology.devices(args.aot)) if args.aot else jax.device_count()
    training_options.complete(args, recipe, kind)
    default(args, "attention", attention(kind, args.dtype, args.seq_len))

    args.mesh = whole_mesh(args.mesh, count)
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
    if args.attention == "cudnn" and (kind, args.dtype) != ("gpu", "bfloat16"):
        raise SettingsError("--attention cudnn needs a GPU and --dtype bfloat16")
    if args.attention == "splash" and not (kind == "tpu" and takes_length(args.seq_len)):
        raise SettingsError(
            f"--attention splash needs a TPU and a --seq-len that is a multiple of {LANES}"
        )
    return configuration(args)


def attention(kind: str, dtype: str, seq_len: int) -> str:
    """Returns the implementation of attention that suits a kind of device."""
    if kind == "gpu" and dtype == "bfloat16":
        return "cudnn"
    if kind == "tpu" and takes_length(seq_len):
        return "splash"
    return "xla"


def configuration(args: argparse.Namespace) -> TrainConfig:
    """Sorts resolved options into their parts."""
    model = dataclasses.replace(
        PRESETS[args.preset],
        scan_layers=args.scan_layers,
        remat=args.remat,
        dtype=args.dtype,
        attention=args.attention,
    )
    run = Run(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Run)})
    return TrainConfig(
        preset=args.preset,
        model=model,
        text=training_options.text(args, packing=args.packing),
        optimizer=training_options.optimizer(args, masking(args)),
        run=run,
        devices=Devices(args.mesh, args.mesh_axes == "explicit", args.accumulate, args.aot),
        options=MappingProxyType(jsonable(args)),
    )


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


def masking(args: argparse.Namespace) -> Masking:
    """Returns what is done to the attention and MLP updates."""
    if args.control:
        return "control"
    return "magma" if args.magma else "skip" if args.skip_update else "none"
