"""Trains a Llama on text, with or without Magma.

    python -m examples.llama.train --magma

The defaults train a small byte-level model on the Python standard library's text and code in about
two minutes on two CPU cores. Several devices and hosts share the work as `--mesh` says.

A run that was killed goes on with `--resume` and ends with the same parameters bit for bit (on
GPUs, with XLA_FLAGS=--xla_gpu_deterministic_ops=true).
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from tqdm import tqdm

from examples.llama import checkpoint, metrics, optimizers, sharding
from examples.llama.config import PRESETS, LlamaConfig
from examples.llama.data import Data, DataError, load
from examples.llama.model import Llama, cross_entropy
from examples.llama.options import SettingsError, configuration, masking, parser, resolve
from examples.llama.plot import plot
from examples.llama.sample import sample
from magma_optax import summarize

FAILED = 3  # exit status of a host that failed or lost another

Batch = dict[str, Array]  # "inputs", "targets": int32 (B, T); target -1 has no loss


def train(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the whole training.

    Args:
        args: Resolved options.
        argv: The options as typed, for the message that says how to go on.

    Returns:
        The exit status: 0, or 128 + the signal's number after SIGTERM or SIGINT.

    Raises:
        SettingsError, DataError, checkpoint.ConfigurationError: One-line messages.
        OSError: If the run's folder can't be written.
    """
    primary = jax.process_index() == 0  # the host that writes
    tx, learning_rate = make_optimizer(args)
    mesh = sharding.make_mesh(args.mesh, explicit=args.mesh_axes == "explicit")
    try:
        share, shares = sharding.reader(mesh, args.batch_size)
    except ValueError as error:
        raise SettingsError(f"--mesh: {error}") from None
    data = load(
        args.data,
        seq_len=args.seq_len,
        batch_size=args.batch_size // shares,
        seed=args.seed,
        tokenizer=args.tokenizer,
        packing=args.packing,
        process_index=share,
        process_count=shares,
    )
    config = model_config(args, data.vocab_size)

    graphdef, shapes = abstract_model(config, args.seed)
    layout = sharding.make_layout(mesh, config, tx, shapes)
    init, train_step, valid_step = make_functions(config, tx, args.seed, layout)

    valid_batches = sum(1 for _ in data.valid())

    def validate(params: optax.Params, limit: int) -> float:
        """Averages the loss over the tokens of `limit` batches, spread over the held-out split."""
        batches = itertools.islice(data.valid(), 0, None, max(1, valid_batches // limit))
        placed = (sharding.place(batch, layout) for batch in batches)
        sums = jax.device_get([valid_step(params, batch) for batch in placed])
        nll, count = np.sum(sums, axis=0, dtype=np.float64)
        return float(nll / count)

    folder = claim_folder(args)
    settings = configuration(args) | {"unigram_entropy": data.unigram_entropy}
    with contextlib.ExitStack() as stack:
        # Left in reverse order: signals stay held until the last checkpoint is complete.
        stop = stack.enter_context(StopSignal())
        stack.enter_context(jax.set_mesh(mesh))  # the model looks at it
        stack.enter_context(one_for_all())  # the last checkpoint may fail
        manager = stack.enter_context(checkpoint.open_manager(folder / "checkpoints"))
        stack.enter_context(one_for_all())  # and if a step does, it isn't waited for

        # Start, or go on.
        batches = iter(data.train)
        target = abstract_state(init, layout)
        restored = checkpoint.restore(manager, *target, batches, shares, settings)
        step, params, opt_state = restored or (0, *init())
        log = stack.enter_context(metrics.Metrics(folder, step)) if primary else None
        if primary:
            size = sum(x.size for x in jax.tree.leaves(params))
            print(f"{args.preset}: {size:,} parameters, {describe(mesh)}")
            print(data.name)
            print(f"{folder}: from step {step} to {args.steps}", flush=True)
        bar = tqdm(total=args.steps, initial=step, unit="step", disable=not primary)
        stack.enter_context(bar)

        seen: list[dict[str, Array]] = []  # on the device until the next record
        start = step
        while step < args.steps:
            batch = sharding.place_micro(next(batches), layout, args.accumulate)
            params, opt_state, now = train_step(params, opt_state, batch)
            if step == start:
                clock = time.perf_counter()  # the first call compiles; speed counts from here
            step += 1
            seen.append(now)
            last = step == args.steps
            stopping = stop.reached(step) and not last
            saving = last or stopping or step % args.checkpoint_every == 0
            validating = last or step % args.eval_every == 0

            if saving or validating or step % args.log_every == 0:
                record = summary(seen, args.batch_size * args.seq_len, clock)
                record["learning_rate"] = float(learning_rate(step - 1))
                seen.clear()
                if validating:
                    limit = valid_batches if last else args.eval_batches
                    record["valid_loss"] = validate(params, limit)
                    record["valid_perplexity"] = perplexity(record["valid_loss"])
                if args.magma:
                    alignment = jax.device_get(optax.tree.get(opt_state, "alignment"))
                    record["alignment"] = metrics.by_layer(alignment)
                if log:
                    log.write(step, record)
                    show(bar, step, record)
                clock = time.perf_counter()
            if saving:
                checkpoint.save(manager, step, params, opt_state, batches, shares, settings)
            bar.update()
            if stopping:
                break

    if step < args.steps:
        if primary:
            name = signal.Signals(stop.number or signal.SIGTERM).name
            print(f"{name}: stopped after step {step}; go on with: {resume_command(argv, folder)}")
        return 128 + (stop.number or signal.SIGTERM)
    with jax.set_mesh(mesh):
        lines = write_samples(args, data, graphdef, params)
    if primary:
        report(folder, data, lines)
    return 0


def model_config(args: argparse.Namespace, vocab_size: int) -> LlamaConfig:
    """Returns the preset's shape with what the options and the data say."""
    return dataclasses.replace(
        PRESETS[args.preset],
        vocab_size=vocab_size,
        scan_layers=args.scan_layers,
        remat=args.remat,
        dtype=args.dtype,
        attention=args.attention,
    )


def abstract_model(config: LlamaConfig, seed: int) -> tuple[nnx.GraphDef, optax.Params]:
    """Returns the model's structure and its parameters' `jax.ShapeDtypeStruct`."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(seed)))
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def make_functions(
    config: LlamaConfig,
    tx: optax.GradientTransformationExtraArgs,
    seed: int,
    layout: sharding.Layout,
) -> tuple[Callable, Callable, Callable]:
    """Returns pure functions of the model's parameters; call them under `jax.set_mesh`.

    Returns:
        ``init() -> params, opt_state``; ``train_step(params, opt_state, batch) -> params,
        opt_state, metrics``, which takes micro-batches, int32 (N, B / N, T), and takes over the
        buffers of the first two; ``valid_step(params, batch) -> sum of losses, number of tokens``
        of a batch, int32 (B, T).
    """
    graphdef, _ = abstract_model(config, seed)
    state = (layout.params, layout.opt_state)

    @jax.jit(out_shardings=state)
    def init() -> tuple[optax.Params, optax.OptState]:
        params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(seed))))
        return params, tx.init(params)

    def loss(params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        logits = nnx.merge(graphdef, params)(batch["inputs"])  # (B, T, V)
        return cross_entropy(logits, batch["targets"])

    @jax.jit(donate_argnums=(0, 1), out_shardings=(*state, layout.replicated))
    def train_step(params: optax.Params, opt_state: optax.OptState, batch: Batch):
        count = jnp.maximum(jnp.sum(batch["targets"] >= 0, dtype=jnp.float32), 1)

        def mean_loss(params: optax.Params, micro: Batch) -> Array:
            nll, _ = loss(params, micro)
            return nll / count  # a token weighs the same in every micro-batch

        value, grads = accumulated(jax.value_and_grad(mean_loss), params, batch, layout)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return params, opt_state, metrics | summarize(opt_state)

    return init, train_step, jax.jit(loss, out_shardings=layout.replicated)


def accumulated(
    value_and_grad: Callable, params: optax.Params, batch: Batch, layout: sharding.Layout
) -> tuple[Array, optax.Params]:
    """Sums values and gradients over the micro-batches of `batch`, each (N, ...), one at a time."""
    count = len(batch["inputs"])
    if count == 1:
        return value_and_grad(params, jax.tree.map(lambda x: x[0], batch))

    def add(total: tuple[Array, optax.Params], micro: Batch):
        return optax.tree.add(total, value_and_grad(params, micro)), None

    start = jnp.zeros(()), sharding.zeros(params, layout)
    total, _ = jax.lax.scan(add, start, batch)
    return total


def abstract_state(init: Callable, layout: sharding.Layout) -> tuple[optax.Params, optax.OptState]:
    """Returns what ``init()`` would, as `jax.ShapeDtypeStruct` with shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(init),
        (layout.params, layout.opt_state),
    )


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
        masking=masking(args),
        survival_prob=args.survival_prob,
        temperature=args.temperature,
        mask_key=args.mask_key,
    )
    try:
        return optimizers.build(config, args.scan_layers), optimizers.schedule(config)
    except ValueError as error:
        raise SettingsError(str(error)) from None


