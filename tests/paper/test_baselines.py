"""The baselines of examples/paper: each against its paper's formula in float64 NumPy."""

import functools

import baselines_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.kit.optimizers import direction
from examples.kit.soap import scale_by_soap
from examples.paper.baselines.apollo import projections, scale_by_apollo
from examples.paper.baselines.c_adam import scale_by_c_adam
from examples.paper.baselines.controls import constant_times_mask, damping_only
from examples.paper.baselines.matrices import on_matrices
from examples.paper.baselines.mgup import mgup
from examples.paper.baselines.sgg import k_means, lower_median, sgg
from examples.paper.baselines.stable_spam import scale_by_stable_spam
from magma_optax import summarize, with_magma

STEPS = 8
SHAPES = {"wide": (4, 6), "tall": (7, 3), "square": (5, 5)}
# float32 against float64 over a few steps of sums of at most 49 numbers
CLOSE = {"rtol": 2e-4, "atol": 2e-5}

scale_by_laprop = functools.partial(direction, "laprop")  # the Llama's trainer has it


def gradients(shapes, steps=STEPS, seed=0):
    """A dict of float32 arrays, (steps, *shape); momenta and gradients disagree at times."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(steps, *s)).astype(np.float32) for name, s in shapes.items()}


def run_with_states(tx, grads):
    """All steps' directions and states, under jit and lax.scan, which refuses drifting dtypes."""
    params = {name: jnp.zeros(g.shape[1:], g.dtype) for name, g in grads.items()}

    def step(state, g):
        u, state = tx.update(g, state, params)
        return state, (u, state)

    return jax.jit(lambda state, g: jax.lax.scan(step, state, g)[1])(tx.init(params), grads)


def run(tx, grads):
    """All steps' directions and the last state."""
    directions, states = run_with_states(tx, grads)
    return directions, jax.tree.map(lambda x: np.asarray(x)[-1], states)


def double(grads, name):
    return list(grads[name].astype(np.float64))


BY_FORMULA = {
    "c_adam": (scale_by_c_adam, reference.c_adam),
    "laprop": (scale_by_laprop, reference.laprop),
    "mgup": (lambda: mgup(optax.scale_by_adam()), reference.mgup),
    "stable_spam": (
        lambda: scale_by_stable_spam(interval=3, gamma3=0.9),
        lambda g: reference.stable_spam(g, interval=3, g3=0.9),
    ),
}


@pytest.mark.parametrize("name", BY_FORMULA)
def test_formula(name):
    make, formula = BY_FORMULA[name]
    grads = gradients({**SHAPES, "vector": (5,)})
    grads["wide"][4, 1, 2] = 100.0  # a spike
    got, _ = run(make(), grads)
    for leaf in grads:
        np.testing.assert_allclose(got[leaf], formula(double(grads, leaf)), **CLOSE)


