"""Trees of every make: odd leaves, odd containers, many leaves."""

import dataclasses
from typing import Any, NamedTuple

import chex
import equinox as eqx
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_bases import FORMS
from flax import nnx

from magma_optax import MagmaState


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


@jax.tree_util.register_pytree_node_class
class Custom:
    """A node without names for its children."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def one():
    return jnp.linspace(0.5, 1.0, 6).reshape(2, 3)


TREES = {
    "array": lambda: one(),
    "dict": lambda: {"b": one(), "a": one()},
    "list": lambda: [one(), one()],
    "tuple": lambda: (one(), (one(),)),
    "namedtuple": lambda: Pair(one(), {"x": one()}),
    "dataclass": lambda: Layer(one(), jnp.ones(3)),
    "custom node": lambda: {"x": Custom(one(), one())},
    "frozen dict": lambda: flax.core.freeze({"layer": {"kernel": one()}}),
    "int keys": lambda: {0: one(), 10: one(), 2: one()},
    "0-d": lambda: {"scale": jnp.ones(()), "w": one()},
    "size 0": lambda: {"empty": jnp.ones((0, 3)), "w": one()},
    "None": lambda: {"none": None, "w": one()},
    "MaskedNode": lambda: {"masked": optax.MaskedNode(), "w": one()},
    "empty containers": lambda: {"list": [], "dict": {}, "tuple": (), "w": one()},
    "linen boxes": lambda: {"k": nn.Partitioned(one(), names=("x", None)), "w": one()},
    "mixed floats": lambda: {
        "f16": one().astype(jnp.float16),
        "bf16": one().astype(jnp.bfloat16),
        "f32": one(),
        "c64": one().astype(jnp.complex64),
    },
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (form, name)
        for form in FORMS
        for name in TREES  # SkipUpdate has no tree of its own beside the updates.
        if form != "skip_update" or name in ("array", "namedtuple", "None", "mixed floats")
    ],
)
def test_containers_come_back_and_every_float_leaf_is_a_block(form, name):
    form, params = FORMS[form], TREES[name]()
    tx = form.wrap(optax.sgd(0.1, momentum=0.9), key=2)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(params, state, params, grad=params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    # Fates differ between leaves and none is half dropped.
    for leaf in jax.tree.leaves(updates):
        assert not np.any(leaf) or np.all(leaf)
    blocks = [leaf for leaf in jax.tree.leaves(params) if leaf.size]
    if form.name != "skip_update":
        assert len(jax.tree.leaves(form.state(state).alignment)) == len(blocks)


def test_integer_and_boolean_leaves_pass_through(form):
    params = {"w": one(), "ids": jnp.arange(3), "mask": jnp.array([True, False])}
    tx = form.link(key=2)
    updates, state = tx.update(params, tx.init(params), params, grad=params)
    chex.assert_trees_all_equal((updates["ids"], updates["mask"]), (params["ids"], params["mask"]))
    assert set(state.alignment) <= {"w"}


@pytest.mark.parametrize("base", [optax.sgd(0.1), optax.adam(0.1)])
def test_integers_whose_update_is_a_float_pass_through_too(form, base):
    params = {"w": one(), "ids": jnp.arange(3)}
    grads = {"w": one(), "ids": jnp.ones(3, jnp.int32)}
    expected, _ = base.update(grads, base.init(params), params)
    assert expected["ids"].dtype == jnp.float32
    for key in range(4):
        tx = form.wrap(base, key=key)
        updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
        chex.assert_trees_all_equal(updates["ids"], expected["ids"])


def test_where_sees_the_dtype_of_the_parameter(form):
    params = {"w": one(), "half": one().astype(jnp.bfloat16)}
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tx = form.link(key=2, where=lambda path, leaf: leaf.dtype == jnp.float32)
    updates, state = tx.update(grads, tx.init(params), params, grad=grads)
    chex.assert_trees_all_equal(updates["half"], grads["half"])
    assert set(state.alignment) <= {"w"}
    assert updates["w"].dtype == jnp.bfloat16


def test_float0_gradients_of_integer_parameters_pass_through(form):
    params = {"w": one(), "ids": jnp.arange(3)}
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
    assert grads["ids"].dtype == jax.dtypes.float0
    tx = form.link(key=2)
    updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
    assert updates["ids"] is grads["ids"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float64"])
def test_narrow_and_wide_floats(form, dtype):
    with jax.enable_x64(dtype == "float64"):
        params = {"w": jnp.ones((4, 4), dtype)}
        tx = form.link(key=2)
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(params, state, params, grad=params)
        assert updates["w"].dtype == dtype
        chex.assert_tree_all_finite(jax.tree.map(lambda x: x.astype(jnp.float32), updates))
        assert all(0.5 <= score < 0.63 for score in jax.tree.leaves(state.alignment))


def test_grad_in_another_container_is_matched_by_path(form):
    params = {"layer": {"kernel": one(), "bias": jnp.ones(3)}}
    containers = [
        flax.core.freeze(params),
        {"layer": Layer(**params["layer"])},
        nnx.State({"layer": {k: nnx.Param(v) for k, v in params["layer"].items()}}),
        {**params, "more": jnp.ones(2)},
    ]
    tx = form.link(key=2)
    state = tx.init(params)
    expected = tx.update(params, state, params, grad=params)
    for grad in containers:
        chex.assert_trees_all_equal(tx.update(params, state, params, grad=grad), expected)


def test_linen_boxes_name_leaves_as_the_bare_arrays_do(form):
    bare = {"dense": {"kernel": one()}}
    boxed = {"dense": {"kernel": nn.Partitioned(one(), names=("x", None))}}
    tx = form.link(key=2)
    state = tx.init(bare)
    expected, _ = tx.update(bare, state, bare, grad=bare)
    updates, _ = tx.update(boxed, tx.init(boxed), boxed, grad=boxed)
    chex.assert_trees_all_equal(nn.unbox(updates), expected)
    assert updates["dense"]["kernel"].names == ("x", None)
    if form.name != "skip_update":
        assert list(tx.init(boxed).alignment["dense"]) == ["kernel"]


def test_equinox_modules_with_other_leaves_filtered_out(form):
    model = eqx.nn.MLP(3, 2, 4, 1, activation=jax.nn.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = form.wrap(optax.adam(5e-2), key=2)
    state = tx.init(params)
    x = jax.random.normal(jax.random.key(1), (32, 3))

    @eqx.filter_jit
    def step(params, state):
        def loss(params):
            return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - x[:, :2]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, grad=grads)
        return eqx.apply_updates(params, updates), state, value

    values = []
    for _ in range(60):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < 0.6 * values[0]
    if form.name != "skip_update":
        assert "weight" in form.state(state).alignment["layers"]["0"]


def test_many_leaves(form):
    params = {f"layer_{n}": {"w": jnp.full((2, 2), 1.0 + n)} for n in range(128)}
    tx = form.link(key=2)
    updates, state = tx.update(params, tx.init(params), params, grad=params)
    alive = np.mean([bool(np.any(leaf)) for leaf in jax.tree.leaves(updates)])
    # 0.5 +- 5 standard deviations of 128 coins.
    assert abs(alive - 0.5) < 5 * 0.5 / np.sqrt(128)
    assert isinstance(state, MagmaState)
