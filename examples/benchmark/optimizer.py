"""Times Magma beside its base optimizer, on whatever device there is.

    python -m examples.benchmark.optimizer                     # all parts, sizes by device
    python -m examples.benchmark.optimizer --parts step --trees 1b --bases adam

Every number is a ratio to the bare base in the same process; arms take turns, and the median of
several rounds counts. Prints Markdown tables and appends each row to `--out` as a line of JSON.
It needs jax, optax and flax alone.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.benchmark.peers import rollfast_arms, torch_times
from examples.benchmark.timing import Arm, compile_step, in_turns
from examples.kit.console import say
from examples.kit.optimizers import direction
from examples.kit.options import Parser, local_path, number, whole
from examples.kit.paths import by_path, path_string
from examples.kit.records import append
from examples.kit.soap import scale_by_soap
from examples.llama import sharding
from examples.llama.config import PRESETS
from examples.llama.step import abstract_model, make_functions
from magma_optax import (
    attention_and_mlp,
    describe_masking,
    magma,
    skip_update,
    stacked,
    with_magma,
    with_skip_update,
)
from magma_optax.experimental.fused import FusedAdam, fused_adam

PARTS = ("step", "train", "compile", "state", "peers")
WIDE = "1b-5504"  # the 1b tree with MLPs of 43 * 128 columns, where the paper's 5461 is odd
TREES = ("matrices", *PRESETS, WIDE)
BASES = ("adam", "adamw", "rmsprop", "muon", "soap")
MATRIX_BASES = ("muon", "soap")  # whose directions are what they cost
FORMS = (
    *("skip_update", "with_magma", "magma(grad=)", "lazy skip_update", "lazy with_magma"),
    *("fused skip_update", "fused with_magma"),
)
LEAVES = (100, 400, 2000)  # of the trees for compile times
OUT = Path(__file__).parent / "results.jsonl"

Tx = optax.GradientTransformationExtraArgs
Row = dict[str, Any]


def tree(name: str, scan_layers: bool = False) -> Any:
    """Returns a tree of float32 `jax.ShapeDtypeStruct`: a Llama's, or 12 matrices of 1024**2."""
    if name == "matrices":
        matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        return {f"layers/{i}/mlp/kernel": matrix for i in range(12)}
    config = PRESETS["1b"] if name == WIDE else PRESETS[name]
    width = 5504 if name == WIDE else config.intermediate_size
    config = dataclasses.replace(config, intermediate_size=width, scan_layers=scan_layers)
    return abstract_model(config, 0)[1]


