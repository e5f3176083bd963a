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

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import Array

from examples.kit import checkpoint, hosts, metrics, optimizers
from examples.kit.console import print_error, print_warning, printable, say
from examples.kit.data.load import Data, DataError
from examples.kit.folder import claim, held, resume_command, write_settings
from examples.kit.held_out import HeldOut
from examples.kit.loss import perplexity
from examples.kit.meter import Meter
from examples.kit.options import SettingsError
from examples.kit.plot import draw
from examples.kit.progress import open_bar, show
from examples.llama import aot, sharding
from examples.llama.options import CommandLine
from examples.llama.sample import continuations
from examples.llama.step import abstract_model, abstract_state, decays, layer_blocks, make_functions
from examples.llama.train_config import TrainConfig

PROGRAM = "examples.llama.train"
SHOWN = ("loss", "ppl", "tok/s", "lr", "align")  # beside the progress bar


def train(config: TrainConfig, argv: Sequence[str]) -> int:
    """Runs the whole training.

    Args:
        config: The run.
        argv: The options as typed, for the message that says how to go on.

    Returns:
        The exit status: 0, or 128 + the signal's number after SIGTERM or SIGINT, or 1 if the loss
        is no longer a number.

    Raises:
        SettingsError, DataError, checkpoint.ConfigurationError, checkpoint.DamagedError: One-line
            messages; on several hosts hosts.RefusedError.
        OSError: If the run's folder can't be written.
    """
    primary = jax.process_index() == 0  # the host that writes
    text, run, steps = config.text, config.run, config.optimizer.steps
    blocks = layer_blocks(config.model.scan_layers)
    with hosts.together():
        tx, learning_rate = optimizers.make(config.optimizer, blocks, decays)
        mesh, share, shares = sharding.mesh_and_share(
            config.devices.mesh, config.devices.explicit, text.batch_size
        )
        data = text.load(share, shares)
        held_out = HeldOut.of(data)
        try:
            prompt = data.encode(run.prompt)  # for the samples, after the last step
        except DataError as error:
            raise SettingsError(f"--prompt {run.prompt!r}: {error}") from None
    settings = config.decisive() | {"data digest": data.digest}
    hosts.require_same(settings)

    model = dataclasses.replace(config.model, vocab_size=data.vocab_size)
    graphdef, shapes = abstract_model(model, text.seed)
    with optimizers.refusals(config.optimizer):
        layout = sharding.make_layout(mesh, model, tx, shapes)
    init, train_step, valid_step = make_functions(model, tx, text.seed, layout)

    def place(batch: Mapping[str, np.ndarray]) -> dict[str, Array]:
        return sharding.place(batch, layout, config.devices.accumulate)

    def validate(params: optax.Params, limit: int | None = None) -> float:
        return held_out.validate(lambda batch: valid_step(params, place(batch)), limit)

    parts = ["llama", config.preset, config.optimizer.name, config.optimizer.masking]
    folder = claim(run.out, run.resume, "-".join(part for part in parts if part != "none"))
    again = resume_command(PROGRAM, argv, folder)

    def lost() -> str:
        """Says what an end at once loses."""
        kept = max(checkpoint.complete(folder / "checkpoints"), default=0)
        return f"ended at once; steps after {kept} are lost; go on with: {again}"

    with contextlib.ExitStack() as stack:
        # Left in reverse order: signals stay held until the last checkpoint is complete.
        stop = stack.enter_context(interrupts.StopSignal(lost, hosts.several()))
        stack.enter_context(jax.set_mesh(mesh))  # the model looks at it
        stack.enter_context(hosts.one_for_all())  # the last checkpoint may fail
        stack.enter_context(held(folder))
        manager = stack.enter_context(checkpoint.open_manager(folder / "checkpoints"))
        stack.enter_context(hosts.one_for_all())  # and if a step does, it isn't waited for

        # Start, or go on.
        batches = iter(data.train)
        target = abstract_state(init, layout)
        restored = checkpoint.restore(manager, *target, batches, shares, settings)
        step, params, opt_state = restored or (0, *init())
        begun, diverged = step, ""
        with hosts.together():
            if step > steps:
                raise SettingsError(
                    f"--steps {steps} is less than the {step} that the run in {folder} has "
                    "done; give more"
                )
            if run.resume and restored is None and primary:
                print_warning(f"{folder} holds no checkpoint: the run starts again from step 0")
            log = stack.enter_context(metrics.Metrics(folder, step)) if primary else None
            if primary:
                count = optax.tree.size(params)
                facts = {"name": data.name, "digest": data.digest}
                options = dict(config.options)
                write_settings(
                    folder, PROGRAM, argv, step, options=options, data=facts, parameters=count
                )
                say(f"{config.preset}: {count:,} parameters, {sharding.describe(mesh)}")
                say(data.name)
                say(f"{folder}: from step {step} to {steps}")
                say(optimizers.describe(config.optimizer, blocks, shapes))
                say(metrics.how_to_watch(folder))
                say_changed_schedule(steps, folder, step)
        bar = stack.enter_context(open_bar(steps, step, hidden=not primary))

        meter = Meter(text.batch_size * text.seq_len)
        while step < steps:
            batch = place(next(batches))
            params, opt_state, now = train_step(params, opt_state, batch)
            meter.add(now)
            step += 1
            last = step == steps
            stopping = hosts.agree_to_stop(stop.number is not None, step) and not last
            saving = last or stopping or step % run.checkpoint_every == 0
            validating = last or step % run.eval_every == 0

            if saving or validating or step % run.log_every == 0:
                record = summary(*meter.take())
                if diverged := metrics.diverged(step, record):
                    break  # before the last good checkpoint makes room for a bad one
                record["learning_rate"] = optimizers.rate_at(learning_rate, step - 1)
                if validating:
                    record["valid_loss"] = validate(params, None if last else run.eval_batches)
                    record["valid_perplexity"] = perplexity(record["valid_loss"])
                if config.optimizer.masking == "magma":
                    alignment = jax.device_get(optax.tree.get(opt_state, "alignment"))
                    record["alignment"] = metrics.by_layer(alignment)
                if log:
                    log.write(step, record)
                    show(bar, step, record, SHOWN)
                meter.go_on()
            if saving:
                checkpoint.save(manager, step, params, opt_state, batches, shares, settings)
            bar.update()
            if stopping:
                break

    if diverged:
        if primary:
            kept = max(checkpoint.complete(folder / "checkpoints"), default=0)
            left = f"{folder} keeps the checkpoint of step {kept}" if kept else "no checkpoint yet"
            print_error(f"{diverged}; {left}.")
        return 1
    if step < steps:
        number = stop.number or signal.SIGTERM
        if primary:
            name = signal.Signals(number).name
            say(f"{name}: stopped after step {step}; go on with: {again}")
        return 128 + number
    with jax.set_mesh(mesh):
        # A run that was made shorter did not validate on all of it after its last step.
        loss = metrics.valid_loss(folder, step) if primary and step > begun else None
        [loss, *_] = map(json.loads, hosts.gather(json.dumps(loss)))
        if loss is None:
            loss = validate(params)
        rows = continuations(
            graphdef,
            params,
            layout,
            prompt,
            length=text.seq_len,
            temperature=run.sample_temperature,
            seed=text.seed,
        )
    if primary:
        samples = [data.decode(row) for row in rows]
        report(folder, data, loss, samples, config.optimizer.noise_score)
    return 0


