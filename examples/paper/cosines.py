"""Measures how gradients agree with their moments: along a run, and at parameters that stand still.

Along a run `watch` looks on from within the optimizer. At parameters that stand still the inner
products of some gradients say all: `last_cosines` runs an EMA over them, and `signal_to_noise` says
how much of them is their mean.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from examples.kit.paths import by_path
from examples.kit.step import Batch
from magma_optax import attention_and_mlp

Blocks = dict[str, Array]  # by path, one for each attention and MLP matrix
NOW, BEFORE = 0, 1


def blocks_of(tree: Any) -> Blocks:
    """Returns the attention and MLP matrices of a tree like the parameters, by path."""
    return {path: leaf for path, leaf in by_path(tree).items() if attention_and_mlp(path, leaf)}


# ---------------------------------------------------------------------------------------------
# Along a run


class WatchState(NamedTuple):
    """State of `watch`.

    Attributes:
        momentum: mu of every block, of its shape and dtype.
        cosines: cos(mu_t, g_t) and cos(mu_{t-1}, g_t) of the last steps, the newest last, float32
            (window, 2, blocks); zeros before the first step.
    """

    momentum: Blocks
    cosines: Array


def watch(b1: float, window: int) -> optax.GradientTransformation:
    """Passes gradients on as they are and remembers how they agreed with their EMA.

    It stands before the base, whose gradients it sees. Its mu is the base's own up to rounding if
    it has the base's `b1`.

    Args:
        b1: Decay of mu.
        window: Of how many steps the cosines are kept.
    """

    def init_fn(params: optax.Params) -> WatchState:
        momentum = optax.tree.zeros_like(blocks_of(params))
        return WatchState(momentum, jnp.zeros((window, 2, len(momentum)), jnp.float32))

    def update_fn(updates: optax.Updates, state: WatchState, params: Any = None):
        del params
        g, old = blocks_of(updates), state.momentum
        mu = {path: b1 * old[path] + (1 - b1) * g[path] for path in old}
        now = [cosine(mu[path], g[path]) for path in old]
        before = [cosine(old[path], g[path]) for path in old]
        seen = jnp.stack([jnp.stack(now), jnp.stack(before)])
        return updates, WatchState(mu, jnp.concatenate([state.cosines[1:], seen[None]]))

    return optax.GradientTransformation(init_fn, update_fn)


def cosine(x: Array, y: Array) -> Array:
    """The cosine of two arrays of one shape, float32 (); 0 where one of them is zero."""
    product, x_x, y_y = jnp.sum(x * y), jnp.sum(x * x), jnp.sum(y * y)
    norms = jnp.sqrt(x_x) * jnp.sqrt(y_y)
    return (product / jnp.where(norms > 0, norms, 1)).astype(jnp.float32)


# ---------------------------------------------------------------------------------------------
# At parameters that stand still


class Lossy(Protocol):
    """What has a loss, such as `examples.paper.tasks.llama.Problem`."""

    def loss(self, params: optax.Params, batch: Batch) -> tuple[Array, Array]:
        """Sum of the losses of a batch and their number; traced."""
        ...


def inner_products(
    problem: Lossy, params: optax.Params, batches: Batch, slots: Array, sizes: int
) -> Blocks:
    """Takes K gradients at each of N batch sizes and returns all their inner products; traced.

    A smaller batch is the beginning of a larger one, so every size costs no more than the largest.
    Gradients of one size are independent of each other.

    It holds K N gradients of the blocks at once, in the dtype of the parameters.

    Args:
        problem: Has the loss.
        params: The parameters, which stay as they are.
        batches: The K largest batches in M micro-batches, each array (K, M, rows, ...).
        slots: The size that each micro-batch completes or is on the way to, int32 (M,), from 0 to
            N - 1 and never falling.
        sizes: N.

    Returns:
        By path, float32 (N, K, K).
    """
    zeros = blocks_of(optax.tree.zeros_like(params))

    def add(carry: Any, micro: tuple[Batch, Array]) -> tuple[Any, None]:
        total, count, kept = carry
        batch, slot = micro
        grads, more = jax.grad(problem.loss, has_aux=True)(params, batch)
        total, count = optax.tree.add(total, blocks_of(grads)), count + more
        mean = optax.tree.scale(1 / jnp.maximum(count, 1), total)
        # Written at every micro-batch; the last one that writes to a slot completes it.
        kept = jax.tree.map(lambda kept, mean: kept.at[slot].set(mean), kept, mean)
        return (total, count, kept), None

    def gradients(batch: Batch) -> Blocks:
        kept = {path: jnp.zeros((sizes, *x.shape), x.dtype) for path, x in zeros.items()}
        (_, _, kept), _ = jax.lax.scan(add, (zeros, jnp.zeros(()), kept), (batch, slots))
        return kept

    def products(x: Array) -> Array:
        flat = x.reshape(*x.shape[:2], -1)
        return jnp.einsum("knx,lnx->nkl", flat, flat, precision="highest")

    return {path: products(x) for path, x in jax.lax.map(gradients, batches).items()}


def last_cosines(products: NDArray, b1: float) -> tuple[NDArray, NDArray]:
    """Runs an EMA from zero over K gradients and returns the cosines of the last step.

    Each gradient takes its turn as the last, the others before it in a circle.

    Args:
        products: Inner products of the gradients, (..., K, K).
        b1: Decay of mu.

    Returns:
        cos(mu_K, g_K) and cos(mu_{K-1}, g_K), float64 (..., K).
    """
    gram = np.asarray(products, np.float64)
    count = gram.shape[-1]
    age = (np.arange(count)[:, None] - np.arange(count)) % count  # of gradient j where i is last
    weights = (1 - b1) * b1**age
    without = np.where(age > 0, weights, 0.0)  # mu_{K-1}, but for a factor of b1

    def cosines(weights: NDArray) -> NDArray:
        with_last = np.einsum("ij,...ji->...i", weights, gram)
        square = np.einsum("ij,...jk,ik->...i", weights, gram, weights)
        last = np.diagonal(gram, axis1=-2, axis2=-1)
        return with_last / np.sqrt(square * last)

    return cosines(weights), cosines(without)


def signal_to_noise(products: NDArray) -> tuple[NDArray, NDArray]:
    """Estimates |G|^2 / E |n|^2 of gradients G + n with independent n.

    The inner product of two different gradients is |G|^2 in the mean, so the estimate of |G|^2 has
    no bias and may be below zero. The error is the jackknife's, which is half as large again as it
    should be where there is no signal.

    Args:
        products: Inner products of K gradients, (..., K, K).

    Returns:
        The ratio and its standard error, float64 (...).
    """
    gram = np.asarray(products, np.float64)
    count = gram.shape[-1]

    def ratio(gram: NDArray) -> NDArray:
        count = gram.shape[-1]
        own = np.trace(gram, axis1=-2, axis2=-1)
        signal = (gram.sum(axis=(-2, -1)) - own) / (count * (count - 1))
        return signal / (own / count - signal)

    rest = [np.delete(np.delete(gram, k, -1), k, -2) for k in range(count)]
    without = np.stack([ratio(gram) for gram in rest])
    spread = np.sum((without - without.mean(axis=0)) ** 2, axis=0)
    return ratio(gram), np.sqrt((count - 1) / count * spread)
