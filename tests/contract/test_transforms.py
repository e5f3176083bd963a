"""JAX's transformations and settings around an update."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_bases import FORMS, PARAMS, grads_at

from magma_optax import MagmaState, magma, skip_update, with_magma

GRADS = grads_at(0)


def update(tx, state, params=PARAMS, grads=GRADS):
    return tx.update(grads, state, params, grad=grads)


@pytest.fixture
def tx(form):
    return form.wrap(optax.adam(1e-2), key=4)


def test_donated_state_and_parameters_twice_from_one_factory(tx):
    step = jax.jit(functools.partial(update, tx), donate_argnums=(0, 1))
    results = []
    for _ in range(2):
        params, state = jax.tree.map(jnp.array, PARAMS), tx.init(PARAMS)
        for _ in range(3):
            updates, state = step(state, params)
            params = jax.tree.map(jnp.array, PARAMS)
        results.append(updates)
    chex.assert_trees_all_equal(*results)


def test_traced_once_over_many_steps(tx):
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return update(tx, state)

    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = step(state)
    assert len(traces) == 1


def test_vmap_over_seeds_is_each_seed_alone(form):
    def first(seed):
        tx = form.wrap(optax.adam(1e-2), key=seed)
        return update(tx, tx.init(PARAMS))

    together = jax.jit(jax.vmap(first))(jnp.arange(4))
    for n in range(4):
        one = jax.tree.map(lambda x, n=n: x[n], together)
        chex.assert_trees_all_close(one, first(n), rtol=1e-5, atol=1e-9)


def test_vmap_over_hyperparameters_is_each_alone():
    def run(p, tau, decay, score, b1, rate):
        tx = with_magma(
            optax.sgd(rate), p, tau, score_decay=decay, initial_score=score, b1=b1, key=4
        )
        state = tx.init(PARAMS)
        for _ in range(2):
            updates, state = update(tx, state)
        return updates, state

    grid = tuple(jnp.array(v) for v in ([0.5, 1.0], [2.0, 0.5], [0.9, 0.0], [0.5, 1.0]))
    grid += (jnp.array([0.9, 0.5]), jnp.array([0.1, 1.0]))
    together = jax.jit(jax.vmap(run))(*grid)
    for n in range(2):
        one = jax.tree.map(lambda x, n=n: x[n], together)
        alone = run(*(float(values[n]) for values in grid))
        chex.assert_trees_all_close(one, alone, rtol=1e-5, atol=1e-9)


def test_derivative_through_an_update_is_the_factor(form):
    """d updates / d gradients of SGD: the factor of a surviving block, 0 of a dropped one."""
    tx = form.wrap(optax.sgd(1.0), key=4)

    def total(scale):
        grads = jax.tree.map(lambda g: scale * g, GRADS)
        updates, _ = update(tx, tx.init(PARAMS), grads=grads)
        return jnp.stack([jnp.sum(u) for u in jax.tree.leaves(updates)])

    # Scores ignore scale, so updates are linear in it.
    derivative = jax.jit(jax.jacobian(total))(jnp.float32(1.0))
    np.testing.assert_allclose(derivative, total(jnp.float32(1.0)), rtol=1e-4, atol=1e-5)


def test_remat_and_eval_shape(tx):
    state = tx.init(PARAMS)
    expected = update(tx, state)
    actual = jax.jit(jax.checkpoint(functools.partial(update, tx)))(state)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-9)
    shapes = jax.eval_shape(functools.partial(update, tx), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, expected)


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_default_prng_implementation_does_not_matter(form, implementation):
    def run():
        tx = form.wrap(optax.adam(1e-2), key=4)
        return jax.jit(functools.partial(update, tx))(tx.init(PARAMS))

    expected = run()
    with jax.default_prng_impl(implementation):
        chex.assert_trees_all_equal(run(), expected)
        jax.block_until_ready(form.link(key=jax.random.key(1)).init(PARAMS))


def test_x64_changes_neither_coins_nor_dtypes(form, tx):
    expected = update(tx, tx.init(PARAMS))
    with jax.enable_x64(True):
        actual = jax.jit(functools.partial(update, tx))(tx.init(PARAMS))
    chex.assert_trees_all_equal_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-9)


def test_no_transfer_inside_a_step(tx):
    state = tx.init(PARAMS)
    step = jax.jit(functools.partial(update, tx))
    step(state)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(state))


def test_debug_nans(tx):
    with jax.debug_nans(True):
        params = {**PARAMS, "dead": jnp.zeros(3)}
        grads = {**GRADS, "dead": jnp.zeros(3)}
        state = tx.init(params)
        for _ in range(2):
            _, state = jax.jit(functools.partial(update, tx))(state, params, grads)


@functools.cache
def steps_on(base, form):
    """Compiled once for all values below: (initial state, step)."""
    tx = FORMS[form].wrap(base(1e-2), key=4)
    return tx.init(PARAMS), jax.jit(functools.partial(update, tx))


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-20, 1e20, 1e30, jnp.nan, jnp.inf, 1e-40])
@pytest.mark.parametrize("base", [optax.adam, optax.rmsprop, optax.lion, optax.sgd])
def test_bad_numbers_in_one_block_stay_there(form, base, value):
    """Other blocks go on as if nothing were wrong; dropped blocks are zero; scores are finite."""
    state, step = steps_on(base, form.name)
    bad = {**GRADS, "attn": {"kernel": jnp.full((8, 6), value)}}
    clean, dropped = state, 0
    for n in range(6):
        grads = bad if n == 2 else GRADS
        updates, state = step(state, PARAMS, grads)
        expected, clean = step(clean, PARAMS, GRADS)
        chex.assert_trees_all_close(updates["mlp"], expected["mlp"], rtol=1e-6)
        if not np.any(expected["attn"]["kernel"]):
            dropped += 1
            assert not np.any(updates["attn"]["kernel"])
        chex.assert_tree_all_finite(form.state(state).alignment)
    assert 0 < dropped < 6


def test_every_setting_of_strictness_at_once():
    with (
        jax.numpy_rank_promotion("raise"),
        jax.debug_key_reuse(True),
        jax.debug_nans(True),
        jax.check_tracer_leaks(True),
    ):
        for form in FORMS.values():
            tx = form.wrap(optax.sgd(1e-2, momentum=0.9), blocks="row", key=4)
            jax.jit(functools.partial(update, tx))(tx.init(PARAMS))


@pytest.mark.parametrize("factory", [magma, skip_update])
def test_init_works_within_jit_and_from_numpy(factory):
    expected = factory(key=jax.random.key(3)).init(PARAMS)
    assert isinstance(expected, MagmaState)
    for params in (PARAMS, jax.tree.map(np.asarray, PARAMS)):
        actual = jax.jit(factory(key=jax.random.key(3)).init)(params)
        chex.assert_trees_all_equal(actual, expected)
