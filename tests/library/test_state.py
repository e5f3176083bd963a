"""The state: what it holds, its dtypes, its buffers, and how optax's tools see it."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from magma_optax import MagmaState, attention_and_mlp, magma, skip_update, summarize, with_magma

PARAMS = {
    "layers": [{"mlp": {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}} for _ in range(2)],
    "scale": jnp.ones(()),
}
GRADS = jax.tree.map(lambda x: 0.1 * x, PARAMS)
TRANSFORMATIONS = {
    "magma": magma(),
    "chain": optax.chain(optax.adam(1e-2), magma(where=attention_and_mlp)),
    "with_magma(adam)": with_magma(optax.adam(1e-2)),
    "with_magma(rmsprop)": with_magma(optax.rmsprop(1e-2), where=attention_and_mlp),
    "with_magma(muon)": with_magma(optax.contrib.muon(1e-2), blocks="row"),
    "skip_update": optax.chain(optax.sgd(1e-2), skip_update()),
}


@pytest.fixture(params=TRANSFORMATIONS)
def tx(request):
    return TRANSFORMATIONS[request.param]


def magma_state(state):
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MagmaState))
    (state,) = [x for x in found if isinstance(x, MagmaState)]
    return state


def test_fields():
    state = magma(where=attention_and_mlp, blocks="row", key=7).init(PARAMS)
    assert state._fields == ("step", "key", "alignment", "momentum")
    chex.assert_trees_all_equal(state.step, jnp.int32(0))
    chex.assert_trees_all_equal(state.key, jnp.array([0, 7], jnp.uint32))
    up = {str(n): {"mlp": {"up": jnp.full(4, 0.5)}} for n in range(2)}
    chex.assert_trees_all_equal(state.alignment, {"layers": up})
    momentum = jax.tree.map(jnp.zeros_like, PARAMS)
    for layer in momentum["layers"]:
        layer["mlp"]["bias"] = optax.MaskedNode()
    momentum["scale"] = optax.MaskedNode()
    chex.assert_trees_all_equal(state.momentum, momentum)


def test_skip_update_keeps_a_step_and_a_key_alone():
    state = skip_update(key=3).init(PARAMS)
    assert state.alignment == {} and state.momentum is None
    assert [x.shape for x in jax.tree.leaves(state)] == [(), (2,)]


@pytest.mark.parametrize("x64", [False, True])
def test_structure_dtypes_and_weak_types_never_change(tx, x64):
    with jax.enable_x64(x64):
        state = tx.init(PARAMS)
        update = lambda g, s, p: tx.update(g, s, p, grad=g)[1]  # noqa: E731
        after = jax.eval_shape(update, GRADS, state, PARAMS)
        assert jax.tree.structure(state) == jax.tree.structure(after)
        avals = [jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), s) for s in (state, after)]
        assert avals[0] == avals[1]
        ours = magma_state(after)
        assert not any(x.weak_type for x in jax.tree.leaves(ours))
        assert {x.dtype for x in jax.tree.leaves(ours.alignment)} <= {jnp.dtype("float32")}
        assert (ours.step.dtype, ours.key.dtype) == (jnp.int32, jnp.uint32)


def test_momentum_of_a_weakly_typed_leaf_is_strong():
    state = magma().init({"s": jnp.asarray(1.0)})
    assert not state.momentum["s"].weak_type


def test_scan_over_steps_and_no_retrace(tx):
    traces = []

    @jax.jit
    def run(params, state):
        traces.append(1)

        def step(carry, _):
            params, state = carry
            updates, state = tx.update(GRADS, state, params, grad=GRADS)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), None, length=3)[0]

    params, state = run(PARAMS, tx.init(PARAMS))
    params, state = run(params, state)
    assert len(traces) == 1
    assert magma_state(state).step == 6


def test_buffers_may_be_donated_again_and_again(tx):
    step = jax.jit(
        lambda params, state: tx.update(GRADS, state, params, grad=GRADS), donate_argnums=1
    )
    for _ in range(2):  # From one factory: no init may hand out a buffer of the first.
        state = tx.init(PARAMS)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
        assert len(set(pointers)) == len(pointers), "no buffer twice"
        for _ in range(2):
            _, state = step(PARAMS, state)
    assert magma_state(state).step == 2


def test_a_key_given_as_an_array_is_not_donated_with_the_state():
    key = jax.random.PRNGKey(5)
    tx = skip_update(key=key)
    state = tx.init(PARAMS)
    jax.jit(tx.update, donate_argnums=1)(GRADS, state)
    assert state.key.is_deleted() and not key.is_deleted()
    chex.assert_trees_all_equal(tx.init(PARAMS).key, key)


def test_map_params_sees_momentum_as_parameters_and_scores_as_none(tx):
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(
        tx,
        lambda leaf, param: (
            leaf if isinstance(leaf, optax.MaskedNode) else leaf.shape == param.shape
        ),
        state,
        PARAMS,
        transform_non_params=lambda _: "other",
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    ours = magma_state(mapped)
    assert (ours.step, ours.key) == ("other", "other")
    assert ours.alignment in ("other", {})
    assert all(leaf is True for leaf in jax.tree.leaves(ours.momentum))
    assert jax.tree.structure(ours.momentum) == jax.tree.structure(magma_state(state).momentum)


@pytest.mark.parametrize("base", [optax.adam(1e-2), optax.rmsprop(1e-2)], ids=["adam", "rmsprop"])
@pytest.mark.parametrize("how", ["magma", "with_magma"])
def test_init_with_out_shardings_as_in_the_optax_docs(base, how):
    tx = with_magma(base) if how == "with_magma" else optax.chain(base, magma())
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": jnp.ones((16, 4)), "b": jnp.ones(8)}
    specs = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("x")), params)
    shardings = optax.tree.map_params(
        tx,
        lambda _, spec: spec,
        jax.eval_shape(tx.init, params),
        specs,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )
    state = jax.jit(tx.init, out_shardings=shardings)(jax.device_put(params, specs))
    ours = magma_state(state)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(ours.alignment))
    chex.assert_tree_all_finite(state)
    for leaf in jax.tree.leaves(ours.momentum):
        assert leaf.sharding.spec == PartitionSpec("x")
    kept = [x for x in jax.tree.leaves(state) if x.shape in [(16, 4), (8,)]]
    assert len(kept) in (4, 6)
    assert all(x.sharding.spec == PartitionSpec("x") for x in kept)


def test_names_leave_mu_and_count_of_the_base_unambiguous():
    for tx in (optax.chain(optax.adam(1e-2), magma()), with_magma(optax.adam(1e-2))):
        state = tx.init(PARAMS)
        chex.assert_trees_all_equal_shapes(optax.tree.get(state, "mu"), PARAMS)
        assert optax.tree.get(state, "count") == 0
        assert optax.tree.get(state, "step") == 0


def test_copies_through_pickle_and_numpy_continue_bit_for_bit(tx):
    state = tx.init(PARAMS)
    _, state = tx.update(GRADS, state, PARAMS, grad=GRADS)
    expected = tx.update(GRADS, state, PARAMS, grad=GRADS)
    for copy in (pickle.loads(pickle.dumps(state)), jax.tree.map(np.asarray, state)):
        chex.assert_trees_all_equal(tx.update(GRADS, copy, PARAMS, grad=GRADS), expected)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_after_the_largest_step_coins_go_on_and_schedules_stay(wrap):
    """Not one pattern of coins for ever; and no schedule meets a negative step."""
    largest, rows = np.iinfo(np.int32).max, {"w": jnp.ones((200, 2))}
    seen = []

    def schedule(step):
        seen.append(step)
        return jnp.where(step < 0, 1.0, 0.5)

    tx = skip_update(schedule, blocks="row")
    update = wrap(tx.update)
    for step in (largest - 1, np.int32(largest - 1)):  # A restored state may hold NumPy's.
        state = tx.init(rows)._replace(step=jnp.int32(step))
        coins = []
        for _ in range(4):
            updates, state = update(rows, state)
            coins.append(np.asarray(updates["w"][:, 0] > 0))
        assert state.step.dtype == jnp.int32 and state.step == -(2**31) + 2
        assert len(np.unique(coins, axis=0)) == 4
        assert all(60 < coin.sum() < 140 for coin in coins)


class TestSummarize:
    def test_over_all_blocks_of_all_states(self):
        tx = optax.partition(
            {"a": with_magma(optax.adam(1e-2), blocks="row"), "b": magma(initial_score=0.25)},
            {"layers": "a", "scale": "b"},
        )
        summary = jax.jit(summarize)(tx.init(PARAMS))
        # 2 x 4 rows and 2 vectors at 0.5, one scalar at 0.25
        chex.assert_trees_all_close(
            summary,
            {
                "alignment_mean": jnp.float32((10 * 0.5 + 0.25) / 11),
                "alignment_min": jnp.float32(0.25),
                "alignment_max": jnp.float32(0.5),
                "num_blocks": jnp.int32(11),
            },
            rtol=1e-6,
        )

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda tx: optax.chain(optax.sgd(0.1), tx),
            lambda tx: optax.masked(tx, {"layers": True, "scale": False}),
            lambda tx: optax.MultiSteps(tx, 2),
            lambda tx: optax.inject_hyperparams(lambda lr: optax.chain(optax.sgd(lr), tx))(lr=0.1),
            lambda tx: optax.apply_if_finite(tx, 2),
        ],
        ids=["chain", "masked", "MultiSteps", "inject_hyperparams", "apply_if_finite"],
    )
    def test_finds_the_state_anywhere(self, wrap):
        state = wrap(magma(where=lambda path, _: path.startswith("layers"))).init(PARAMS)
        assert summarize(state)["num_blocks"] == 4

    def test_counts_more_blocks_than_an_int32(self):
        params = {"w": jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)}
        state = jax.eval_shape(magma(blocks="element").init, params)
        assert jax.eval_shape(summarize, state)["num_blocks"].dtype == jnp.int32

    @pytest.mark.filterwarnings("ignore:summarize found no scores")
    def test_is_empty_without_scores(self):
        assert summarize(skip_update().init(PARAMS)) == {}
        assert summarize(optax.adam(1e-2).init(PARAMS)) == {}
        assert "skip_update" in summarize.__doc__


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_jitted_steps_transfer_nothing_implicitly(name):
    """As with JAX_TRANSFER_GUARD=disallow; outside jit Optax's own Adam transfers numbers."""
    tx = optax.with_extra_args_support(TRANSFORMATIONS[name])
    params, grads = jax.device_put((PARAMS, GRADS))
    with jax.transfer_guard("disallow"):
        state = jax.jit(tx.init)(params)
        jax.jit(lambda g, s, p: tx.update(g, s, p, grad=g))(grads, state, params)
        jax.jit(tx.init)(params)
