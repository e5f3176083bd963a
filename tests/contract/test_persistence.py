"""A state saved in any of the usual ways continues bit for bit; a foreign one is named."""

import functools
import io
import pickle

import chex
import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from contract_bases import FORMS, PARAMS, grads_at
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from magma_optax import attention_and_mlp, magma, stacked, with_magma

GRADS = [grads_at(seed) for seed in range(4)]


def continue_run(tx, state):
    for grads in GRADS[2:]:
        updates, state = tx.update(grads, state, PARAMS, grad=grads)
    return updates, state


@functools.cache
def uninterrupted(form):
    """(transformation, its state after two steps, updates and state after two more)."""
    tx = FORMS[form].wrap(optax.rmsprop(1e-2), key=jax.random.key(4))
    state = tx.init(PARAMS)
    for grads in GRADS[:2]:
        _, state = tx.update(grads, state, PARAMS, grad=grads)
    return tx, state, continue_run(tx, state)


def abstract(tx):
    return jax.eval_shape(tx.init, PARAMS)


def through_pickle(tx, state, path):
    return pickle.loads(pickle.dumps(state))


def through_flax_bytes(tx, state, path):
    data = flax.serialization.to_bytes(state)
    return flax.serialization.from_bytes(tx.init(PARAMS), data)


def through_equinox_leaves(tx, state, path):
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, state)
    buffer.seek(0)
    return eqx.tree_deserialise_leaves(buffer, tx.init(PARAMS))


def through_numpy(tx, state, path):
    leaves, treedef = jax.tree.flatten(state)
    np.savez(path / "state.npz", *map(np.asarray, leaves))
    with np.load(path / "state.npz") as file:
        return jax.tree.unflatten(treedef, [file[name] for name in file.files])


def through_orbax(tx, state, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", abstract(tx))


def through_orbax_without_a_target(tx, state, path):
    """Tuples come back as dicts and lists: the arrays by the target's structure, as documented."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(path / "state")
    flat = {
        jax.tree_util.keystr(key, simple=True, separator="."): leaf
        for key, leaf in jax.tree_util.tree_leaves_with_path(restored)
    }
    return jax.tree_util.tree_map_with_path(
        lambda key, _: flat[jax.tree_util.keystr(key, simple=True, separator=".")], abstract(tx)
    )


def through_an_asynchronous_manager(tx, state, path):
    with ocp.CheckpointManager(path) as manager:
        manager.save(2, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        return manager.restore(2, args=ocp.args.StandardRestore(abstract(tx)))


@pytest.mark.parametrize(
    "through",
    [
        through_pickle,
        through_flax_bytes,
        through_equinox_leaves,
        through_numpy,
        through_orbax,
        through_orbax_without_a_target,
        through_an_asynchronous_manager,
    ],
)
def test_resumes_bit_for_bit(form, through, tmp_path):
    tx, state, expected = uninterrupted(form.name)
    restored = through(tx, state, tmp_path.resolve())
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal(continue_run(tx, restored), expected)


def abstract_on(devices, tx, params):
    """The usual idiom: the state's shapes with the shardings that `map_params` finds."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    abstract_state = jax.eval_shape(tx.init, params)
    shardings = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        abstract_state,
        {"mlp": {"w": NamedSharding(mesh, P("x"))}, "norm": NamedSharding(mesh, P())},
        transform_non_params=lambda _: NamedSharding(mesh, P()),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    shardings = jax.tree.broadcast(shardings, abstract_state)  # The one-liner of docs/recipes.md.
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_state,
        shardings,
    )


OPTIONS = {"default": {}, "where": {"where": attention_and_mlp}, "blocks": {"blocks": stacked(0)}}
DIAGONAL = list(zip(OPTIONS, [optax.adam, optax.rmsprop, optax.sgd], strict=True))


@pytest.mark.parametrize(
    ("form_name", "options", "base"),
    [
        # What with_magma keeps depends on the base; what the links keep doesn't.
        *(("with_magma", name, base) for name in OPTIONS for _, base in DIAGONAL),
        *((link, name, base) for link in ("magma", "skip_update") for name, base in DIAGONAL),
    ],
)
def test_restores_sharded_onto_another_mesh(form_name, base, options, tmp_path):
    form = FORMS[form_name]
    tx = form.wrap(base(1e-2), **OPTIONS[options])
    params = {"mlp": {"w": jnp.arange(64.0).reshape(16, 4)}, "norm": jnp.ones(4)}
    four = jax.tree.map(lambda x: x.sharding, abstract_on(4, tx, params))
    state = jax.jit(tx.init, out_shardings=four)(params)
    _, state = jax.jit(tx.update)(params, state, params, grad=params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path.resolve() / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path.resolve() / "state", abstract_on(8, tx, params))
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
    ours = form.state(restored)
    if ours.momentum is not None:
        assert ours.momentum["mlp"]["w"].sharding.spec == P("x")
    for leaf in jax.tree.leaves(restored):
        assert len(leaf.sharding.device_set) == 8
    for leaf in jax.tree.leaves(ours.alignment):
        assert leaf.sharding.is_fully_replicated


