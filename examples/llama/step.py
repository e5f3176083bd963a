"""The Llama's training step on a mesh, as pure functions of its parameters.

Also here is what an optimizer has to know of them: what decays, and how they are cut into blocks.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from examples.kit import scores
from examples.kit.loss import cross_entropy
from examples.kit.optimizers import Blocks
from examples.kit.paths import path_string
from examples.kit.step import Batch, apply, gradient, total
from examples.llama import sharding
from examples.llama.config import LlamaConfig
from examples.llama.model import Llama
from magma_optax import stacked


def decays(params: optax.Params) -> optax.Params:
    """Marks what decays: everything but the norms (whose rank says nothing when stacked)."""
    return jax.tree.map_with_path(lambda path, _: not path_string(path).endswith("weight"), params)


def layer_blocks(scan_layers: bool) -> Blocks:
    """Returns how magma_optax cuts the parameters into blocks: one per matrix and layer."""
    return stacked(0) if scan_layers else "leaf"


def abstract_model(config: LlamaConfig, seed: int) -> tuple[nnx.GraphDef, optax.Params]:
    """Returns the model's structure and its parameters' `jax.ShapeDtypeStruct`."""
    graphdef, state = _abstract_model(config, seed)
    return graphdef, nnx.to_pure_dict(state)


@functools.cache  # the trainer asks twice, and NNX takes a quarter of a second
def _abstract_model(config: LlamaConfig, seed: int) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(seed))))


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
        of micro-batches, int32 (N, B / N, T).
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

        def mean_loss(params: optax.Params, micro: Batch) -> tuple[Array, None]:
            nll, _ = loss(params, micro)
            return nll / count, None  # a token weighs the same in every micro-batch

        zeros = functools.partial(sharding.zeros, layout=layout)
        value, grads, _ = gradient(mean_loss, params, batch, zeros)
        params, opt_state = apply(tx, grads, opt_state, params)
        now = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return params, opt_state, now | scores.summary(opt_state)

    @jax.jit(out_shardings=layout.replicated)
    def valid_step(params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        return total(functools.partial(loss, params), batch)

    return init, train_step, valid_step


def abstract_state(init: Callable, layout: sharding.Layout) -> tuple[optax.Params, optax.OptState]:
    """Returns what ``init()`` would, as `jax.ShapeDtypeStruct` with shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(init),
        (layout.params, layout.opt_state),
    )
