"""What the tests on meshes share: shapes, shardings, and a few steps of training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

P = PartitionSpec
SPECS = {  # A leaf sharded along both axes of the mesh, one along blocks, one not at all.
    "layers": {"mlp": {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}},
    "moe": {"experts": P("fsdp", None, "tensor")},
    "attn": {"q": P("fsdp", None)},
    "norm": {"scale": P()},
}
SHAPES = {
    "layers": {"mlp": {"up": (4, 8, 6), "down": (4, 6, 8)}},
    "moe": {"experts": (8, 3, 4)},
    "attn": {"q": (8, 6)},
    "norm": {"scale": (6,)},
}


def normal(seed):
    """Normal arrays of `SHAPES`, the same on one device and on many."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


PARAMS = normal(0)
# Gradients of several steps: a common part, so that they align, and noise.
GRADS = [jax.tree.map(lambda a, b: a + 0.5 * b, normal(1), normal(2 + n)) for n in range(3)]


def make_mesh(kind="Auto", shape=(2, 2), names=("fsdp", "tensor")):
    return jax.make_mesh(shape, names, axis_types=(AxisType[kind],) * len(names))


def _is_mask(x):
    return isinstance(x, optax.MaskedNode)


def state_specs(tx, params, specs):
    """PartitionSpecs of the state: its parameter-shaped parts as the parameters, others P()."""
    return optax.tree.map_params(
        tx,
        lambda leaf, spec: leaf if _is_mask(leaf) else spec,
        jax.eval_shape(tx.init, params),
        specs,
        transform_non_params=lambda _: P(),
        is_leaf=_is_mask,
    )


def shardings(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def abstract(tree, shards):
    """ShapeDtypeStructs of ``tree`` with shardings; a sharding may stand for a whole subtree."""
    return jax.tree.map(
        lambda shard, part: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shard), part
        ),
        shards,
        tree,
    )


def run(update, state, params, grads):
    """Updates of each step and the last state. Waits: the CPU runs one collective at a time."""
    updates = []
    for grad in grads:
        new, state = jax.block_until_ready(update(grad, state, params))
        updates.append(jax.tree.map(np.asarray, new))
    return updates, state


def updater(tx):
    """``tx.update`` with the gradient as ``grad`` too, as `magma` in a chain wants it."""
    return lambda grads, state, params: tx.update(grads, state, params, grad=grads)


def alone(tx, grads=GRADS, params=PARAMS):
    """The same steps on one device."""
    params = jax.tree.map(jnp.asarray, params)
    return run(jax.jit(updater(tx)), tx.init(params), params, grads)


def assert_same_run(actual, expected, rtol=2e-5):
    """Coins exactly, as a dropped block is zero; updates and states to float32 rounding."""
    for one, other in zip(actual[0], expected[0], strict=True):
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x == 0, y == 0)
            np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-8)
    for x, y in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-7)
