"""Magma as a wrapper of a base optimizer: exact, without extra arguments or buffers."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optax
from jax.typing import ArrayLike

from magma_optax._blocks.choosing import Where
from magma_optax._blocks.cutting import AxisName, Granularity
from magma_optax._blocks.matching import match
from magma_optax._blocks.paths import NamedTree
from magma_optax._doors.wrapped import Wrapped
from magma_optax._moments.own import replace_momentum, update_momentum
from magma_optax._moments.source import MomentSource
from magma_optax._step.algorithm import ALIGNMENT, Score, masked_step
from magma_optax._step.options import Options, Schedule, check_bool, takes
from magma_optax._step.sparse_state import find_owners, hold_blocks, hold_dropped
from magma_optax._step.state import MagmaState, check_kind, check_scores, init_state


class WithMagmaState(NamedTuple):
    """State of `with_magma`.

    Attributes:
      magma: Magma's own state.
      inner_state: the base optimizer's state.
    """

    magma: MagmaState
    inner_state: Any


def with_magma(
    inner: optax.GradientTransformation,
    survival_prob: ArrayLike | Schedule | Literal["alignment"] = 0.5,
    temperature: ArrayLike | Schedule = 2.0,
    *,
    where: Where | None = None,
    blocks: Granularity = "leaf",
    key: ArrayLike = 0,
    first_moment: Literal["auto", "own"] | Callable[[Any], Any] = "auto",
    b1: ArrayLike = 0.9,
    momentum_dtype: Any = None,
    axis_name: AxisName = None,
    lazy: bool = False,
    damping: bool = True,
    rescale: bool = False,
    score_decay: ArrayLike | Schedule = 0.9,
    initial_score: ArrayLike = 0.5,
    sparse_state: bool = False,
    score: Score = ALIGNMENT,
) -> optax.GradientTransformationExtraArgs:
    """Wrap a base optimizer so that its updates are masked and damped by Magma.

    On every step each block of the masked parameters is dropped with probability 1 - p. What
    survives is multiplied by the block's score, which says how well momentum and gradient agree.
    With the defaults a masked block moves at about 0.28 of the base's rate on average, so tune the
    learning rate anew, and compare with `control`.

    Computes what ``optax.chain(inner, magma(...))`` with ``grad=`` and the base's ``b1`` does, from
    the gradients that it hands to ``inner``. It can therefore read the first moment that the base
    keeps anyway: on Adam and its kin it adds no buffer.

    Example:
      >>> import optax
      >>> from magma_optax import attention_and_mlp, with_magma
      >>> tx = with_magma(optax.adam(1e-3), where=attention_and_mlp)

    Args:
      inner: the base optimizer. Its state advances on every step, masked or not.
      survival_prob: p, the probability that a block's update survives a step: a number in (0, 1], a
        schedule ``step -> p`` (the first step is 0), or ``"alignment"`` for p = the block's raw
        score of the step (an ablation of the paper). 1.0 leaves damping alone.
      temperature: tau, greater than 0: how strongly the cosine moves the score. At 2 scores lie
        between 0.378 and 0.622. A number or a schedule, whose values are not checked.
      where: which leaves are masked. None for all, or ``(path, leaf) -> bool`` with the path as in
        ``"layers/0/mlp/up_proj/kernel"`` and the leaf as a ``jax.ShapeDtypeStruct``, or a tree of
        bools. The paper uses `attention_and_mlp`. Other leaves pass through bit for bit and keep no
        state, as do integer, boolean and empty ones.
      blocks: what gets a coin and a score of its own. ``"leaf"``: each leaf. ``"row"``: every
        vector along the last axis. ``"column"``: every vector along the last but one (a vector
        counts as one row). ``"element"``: every element. Or ``(path, leaf) -> axes`` that index
        blocks, such as `stacked` for scanned layers.
      key: seed of the coins: an int of up to 64 bits, a ``jax.random.key`` or raw key data. The
        coin of a block is a function of key, step, path and block index alone.
      first_moment: where mu comes from. ``"auto"``: the base's state, for each parameter for which
        the base keeps an EMA of the raw gradient there (adam, adamw, nadam, amsgrad, radam, yogi,
        lamb, lion, muon, sgd with momentum, ...; found by reading the base's update, also through
        ``partition`` and ``masked``), and an EMA of its own for the others, and for all where the
        base needs extra arguments (``reduce_on_plateau``). ``"own"``: always its own. Or a function
        from the new state of ``inner`` to a tree like the parameters.
      b1: decay of mu where an EMA of its own is kept, in [0, 1). The base's has the base's decay.
      momentum_dtype: dtype of such an EMA. None for the parameter's, which is too coarse for an
        average where parameters are float8, and too narrow in float16 for gradients below 1e-7 or
        above 6e4.
      axis_name: mesh axis or axes that shard the parameters inside ``shard_map``: inner products
        are summed over them. Not needed with ``jit`` and ``NamedSharding``, nor with ``pmap``.
      lazy: whether the direction of a dropped block is left out under ``jit``. The updates are the
        same. The step costs less than the base's own where directions are what it costs, as on
        Muon; Adam gains nothing. ``inner`` must compute the direction of each leaf apart from the
        others', and that of each block where ``blocks`` cut leaves.
      damping: whether the score is multiplied in. False leaves the coins alone.
      rescale: whether surviving updates are divided by p, as in the paper's theory section (not in
        its Algorithm 1).
      score_decay: decay of the average of scores, in [0, 1); a number or a schedule.
      initial_score: the score before the first step; 0.5 means no agreement.
      sparse_state: the paper's ablation "sparse momentum": what ``inner`` keeps of a dropped block
        (and Magma's own EMA) does not advance on that step. Its score does.
      score: how the raw score follows from mu_t, g_t and mu_{t-1}; by default the sigmoid of their
        cosine over tau. See `Score` for another.

    Returns:
      A transformation whose state is a tuple of a `MagmaState`, ``magma``, and the base's state,
      ``inner_state``; extra arguments go to ``inner``.

    Raises:
      ValueError: a number out of its range or an unknown choice, here; leaves that do not match, in
        ``init`` and ``update``, with their path; ``inner`` is or holds an `optax.MultiSteps`, which
        belongs around the wrapper; with ``sparse_state``, blocks within a leaf of which ``inner``
        keeps a state of another shape; or, with ``lazy``, an ``inner`` whose directions cannot be
        left out, with the leaf's path.
      TypeError: an argument of the wrong kind, here; a leaf that is no array, with its path.

    References:
      Joo et al., *On Surprising Effectiveness of Masking Updates in Adaptive Optimizers*, 2026.
    """
    options = Options(
        survival_prob=survival_prob, temperature=temperature, b1=b1, score_decay=score_decay,
        initial_score=initial_score, damping=damping, rescale=rescale, where=where, blocks=blocks,
        key=key, axis_name=axis_name, momentum_dtype=momentum_dtype, score=score,
    )  # fmt: skip
    _check_first_moment(first_moment)
    check_bool("sparse_state", sparse_state)
    base = Wrapped("with_magma", inner, lazy)
    if lazy and sparse_state:
        raise ValueError(
            "lazy leaves directions out and advances every state; sparse_state holds the state of "
            "dropped blocks. Use one of the two"
        )
    inner = base.inner
    source = MomentSource(inner, first_moment, options)

    def init_fn(params):
        named = NamedTree(params)
        cuts = options.find_cuts(named)
        inner_state = base.init(params, cuts)
        if sparse_state:
            find_owners(inner, inner_state, named, cuts)  # Refuses what it cannot hold.
        momentum = source.init_momentum(params, named, inner_state, cuts)
        state = init_state(named, options.key, cuts, options.initial_score, momentum)
        return WithMagmaState(state, inner_state)

    def update_fn(updates, state, params=None, **extra_args):
        check_kind(state, WithMagmaState)
        state, old_inner = state.magma, state.inner_state
        grads, momentum = NamedTree(updates), NamedTree(state.momentum)
        cuts = options.find_cuts(grads, NamedTree(params))
        scores = check_scores(state, cuts, grads)
        arguments = updates, old_inner, params
        directions, new_inner = base.update(cuts, arguments, extra_args)

        g = grads.arrays(cuts)
        own = match(momentum, grads, [path for path in momentum.leaves if path in cuts], "momentum")
        moments = source.read(g, own, (updates, grads), old_inner, new_inner)
        masked, m, state = masked_step(options, state, scores, cuts, directions, moments)
        new = {path: update_momentum(old, g[path], b1) for path, old in own.items()}
        if sparse_state:
            new_inner = hold_dropped(inner, new_inner, old_inner, grads, cuts, m)
            new = hold_blocks(new, own, cuts, m)
        state = state._replace(momentum=replace_momentum(momentum, new))
        return masked, WithMagmaState(state, new_inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_first_moment(first_moment: Any) -> None:
    if callable(first_moment):
        if not takes(first_moment, 1):
            raise TypeError(
                "first_moment must be a function of one argument, the new state of the base, got "
                f"{first_moment!r}"
            )
    elif first_moment not in ("auto", "own"):
        raise ValueError(
            'first_moment must be "auto", "own" or a function of the base\'s state, got '
            f"{first_moment!r}"
        )