def narrow_llama(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `leaves` matrices of a Llama of width 64: compile time hardly depends on width."""
    shapes = {f"self_attn/{name}_proj": (64, 64) for name in "qkvo"}
    shapes |= {"mlp/gate_proj": (64, 176), "mlp/up_proj": (64, 176), "mlp/down_proj": (176, 64)}
    names = list(shapes)
    return {
        f"layers/{i // 7}/{names[i % 7]}": jax.ShapeDtypeStruct(shapes[names[i % 7]], jnp.float32)
        for i in range(leaves)
    }


def base(name: str) -> Tx:
    """Returns a bare base optimizer."""
    if name == "muon":
        return optax.chain(direction("muon"), optax.scale(-1e-3))
    if name == "soap":
        kinds = {"matrix": scale_by_soap(), "other": optax.scale_by_adam()}
        return optax.chain(optax.partition(kinds, by_kind), optax.scale(-1e-3))
    return optax.with_extra_args_support(getattr(optax, name)(1e-3))


def by_kind(params: Any) -> Any:
    """Labels attention and MLP matrices, which SOAP takes; Adam takes the rest."""

    def label(path: tuple[Any, ...], leaf: Any) -> str:
        return "matrix" if attention_and_mlp(path_string(path), leaf) else "other"

    return jax.tree.map_with_path(label, params)


def forms(name: str, **masking: Any) -> dict[str, Tx]:
    """Returns a base bare and in the forms of this package."""
    plain = {
        "bare": base(name),
        "skip_update": optax.chain(base(name), skip_update(**masking)),
        "with_magma": with_magma(base(name), **masking),
        "magma(grad=)": optax.chain(base(name), magma(**masking)),
    }
    if name not in MATRIX_BASES:  # there the lazy forms are the plain ones
        return plain
    return plain | {
        "lazy skip_update": with_skip_update(base(name), **masking),
        "lazy with_magma": with_magma(base(name), lazy=True, **masking),
    }


def fused_forms(name: str, **masking: Any) -> dict[str, FusedAdam]:
    """Returns Adam's fused forms where they have kernels; elsewhere they are the plain ones."""
    if name != "adam" or jax.default_backend() != "gpu":
        return {}
    return {
        "fused skip_update": fused_adam(1e-3, masking="skip_update", **masking),
        "fused with_magma": fused_adam(1e-3, **masking),
    }


def chosen(txs: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the bare base and the forms of these names, or all."""
    return {form: tx for form, tx in txs.items() if not names or form in ("bare", *names)}


def update_and_apply(tx: Tx | FusedAdam) -> Callable[..., Any]:
    """Returns one step: ``params, opt_state, grads -> params, opt_state``."""
    if isinstance(tx, FusedAdam):
        return lambda params, opt_state, grads: tx.update_and_apply(grads, opt_state, params)

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params, grad=grads)
        return optax.apply_updates(params, updates), opt_state

    return step


def filled(shapes: Any, value: float) -> Any:
    """Returns arrays of these shapes that are `value` plus a small wave, made on the device."""

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        return value + 1e-3 * jnp.sin(jax.lax.broadcasted_iota(x.dtype, x.shape, x.ndim - 1))

    return jax.jit(lambda: jax.tree.map(fill, shapes))()


def optimizer_arm(tx: Tx | FusedAdam, shapes: Any, grads: Any) -> tuple[Arm, float]:
    """Returns update and apply of `tx`, and the seconds that XLA took to compile them."""
    state = jax.eval_shape(tx.init, shapes)
    compiled = compile_step(update_and_apply(tx), shapes, state, grads, donate=2)

    @jax.jit
    def make() -> tuple[Any, Any]:
        params = filled(shapes, 0.1)
        return params, tx.init(params)

    return Arm(make, lambda state: compiled.call(*state, grads)), compiled.compile_s


# ---------------------------------------------------------------------------------------------
# The parts. Each yields rows with a "ratio" to the bare base.


def step_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Update and apply: milliseconds and compile seconds of every form."""
    pairs = itertools.product(args.trees, args.layouts)
    for name, layout in dict.fromkeys(
        (name, "separate" if name == "matrices" else layout) for name, layout in pairs
    ):
        shapes = tree(name, layout == "stacked")
        grads = filled(shapes, 0.0)
        for base_name, where, p in itertools.product(args.bases, args.where, args.survival_probs):
            options = masking(layout, where)
            share = survived(shapes, p, options, args.steps)
            options["survival_prob"] = p
            txs = forms(base_name, **options) | fused_forms(base_name, **options)
            txs = chosen(txs, args.forms)
            built = {form: optimizer_arm(tx, shapes, grads) for form, tx in txs.items()}
            arms = {form: arm for form, (arm, _) in built.items()}
            times = in_turns(arms, args.rounds, args.steps)
            for form, (_, seconds) in built.items():
                yield {
                    "tree": name,
                    "leaves": f"{len(jax.tree.leaves(shapes))} {layout}",
                    "base": base_name,
                    "masked": where,
                    "p": p,
                    "form": form,
                    "ms": times[form],
                    "ratio": times[form] / times["bare"],
                    "survived": share,
                    "compile_s": seconds,
                    "compile_ratio": seconds / built["bare"][1],
                }


def masking(layout: str, where: str) -> dict[str, Any]:
    """Returns `where` and `blocks`: each layer of a stacked matrix is a block of its own."""
    if where == "attention+mlp":
        return {"where": attention_and_mlp, "blocks": stacked(0) if layout == "stacked" else "leaf"}
    if layout == "stacked":
        return {"where": lambda path, leaf: leaf.ndim > 1, "blocks": layers_of_three}
    return {}


def survived(shapes: Any, p: float, options: dict[str, Any], steps: int) -> float:
    """Returns which share of the masked parameters survives in the steps that `in_turns` times."""
    masked = describe_masking(shapes, **options).masked
    # Coins depend on the number of blocks and not on their sizes: one element stands for each.
    small = jax.tree.map(lambda x: jnp.ones((*x.shape[:-2], *(1,) * min(x.ndim, 2))), shapes)
    tx = skip_update(survival_prob=p, **options)

    @jax.jit
    def toss(state: Any) -> tuple[dict[str, jax.Array], Any]:
        updates, state = tx.update(small, state, small)
        return {path: jnp.mean(x != 0) for path, x in by_path(updates).items()}, state

    state, shares = tx.init(small), []
    for _ in range(2 + steps):
        kept, state = toss(state)
        shares.append(sum(kept[path] * math.prod(shape) for path, shape in masked.items()))
    return float(np.mean(shares[2:]) / sum(map(math.prod, masked.values())))


def layers_of_three(path: str, leaf: jax.ShapeDtypeStruct) -> int | tuple[()]:
    """Cuts stacked matrices, the leaves of three axes, by layer."""
    return 0 if leaf.ndim == 3 else ()


def train_rows(args: argparse.Namespace) -> Iterator[Row]:
    """The whole training step of the Llama, and the optimizer's part of it."""
    for name, base_name, layers in itertools.product(
        args.train_trees, args.train_bases, args.layouts
    ):
        flash = jax.default_backend() == "gpu"
        kind = {"dtype": "bfloat16", "attention": "cudnn"} if flash else {}
        config = dataclasses.replace(PRESETS[name], scan_layers=layers == "stacked", **kind)
        mesh = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
        rows, length = args.batch
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, rows, length + 1))
        batch = {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}
        batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), batch)
        _, shapes = abstract_model(config, 0)
        grads = filled(shapes, 0.0)
        arms = {}
        txs = forms(base_name, **masking(layers, "attention+mlp"))
        for form, tx in chosen(txs, args.forms).items():
            if form == "magma(grad=)":  # the trainer hands on no grad
                continue
            layout = sharding.make_layout(mesh, config, tx, shapes)
            init, train_step, _ = make_functions(config, tx, 0, layout)
            arms[form] = Arm(init, functools.partial(train, train_step, batch))
            arms[f"{form}, optimizer alone"] = optimizer_arm(tx, shapes, grads)[0]
        times = in_turns(arms, args.rounds, args.steps)
        for form in arms:
            if not form.endswith("alone"):
                alone = times[f"{form}, optimizer alone"]
                yield {
                    "tree": name,
                    "base": base_name,
                    "layers": layers,
                    "batch": f"{rows} x {length}",
                    "form": form,
                    "ms": times[form],
                    "ratio": times[form] / times["bare"],
                    "optimizer_ms": alone,
                    "optimizer_share": alone / times[form],
                }


