"""jit with NamedSharding, on Auto and Explicit meshes: the run of one device, sharded."""

import functools

import chex
import jax
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

from magma_optax import MagmaState, magma, skip_update, stacked, with_magma


def matrices(path, leaf):
    return len(leaf.shape) > 1


CASES = {
    "with_magma(adam)": lambda: with_magma(optax.adam(1e-2), where=matrices),
    "with_magma(adam)-row": lambda: with_magma(optax.adam(1e-2), where=matrices, blocks="row"),
    "with_magma(adam)-stacked": lambda: with_magma(
        optax.adam(1e-2), where=matrices, blocks=stacked(0)
    ),
    "magma(grad)": lambda: optax.chain(optax.adam(1e-2), magma(where=matrices)),
    "magma(grad)-stacked": lambda: optax.chain(
        optax.adam(1e-2), magma(where=matrices, blocks=stacked(0))
    ),
    "skip_update-row": lambda: optax.chain(
        optax.adam(1e-2), skip_update(where=matrices, blocks="row")
    ),
    "with_magma(rmsprop)": lambda: with_magma(optax.rmsprop(1e-2), where=matrices),
    "sparse_state": lambda: with_magma(
        optax.adam(1e-2), where=matrices, blocks=stacked(0), sparse_state=True
    ),
    "with_magma(muon)": lambda: with_magma(optax.contrib.muon(1e-2), where=matrices),
}


@functools.cache
def expected(case):
    return alone(CASES[case]())


def magma_state(state):
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MagmaState))
    return next(x for x in found if isinstance(x, MagmaState))


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "Explicit") for case in CASES if case != "with_magma(muon)"),
        # Muon itself contracts sharded axes, which Explicit meshes refuse.
        *((case, "Auto") for case in ("with_magma(muon)",)),
        *((case, "Auto") for case in ("skip_update-row", "sparse_state")),
    ],
)
def test_a_sharded_run_is_the_run_of_one_device(case, kind):
    """FSDP along one mesh axis and tensors along the other; `init` is jitted, as optax shows."""
    tx, mesh = CASES[case](), make_mesh(kind)
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, shardings(mesh, SPECS))
        grads = [jax.device_put(g, shardings(mesh, SPECS)) for g in GRADS]
        state = jax.jit(tx.init, out_shardings=shardings(mesh, state_specs(tx, PARAMS, SPECS)))(
            params
        )
        before = jax.tree.map(jax.typeof, state)
        updates, state = run(jax.jit(updater(tx)), state, params, grads)
    assert_same_run(
        (updates, state), expected(case), rtol=1e-3 if "muon" in case else 2e-5
    )  # Newton-Schulz iterations magnify rounding.
    masked = [x for x in jax.tree.leaves(updates) if x.ndim > 1]
    assert any((x == 0).any() for x in masked) and any((x != 0).any() for x in masked)
    if kind == "Explicit":  # There shardings are types, which a scan over steps must not change.
        assert jax.tree.map(jax.typeof, state) == before


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_moments_are_sharded_as_the_parameters_and_scores_are_not(kind):
    tx, mesh = with_magma(optax.rmsprop(1e-2), blocks=stacked(0), where=matrices), make_mesh(kind)
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, shardings(mesh, SPECS))
        where = shardings(mesh, state_specs(tx, PARAMS, SPECS))
        state = jax.jit(tx.init, out_shardings=where)(params)
        update = jax.jit(updater(tx), out_shardings=(shardings(mesh, SPECS), where))
        _, state = jax.block_until_ready(update(params, state, params))
    ours = magma_state(state)
    for leaf in jax.tree.leaves((ours.step, ours.key, ours.alignment)):
        assert leaf.sharding.is_fully_replicated
    specs = {**SPECS, "norm": {"scale": optax.MaskedNode()}}  # Not masked: no momentum.
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding.spec, ours.momentum), specs)


def test_explicit_init_follows_the_parameters_without_out_shardings():
    tx, mesh = with_magma(optax.rmsprop(1e-2), blocks="row"), make_mesh("Explicit")
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(jax.device_put(PARAMS, shardings(mesh, SPECS)))
    ours = magma_state(state)
    for leaf, shard in zip(
        jax.tree.leaves(ours.momentum), jax.tree.leaves(shardings(mesh, SPECS)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(shard, leaf.ndim)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(ours.alignment))


def test_scores_that_a_user_shards_stay_sharded_in_explicit_mode():
    """Where blocks are many (rows of wide matrices), their scores may be spread as well."""
    tx, mesh = (
        with_magma(optax.adam(1e-2), blocks=stacked(0), where=matrices),
        make_mesh("Explicit"),
    )
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, shardings(mesh, SPECS))
        state = jax.jit(tx.init)(params)
        scores = state.magma.alignment
        scores["moe"]["experts"] = jax.sharding.reshard(scores["moe"]["experts"], P("fsdp"))
        updates, state = run(jax.jit(updater(tx)), state, params, GRADS)
    assert state.magma.alignment["moe"]["experts"].sharding.spec == P("fsdp")
    assert_same_run((updates, state), expected("with_magma(adam)-stacked"))


def test_explicit_meshes_without_jit_and_inside_scan():
    """Of a leaf sharded along blocks, one along rows and one not at all."""
    few = lambda tree: {name: tree[name] for name in ("moe", "attn", "norm")}  # noqa: E731
    tx, mesh = (
        with_magma(optax.adam(1e-2), blocks=stacked(0), where=matrices),
        make_mesh("Explicit"),
    )
    with jax.set_mesh(mesh):
        params = jax.device_put(few(PARAMS), shardings(mesh, few(SPECS)))
        grads = jax.device_put(few(GRADS[0]), shardings(mesh, few(SPECS)))
        _, eager = jax.block_until_ready(updater(tx)(grads, tx.init(params), params))

        def step(state, _):
            return updater(tx)(grads, state, params)[1], None

        scanned = jax.jit(lambda state: jax.lax.scan(step, state, length=1)[0])(tx.init(params))
    one = alone(tx, [few(GRADS[0])], few(PARAMS))[1]
    chex.assert_trees_all_close(jax.device_get(eager), jax.device_get(one), rtol=2e-5, atol=1e-7)
    chex.assert_trees_all_close(jax.device_get(scanned), jax.device_get(one), rtol=2e-5, atol=1e-7)
