"""Data parallelism with `jax.pmap` and linen's TrainState, as many codebases still have it.

Every device holds a replica of the parameters and of the optimizer's state, Magma's included.
Gradients are averaged over devices *before* the update: all devices then compute the same scores,
and as the key is replicated too (not split per device), they toss the same coins. Replicas so stay
identical without a further word between devices. Scores of gradients before the average would
differ from device to device, and so would parameters soon.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m examples.pmap_linen
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from magma_optax import summarize, with_magma


class MLP(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (batch, 8) to (batch, 1)."""
        return nn.Dense(1)(nn.relu(nn.Dense(32)(x)))


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step on this device's share of the batch: x (share, 8), y (share, 1)."""

    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    value, grads = jax.lax.pmean((value, grads), "batch")  # Before the update: see above.
    return state.apply_gradients(grads=grads), value


def train(steps: int = 200) -> tuple[TrainState, jax.Array]:
    """Train on every local device; returns the replicated state and losses, a row a replica."""
    devices = jax.local_device_count()
    model = MLP()
    x = jax.random.normal(jax.random.key(0), (devices, 16, 8))
    y = jnp.sin(x.sum(-1, keepdims=True))
    params = model.init(jax.random.key(1), x[0])["params"]
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=with_magma(optax.adam(1e-2))
    )  # fmt: skip
    # What flax.jax_utils.replicate did: a leading axis of devices.
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * devices), state)
    for _ in range(steps):
        state, value = train_step(state, x, y)
        value.block_until_ready()
    return state, value


def replicas_are_identical(tree: TrainState) -> bool:
    """Whether every replica is the first, bit for bit."""
    return all(bool((leaf == leaf[:1]).all()) for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    state, loss = train()
    assert replicas_are_identical(state)
    first = summarize(jax.tree.map(lambda leaf: leaf[0], state.opt_state))
    print(f"{jax.local_device_count()} replicas, identical; loss {loss[0]:.3f}")
    print(f"alignment {first['alignment_mean']:.3f} over {first['num_blocks']} blocks")