def train(train_step: Callable[..., Any], batch: Any, state: Any) -> Any:
    """Maps parameters and optimizer state to those after a training step."""
    return train_step(*state, batch)[:2]


def compile_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Seconds to trace and to compile a step, at several numbers of leaves, all of them masked."""
    for leaves in args.leaves:
        shapes = narrow_llama(leaves)
        rounds: dict[str, list[Any]] = {}
        for _ in range(1 if leaves > 1000 else args.rounds):
            for form, tx in forms("adam").items():
                state = jax.eval_shape(tx.init, shapes)
                compiled = compile_step(update_and_apply(tx), shapes, state, shapes, donate=2)
                rounds.setdefault(form, []).append((compiled.trace_s, compiled.compile_s))
        medians = {form: np.median(seconds, axis=0) for form, seconds in rounds.items()}
        for form, (trace, seconds) in medians.items():
            yield {
                "leaves": leaves,
                "form": form,
                "trace_s": trace,
                "compile_s": seconds,
                "ratio": seconds / medians["bare"][1],
            }


def state_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Bytes of state, and what each form adds to the base's, in bytes and in parameter trees."""

    def size(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    for name in args.trees:
        shapes = tree(name)
        masked = size([x for path, x in by_path(shapes).items() if attention_and_mlp(path, x)])
        for base_name in args.bases:
            states = {
                form: size(jax.eval_shape(tx.init, shapes))
                for form, tx in forms(base_name, where=attention_and_mlp).items()
            }
            for form, total in states.items():
                added = total - states["bare"]
                yield {
                    "tree": name,
                    "base": base_name,
                    "form": form,
                    "added_bytes": added,
                    "ratio": added / masked,  # of the bytes of the masked parameters
                }


def peer_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Other implementations of Magma, each beside its own base; all leaves masked."""
    for name in args.trees:
        shapes = tree(name)
        txs = forms("adamw")
        txs = {f"magma_optax, {form}": txs[form] for form in ("bare", "with_magma")}
        try:
            txs |= rollfast_arms()
        except ImportError as error:
            print(f"rollfast is left out: {error}", file=sys.stderr)
        grads = filled(shapes, 0.0)
        built = {form: optimizer_arm(tx, shapes, grads) for form, tx in txs.items()}
        times = in_turns({k: arm for k, (arm, _) in built.items()}, args.rounds, args.steps)
        del grads
        compiled = {form: seconds for form, (_, seconds) in built.items()}
        try:
            times |= torch_times(shapes, args.rounds, args.steps)
        except ImportError as error:
            print(f"pytorch_optimizer is left out: {error}", file=sys.stderr)
        for form in times:
            own = f"{form.split(',')[0]}, bare"
            row = {"tree": name, "form": form, "ms": times[form]}
            row["ratio"] = times[form] / times[own]
            if form in compiled:
                row |= {"compile_s": compiled[form]}
                row |= {"compile_ratio": compiled[form] / compiled[own]}
            yield row


ROWS = dict(zip(PARTS, (step_rows, train_rows, compile_rows, state_rows, peer_rows), strict=True))


def digits(value: float | int) -> float | int:
    """Returns a time or ratio with four digits, a number of bytes as it is."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def markdown(row: Row) -> str:
    """Returns a row of a table; numbers with three digits."""
    cells = [f"{x:.3g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x
             for x in row.values()]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def parser() -> Parser:
    """Returns the parser of the command line."""
    gpu = jax.default_backend() != "cpu"
    parser = Parser(
        prog="python -m examples.benchmark.optimizer",
        description=__doc__.split("\n\n")[0],
    )
    add, count = parser.add_argument, whole(1)
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    add("--trees", nargs="+", choices=TREES, default=["1b"] if gpu else ["matrices"])
    add("--bases", nargs="+", choices=BASES, default=BASES[:4], help="(all but soap)")
    add("--forms", nargs="+", choices=FORMS, help="beside the bare base, in steps and train (all)")
    add("--layouts", nargs="+", choices=["separate", "stacked"], default=["separate"])
    add("--where", nargs="+", choices=["attention+mlp", "all"], default=["attention+mlp"])
    probability = number(0.0, above=True, high=1.0)
    add("--survival-probs", nargs="+", type=probability, default=[0.5], help="p, in step alone")
    add("--train-trees", nargs="+", choices=list(PRESETS), default=["130m" if gpu else "nano"])
    add("--train-bases", nargs="+", choices=BASES, default=["adam"])
    add("--batch", nargs=2, type=count, default=[64, 256], metavar=("ROWS", "LENGTH"))
    add("--leaves", nargs="+", type=count, default=LEAVES, help="of the trees for compile times")
    add("--rounds", type=count, default=5, help="turns of each arm (%(default)s)")
    add("--steps", type=count, default=10, help="steps a turn (%(default)s)")
    add("--out", type=local_path, default=OUT, help="JSON lines (beside this file)")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Prints a table for each part and appends its rows to a file."""
    args = parser().parse_args(argv)
    if args.parts != ["train"]:
        jax.config.update("jax_enable_compilation_cache", False)  # compile times are to be real
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, optax {optax.__version__}")
    for part in args.parts:
        for index, row in enumerate(ROWS[part](args)):
            if index == 0:
                say(f"\n{part}\n\n| {' | '.join(row)} |\n|{' --- |' * len(row)}")
            say(markdown(row))
            form = list(row).index("form")  # what comes after it was measured
            settings = dict(list(row.items())[: form + 1])
            results = {name: digits(value) for name, value in list(row.items())[form + 1 :]}
            append(args.out, {"part": part} | settings, results)


if __name__ == "__main__":
    main()
