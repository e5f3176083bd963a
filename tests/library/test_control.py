"""The control: a constant in Magma's place, and its closed form."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from magma_optax import attention_and_mlp, control, mean_multiplier, summarize, with_magma

PARAMS = {"attn": {"q": jnp.ones((4, 4))}, "norm": {"scale": jnp.ones(4, jnp.bfloat16)}}
UPDATES = {"attn": {"q": jnp.full((4, 4), 3.0)}, "norm": {"scale": jnp.ones(4, jnp.bfloat16)}}


def apply(tx, updates=UPDATES, params=PARAMS):
    return tx.update(updates, tx.init(params), params)[0]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [((), 0.2771), ((0.95,), 0.2695), ((0.9, 1.0), 0.5543), ((0.0, 0.5, 1.0), 0.3655)],
)
def test_the_closed_form(arguments, value):
    assert mean_multiplier(*arguments) == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize("b1", [0.5, 0.9])
def test_magma_multiplies_noise_by_the_closed_form(b1):
    """In the mean over blocks and steps of Gaussian gradients, once mu is stationary."""
    params = {str(n): jnp.zeros(2000) for n in range(8)}
    tx = with_magma(optax.adam(1.0, b1=b1), score_decay=0.0)

    def step(state, key):
        keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))
        grads = jax.tree.map(lambda key, x: jax.random.normal(key, x.shape), keys, params)
        return tx.update(grads, state)[1], None

    state, _ = jax.lax.scan(step, tx.init(params), jax.random.split(jax.random.key(0), 100))
    mean_score = summarize(state)["alignment_mean"]
    # A cosine of 2000 numbers is off by 0.02; the slope of the sigmoid is 1/8, of 8 blocks.
    np.testing.assert_allclose(0.5 * mean_score, mean_multiplier(b1), atol=5 * 0.02 / 8 / 8**0.5)


def test_multiplies_the_chosen_leaves_and_no_other():
    out = apply(control(0.5, where=attention_and_mlp))
    np.testing.assert_array_equal(out["attn"]["q"], 1.5)
    assert out["norm"]["scale"] is UPDATES["norm"]["scale"]
    everywhere = apply(control(0.5))
    np.testing.assert_array_equal(everywhere["norm"]["scale"], jnp.asarray(0.5, jnp.bfloat16))
    chex.assert_trees_all_equal_dtypes(everywhere, UPDATES)


def test_its_default_is_the_closed_form_of_its_arguments():
    out = apply(control(where=attention_and_mlp, b1=0.95, survival_prob=0.25, temperature=1.0))
    expected = 3 * 0.25 / (1 + math.exp(-math.sqrt(1 - 0.95**2)))
    np.testing.assert_allclose(out["attn"]["q"], expected, rtol=1e-6)


def test_a_traced_multiplier():
    tuned = jax.jit(lambda c: apply(control(c)))(jnp.float32(0.25))
    np.testing.assert_array_equal(tuned["attn"]["q"], 0.75)


def test_a_multiplier_that_is_injected():
    make = optax.inject_hyperparams(control, static_args=("where",))
    tx = make(multiplier=0.25, where=lambda path, leaf: path == "layers/0/mlp/up")
    params = {"layers": [{"mlp": {"up": jnp.ones(3)}}], "head": jnp.ones(3)}
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["layers"][0]["mlp"]["up"], 0.25)
    np.testing.assert_array_equal(updates["head"], 1)


def test_under_optax_masked():
    tx = optax.masked(control(0.5, where=attention_and_mlp), {"attn": True, "norm": False})
    np.testing.assert_array_equal(apply(tx)["attn"]["q"], 1.5)


def test_stays_out_of_what_is_frozen():
    grads = {"a": jnp.ones(2), "b": None}
    out = apply(optax.chain(optax.sgd(1.0), control(0.5)), grads, grads)
    np.testing.assert_array_equal(out["a"], -0.5)
    assert out["b"] is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"multiplier": -1.0}, ValueError, "multiplier must be 0 or more, got -1.0"),
        ({"multiplier": math.inf}, ValueError, "multiplier must be 0 or more"),
        ({"multiplier": "small"}, TypeError, "multiplier must be a number, got 'small'"),
        ({"multiplier": optax.adam(1.0)}, TypeError, "multiplier must be a number"),
        ({"b1": 1.0}, ValueError, r"b1 must be in \[0, 1\), got 1.0"),
        ({"survival_prob": 0.0}, ValueError, r"survival_prob must be in \(0, 1\]"),
        ({"survival_prob": optax.constant_schedule(0.5)}, TypeError, "must be a number"),
        ({"temperature": 0.0}, ValueError, "temperature must be greater than 0"),
        ({"where": lambda path: True}, TypeError, "predicate of two arguments"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        control(**arguments)


def test_a_where_that_selects_nothing_is_refused():
    with pytest.raises(ValueError, match="selects none of the 2 leaves"):
        control(where=lambda path, leaf: False).init(PARAMS)
