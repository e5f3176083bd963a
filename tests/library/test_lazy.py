"""lazy=True: the same updates and states, with no direction computed for a dropped block."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from costly import C, assert_same, costly, normal, products, steps, unchanged, whiten

from magma_optax import skip_update, stacked, with_magma, with_skip_update
from magma_optax._blocks.paths import NamedTree
from magma_optax._lazy.base import update_lazily
from magma_optax._step.options import Options

SEPARATE = {"layers": [{"up": (8, 6), "down": (6, 8), "scale": (8,)} for _ in range(2)]}
WEIGHT = {"w": (5, 8, 6)}
STACKED = {"layers": {"up": (5, 8, 6), "down": (5, 6, 8), "scale": (5, 8)}}


def matrices(path, leaf):
    return path.endswith(("up", "down"))


def muon(learning_rate=1e-2, **kwargs):
    """Muon on matrices and on stacks of them, AdamW on the rest."""

    def dimensions(params):
        return jax.tree.map(
            lambda p: (
                optax.contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1)
                if p.ndim >= 2 and p.shape[-1] != p.shape[-2] + 3
                else None
            ),
            params,
        )

    return optax.contrib.muon(
        learning_rate, muon_weight_dimension_numbers=dimensions, weight_decay=0.1, **kwargs
    )


def cubed(x):
    """X X^T X of matrices; of vectors themselves."""
    return x @ jnp.swapaxes(x, -1, -2) @ x if x.ndim > 1 else x


# Other ones for each iteration, as optax's "dion"; optax 0.2.6 does not know that name.
COEFFICIENTS = ((4.08, -6.89, 2.93), (3.95, -6.3, 2.64), (2.88, -3.14, 1.2))
BASES = {
    "muon": lambda: muon(optax.linear_schedule(1e-2, 1e-3, 4)),
    "muon, coefficients": lambda: muon(
        ns_coeffs=COEFFICIENTS, ns_steps=3, nesterov=False, mu_dtype=jnp.bfloat16
    ),
    "clip, product": lambda: optax.chain(optax.clip_by_global_norm(0.5), costly(cubed)),
    "shampoo-like": lambda: optax.masked(
        costly(whiten), lambda params: jax.tree.map(lambda p: p.shape[-1:] != (8,), params)
    ),
}
LAYOUTS = {"separate": (SEPARATE, "leaf"), "stacked": (STACKED, stacked(0))}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in ("muon", "shampoo-like") for layout in LAYOUTS),
        *(("muon, coefficients", "separate"), ("clip, product", "stacked")),
    ],
)
def test_the_run_is_that_without_lazy(name, layout):
    shapes, blocks = LAYOUTS[layout]
    params, grads = normal(shapes, 0), [normal(shapes, n) for n in range(1, 4)]
    options = {"where": matrices, "blocks": blocks, "key": 3}
    lazy = steps(with_magma(BASES[name](), lazy=True, **options), params, grads, donate=True)
    assert_same(lazy, steps(with_magma(BASES[name](), **options), params, grads))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_wrapper_of_skip_update_is_the_chain(layout):
    shapes, blocks = LAYOUTS[layout]
    params, grads = normal(shapes, 0), [normal(shapes, n) for n in range(1, 4)]
    options = {"where": matrices, "blocks": blocks, "key": 3}
    skipped = steps(with_skip_update(costly(cubed), **options), params, grads)
    chain = steps(optax.chain(costly(cubed), skip_update(**options)), params, grads)
    for (updates, state), (expected, (base, masks)) in zip(skipped, chain, strict=True):
        assert_same(updates, expected)
        assert_same((state.inner_state, state.magma), (base, masks))


def traced_products(tx, params):
    return products(jax.jit(tx.update), params, tx.init(params), params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_computed_as_the_coins_say(layout):
    shapes, blocks = LAYOUTS[layout]
    params = normal(shapes, 0)
    dense = traced_products(with_magma(muon(), where=matrices, blocks=blocks), params)
    lazy = traced_products(with_magma(muon(), where=matrices, blocks=blocks, lazy=True), params)
    assert dense["always"] > 0
    assert lazy == {"by the coins": dense["always"], "always": 0}  # One body for all batches.


@pytest.mark.parametrize("kept", range(8))
def test_of_any_number_of_survivors_all_are_computed_in_batches_of_four(kept):
    """The last batch is filled up with dropped blocks; what is not computed stays zero."""
    params, base = normal({"w": (7, 8, 6)}, 0), optax.with_extra_args_support(costly(cubed))
    coins = jnp.asarray(np.random.default_rng(kept).permutation(7) < kept)
    cuts = Options(blocks=stacked(0)).find_cuts(NamedTree(params))

    @jax.jit
    def computed(params):
        directions, _ = update_lazily(base, cuts, (params, base.init(params), params), {})
        return directions({"w": coins}).leaves["w"]

    dense, _ = base.update(params, base.init(params), params)
    order = np.argsort(~coins, stable=True)
    filled = np.isin(np.arange(7), order[: -(-kept // 4) * 4])
    expected = jnp.where(filled[:, None, None], dense["w"], 0)
    np.testing.assert_allclose(computed(params), expected, rtol=1e-5, atol=1e-6)


def test_large_blocks_are_computed_one_by_one():
    def direction(x):
        return x @ C

    params, grads = ({"w": jnp.full((3, 2**18, 8), value)} for value in (1.0, 2.0))
    lazy = with_skip_update(costly(direction), blocks=stacked(0))
    assert traced_products(lazy, params) == {"by the coins": 1, "always": 0}
    dense = with_skip_update(costly(direction), blocks=stacked(0), lazy=False)
    for updates, expected in zip(
        *(steps(tx, params, [grads]) for tx in (lazy, dense)), strict=True
    ):
        assert_same(updates, expected)


def test_reverse_mode_needs_separate_layers_or_lazy_false():
    def gradient(layout, lazy):
        shapes, blocks = LAYOUTS[layout]
        params = normal(shapes, 0)
        tx = with_magma(costly(cubed), where=matrices, blocks=blocks, lazy=lazy)
        state = tx.init(params)

        @jax.jit
        @jax.grad
        def of(scale):
            updates, _ = tx.update(jax.tree.map(lambda p: scale * p, params), state, params)
            return sum(jnp.sum(u**2) for u in jax.tree.leaves(updates))

        return of(1.0)

    assert gradient("stacked", lazy=False) > 0
    np.testing.assert_allclose(gradient("separate", True), gradient("separate", False), 1e-5)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        gradient("stacked", lazy=True)


def test_derivatives_of_a_direction_s_own_stay():
    params = normal({"w": (6, 8)}, 0)

    def gradient(lazy, blocks="leaf", derivative=jax.grad, direction=unchanged):
        tx = with_magma(costly(direction), survival_prob=1.0, blocks=blocks, lazy=lazy)
        shape = (5, 6, 8) if blocks != "leaf" else (6, 8)
        grads = {"w": jnp.broadcast_to(params["w"], shape)}
        state = tx.init(grads)

        @jax.jit
        @derivative
        def of(scale):
            updates, _ = tx.update({"w": scale * grads["w"]}, state, grads)
            return jnp.sum(updates["w"])

        return of(1.5)

    np.testing.assert_allclose(gradient(True), gradient(False), rtol=1e-5)
    assert abs(gradient(True) - gradient(True, direction=lambda x: x @ C)) > 0.1
    for derivative in (jax.grad, jax.jacfwd):
        with pytest.raises(
            ValueError, match=r"derivative of its own \(custom_vjp_call\): diff.*lazy=False"
        ):
            gradient(True, stacked(0), derivative)


def test_leaves_of_one_path_that_are_not_masked_are_told_apart():
    square = jnp.eye(3)
    for params in (
        {"w": jnp.eye(3, 2), "z": {"b": square}, "z/b": 2 * square},
        {"a/b": square, "a": {"b": 2 * square}, "w": jnp.eye(3, 2)},
    ):
        found = [
            steps(
                with_magma(muon(), where=lambda path, leaf: path == "w", lazy=lazy),
                params,
                [params],
            )
            for lazy in (True, False)
        ]
        assert_same(*found)


def test_what_is_not_masked_is_always_computed():
    params = normal(SEPARATE, 0)

    def ups(path, leaf):
        return path.endswith("up")

    dense = traced_products(with_magma(muon(), where=ups), params)
    lazy = traced_products(with_magma(muon(), where=ups, lazy=True), params)
    assert lazy == {"by the coins": dense["always"] // 2, "always": dense["always"] // 2}


def test_on_adam_it_changes_no_operation():
    """An elementwise direction costs less than a branch."""
    params = normal(SEPARATE, 0)
    texts = []
    for lazy in (False, True):
        tx = with_skip_update(optax.adam(1e-2), lazy=lazy)
        texts.append(jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text())
    assert texts[0].count(" fusion(") == texts[1].count(" fusion(")
    assert " conditional(" not in texts[1]


def test_outside_jit_all_is_computed_at_once():
    params = normal(SEPARATE, 0)
    dense, lazy = (with_magma(costly(cubed), lazy=lazy) for lazy in (False, True))
    state = dense.init(params)
    chex.assert_trees_all_equal(
        lazy.update(params, state, params), dense.update(params, state, params)
    )


def test_survival_by_alignment_and_schedules():
    params, grads = normal(WEIGHT, 0), [normal(WEIGHT, n) for n in range(1, 4)]
    for p in ("alignment", lambda step: 1.0 - 0.3 * (step > 0)):
        options = {"blocks": stacked(0), "survival_prob": p}
        assert_same(
            steps(with_magma(costly(cubed), lazy=True, **options), params, grads),
            steps(with_magma(costly(cubed), **options), params, grads),
        )


def test_in_scan_under_vmap_and_inside_multi_steps():
    params, grads = normal(WEIGHT, 0), [normal(WEIGHT, n) for n in range(1, 5)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    options = {"blocks": stacked(0)}
    lazy, dense = (with_magma(costly(cubed), lazy=lazy, **options) for lazy in (True, False))

    def scanned(tx):
        def body(state, g):
            updates, state = tx.update(g, state, params)
            return state, updates

        return jax.jit(lambda: jax.lax.scan(body, tx.init(params), together))()

    assert_same(scanned(lazy), scanned(dense))

    def many(tx):
        states = jax.vmap(lambda _: tx.init(params))(jnp.arange(4))
        return jax.jit(jax.vmap(tx.update, (0, 0, None)))(together, states, params)

    assert_same(many(lazy), many(dense))
    assert_same(
        steps(optax.MultiSteps(lazy, 2), params, grads),
        steps(optax.MultiSteps(dense, 2), params, grads),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_x64_and_strict_promotion(layout):
    shapes, blocks = LAYOUTS[layout]
    params = normal(shapes, 0)
    lazy, dense = (
        with_magma(costly(whiten_matrices), where=matrices, blocks=blocks, lazy=lazy)
        for lazy in (True, False)
    )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert_same(steps(lazy, params, [params]), steps(dense, params, [params]))


def whiten_matrices(x):
    return whiten(x) if x.shape[-1] != 8 or x.ndim > 2 else x


def test_what_is_read_must_not_hold_two_axes_of_blocks_in_one():
    def update(updates, state, params=None):
        flat = jax.tree.map(lambda g: jnp.sort(g.reshape(-1, 4, 4), -1), updates)  # Always.
        made = jax.tree.map(lambda f, g: (f @ f).reshape(g.shape), flat, updates)
        return made, jax.tree.map(lambda f: jnp.sum(f), flat)

    base = optax.GradientTransformation(lambda params: {"w": jnp.zeros(())}, update)
    params = normal({"w": (2, 3, 4, 4)}, 0)
    with pytest.raises(ValueError, match="'w' mixes the blocks"):
        with_magma(base, lazy=True, blocks=stacked((0, 1))).init(params)


def test_a_run_goes_on_with_and_without():
    """The states are the same trees, so a checkpoint of one is one of the other."""
    params, grads = normal(STACKED, 0), [normal(STACKED, n) for n in range(1, 3)]
    options = {"where": matrices, "blocks": stacked(0)}
    lazy, dense = (with_magma(costly(cubed), lazy=lazy, **options) for lazy in (True, False))
    _, state = jax.jit(dense.update)(grads[0], dense.init(params), params)
    chex.assert_trees_all_equal_structs(state, lazy.init(params))
    assert_same(
        jax.jit(lazy.update)(grads[1], state, params),
        jax.jit(dense.update)(grads[1], state, params),
    )


def test_extra_arguments_reach_the_base():
    def update(updates, state, params=None, *, scale, **extra):
        return jax.tree.map(lambda g: scale * (g @ g.T @ g), updates), state

    base = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params = {"w": jnp.ones((3, 2)) + jnp.arange(2.0)[None]}
    tx = with_magma(base, lazy=True, survival_prob=1.0, damping=False)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params, scale=jnp.float32(3))
    expected = 3 * params["w"] @ params["w"].T @ params["w"]
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)


# -------------------------------------------------------------------------------------------
# Bases that are not separable.


def test_blocks_within_a_matrix_are_refused():
    params = normal(SEPARATE, 0)
    for blocks in ("row", "column", "element"):
        with pytest.raises(ValueError, match="'layers/0/"):
            with_magma(muon(), where=matrices, blocks=blocks, lazy=True).init(params)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: optax.chain(muon(), optax.clip_by_global_norm(1.0)), "'layers/.*together"),
        (lambda: optax.chain(muon(), optax.trace(0.9)), "'layers/0/.*nothing to leave out"),
        (lambda: optax.sgd(1e-2, momentum=0.9), "'layers/0/.*nothing to leave out"),
        (lambda: optax.apply_if_finite(muon(), 3), "'layers/0/.*nothing to leave out"),
    ],
)
@pytest.mark.parametrize("wrapper", [functools.partial(with_magma, lazy=True), with_skip_update])
def test_bases_that_are_not_separable_are_refused_by_leaf(wrapper, base, message):
    with pytest.raises(ValueError, match=message):
        wrapper(base(), where=matrices).init(normal(SEPARATE, 0))


def test_a_quotient_of_arrays_is_a_direction():
    """AdaMax divides: its direction is not its state times a number, though it costs nothing."""
    tx = with_skip_update(optax.adamax(1e-2), where=matrices)
    tx.init(normal(SEPARATE, 0))


def test_a_sum_over_all_blocks_of_a_leaf_is_refused():
    """Muon's `adaptive` multiplies by a sum over the whole leaf."""
    tx = with_magma(muon(adaptive=True), where=matrices, blocks=stacked(0), lazy=True)
    with pytest.raises(ValueError, match=r"'layers/down' mixes the blocks.*\(in reduce_sum\)"):
        tx.init(normal(STACKED, 0))
    with_magma(muon(adaptive=True), where=matrices, lazy=True).init(normal(SEPARATE, 0))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="lazy must be True or False, got 'yes'"):
        with_magma(muon(), lazy="yes")
    with pytest.raises(TypeError, match="lazy must be True or False, got 1"):
        with_skip_update(muon(), lazy=1)
    with pytest.raises(ValueError, match="sparse_state"):
        with_magma(muon(), lazy=True, sparse_state=True)
    with pytest.raises(ValueError, match="with_skip_update around"):
        with_skip_update(optax.MultiSteps(muon(), 2))
    with pytest.raises(TypeError, match="call it, as in with_skip_update"):
        with_skip_update(optax.adam)
    with pytest.raises(TypeError, match="survival_prob must be a number or a schedule"):
        with_skip_update(muon(), "alignment")
