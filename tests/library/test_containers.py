"""Trees, dtypes and tools of other people: what bare SGD takes, Magma takes, or names the leaf."""

import copy
import dataclasses
from typing import Any, NamedTuple

import chex
import cloudpickle
import equinox as eqx
import flax
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_bases import FORMS
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from magma_optax import describe_masking, magma, skip_update, stacked, with_magma
from magma_optax.experimental.fused import fused_adam

W = jnp.ones((4, 3))
ALL = {
    "magma": magma,
    "skip_update": skip_update,
    "with_magma(sgd)": lambda **kw: with_magma(optax.sgd(0.1), **kw),
    "with_magma(adam)": lambda **kw: with_magma(optax.adam(0.1), **kw),
}
everywhere = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def steps(tx, params, grads, count=3, state=None):
    state = tx.init(params) if state is None else state
    for _ in range(count):
        updates, state = tx.update(grads, state, params, grad=grads)
    return updates, state


def blocks(tx, params):
    """Paths of the masked leaves, in order."""
    return sorted(
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(tx.init(params).alignment)
    )


# ---------------------------------------------------------------------------------------------
# Copies of a transformation


def send(tx):
    return cloudpickle.loads(cloudpickle.dumps(tx))


@pytest.mark.parametrize("copied", [send, copy.deepcopy])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@everywhere
def test_transformations_can_be_sent_to_another_process(make, copied, used):
    """As Ray, Dask, joblib and submitit do; a state read before must not go along."""
    tx = make(where=lambda path, leaf: "w" in path, blocks=stacked(0), key=jax.random.key(3))
    params = {"w": W, "b": jnp.ones(3)}
    expected = steps(tx, params, params) if used else None
    again = copied(tx)
    expected = expected or steps(tx, params, params)
    chex.assert_trees_all_equal(steps(again, params, params), expected)


def test_the_fused_optimizer_can_be_sent_to_another_process():
    optimizer = fused_adam(optax.constant_schedule(0.1))
    again = send(optimizer)
    state = optimizer.init({"w": W})
    chex.assert_trees_all_equal(
        again.update_and_apply({"w": W}, state, {"w": W}),
        optimizer.update_and_apply({"w": W}, state, {"w": W}),
    )


# ---------------------------------------------------------------------------------------------
# Names


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    query: Any
    key: Any
    value: Any


class Tuple(NamedTuple):
    query: Any
    key: Any
    value: Any


class Module(eqx.Module):
    query: Any
    key: Any
    value: Any


@flax.struct.dataclass
class FlaxDataclass:
    query: Any
    key: Any
    value: Any


class FlaxNode(flax.struct.PyTreeNode):
    query: Any
    key: Any
    value: Any


THREE = ["attn/key", "attn/query", "attn/value"]


@pytest.mark.parametrize("container", [Plain, Tuple, Module, FlaxDataclass, FlaxNode])
def test_a_field_called_value_keeps_its_name(container):
    params = {"attn": container(W, W, W)}
    assert blocks(magma(), params) == THREE
    assert blocks(magma(where=lambda path, leaf: path == "attn/value"), params) == ["attn/value"]


@pytest.mark.parametrize(
    "box",
    [
        nnx.Param,
        nnx.Variable,
        lambda x: nn.Partitioned(x, (None, None)),
        lambda x: nn.LogicallyPartitioned(x, (None, None)),
    ],
    ids=["Param", "Variable", "Partitioned", "LogicallyPartitioned"],
)
def test_the_boxes_of_flax_are_not_part_of_a_name(box):
    """Nor are they around a container, whose own field ``value`` keeps its name."""
    params = {"attn": {"query": box(W), "key": box(W), "value": box(W)}}
    assert blocks(magma(), params) == THREE
    for container in (Plain, FlaxNode):
        params = {"attn": container(box(W), box(W), box(W))}
        assert blocks(magma(), params) == THREE
        assert blocks(magma(), {"attn": box(container(W, W, W))}) == [
            f"attn/value/{name}" for name in ("key", "query", "value")
        ]


def test_an_nnx_state_names_leaves_as_its_pure_dict_does():
    class Value(nnx.Module):
        def __init__(self):
            self.value = nnx.Param(W)
            self.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

    state = nnx.state(Value())
    names = ["linear/bias", "linear/kernel", "value"]
    assert blocks(magma(), state) == blocks(magma(), nnx.to_pure_dict(state)) == names


