"""Adam masked by Magma or SkipUpdate, in kernels that also apply the update, for NVIDIA GPUs.

An update that is a tree of arrays is written and read again, zeros and all. Here the parameters of
a dropped block are neither read nor written.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from magma_optax._alignment import cosine_of_sums
from magma_optax._blocks import Blocks
from magma_optax._hyperparameters import Hyperparameters, Schedule, at_step
from magma_optax._masking import score_and_toss, toss
from magma_optax._momentum import match_blocks
from magma_optax._paths import leaves_by_path, map_by_path
from magma_optax._skip_update import skip_update
from magma_optax._state import MagmaState, check_kind, check_state, next_step
from magma_optax._with_magma import WithMagmaState, with_magma

__all__ = ["FusedAdam", "fused_adam"]

_TILE, _WARPS = 1024, 4  # Elements and warps of one program of a kernel.
_INTERPRET = False  # For tests: run the kernels, interpreted, on any device.


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
    coins, up to the rounding of float32. On other devices than NVIDIA GPUs it is just these.

    Call it under ``jit`` with state and parameters donated, on one device, on replicated parameters
    or inside ``shard_map``. **The kernels are not partitioned: of parameters that are sharded under
    ``jit``, XLA would gather the whole on every device.** On Explicit meshes that is an error; on
    Auto meshes types do not tell it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from magma_optax.fused import fused_adam
      >>> optimizer = fused_adam(1e-3, survival_prob=0.5)
      >>> step = jax.jit(optimizer.update_and_apply, donate_argnums=(1, 2))
      >>> params = {"w": jnp.ones((4, 4))}
      >>> state = optimizer.init(params)
      >>> params, state = step({"w": jnp.full((4, 4), 0.1)}, state, params)

    Args:
      learning_rate: a number or a schedule.
      b1: as in ``optax.adam``, like ``b2``, ``eps`` and ``eps_root``.
      b2: see ``b1``.
      eps: see ``b1``.
      eps_root: see ``b1``.
      weight_decay: if not 0, ``optax.adamw`` stands for ``optax.adam``, also in the state's type.
      masking: Magma, with the state of `with_magma`, or SkipUpdate, with that of the chain.
      **options: those of `with_magma` that concern Magma itself: ``survival_prob``,
        ``temperature``, ``score_decay``, ``initial_score``, ``damping``, ``rescale``, ``where``,
        ``blocks``, ``key``, ``axis_name``; or those of `skip_update`.

    Raises:
      ValueError: as `with_magma` and `skip_update`; and where a masked leaf's parameters, gradients
        or moments are not float32 or are sharded, or its blocks count along other than leading
        axes, in ``init`` and ``update_and_apply``, with the path.
      TypeError: an argument of the wrong kind or an unknown option.

    References:
      Joo et al., `On Surprising Effectiveness of Masking Updates in Adaptive Optimizers`, 2026.
      Kingma and Ba, `Adam: A Method for Stochastic Optimization`, 2015.
    """
    if masking not in ("magma", "skip_update"):
        raise ValueError(f'masking must be "magma" or "skip_update", got {masking!r}')
    magma = masking == "magma"
    adam = _Adam(*map(float, (b1, b2, eps, eps_root, weight_decay)))
    decay = {"weight_decay": weight_decay} if weight_decay else {}
    base = (optax.adamw if decay else optax.adam)(learning_rate, b1, b2, eps, eps_root, **decay)
    if magma:
        hp, plain = Hyperparameters(**options), with_magma(base, **options)
    else:
        plain = optax.chain(base, skip_update(**options))
        hp = Hyperparameters(**options, damping=False, rescale=True)
    base = optax.with_extra_args_support(base)

    def init(params: Any) -> Any:
        cuts = hp.find_blocks(params)
        _check(cuts, params=match_blocks(params, params, cuts, "params"))
        return plain.init(params)

    def plain_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def unpack(state: Any) -> tuple[MagmaState, Any]:
        check_kind(state, WithMagmaState if magma else tuple)
        masks, inner = state if magma else state[::-1]
        check_kind(masks, MagmaState)
        return masks, inner

    def masked(grads: Any, state: Any, params: Any) -> tuple[dict[str, Blocks], list[Any]]:
        """How leaves are cut; and by path, checked: parameters, moments and gradients."""
        masks, (moments, *_) = unpack(state)
        cuts = hp.find_blocks(params)
        check_state(masks, cuts if magma else {})
        trees = {"params": params, "mu": moments.mu, "nu": moments.nu, "grads": grads}
        leaves = {name: match_blocks(x, params, cuts, name) for name, x in trees.items()}
        _check(cuts, **leaves)
        return cuts, list(leaves.values())

    def fused_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        cuts, leaves = masked(grads, state, params)
        masks, (moments, *scaling) = unpack(state)

        # Optax itself counts, and updates the leaves that are not masked.
        def others(tree: Any) -> dict[str, Any]:
            return {path: x for path, x in leaves_by_path(tree).items() if path not in cuts}

        inner = (moments._replace(mu=others(moments.mu), nu=others(moments.nu)), *scaling)
        updates, (counted, *scaling_next) = base.update(others(grads), inner, others(params))
        count = scaling[-1].count if callable(learning_rate) else counted.count
        numbers = adam.numbers(at_step(learning_rate, count), counted.count)

        step = _magma_step if magma else _skip_update_step
        p, mu, nu, scores = step(adam, hp, masks, cuts, numbers, *leaves)

        p |= optax.apply_updates(others(params), updates)
        mu, nu = _refill(moments.mu, mu | counted.mu), _refill(moments.nu, nu | counted.nu)
        inner = (counted._replace(mu=mu, nu=nu), *scaling_next)
        masks = masks._replace(step=next_step(masks.step), alignment=scores)
        return _refill(params, p), WithMagmaState(masks, inner) if magma else (inner, masks)

    def update_and_apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        masked(grads, state, params)  # Refuses the same on all devices.
        if _INTERPRET:
            return fused_step(grads, state, params)
        return jax.lax.platform_dependent(grads, state, params, cuda=fused_step, default=plain_step)

    return FusedAdam(init, update_and_apply, plain)


