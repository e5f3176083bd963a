"""Where the wrapper's first moment comes from: the base's state, or an EMA of its own."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from magma_optax._blocks.cutting import Cut
from magma_optax._blocks.matching import match
from magma_optax._blocks.paths import NamedTree
from magma_optax._moments.apart import read_apart
from magma_optax._moments.base import Ema, FirstMoments, leaves_by_place
from magma_optax._moments.own import init_momentum, update_momentum
from magma_optax._step.algorithm import Leaves, Moments
from magma_optax._step.numbers import mix
from magma_optax._step.options import Options


class MomentSource:
    """Finds mu_t, g_t and mu_{t-1} for `with_magma`."""

    def __init__(
        self,
        inner: optax.GradientTransformationExtraArgs,
        first_moment: Literal["auto", "own"] | Callable[[Any], Any],
        options: Options,
    ) -> None:
        self._inner, self._choice, self._options = inner, first_moment, options
        self._in_base = FirstMoments(inner.update)

    def _emas(self, gradients: Any, inner_state: Any) -> dict[str, Ema]:
        """Where the base keeps the first moment of each leaf for which it keeps one."""
        return self._in_base.find(gradients, inner_state) if self._choice == "auto" else {}

    def init_momentum(
        self, params: Any, named: NamedTree, inner_state: Any, cuts: dict[str, Cut]
    ) -> Any:
        """Zeros for the leaves whose first moment the base does not keep; None without any."""
        if callable(self._choice):
            return None
        own = cuts.keys() - self._emas(params, inner_state).keys()
        if own or _has_masks(inner_state) or (not named.leaves and self._would_own()):
            return init_momentum(named, own, self._options.momentum_dtype)
        return None

    def _would_own(self) -> bool:
        """For the leafless tree of `optax.tree.map_params`: what init does with a real one."""
        matrix = jnp.zeros((2, 2))
        return not self._emas(matrix, self._inner.init(matrix))

    def read(
        self,
        g: Leaves,
        own: Leaves,
        updates: tuple[Any, NamedTree],
        old_inner: Any,
        new_inner: Any,
    ) -> Moments:
        """Return the moments of this step.

        Args:
          g: gradients of the masked leaves.
          own: Magma's own momenta, for the leaves that have one.
          updates: the gradients that the base got, as they are and named.
          old_inner: the base's state before them.
          new_inner: the base's state after them.

        Raises:
          ValueError: the state keeps no first moment of a masked leaf.
        """
        if callable(self._choice):
            mu = match(NamedTree(self._choice(new_inner)), updates[1], g, "first_moment")
            return Moments(mu, g, NamedTree(self._choice(old_inner)).leaves)
        old, new = leaves_by_place(old_inner), leaves_by_place(new_inner)
        emas = self._emas(updates[0], old_inner)
        emas = {path: ema for path, ema in emas.items() if path in g and path not in own}
        if missing := [path for path in g if path not in emas and path not in own]:
            raise ValueError(
                f"the state keeps no first moment of {missing[0]!r}: it comes from another base "
                "optimizer or `first_moment`. Call init with these"
            )
        previous = {path: old[ema.place] for path, ema in emas.items()}
        g, own, previous = read_apart((g, own, previous))
        mu = {}
        for path, ema in emas.items():
            if ema.numbers:  # Computed anew rather than read from the new state; see read_apart.
                a, b = ema.numbers
                mu[path] = mix(a, previous[path], b, g[path])
            else:
                mu[path] = new[ema.place]
        for path, x in own.items():
            mu[path] = update_momentum(x, g[path], self._options.b1)
        return Moments(mu, g, previous | own)


def _has_masks(inner_state: Any) -> bool:
    """Whether the base masks parameters, so that its own state needs `is_leaf` to be mapped."""
    masks = (optax.MaskedState, optax.PartitionState)
    nodes = jax.tree.leaves(inner_state, is_leaf=lambda node: isinstance(node, masks))
    return any(isinstance(node, masks) for node in nodes)
