"""Trains nanoMoE, a GPT-2 with a mixture of experts in every other layer, with or without Magma.

    python -m examples.nanomoe.train --magma --experts-as-blocks

The defaults train a small byte-level model on the Python standard library's text and code in about
two minutes on two CPU cores, on one device. Data, optimizers and metrics are the Llama example's,
whose trainer also has checkpoints and several devices.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

from examples.kit import console, metrics, optimizers
from examples.kit.console import print_error, say
from examples.kit.data.load import DataError, load
from examples.kit.folder import fresh_folder, write_settings
from examples.kit.loss import perplexity
from examples.kit.options import SettingsError, jsonable
from examples.kit.paths import by_path
from examples.kit.scores import summary as summary_of_scores
from examples.llama.train import draw, rate_at
from examples.nanomoe.config import PRESETS
from examples.nanomoe.model import count_parameters
from examples.nanomoe.options import parser, resolve
from examples.nanomoe.step import make_functions


def train(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Runs the whole training.

    Args:
        args: Resolved options.
        argv: The options as typed, for the record.

    Raises:
        SettingsError, DataError: One-line messages.
        OSError: If the run's folder can't be written.
    """
    tx, learning_rate = make_optimizer(args)
    data = load(
        args.data,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        seed=args.seed,
        tokenizer=args.tokenizer,
    )
    preset = PRESETS[args.preset]
    vocab_size = max(preset.vocab_size, data.vocab_size)  # `paper` pads GPT-2's 50,257 to 50,304
    config = dataclasses.replace(preset, vocab_size=vocab_size, dtype=args.dtype)
    init, train_step, valid_step = make_functions(config, tx, args.seed, args.accumulate)

    valid_batches = sum(1 for _ in data.valid())

    def validate(params: optax.Params, limit: int) -> float:
        """Averages the loss over the tokens of `limit` batches, spread over the held-out split."""
        batches = itertools.islice(data.valid(), 0, None, max(1, valid_batches // limit))
        sums = jax.device_get([valid_step(params, jax.device_put(batch)) for batch in batches])
        nll, count = np.sum(sums, axis=0, dtype=float)
        return float(nll / count)

    params, opt_state = init()
    total, active = count_parameters(params, config)
    out = claim_folder(args)
    write_settings(
        out,
        "examples.nanomoe.train",
        argv,
        0,
        options=jsonable(args),
        data={"name": data.name, "digest": data.digest},
        parameters=total,
    )
    say(f"{args.preset}: {total:,} parameters, of which a token uses {active:,}")
    say(data.name)
    say(out)
    say(optimizers.describe(optimizer_config(args), blocks(args), params))

    seen: list[dict[str, Any]] = []  # on the device until the next record
    bar = tqdm(total=args.steps, unit="step", file=console.stderr)
    with metrics.Metrics(out, 0) as log, bar:
        for step, batch in enumerate(itertools.islice(data.train, args.steps), 1):
            params, opt_state, now = train_step(params, opt_state, jax.device_put(batch))
            if step == 1:
                clock = time.perf_counter()  # the first call compiles; speed counts from here
            seen.append(now)
            last = step == args.steps
            if last or step % args.log_every == 0:
                record = summary(seen)
                seconds = time.perf_counter() - clock
                record["tokens_per_second"] = batch["inputs"].size * len(seen) / seconds
                record["learning_rate"] = rate_at(learning_rate, step - 1)
                record |= scores(opt_state)
                if last or step % args.eval_every == 0:
                    record["valid_loss"] = validate(params, valid_batches if last else 8)
                log.write(step, record)
                show(bar, step, record)
                seen.clear()
                clock = time.perf_counter()
            bar.update()

    loss = record["valid_loss"]
    say(f"validation loss {loss:.4f} nats a token, perplexity {perplexity(loss):.3f}")
    say(f"unigram entropy {data.unigram_entropy:.4f}")
    draw(out, data.unigram_entropy)


def optimizer_config(args: argparse.Namespace) -> optimizers.OptimizerConfig:
    """Returns what the options say about the optimizer."""
    return optimizers.OptimizerConfig(
        name=args.optimizer,
        learning_rate=args.learning_rate,
        steps=args.steps,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        clip=args.clip,
        b2=0.95,
        masking="magma" if args.magma else "none",
        survival_prob=args.survival_prob,
        temperature=args.temperature,
        mask_key=args.mask_key,
    )


def make_optimizer(
    args: argparse.Namespace,
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """Returns the optimizer and its learning rate as a function of the steps done."""
    config = optimizer_config(args)
    try:
        return optimizers.assemble(config, blocks(args), matrices), optimizers.schedule(config)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def blocks(args: argparse.Namespace) -> str | Callable:
    """Returns how parameters are cut into blocks."""
    return expert_axis if args.experts_as_blocks else "leaf"


def expert_axis(path: str, leaf: jax.ShapeDtypeStruct) -> int | tuple[()]:
    """Returns the axis that counts blocks: 0 of the experts' (E, ., .); other leaves are one."""
    return 0 if "experts" in path.split("/") else ()


def matrices(params: optax.Params) -> optax.Params:
    """Marks what decays: all but the norms."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def summary(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Fetches the metrics since the last record and averages each over the steps."""
    mean = jax.tree.map(lambda *steps: np.mean(steps, axis=0), *jax.device_get(seen))
    routing = mean["routing"]
    return {
        "loss": float(mean["loss"]),
        "perplexity": perplexity(float(mean["loss"])),
        "grad_norm": float(mean["grad_norm"]),
        "balance_loss": float(np.sum(routing.balance)),
        "z_loss": float(np.sum(routing.z)),
        "dropped": float(np.mean(routing.dropped)),
        "busiest": float(np.max(routing.load)),
        "load": np.round(routing.load, 4).tolist(),  # (layers with experts, E)
    }


def scores(opt_state: optax.OptState) -> dict[str, Any]:
    """Returns Magma's scores by parameter and their summary, or nothing without Magma."""
    with jax.transfer_guard("allow"):  # a few scalars, computed beside the training
        fetched = jax.device_get(summary_of_scores(opt_state))
    found = {name: float(value) for name, value in fetched.items()}
    if found:
        alignment = jax.device_get(optax.tree.get(opt_state, "alignment"))
        found["scores"] = {path: np.round(s, 4).tolist() for path, s in by_path(alignment).items()}
    return found


def show(bar: tqdm, step: int, record: dict[str, Any]) -> None:
    """Shows a record beside the progress bar; a validation stays as a line above it."""
    postfix = {
        "loss": f"{record['loss']:.3f}",
        "ppl": f"{record['perplexity']:.2f}",
        "lr": f"{record['learning_rate']:.1e}",
        "busiest": f"{record['busiest']:.2f}",
        "dropped": f"{record['dropped']:.3f}",
    }
    if "alignment_mean" in record:
        postfix["align"] = f"{record['alignment_mean']:.3f}"
    bar.set_postfix(postfix, refresh=False)
    if "valid_loss" in record:
        bar.clear()
        say(f"step {step}: loss {record['loss']:.4f}, validation {record['valid_loss']:.4f}")
        bar.refresh()


def claim_folder(args: argparse.Namespace) -> Path:
    """Creates the run's folder."""
    if args.out is None:
        magma = ["magma"] * args.magma + ["experts"] * args.experts_as_blocks
        return fresh_folder(
            Path("runs"), "-".join(["nanomoe", args.preset, args.optimizer, *magma])
        )
    args.out.mkdir(parents=True, exist_ok=True)
    return args.out


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        train(resolve(parser().parse(argv)), argv)
    except (SettingsError, DataError, OSError) as error:
        print_error(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
