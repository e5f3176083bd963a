"""The whole use of Magma on a toy problem: with bare Optax, with NNX and with linen."""

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from magma_optax import magma, with_magma

x = jax.random.normal(jax.random.key(0), (64, 8))
y = x @ jnp.linspace(-1.0, 1.0, 8)[:, None]


def loss(predict):
    """Return the mean squared error of a model, float32 ()."""
    return jnp.mean((predict(x) - y) ** 2)


# Bare Optax: Magma is a link of a chain, after any base, and gets the gradient as `grad=`.
tx = optax.chain(optax.adam(0.1), magma())
params = {"w": jnp.zeros((8, 1))}
state = tx.init(params)
update = jax.jit(tx.update)
for _ in range(200):
    grads = jax.grad(lambda p: loss(lambda x: x @ p["w"]))(params)
    updates, state = update(grads, state, params, grad=grads)
    params = optax.apply_updates(params, updates)
print(f"optax: {loss(lambda x: x @ params['w']):.1e}")

# NNX: the same chain; `nnx.Optimizer` passes `grad=` on.
model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads, grad=grads))
for _ in range(200):
    step(model, optimizer, nnx.grad(loss)(model))
print(f"nnx:   {loss(model):.1e}")

# linen: `TrainState` cannot pass `grad=`; a wrapper around the base needs none.
dense = linen.Dense(1)
train = TrainState.create(
    apply_fn=dense.apply,
    params=dense.init(jax.random.key(1), x),
    tx=with_magma(optax.adam(0.1)),
)
apply_gradients = jax.jit(lambda train, grads: train.apply_gradients(grads=grads))
gradient = jax.grad(lambda p: loss(lambda x: dense.apply(p, x)))
for _ in range(200):
    train = apply_gradients(train, gradient(train.params))
print(f"linen: {loss(lambda x: dense.apply(train.params, x)):.1e}")
