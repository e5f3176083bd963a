"""What holds for every form over every base."""

import chex
import jax
import numpy as np
import optax
import pytest
from contract_bases import BASES, PARAMS, bare_steps, scan_steps

from magma_optax import summarize

STEPS = 4


def by_path(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_masks_scales_and_leaves_the_base_alone(form, base_name, base):
    """Blocks are exactly 0 or s times the base's update; the base's state moves as without Magma.

    Under `lax.scan`, so that structure and dtypes of the state are constant too.
    """
    updates, states = scan_steps(form.wrap(base, key=1), STEPS)
    expected, base_states = bare_steps(base_name, STEPS)
    # Fused differently, the base's own arithmetic may differ in the last bits.
    chex.assert_trees_all_close(form.base_state(states), base_states, rtol=2e-5, atol=1e-7)
    scores = by_path(form.state(states).alignment) or dict.fromkeys(
        by_path(PARAMS), np.full(STEPS, 2.0)
    )
    alive = []
    for path, update in by_path(updates).items():
        for n in range(STEPS):
            alive.append(bool(np.any(update[n])))
            if alive[-1]:
                want = scores[path][n] * by_path(expected)[path][n]
                chex.assert_trees_all_close(update[n], want, rtol=3e-4, atol=1e-7)
    assert 4 <= sum(alive) <= 12, "16 coins of probability 1/2"


@pytest.mark.parametrize(
    ("form", "base_name"),
    [
        *(("with_magma", base) for base in BASES),
        # The links see no more of a base than its updates: one that keeps nothing, one that does.
        *((link, base) for link in ("magma", "skip_update") for base in ("sgd", "schedule_free")),
    ],
    indirect=True,
)
def test_p_one_without_damping_is_the_base(form, base_name, base):
    kwargs = {} if form.name == "skip_update" else {"damping": False}
    updates, _ = scan_steps(form.wrap(base, survival_prob=1.0, **kwargs), STEPS)
    # Not bit for bit: XLA fuses the base otherwise, and Muon's iterations amplify the rounding.
    atol = 1e-6 if base_name == "muon" else 1e-7
    chex.assert_trees_all_close(updates, bare_steps(base_name, STEPS)[0], rtol=2e-5, atol=atol)


def test_map_params_finds_every_copy_of_the_parameters(form, base_name, base):
    """As many parameter-shaped copies as the base's own, and Magma's momentum."""
    if base_name == "schedule_free" and optax.__version__ == "0.2.6":
        pytest.skip("there optax's own schedule_free takes an array for a dtype, as JAX deprecates")
    tx = form.wrap(base)

    def copies(tx, state):
        marks = optax.tree.map_params(
            tx,
            lambda leaf, param: "param",
            state,
            PARAMS,
            transform_non_params=lambda _: "other",
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )
        return jax.tree.leaves(marks).count("param")

    state = tx.init(PARAMS)
    masked = isinstance(form.state(state).momentum, dict)
    assert copies(tx, state) == copies(base, base.init(PARAMS)) + 4 * masked
    if form.name != "skip_update":
        assert summarize(state)["num_blocks"] == 4
