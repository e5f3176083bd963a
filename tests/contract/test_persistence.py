"""A state saved in any of the usual ways continues bit for bit; a foreign one is named."""

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
from jax.sharding import NamedSharding, PartitionSpec

from magma_optax import magma, stacked, with_magma
from tests.contract.conftest import PARAMS, loss

GRADS = [jax.grad(loss)(PARAMS, seed) for seed in range(4)]


def continue_run(tx, state):
    for grads in GRADS[2:]:
        updates, state = tx.update(grads, state, PARAMS, grad=grads)
    return updates, state


@pytest.fixture
def tx(form):
    return form.wrap(optax.rmsprop(1e-2), key=jax.random.key(4))


@pytest.fixture
def state(tx):
    state = tx.init(PARAMS)
    for grads in GRADS[:2]:
        _, state = tx.update(grads, state, PARAMS, grad=grads)
    return state


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
def test_resumes_bit_for_bit(tx, state, through, tmp_path):
    restored = through(tx, state, tmp_path.resolve())
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal(continue_run(tx, restored), continue_run(tx, state))


def test_restores_sharded_onto_another_mesh(tmp_path):
    tx = with_magma(optax.rmsprop(1e-2))
    params = {"w": jnp.arange(64.0).reshape(16, 4)}

    def sharded(devices):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
        return optax.tree.map_params(
            tx,
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec),
            jax.eval_shape(tx.init, params),
            {"w": NamedSharding(mesh, PartitionSpec("x"))},
            transform_non_params=lambda leaf: jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
                ),
                leaf,
            ),
        )

    four = jax.tree.map(lambda x: x.sharding, sharded(4))
    state = jax.jit(tx.init, out_shardings=four)(params)
    _, state = jax.jit(tx.update)(params, state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path.resolve() / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path.resolve() / "state", sharded(8))
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
    assert len(restored.magma.momentum["w"].sharding.device_set) == 8


def carry_over(old, new):
    """The recipe of docs/usage.md."""
    kept = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(old)}
    return jax.tree.map_with_path(lambda p, leaf: kept.get(jax.tree_util.keystr(p), leaf), new)


def test_a_parameter_added_after_the_checkpoint(form):
    """The base's moments, scores and coins of the old parameters go on as they were."""
    tx = form.wrap(optax.adam(1e-2), key=4)
    old = {"a": jnp.ones(3), "z": jnp.ones(4)}
    new = {"a": jnp.ones(3), "m": jnp.ones(2), "z": jnp.ones(4)}
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
