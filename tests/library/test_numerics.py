"""Numbers: any scale, any dtype, NaN and inf, derivatives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from magma_optax import magma, skip_update, with_magma

SHAPE = (16, 8)


def normal(seed, shape=SHAPE, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def score_after(gradients, dtype=None, **kwargs):
    """Score of one leaf after gradients g_0, g_1, ...; tau is small to make the cosine count."""
    tx = magma(temperature=0.25, score_decay=0.0, **kwargs)
    gradients = [g.astype(dtype or g.dtype) for g in gradients]
    state = tx.init({"w": gradients[0]})
    for g in gradients:
        updates = {"w": g}
        _, state = tx.update(updates, state, grad=updates)
    return float(state.alignment["w"])


def float64_score(gradients):
    mu = 0.0
    for g in (np.asarray(g, np.complex128) for g in gradients):
        mu = 0.9 * mu + 0.1 * g
    cosine = np.sum(mu * g.conj()).real / np.linalg.norm(mu) / np.linalg.norm(g)
    return 1 / (1 + np.exp(-cosine / 0.25))


G0, G1 = normal(1), normal(2) + 0.5 * normal(1)


@pytest.mark.parametrize("exponent", [-50, -40, -20, -1, 0, 1, 20, 40, 50])
def test_score_ignores_the_scale_of_gradients(exponent):
    # 2**-50 is 1e-15, 2**50 is 1e15: powers of two scale without rounding, so bits agree.
    scale = 2.0**exponent
    assert score_after([G0 * scale, G1 * scale]) == score_after([G0, G1])
    np.testing.assert_allclose(score_after([G0, G1]), float64_score([G0, G1]), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-25, 1e25, 1e30, 1e38])
def test_score_is_finite_at_any_scale(scale):
    assert 0 < score_after([G0 * scale, G1 * scale]) < 1


@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"),
    [
        # The momentum is stored in the dtype: half a unit in its last place over two steps.
        (jnp.float16, 1.0, 2e-3),
        (jnp.float16, 1e-4, 2e-2),  # g*g would underflow, mu has subnormals
        (jnp.float16, 300.0, 2e-3),  # sum(g*g) would overflow
        (jnp.bfloat16, 1.0, 1e-2),
        (jnp.bfloat16, 1e15, 1e-2),
    ],
)
def test_narrow_dtypes_are_summed_in_float32(dtype, scale, tolerance):
    gradients = [(G0 * scale).astype(dtype), (G1 * scale).astype(dtype)]
    np.testing.assert_allclose(score_after(gradients), float64_score(gradients), rtol=tolerance)
    # With a float32 momentum nothing but the gradient is rounded.
    np.testing.assert_allclose(
        score_after(gradients, momentum_dtype=jnp.float32), float64_score(gradients), rtol=1e-6
    )


def test_scores_in_bfloat16_training_do_not_stall():
    # Kept in bfloat16 the EMA of a score of 0.5 -> 0.62 would stop half way.
    g = jnp.ones(SHAPE, jnp.bfloat16)
    tx = magma()
    state, update = tx.init(g), jax.jit(tx.update)
    for _ in range(60):
        _, state = update(g, state, grad=g)
    (score,) = jax.tree.leaves(state.alignment)
    expected = 1 / (1 + np.exp(-0.5)) + (0.5 - 1 / (1 + np.exp(-0.5))) * 0.9**60
    np.testing.assert_allclose(score, expected, rtol=1e-5)


def test_complex_leaves_use_the_real_part_of_the_inner_product():
    g0, g1 = (normal(n, dtype=jnp.complex64) for n in (3, 4))
    np.testing.assert_allclose(score_after([g0, g1]), float64_score([g0, g1]), rtol=1e-5)
    # A quarter turn is orthogonal, though it is the same complex line.
    turned = [g0, 1j * g0]
    np.testing.assert_allclose(score_after(turned), float64_score(turned), rtol=1e-5)
    assert score_after(turned) < score_after([g0, g0]) - 0.01
    state = magma(momentum_dtype=jnp.float32).init({"w": g0})
    assert state.momentum["w"].dtype == jnp.complex64, "the imaginary part must not be lost"


def test_float64_leaves_are_summed_in_float64():
    with jax.enable_x64(True):
        g0, g1 = (normal(n, dtype=jnp.float64) * 1e-100 for n in (3, 4))
        np.testing.assert_allclose(score_after([g0, g1]), float64_score([g0, g1]), rtol=1e-6)


@pytest.mark.parametrize("tx", [magma(), with_magma(optax.adam(1e-2)), magma(blocks="element")])
def test_zero_gradients_have_no_direction(tx):
    params = {"dead": jnp.zeros(SHAPE), "live": jnp.ones(SHAPE)}
    grads = {"dead": jnp.zeros(SHAPE), "live": normal(1)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params, grad=grads)
        chex.assert_tree_all_finite((updates, state))
    alignment = (state if hasattr(state, "alignment") else state.magma).alignment
    np.testing.assert_array_equal(alignment["dead"], 0.5)  # sigmoid(0), and s_0 is that too
    assert (alignment["live"] > 0.5).all()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
class TestNonFinite:
    def run(self, bad, tx, where=(0, 0)):
        clean, dirty = {"a": G0, "b": G0}, {"a": G0.at[where].set(bad), "b": G0}
        state = tx.init(clean)
        _, before = tx.update(clean, state, grad=clean)
        updates, after = tx.update(dirty, before, grad=dirty)
        return clean, before, updates, after

    def test_the_block_keeps_its_score_and_others_go_on(self, bad):
        _, before, _, after = self.run(bad, magma())
        assert after.alignment["a"] == before.alignment["a"]
        assert after.alignment["b"] > before.alignment["b"]

    def test_only_the_bad_elements_of_the_momentum_stay(self, bad):
        _, before, _, after = self.run(bad, magma())
        old, new = before.momentum["a"], after.momentum["a"]
        assert new[0, 0] == old[0, 0]
        np.testing.assert_allclose(new, (0.9 * old + 0.1 * G0).at[0, 0].set(old[0, 0]), rtol=1e-6)

    def test_the_score_recovers(self, bad):
        clean, _, _, state = self.run(bad, magma())
        updates, after = magma().update(clean, state, grad=clean)
        assert after.alignment["a"] > state.alignment["a"]
        chex.assert_tree_all_finite((updates, after))

    def test_only_rows_with_bad_elements_stay(self, bad):
        _, before, _, after = self.run(bad, magma(blocks="row"))
        changed = np.asarray(after.alignment["a"] != before.alignment["a"])
        np.testing.assert_array_equal(changed, [False] + [True] * (SHAPE[0] - 1))

    def test_a_dropped_block_is_exactly_zero(self, bad):
        dropped = 0
        for seed in range(8):
            for tx in (magma(key=seed), skip_update(key=seed)):
                _, _, updates, _ = self.run(bad, tx, where=...)
                values = np.asarray(updates["a"])
                dropped += not values.any()
                assert not values.any() or not np.isfinite(values).any()
        assert 2 < dropped < 14

    def test_the_estimate_survives_too(self, bad):
        for base in ("momentum", "gradient"):
            tx = magma(base=base)
            state = tx.init(G0)
            with pytest.warns(UserWarning, match="estimated"):
                for u in (G0, G0.at[0, 0].set(bad), G0, G0):
                    _, state = tx.update(u, state)
            chex.assert_tree_all_finite(state)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"],
)
@pytest.mark.parametrize("tx", [magma(), magma(blocks="row"), skip_update()])
def test_updates_keep_their_dtype(dtype, tx):
    updates = {"w": jnp.ones(SHAPE, dtype), "n": jnp.ones(3, jnp.int32), "f": jnp.ones(3, bool)}
    state = tx.init(updates)
    out, state = tx.update(updates, state, grad=updates)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, updates)
    chex.assert_trees_all_equal(out["n"], updates["n"])
    chex.assert_trees_all_equal(out["f"], updates["f"])
    assert set(state.alignment) <= {"w"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_p_one_without_damping_is_the_base_bit_for_bit(dtype):
    params = {"w": normal(1, dtype=dtype), "b": normal(2, (8,), dtype)}
    base = optax.adam(1e-3)
    tx = with_magma(base, 1.0, damping=False)
    expected, actual = base.init(params), tx.init(params)
    for seed in range(3):
        grads = jax.tree.map(lambda x, s=seed: normal(s, x.shape, dtype), params)
        want, expected = base.update(grads, expected, params)
        got, actual = tx.update(grads, actual, params)
        chex.assert_trees_all_equal(got, want)
    chex.assert_trees_all_equal(actual.inner_state, expected)


@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.parametrize("build", [lambda b: optax.chain(b, magma()), with_magma])
def test_meta_gradients_are_finite(scale, build):
    def meta_loss(log_lr, params):
        tx = build(optax.sgd(jnp.exp(log_lr), momentum=0.9))
        state = tx.init(params)
        for _ in range(3):
            grads = jax.grad(lambda p: scale * jnp.sum(p["w"] ** 2) + 0 * jnp.sum(p["v"]))(params)
            updates, state = tx.update(grads, state, params, grad=grads)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params["w"] ** 2)

    params = {"w": normal(1), "v": jnp.zeros(3)}
    derivatives = jax.jit(jax.grad(meta_loss, argnums=(0, 1)))(jnp.float32(-2.0), params)
    chex.assert_tree_all_finite(derivatives)
    if scale:
        assert derivatives[0] != 0


@pytest.mark.parametrize("build", [lambda b: optax.chain(b, magma()), with_magma])
def test_meta_gradients_of_a_block_that_died(build):
    """Its momentum decays to 1e-19, whose inner product is still above zero."""

    def meta_loss(log_lr):
        params = {"w": normal(1), "dead": jnp.ones(3)}
        tx = build(optax.sgd(jnp.exp(log_lr), momentum=0.9))

        def step(carry, live):
            params, state = carry
            grads = {"w": params["w"], "dead": live * params["dead"]}
            updates, state = tx.update(grads, state, params, grad=grads)
            return (optax.apply_updates(params, updates), state), None

        live = (jnp.arange(400) < 3).astype(jnp.float32)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), live)
        return jnp.sum(params["dead"] ** 2)

    derivative = jax.jit(jax.grad(meta_loss))(jnp.float32(-4.0))
    assert jnp.isfinite(derivative)
    assert derivative != 0


def test_a_temperature_that_falls_to_zero_leaves_no_nan():
    tx = with_magma(optax.sgd(0.1), 1.0, optax.linear_schedule(2.0, 0.0, 2))
    params = {"dead": jnp.ones(3), "w": G0}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update({"dead": jnp.zeros(3), "w": G0}, state, params)
    chex.assert_tree_all_finite((updates, state))
    assert state.magma.alignment["dead"] == 0.5
    assert state.magma.alignment["w"] > 0.6  # sigmoid(1 / 0) = 1


def test_debug_nans_sees_nothing_in_a_healthy_run():
    with jax.debug_nans(True):
        params = {"w": jnp.zeros(SHAPE), "v": normal(1)}
        for tx in (with_magma(optax.adam(1e-2)), skip_update()):
            state = tx.init(params)
            for grads in ({"w": jnp.zeros(SHAPE), "v": G0}, {"w": G0, "v": G1}):
                _, state = jax.jit(tx.update)(grads, state, params)
