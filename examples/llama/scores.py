"""Magma's scores in the state of any optimizer, whether it keeps some or not."""

import jax
import optax

from magma_optax import summarize


def scores(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns what `summarize` says; nothing for an optimizer without scores."""
    kept = optax.tree.get_all_with_path(opt_state, "alignment")
    return summarize(opt_state) if jax.tree.leaves([value for _, value in kept]) else {}