# ---------------------------------------------------------------------------------------------
# What the loop shows and keeps


def summary(seen: list[dict[str, Array]], tokens: int, clock: float) -> dict[str, Any]:
    """Fetches the metrics since the last record: the mean loss, the latest of the others."""
    fetched = jax.device_get(seen)
    seconds = time.perf_counter() - clock
    loss = float(np.mean([step["loss"] for step in fetched]))
    record = {name: float(value) for name, value in fetched[-1].items()}
    speed = len(fetched) * tokens / seconds
    return record | {"loss": loss, "perplexity": perplexity(loss), "tokens_per_second": speed}


def describe(mesh: jax.sharding.Mesh) -> str:
    """Names the devices and, where there are several, the mesh that they form."""
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return f"{mesh.size} device(s){hosts}{f': {axes}' if axes else ''}"


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity for a run that diverged."""
    return math.inf if loss > 700 else math.exp(loss)


def show(bar: tqdm, step: int, record: dict[str, Any]) -> None:
    """Shows a record beside the progress bar; a validation stays as a line above it."""
    postfix = {
        "loss": f"{record['loss']:.3f}",
        "ppl": f"{record['perplexity']:.2f}",
        "tok/s": f"{record['tokens_per_second']:,.0f}",
        "lr": f"{record['learning_rate']:.1e}",
    }
    if "alignment_mean" in record:
        postfix["align"] = f"{record['alignment_mean']:.3f}"
    bar.set_postfix(postfix, refresh=False)
    if "valid_loss" in record:
        bar.write(f"step {step}: loss {record['loss']:.4f}, validation {record['valid_loss']:.4f}")


def write_samples(
    args: argparse.Namespace, data: Data, graphdef: nnx.GraphDef, params: optax.Params
) -> list[str]:
    """Returns three continuations of the prompt, each as long as the context."""
    prompt = data.encode(args.prompt)[: args.seq_len - 1] or [0]
    rows = jnp.tile(jnp.asarray(prompt, jnp.int32)[None], (3, 1))  # (3, P)
    tokens = sample(
        graphdef,
        params,
        rows,
        jax.random.key(args.seed),
        length=args.seq_len,
        temperature=args.sample_temperature,
    )
    tokens = multihost_utils.process_allgather(tokens, tiled=True)  # wherever they are
    return [data.decode(row) for row in tokens.tolist()]


def report(folder: Path, data: Data, lines: list[str]) -> None:
    """Draws the curves and prints how the run ended."""
    loss = metrics.read(folder)[-1]["valid_loss"]
    picture = plot(folder, data.unigram_entropy)
    print(f"validation loss {loss:.4f} nats a token, perplexity {perplexity(loss):.3f}")
    print(
        f"unigram entropy {data.unigram_entropy:.4f}, "
        f"perplexity {perplexity(data.unigram_entropy):.3f}"
    )
    print(f"curves: {picture}")
    for line in lines:
        print("sample:", line.replace("\n", "\n        "))


# ---------------------------------------------------------------------------------------------
# The run's folder and its end


def claim_folder(args: argparse.Namespace) -> Path:
    """Creates the run's folder, or finds it again to go on.

    Raises:
        SettingsError: If it isn't empty and `--resume` is not given, or the other way round.
        OSError: If it can't be created.
    """
    if args.resume:
        if not (args.out / metrics.FILE).exists():
            raise SettingsError(f"{args.out} holds no run to go on with")
        return args.out
    if args.out is None:
        parts = ["llama", args.preset, args.optimizer, masking(args)]
        out = fresh_folder(Path("runs"), "-".join(part for part in parts if part != "none"))
    elif args.out.is_dir() and any(args.out.iterdir()):
        raise SettingsError(
            f"{args.out} is not empty; --resume goes on with the run in it, "
            "another --out starts a new one"
        )
    else:
        out = args.out
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("every host has looked")
        out.mkdir(parents=True, exist_ok=True)
    (out / metrics.FILE).touch()  # from here on there is a run to go on with
    return out


def fresh_folder(parent: Path, name: str) -> Path:
    """Creates the first of ``name-1``, ``name-2``, ... that isn't there."""
    for number in itertools.count(1):
        folder = parent / f"{name}-{number}"
        if not folder.exists():
            folder.mkdir(parents=True)  # fails if another run was faster
            return folder
    raise AssertionError("counted to the end")


