"""lazy=True where parameters are sharded: collectives as the coins say."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from costly import costly
from jax.sharding import NamedSharding
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

from magma_optax import stacked, with_magma, with_skip_update


def matrices(path, leaf):
    return len(leaf.shape) > 1


def muon():
    """Muon on the last two axes of whatever has two."""

    def dimensions(params):
        return jax.tree.map(
            lambda p: (
                optax.contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1) if p.ndim > 1 else None
            ),
            params,
        )

    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dimensions)


def layers(path, leaf):
    return 0 if len(leaf.shape) > 2 else ()


def plain(x):
    return x @ jnp.swapaxes(x, -1, -2) @ x if x.ndim > 1 else x


def only(tree):
    return {"up": tree["layers"]["mlp"]["up"], "q": tree["attn"]["q"]}


CASES = {
    "with_magma-stacked": lambda lazy: with_magma(muon(), where=matrices, blocks=layers, lazy=lazy),
    "with_skip_update": lambda lazy: with_skip_update(muon(), where=matrices, lazy=lazy),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_run_is_the_run_of_one_device_without_lazy(case):
    """Every device tosses the same coins, so all meet in a collective or none."""
    tx, mesh, specs = CASES[case](True), make_mesh("Auto"), only(SPECS)
    with jax.set_mesh(mesh):
        params, *grads = (
            jax.device_put(only(tree), shardings(mesh, specs)) for tree in (PARAMS, *GRADS)
        )
        where = shardings(mesh, state_specs(tx, only(PARAMS), specs))
        state = jax.jit(tx.init, out_shardings=where)(params)
        step = jax.jit(updater(tx), donate_argnums=1)
        text = step.lower(grads[0], state, params).compile().as_text()
        found = run(step, state, params, grads)
    expected = alone(CASES[case](False), [only(g) for g in GRADS], only(PARAMS))
    assert_same_run(found, expected, rtol=1e-3)  # Newton-Schulz iterations magnify rounding.
    assert collectives_by_the_coins(text), "collectives run always: this test says nothing"


def collectives_by_the_coins(text):
    """Names of the branches, and of the loops of unknown length, that have a collective."""
    bodies = dict(re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    inside = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-]+)", text)
    for group in re.findall(r"branch_computations=\{([^}]*)\}", text):
        inside += re.findall(r"%?([\w.\-]+)", group)
    for loop in re.findall(r" while\(.*", text):
        if "known_trip_count" not in loop:
            inside += re.findall(r"body=%?([\w.\-]+)", loop)

    def reached(name):
        body = bodies.get(name, "")
        called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", body)
        return body + "".join(map(reached, called))

    return [name for name in inside if re.search(r" all-(reduce|gather)", reached(name))]


def gathered(x):
    """A direction that gathers a leaf, as distributed Muons do, and shards its result again."""
    spec = jax.typeof(x).sharding.spec
    whole = jax.sharding.reshard(x, P(*[None] * x.ndim))
    return jax.sharding.reshard(whole @ jnp.swapaxes(whole, -1, -2) @ whole, P(*spec))


@pytest.mark.parametrize("blocks", ["leaf", layers])
def test_on_explicit_meshes(blocks):
    mesh, specs = make_mesh("Explicit"), only(SPECS)
    options = {"blocks": blocks, "lazy": True}
    with jax.set_mesh(mesh):
        params, *grads = (
            jax.device_put(only(tree), shardings(mesh, specs)) for tree in (PARAMS, *GRADS)
        )
        tx = with_magma(costly(gathered), **options)
        state = jax.jit(tx.init)(params)
        before = jax.tree.map(jax.typeof, state)
        updates, state = run(jax.jit(tx.update), state, params, grads)
        assert jax.tree.map(jax.typeof, state) == before
    dense = with_magma(costly(plain), blocks=blocks)
    grads = [only(g) for g in GRADS]
    assert_same_run((updates, state), alone(dense, grads, only(PARAMS)), rtol=1e-4)


def test_blocks_along_a_sharded_axis_of_an_explicit_mesh_are_refused():
    mesh = make_mesh("Explicit")
    with jax.set_mesh(mesh):
        params = {"experts": jax.device_put(jnp.ones((8, 3, 4)), NamedSharding(mesh, P("fsdp")))}
        tx = with_magma(costly(plain), blocks=stacked(0), lazy=True)
        with pytest.raises(ValueError, match="mesh axis 'fsdp' shards the axis of 'experts'"):
            jax.jit(tx.init)(params)


def spread(x):
    """A direction that gives each device layers of its own, as distributed Muons do."""
    mine = jax.sharding.reshard(x, P("fsdp", None, None))
    return jax.sharding.reshard(mine @ mine.mT @ mine, P(None, None, None))


def test_a_direction_that_spreads_blocks_over_an_explicit_mesh_is_refused():
    with jax.set_mesh(make_mesh("Explicit")):
        params = {"layers": jax.device_put(jnp.ones((8, 3, 4)), P())}
        tx = with_magma(costly(spread), blocks=stacked(0), lazy=True)
        with pytest.raises(ValueError, match=r"'layers' mixes .*a reshard of blocks onto a mesh"):
            jax.jit(tx.init)(params)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_each_device_has_experts_of_its_own(check_vma):
    """Coins differ from device to device, so devices compute different numbers of blocks."""
    mesh = make_mesh("Auto", (4,), ("expert",))
    shape = (8, 3, 4)
    rng = np.random.default_rng(0)
    params, *grads = ({"w": rng.normal(size=shape).astype(np.float32)} for _ in range(3))
    lazy = with_magma(costly(plain), blocks=stacked(0, axis_name="expert"), lazy=True)
    dense = with_magma(costly(plain), blocks=stacked(0))
    states = jax.tree.map(lambda x: P("expert") if x.ndim and x.shape[0] == 8 else P(),
                          jax.eval_shape(dense.init, params))  # fmt: skip
    specs = {"w": P("expert")}

    def shard(function, outs, *ins):
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)
        )

    state = shard(lazy.init, states, specs)(params)
    update = shard(lazy.update, (specs, states), specs, states, specs)
    expected = alone(dense, grads, params)
    assert_same_run(run(update, state, params, grads), expected, rtol=1e-4)
    dropped = np.all(expected[0][0]["w"] == 0, axis=(1, 2)).reshape(4, 2)
    assert len({tuple(row) for row in dropped}) > 1, "all devices tossed the same coins"


def exchanged(x):
    """A direction of which the devices along "tensor" swap parts, in a loop as well."""
    pairs = [(0, 1), (1, 0)]

    def swapped(_, x):
        return x + jax.lax.ppermute(x @ jnp.ones((2, 2)), "tensor", pairs)

    return jax.lax.fori_loop(0, 2, swapped, swapped(0, x)) @ jnp.ones((2, 2))


@pytest.mark.parametrize("experts", [4, 8])
def test_devices_do_not_wait_for_those_that_drop_a_direction(experts):
    mesh = make_mesh("Auto", (4, 2), ("expert", "tensor"))
    params = {"w": np.random.default_rng(0).normal(size=(experts, 3, 4)).astype(np.float32)}
    specs = {"w": P("expert", None, "tensor")}

    def updates(lazy):
        tx = with_skip_update(
            costly(exchanged), blocks=stacked(0, axis_name="expert"), key=3, lazy=lazy
        )

        def step(params):
            return tx.update(params, tx.init(params), params)[0]

        sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=specs)
        return np.asarray(jax.jit(sharded)(params)["w"])

    np.testing.assert_allclose(updates(True), updates(False), rtol=1e-5)
    dropped = np.all(updates(False) == 0, axis=(1, 2))
    assert 0 < dropped.sum() < experts


def test_shard_map_over_a_part_of_the_mesh():
    """Where devices toss alike it works; where each has experts of its own it is refused."""
    mesh = make_mesh("Auto", (4, 2), ("expert", "tensor"))
    params = {"w": np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)}

    def updates(lazy, spec, **options):
        tx = with_skip_update(costly(plain), blocks=stacked(0, **options), lazy=lazy)

        def step(params):
            return tx.update(params, tx.init(params), params)[0]

        part = jax.shard_map(
            step, mesh=mesh, in_specs=({"w": spec},), out_specs={"w": spec}, axis_names={"expert"}
        )
        return np.asarray(jax.jit(part)(params)["w"])

    within = P(None, None, "expert")
    np.testing.assert_allclose(updates(True, within), updates(False, within), rtol=1e-5)
    with pytest.raises(ValueError, match=r"blocks of 'w'.*leaves to JAX, here 'tensor'"):
        updates(True, P("expert"), axis_name="expert")
    assert updates(False, P("expert"), axis_name="expert").any()


def test_under_pmap_all_replicas_stay_alike():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(5, 3, 4)), jnp.float32)}
    grads = {"w": jnp.asarray(rng.normal(size=(8, 5, 3, 4)), jnp.float32)}
    lazy, dense = (with_magma(costly(plain), blocks=layers, lazy=lazy) for lazy in (True, False))

    def step(grads, state, params):
        return lazy.update(jax.lax.pmean(grads, "replica"), state, params)

    copies = jax.tree.map(lambda x: jnp.stack([x] * 8), (lazy.init(params), params))
    updates, state = jax.device_get(jax.pmap(step, axis_name="replica")(grads, *copies))
    mean = jax.tree.map(lambda g: g.mean(0), grads)
    expected, last = jax.device_get(jax.jit(dense.update)(mean, dense.init(params), params))
    for replica in range(8):
        update, kept = jax.tree.map(lambda x, n=replica: x[n], (updates, state))
        assert_same_run(([update], kept), ([expected], last), rtol=1e-4)
    assert 0 < np.any(expected["w"], axis=(1, 2)).sum() < 5
