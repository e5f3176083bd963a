"""Compiles what the trainer would run on a TPU slice, and prints what it needs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.kit import optimizers
from examples.kit.aot import topology
from examples.kit.aot.program import HEADER, Program, compiled, row
from examples.kit.console import say
from examples.kit.loss import cross_entropy
from examples.kit.step import Batch
from examples.llama import sharding
from examples.llama.config import LlamaConfig
from examples.llama.sample import sample
from examples.llama.step import abstract_model, abstract_state, decays, layer_blocks, make_functions
from examples.llama.train_config import TrainConfig

PROMPT = 4  # tokens; a longer prompt changes nothing that is printed


def report(config: TrainConfig) -> None:
    """Compiles a run's programs for its topology and prints a table of them.

    Args:
        config: The run; its `devices.topology` is not None.

    Raises:
        SettingsError: If the mesh doesn't suit the slice, or a program doesn't fit into memory.
        DataError: If the vocabulary isn't known, as the data or the tokenizer isn't there.
    """
    slice_, text, model = str(config.devices.topology), config.text, with_vocabulary(config)
    blocks = layer_blocks(model.scan_layers)
    tx, _ = optimizers.make(config.optimizer, blocks, decays)
    shapes = abstract_model(model, text.seed)[1]
    say(topology.describe(slice_))
    say(sharding.describe(mesh(config)))
    count = sum(x.size for x in jax.tree.leaves(shapes))
    size = f"{config.preset}: {count:,} parameters, {model.vocab_size:,} token ids"
    say(size + ("" if named(config) else " (the preset's; --data and --tokenizer name others)"))
    say(optimizers.describe(config.optimizer, blocks, shapes))
    say(f"{text.batch_size} x {text.seq_len} tokens per step, {model.dtype}, {model.attention}")
    flops = step_flops(model, text.batch_size, text.seq_len)
    devices = len(topology.devices(slice_))
    say(f"a step's products: {flops:.3g} FLOP, {flops / devices:.3g} per device\n")
    say(HEADER)
    for name, build in programs(config, model, tx).items():
        say(row(name, build()))


def named(config: TrainConfig) -> bool:
    """Says whether the options say what the vocabulary is."""
    return config.text.path is not None or config.text.tokenizer is not None


def with_vocabulary(config: TrainConfig) -> LlamaConfig:
    """Returns the model with the vocabulary of the data, or the preset's where none is named."""
    size = config.text.vocabulary() if named(config) else config.model.vocab_size
    return dataclasses.replace(config.model, vocab_size=size)


def mesh(config: TrainConfig) -> jax.sharding.Mesh:
    """Returns the mesh of the topology's devices.

    Raises:
        SettingsError: As `sharding.mesh_and_share`.
    """
    devices = topology.devices(str(config.devices.topology))
    sizes, explicit = config.devices.mesh, config.devices.explicit
    return sharding.mesh_and_share(sizes, explicit, config.text.batch_size, devices)[0]


def programs(
    config: TrainConfig, model: LlamaConfig, tx: optax.GradientTransformationExtraArgs
) -> dict[str, Callable[[], Program]]:
    """Returns what compiles each of the programs of a run, by name.

    Args:
        config: The run.
        model: Its model, with the vocabulary.
        tx: Its optimizer.
    """
    text = config.text
    graphdef, shapes = abstract_model(model, text.seed)
    layout = sharding.make_layout(mesh(config), model, tx, shapes)
    init, train_step, valid_step = make_functions(model, tx, text.seed, layout)
    with jax.set_mesh(layout.mesh):
        params, opt_state = abstract_state(init, layout)

    def tokens(*shape: int, place: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)

    def batch(*shape: int, place: jax.sharding.NamedSharding) -> Batch:
        return {name: tokens(*shape, place=place) for name in ("inputs", "targets")}

    count, rows = config.devices.accumulate, text.batch_size
    micro = batch(count, rows // count, text.seq_len, place=layout.rows)
    key, temperature = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.replicated),
        jax.eval_shape(lambda: (jax.random.key(0), jnp.float32(1))),
    )

    def ahead(function: Any, *arguments: Any, **more: Any) -> Callable[[], Program]:
        def build() -> Program:
            with jax.set_mesh(layout.mesh):
                return compiled(lambda: function.lower(*arguments, **more))

        return build

    prompt = tokens(3, PROMPT, place=layout.replicated)
    return {
        "train step": ahead(train_step, params, opt_state, micro),
        "start": ahead(init),
        "validation": ahead(valid_step, params, micro),
        "samples": ahead(
            sample, graphdef, params, prompt, key, length=text.seq_len, temperature=temperature
        ),
    }


def step_flops(model: LlamaConfig, rows: int, length: int) -> float:
    """Counts the operations of a forward and a backward pass, over all devices.

    Counted before the compiler changes anything and without recomputation; attention counts all
    pairs of positions.

    Args:
        model: The model; it is counted with one layer and with two, as all are alike.
        rows: Sequences.
        length: Tokens of each.
    """

    def count(layers: int) -> float:
        small = dataclasses.replace(
            model, num_layers=layers, scan_layers=False, remat=False, attention="xla"
        )
        graphdef, shapes = abstract_model(small, 0)
        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

        def loss(params: optax.Params, tokens: jax.Array) -> jax.Array:
            return cross_entropy(nnx.merge(graphdef, params)(tokens), tokens)[0]

        return jax.jit(jax.grad(loss)).lower(shapes, tokens).cost_analysis()["flops"]

    one, two = count(1), count(2)
    return one + (model.num_layers - 1) * (two - one)
