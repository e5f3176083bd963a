"""Magma's scores in the state of any optimizer of the examples."""

import jax
import optax

from magma_optax import summarize


def summary(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Summarizes the scores; empty for an optimizer without any, which is no mistake here."""
    found = optax.tree.get_all_with_path(opt_state, "alignment")
    return summarize(opt_state) if jax.tree.leaves([value for _, value in found]) else {}
