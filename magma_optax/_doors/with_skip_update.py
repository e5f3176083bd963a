"""SkipUpdate as a wrapper of a base optimizer, so that dropped blocks cost no direction."""

import optax
from jax.typing import ArrayLike

from magma_optax._blocks.choosing import Where
from magma_optax._blocks.cutting import Granularity
from magma_optax._blocks.paths import NamedTree
from magma_optax._doors.skip_update import skip_update_options
from magma_optax._doors.with_magma import WithMagmaState
from magma_optax._doors.wrapped import Wrapped
from magma_optax._step.algorithm import masked_step
from magma_optax._step.options import Schedule
from magma_optax._step.state import check_kind, init_state


def with_skip_update(
    inner: optax.GradientTransformation,
    survival_prob: ArrayLike | Schedule = 0.5,
    *,
    where: Where | None = None,
    blocks: Granularity = "leaf",
    key: ArrayLike = 0,
    lazy: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Wrap a base optimizer so that the updates of blocks are skipped at random.

    Computes what ``optax.chain(inner, skip_update(...))`` does. A wrapper also knows the base, and
    leaves out the direction of a dropped block.

    Example:
      >>> import optax
      >>> from magma_optax import attention_and_mlp, with_skip_update
      >>> tx = with_skip_update(optax.contrib.muon(1e-3), where=attention_and_mlp)

    Args:
      inner: the base optimizer. Its state advances on every step, masked or not.
      survival_prob: p, a number in (0, 1] or a schedule ``step -> p``.
      where: which leaves are masked; see `with_magma`.
      blocks: what gets a coin of its own; see `with_magma`.
      key: seed of the coins; see `with_magma`. Equal keys give the coins of `magma`.
      lazy: whether the direction of a dropped block is left out under ``jit``; see `with_magma`.

    Returns:
      A transformation whose state is a `WithMagmaState`: a step and a key, and the base's state.
      Extra arguments go to ``inner``.

    Raises:
      ValueError: a number out of its range or an unknown choice, here; leaves that do not match, in
        ``init`` and ``update``, with their path; ``inner`` is or holds an `optax.MultiSteps`, which
        belongs around the wrapper; with ``lazy``, an ``inner`` that is not separable.
      TypeError: an argument of the wrong kind.

    References:
      Joo et al., *On Surprising Effectiveness of Masking Updates in Adaptive Optimizers*, 2026.
    """
    options = skip_update_options("with_skip_update", survival_prob, where, blocks, key)
    base = Wrapped("with_skip_update", inner, lazy)

    def init_fn(params):
        named = NamedTree(params)
        cuts = options.find_cuts(named)
        inner_state = base.init(params, cuts)
        return WithMagmaState(init_state(named, options.key, {}, 0.5, None), inner_state)

    def update_fn(updates, state, params=None, **extra_args):
        check_kind(state, WithMagmaState)
        cuts = options.find_cuts(NamedTree(updates), NamedTree(params))
        arguments = updates, state.inner_state, params
        directions, inner_state = base.update(cuts, arguments, extra_args)
        scores = NamedTree(state.magma.alignment)
        masked, _, magma = masked_step(options, state.magma, scores, cuts, directions)
        return masked, WithMagmaState(magma, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