def resume_command(argv: Sequence[str], folder: Path) -> str:
    """Returns the command that goes on with a run started with `argv`."""
    command = ["python", "-m", "examples.llama.train", *argv]
    if not any(option.split("=")[0] == "--out" for option in argv):
        command += ["--out", str(folder)]
    if "--resume" not in argv:
        command += ["--resume"]
    return shlex.join(command)


class StopSignal:
    """Notes SIGTERM and SIGINT while in use, so that the loop can end between two steps."""

    def __init__(self) -> None:
        """Notes nothing yet."""
        self.number: int | None = None

    def __enter__(self) -> "StopSignal":
        """Takes the signals over."""
        self._before = {}
        if jax.process_count() == 1:  # with several hosts jax.distributed takes SIGTERM
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.number = number

    def reached(self, step: int) -> bool:
        """Says whether to stop after `step`; all hosts agree on the step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.number is not None


def join_hosts(args: argparse.Namespace) -> None:
    """Connects the processes, one a host.

    Raises:
        SettingsError: If neither `--distributed` nor the cluster's environment says which they are,
            or if they don't answer.
    """
    try:
        # The first three from the environment, if they are not given.
        jax.distributed.initialize(*args.distributed, heartbeat_timeout_seconds=args.host_timeout)
    except (ValueError, RuntimeError) as error:
        raise SettingsError(f"--distributed: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(argv)
    try:
        if args.distributed is not None:
            join_hosts(args)
        return train(resolve(args), argv)
    except (SettingsError, DataError, checkpoint.ConfigurationError, OSError) as error:
        print_error(str(error))
        return 2


def print_error(message: str) -> None:
    """Prints `message` as one line."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_for_all() -> Iterator[None]:
    """With several hosts, ends this process at once if what it holds fails.

    An orderly end would wait for the other hosts: for their part of a checkpoint, and for all to
    leave together. But they are gone, or wait for this one. A host that waits inside the runtime
    is ended by it after `--host-timeout`.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or isinstance(error, checkpoint.ConfigurationError):
            raise  # there is no other, or all see the same error
        print_error(
            f"host {jax.process_index()} of {jax.process_count()} can't go on, as it failed or "
            "lost another; start all hosts again with --resume, which goes on from the last "
            f"complete checkpoint ({type(error).__name__}: {error})"
        )
        os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
