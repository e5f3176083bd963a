"""lazy=True on SOAP: its bases move for every block, and no dropped block's update is rotated."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from costly import products

from examples.kit.soap import scale_by_soap
from magma_optax import stacked, with_magma, with_skip_update

SEPARATE = {f"layers/{i}/mlp/up": (6, 4) for i in range(3)} | {"layers/0/norm": (6,)}
STACKED = {"layers/mlp/up": (3, 6, 4), "layers/norm": (3, 6)}
LAYOUTS = {"separate": (SEPARATE, "leaf"), "stacked": (STACKED, stacked(0))}


def normal(shapes, seed):
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.normal(size=s), jnp.float32) for path, s in shapes.items()}


def soap():
    """SOAP on matrices and Adam on the rest."""

    def kinds(params):
        return {path: "matrix" if path.endswith("up") else "other" for path in params}

    return optax.partition(
        {"matrix": scale_by_soap(interval=2), "other": optax.scale_by_adam()}, kinds
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrapper", [with_magma, with_skip_update])
def test_the_run_is_that_without_lazy(wrapper, layout):
    """Six steps: SOAP's bases are made in the first and move in the third and the fifth."""
    shapes, blocks = LAYOUTS[layout]
    params, seen = normal(shapes, 0), {}
    for lazy in (True, False):
        tx = wrapper(soap(), where=lambda path, x: "up" in path, blocks=blocks, lazy=lazy)
        step, state = jax.jit(tx.update), tx.init(params)
        seen[lazy] = []
        for n in range(6):
            updates, state = step(normal(shapes, n), state, params)
            seen[lazy].append((updates, state))
    chex.assert_trees_all_close(seen[True], seen[False], rtol=1e-4, atol=1e-5)
    matrices = [
        matrix
        for updates, _ in seen[True][1:]
        for path, x in updates.items()
        if "up" in path
        for matrix in x.reshape(-1, 6, 4)
    ]
    assert 0 < np.mean([bool(matrix.any()) for matrix in matrices]) < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_left_out(layout):
    shapes, blocks = LAYOUTS[layout]
    params, counts = normal(shapes, 0), {}
    for lazy in (True, False):
        tx = with_skip_update(soap(), where=lambda path, x: "up" in path, blocks=blocks, lazy=lazy)
        counts[lazy] = products(jax.jit(tx.update), params, tx.init(params), params)
    assert counts[True]["always"] < counts[False]["always"]
    assert counts[True]["by the coins"] > counts[False]["by the coins"]