def _check(cuts: dict[str, Blocks], **leaves: dict[str, jax.Array]) -> None:
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
    return map_by_path(lambda path, _: leaves[path], tree)


def _magma_step(adam, hp, masks, cuts, numbers, p, mu, nu, g):
    """Moments and sums of every block first, then the parameters of those that survive."""
    p, mu, nu, sums = dict(p), dict(mu), dict(nu), {}
    for path, cut in cuts.items():
        updated, read = (mu[path], nu[path]), (g[path],)
        mu[path], nu[path], parts = _launch(adam.average, cut, updated, read, sums=3)
        sums[path] = tuple(jnp.sum(parts, axis=-1).reshape(3, *cut.shape))
    cosines = cosine_of_sums(sums, cuts, hp.axis_name)
    scores, coins, factors = score_and_toss(hp, masks, cuts, cosines)
    for path, cut in cuts.items():
        factor = 1.0 if factors[path] is None else factors[path]
        per_block, read = (coins[path], factor, *numbers), (mu[path], nu[path])
        (p[path],) = _launch(adam.apply, cut, (p[path],), read, per_block)
    return p, mu, nu, scores if cuts else masks.alignment


def _skip_update_step(adam, hp, masks, cuts, numbers, p, mu, nu, g):
    """Moments of every block, and the parameters of those that survive, at once."""
    p, mu, nu = dict(p), dict(mu), dict(nu)
    survival = at_step(hp.survival_prob, masks.step)
    coins = toss(masks, cuts, dict.fromkeys(cuts, survival))
    for path, cut in cuts.items():
        updated, per_block = (p[path], mu[path], nu[path]), (coins[path], 1 / survival, *numbers)
        p[path], mu[path], nu[path] = _launch(adam.both, cut, updated, (g[path],), per_block)
    return p, mu, nu, masks.alignment


