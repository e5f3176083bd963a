"""Optax's wrappers around Magma, and Magma around them: what each combination must give."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_bases import FORMS, PARAMS, grads_at, loss, run_step

from magma_optax import MagmaState, magma, skip_update, summarize, with_magma


def adam(rate=1e-2):
    return optax.adam(rate)


def run(tx, steps=3, **extra):
    """(updates of the last step, state), jitted, with gradients at constant parameters."""

    @jax.jit
    def one(state, grads):
        return run_step(tx, grads, state, **extra)

    state = tx.init(PARAMS)
    for seed in range(steps):
        updates, state = one(state, grads_at(seed))
    return updates, state


@functools.cache
def run_alone(form):
    """The run of a form on Adam, without a wrapper."""
    return run(FORMS[form].wrap(adam(), key=4))


def magma_states(state):
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MagmaState))
    return [node for node in found if isinstance(node, MagmaState)]


def assert_same(actual, expected):
    """Updates equal, and so scores; fused differently, the last bits may differ."""
    chex.assert_trees_all_close(actual[0], expected[0], rtol=2e-5, atol=1e-9)
    for ours, theirs in zip(magma_states(actual[1]), magma_states(expected[1]), strict=True):
        chex.assert_trees_all_close(ours.alignment, theirs.alignment, rtol=1e-6)
        chex.assert_trees_all_equal(ours.step, theirs.step)


def monitor(tx):
    if not hasattr(optax, "monitor"):
        pytest.skip("optax 0.2.6 has no monitor")
    return optax.chain(tx, optax.monitor({"norm": optax.tree.norm}))


WRAPPERS = {
    "named_chain": lambda tx: optax.named_chain(("clip", optax.identity()), ("all", tx)),
    "chain": lambda tx: optax.chain(optax.identity(), tx, optax.identity()),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "masked, all true": lambda tx: optax.masked(tx, jax.tree.map(lambda _: True, PARAMS)),
    "masked, callable": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda _: True, p)),
    "masked, prefix": lambda tx: optax.masked(tx, {"attn": True, "mlp": True, "scale": True}),
    "masked, compatible": lambda tx: optax.masked(
        tx, jax.tree.map(lambda _: True, PARAMS), mask_compatible_extra_args=True
    ),
    "partition": lambda tx: optax.partition({"all": tx}, jax.tree.map(lambda _: "all", PARAMS)),
    "MultiSteps of one": lambda tx: optax.MultiSteps(tx, 1),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda scale: optax.chain(optax.scale(scale), tx)
    )(scale=1.0),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step < 9),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step < 9),
    "reduce_on_plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau()),
    "monitor": monitor,
    "snapshot": lambda tx: optax.chain(tx, optax.snapshot("norm", optax.tree.norm)),
}


# SkipUpdate sees no gradient and no extra argument: those wrappers that touch neither, once each.
FOR_SKIP_UPDATE = {"chain", "apply_if_finite", "masked, all true", "MultiSteps of one", "partition"}


@pytest.mark.parametrize(
    ("form", "wrapper"),
    [
        (form, wrapper)
        for form in FORMS
        for wrapper in WRAPPERS
        if form != "skip_update" or wrapper in FOR_SKIP_UPDATE
    ],
)
def test_transparent_wrappers_change_nothing(form, wrapper):
    form = FORMS[form]
    tx = form.wrap(adam(), key=4)
    assert_same(run(WRAPPERS[wrapper](tx), value=jnp.float32(1.0)), run_alone(form.name))


MASK = {"attn": {"kernel": True}, "mlp": [{"kernel": False}, {"bias": True}], "scale": False}
INSIDE = ("attn/kernel", "mlp/1/bias")
LABELS = {"attn": {"kernel": "a"}, "mlp": [{"kernel": "b"}, {"bias": "a"}], "scale": "b"}


class TestMasked:
    @pytest.mark.parametrize("compatible", [False, True])
    def test_is_the_same_as_where(self, form, compatible):
        """Default and mask-compatible `grad=`: full or masked, it is aligned by path."""
        link = optax.masked(form.link(key=4), MASK, mask_compatible_extra_args=compatible)
        expected = optax.chain(adam(), form.link(key=4, where=lambda path, _: path in INSIDE))
        assert_same(run(optax.chain(adam(), link)), run(expected))

    def test_around_the_whole_optimizer(self, form):
        updates, state = run(optax.masked(form.wrap(adam(), key=4), MASK))
        grads = grads_at(2)
        chex.assert_trees_all_close(updates["scale"], grads["scale"], rtol=2e-5)
        chex.assert_trees_all_close(updates["mlp"][0], grads["mlp"][0], rtol=2e-5)
        whole, _ = run_alone(form.name)
        chex.assert_trees_all_close(updates["attn"], whole["attn"], rtol=1e-5)
        if form.name != "skip_update":
            assert jax.tree.map(jnp.shape, magma_states(state)[0].alignment) == {
                "attn": {"kernel": ()},
                "mlp": {"1": {"bias": ()}},
            }

    def test_masks_within(self):
        tx = with_magma(optax.masked(adam(), MASK), key=4)
        _, state = run(tx)
        momentum = magma_states(state)[0].momentum
        assert isinstance(momentum["attn"]["kernel"], optax.MaskedNode), "Adam has it"
        assert momentum["scale"].shape == (), "Adam does not"


class TestPartition:
    def test_groups_toss_and_score_on_their_own(self, form):
        groups = {"a": form.wrap(adam(), key=4), "b": form.wrap(optax.rmsprop(1e-2), key=4)}
        updates, state = run(optax.partition(groups, LABELS), steps=5)
        # As if each group were alone: names decide, not neighbours.
        for label, group in groups.items():
            alone, _ = run(group, steps=5)
            for path, update in jax.tree_util.tree_leaves_with_path(updates):
                if self.label(path) == label:
                    chex.assert_trees_all_close(update, self.leaf(alone, path), rtol=2e-5)
        buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
        assert len(set(buffers)) == len(buffers)
        if form.name != "skip_update":
            assert summarize(state)["num_blocks"] == 4

    def label(self, path):
        return self.leaf(LABELS, path)

    def leaf(self, tree, path):
        for key in path:
            tree = tree[getattr(key, "key", getattr(key, "idx", None))]
        return tree

    def test_within_the_wrapper(self):
        groups = {"a": adam(), "b": optax.rmsprop(1e-2)}
        actual = run(with_magma(optax.partition(groups, LABELS), key=4))
        own = run(with_magma(optax.partition(groups, LABELS), key=4, first_moment="own"))
        assert_same(actual, own)


class TestMultiSteps:
    """Magma inside MultiSteps sees whole batches."""

    def accumulate(self, tx, transformation=False, **extra):
        multi = optax.MultiSteps(tx, 4)
        multi = multi.gradient_transformation() if transformation else multi
        state = multi.init(PARAMS)
        update = jax.jit(multi.update)
        for seed in range(8):
            grads = grads_at(seed)
            kwargs = {"grad": grads} if extra.get("grad") else {}
            updates, state = update(grads, state, PARAMS, **kwargs)
        return updates, state

    def whole_batches(self, tx):
        state, update = tx.init(PARAMS), jax.jit(tx.update)
        for half in (range(4), range(4, 8)):
            grads = [grads_at(seed) for seed in half]
            mean = jax.tree.map(lambda *g: sum(g) / 4, *grads)
            updates, state = update(mean, state, PARAMS, grad=mean)
        return updates, state

    @pytest.mark.parametrize("transformation", [False, True])
    @pytest.mark.parametrize("name", ["with_magma", "skip_update"])
    def test_exact_forms(self, name, transformation):
        tx = FORMS[name].wrap(adam(), key=4)
        assert_same(self.accumulate(tx, transformation), self.whole_batches(tx))

    def test_link_gets_the_last_micro_gradient_as_documented(self):
        tx = optax.chain(adam(), magma(key=4))
        _, state = self.accumulate(tx, grad=True)
        _, exact = self.whole_batches(tx)
        ours, theirs = (magma_states(s)[0].alignment["attn"]["kernel"] for s in (state, exact))
        assert ours != theirs
        assert magma_states(state)[0].step == 2, "one coin a whole batch all the same"

    def test_link_in_the_transformation_says_that_its_gradient_is_gone(self):
        multi = optax.MultiSteps(optax.chain(adam(), magma()), 4).gradient_transformation()
        with pytest.warns(UserWarning, match=r"no `grad` was passed .* with_magma\(base\)"):
            multi.update(grads_at(0), multi.init(PARAMS), PARAMS)

    def test_masks_whole_accumulated_steps_only(self):
        _, state = self.accumulate(with_magma(adam(), key=4))
        assert magma_states(state)[0].step == 2


class TestInjectHyperparams:
    def test_numbers_arrive_traced_and_change_mid_run(self):
        tx = optax.inject_hyperparams(magma)(0.9, temperature=0.7, b1=0.8, score_decay=0.6, key=5)
        plain = magma(0.9, 0.7, b1=0.8, score_decay=0.6, key=5)
        assert_same(run(tx), run(plain))
        state, other = tx.init(PARAMS), magma(1.0, 0.3, b1=0.8, score_decay=0.1, key=5)
        update = jax.jit(tx.update)
        _, state = update(PARAMS, state, PARAMS, grad=PARAMS)
        state.hyperparams["survival_prob"] = jnp.float32(1.0)
        state.hyperparams["temperature"] = jnp.float32(0.3)
        state.hyperparams["score_decay"] = jnp.float32(0.1)
        actual = update(grads_at(0), state, PARAMS, grad=grads_at(0))
        expected = other.update(grads_at(0), state.inner_state, PARAMS, grad=grads_at(0))
        assert_same(actual, expected)

    def test_schedules(self):
        def p(step):
            return jnp.where(step < 2, 1.0, 0.5)

        def tau(step):
            return 1.0 + step

        def decay(step):
            return 0.1 * step

        kwargs = {"survival_prob": p, "temperature": tau, "score_decay": decay}
        injected = optax.inject_hyperparams(magma)(**kwargs, key=5)
        assert_same(run(injected), run(magma(**kwargs, key=5)))

    def test_callables_need_static_args_as_everywhere(self):
        def where(path, leaf):
            return path == "scale"

        tx = optax.inject_hyperparams(with_magma, static_args=("where", "momentum_dtype"))(
            adam(), 0.5, where=where, momentum_dtype=jnp.bfloat16, key=5
        )
        assert_same(run(tx), run(with_magma(adam(), where=where, key=5)))

    def test_wrapper_with_an_injected_base(self):
        base = optax.inject_hyperparams(optax.adam)(1e-2, b1=0.8)
        tx = with_magma(base, key=5)
        updates, state = run(tx)
        assert_same((updates, state), run(with_magma(optax.adam(1e-2, b1=0.8), key=5)))
        assert magma_states(state)[0].momentum is None
        assert optax.tree.get(state, "learning_rate") == jnp.float32(1e-2)

    def test_skip_update(self):
        tx = optax.inject_hyperparams(skip_update)(0.3, key=5)
        assert_same(run(tx), run(skip_update(0.3, key=5)))

    def test_bfloat16_parameters_want_float32_hyperparameters(self):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
        narrow = optax.inject_hyperparams(skip_update)(0.3)
        wide = optax.inject_hyperparams(skip_update, hyperparam_dtype=jnp.float32)(0.3)
        assert narrow.init(params).hyperparams["survival_prob"] == jnp.bfloat16(0.3)
        assert wide.init(params).hyperparams["survival_prob"] == jnp.float32(0.3)


class TestApplyIfFinite:
    def test_a_bad_gradient_is_skipped_whole(self, form):
        tx = optax.apply_if_finite(form.wrap(adam(), key=4), 5)
        state, update = tx.init(PARAMS), jax.jit(tx.update)
        for seed in range(2):
            _, state = update(grads_at(seed), state, PARAMS, grad=grads_at(seed))
        bad = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), grads_at(2))
        updates, after = update(bad, state, PARAMS, grad=bad)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
        chex.assert_trees_all_equal(after.inner_state, state.inner_state)
        assert after.notfinite_count == 1

    def test_outside_sees_the_updates_that_survive(self):
        """A link after Magma sees zeros for dropped blocks, even where the base made NaN."""
        tx = optax.chain(skip_update(key=4), optax.apply_if_finite(optax.identity(), 0))
        bad = {"bad": jnp.full(3, jnp.nan), "good": jnp.ones(3)}
        state, update, seen = tx.init(bad), jax.jit(tx.update), set()
        for _ in range(12):
            updates, state = update(bad, state)
            dropped = not np.any(updates["bad"])
            seen.add(dropped)
            assert dropped == bool(state[1].last_finite)
        assert seen == {True, False}


def expect_estimate(form):
    """These wrappers pass no extra arguments on, and the link says so."""
    if form.name == "magma":
        return pytest.warns(UserWarning, match=r"no `grad` was passed .* with_magma\(base\)")
    return contextlib.nullcontext()


def test_lookahead(form):
    tx = optax.lookahead(form.wrap(adam(), key=4), sync_period=3, slow_step_size=0.5)
    both = optax.LookaheadParams.init_synced(PARAMS)
    plain = form.wrap(adam(), key=4)
    expected, _ = plain.update(grads_at(0), plain.init(PARAMS), PARAMS, grad=grads_at(0))
    with expect_estimate(form):
        updates, _ = tx.update(grads_at(0), tx.init(both), both)
    # At the first step estimate and truth agree: the cosine is 1.
    chex.assert_trees_all_close(updates.fast, expected, rtol=1e-6)


def test_sam(form):
    """The outer optimizer is Magma: its coins are tossed once a sync, not on adversarial steps."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.01))
    tx = optax.contrib.sam(form.wrap(adam(), key=4), adversary, sync_period=2)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    with expect_estimate(form):
        for seed in range(4):
            updates, state = update(grads_at(seed), state, PARAMS)
    chex.assert_tree_all_finite((updates, state))
    assert magma_states(state)[0].step == 2


