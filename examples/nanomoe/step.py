"""nanoMoE's training step, as pure functions of its parameters.

Also here is what an optimizer has to know of them: what decays, and how they are cut into blocks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from examples.kit.loss import cross_entropy
from examples.kit.step import Batch, apply, cut, gradient, total
from examples.nanomoe.config import NanoMoEConfig
from examples.nanomoe.model import NanoMoE, router_loss


def matrices(params: optax.Params) -> optax.Params:
    """Marks what decays: all but the norms."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def expert_axis(path: str, leaf: jax.ShapeDtypeStruct) -> int | tuple[()]:
    """Returns the axis that counts blocks: 0 of the experts' (E, ., .); other leaves are one."""
    return 0 if "experts" in path.split("/") else ()


def make_losses(config: NanoMoEConfig) -> tuple[Callable, Callable]:
    """Splits the model once and returns its losses as pure functions of its parameters.

    Returns:
        ``loss(params, batch) -> loss, {"loss": without the router's, "routing": ...}`` for training
        on int32 (B, T); ``valid_loss(params, batch) -> sum of losses, number of tokens``.
    """
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: NanoMoE(config, rngs=nnx.Rngs(0))))

    def loss(params: optax.Params, batch: Batch) -> tuple[Array, dict[str, Any]]:
        logits, routing = nnx.merge(graphdef, params)(batch["inputs"], train=True)  # (B, T, V)
        nll, count = cross_entropy(logits, batch["targets"])
        nll = nll / jnp.maximum(count, 1)
        return nll + router_loss(routing, config), {"loss": nll, "routing": routing}

    def valid_loss(params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        logits, _ = nnx.merge(graphdef, params)(batch["inputs"], train=False)
        return cross_entropy(logits, batch["targets"])

    return loss, valid_loss


def make_functions(
    config: NanoMoEConfig,
    tx: optax.GradientTransformationExtraArgs,
    seed: int,
    accumulate: int,
) -> tuple[Callable, Callable, Callable]:
    """Returns pure functions of the model's parameters.

    Returns:
        ``init() -> params, opt_state``;
        ``train_step(params, opt_state, batch) -> params, opt_state, metrics``, which takes over the
        buffers of the first two; ``valid_step(params, batch) -> sum of losses, number of tokens``.
    """
    loss, valid_loss = make_losses(config)

    @jax.jit
    def init() -> tuple[optax.Params, optax.OptState]:
        params = nnx.to_pure_dict(nnx.state(NanoMoE(config, rngs=nnx.Rngs(seed))))
        return params, tx.init(params)

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params: optax.Params, opt_state: optax.OptState, batch: Batch):
        _, grads, now = gradient(loss, params, cut(batch, accumulate))
        grads = optax.tree.scale(1 / accumulate, grads)  # the mean: parameters move once
        now = jax.tree.map(lambda x: jnp.mean(x, axis=0), now)
        params, opt_state = apply(tx, grads, opt_state, params)
        return params, opt_state, now | {"grad_norm": optax.tree.norm(grads)}

    @jax.jit
    def valid_step(params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        return total(functools.partial(valid_loss, params), cut(batch, accumulate))

    return init, train_step, valid_step
