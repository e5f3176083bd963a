"""Blocks: granularities, stacked leaves, `where`."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from magma_optax import attention_and_mlp, magma, skip_update, stacked, with_magma

SHAPES = {"matrix": (3, 4), "cube": (2, 3, 4), "vector": (5,), "scalar": ()}
PARAMS = {name: jnp.ones(shape) for name, shape in SHAPES.items()}


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("blocks", "shapes"),
    [
        ("leaf", {"matrix": (), "cube": (), "vector": (), "scalar": ()}),
        ("row", {"matrix": (3,), "cube": (2, 3), "vector": (), "scalar": ()}),
        ("column", {"matrix": (4,), "cube": (2, 4), "vector": (5,), "scalar": ()}),
        ("element", SHAPES),
        (
            lambda path, leaf: 1 if path == "matrix" else (2, 0) if len(leaf.shape) == 3 else (),
            {"matrix": (4,), "cube": (2, 4), "vector": (), "scalar": ()},
        ),
        (
            lambda path, leaf: range(-1, 0) if leaf.shape else (),
            {"matrix": (4,), "cube": (4,), "vector": (5,), "scalar": ()},
        ),
    ],
    ids=["leaf", "row", "column", "element", "axes", "negative"],
)
def test_scores_and_masks_have_the_shape_of_the_blocks(blocks, shapes):
    tx = magma(blocks=blocks)
    state = tx.init(PARAMS)
    assert jax.tree.map(jnp.shape, state.alignment) == shapes
    updates, state = jax.jit(tx.update)(PARAMS, state, grad=PARAMS)
    assert jax.tree.map(jnp.shape, state.alignment) == shapes
    # Within a block all elements share one fate and one score.
    axes = {"leaf": None, "row": -1, "column": -2, "element": ()}
    if blocks in ("leaf", "row", "column"):
        for path in ("matrix", "cube"):
            assert (np.ptp(updates[path], axis=axes[blocks]) == 0).all()


def test_stacked_layers_score_as_the_same_layers_unrolled():
    """A coin and a score a layer, however the layers are stored."""
    layers = {f"layer_{n}": normal(n, (4, 6)) * 10.0**n for n in range(3)}  # scales differ wildly
    grads = [
        {name: normal(9 * step + n, (4, 6)) * 10.0**n for n, name in enumerate(layers)}
        for step in range(4)
    ]
    expected, _ = run(magma(), layers, grads)
    for axis in (0, 1, -1):
        stacks = [{"layers": jnp.stack(list(tree.values()), axis)} for tree in [layers, *grads]]
        actual, updates = run(magma(blocks=stacked(axis)), stacks[0], stacks[1:])
        score = actual.alignment["layers"]
        np.testing.assert_allclose(score, list(expected.alignment.values()), rtol=1e-6)
        alive = [
            [bool(np.any(layer)) for layer in np.moveaxis(u["layers"], axis, 0)] for u in updates
        ]
        assert any(len(set(step)) == 2 for step in alive), "layers have coins of their own"
    # One block for the whole stack: the largest layer decides for all.
    actual, _ = run(magma(), stacks[0], stacks[1:])
    np.testing.assert_allclose(actual.alignment["layers"], expected.alignment["layer_2"], rtol=1e-3)


def run(tx, params, grads):
    state, step, updates = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        update, state = step(g, state, params, grad=g)
        updates.append(update)
    return state, updates


def test_stacked_experts_of_stacked_layers():
    params = {"experts": jnp.ones((3, 4, 5, 6))}
    tx = skip_update(blocks=stacked((0, 1)))
    updates, _ = tx.update(params, tx.init(params))
    per_block = updates["experts"].reshape(12, -1)
    assert set(np.unique(per_block)) == {0.0, 2.0}
    assert (jnp.ptp(per_block, axis=1) == 0).all()
    # Transposed axes index the same blocks.
    swapped = skip_update(blocks=stacked((1, 0)))
    chex.assert_trees_all_equal(swapped.update(params, swapped.init(params))[0], updates)


MODEL = {
    "mlp": {"up": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "norm": jnp.ones(3),
    "ids": jnp.arange(3),
    "empty": jnp.ones((0, 4)),
}


class TestWhere:
    @pytest.mark.parametrize("factory", [magma, skip_update])
    def test_leaves_outside_are_the_same_arrays(self, factory):
        tx = factory(where=attention_and_mlp)
        updates, state = tx.update(MODEL, tx.init(MODEL), grad=MODEL)
        for name in ("norm", "ids", "empty"):
            assert updates[name] is MODEL[name]
        assert updates["mlp"]["bias"] is MODEL["mlp"]["bias"]
        assert [*state.alignment] == ([] if factory is skip_update else ["mlp"])
        assert [*state.alignment.get("mlp", {})] == ([] if factory is skip_update else ["up"])

    @pytest.mark.parametrize(
        "where",
        [
            attention_and_mlp,
            lambda path, leaf: leaf.shape == (2, 3) and leaf.dtype == jnp.float32,
            {"mlp": {"up": True, "bias": False}, "norm": False, "ids": True, "empty": True},
            {"mlp": {"up": np.True_, "bias": np.False_}, "norm": False},
        ],
        ids=["predicate", "shape", "tree", "only floats need an entry"],
    )
    def test_forms(self, where):
        assert magma(where=where).init(MODEL).alignment == {"mlp": {"up": 0.5}}

    def test_a_module_of_bools_is_a_tree_though_it_can_be_called(self):
        module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
        where = jax.tree.map(lambda leaf: leaf.ndim > 1, module)
        assert callable(where)
        assert list(magma(where=where).init(module).alignment) == ["weight"]

    def test_prefix_tree(self):
        state = magma(where={"mlp": True, "norm": False}).init(MODEL)
        assert state.alignment == {"mlp": {"bias": 0.5, "up": 0.5}}

    def test_no_where_masks_all_floats(self):
        state = magma().init(MODEL)
        assert state.alignment == {"mlp": {"bias": 0.5, "up": 0.5}, "norm": 0.5}

    def test_trees_without_blocks_pass_through(self):
        for tx in (magma(), with_magma(optax.identity()), skip_update()):
            for params in ({}, None, (), {"ids": jnp.arange(3), "none": None}):
                state = tx.init(params)
                updates, after = tx.update(params, state)
                chex.assert_trees_all_equal(updates, params)
                assert jax.tree.structure(after) == jax.tree.structure(state)
