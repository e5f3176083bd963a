"""Magma as a link of an Optax chain, after any base optimizer."""

from typing import Any, Literal

import optax
from jax.typing import ArrayLike

from magma_optax._blocks.choosing import Where
from magma_optax._blocks.cutting import AxisName, Granularity
from magma_optax._blocks.matching import match
from magma_optax._blocks.paths import NamedTree
from magma_optax._doors.caller import is_link, warn
from magma_optax._moments.apart import read_apart
from magma_optax._moments.estimated import undo_momentum
from magma_optax._moments.own import from_gradient, init_momentum, replace_momentum
from magma_optax._step.algorithm import ALIGNMENT, Moments, Score, masked_step
from magma_optax._step.options import Options, Schedule
from magma_optax._step.state import MagmaState, check_kind, check_scores, init_state


def magma(
    survival_prob: ArrayLike | Schedule | Literal["alignment"] = 0.5,
    temperature: ArrayLike | Schedule = 2.0,
    *,
    where: Where | None = None,
    blocks: Granularity = "leaf",
    key: ArrayLike = 0,
    base: Literal["momentum", "gradient"] = "momentum",
    b1: ArrayLike = 0.9,
    momentum_dtype: Any = None,
    axis_name: AxisName = None,
    damping: bool = True,
    rescale: bool = False,
    score_decay: ArrayLike | Schedule = 0.9,
    initial_score: ArrayLike = 0.5,
    score: Score = ALIGNMENT,
) -> optax.GradientTransformationExtraArgs:
    r"""Momentum-aligned gradient masking: mask blocks at random, damp the rest by their alignment.

    For every block :math:`b`, with gradient :math:`g`, its first moment :math:`\mu` and the update
    :math:`\Delta` that arrives from the base optimizer (Algorithm 1 of the paper):

    .. math::
        \tilde s_t &= \operatorname{sigmoid}(\operatorname{cossim}(\mu_t, g_t) / \tau) \\
        s_t &= 0.9\, s_{t-1} + 0.1\, \tilde s_t \\
        m_t &\sim \operatorname{Bernoulli}(p) \\
        \Delta_t &\leftarrow s_t\, m_t\, \Delta_t

    The base's own state advances on every step, masked or not. With the defaults a block moves at
    about 0.28 of the base's rate on average; see the README on learning rates.

    Pass the gradients that the base got as ``grad=`` for the exact algorithm. Without them the
    gradient is estimated from the incoming updates, as ``base`` says, and a warning is given once.
    A learning rate that changes from step to step spoils the estimate: put the link before it.
    Keep to one of the two in one run: they share a buffer.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from magma_optax import magma
      >>> tx = optax.chain(optax.adam(1e-3), magma())
      >>> params = {"w": jnp.ones((2, 2))}
      >>> grads = {"w": jnp.full((2, 2), 0.1)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(grads, state, params, grad=grads)

    Args:
      survival_prob: p, the probability that a block's update survives: a number in (0, 1], a
        schedule ``step -> p`` (the first step is 0), or ``"alignment"`` for p = the block's
        :math:`\tilde s_t` (an ablation of the paper). 1.0 leaves damping alone.
      temperature: tau > 0; a number or a schedule. Values of schedules are not checked.
      where: which leaves are masked: ``(path, leaf) -> bool`` with the path as in
        ``"layers/0/mlp/up_proj/kernel"`` and the leaf as a ``jax.ShapeDtypeStruct``, or a tree of
        bools. The paper uses ``attention_and_mlp``. Other leaves pass through bit for bit and keep
        no state, as do integer, boolean and empty ones. None masks all.
      blocks: ``"leaf"``: a leaf is a block. ``"row"``: every vector along the last axis is one;
        ``"column"``: every vector along the last but one (a vector counts as one row);
        ``"element"``: every element. Or ``(path, leaf) -> axes`` that index blocks, such as
        `stacked`.
      key: an int of up to 64 bits, a ``jax.random.key`` or raw key data. The coin of a block is a
        function of key, step, path and block index alone.
      base: how to estimate gradients where none are passed. ``"momentum"``, for updates that move
        like a momentum (Adam, LaProp, SGD with momentum): g is about u_t - b1 u_{t-1}, mu about
        u_t. ``"gradient"``, for updates that move like a gradient (SGD, RMSProp): g is about u_t,
        mu about its EMA. The wrong choice is worthless.
      b1: decay of the EMA of gradients, mu, in [0, 1): the base's own.
      momentum_dtype: dtype of the EMA of gradients; None for the parameter's, which is too coarse
        for an average where parameters are float8, and too narrow in float16 for gradients below
        1e-7 or above 6e4.
      axis_name: mesh axis or axes that shard the parameters inside ``shard_map``: inner products
        are summed over them. Not needed with ``jit`` and ``NamedSharding``, nor with ``pmap``.
      damping: whether s_t is multiplied in.
      rescale: whether surviving updates are divided by p, as in the paper's theory section (not in
        its Algorithm 1). ``magma(damping=False, rescale=True)`` updates as `skip_update`.
      score_decay: decay of the EMA of scores, in [0, 1); a number or a schedule.
      initial_score: s_0; 0.5 is sigmoid(0).
      score: how :math:`\tilde s_t` follows from mu_t, g_t and mu_{t-1}; by default as above. See
        `Score` for another.

    Returns:
      A transformation with a `MagmaState` whose ``momentum`` is one buffer shaped like the masked
      parameters. ``update`` takes ``grad``, a tree like the parameters (further leaves are
      ignored), and ignores other extra arguments.

    Raises:
      ValueError: a number out of its range or an unknown choice, here; leaves that do not match,
        in ``init`` and ``update``, with their path.
      TypeError: an argument of the wrong kind, here; a leaf that is no array, with its path.

    Warns:
      UserWarning: once, without ``grad=``; or if ``grad`` shows that the link is a chain's first.

    References:
      Joo et al., *On Surprising Effectiveness of Masking Updates in Adaptive Optimizers*, 2026.
    """
    options = Options(
        survival_prob=survival_prob, temperature=temperature, b1=b1, score_decay=score_decay,
        initial_score=initial_score, damping=damping, rescale=rescale, where=where, blocks=blocks,
        key=key, axis_name=axis_name, momentum_dtype=momentum_dtype, score=score,
    )  # fmt: skip
    if base not in ("momentum", "gradient"):
        raise ValueError(f'base must be "momentum" or "gradient", got {base!r}')
    warned: set[str] = set()

    def warn_once(applies, message):
        if applies and message not in warned:
            warned.add(message)
            warn(message)

    def init_fn(params):
        named = NamedTree(params)
        cuts = options.find_cuts(named)
        momentum = init_momentum(named, cuts, options.momentum_dtype)
        return init_state(named, options.key, cuts, options.initial_score, momentum)

    def update_fn(updates, state, params=None, *, grad=None, **extra_args):
        del extra_args
        check_kind(state, MagmaState)
        delta, momentum, grads = NamedTree(updates), NamedTree(state.momentum), NamedTree(grad)
        cuts = options.find_cuts(delta, grads if params is None else NamedTree(params))
        if params is None:  # Then an integer parameter is one without momentum.
            cuts = {path: cut for path, cut in cuts.items() if path not in momentum.masked}
        scores = check_scores(state, cuts, delta)
        old = match(momentum, delta, cuts, "momentum")
        if grad is not None:
            moments_of, incoming = from_gradient, match(grads, delta, cuts, "grad")
            first = is_link() and all(grads.leaves[path] is delta.leaves[path] for path in cuts)
            warn_once(cuts and first, _FIRST)
        else:
            moments_of = undo_momentum if base == "momentum" else from_gradient
            incoming = delta.arrays(cuts)
            warn_once(cuts, _ESTIMATED.format(base))

        x, before = read_apart((incoming, old))
        apart = {path: moments_of(x[path], before[path], options.b1) for path in cuts}
        moments = Moments(
            mu={path: mu for path, (mu, _, _) in apart.items()},
            g={path: g for path, (_, g, _) in apart.items()},
            previous_mu=before,
        )
        masked, _, state = masked_step(options, state, scores, cuts, lambda m: delta, moments)
        new = {path: moments_of(incoming[path], old[path], options.b1)[2] for path in cuts}
        return masked, state._replace(momentum=replace_momentum(momentum, new))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_ESTIMATED = (
    "magma: no `grad` was passed to update, so the alignment is estimated from the incoming "
    "updates (base={!r}). A learning rate that changes from step to step spoils the estimate. For "
    "the exact algorithm call tx.update(grads, state, params, grad=grads) or wrap the base "
    "optimizer: with_magma(base)."
)
_FIRST = (
    "magma: `grad` is the very tree that arrived as updates, so no base optimizer stands before "
    "magma() in the chain. One that comes after it would average masked gradients: write "
    "optax.chain(base, magma()). For plain SGD that is optax.chain(optax.sgd(lr), magma())."
)