def say_changed_schedule(steps: int, folder: Path, step: int) -> None:
    """Says so if the run had another length than `steps` when it did `step`."""
    was = checkpoint.config(folder / "checkpoints", step).get("steps", steps)
    if was != steps:
        say(
            f"after step {step} the learning rate follows the schedule of {steps} steps; "
            f"until then it followed the one of {was} steps"
        )


def summary(seen: Sequence[Mapping[str, Array]], speed: float) -> dict[str, Any]:
    """Returns the mean loss of the steps since the last record, and the latest of the others."""
    loss = float(np.mean([step["loss"] for step in seen]))
    record = {name: float(value) for name, value in seen[-1].items()}
    return record | {"loss": loss, "perplexity": perplexity(loss), "tokens_per_second": speed}


def report(folder: Path, data: Data, loss: float, lines: Sequence[str], noise_score: float) -> None:
    """Prints how the run ended and draws the curves."""
    say(f"validation loss {loss:.4f} nats a token, perplexity {perplexity(loss):.3f}")
    say(
        f"unigram entropy {data.unigram_entropy:.4f}, "
        f"perplexity {perplexity(data.unigram_entropy):.3f}"
    )
    draw(folder, data.unigram_entropy, noise_score)
    for line in lines:
        say("sample:", printable(line).replace("\n", "\n        "))


# ---------------------------------------------------------------------------------------------
# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    line = CommandLine(argv)
    if line.distributed is not None:
        try:
            hosts.join(line.distributed, line.host_timeout)
        except SettingsError as error:
            print_error(str(line.refusal or error))
            return 2
    try:
        with hosts.one_for_all():
            config = agreed(line)
            if config.devices.topology is None:
                return train(config, argv)
        aot.report(config)
        return 0
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


def agreed(line: CommandLine) -> TrainConfig:
    """Returns the configuration, the same on all hosts but for paths.

    Raises:
        SettingsError: For options that can't be used; on several hosts hosts.RefusedError.
    """
    with hosts.together():
        if line.refusal:
            raise line.refusal
    hosts.require_same(line.common())
    saved = checkpoint.last_config(line.resumed / "checkpoints") if line.resumed else {}
    with hosts.together():
        return line.resolve(saved)


if __name__ == "__main__":
    sys.exit(main())
