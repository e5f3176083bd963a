"""lazy=True: what of a direction keeps the blocks of a leaf apart, and what is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from costly import C, assert_same, costly, normal, steps, unchanged, whiten
from hypothesis import given, settings
from hypothesis import strategies as st

from magma_optax import stacked, with_magma, with_skip_update

C48 = jnp.asarray(np.random.default_rng(1).normal(size=(48, 48)), jnp.float32)


def swap(x):
    return jnp.swapaxes(x, -1, -2)


def three_times(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: x @ C / 4, x)


def while_small(x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ C / 4), (0, x))[1]


def summed(x):
    return jax.lax.scan(lambda total, c: (total + x * c, None), jnp.zeros_like(x), C[0])[0] @ C


def per_block(x):
    """Another number for each layer, as in layer-wise learning rates: a constant of NumPy."""
    return np.linspace(0.5, 1.5, len(x), dtype=np.float32)


APART = {
    "a product": lambda x: x @ C,
    "products of a block with itself": lambda x: x @ swap(x) @ x,
    "a softmax within": lambda x: jax.nn.softmax(x, -1) @ C,
    "a block's norm": lambda x: x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True) @ C,
    "vmap": jax.vmap(lambda x: x @ x.T @ x),
    "rows of all blocks together": lambda x: (x.reshape(-1, 8) @ C).reshape(x.shape),
    "blocks as vectors": lambda x: (x.reshape(-1, 48) @ C48).reshape(-1, 6, 8),
    "a loop": three_times,
    "a loop of unknown length": while_small,
    "a sum in a loop": summed,
    "a branch": lambda x: jax.lax.cond(C.sum() > 0, lambda: x @ C, lambda: x),
    "a running sum within": lambda x: jnp.cumsum(x, 1) @ C,
    "sorted within": lambda x: jnp.sort(x, -1) @ C,
    "eigenvectors": whiten,
    "qr": lambda x: jnp.linalg.qr(swap(x))[0] @ jnp.ones((6, 6)) @ x,
    "calls": lambda x: jax.jit(jax.checkpoint(lambda x: jax.nn.relu(x @ C)))(x),
    "a call with a derivative of its own": unchanged,
    "blocks along another axis": lambda x: jnp.moveaxis(jnp.moveaxis(x, 0, 1) @ C, 1, 0),
    "the number of blocks": lambda x: x / x.shape[0] @ C,
    "a number per block": lambda x: per_block(x)[:, None, None] * (x @ C),
    "a number per block, by vmap": lambda x: jax.vmap(lambda a, n: a @ C * n)(x, per_block(x)),
    "a number per block, by einsum": lambda x: jnp.einsum("l,lij->lij", per_block(x), x @ C),
    "a number per block in a loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, x: per_block(x)[:, None, None] * (x @ C) / 4, x
    ),
    "blocks that are frozen": lambda x: jnp.where(per_block(x)[:, None, None] < 1, 0, x @ C),
    "one direction for all blocks": lambda x: jnp.broadcast_to(C[:6] @ C, x.shape),
}
MIXED = {
    "the leaf's norm": lambda x: x / jnp.linalg.norm(x) @ C,
    "a softmax over blocks": lambda x: jax.nn.softmax(x, 0) @ C,
    "a running sum over blocks": lambda x: jnp.cumsum(x, 0) @ C,
    "sorted over blocks": lambda x: jnp.sort(x, 0) @ C,
    "turned round": lambda x: jnp.flip(x, 0) @ C,
    "products between blocks": lambda x: jnp.einsum("lij,mij,mkn->lkn", x, x, x),
    "a scan over blocks": lambda x: jax.lax.scan(lambda c, a: (c + a, c @ C), 0 * x[0], x)[1],
    "another order of elements": lambda x: jnp.swapaxes(x, 0, 1).reshape(x.shape) @ C,
    "rolled": lambda x: jnp.roll(x, 1, 0) @ C,
    "the block's index": lambda x: x * jnp.arange(1.0, len(x) + 1)[:, None, None] @ C,
    "an array with a row per block": lambda x: x * jnp.ones((4, 1, 1)).at[0].set(2) @ C,
    "a loop until all are small": lambda x: jax.lax.while_loop(
        lambda x: jnp.abs(x).max() > 1, lambda x: x @ C / 9, x
    ),
    "a choice by the number of blocks": lambda x: x @ C if len(x) < 6 else x @ C @ C,
}


@pytest.mark.parametrize("name", APART)
def test_a_direction_that_keeps_blocks_apart(name):
    params, grads = normal({"w": (4, 6, 8)}, 0), [normal({"w": (4, 6, 8)}, 1)]
    options = {"blocks": stacked(0), "key": 1}
    lazy = with_magma(costly(APART[name]), lazy=True, **options)
    found = steps(lazy, params, grads)
    assert_same(found, steps(with_magma(costly(APART[name]), **options), params, grads))
    dropped = np.all(found[0][0]["w"] == 0, axis=(1, 2))
    assert 0 < dropped.sum() < 4, "coins of one kind test little"


@pytest.mark.parametrize("name", MIXED)
def test_a_direction_that_mixes_blocks_is_refused(name):
    params = normal({"w": (4, 6, 8)}, 0)
    with pytest.raises(ValueError, match=r"lazy: .*'w'.*lazy=False"):
        with_magma(costly(MIXED[name]), lazy=True, blocks=stacked(0)).init(params)
    with_magma(costly(MIXED[name]), lazy=True).init(params)  # The leaf as one block is fine.


def in_float64(x):
    with jax.enable_x64(True):
        return (x.astype(jnp.float64) @ C.astype(jnp.float64)).astype(jnp.float32)


def by_the_shorter_side(x):
    axis = 0 if x.shape[0] <= x.shape[1] else 1
    scales = jnp.sum(x * x, axis)
    return x @ C * jax.lax.broadcast_in_dim(scales, x.shape, (1 - axis,))


@pytest.mark.parametrize(
    ("direction", "shape", "blocks"),
    [
        (
            lambda x: jax.nn.softmax(x.reshape(2, -1), 0).reshape(x.shape) @ C,
            (2, 6, 8),
            stacked(0),
        ),
        (lambda x: swap(x @ C), (8, 8), "row"),
        (lambda x: jnp.swapaxes(x @ C, 0, 1), (4, 4, 8), stacked(0)),
        (by_the_shorter_side, (8, 8), "row"),
        (lambda x: jnp.round(x.reshape(-1, 64)).reshape(x.shape) @ C, (4, 6, 8), stacked(0)),
    ],
    ids=["over a fixed number of rows", "transposed", "swapped", "by shape", "tiles of 64"],
)
def test_sizes_that_happen_to_agree_do_not_hide_that_blocks_mix(direction, shape, blocks):
    params = normal({"w": shape}, 0)
    with pytest.raises(ValueError, match="lazy: the base's direction of 'w' mixes the blocks"):
        with_magma(costly(direction), lazy=True, blocks=blocks).init(params)
    with_magma(costly(direction), lazy=True).init(params)


def only_four(x):
    chex.assert_shape(x, (4, 6, 8))
    return x @ C


@pytest.mark.parametrize(
    ("direction", "said"),
    [
        (lambda x: x @ C * {(4, 6, 8): 2.0}[x.shape], "KeyError: "),
        (only_four, "AssertionError: .*but expected"),
        (lambda x: x @ C * jnp.ones((4, 1, 1)), "TypeError: mul got incompatible shapes"),
    ],
)
def test_a_base_for_one_number_of_blocks_is_refused_by_leaf(direction, said):
    params = normal({"a": (4, 5, 8), "z": (4, 6, 8)}, 0)

    def chosen(x):
        return direction(x) if x.shape[1] == 6 else x @ C

    with pytest.raises(ValueError, match=f"direction of one block of 'z'.* it raises {said}"):
        with_magma(costly(chosen), lazy=True, blocks=stacked(0)).init(params)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 2, 4, 4), (3, 1, 4, 5)])
@pytest.mark.parametrize(
    "direction",
    [
        lambda x: x @ swap(x) @ x,
        lambda x: jax.vmap(lambda a: a @ a.T @ a)(x.reshape(-1, *x.shape[2:])).reshape(x.shape),
    ],
)
def test_two_axes_of_blocks(shape, direction):
    params, grads = normal({"w": shape}, 0), [normal({"w": shape}, 1)]
    options = {"blocks": stacked((0, 1)), "key": 2}
    found = steps(with_magma(costly(direction), lazy=True, **options), params, grads)
    assert_same(found, steps(with_magma(costly(direction), **options), params, grads))


def test_two_axes_of_blocks_in_another_order_are_refused():
    def direction(x):
        swapped = jnp.swapaxes(x, 0, 1)
        return (swapped.reshape(-1, *x.shape[2:]) @ C[:5, :5]).reshape(x.shape)

    params = normal({"w": (2, 2, 4, 5)}, 0)
    with pytest.raises(ValueError, match="mixes the blocks"):
        with_magma(costly(direction), lazy=True, blocks=stacked((0, 1))).init(params)


def test_64_bit_numbers_of_a_base_alone_are_refused():
    """JAX would compute blocks of them together in 32 bits."""
    params = normal({"w": (4, 6, 8)}, 0)
    with pytest.raises(ValueError, match=r"'w' mixes .*\(in 64-bit numbers inside enable_x64\)"):
        with_magma(costly(in_float64), lazy=True, blocks=stacked(0)).init(params)
    tx = with_magma(costly(in_float64), lazy=True)
    assert_same(*(steps(t, params, [params]) for t in (tx, with_magma(costly(in_float64)))))
    with jax.enable_x64(True):
        with_magma(costly(in_float64), lazy=True, blocks=stacked(0)).init(params)


def with_step(direction):
    """A base whose directions depend on the step's number."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda g: direction(g, state), updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def third(n):
    return np.float32(1 / (3 + n))


