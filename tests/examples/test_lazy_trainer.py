"""--lazy of the trainers: the same optimizer, without the directions of dropped blocks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainers import refusal

from examples.kit.optimizers import OptimizerConfig, assemble, describe
from examples.llama import train as llama
from examples.nanomoe import train as nanomoe
from magma_optax import stacked

SHAPES = {
    "layers": {"self_attn": {"q_proj": (3, 8, 8)}, "mlp": {"up_proj": (3, 8, 12)}},
    "embed": (16, 8),
}


def normal(seed):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("masking", ["magma", "skip"])
def test_it_changes_no_update(masking):
    params, grads = normal(0), normal(1)
    updates, texts = {}, {}
    for lazy in (False, True):
        config = OptimizerConfig(
            "muon", 1e-2, steps=10, warmup=0, masking=masking, clip=1.0, weight_decay=0.1, lazy=lazy
        )
        decays = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
        tx = assemble(config, stacked(0), decays)
        step = jax.jit(tx.update).lower(grads, tx.init(params), params)
        texts[lazy] = step.as_text()
        told = describe(config, stacked(0), params)
        assert ("a dropped block's direction is not computed" in told) == lazy
        updates[lazy] = step.compile()(grads, tx.init(params), params)[0]
    chex.assert_trees_all_close(updates[True], updates[False], rtol=1e-4, atol=1e-6)
    assert any((x == 0).all() for x in updates[True]["layers"]["mlp"]["up_proj"])
    loops = {lazy: text.count("stablehlo.while") for lazy, text in texts.items()}
    assert loops[True] > loops[False]


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (llama.main, "--lazy True needs --magma or --skip-update, and does nothing without"),
        (nanomoe.main, "--lazy True needs --magma, and does nothing without"),
    ],
)
def test_alone_it_is_refused(capsys, main, message):
    assert message in refusal(capsys, main, ["--lazy"])
