"""One training step: the gradient, over micro-batches where memory is short, and the update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

Batch = dict[str, Array]  # Each array has the batch's rows first.


class Gradient(NamedTuple):
    """What a batch says about the parameters.

    Attributes:
        loss: Sum over the micro-batches, float32 ().
        grads: Sum over the micro-batches, of the parameters' shapes.
        aux: What else the loss returns, one for each micro-batch, (N, ...).
    """

    loss: Array
    grads: optax.Updates
    aux: Any


def gradient(
    loss: Callable[[optax.Params, Batch], tuple[Array, Any]],
    params: optax.Params,
    micros: Batch,
    zeros: Callable[[optax.Params], optax.Updates] = optax.tree.zeros_like,
) -> Gradient:
    """Differentiates a loss, one micro-batch at a time.

    Args:
        loss: (parameters, micro-batch) -> loss (), and anything else.
        params: The parameters.
        micros: The batch in N micro-batches, each array (N, B / N, ...).
        zeros: From the parameters to the zeros where the sum begins; on a mesh it says how they
            are split.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if jax.tree.leaves(micros)[0].shape[0] == 1:
        micro = jax.tree.map(lambda x: x[0], micros)
        (value, aux), grads = value_and_grad(params, micro)
        return Gradient(value, grads, jax.tree.map(lambda x: x[None], aux))

    def add(total: tuple[Array, optax.Updates], micro: Batch):
        (value, aux), grads = value_and_grad(params, micro)
        return optax.tree.add(total, (value, grads)), aux

    (value, grads), aux = jax.lax.scan(add, (jnp.zeros(()), zeros(params)), micros)
    return Gradient(value, grads, aux)


def total(losses: Callable[[Batch], Any], micros: Batch) -> Any:
    """Sums what a function returns, one micro-batch at a time.

    Args:
        losses: From a micro-batch to numbers.
        micros: The batch in N micro-batches, each array (N, B / N, ...).
    """
    if jax.tree.leaves(micros)[0].shape[0] == 1:
        return losses(jax.tree.map(lambda x: x[0], micros))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(losses, micros))


def cut(batch: Batch, count: int) -> Batch:
    """Cuts a batch (B, ...) into `count` micro-batches, (count, B / count, ...)."""
    return {name: x.reshape(count, -1, *x.shape[1:]) for name, x in batch.items()}


def apply(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Moves the parameters by one step of the optimizer.

    Args:
        tx: The optimizer.
        grads: The gradient.
        opt_state: The optimizer's state.
        params: The parameters.
        extra: What else the optimizer's update takes, such as ``grad=``.
    """
    updates, opt_state = tx.update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state
