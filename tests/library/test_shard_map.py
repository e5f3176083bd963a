"""shard_map: FSDP and expert-parallel layouts are the run of one device, sharded."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sharded import (
    GRADS,
    PARAMS,
    SPECS,
    P,
    alone,
    assert_same_run,
    make_mesh,
    run,
    shardings,
    state_specs,
    updater,
)

from magma_optax import magma, skip_update, stacked, with_magma

BOTH = ("fsdp", "tensor")
CASES = {  # axis_name -> transformation
    "with_magma": lambda axes: with_magma(optax.adam(1e-2), axis_name=axes),
    "magma(grad)": lambda axes: optax.chain(optax.adam(1e-2), magma(axis_name=axes)),
    "own momentum": lambda axes: with_magma(optax.rmsprop(1e-2), axis_name=axes),
    "skip_update": lambda axes: optax.chain(optax.adam(1e-2), skip_update()),
}


@functools.cache
def expected(case):
    return alone(CASES[case](None))


def only(tree, keys):
    """The part of ``tree`` at ``keys``, a list or a tree of the same outer shape."""
    if not isinstance(keys, dict):
        return {key: tree[key] for key in keys}
    return {
        key: only(tree[key], below) if isinstance(below, dict) else tree[key]
        for key, below in keys.items()
    }


def sharded_run(tx, mesh, specs=SPECS, scores=None, states=None, placed=None, **options):
    """The steps of `alone` with ``update`` inside shard_map.

    ``scores``: specs of the scores; ``states``: of the whole state; ``placed``: how arrays lie
    outside; ``options`` go to shard_map.
    """
    params, grads = only(PARAMS, specs), [only(g, specs) for g in GRADS]
    states = states or state_specs(tx, params, specs)
    if scores is not None:
        states = states._replace(magma=states.magma._replace(alignment=scores))
    update = jax.shard_map(
        updater(tx),
        mesh=mesh,
        in_specs=(specs, states, specs),
        out_specs=(specs, states),
        **options,
    )
    outside = shardings(mesh, placed or specs)
    state = jax.device_put(tx.init(params), shardings(mesh, states))
    params, *grads = (jax.device_put(tree, outside) for tree in (params, *grads))
    return run(jax.jit(update), state, params, grads)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("case", "kind"), [*((case, "Auto") for case in CASES), ("with_magma", "Explicit")]
)
def test_fsdp_is_the_run_of_one_device(case, kind, check_vma):
    """Leaves sharded over both axes, over one and over none."""
    run = sharded_run(CASES[case](BOTH), make_mesh(kind), check_vma=check_vma)
    assert_same_run(run, expected(case))


@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_keep_their_own_coins_and_scores(check_vma):
    """Experts sharded over "fsdp", each of them over "tensor": summed over the latter alone."""
    tx = with_magma(
        optax.adam(1e-2), axis_name="tensor", blocks=stacked(0, axis_name="fsdp")
    )  # fmt: skip
    scores = {"moe": {"experts": P("fsdp")}}
    run = sharded_run(tx, make_mesh(), only(SPECS, ["moe"]), scores, check_vma=check_vma)
    whole = with_magma(optax.adam(1e-2), blocks=stacked(0))
    assert_same_run(run, alone(whole, [only(g, ["moe"]) for g in GRADS], only(PARAMS, ["moe"])))
    coins = np.array([(u["moe"]["experts"] != 0).any((1, 2)) for u in run[0]])
    assert not (coins[:, :4] == coins[:, 4:]).all(), "both devices would toss the same coins"
    assert len(np.unique(run[1].magma.alignment["moe"]["experts"])) == 8


@pytest.mark.parametrize("check_vma", [True, False])
def test_init_beside_update_in_shard_map(check_vma):
    """Where experts are sharded their first scores, all alike, differ by type from device on."""
    tx = with_magma(optax.adam(1e-2), blocks=stacked(0, axis_name="fsdp"), axis_name="tensor")
    specs = only(SPECS, ["moe"])

    def first_step(grads):
        return tx.update(grads, tx.init(grads), grads)[0]

    mesh = make_mesh()
    sharded = jax.shard_map(
        first_step, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma
    )
    whole = with_magma(optax.adam(1e-2), blocks=stacked(0))
    grads = only(GRADS[0], ["moe"])
    expected = whole.update(grads, whole.init(grads), grads)[0]
    chex.assert_trees_all_close(jax.jit(sharded)(grads), expected, rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_beside_other_leaves_by_partition(check_vma):
    """The recipe of docs/usage.md: one Magma for experts, one for what all devices share."""

    def build(axes, names):
        kinds = {
            "experts": with_magma(
                optax.adam(1e-2), axis_name=axes[1:], blocks=stacked(0, axis_name=names)
            ),
            "rest": with_magma(optax.adam(1e-2), axis_name=axes),
        }
        labels = {key: "experts" if key == "moe" else "rest" for key in PARAMS}
        return optax.partition(kinds, labels)

    tx = build(BOTH, "fsdp")
    states = state_specs(tx, PARAMS, SPECS)
    experts = states.inner_states["experts"]
    magma_state = experts.inner_state.magma._replace(alignment={"moe": {"experts": P("fsdp")}})
    experts = experts._replace(inner_state=experts.inner_state._replace(magma=magma_state))
    states = states._replace(inner_states={**states.inner_states, "experts": experts})
    run = sharded_run(tx, make_mesh(), SPECS, states=states, check_vma=check_vma)
    assert_same_run(run, alone(build((), None)))


def test_partly_manual_shard_map():
    """ "fsdp" by hand and "tensor" left to the compiler."""
    specs = jax.tree.map(lambda spec: P(*(a if a == "fsdp" else None for a in spec)), SPECS)
    tx = with_magma(optax.adam(1e-2), axis_name="fsdp")
    run = sharded_run(tx, make_mesh(), specs, placed=SPECS, axis_names={"fsdp"})
    assert_same_run(run, expected("with_magma"))


def test_training_with_gathered_parameters():
    """FSDP by hand: parameters are gathered for the loss, gradients scattered by its transpose."""
    mesh = make_mesh(shape=(4,), names=("fsdp",))
    x = jax.random.normal(jax.random.key(0), (16, 8))
    params = {"w": jax.random.normal(jax.random.key(1), (8, 4))}

    def loss(params, x):
        return jnp.mean((x @ params["w"] - jnp.sum(x, 1, keepdims=True)) ** 2)

    def train(params, x, axis_name):
        tx = with_magma(optax.adam(1e-2), axis_name=axis_name)

        def mean_loss(params):
            if axis_name is None:
                return loss(params, x)
            whole = jax.tree.map(lambda w: jax.lax.all_gather(w, axis_name, tiled=True), params)
            return loss(whole, x) / jax.lax.axis_size(axis_name)

        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(jax.grad(mean_loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        return params, state.magma.alignment

    expected = jax.jit(functools.partial(train, axis_name=None))(params, x)
    sharded = jax.shard_map(
        functools.partial(train, axis_name="fsdp"),
        mesh=mesh,
        in_specs=(P("fsdp"), P("fsdp")),
        out_specs=(P("fsdp"), P()),
    )
    actual = jax.block_until_ready(jax.jit(sharded)(params, x))
    chex.assert_trees_all_close(jax.device_get(actual), jax.device_get(expected), rtol=1e-4)


class TestMissingAxisName:
    def test_names_the_leaf_and_the_axis(self):
        up = {"layers": {"mlp": {"up": SPECS["layers"]["mlp"]["up"]}}}
        for axes, missing in [(None, "'fsdp', 'tensor'"), ("fsdp", "'tensor'")]:
            with pytest.raises(ValueError, match=rf"layers/mlp/up.*axis {missing} would.*add"):
                sharded_run(CASES["with_magma"](axes), make_mesh(), up)

    def test_gradients_before_pmean_are_named_too(self):
        """Parameters are replicated, each device has the gradient of its own examples."""
        tx, params = with_magma(optax.sgd(1e-2)), {"w": jnp.ones((2, 2))}

        def step(state, x):
            return tx.update({"w": x}, state, params)[1]

        step = jax.shard_map(step, mesh=make_mesh(), in_specs=(P(), P("fsdp")), out_specs=P())
        with pytest.raises(ValueError, match=r"'w': .*pmean"):
            step(tx.init(params), jnp.ones((4, 2)))

    def test_a_model_a_device_may_keep_scores_of_its_own(self):
        tx, mesh = with_magma(optax.adam(1e-2)), make_mesh(shape=(2,), names=("model",))
        g = jax.random.normal(jax.random.key(0), (2, 3, 4))
        noise = jax.random.normal(jax.random.key(1), (2, 3, 4))

        def scores(g, noise):
            state = tx.init(g)
            own = jax.lax.pcast(state.magma.alignment, "model", to="varying")
            state = state._replace(magma=state.magma._replace(alignment=own))
            for gradient in (g, g + noise):
                _, state = tx.update(gradient, state, g)
            return state.magma.alignment[""][None]

        actual = jax.jit(
            jax.shard_map(scores, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        )
        for n, score in enumerate(actual(g, noise)):
            state = tx.init(g[n])
            for gradient in (g[n], g[n] + noise[n]):
                _, state = tx.update(gradient, state, g[n])
            np.testing.assert_allclose(score, state.magma.alignment[""], rtol=1e-5)