# ---------------------------------------------------------------------------------------------
# Serializers


@pytest.mark.parametrize("separator", ["/", ".", "::", None])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_state_survives_flattening_to_joined_keys(form, separator):
    """T5X, EasyLM and safetensors join keys, and split them again."""
    params = {"layers": {"0": {"mlp": {"kernel": W}}, "1": {"mlp": {"kernel": W}}}, "norm": W}
    tx = form.wrap(optax.adam(0.1), where=lambda path, leaf: "mlp" in path)
    _, state = steps(tx, params, params)
    nested = flax.serialization.to_state_dict(state)
    flat = flatten_dict(nested, sep=separator, keep_empty_nodes=True)
    restored = flax.serialization.from_state_dict(
        tx.init(params), unflatten_dict(flat, sep=separator)
    )
    chex.assert_trees_all_equal(restored, state)


def test_scores_lie_where_the_parameters_do():
    """Names with a slash are split; only a name that goes on from another leaf's stays joined."""
    params = {"layers": [{"w": W}, {"w": W}], "linear/~/out": {"b": W}, "a": W, "a/b": {"c": W}}
    scores = magma().init(params).alignment
    assert jax.tree.map(jnp.shape, scores) == {
        "layers": {"0": {"w": ()}, "1": {"w": ()}},
        "linear": {"~": {"out": {"b": ()}}},
        "a": (),
        "a/b/c": (),
    }
    _, state = steps(magma(), params, params)
    assert all(float(s) != 0.5 for s in jax.tree.leaves(state.alignment))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_states_of_version_0_1_go_on(form):
    """Their scores were one dict, keyed by whole paths."""
    params = {"layers": {"0": {"w": W}, "1": {"w": W}}}
    tx = form.wrap(optax.adam(0.1))
    _, state = steps(tx, params, params)
    before = jax.tree.map(
        lambda node: (
            node._replace(alignment=flatten_dict(node.alignment, sep="/"))
            if type(node).__name__ == "MagmaState"
            else node
        ),
        state,
        is_leaf=lambda node: type(node).__name__ == "MagmaState",
    )
    ours, new = steps(tx, params, params, state=state)
    theirs, old = steps(tx, params, params, state=before)
    chex.assert_trees_all_equal(ours, theirs)
    chex.assert_trees_all_equal(jax.tree.leaves(new), jax.tree.leaves(old))
    assert form.state(old).alignment.keys() == form.state(before).alignment.keys()


# ---------------------------------------------------------------------------------------------
# Leaves that are missing, or no arrays


@pytest.mark.parametrize("frozen", [{"a": None, "b": None}, None], ids=["leaves", "whole"])
@pytest.mark.parametrize("base", [optax.sgd, optax.rmsprop])  # Not Adam: it refuses None itself.
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients_that_are_none_freeze_their_blocks(form, base, frozen):
    """Score and momentum wait; the others go on as if the frozen leaf had never been there."""
    if base is not optax.sgd and frozen is None:
        pytest.skip("RMSProp's own moments want a None per leaf")
    params = {"frozen": {"a": W, "b": W}, "train": W}
    tx = form.wrap(base(0.1))
    updates, state = steps(tx, params, params)
    before = form.state(state)
    updates, state = steps(tx, params, {"frozen": frozen, "train": W}, state=state)
    assert updates["frozen"] == frozen
    after = form.state(state)
    if before.alignment:
        chex.assert_trees_all_equal(after.alignment["frozen"], before.alignment["frozen"])
    if before.momentum is not None:
        chex.assert_trees_all_equal(after.momentum["frozen"], before.momentum["frozen"])
    alone = form.wrap(base(0.1))
    expected, _ = steps(alone, {"train": W}, {"train": W}, count=6)
    chex.assert_trees_all_equal(updates["train"], expected["train"])
    if base is optax.sgd:  # RMSProp drops its moments of a frozen leaf.
        steps(tx, params, params, state=state)  # Thawed.


@everywhere
def test_frozen_leaves_may_be_all_that_where_selects(make):
    if make is ALL["with_magma(adam)"]:
        pytest.skip("bare Adam refuses None")
    params = {"a": W, "b": W}
    tx = make(where=lambda path, leaf: path == "a")
    updates, state = steps(tx, params, {"a": None, "b": W})
    assert updates["a"] is None and int(optax.tree.get(state, "step")) == 3