@dataclasses.dataclass(frozen=True)
class _Adam:
    """Adam's equations, and the kernels: functions of ``load``, ``store`` and references."""

    b1: float
    b2: float
    eps: float
    eps_root: float
    weight_decay: float

    def numbers(self, learning_rate, count):
        corrections = (1 - self.b1**count, 1 - self.b2**count)
        return -learning_rate, *(x.astype(jnp.float32) for x in corrections)

    def moments(self, mu, nu, g):
        return (1 - self.b1) * g + self.b1 * mu, (1 - self.b2) * (g * g) + self.b2 * nu

    def move(self, p, mu, nu, per_block):
        factor, step_size, correction_1, correction_2 = (per_block[n] for n in range(1, 5))
        delta = mu / correction_1 / (jnp.sqrt(nu / correction_2 + self.eps_root) + self.eps)
        if self.weight_decay:
            delta += self.weight_decay * p
        return p + step_size * delta * factor

    def average(self, load, store, mu, nu, g, new_mu, new_nu, sums):
        g = load(g)
        x, y = self.moments(load(mu), load(nu), g)
        store(new_mu, x)
        store(new_nu, y)
        for n, product in enumerate((x * g, x * x, g * g)):
            sums[n] = jnp.sum(product)

    def apply(self, load, store, p, mu, nu, per_block, new_p):
        @pl.when(per_block[0] != 0)
        def _():
            store(new_p, self.move(load(p), load(mu), load(nu), per_block))

    def both(self, load, store, p, mu, nu, g, per_block, new_p, new_mu, new_nu):
        x, y = self.moments(load(mu), load(nu), load(g))
        store(new_mu, x)
        store(new_nu, y)

        @pl.when(per_block[0] != 0)
        def _():
            store(new_p, self.move(load(p), x, y, per_block))


def _launch(kernel, cut, updated, read, per_block=(), sums=0):
    """Run a kernel on every tile of every block of a leaf.

    Args:
      kernel: a function of ``load``, ``store`` and a reference for each argument and each result.
      cut: how the leaf is cut, along leading axes.
      updated: arrays of the leaf's shape that are updated in place: the first results.
      read: further such arrays.
      per_block: numbers, () or of the blocks' shape, handed over as one float32 array.
      sums: how many sums over a tile are the last result, of shape (sums, blocks, tiles).
    """
    arrays = [x.reshape(cut.size, -1) for x in (*updated, *read)]
    rows, length = arrays[0].shape
    size = min(_TILE, pl.next_power_of_2(length))
    tiles = pl.cdiv(length, size)
    tile = pl.BlockSpec((None, size), lambda i, row: (row, i))
    in_specs, out_specs = [tile] * len(arrays), [tile] * len(updated)
    # Inside shard_map, a result varies along all mesh axes along which an argument does.
    like = jax.eval_shape(lambda *xs: sum(xs), *arrays)
    out_shape = [like] * len(updated)
    if per_block:
        arrays.append(jnp.stack([jnp.broadcast_to(x, cut.shape).ravel() for x in per_block]))
        in_specs.append(pl.BlockSpec((len(per_block), None), lambda i, row: (0, row)))
    if sums:
        shape = (sums, rows, tiles)
        out_shape.append(jax.eval_shape(lambda x: jnp.broadcast_to(x[0, 0], shape), like))
        out_specs.append(pl.BlockSpec((sums, None, None), lambda i, row: (0, row, i)))

    def body(*refs):
        # Without a mask Triton reads and writes past the end of a block.
        inside = pl.program_id(0) * size + jnp.arange(size, dtype=jnp.int32) < length
        mask = {"mask": inside} if length % size else {}
        load = functools.partial(plgpu.load, **mask, **({"other": 0.0} if mask else {}))
        kernel(load, functools.partial(plgpu.store, **mask), *refs)

    results = pl.pallas_call(
        body,
        grid=(tiles, rows),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases={n: n for n in range(len(updated))},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS),
        interpret=_INTERPRET,
        name=f"fused_adam_{kernel.__name__}",
    )(*arrays)
    return *(x.reshape(updated[0].shape) for x in results[: len(updated)]), *results[len(updated) :]
