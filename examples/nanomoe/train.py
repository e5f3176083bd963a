"""Trains nanoMoE, a GPT-2 with a mixture of experts in every other layer, with or without Magma.

    python -m examples.nanomoe.train --magma --experts-as-blocks

The defaults train a small byte-level model on the Python standard library's text and code in about
two minutes on two CPU cores, on one device. Data, optimizers and metrics are the Llama example's,
whose trainer also has checkpoints and several devices.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from tqdm import tqdm

from examples.llama import metrics, optimizers
from examples.llama.data import DataError, load
from examples.llama.model import cross_entropy
from examples.llama.options import SettingsError
from examples.llama.plot import plot
from examples.llama.train import fresh_folder, perplexity
from examples.nanomoe.config import PRESETS, NanoMoEConfig
from examples.nanomoe.model import NanoMoE, count_parameters, router_loss
from examples.nanomoe.options import parser, resolve
from magma_optax import summarize

Batch = dict[str, Array]  # "inputs", "targets": int32 (B, T); target -1 has no loss


def train(args: argparse.Namespace) -> None:
    """Runs the whole training.

    Args:
        args: Resolved options.

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
        nll, count = np.sum([valid_step(params, batch) for batch in batches], axis=0, dtype=float)
        return float(nll / count)

    params, opt_state = init()
    total, active = count_parameters(params, config)
    out = claim_folder(args)
    print(f"{args.preset}: {total:,} parameters, of which a token uses {active:,}")
    print(data.name)
    print(out, flush=True)

    seen: list[dict[str, Any]] = []  # on the device until the next record
    with metrics.Metrics(out, 0) as log, tqdm(total=args.steps, unit="step") as bar:
        for step, batch in enumerate(itertools.islice(data.train, args.steps), 1):
            params, opt_state, now = train_step(params, opt_state, batch)
            if step == 1:
                clock = time.perf_counter()  # the first call compiles; speed counts from here
            seen.append(now)
            last = step == args.steps
            if last or step % args.log_every == 0:
                record = summary(seen)
                seconds = time.perf_counter() - clock
                record["tokens_per_second"] = batch["inputs"].size * len(seen) / seconds
                record["learning_rate"] = float(learning_rate(step - 1))
                record |= scores(opt_state)
                if last or step % args.eval_every == 0:
                    record["valid_loss"] = validate(params, valid_batches if last else 8)
                log.write(step, record)
                show(bar, step, record)
                seen.clear()
                clock = time.perf_counter()
            bar.update()

    picture = plot(out, data.unigram_entropy)
    loss = record["valid_loss"]
    print(f"validation loss {loss:.4f} nats a token, perplexity {perplexity(loss):.3f}")
    print(f"unigram entropy {data.unigram_entropy:.4f}; curves: {picture}")


def make_functions(
    config: NanoMoEConfig,
    tx: optax.GradientTransformationExtraArgs,
    seed: int,
    accumulate: int,
) -> tuple[Callable, Callable, Callable]:
    """Splits the model once and returns pure functions of its parameters.

    Returns:
        ``init() -> params, opt_state``;
        ``train_step(params, opt_state, batch) -> params, opt_state, metrics``, which takes over the
        buffers of the first two; ``valid_step(params, batch) -> sum of losses, number of tokens``.
    """
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: NanoMoE(config, rngs=nnx.Rngs(seed))))

    @jax.jit
    def init() -> tuple[optax.Params, optax.OptState]:
        params = nnx.to_pure_dict(nnx.state(NanoMoE(config, rngs=nnx.Rngs(seed))))
        return params, tx.init(params)

    def loss(params: optax.Params, batch: Batch) -> tuple[Array, dict[str, Any]]:
        logits, routing = nnx.merge(graphdef, params)(batch["inputs"], train=True)  # (B, T, V)
        nll, count = cross_entropy(logits, batch["targets"])
        nll = nll / jnp.maximum(count, 1)
        return nll + router_loss(routing, config), {"loss": nll, "routing": routing}

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params: optax.Params, opt_state: optax.OptState, batch: Batch):
        def add(grads: optax.Updates, micro: Batch):
            more, now = jax.grad(loss, has_aux=True)(params, micro)
            return optax.tree.add(grads, more), now

        # (B, T) -> (A, B / A, T). Parameters move once, by the mean of the gradients.
        micros = jax.tree.map(lambda x: x.reshape(accumulate, -1, x.shape[1]), batch)
        grads, now = jax.lax.scan(add, optax.tree.zeros_like(params), micros)
        grads = optax.tree.scale(1 / accumulate, grads)
        now = jax.tree.map(lambda x: jnp.mean(x, axis=0), now)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, now | {"grad_norm": optax.tree.norm(grads)}

    @jax.jit
    def valid_step(params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        logits, _ = nnx.merge(graphdef, params)(batch["inputs"], train=False)
        return cross_entropy(logits, batch["targets"])

    return init, train_step, valid_step


def make_optimizer(
    args: argparse.Namespace,
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """Returns the optimizer and its learning rate as a function of the steps done."""
    config = optimizers.OptimizerConfig(
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
    blocks = expert_axis if args.experts_as_blocks else "leaf"
    try:
        return optimizers.assemble(config, blocks, matrices), optimizers.schedule(config)
    except ValueError as error:
        raise SettingsError(str(error)) from None


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
    found = {name: float(value) for name, value in summarize(opt_state).items()}
    if found:
        alignment = jax.device_get(optax.tree.get(opt_state, "alignment"))
        found["scores"] = {path: np.round(s, 4).tolist() for path, s in alignment.items()}
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
        bar.write(f"step {step}: loss {record['loss']:.4f}, validation {record['valid_loss']:.4f}")


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
    args = parser().parse_args(argv)
    try:
        train(resolve(args))
    except (SettingsError, DataError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
