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
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.benchmark.alone import compile_times
from examples.benchmark.forms import BASES, FORMS, all_forms, chosen, forms, update_and_apply
from examples.benchmark.peers import rollfast_arms, torch_times
from examples.benchmark.timing import Arm, compile_step, in_turns
from examples.benchmark.trees import TREES, filled, masking, narrow_llama, survived, tree
from examples.kit.console import say
from examples.kit.options import Parser, local_path, number, whole
from examples.kit.paths import by_path
from examples.kit.records import append
from examples.llama import sharding
from examples.llama.config import PRESETS
from examples.llama.step import abstract_model, make_functions
from magma_optax import attention_and_mlp

LEAVES = (100, 400, 2000)  # of the trees for compile times
OUT = Path(__file__).parent / "results.jsonl"

Row = dict[str, Any]


def optimizer_arm(tx: Any, shapes: Any, grads: Any) -> tuple[Arm, float]:
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
        cases = [*itertools.product(args.where, args.survival_probs)]
        shares = {(w, p): survived(shapes, p, masking(layout, w), args.steps) for w, p in cases}
        for base_name, (where, p) in itertools.product(args.bases, cases):
            options = masking(layout, where) | {"survival_prob": p}
            txs = chosen(all_forms(base_name, **options), args.forms)
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
                    "survived": shares[where, p],
                    "compile_s": seconds,
                    "compile_ratio": seconds / built["bare"][1],
                }


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


def alone_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Seconds to trace and to compile a step of every form, each in a process of its own."""
    for name, layout, base_name, where in itertools.product(
        args.trees, args.layouts, args.bases, args.where
    ):
        bare = None
        for form in chosen(all_forms(base_name, **masking(layout, where)), args.forms):
            trace, seconds = compile_times(args.rounds, name, layout, base_name, where, form)
            bare = bare or seconds
            yield {
                "tree": name,
                "layout": layout,
                "base": base_name,
                "masked": where,
                "form": form,
                "trace_s": trace,
                "compile_s": seconds,
                "ratio": seconds / bare,
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


ROWS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "step": step_rows,
    "train": train_rows,
    "compile": compile_rows,
    "alone": alone_rows,
    "state": state_rows,
    "peers": peer_rows,
}


DEFAULT = [part for part in ROWS if part != "alone"]  # which starts many processes


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
    add("--parts", nargs="+", choices=ROWS, default=DEFAULT, help="(all but alone)")
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
