"""Adam masked by Magma or SkipUpdate, in kernels that also apply the update, for NVIDIA GPUs.

An update that is a tree of arrays is written and read again, zeros and all. Here the parameters of
a dropped block are neither read nor written.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from magma_optax._blocks.cutting import Cut
from magma_optax._blocks.matching import match
from magma_optax._blocks.mesh import sum_over_mesh
from magma_optax._blocks.paths import NamedTree
from magma_optax._doors.skip_update import skip_update
from magma_optax._doors.with_magma import WithMagmaState, with_magma
from magma_optax._step.algorithm import ALIGNMENT, score_and_toss
from magma_optax._step.options import Options, Schedule
from magma_optax._step.state import MagmaState, check_kind, check_scores, next_step
from magma_optax.experimental import _adam_kernels
from magma_optax.experimental._adam_kernels import Adam, launch

__all__ = ["FusedAdam", "fused_adam"]


class FusedAdam(NamedTuple):
    """What `fused_adam` returns.

    Attributes:
      init: ``params -> state``, the state of ``plain``.
      update_and_apply: ``(grads, state, params) -> (params, state)``.
      plain: the same algorithm as an ordinary transformation on the same state, to switch to at any
        step and for ``optax.tree.map_params``.
    """

    init: Callable[[Any], Any]
    update_and_apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    plain: optax.GradientTransformationExtraArgs


def fused_adam(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    *,
    masking: Literal["magma", "skip_update"] = "magma",
    **options: Any,
) -> FusedAdam:
    """Adam masked by Magma or SkipUpdate whose update is applied as it is computed.

    Does what ``with_magma(optax.adam(...), ...)`` and ``optax.apply_updates`` do, or
    ``optax.chain(optax.adam(...), skip_update(...))`` and that: on the same state, with the same
    coins, up to the rounding of float32. On other devices than NVIDIA GPUs, and where JAX has no
    Triton backend for Pallas, it is just these. Jax 0.11 deprecates that backend, on which the
    kernels stand: hence "experimental".

    Call it under ``jit`` with state and parameters donated, on one device, on replicated parameters
    or inside ``shard_map``. **The kernels are not partitioned: of parameters that are sharded under
    ``jit``, XLA would gather the whole on every device.** On Explicit meshes that is an error; on
    Auto meshes types do not tell it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from magma_optax.experimental.fused import fused_adam
      >>> optimizer = fused_adam(1e-3, survival_prob=0.5)
      >>> step = jax.jit(optimizer.update_and_apply, donate_argnums=(1, 2))
      >>> params = {"w": jnp.ones((4, 4))}
      >>> state = optimizer.init(params)
      >>> params, state = step({"w": jnp.full((4, 4), 0.1)}, state, params)

    Args:
      learning_rate: a number or a schedule.
      b1: decay of Adam's average of gradients. With 0 Adam keeps no average by which Magma could
        score: it then has one of its own and takes its plain path, as it does on a state that holds
        one.
      b2: decay of Adam's average of squared gradients.
      eps: added to the root of that average.
      eps_root: added to that average under the root.
      weight_decay: if not 0, ``optax.adamw`` stands for ``optax.adam``, also in the state's type.
      masking: Magma, with the state of `with_magma`, or SkipUpdate, with that of the chain.
      **options: those of `with_magma` that concern Magma itself: ``survival_prob``,
        ``temperature``, ``score_decay``, ``initial_score``, ``damping``, ``rescale``, ``where``,
        ``blocks``, ``key``, ``axis_name``; or those of `skip_update`.

    Raises:
      ValueError: as `with_magma` and `skip_update`; and where a masked leaf's parameters, gradients
        or moments are not float32 or are sharded, or its blocks count along other than leading
        axes or have 2**31 elements, in ``init`` and ``update_and_apply``, with the path.
      TypeError: an argument of the wrong kind or an unknown option.

    References:
      Joo et al., *On Surprising Effectiveness of Masking Updates in Adaptive Optimizers*, 2026.
      Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2015.
    """
    if masking not in ("magma", "skip_update"):
        raise ValueError(f'masking must be "magma" or "skip_update", got {masking!r}')
    magma = masking == "magma"
    adam = Adam(*map(float, (b1, b2, eps, eps_root, weight_decay)))
    decay = {"weight_decay": weight_decay} if weight_decay else {}
    make: Any = optax.adamw if decay else optax.adam
    base = make(learning_rate, b1, b2, eps, eps_root, **decay)
    if magma:
        known = {field.name for field in dataclasses.fields(Options)} - {"b1", "score"}
        if unknown := options.keys() - known:
            raise TypeError(f"fused_adam has no option {min(unknown)!r}; it has {sorted(known)}")
        masking_options = Options(**options, score=ALIGNMENT)
        plain = with_magma(base, **options)
    else:
        plain = optax.chain(base, skip_update(**options))
        masking_options = Options(**options, damping=False, rescale=True)

    def init(params: Any) -> Any:
        named = NamedTree(params)
        cuts = masking_options.find_cuts(named)
        _check(cuts, params=named.arrays(cuts))
        return plain.init(params)

    def plain_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def unpack(state: Any) -> tuple[MagmaState, Any]:
        check_kind(state, WithMagmaState if magma else tuple)
        masks, inner = state if magma else state[::-1]
        check_kind(masks, MagmaState)
        return masks, inner

    def masked(grads: Any, state: Any, params: Any) -> tuple[dict[str, Cut], NamedTree, list[Any]]:
        """How leaves are cut; scores, named; and by path: parameters, moments and gradients."""
        masks, (moments, *_) = unpack(state)
        named = NamedTree(params)
        cuts = masking_options.find_cuts(named)
        scores = check_scores(masks, cuts if magma else {}, named)
        trees = {"params": params, "mu": moments.mu, "nu": moments.nu, "grads": grads}
        leaves = {name: match(NamedTree(x), named, cuts, name) for name, x in trees.items()}
        _check(cuts, **leaves)
        return cuts, scores, list(leaves.values())

    def fused_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        cuts, scores, leaves = masked(grads, state, params)
        masks, (moments, *scaling) = unpack(state)

        # Optax itself counts, and updates the leaves that are not masked.
        def others(tree: Any) -> dict[str, Any]:
            return {path: x for path, x in NamedTree(tree).leaves.items() if path not in cuts}

        inner = (moments._replace(mu=others(moments.mu), nu=others(moments.nu)), *scaling)
        updates, (counted, *scaling_next) = base.update(others(grads), inner, others(params))
        count = scaling[-1].count if callable(learning_rate) else counted.count
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        numbers = adam.numbers(jnp.asarray(rate, jnp.float32), counted.count)

        step = _magma_step if magma else _skip_update_step
        p, mu, nu, s = step(adam, masking_options, masks, scores.leaves, cuts, numbers, *leaves)

        applied: Any = optax.apply_updates(others(params), updates)
        mu, nu = _refill(moments.mu, mu | counted.mu), _refill(moments.nu, nu | counted.nu)
        inner = (counted._replace(mu=mu, nu=nu), *scaling_next)
        masks = masks._replace(step=next_step(masks.step), alignment=scores.replace(s))
        params = _refill(params, p | applied)
        return params, WithMagmaState(masks, inner) if magma else (inner, masks)

    def update_and_apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        masked(grads, state, params)  # Refuses the same on all devices.
        if jax.tree.leaves(unpack(state)[0].momentum):  # The kernels score by Adam's own mu.
            return plain_step(grads, state, params)
        if _adam_kernels.INTERPRET:
            return fused_step(grads, state, params)
        if _adam_kernels.triton is None:
            return plain_step(grads, state, params)
        return jax.lax.platform_dependent(grads, state, params, cuda=fused_step, default=plain_step)

    return FusedAdam(init, update_and_apply, plain)


def _check(cuts: dict[str, Cut], **leaves: dict[str, jax.Array]) -> None:
    """Refuse what the kernels cannot take."""
    instead = "use with_magma or skip_update"
    for path, cut in cuts.items():
        if cut.axes != tuple(range(len(cut.axes))):
            raise ValueError(
                f"fused_adam: the blocks of {path!r} count along axes {cut.axes}, but the kernels "
                f"take leading axes, as of stacked(0): {instead}"
            )
        if (length := leaves["params"][path].size // cut.size) >= 2**31:
            raise ValueError(
                f"fused_adam: a block of {path!r} has {length} elements, but the kernels count to "
                f"2**31: {instead}"
            )
        for name, x in ((name, xs[path]) for name, xs in leaves.items()):
            if x.dtype != jnp.float32:
                raise ValueError(
                    f"fused_adam: {path!r} in `{name}` is {x.dtype}, but the kernels take float32: "
                    f"cast it, leave it out of `where` or {instead}"
                )
            if axes := [axis for axis in jax.typeof(x).sharding.spec if axis is not None]:
                raise ValueError(
                    f"fused_adam: {path!r} in `{name}` is sharded over {axes}, but the kernels are "
                    f"not partitioned: call it inside shard_map or {instead}"
                )


def _refill(tree: Any, leaves: dict[str, Any]) -> Any:
    return NamedTree(tree).replace(leaves)


def _magma_step(adam, options, masks, scores, cuts, numbers, p, mu, nu, g):
    """Moments and sums of every block first, then the parameters of those that survive."""
    p, mu, nu, sums = dict(p), dict(mu), dict(nu), {}
    for path, cut in cuts.items():
        updated, read = (mu[path], nu[path]), (g[path],)
        mu[path], nu[path], parts = launch(adam.average, cut, updated, read, sums=3)
        sums[path] = tuple(jnp.sum(parts, axis=-1).reshape(3, *cut.shape))
    sums = sum_over_mesh(sums, cuts, options.axis_name)
    s, m, factors = score_and_toss(options, masks, scores, cuts, sums)
    for path, cut in cuts.items():
        factor = 1.0 if factors[path] is None else factors[path]
        per_block, read = (m[path], factor, *numbers), (mu[path], nu[path])
        (p[path],) = launch(adam.apply, cut, (p[path],), read, per_block)
    return p, mu, nu, s


def _skip_update_step(adam, options, masks, scores, cuts, numbers, p, mu, nu, g):
    """Moments of every block, and the parameters of those that survive, at once."""
    p, mu, nu = dict(p), dict(mu), dict(nu)
    _, m, factors = score_and_toss(options, masks, scores, cuts, {})
    for path, cut in cuts.items():
        updated, per_block = (p[path], mu[path], nu[path]), (m[path], factors[path], *numbers)
        p[path], mu[path], nu[path] = launch(adam.both, cut, updated, (g[path],), per_block)
    return p, mu, nu, {}