def test_apollo():
    grads = gradients(SHAPES)
    grads["wide"][5] *= 30.0  # the limiter acts
    options = {"interval": 3, "growth": 1.2, "seed": 7}
    tx = scale_by_apollo(2, **options)
    got, _ = run(tx, grads)
    like = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    drawn = [projections(like, 2, 7, jnp.int32(t // 3)) for t in range(STEPS)]
    for leaf in grads:
        sketch = [np.asarray(d[leaf], np.float64) for d in drawn]
        want = reference.apollo(double(grads, leaf), sketch, 1.2)
        np.testing.assert_allclose(got[leaf], want, **CLOSE)


def test_apollo_projections():
    like = {"a": jnp.zeros((256, 600)), "b": jnp.zeros((600, 256))}
    P = [projections(like, None, 0, jnp.int32(period)) for period in (0, 0, 1)]
    assert P[0]["a"].shape == P[0]["b"].shape == (256, 64)
    np.testing.assert_array_equal(P[0]["a"], P[1]["a"])
    for other in (P[0]["b"], P[2]["a"]):
        assert abs(np.corrcoef(np.ravel(P[0]["a"]), np.ravel(other))[0, 1]) < 0.05
    assert np.var(P[0]["a"]) == pytest.approx(1 / 64, rel=0.05)


@pytest.mark.parametrize("clusters", [2, 3])
def test_sgg(clusters):
    grads = gradients(SHAPES)
    grads["tall"] *= 0.05  # layers of different scale: D matters, and S meets its bounds
    options = {"interval": 3, "decay": 0.5, "low": 0.5, "high": 4.0}
    got, state = run(sgg(optax.scale_by_adam(), clusters, **options), grads)
    want = reference.sgg([double(grads, leaf) for leaf in grads], clusters, **options)
    for leaf, layer in zip(grads, want, strict=True):
        np.testing.assert_allclose(got[leaf], layer, **CLOSE)
    scales = np.concatenate([np.ravel(s) for s in jax.tree.leaves(state.scale)])
    assert scales.min() < 1 < scales.max() == 4.0


def test_sgg_parts():
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    labels = jax.jit(k_means, static_argnums=1)(x, 3)
    for row, label in zip(x, labels, strict=True):
        np.testing.assert_array_equal(label, reference.k_means(row.astype(np.float64), 3))
    median_of = jax.jit(lower_median)
    for n in (1, 2, 7, 50):
        some = np.abs(x[0, :n])
        inside = np.arange(50) < n
        median, count = median_of([np.abs(x[0])], [inside])
        assert median == np.sort(some)[(n - 1) // 2] and count == n


@pytest.mark.parametrize("largest_side", [10, 5])
def test_soap(largest_side):
    grads = gradients({**SHAPES, "vector": (5,)}, steps=10)
    tx = scale_by_soap(interval=3, largest_side=largest_side)
    got, states = run_with_states(tx, grads)
    state = jax.tree.map(lambda x: np.asarray(x)[0], states)  # after the first step
    for leaf in SHAPES:
        bases = []
        for gram, basis in (
            (state.left[leaf], state.left_basis[leaf]),
            (state.right[leaf], state.right_basis[leaf]),
        ):
            if gram.size == 0:
                bases.append(None)
                continue
            q = np.asarray(basis, np.float64)
            np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-5)
            eigenvalues = q.T @ np.asarray(gram, np.float64) @ q
            np.testing.assert_allclose(eigenvalues, np.diag(np.diag(eigenvalues)), atol=1e-6)
            bases.append(q)
        assert (bases[0] is None) == (SHAPES[leaf][0] > largest_side)
        want = reference.soap(double(grads, leaf), bases, interval=3)
        np.testing.assert_allclose(got[leaf], want, rtol=2e-3, atol=2e-4)  # float32 bases
    adam = reference.adam(double(grads, "vector")[1:], 0.95, 0.95)
    np.testing.assert_allclose(got["vector"][1:], adam, **CLOSE)
    assert not np.any(got["vector"][0])


# What all of them share.

MATRICES = {  # intervals for which each periodic event falls within STEPS
    "c_adam": scale_by_c_adam,
    "laprop": scale_by_laprop,
    "mgup": lambda: mgup(optax.scale_by_adam()),
    "sgg": lambda: sgg(optax.scale_by_adam(), interval=2, decay=0.5),
    "apollo": lambda: scale_by_apollo(interval=3),
    "soap": lambda: scale_by_soap(interval=2),
    "stable_spam": lambda: scale_by_stable_spam(interval=3, gamma3=0.9),
}
LLAMA = {
    "model/embed_tokens/embedding": (8, 4),
    "model/layers/self_attn/q_proj/kernel": (2, 4, 4),
    "model/layers/mlp/up_proj/kernel": (2, 4, 6),
    "model/norm/weight": (4,),
}


@pytest.mark.parametrize("name", sorted(MATRICES.keys() - {"apollo"}))
def test_leading_axes_index_matrices(name):
    one = gradients({"a": (4, 5), "b": (4, 5)})
    stacked = {"stacked": np.stack([one["a"], one["b"]], 1)}
    apart, _ = run(MATRICES[name](), one)
    together, _ = run(MATRICES[name](), stacked)
    for i, leaf in enumerate(one):
        np.testing.assert_allclose(together["stacked"][:, i], apart[leaf], rtol=1e-4, atol=1e-5)


def test_apollo_on_stacked_matrices():
    grads = gradients({"stacked": (2, 6, 4)})
    got, _ = run(scale_by_apollo(2), grads)
    P = projections({"stacked": jnp.zeros((2, 6, 4))}, 2, 0, jnp.int32(0))
    for i in range(2):
        sketch = [np.asarray(P["stacked"][i], np.float64)] * STEPS
        want = reference.apollo(list(grads["stacked"][:, i].astype(np.float64)), sketch)
        np.testing.assert_allclose(got["stacked"][:, i], want, **CLOSE)


def llama_gradients():
    grads = {path: jnp.asarray(g) for path, g in gradients(LLAMA).items()}
    bf16 = "model/layers/self_attn/q_proj/kernel"
    return grads | {bf16: grads[bf16].astype(jnp.bfloat16)}


@functools.cache
def adam_in_a_model():
    return run(optax.adam(0.1), llama_gradients())


@pytest.mark.parametrize("name", MATRICES)
def test_in_a_model(name):
    """On the matrices alone, under Magma, with a learning rate that is traced, in a scan."""
    grads = llama_gradients()
    params = {path: jnp.zeros(g.shape[1:], g.dtype) for path, g in grads.items()}

    def make(lr):
        direction = on_matrices(MATRICES[name](), optax.scale_by_adam())
        base = optax.chain(direction, optax.scale_by_learning_rate(lr))
        return with_magma(base, 1.0, damping=False)

    @jax.jit
    def train(lr):
        tx = make(lr)

        def step(state, g):
            u, state = tx.update(g, state, params)
            return state, u

        return jax.lax.scan(step, tx.init(params), grads)

    state, updates = train(0.1)
    assert 0.5 < summarize(state)["alignment_mean"] < 0.7
    adam, _ = adam_in_a_model()
    for path, u in updates.items():
        assert u.dtype == grads[path].dtype and np.isfinite(np.asarray(u, np.float32)).all()
        if "kernel" in path:
            last = np.asarray(u[-1], np.float32)
            assert np.sum(last * np.asarray(grads[path][-1], np.float32)) < 0  # downhill
            assert not np.allclose(last, np.asarray(adam[path][-1], np.float32), rtol=0.05)
        else:
            np.testing.assert_allclose(u, adam[path], rtol=1e-4, atol=1e-7)  # fused otherwise


@pytest.mark.parametrize("name", MATRICES)
def test_state_can_be_donated(name):
    tx, params = MATRICES[name](), {"w": jnp.ones((4, 6)), "v": jnp.ones((4, 6))}
    update = jax.jit(tx.update, donate_argnums=1)  # fails where two leaves share a buffer
    _, state = update(params, tx.init(params))
    before = jax.tree.map(jnp.result_type, state)
    _, state = update(params, state)
    assert jax.tree.map(jnp.result_type, state) == before
    assert update._cache_size() == 1  # weak types did not change either


@pytest.mark.parametrize("name", MATRICES)
def test_zero_gradients(name):
    got, _ = run(MATRICES[name](), {"w": jnp.zeros((STEPS, 4, 6))})
    np.testing.assert_array_equal(got["w"], 0)


def test_apollo_after_a_zero_gradient():
    grads = gradients({"w": (4, 6)})
    grads["w"][0] = 0
    got, _ = run(scale_by_apollo(2), grads)
    assert np.linalg.norm(got["w"][1]) > 0.1


def test_magma_finds_the_momentum_of_c_adam_and_keeps_its_own_for_laprop():
    params = {"w": jnp.zeros((4, 6))}
    g = {"w": jnp.asarray(gradients({"w": (4, 6)})["w"][0])}
    c_adam, laprop = with_magma(scale_by_c_adam()), with_magma(scale_by_laprop())
    scores = {}
    for tx, own in ((c_adam, 0), (laprop, 1)):
        state = tx.init(params)
        assert len(jax.tree.leaves(state.magma.momentum)) == own
        _, state = tx.update(g, state, params)
        _, state = tx.update(jax.tree.map(lambda x: x**2, g), state, params)
        scores[own] = float(summarize(state)["alignment_mean"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


BAD = {
    "rank must be an integer of at least 1, got 0": lambda: scale_by_apollo(0),
    "growth must be greater than 0, got -1": lambda: scale_by_apollo(growth=-1),
    r"b1 must be in \[0, 1\), got 1.0": lambda: scale_by_apollo(b1=1.0),
    "interval must be an integer of at least 1, got 2.5": lambda: scale_by_soap(interval=2.5),
    r"shampoo_decay must be in \[0, 1\), got nan": lambda: scale_by_soap(
        shampoo_decay=float("nan")
    ),
    "clusters must be an integer of at least 2, got 1": lambda: sgg(optax.scale_by_adam(), 1),
    "around 1, got 2 and 10.0": lambda: sgg(optax.scale_by_adam(), low=2),
    r"tau must be in \(0, 1\], got 0": lambda: mgup(optax.scale_by_adam(), 0),
    r"gamma2 must be in \[0, 1\), got 2": lambda: scale_by_stable_spam(gamma2=2),
    "interval must be an integer of at least 2, got 1": lambda: scale_by_stable_spam(interval=1),
    r"'norm' has shape \(4,\)": lambda: scale_by_apollo().init({"norm": jnp.zeros(4)}),
    r"rank 5 exceeds the smaller side of a matrix \(4, 6\)": lambda: scale_by_apollo(5).init(
        {"w": jnp.zeros((4, 6))}
    ),
    "keeps 0 moments called mu": lambda: run(sgg(optax.scale_by_rms()), {"w": jnp.ones((1, 4, 6))}),
    r"selects none of the leaves, such as \['head'\]": lambda: on_matrices(
        optax.identity(), optax.identity()
    ).init({"head": jnp.zeros((2, 2))}),
}


@pytest.mark.parametrize("message", BAD)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


# Controls.


def kernel(path, leaf):
    return path.endswith("kernel")


def one_update(tx, updates, state=None):
    return tx.update(updates, tx.init(updates) if state is None else state, updates)


def test_constant_times_mask():
    p, c, steps = 0.25, 0.55, 1600
    grads = {"kernel": jnp.ones((steps, 2, 2)), "head": jnp.full((steps, 2), 0.1)}
    got, _ = run(constant_times_mask(c, p, kernel, key=3), grads)
    magma, _ = run(with_magma(optax.identity(), p, where=kernel, key=3), grads)
    survives = np.asarray(magma["kernel"] != 0)
    np.testing.assert_allclose(got["kernel"], c * survives, rtol=1e-6)
    np.testing.assert_array_equal(got["head"], grads["head"])
    # five standard deviations of a mean over 1600 coins
    assert np.mean(got["kernel"]) == pytest.approx(c * p, abs=5 * c * (p * (1 - p) / steps) ** 0.5)


def test_damping_only():
    grads = gradients({"kernel": (4, 6), "head": (4,)})
    damped, state = run(damping_only(optax.identity(), where=kernel), grads)
    halved, _ = run(damping_only(optax.identity(), where=kernel, c=0.5), grads)
    magma, magma_state = run(with_magma(optax.identity(), 0.5, where=kernel), grads)
    kept = np.any(magma["kernel"], (1, 2))
    assert 0 < kept.sum() < STEPS
    np.testing.assert_array_equal(damped["kernel"][kept], magma["kernel"][kept])
    np.testing.assert_allclose(halved["kernel"], 0.5 * damped["kernel"], rtol=1e-6)
    np.testing.assert_array_equal(halved["head"], grads["head"])
    last = summarize(state)["alignment_mean"]
    assert last == summarize(magma_state)["alignment_mean"] and 0.45 < last < 0.6
    np.testing.assert_allclose(damped["kernel"][-1], last * grads["kernel"][-1], rtol=1e-6)
