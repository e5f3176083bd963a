"""SkipUpdate: random masking of whole blocks, unbiased and without alignment."""

import optax
from jax.typing import ArrayLike

from magma_optax._blocks.choosing import Where
from magma_optax._blocks.cutting import Granularity
from magma_optax._blocks.paths import NamedTree
from magma_optax._step.algorithm import masked_step
from magma_optax._step.options import Options, Schedule
from magma_optax._step.state import MagmaState, check_kind, init_state


def skip_update(
    survival_prob: ArrayLike | Schedule = 0.5,
    *,
    where: Where | None = None,
    blocks: Granularity = "leaf",
    key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Skip the update of each block with probability 1 - p, and divide the others by p.

    .. math::
        m_t \sim \operatorname{Bernoulli}(p), \qquad \Delta_t \leftarrow \frac{m_t}{p} \Delta_t

    The mean over coins is the update itself; what remains in expectation is a penalty on curvature
    within blocks (Proposition 1 of the paper). The base's own state advances on every step. Needs
    no gradient, so it is exact wherever it stands.

    Example:
      >>> import optax
      >>> from magma_optax import attention_and_mlp, skip_update
      >>> tx = optax.chain(optax.rmsprop(1e-3), skip_update(0.5, where=attention_and_mlp))

    Args:
      survival_prob: p, a number in (0, 1] or a schedule ``step -> p``.
      where: which leaves are masked. None for all, or ``(path, leaf) -> bool`` with the path as in
        ``"layers/0/mlp/up_proj/kernel"`` and the leaf as a ``jax.ShapeDtypeStruct``, or a tree of
        bools. The paper uses `attention_and_mlp`. Other leaves pass through bit for bit.
      blocks: what gets a coin of its own. ``"leaf"``: each leaf. ``"row"``, ``"column"``: every
        vector along the last axis, along the last but one. ``"element"``: every element. Or
        ``(path, leaf) -> axes`` that index blocks, such as `stacked` for scanned layers.
      key: seed of the coins: an int of up to 64 bits, a ``jax.random.key`` or raw key data. Equal
        keys give the coins of `magma`.

    Returns:
      A transformation with a `MagmaState` that holds a step and a key alone. ``update`` ignores
      extra arguments.

    Raises:
      ValueError: a number out of its range or an unknown choice, here; leaves that do not match,
        in ``init`` and ``update``, with their path.
      TypeError: an argument of the wrong kind.

    References:
      Joo et al., *On Surprising Effectiveness of Masking Updates in Adaptive Optimizers*, 2026.
    """
    options = skip_update_options("skip_update", survival_prob, where, blocks, key)

    def init_fn(params):
        named = NamedTree(params)
        options.find_cuts(named)  # A `where` that selects nothing is refused before the first step.
        return init_state(named, options.key, {}, 0.5, None)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        check_kind(state, MagmaState)
        delta = NamedTree(updates)
        cuts = options.find_cuts(delta, NamedTree(params))
        scores = NamedTree(state.alignment)
        masked, _, state = masked_step(options, state, scores, cuts, lambda m: delta)
        return masked, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def skip_update_options(
    name: str,
    survival_prob: ArrayLike | Schedule,
    where: Where | None,
    blocks: Granularity,
    key: ArrayLike,
) -> Options:
    """Return the checked options of SkipUpdate; ``name`` is the caller's, for the error."""
    if isinstance(survival_prob, str):
        raise TypeError(
            f"{name}: survival_prob must be a number or a schedule, got {survival_prob!r}; "
            "magma(survival_prob='alignment') samples by alignment"
        )
    return Options(
        survival_prob=survival_prob, where=where, blocks=blocks, key=key,
        damping=False, rescale=True,
    )  # fmt: skip
