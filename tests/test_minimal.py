"""The minimal example runs, three ways."""

import pytest

from examples import minimal


@pytest.mark.parametrize("train", [minimal.bare_optax, minimal.flax_nnx, minimal.flax_linen])
def test_every_way_learns(train):
    assert train() < 1e-3
