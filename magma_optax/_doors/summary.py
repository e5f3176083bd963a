"""A summary of the scores in any optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from magma_optax._doors.caller import warn
from magma_optax._step.state import MagmaState


def summarize(opt_state: Any) -> dict[str, jax.Array]:
    r"""Summarise the alignment scores found anywhere in an optimizer state, for logging.

    How to read ``alignment_mean``: gradients that have nothing in common from step to step give

    .. math::
        \sigma\!\left(\sqrt{1 - \beta_1^2} / \tau\right),

    which is 0.554 at tau = 2 for b1 = 0.9 (Adam) and 0.539 for 0.95 (Muon), since mu_t contains
    g_t. So 0.554 does not say that momentum and gradient agree. Scores of language models lie
    there. Higher ones, up to 0.622, say that gradients agree, or change sign, from step to step.
    Lower ones say that their norms fall or jump, and 0.5 that a block gets no gradient.

    Looks through chain, masked, partition, MultiSteps, inject_hyperparams and the like, and may be
    called inside jit. The state must hold `MagmaState` tuples; one that was restored as plain dicts
    has none.

    Args:
      opt_state: an optimizer state.

    Returns:
      ``alignment_mean``, ``alignment_min``, ``alignment_max``: float32 (), over all blocks of all
      Magma transformations; ``num_blocks``: int32 (), at most 2**31 - 1. An empty dict, with a
      warning, where there are no scores: `skip_update` keeps none, as it never looks at the
      gradient.

    Warns:
      UserWarning: there are no scores, or `optax.MultiSteps` stands before Magma in one chain.
    """
    states = _find(MagmaState, opt_state)
    scores = [x for s in states if not _is_empty(s) for x in jax.tree.leaves(s.alignment)]
    if not scores:
        warn(f"summarize found no scores: {_why_no_scores(states)}")
        return {}
    if _accumulates_first(opt_state):
        warn(
            "optax.MultiSteps stands before magma in a chain, so Magma scores and tosses coins at "
            "every micro-step: put it around the whole, optax.MultiSteps(with_magma(base), k)"
        )
    # Leaf by leaf first: scores may be sharded, each in its own way.
    size = sum(score.size for score in scores)
    return {
        "alignment_mean": jnp.sum(jnp.stack([jnp.sum(score) for score in scores])) / float(size),
        "alignment_min": jnp.min(jnp.stack([jnp.min(score) for score in scores])),
        "alignment_max": jnp.max(jnp.stack([jnp.max(score) for score in scores])),
        "num_blocks": jnp.asarray(min(size, 2**31 - 1), jnp.int32),
    }


def _find(kind: type, tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _is_empty(state: MagmaState) -> bool:
    """Whether there were no parameters, as in an empty group of `partition`; see `init_state`."""
    return hasattr(state.alignment, "dtype")


def _why_no_scores(states: list[MagmaState]) -> str:
    if not states:
        return (
            "the state holds no MagmaState. Pass the optimizer's state as init or update returned "
            "it; one restored without a target has dicts and lists instead"
        )
    if all(state.momentum is None and not _is_empty(state) for state in states):
        return "skip_update keeps none, as it never looks at the gradient"
    return "no leaf carries a block"


def _accumulates_first(node: Any) -> bool:
    """Whether a chain in ``node`` holds a state of MultiSteps before one of Magma."""
    if isinstance(node, optax.MultiStepsState):  # What is inside it sees whole batches.
        return False
    children, _ = jax.tree_util.default_registry.flatten_one_level(node) or ((), None)
    accumulates = False
    for child in children if type(node) is tuple else ():
        if accumulates and _find(MagmaState, child):
            return True
        accumulates = accumulates or bool(accumulators(child))
    return any(map(_accumulates_first, children))


def accumulators(state: Any) -> list[Any]:
    """Return the states in ``state`` of what collects gradients over several micro-steps."""
    return _find(optax.MultiStepsState, state)