@pytest.mark.parametrize("outer", ["schedule_free", "mechanize"])
def test_learning_rate_free_wrappers(form, outer):
    tx = form.wrap(adam(), key=4)
    if outer == "schedule_free":
        wrapped = optax.contrib.schedule_free(tx, 1e-2)
    else:
        wrapped = optax.contrib.mechanize(tx)
    updates, state = run(wrapped)
    chex.assert_tree_all_finite((updates, state))
    assert_same((None, state), (None, run_alone(form.name)[1]))


@pytest.mark.parametrize(
    "search",
    [
        lambda: optax.scale_by_backtracking_linesearch(max_backtracking_steps=5),
        lambda: optax.scale_by_zoom_linesearch(max_linesearch_steps=3),
    ],
    ids=["backtracking", "zoom"],
)
def test_line_searches_share_the_extra_argument(form, search):
    """They call the gradient `grad` too; a dropped block is no direction, and they cope."""
    tx = optax.chain(form.wrap(optax.sgd(1.0), key=4), search())
    params, state = PARAMS, tx.init(PARAMS)
    before = loss(params)

    @jax.jit
    def one(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    for _ in range(6):
        params, state = one(params, state)
    assert loss(params) < before


class TestRearrangedUpdates:
    """Inside wrappers that rearrange the updates, the wrapper is exact and the link says so."""

    def test_real_and_imaginary_parts_score_apart(self):
        params = {"z": jnp.array([1 + 2j, 3 - 1j, -2 + 0.5j])}
        tx = optax.contrib.split_real_and_imaginary(with_magma(adam()))
        updates, state = tx.update(params, tx.init(params), params)
        assert updates["z"].dtype == jnp.complex64
        assert sorted(magma_states(state)[0].alignment["z"]) == ["imaginary", "real"]
        link = optax.contrib.split_real_and_imaginary(optax.chain(adam(), magma()))
        with pytest.warns(UserWarning, match=r"with_magma\(base\)"):
            link.update(params, link.init(params), params)

    def test_flattened_parameters_are_one_block(self):
        tx = optax.flatten(with_magma(adam(), key=4))
        _, state = run(tx)
        assert summarize(state)["num_blocks"] == 1
        link = optax.flatten(optax.chain(adam(), magma()))
        with pytest.raises(ValueError, match=r"`grad` differs .*optax.flatten.* use with_magma"):
            link.update(PARAMS, link.init(PARAMS), PARAMS, grad=PARAMS)

    def test_skip_update_tosses_a_coin_a_part_or_one_for_all(self):
        link = optax.chain(optax.sgd(1.0), skip_update(0.5, key=4))
        z = {"z": jnp.array([1 + 2j, 3 - 1j])}
        split, flat = optax.contrib.split_real_and_imaginary(link), optax.flatten(link)
        split_state, flat_state = split.init(z), flat.init(PARAMS)
        update_split, update_flat = jax.jit(split.update), jax.jit(flat.update)
        parts, wholes = set(), set()
        for _ in range(16):
            updates, split_state = update_split(z, split_state, z)
            parts.add(tuple(updates["z"].tolist()))
            updates, flat_state = update_flat(PARAMS, flat_state, PARAMS)
            factors = {
                float(u.sum() / -p.sum())
                for u, p in zip(*map(jax.tree.leaves, (updates, PARAMS)), strict=True)
            }
            wholes.add(frozenset(np.round(sorted(factors), 5)))
        assert parts == {(a + 2j * b, 3 * a - 1j * b) for a in (0, -2) for b in (0, -2)}
        assert wholes == {frozenset({0.0}), frozenset({2.0})}

    def test_outside_keeps_the_blocks(self):
        tx = with_magma(optax.flatten(adam()), key=4)
        _, state = run(tx)
        assert summarize(state)["num_blocks"] == 4
        chex.assert_trees_all_equal_shapes(magma_states(state)[0].momentum, PARAMS)


def test_clipping_before_the_base_as_documented():
    """The wrapper scores against clipped history, the link against raw history; both are finite."""
    clipped = optax.chain(optax.clip_by_global_norm(0.5), adam())
    raw = optax.chain(clipped, magma(key=4))
    wrapped = with_magma(clipped, key=4)
    own = with_magma(clipped, key=4, first_moment="own")
    scores = [magma_states(run(tx, steps=6)[1])[0].alignment for tx in (raw, wrapped, own)]
    chex.assert_trees_all_close(scores[0], scores[2], rtol=1e-6)
    first, second = (score["attn"]["kernel"] for score in scores[:2])
    assert abs(first - second) > 1e-5


def test_two_magmas_in_one_chain_are_independent():
    tx = optax.chain(adam(), magma(key=1), magma(key=2))
    _, state = run(tx)
    assert len(magma_states(state)) == 2
    assert summarize(state)["num_blocks"] == 8
