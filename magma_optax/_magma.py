"""Magma as a link of an Optax chain, after any base optimizer."""

from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from magma_optax._alignment import (
    cosine_similarity,
    keep_finite,
    read_apart,
    update_momentum,
    widen_together,
)
from magma_optax._blocks import AxisName, BlockAxes, Where
from magma_optax._caller import is_link, warn
from magma_optax._hyperparameters import Hyperparameters, Schedule
from magma_optax._masking import mask_updates, score_and_toss
from magma_optax._momentum import init_momentum, masked_paths, match_blocks, replace_momentum
from magma_optax._paths import named_leaves
from magma_optax._state import (
    MagmaState,
    check_kind,
    check_state,
    init_state,
    next_step,
    replace_scores,
)


def magma(
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
    base: Literal["momentum", "gradient"] = "momentum",
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
      b1: decay of the EMA of gradients, mu, in [0, 1): the base's own.
      score_decay: decay of the EMA of scores, in [0, 1); a number or a schedule.
      initial_score: s_0; 0.5 is sigmoid(0).
      damping: whether s_t is multiplied in.
      rescale: whether surviving updates are divided by p, as in the paper's theory section (not in
        its Algorithm 1). ``magma(damping=False, rescale=True)`` updates as `skip_update`.
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
      axis_name: mesh axis or axes that shard the parameters inside ``shard_map``: inner products
        are summed over them. Not needed with ``jit`` and ``NamedSharding``, nor with ``pmap``.
      momentum_dtype: dtype of the EMA of gradients; None for the parameter's, which is too coarse
        for an average where parameters are float8.
      base: how to estimate gradients where none are passed. ``"momentum"``, for updates that move
        like a momentum (Adam, LaProp, SGD with momentum): g is about u_t - b1 u_{t-1}, mu about
        u_t. ``"gradient"``, for updates that move like a gradient (SGD, RMSProp): g is about u_t,
        mu about its EMA. The wrong choice is worthless.

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
      Joo et al., `On Surprising Effectiveness of Masking Updates in Adaptive Optimizers`, 2026.
    """
    hp = Hyperparameters(
        survival_prob, temperature, b1, score_decay, initial_score, damping, rescale, where, blocks,
        key, axis_name, momentum_dtype,
    )  # fmt: skip
    if base not in ("momentum", "gradient"):
        raise ValueError(f'base must be "momentum" or "gradient", got {base!r}')
    warned: set[str] = set()

    def warn_once(applies, message):
        if applies and message not in warned:
            warned.add(message)
            warn(message)

    def init_fn(params):
        cuts = hp.find_blocks(params)
        momentum = init_momentum(params, cuts, hp.momentum_dtype)
        return init_state(params, hp.key, cuts, hp.initial_score, momentum)

    def update_fn(updates, state, params=None, *, grad=None, **extra_args):
        del extra_args
        check_kind(state, MagmaState)
        cuts = hp.find_blocks(updates, grad if params is None else params)
        if params is None:  # Then an integer parameter is one without momentum.
            unmasked = masked_paths(state.momentum)
            cuts = {path: cut for path, cut in cuts.items() if path not in unmasked}
        check_state(state, cuts, updates)
        old = match_blocks(state.momentum, updates, cuts, "momentum")
        if grad is not None:
            incoming, moments = match_blocks(grad, updates, cuts, "grad"), _from_gradient
            first = is_link() and _same_arrays(grad, updates, cuts)
            warn_once(cuts and first, _FIRST)
        else:
            warn_once(cuts, _ESTIMATED.format(base))
            incoming = match_blocks(updates, updates, cuts, "updates")
            moments = _from_momentum if base == "momentum" else _from_gradient

        x, buffer = read_apart((incoming, old))
        mu, g = {}, {}
        for path in cuts:
            mu[path], g[path], _ = moments(x[path], buffer[path], hp.b1)
        cosines = cosine_similarity(mu, g, cuts, hp.axis_name)
        scores, coins, factors = score_and_toss(hp, state, cuts, cosines)
        new = {path: moments(incoming[path], old[path], hp.b1)[2] for path in cuts}
        momentum = replace_momentum(state.momentum, new)
        state = MagmaState(
            step=next_step(state.step),
            key=state.key,
            alignment=replace_scores(state, scores),
            momentum=momentum,
        )
        return mask_updates(updates, cuts, coins, factors), state

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


def _same_arrays(grad: Any, updates: Any, paths: Iterable[str]) -> bool:
    ours, theirs = dict(named_leaves(updates)), dict(named_leaves(grad))
    return all(ours[path] is theirs[path] for path in paths)


def _from_momentum(
    delta: jax.Array, previous: jax.Array, b1: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mu, g, next buffer) from an update that is an EMA of something gradient-like: undo that."""
    u, last = widen_together(delta, previous)
    return u, u - jnp.asarray(b1, last.dtype) * last, keep_finite(u, u, last)


def _from_gradient(
    gradient: jax.Array, momentum: jax.Array, b1: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mu, g, next buffer) from a gradient, or from an update that is gradient-like."""
    mu = update_momentum(momentum, gradient, b1)
    return mu, gradient, mu