@everywhere
def test_a_missing_gradient_that_is_not_none_is_refused(make):
    if make is skip_update:
        pytest.skip("keeps nothing by which it could tell")
    params = {"a": W, "b": W}
    with pytest.raises(ValueError, match="'b'"):
        steps(make(), params, {"a": W})


@pytest.mark.parametrize("leaf", [jax.nn.relu, "gelu", object()], ids=["function", "text", "other"])
@everywhere
def test_a_leaf_that_is_no_array_is_named_with_the_way_out(make, leaf):
    with pytest.raises(TypeError, match=r"'mlp/activation' is .* no array: .*eqx.filter"):
        make().init({"mlp": {"w": W, "activation": leaf}})
    with pytest.raises(TypeError, match="'mlp/activation'"):
        describe_masking({"mlp": {"w": W, "activation": leaf}})


def test_an_equinox_model_is_taken_once_filtered():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match="activation"):
        magma().init(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, _ = steps(magma(), params, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@everywhere
def test_leaves_of_one_name_are_refused_only_where_they_are_masked(make):
    params = {"a/b": W, "a": {"b": W}, "c": W}
    with pytest.raises(ValueError, match="two leaves have the same path 'a/b'"):
        make().init(params)
    mask = {"a/b": False, "a": {"b": False}, "c": True}
    for where in (mask, lambda path, leaf: path == "c"):
        updates, _ = steps(make(where=where), params, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_integer_parameters_on_the_link_without_params():
    """A base turns their gradients into floats; their places in the momentum tell."""
    params = {"n": 1, "w": W}
    tx = optax.chain(optax.adam(1e-3), magma(survival_prob=1.0, damping=False))
    bare, _ = optax.adam(1e-3).update(params, optax.adam(1e-3).init(params))
    with pytest.warns(UserWarning, match="estimated"):
        updates, _ = tx.update(params, tx.init(params))
    chex.assert_trees_all_equal(updates, bare)
    updates, state = tx.update(params, tx.init(params), grad=params)
    chex.assert_trees_all_equal(updates, bare)
    assert list(state[1].alignment) == ["w"]


# ---------------------------------------------------------------------------------------------
# Dtypes


@pytest.mark.parametrize(
    "dtype", "float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn int32".split()
)
@everywhere
def test_strict_promotion_takes_every_dtype_that_sgd_takes(make, dtype):
    """And the updates are those of standard promotion, bit for bit."""

    def run():
        params = {"w": jnp.asarray([[1, -2], [3, 4]], dtype), "v": jnp.ones(2)}
        tx = make(rescale=True) if make is magma else make()
        update = jax.jit(lambda g, s, p: tx.update(g, s, p, grad=g))
        state = tx.init(params)
        for _ in range(3):
            updates, state = update(params, state, params)
        assert updates["w"].dtype == dtype
        return jax.device_get((updates, state))

    with jax.enable_x64("64" in dtype or "128" in dtype):
        base = {ALL["with_magma(sgd)"]: optax.sgd, ALL["with_magma(adam)"]: optax.adam}.get(make)
        if base and not takes_strictly(base(0.1), jnp.zeros((2, 2), dtype)):
            pytest.skip("the bare base does not take it")
        standard = run()
        with jax.numpy_dtype_promotion("strict"):
            strict = run()
    for a, b in zip(jax.tree.leaves(strict), jax.tree.leaves(standard), strict=True):
        np.testing.assert_array_equal(a, b)


def takes_strictly(tx, w):
    with jax.numpy_dtype_promotion("strict"):
        try:
            tx.update(w, tx.init(w), w)
        except ValueError as error:  # jax 0.10.0 has no public name for it
            assert type(error).__name__ == "TypePromotionError"
            return False
    return True


@pytest.mark.parametrize("momentum_dtype", ["bfloat16", "float32"])
def test_strict_promotion_takes_momenta_and_numbers_of_another_dtype(momentum_dtype):
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        # One dtype: Optax's own `inject_hyperparams` refuses several.
        params = {"w": W.astype("float64"), "v": W.astype("float64")}
        tx = optax.inject_hyperparams(magma, static_args=("momentum_dtype",))(
            survival_prob=np.float64(0.5), b1=0.8, momentum_dtype=momentum_dtype
        )
        updates, _ = steps(tx, params, params)
    chex.assert_trees_all_equal_dtypes(updates, params)
