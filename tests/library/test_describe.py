"""What `describe_masking` says is what the transformations mask."""

import jax
import jax.numpy as jnp
import optax
import pytest

from magma_optax import attention_and_mlp, describe_masking, skip_update, stacked

LAYER = {
    "self_attn": {"q_proj": {"kernel": jnp.ones((4, 4))}},
    "mlp": {"up_proj": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}},
    "norm": {"scale": jnp.ones(4)},
}
PARAMS = {"layers": [LAYER] * 12, "embed": jnp.ones((50, 4)), "steps": jnp.ones((), jnp.int32)}


def test_the_printed_table():
    assert str(describe_masking(PARAMS, where=attention_and_mlp)).splitlines() == [
        "masked: 24 of 50 leaves in 24 blocks, 62.5 % of 921 parameters",
        "    12 x (4, 8)               1 block each       layers/*/mlp/up_proj/kernel",
        "    12 x (4, 4)               1 block each       layers/*/self_attn/q_proj/kernel",
        "left out:",
        "     1 x (50, 4)                                 embed",
        "    12 x (8,)                                    layers/*/mlp/up_proj/bias",
        "    12 x (4,)                                    layers/*/norm/scale",
        "     1 x ()                                      steps",
    ]


def test_leaves_that_differ_by_more_than_a_layer_stand_apart():
    params = {"w1": jnp.ones((2, 2)), "w2": jnp.ones((2, 2)), "Dense_0": {"a": jnp.ones((2, 3))}}
    params["Dense_1"] = {"a": jnp.ones((3, 2))}
    rows = str(describe_masking(params)).splitlines()[1:]
    assert [row.split()[-1] for row in rows] == ["Dense_0/a", "Dense_1/a", "w1", "w2", "out:"]


@pytest.mark.parametrize("blocks", ["leaf", "row", "element", stacked(0), lambda path, leaf: ()])
@pytest.mark.parametrize("where", [None, attention_and_mlp, lambda path, leaf: "kernel" in path])
def test_says_what_is_masked(where, blocks):
    params = PARAMS | {"layers": [LAYER] * 2}
    abstract = jax.eval_shape(lambda: params)
    masking = describe_masking(abstract, where=where, blocks=blocks)
    tx = skip_update(1e-6, where=where, blocks=blocks)
    updates, _ = jax.jit(tx.update)(params, tx.init(params))
    for path, update in jax.tree.leaves_with_path(updates):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert (name in masking.masked) == (not update.any()) == (name not in masking.left_out)
        assert {**masking.masked, **masking.left_out}[name] == update.shape
    assert masking.blocks.keys() == masking.masked.keys()


def test_counts_blocks():
    masking = describe_masking(PARAMS, where=attention_and_mlp, blocks="row")
    assert masking.blocks["layers/0/mlp/up_proj/kernel"] == 4
    assert "in 96 blocks" in masking.summary
    one = describe_masking({"w": jnp.ones((2, 2))})
    assert one.summary == "masked: 1 of 1 leaves in 1 block, 100.0 % of 4 parameters"


def test_leaves_of_one_path_that_are_left_out_are_counted_each():
    square = jnp.ones((2, 2))
    twins = {"a/b": square, "a": {"b": jnp.ones((4, 4))}, "c": square}
    masking = describe_masking(twins, where=lambda path, leaf: path == "c")
    assert masking.summary == "masked: 1 of 3 leaves in 1 block, 16.7 % of 24 parameters"


def test_refuses_what_init_refuses():
    with pytest.raises(ValueError, match="selects none"):
        describe_masking(PARAMS, where=lambda path, leaf: False)
    with pytest.raises(ValueError, match="out of range"):
        describe_masking(PARAMS, blocks=stacked(3))
    with pytest.raises(TypeError, match="two arguments"):
        describe_masking(PARAMS, where=lambda path: True)
    nothing = "masked: 0 of 0 leaves in 0 blocks, 0.0 % of 0 parameters"
    assert describe_masking({}).summary == nothing


def test_a_mask_of_optax_is_taken():
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, PARAMS)
    assert len(describe_masking(PARAMS, where=mask).masked) == 25
    assert isinstance(optax.masked(skip_update(), mask).init(PARAMS), optax.MaskedState)
