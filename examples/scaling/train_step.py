"""Times a training step of the Llama example on a mesh, and the optimizer's part of it.

    python -m examples.scaling.train_step --preset 130m --data FOLDER --mesh fsdp=2 --magma

Takes the trainer's options. Prints one line of JSON: losses, tokens/s, milliseconds a step and a
bare optimizer update, peak memory. Run each arm in a process of its own, for its own peak.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.kit import optimizers
from examples.llama import sharding
from examples.llama.options import parser, resolve
from examples.llama.step import abstract_model, decays, layer_blocks, make_functions

ROUNDS, STEPS = 5, 10  # timed: the median of so many rounds of so many steps


def milliseconds(step: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    """Times ``state = step(state)`` after it has been compiled; returns ms a call and the state."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            state = step(state)
        jax.block_until_ready(state)
        rounds.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(rounds), state


def main(argv: list[str]) -> None:
    """Runs the measurement that the trainer's options `argv` describe."""
    config = resolve(parser("python -m examples.scaling.train_step").parse_args(argv))
    text, steps = config.text, config.optimizer.steps
    tx, _ = optimizers.make(config.optimizer, layer_blocks(config.model.scan_layers), decays)
    mesh = sharding.make_mesh(config.devices.mesh, config.devices.explicit)
    data = text.load()
    model = dataclasses.replace(config.model, vocab_size=data.vocab_size)
    layout = sharding.make_layout(mesh, model, tx, abstract_model(model, text.seed)[1])
    init, train_step, _ = make_functions(model, tx, text.seed, layout)

    def update(state: Any) -> Any:
        params, opt_state, grads = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, grads

    places = (layout.params, layout.opt_state, layout.params)
    update = jax.jit(update, donate_argnums=0, out_shardings=places)
    with jax.set_mesh(mesh):
        batches, losses = iter(data.train), []
        params, opt_state = init()
        for _ in range(steps):
            batch = sharding.place(next(batches), layout, config.devices.accumulate)
            params, opt_state, seen = train_step(params, opt_state, batch)
            losses.append(seen["loss"])
        whole, (params, opt_state, _) = milliseconds(
            lambda state: train_step(state[0], state[1], batch), (params, opt_state, None)
        )
        peak = [device.memory_stats() or {} for device in jax.local_devices()]
        peak = max(stats.get("peak_bytes_in_use", 0) for stats in peak)
        grads = jax.tree.map(lambda x: 1e-3 * jnp.sin(x), params)
        state = update((params, opt_state, grads))
        part, _ = milliseconds(update, state)

    record = {
        "mesh": {name: size for name, size in mesh.shape.items() if size > 1},
        "optimizer": config.optimizer.name,
        "masking": config.optimizer.masking,
        "losses": [round(float(loss), 4) for loss in losses[:: max(1, steps // 4)]],
        "last_loss": round(float(losses[-1]), 4),
        "tokens_per_second": round(text.batch_size * text.seq_len / whole * 1e3),
        "step_ms": round(whole, 2),
        "optimizer_ms": round(part, 3),
        "optimizer_share": round(part / whole, 4),
        "peak_gib_a_device": round(peak / 2**30, 2),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1:])