def carry_over(old, new):
    """The recipe of docs/recipes.md."""
    kept = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(old)}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(new)]
    if unknown := kept.keys() - set(paths):
        raise ValueError(f"the new state has no place for {sorted(unknown)}")
    return jax.tree.unflatten(
        jax.tree.structure(new),
        [kept.get(path, leaf) for path, leaf in zip(paths, jax.tree.leaves(new), strict=True)],
    )


def test_carrying_over_what_has_no_place_is_refused():
    """As a plain Adam's state, of which nothing would be carried into that of with_magma."""
    adam, tx = optax.adam(1e-2), with_magma(optax.adam(1e-2))
    before = adam.update(PARAMS, adam.init(PARAMS))[1]
    with pytest.raises(ValueError, match=r"no place for .*\.mu"):
        carry_over(before, tx.init(PARAMS))


def test_from_an_adam_checkpoint_to_magma():
    """The recipe of docs/recipes.md: Adam's moments and count go on inside Magma."""
    adam, tx = optax.adam(1e-2), with_magma(optax.adam(1e-2), survival_prob=1.0, damping=False)
    state = adam.init(PARAMS)
    for grads in GRADS[:2]:
        _, state = adam.update(grads, state, PARAMS)
    masked = tx.init(PARAMS)._replace(inner_state=state)
    for grads in GRADS[2:]:
        expected, state = adam.update(grads, state, PARAMS)
        updates, masked = tx.update(grads, masked, PARAMS)
        chex.assert_trees_all_equal(updates, expected)
    chex.assert_trees_all_equal(masked.inner_state, state)


def test_a_parameter_added_after_the_checkpoint(form):
    """The base's moments, scores and coins of the old parameters go on as they were."""
    tx = form.wrap(optax.adam(1e-2), key=4)
    old = {"a": jnp.array([1.0, 2.0]), "z": jnp.array([-3.0, 1.0])}
    new = old | {"m": jnp.array([2.0, 5.0])}
    before = tx.init(old)
    for n in range(3):
        _, before = tx.update(optax.tree.scale(1 - n, old), before, old, grad=old)
    after = carry_over(before, tx.init(new))
    for _ in range(6):
        updates, after = tx.update(new, after, new, grad=new)
        expected, before = tx.update(old, before, old, grad=old)
        chex.assert_trees_all_equal({name: updates[name] for name in old}, expected)


def test_a_checkpoint_of_other_parameters_or_blocks_is_named():
    stack = {"layers": jnp.ones((4, 3))}
    saved = magma(blocks=stacked(0)).init(stack)
    with pytest.raises(ValueError, match=r"'layers' has scores of shape \(4,\) .* shape \(\)"):
        magma().update(stack, saved, grad=stack)
    unrolled = {f"layer_{n}": jnp.ones(3) for n in range(4)}
    with pytest.raises(ValueError, match="'layer_0' is in the updates but not in the state"):
        magma().update(unrolled, saved, grad=unrolled)


def test_a_checkpoint_of_another_optimizer_is_named():
    on_adam = with_magma(optax.adam(1e-2)).init(PARAMS)
    on_rms = with_magma(optax.rmsprop(1e-2))
    with pytest.raises(ValueError, match="keeps no first moment of 'attn/kernel'"):
        mixed = on_rms.init(PARAMS)._replace(magma=on_adam.magma)
        on_rms.update(PARAMS, mixed, PARAMS)
    link = magma()
    with pytest.raises(ValueError, match="expects a MagmaState, got a WithMagmaState"):
        link.update(PARAMS, on_adam, PARAMS, grad=PARAMS)
    restored = on_adam._asdict()
    with pytest.raises(ValueError, match=r"expects a WithMagmaState, got a dict.*target"):
        with_magma(optax.adam(1e-2)).update(PARAMS, restored, PARAMS)
