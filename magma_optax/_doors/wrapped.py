"""The base of a wrapper: an optimizer, but no MultiSteps, inside which the wrapper belongs."""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.core import Tracer

from magma_optax._blocks.cutting import Cut
from magma_optax._blocks.paths import NamedTree
from magma_optax._doors.summary import accumulators
from magma_optax._lazy.base import Directions, check_separable, update_lazily
from magma_optax._step.options import check_bool, makes_optimizer


class Wrapped:
    """The base of a wrapper.

    Attributes:
      inner: the base, which takes extra arguments.
    """

    def __init__(self, wrapper: str, inner: Any, lazy: bool) -> None:
        """Check it.

        Args:
          wrapper: the function that wraps it, for errors.
          inner: the base.
          lazy: whether directions of dropped blocks are left out.

        Raises:
          TypeError: ``inner`` is no optimizer, or ``lazy`` no bool.
          ValueError: ``inner`` is an `optax.MultiSteps`.
        """
        check_bool("lazy", lazy)
        _check_base(wrapper, inner)
        self.inner = optax.with_extra_args_support(inner)
        self._wrapper, self._lazy = wrapper, lazy

    def init(self, params: Any, cuts: dict[str, Cut]) -> Any:
        """Return the base's first state.

        Raises:
          ValueError: there is an `optax.MultiSteps` in it; if lazy, the base is not separable.
        """
        state = self.inner.init(params)
        if accumulators(state):
            raise ValueError(_MULTI_STEPS.format(self._wrapper))
        if self._lazy:
            check_separable(self.inner, cuts, params, state)
        return state

    def update(
        self, cuts: dict[str, Cut], arguments: tuple[Any, Any, Any], extra_args: Mapping[str, Any]
    ) -> tuple[Directions, Any]:
        """Return the base's directions, as a function of the coins, and its new state.

        Outside ``jit`` all is computed at once: a branch would have to wait for its coin.
        """
        if self._lazy and any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
            return update_lazily(self.inner, cuts, arguments, extra_args)
        updates, state = self.inner.update(*arguments, **extra_args)
        delta = NamedTree(updates)
        return lambda m: delta, state


def _check_base(wrapper: str, inner: Any) -> None:
    """Raise an error if ``inner`` is no optimizer, or is an `optax.MultiSteps`."""
    if not isinstance(inner, type) and hasattr(inner, "init") and hasattr(inner, "update"):
        if isinstance(inner, optax.MultiSteps):
            raise ValueError(_MULTI_STEPS.format(wrapper))
        return
    if makes_optimizer(inner):
        raise TypeError(
            f"{wrapper} wraps an optimizer, got the function {inner.__name__} that makes one: "
            f"call it, as in {wrapper}({inner.__name__}(1e-3))"
        )
    link = wrapper.removeprefix("with_")
    raise TypeError(
        f"{wrapper} wraps an optax.GradientTransformation, got {inner!r}; {link}() is the link "
        "of a chain"
    )


_MULTI_STEPS = (
    "{0} around optax.MultiSteps would score and toss coins at every micro-step: put it "
    "inside, optax.MultiSteps({0}(base), every_k_schedule=k)"
)
