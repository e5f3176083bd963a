"""Magma as a wrapper of a base optimizer: exact, without extra arguments or buffers."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from magma_optax._alignment import cosine_similarity, mix, read_apart, update_momentum
from magma_optax._blocks import AxisName, BlockAxes, Where
from magma_optax._first_moment import FirstMoments, leaves_by_place
from magma_optax._hyperparameters import (
    MULTI_STEPS,
    Hyperparameters,
    Schedule,
    check_base,
    check_bool,
    takes,
)
from magma_optax._masking import mask_updates, score_and_toss
from magma_optax._momentum import init_momentum, match_blocks, replace_momentum
from magma_optax._paths import leaves_by_path
from magma_optax._sparse_state import find_owners, hold_dropped
from magma_optax._state import (
    MagmaState,
    accumulators,
    check_kind,
    check_state,
    init_state,
    next_step,
    replace_scores,
)


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
    b1: ArrayLike = 0.9,
    score_decay: ArrayLike | Schedule = 0.9,
    initial_score: ArrayLike = 0.5,
    damping: bool = True,
    rescale: bool = False,
    where: Where | None = None,
    blocks: Literal["leaf", "row", "column", "element"] | BlockAxes = "leaf",
    key: ArrayLike = 0,
    axis_name: AxisName = None,
    momentum_dtype: Any = None,
    first_moment: Literal["auto", "own"] | Callable[[Any], Any] = "auto",
    sparse_state: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wrap a base optimizer so that its updates are masked and damped by Magma.

    Computes what ``optax.chain(inner, magma(...))`` with ``grad=`` and the base's ``b1`` does, from
    the gradients that it hands to ``inner``. It can therefore read the first moment that the base
    keeps anyway: on Adam and its kin it adds no buffer.

    Example:
      >>> import optax
      >>> from magma_optax import attention_and_mlp, with_magma
      >>> tx = with_magma(optax.adam(1e-3), where=attention_and_mlp)

    Args:
      inner: the base optimizer. Its state advances on every step, masked or not.
      survival_prob: as in `magma`, like all up to ``momentum_dtype``.
      temperature: see `magma`.
      b1: see `magma`; used where an EMA of its own is kept. The base's has the base's decay.
      score_decay: see `magma`.
      initial_score: see `magma`.
      damping: see `magma`.
      rescale: see `magma`.
      where: see `magma`.
      blocks: see `magma`.
      key: see `magma`.
      axis_name: see `magma`.
      momentum_dtype: see `magma`.
      first_moment: where mu comes from. ``"auto"``: the base's state, for each parameter for which
        the base keeps an EMA of the raw gradient there (adam, adamw, nadam, amsgrad, radam, yogi,
        lamb, lion, muon, sgd with momentum, ...; found by reading the base's update, also through
        ``partition`` and ``masked``), and an EMA of its own for the others, and for all where the
        base needs extra arguments (``reduce_on_plateau``). ``"own"``: always its own. Or a function
        from the new state of ``inner`` to a tree like the parameters.
      sparse_state: the paper's ablation "sparse momentum": what ``inner`` keeps of a masked block
        (and Magma's own EMA) does not advance on that step. Its score does.

    Returns:
      A transformation whose state is a tuple of a `MagmaState`, ``magma``, and the base's state,
      ``inner_state``; extra arguments go to ``inner``.

    Raises:
      ValueError: as `magma`; ``inner`` is or holds an `optax.MultiSteps`, which belongs around
        the wrapper; or, with ``sparse_state``, blocks within a leaf of which ``inner`` keeps a
        state of another shape.
      TypeError: an argument of the wrong kind.

    References:
      Joo et al., `On Surprising Effectiveness of Masking Updates in Adaptive Optimizers`, 2026.
    """
    hp = Hyperparameters(
        survival_prob, temperature, b1, score_decay, initial_score, damping, rescale, where, blocks,
        key, axis_name, momentum_dtype,
    )  # fmt: skip
    if not callable(first_moment) and first_moment not in ("auto", "own"):
        raise ValueError(
            'first_moment must be "auto", "own" or a function of the base\'s state, got '
            f"{first_moment!r}"
        )
    check_bool("sparse_state", sparse_state)
    check_base(inner)
    if callable(first_moment) and not takes(first_moment, 1):
        raise TypeError(
            "first_moment must be a function of one argument, the new state of the base, got "
            f"{first_moment!r}"
        )
    inner = optax.with_extra_args_support(inner)
    moments = FirstMoments(inner.update)

    def base_moments(gradients, inner_state):
        """Where the base keeps the first moment of each leaf for which it keeps one."""
        return moments.find(gradients, inner_state) if first_moment == "auto" else {}

    def own_momentum(params, inner_state, cuts):
        """Zeros for the leaves whose first moment the base does not keep; None without any."""
        if callable(first_moment):
            return None
        own = cuts.keys() - base_moments(params, inner_state).keys()
        if own or _has_masks(inner_state) or would_own(params):
            return init_momentum(params, own, hp.momentum_dtype)
        return None

    def would_own(params):
        """For the leafless tree of `optax.tree.map_params`: what init does with a real one."""
        if jax.tree.leaves(params):
            return False
        matrix = jnp.zeros((2, 2))
        return not base_moments(matrix, inner.init(matrix))

    def init_fn(params):
        cuts = hp.find_blocks(params)
        inner_state = inner.init(params)
        if accumulators(inner_state):
            raise ValueError(MULTI_STEPS)
        if sparse_state:
            find_owners(inner, inner_state, params, cuts)  # Refuses what it cannot hold.
        momentum = own_momentum(params, inner_state, cuts)
        magma_state = init_state(params, hp.key, cuts, hp.initial_score, momentum)
        return WithMagmaState(magma_state, inner_state)

    def first_moments(g, own, updates, old_inner, new_inner):
        """mu_t and g_t by path; mu_t is the base's, or Magma's own."""
        if callable(first_moment):
            return leaves_by_path(first_moment(new_inner)), g
        old, new = leaves_by_place(old_inner), leaves_by_place(new_inner)
        emas = base_moments(updates, old_inner)
        emas = {path: ema for path, ema in emas.items() if path in g and path not in own}
        if missing := [path for path in g if path not in emas and path not in own]:
            raise ValueError(
                f"the state keeps no first moment of {missing[0]!r}: it comes from another base "
                "optimizer or `first_moment`. Call init with these"
            )
        # Where the base's formula is known it is computed anew rather than read from its new state.
        numbers = {path: ema.numbers for path, ema in emas.items() if ema.numbers}
        known = {path: old[emas[path].place] for path in numbers}
        g, own, known = read_apart((g, own, known))
        mu = {path: new[ema.place] for path, ema in emas.items()}
        for path, (a, b) in numbers.items():
            mu[path] = mix(a, known[path], b, g[path])
        for path, x in own.items():
            mu[path] = update_momentum(x, g[path], hp.b1)
        return mu, g

    def update_fn(updates, state, params=None, **extra_args):
        check_kind(state, WithMagmaState)
        state, old_inner = state.magma, state.inner_state
        cuts = hp.find_blocks(updates, params)
        check_state(state, cuts, updates)
        delta, new_inner = inner.update(updates, old_inner, params, **extra_args)

        g = match_blocks(updates, updates, cuts, "updates")
        held = [path for path in leaves_by_path(state.momentum) if path in cuts]
        own = match_blocks(state.momentum, updates, held, "momentum")
        mu, g_apart = first_moments(g, own, updates, old_inner, new_inner)
        mu = match_blocks(mu, updates, cuts, "first_moment")
        cosines = cosine_similarity(mu, g_apart, cuts, hp.axis_name)
        scores, coins, factors = score_and_toss(hp, state, cuts, cosines)

        momentum = {path: update_momentum(old, g[path], hp.b1) for path, old in own.items()}
        if sparse_state:
            new_inner = hold_dropped(inner, new_inner, old_inner, updates, cuts, coins)
            momentum = {
                path: jnp.where(cuts[path].expand(coins[path]), new, own[path])
                for path, new in momentum.items()
            }
        state = MagmaState(
            step=next_step(state.step),
            key=state.key,
            alignment=replace_scores(state, scores),
            momentum=replace_momentum(state.momentum, momentum),
        )
        return mask_updates(delta, cuts, coins, factors), WithMagmaState(state, new_inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _has_masks(inner_state: Any) -> bool:
    """Whether the base masks parameters, so that its own state needs `is_leaf` to be mapped."""
    masks = (optax.MaskedState, optax.PartitionState)
    nodes = jax.tree.leaves(inner_state, is_leaf=lambda node: isinstance(node, masks))
    return any(isinstance(node, masks) for node in nodes)
