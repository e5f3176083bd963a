"""The whole use of Magma: with bare Optax, with Flax NNX and with Flax Linen."""

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from magma_optax import magma, with_magma

x = jax.random.normal(jax.random.key(0), (64, 8))
y = x @ jnp.linspace(-1.0, 1.0, 8)[:, None]


def mse(prediction: jax.Array) -> jax.Array:
    """Returns the mean squared error, float32 ()."""
    return jnp.mean((prediction - y) ** 2)


def bare_optax(steps: int = 200) -> float:
    """A link of a chain, after any base; `grad=` hands it the gradient."""
    tx = optax.chain(optax.adam(0.1), magma())
    params = {"w": jnp.zeros((8, 1))}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: mse(x @ params["w"]))(params)
        updates, state = tx.update(grads, state, params, grad=grads)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return float(mse(x @ params["w"]))


def flax_nnx(steps: int = 200) -> float:
    """The same chain; `nnx.Optimizer` passes `grad=` on."""
    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.adam(0.1), magma()), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: mse(model(x)))(model)
        optimizer.update(model, grads, grad=grads)

    for _ in range(steps):
        step(model, optimizer)
    return float(mse(model(x)))


def flax_linen(steps: int = 200) -> float:
    """A wrapper around the base: it needs no `grad=`, which `TrainState` could not pass."""
    model = linen.Dense(1)
    params = model.init(jax.random.key(1), x)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=with_magma(optax.adam(0.1)))

    @jax.jit
    def step(state):
        grads = jax.grad(lambda params: mse(state.apply_fn(params, x)))(state.params)
        return state.apply_gradients(grads=grads)

    for _ in range(steps):
        state = step(state)
    return float(mse(model.apply(state.params, x)))


if __name__ == "__main__":
    for train in (bare_optax, flax_nnx, flax_linen):
        print(f"{train.__name__}: mean squared error {train():.1e}")
