"""What must stay true of the compiled step for it to be fast: kernels, draws, sums, buffers."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from magma_optax import magma, skip_update, with_magma
from magma_optax._blocks import paths

FORMS = {
    "adam": optax.with_extra_args_support(optax.adam(1e-3)),
    "skip_update": optax.chain(optax.adam(1e-3), skip_update()),
    "with_magma": with_magma(optax.adam(1e-3)),
    "magma": optax.chain(optax.adam(1e-3), magma()),
}
MASKED = [name for name in FORMS if name != "adam"]


def lower(name, leaves, shape=(48, 40)):
    """Lowers one donated update and its application, for leaves of one shape."""
    tx = FORMS[name]

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, grad=grads)
        return optax.apply_updates(params, updates), state

    params = {f"layer_{n}": jax.ShapeDtypeStruct(shape, jnp.float32) for n in range(leaves)}
    state = jax.eval_shape(tx.init, params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params)


def kernels(name, leaves):
    """Counts the different kernels that touch an array of the parameters' shape."""
    text = lower(name, leaves).compile().as_text()
    blocks = re.findall(r"^%(?:fused_computation|wrapped)\S* \(.*?^}", text, re.M | re.S)
    plain = {re.sub(r"%[\w.\-]+|, metadata=\{[^}]*\}", "%", block) for block in blocks}
    plain = {re.sub(r"\b[\w.\-]+: (?=\w+\[)", "", block) for block in plain}  # parameter names
    return sum("[48,40]" in block for block in plain)


@pytest.mark.parametrize("name", FORMS)
def test_leaves_of_one_shape_share_their_kernels(name):
    """Else XLA compiles a kernel a leaf: the compile time of 400 leaves is 17 times Adam's."""
    assert kernels(name, 12) == kernels(name, 5) > 0


@pytest.mark.parametrize("name", MASKED)
def test_one_draw_serves_all_leaves(name):
    def hashes(leaves):
        return lower(name, leaves).as_text().count("call @threefry2x32")

    assert hashes(12) == hashes(5) > 0


@pytest.mark.parametrize(("name", "count"), [("skip_update", 0), ("with_magma", 3), ("magma", 3)])
def test_a_leaf_is_summed_three_times(name, count):
    assert lower(name, 5).as_text().count("stablehlo.reduce(") == 5 * count


@pytest.mark.parametrize("name", FORMS)
def test_every_buffer_of_the_state_is_updated_in_place(name):
    lowered = lower(name, 3)
    ((params, state, _), _) = lowered.args_info
    given = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert given >= 9 * 4 * 48 * 40  # parameters and two moments, three leaves each
    assert lowered.compile().memory_analysis().alias_size_in_bytes == given


@pytest.mark.parametrize("name", ["magma", "with_magma", "skip_update"])
def test_an_update_names_each_tree_once(name, monkeypatch):
    """Naming walks every leaf in Python: the cost of an update outside jit."""
    made = {
        "magma": lambda: magma(),
        "with_magma": lambda: with_magma(optax.rmsprop(0.1)),
        "skip_update": lambda: skip_update(),
    }
    tx, params, grads = made[name](), {"w": jnp.ones((2, 3))}, {"w": jnp.ones((2, 3))}
    state = tx.init(params)
    _, state = tx.update(grads, state, params, grad=grads)  # Reads the base, once.
    named, name_once = [], paths.NamedTree.__init__

    def name_and_count(self, tree):
        named.append(tree)
        name_once(self, tree)

    monkeypatch.setattr(paths.NamedTree, "__init__", name_and_count)
    tx.update({"w": 2 * grads["w"]}, state, params, grad=grads)
    assert 3 <= len(named) <= 5
    assert len({id(tree) for tree in named}) == len(named)