SHARED = {
    "noise of a key that has no batches": lambda x, n: (
        x @ jax.random.normal(jax.random.fold_in(jax.random.key(0, impl="rbg"), n), (8, 8))
    ),
    "a branch": lambda x, n: jax.lax.cond(
        n < 1, lambda x: x @ C, lambda x: jnp.linalg.svd(x)[2], x
    ),
    "a number from Python": lambda x, n: (
        x @ C * jax.pure_callback(third, jax.ShapeDtypeStruct((), jnp.float32), n)
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_blocks_share_is_computed_once_and_as_without_lazy(name):
    params, base = normal({"w": (7, 8, 8)}, 0), with_step(SHARED[name])
    options = {"blocks": stacked(0), "survival_prob": 0.9}
    lazy, dense = (with_skip_update(base, lazy=lazy, **options) for lazy in (True, False))
    assert_same(*(steps(tx, params, [params] * 2) for tx in (lazy, dense)))
    if name == "a branch":  # Not both of its sides.
        text = jax.jit(lazy.update).lower(params, lazy.init(params), params).as_text()
        assert text.count("stablehlo.case") == 1


# -------------------------------------------------------------------------------------------
# Any chain of steps: refused, or the run without lazy.


def other_shape(x, axis, k):
    """`x` with an axis split in k and the rest, or merged with the next, or of k rows in all."""
    if k == 1:
        merged = (-1,) if axis == x.ndim - 1 else (x.shape[axis] * x.shape[axis + 1],)
        return x.reshape(*x.shape[:axis], *merged, *x.shape[axis + 2 :])
    if x.shape[axis] % k == 0:
        return x.reshape(*x.shape[:axis], k, -1, *x.shape[axis + 1 :])
    return x.reshape(k, -1) if x.size % k == 0 else x


def by_shape(x, axis, k):
    """The sum over the shorter of two axes."""
    del k
    return x * (1 + jnp.sum(x, int(np.argmin(x.shape[axis : axis + 2])) + axis, keepdims=True)) / 4


def numbered(x, axis, k):
    """Another number for each place along an axis."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return x * np.linspace(0.5, k, x.shape[axis], dtype=np.float32).reshape(shape)


def looped(x, axis, k):
    return jax.lax.fori_loop(0, k, lambda _, y: jnp.tanh(y + jnp.cumsum(y, axis)), x)


def product(x, axis, k):
    """Times a matrix that depends on the last axis alone."""
    del axis
    size = x.shape[-1]
    return x @ np.random.default_rng(k).normal(size=(size, size)).astype(np.float32)


STEPS = {
    "other shape": other_shape,
    "by shape": by_shape,
    "numbered": numbered,
    "looped": looped,
    "product": product,
    "moved": lambda x, axis, k: jnp.swapaxes(x, axis, k % x.ndim),
    "softmax": lambda x, axis, k: k * jax.nn.softmax(x, axis),
    "turned": lambda x, axis, k: jnp.flip(x, axis),
    "norm": lambda x, axis, k: x / (k + jnp.abs(x).sum(axis, keepdims=True)),
    "itself": lambda x, axis, k: x @ swap(x) @ x / 8 if x.ndim > 1 else x,
}
CHAINS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3), st.integers(1, 3)), max_size=4
)


def chain(steps):
    def direction(x):
        for name, axis, k in steps:
            x = STEPS[name](x, axis % x.ndim, k)
        return x

    return direction


def of_chains(kept, beyond):
    """A base whose state is one chain of the gradient, and whose direction is another of that."""

    def update(updates, state, params=None):
        del state, params
        new = jax.tree.map(chain(kept), updates)
        made = jax.tree.map(
            lambda g, x: product(chain(beyond)(x).reshape(g.shape), 0, 9), updates, new
        )
        return made, new

    return optax.GradientTransformation(lambda params: jax.tree.map(chain(kept), params), update)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.sampled_from([2, 4, 6, 8]), min_size=2, max_size=3),
    axes=st.sampled_from([(0,), (1,), (0, 1)]),
    kept=CHAINS,
    beyond=CHAINS,
)
def test_any_steps_are_refused_or_the_run_without_lazy(shape, axes, kept, beyond):
    params, base = normal({"w": tuple(shape)}, 0), of_chains(kept, beyond)
    options = {"blocks": stacked(axes), "survival_prob": 0.7}
    lazy, dense = (with_magma(base, lazy=lazy, **options) for lazy in (True, False))
    try:
        lazy.init(params)
    except ValueError as error:
        assert str(error).startswith("lazy: ")
        return
    assert_same(*(steps(tx, params, [params]) for tx in (lazy, dense)), atol=1e-4)
