"""Trains nanoMoE, a GPT-2 with a mixture of experts in every other layer, with or without Magma.

    python -m examples.nanomoe.train --magma --experts-as-blocks

The defaults train a small byte-level model on the Python standard library's text and code in about
two minutes on two CPU cores, on one device. Data, optimizers and metrics are the Llama example's,
whose trainer also has checkpoints and several devices.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from examples.kit import metrics, optimizers, scores
from examples.kit.console import print_error, say
from examples.kit.data.load import DataError
from examples.kit.folder import create, write_settings
from examples.kit.held_out import HeldOut
from examples.kit.loss import perplexity
from examples.kit.meter import Meter
from examples.kit.options import SettingsError
from examples.kit.paths import by_path
from examples.kit.plot import draw
from examples.kit.progress import open_bar, show
from examples.nanomoe.model import count_parameters
from examples.nanomoe.options import parse
from examples.nanomoe.step import expert_axis, make_functions, matrices
from examples.nanomoe.train_config import TrainConfig

PROGRAM = "examples.nanomoe.train"
EVAL_BATCHES = 8  # of each validation but the last
SHOWN = ("loss", "ppl", "lr", "busiest", "dropped", "align")  # beside the progress bar


class DivergedError(Exception):
    """The loss is no longer a number; the message says since when."""


def train(config: TrainConfig, argv: Sequence[str]) -> None:
    """Runs the whole training.

    Args:
        config: The run.
        argv: The options as typed, for the record.

    Raises:
        SettingsError, DataError: One-line messages.
        DivergedError: If the loss is no longer a number.
        OSError: If the run's folder can't be written.
    """
    text, steps = config.text, config.optimizer.steps
    blocks = expert_axis if config.experts_as_blocks else "leaf"
    tx, learning_rate = optimizers.make(config.optimizer, blocks, matrices)
    data = text.load()
    # `paper` pads GPT-2's 50,257 tokens to 50,304.
    vocab_size = max(config.model.vocab_size, data.vocab_size)
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    init, train_step, valid_step = make_functions(model, tx, text.seed, config.accumulate)
    held_out = HeldOut.of(data)

    def validate(params: optax.Params, limit: int | None) -> float:
        return held_out.validate(lambda batch: valid_step(params, jax.device_put(batch)), limit)

    with optimizers.refusals(config.optimizer):
        params, opt_state = init()
    total, active = count_parameters(params, model)
    out = create(config.out, folder_name(config))
    facts = {"name": data.name, "digest": data.digest}
    options = dict(config.options)
    write_settings(out, PROGRAM, argv, 0, options=options, data=facts, parameters=total)
    say(f"{config.preset}: {total:,} parameters, of which a token uses {active:,}")
    say(data.name)
    say(out)
    say(optimizers.describe(config.optimizer, blocks, params))
    say(metrics.how_to_watch(out))

    meter = Meter(text.batch_size * text.seq_len)
    with metrics.Metrics(out, 0) as log, open_bar(steps) as bar:
        for step, batch in enumerate(itertools.islice(data.train, steps), 1):
            params, opt_state, now = train_step(params, opt_state, jax.device_put(batch))
            meter.add(now)
            last = step == steps
            validating = last or step % config.eval_every == 0
            if validating or step % config.log_every == 0:
                record = summary(*meter.take())
                if diverged := metrics.diverged(step, record):
                    raise DivergedError(diverged)
                record["learning_rate"] = optimizers.rate_at(learning_rate, step - 1)
                record |= alignment(opt_state)
                if validating:
                    record["valid_loss"] = validate(params, None if last else EVAL_BATCHES)
                log.write(step, record)
                show(bar, step, record, SHOWN)
                meter.go_on()
            bar.update()

    loss = record["valid_loss"]
    say(f"validation loss {loss:.4f} nats a token, perplexity {perplexity(loss):.3f}")
    say(f"unigram entropy {data.unigram_entropy:.4f}")
    draw(out, data.unigram_entropy, config.optimizer.noise_score)


def folder_name(config: TrainConfig) -> str:
    """Returns what a fresh folder of this run is called."""
    masking = [config.optimizer.masking] * (config.optimizer.masking != "none")
    return "-".join(
        ["nanomoe", config.preset, config.optimizer.name, *masking]
        + ["experts"] * config.experts_as_blocks
    )


def summary(seen: Sequence[Mapping[str, Any]], speed: float) -> dict[str, Any]:
    """Averages each metric over the steps since the last record."""
    mean = jax.tree.map(lambda *steps: np.mean(steps, axis=0), *seen)
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
        "tokens_per_second": speed,
    }


def alignment(opt_state: optax.OptState) -> dict[str, Any]:
    """Returns Magma's scores by parameter and their summary, or nothing without Magma."""
    with jax.transfer_guard("allow"):  # a few scalars, computed beside the training
        fetched = jax.device_get(scores.summary(opt_state))
    found = {name: float(value) for name, value in fetched.items()}
    if found:
        by_parameter = by_path(jax.device_get(optax.tree.get(opt_state, "alignment")))
        found["scores"] = {path: np.round(s, 4).tolist() for path, s in by_parameter.items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        train(parse(argv), argv)
    except (SettingsError, DataError, OSError) as error:
        print_error(str(error))
        return 2
    except DivergedError as error:
        print_error(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
