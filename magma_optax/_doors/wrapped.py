"""What can be wrapped: a base optimizer, but no MultiSteps, inside which the wrapper belongs."""

from typing import Any

import optax

from magma_optax._doors.summary import accumulators
from magma_optax._step.options import makes_optimizer


def check_base(wrapper: str, inner: Any) -> None:
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


def check_base_state(wrapper: str, state: Any) -> None:
    """Raise a ValueError if there is an `optax.MultiSteps` in the base."""
    if accumulators(state):
        raise ValueError(_MULTI_STEPS.format(wrapper))


_MULTI_STEPS = (
    "{0} around optax.MultiSteps would score and toss coins at every micro-step: put it "
    "inside, optax.MultiSteps({0}(base), every_k_schedule=k)"
)
