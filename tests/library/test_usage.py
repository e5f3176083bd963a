"""The lines that users paste: a chain, a wrapper, linen's TrainState, NNX, pmap."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from magma_optax import magma, skip_update, summarize, with_magma

pytestmark = pytest.mark.usefixtures("keys_are_used_once")

TARGET = jax.random.normal(jax.random.key(0), (6, 4))
PARAMS = {"dense": {"kernel": jnp.zeros((6, 4)), "bias": jnp.zeros(4)}}


def loss(params, x):
    y = x @ params["dense"]["kernel"] + params["dense"]["bias"][None]
    return jnp.mean((y - x @ TARGET) ** 2)


def batch(step):
    return jax.random.normal(jax.random.key(step), (32, 6))


def train(tx, steps=200, **extra):
    @jax.jit
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        kwargs = {"grad": grads} if extra.get("grad") else {}
        updates, state = tx.update(grads, state, params, **kwargs)
        return optax.apply_updates(params, updates), state, value

    params, state = PARAMS, tx.init(PARAMS)
    for n in range(steps):
        params, state, value = step(params, state, batch(n))
    return params, state, value


def test_chain_trains_with_a_plain_update():
    with pytest.warns(UserWarning, match="estimated"):
        _, state, value = train(optax.chain(optax.adam(1e-1), magma()))
    assert value < 0.05 < loss(PARAMS, batch(0)) / 20
    assert 0.5 < summarize(state)["alignment_mean"] < 0.63


def test_wrapper_and_chain_with_grad_are_one_algorithm():
    chained = train(optax.chain(optax.adam(1e-1), magma(key=5)), grad=True)
    wrapped = train(with_magma(optax.adam(1e-1), key=5))
    # Adam's mu and Magma's are the same EMA, rounded alike but for fused multiply-adds.
    chex.assert_trees_all_close(chained[0], wrapped[0], rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(chained[1][1].alignment, wrapped[1].magma.alignment, rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "base", "least"),
    [(optax.adam, "momentum", 0.6), (optax.rmsprop, "gradient", 0.75)],
)
def test_estimated_alignment_follows_the_exact_one(optimizer, base, least):
    """Scores within 1 % of the exact ones, cosines correlated; the wrong choice is worthless."""

    def cosines(estimate):
        tx = optax.chain(optimizer(1e-3), magma(score_decay=0.0, temperature=1.0, base=estimate))
        exact = with_magma(optimizer(1e-3), score_decay=0.0, temperature=1.0, first_moment="own")

        @jax.jit
        def step(params, state, true, inputs):
            grads = jax.grad(loss)(params, inputs)
            _, true = exact.update(grads, true, params)
            updates, state = tx.update(grads, state, params)
            scores = [s.alignment["dense"]["kernel"] for s in (state[1], true.magma)]
            return (optax.apply_updates(params, updates), state, true), scores

        carry, pairs = (PARAMS, tx.init(PARAMS), exact.init(PARAMS)), []
        for n in range(150):
            carry, scores = step(*carry, batch(n)[:4])
            pairs.append(scores)
        return np.log(1 / np.array(pairs[20:]) - 1).T  # inverse of the sigmoid

    with pytest.warns(UserWarning, match="estimated"):
        estimated, true = cosines(base)
        assert np.corrcoef(estimated, true)[0, 1] > least
        assert abs(estimated.mean() - true.mean()) < 0.15
        wrong = "gradient" if base == "momentum" else "momentum"
        estimated, true = cosines(wrong)
        assert np.corrcoef(estimated, true)[0, 1] < least


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="dense")(x)


@pytest.mark.parametrize(
    "tx",
    [
        with_magma(optax.adam(1e-1)),
        optax.chain(optax.adam(1e-1), skip_update()),
        optax.chain(optax.adam(1e-1), magma()),
    ],
    ids=["with_magma", "skip_update", "magma"],
)
@pytest.mark.filterwarnings("ignore:magma. no `grad`:UserWarning")
def test_linen_train_state(tx):
    model = Linen()
    params = model.init(jax.random.key(0), batch(0))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    for n in range(200):
        state = step(state, batch(n))
    assert loss(state.params, batch(0)) < 0.1


@pytest.mark.parametrize("with_grad", [True, False])
def test_nnx_optimizer(with_grad):
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.adam(1e-1), magma()) if with_grad else with_magma(optax.adam(1e-1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def of(model):
            return jnp.mean((model(x) - x @ TARGET) ** 2)

        value, grads = nnx.value_and_grad(of)(model)
        optimizer.update(model, grads, **({"grad": grads} if with_grad else {}))
        return value

    for n in range(200):
        value = step(model, optimizer, batch(n))
    assert value < 0.1
    assert summarize(optimizer.opt_state)["num_blocks"] == 2


@pytest.mark.parametrize("build", [lambda: with_magma(optax.adam(1e-2)), lambda: magma(key=3)])
def test_pmap_replicas_stay_identical(build):
    """4 emulated devices, gradients after pmean: no drift at all after 40 steps."""
    tx = optax.chain(optax.scale(1.0), build())
    devices = jax.devices()[:4]

    def step(params, state, x):
        grads = jax.lax.pmean(jax.grad(loss)(params, x), "batch")
        updates, state = tx.update(grads, state, params, grad=grads)
        return optax.apply_updates(params, updates), state

    step = jax.pmap(step, "batch", devices=devices)
    params, state = jax.tree.map(lambda x: jnp.stack([x] * 4), (PARAMS, tx.init(PARAMS)))
    for n in range(40):
        params, state = step(params, state, batch(n).reshape(4, 8, 6))
    for leaf in jax.tree.leaves((params, state)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))

    @jax.jit
    def single_step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params, grad=grads)
        return optax.apply_updates(params, updates), state

    # The replicas are what one device computes from the mean gradient; sums differ in order.
    single, single_state = PARAMS, tx.init(PARAMS)
    for n in range(40):
        single, single_state = single_step(single, single_state, batch(n))
    first = jax.tree.map(lambda x: x[0], (params, state))
    chex.assert_trees_all_close(first, (single, single_state), rtol=1e-3, atol=1e-5)


class TestJit(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_update_is_the_same_with_and_without_jit(self):
        grads = jax.grad(loss)(PARAMS, batch(0))
        for tx in (optax.chain(optax.adam(1e-2), magma()), with_magma(optax.adam(1e-2))):
            expected = tx.update(grads, tx.init(PARAMS), PARAMS, grad=grads)
            update = self.variant(lambda g, s, p, tx=tx: tx.update(g, s, p, grad=g))
            actual = update(grads, tx.init(PARAMS), PARAMS)
            chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_vmap_over_seeds_gives_each_its_coins():
    def first_update(seed):
        tx = skip_update(key=seed)
        return tx.update(PARAMS | {"w": jnp.ones(2)}, tx.init(PARAMS))[0]["w"][0]

    seeds = jnp.arange(20)
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(first_update))(seeds), [first_update(int(seed)) for seed in seeds]
    )


def test_unknown_extra_arguments_are_ignored():
    for tx in (magma(), with_magma(optax.adam(1e-2)), skip_update()):
        assert isinstance(tx, optax.GradientTransformationExtraArgs)
        state = tx.init(PARAMS)
        grads = PARAMS
        expected = tx.update(grads, state, PARAMS, grad=grads)
        actual = tx.update(grads, state, params=PARAMS, grad=grads, value=1.0, other="text")
        chex.assert_trees_all_equal(actual, expected)


def test_eval_shape_and_remat():
    tx = with_magma(optax.adam(1e-2))
    shapes = jax.eval_shape(tx.init, jax.eval_shape(lambda: PARAMS))
    chex.assert_trees_all_equal_shapes_and_dtypes(tx.init(PARAMS), shapes)
    grads = jax.grad(loss)(PARAMS, batch(0))
    again = jax.checkpoint(lambda g, s: tx.update(g, s, PARAMS)[0])(grads, tx.init(PARAMS))
    chex.assert_trees_all_close(again, tx.update(grads, tx.init(PARAMS), PARAMS)[0], rtol=1e-6)
