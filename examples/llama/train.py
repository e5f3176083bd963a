"""Trains a Llama on text, with or without Magma.

    python -m examples.llama.train --magma

The defaults train a small byte-level model on the Python standard library's text and code in about
two minutes on two CPU cores. Several devices and hosts share the work as `--mesh` says.

A run that was killed goes on with `--resume` and ends with the same parameters bit for bit (on
GPUs, with XLA_FLAGS=--xla_gpu_deterministic_ops=true).
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from tqdm import tqdm

from examples.kit import checkpoint, console, hosts, metrics, optimizers
from examples.kit.console import print_error, print_warning, printable, say
from examples.kit.data.load import Data, DataError, load
from examples.kit.folder import claim, resume_command, write_settings
from examples.kit.loss import perplexity
from examples.kit.options import SettingsError, jsonable
from examples.kit.plot import plot
from examples.llama import sharding
from examples.llama.config import PRESETS, LlamaConfig
from examples.llama.options import configuration, host_options, masking, parser, resolve
from examples.llama.sample import sample
from examples.llama.step import abstract_model, abstract_state, make_functions

FAILED = 3  # exit status of a host that failed or lost another


def train(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the whole training.

    Args:
        args: Resolved options.
        argv: The options as typed, for the message that says how to go on.

    Returns:
        The exit status: 0, or 128 + the signal's number after SIGTERM or SIGINT.

    Raises:
        SettingsError, DataError, checkpoint.ConfigurationError, checkpoint.DamagedError: One-line
            messages; on several hosts hosts.RefusedError.
        OSError: If the run's folder can't be written.
    """
    primary = jax.process_index() == 0  # the host that writes
    with hosts.together():
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
        valid_batches = sum(1 for _ in data.valid())
        try:
            data.encode(args.prompt)  # as after the last step
        except DataError as error:
            raise SettingsError(f"--prompt {args.prompt!r}: {error}") from None
    settings = configuration(args) | {"data digest": data.digest}
    hosts.require_same(settings)
    config = model_config(args, data.vocab_size)

    graphdef, shapes = abstract_model(config, args.seed)
    layout = sharding.make_layout(mesh, config, tx, shapes)
    init, train_step, valid_step = make_functions(config, tx, args.seed, layout)

    def validate(params: optax.Params, limit: int) -> float:
        """Averages the loss over the tokens of `limit` batches, spread over the held-out split."""
        batches = itertools.islice(data.valid(), 0, None, max(1, valid_batches // limit))
        placed = (sharding.place(batch, layout) for batch in batches)
        sums = jax.device_get([valid_step(params, batch) for batch in placed])
        nll, count = np.sum(sums, axis=0, dtype=np.float64)
        return float(nll / count)

    parts = ["llama", args.preset, args.optimizer, masking(args)]
    folder = claim(args.out, args.resume, "-".join(part for part in parts if part != "none"))
    again = resume_command(argv, folder)

    def lost() -> str:
        """Says what an end at once loses."""
        kept = max(checkpoint.complete(folder / "checkpoints"), default=0)
        return f"ended at once; steps after {kept} are lost; go on with: {again}"

    with contextlib.ExitStack() as stack:
        # Left in reverse order: signals stay held until the last checkpoint is complete.
        stop = stack.enter_context(interrupts.StopSignal(lost, hosts.several()))
        stack.enter_context(jax.set_mesh(mesh))  # the model looks at it
        stack.enter_context(one_for_all())  # the last checkpoint may fail
        manager = stack.enter_context(checkpoint.open_manager(folder / "checkpoints"))
        stack.enter_context(one_for_all())  # and if a step does, it isn't waited for

        # Start, or go on.
        batches = iter(data.train)
        target = abstract_state(init, layout)
        restored = checkpoint.restore(manager, *target, batches, shares, settings)
        step, params, opt_state = restored or (0, *init())
        with hosts.together():
            if step > args.steps:
                raise SettingsError(
                    f"--steps {args.steps} is less than the {step} that the run in {folder} has "
                    "done; give more"
                )
            if args.resume and restored is None and primary:
                print_warning(f"{folder} holds no checkpoint: the run starts again from step 0")
            log = stack.enter_context(metrics.Metrics(folder, step)) if primary else None
            if primary:
                write_settings(
                    folder,
                    "examples.llama.train",
                    argv,
                    step,
                    options=jsonable(args),
                    data={"name": data.name, "digest": data.digest},
                    parameters=count(params),
                )
                say(f"{args.preset}: {count(params):,} parameters, {describe(mesh)}")
                say(data.name)
                say(f"{folder}: from step {step} to {args.steps}")
                blocks = optimizers.layer_blocks(args.scan_layers)
                say(optimizers.describe(optimizer_config(args), blocks, shapes))
                say_changed_schedule(args, folder, step)
        shown = {"unit": "step", "disable": not primary, "file": console.stderr}
        bar = stack.enter_context(tqdm(total=args.steps, initial=step, **shown))

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
            stopping = stop_reached(stop, step) and not last
            saving = last or stopping or step % args.checkpoint_every == 0
            validating = last or step % args.eval_every == 0

            if saving or validating or step % args.log_every == 0:
                record = summary(seen, args.batch_size * args.seq_len, clock)
                record["learning_rate"] = rate_at(learning_rate, step - 1)
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
        number = stop.number or signal.SIGTERM
        if primary:
            name = signal.Signals(number).name
            say(f"{name}: stopped after step {step}; go on with: {again}")
        return 128 + number
    with jax.set_mesh(mesh):
        loss = metrics.valid_loss(folder, step) if primary else None
        [loss, *_] = map(json.loads, hosts.gather(json.dumps(loss)))
        if loss is None:  # a run that was made shorter
            loss = validate(params, valid_batches)
        lines = write_samples(args, data, graphdef, params, layout)
    if primary:
        report(folder, data, loss, lines)
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


def optimizer_config(args: argparse.Namespace) -> optimizers.OptimizerConfig:
    """Returns what the options say about the optimizer."""
    return optimizers.OptimizerConfig(
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


def make_optimizer(
    args: argparse.Namespace,
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """Returns the optimizer and its learning rate as a function of the steps done."""
    config = optimizer_config(args)
    try:
        return optimizers.build(config, args.scan_layers), optimizers.schedule(config)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def say_changed_schedule(args: argparse.Namespace, folder: Path, step: int) -> None:
    """Says so if the run had another length when it did `step`."""
    was = checkpoint.config(folder / "checkpoints", step).get("steps", args.steps)
    if was != args.steps:
        say(
            f"after step {step} the learning rate follows the schedule of {args.steps} steps; "
            f"until then it followed the one of {was} steps"
        )


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


def count(params: optax.Params) -> int:
    """Returns the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def describe(mesh: jax.sharding.Mesh) -> str:
    """Names the devices and, where there are several, the mesh that they form."""
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return f"{mesh.size} device(s){hosts}{f': {axes}' if axes else ''}"


def rate_at(schedule: optax.Schedule, step: int) -> float:
    """Returns the learning rate after `step` steps, computed on its own beside the training."""
    with jax.transfer_guard("allow"):
        return float(schedule(step))


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
        bar.clear()
        say(f"step {step}: loss {record['loss']:.4f}, validation {record['valid_loss']:.4f}")
        bar.refresh()


def write_samples(
    args: argparse.Namespace,
    data: Data,
    graphdef: nnx.GraphDef,
    params: optax.Params,
    layout: sharding.Layout,
) -> list[str]:
    """Returns three continuations of the prompt, each as long as the context."""
    prompt = data.encode(args.prompt)[: args.seq_len - 1] or [0]
    rows = np.tile(np.asarray(prompt, np.int32), (3, 1))  # (3, P)
    temperature = np.float32(args.sample_temperature)
    tokens = sample(
        graphdef,
        params,
        jax.make_array_from_process_local_data(layout.replicated, rows),
        jax.jit(jax.random.key, static_argnums=0, out_shardings=layout.replicated)(args.seed),
        length=args.seq_len,
        temperature=jax.make_array_from_process_local_data(layout.replicated, temperature),
    )
    with jax.transfer_guard("allow"):  # it is meant, and not left to us
        tokens = multihost_utils.process_allgather(tokens, tiled=True)  # wherever they are
    return [data.decode(row) for row in tokens.tolist()]


def report(folder: Path, data: Data, loss: float, lines: list[str]) -> None:
    """Prints how the run ended and draws the curves."""
    say(f"validation loss {loss:.4f} nats a token, perplexity {perplexity(loss):.3f}")
    say(
        f"unigram entropy {data.unigram_entropy:.4f}, "
        f"perplexity {perplexity(data.unigram_entropy):.3f}"
    )
    draw(folder, data.unigram_entropy)
    for line in lines:
        say("sample:", printable(line).replace("\n", "\n        "))


def draw(folder: Path, unigram_entropy: float) -> None:
    """Draws the curves; a run does not fail for want of a picture."""
    try:
        say(f"curves: {plot(folder, unigram_entropy)}")
    except Exception as error:
        print_warning(f"the curves could not be drawn ({type(error).__name__}: {error})")


# ---------------------------------------------------------------------------------------------
# The end


def stop_reached(stop: interrupts.StopSignal, step: int) -> bool:
    """Says whether to stop after `step`; all hosts agree on the step."""
    if hosts.several():
        return multihost_utils.reached_preemption_sync_point(step)
    return stop.number is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    refusal = None
    try:
        args = parser().parse(argv)
    except SettingsError as error:
        refusal, args = error, host_options(argv)
    if args.distributed is not None:
        try:
            hosts.join(args.distributed, args.host_timeout)
        except SettingsError as error:
            print_error(str(refusal or error))
            return 2
    try:
        with one_for_all():
            with hosts.together():
                if refusal:
                    raise refusal
            return train(agreed(args), argv)
    except (
        SettingsError,
        DataError,
        checkpoint.ConfigurationError,
        checkpoint.DamagedError,
        hosts.RefusedError,
        OSError,
    ) as error:
        print_error(str(error))
        return 2


def agreed(args: argparse.Namespace) -> argparse.Namespace:
    """Returns the resolved options, the same on all hosts but for paths.

    Raises:
        SettingsError: For options that don't go together; on several hosts hosts.RefusedError.
    """
    own = {"distributed", "out", "data", "tokenizer"}
    typed = {name: value for name, value in jsonable(args).items() if name not in own}
    hosts.require_same(typed | {"out is given": args.out is not None})
    saved = {}
    if args.resume and args.out is not None:
        saved = checkpoint.last_config(args.out / "checkpoints")
    with hosts.together():
        return resolve(args, saved)


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
        if not hosts.several() or isinstance(error, hosts.RefusedError):
            raise  # there is no other, or all see the same error
        print_error(
            f"host {jax.process_index()} of {jax.process_count()} can't go on, as it failed or "
            "lost another; start all hosts again with --resume, which goes on from the last "
            f"complete checkpoint ({type(error).__name__}: {error})"
        )
        os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
