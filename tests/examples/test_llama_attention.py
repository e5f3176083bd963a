"""Flash attention for TPUs, interpreted here, against plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama import attention, sharding


def inputs(rows=2, length=256, heads=2, kv_heads=2, width=64):
    rng = np.random.default_rng(0)
    shapes = [(rows, length, n, width) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def value_and_gradients(attend, arrays):
    weights = jnp.cos(jnp.arange(arrays[0].size)).reshape(arrays[0].shape)
    loss = lambda *arrays: jnp.sum(attend(*arrays) * weights)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_splash_attention_is_attention(heads, kv_heads):
    arrays = inputs(heads=heads, kv_heads=kv_heads)
    expected = value_and_gradients(
        functools.partial(attention.attend, implementation="xla"), arrays
    )
    actual = value_and_gradients(functools.partial(attention.splash, interpret=True), arrays)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("explicit", [False, True])
def test_each_device_computes_its_rows_and_heads(explicit):
    arrays = inputs(rows=4, length=128, heads=4, kv_heads=2)
    expected = attention.attend(*arrays, "xla")
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, explicit)
    with jax.set_mesh(mesh):
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(sharding.ROWS))
        placed = [jax.device_put(x, rows) for x in arrays]
        actual = jax.jit(functools.partial(attention.splash, interpret=True))(*placed)
    assert {shard.data.shape for shard in actual.addressable_shards} == {(1, 128, 2, 64)}
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


def test_rows_that_do_not_divide_are_on_every_device():
    arrays = inputs(rows=3, length=128)
    with jax.set_mesh(sharding.make_mesh({"data": 4, "fsdp": 1, "tensor": 2})):
        actual = jax.jit(functools.partial(attention.splash, interpret=True))(*arrays)
    np.testing.assert_allclose(actual, attention.attend(*arrays, "xla"), rtol=2e-4, atol=2e-4)


def test_a_length_that_splash_attention_does_not_take_is_computed_plainly():
    arrays = inputs(length=100)
    np.testing.assert_array_equal(
        attention.attend(*arrays, "splash"), attention.attend(*arrays, "xla")
    )
