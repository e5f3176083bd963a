"""The options that `magma`, `with_magma` and `skip_update` share, checked once."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from magma_optax._blocks.choosing import Where, find_cuts, is_predicate
from magma_optax._blocks.cutting import GRANULARITIES, AxisName, Cut, Granularity
from magma_optax._blocks.paths import NamedTree
from magma_optax._step.coins import raw_key

Schedule = Callable[[jax.Array], ArrayLike]


@dataclasses.dataclass(kw_only=True)
class Options:
    """Arguments of `magma` by the same names and defaults; ``key`` becomes raw key data."""

    survival_prob: ArrayLike | Schedule | str = 0.5
    temperature: ArrayLike | Schedule = 2.0
    b1: ArrayLike = 0.9
    score_decay: ArrayLike | Schedule = 0.9
    initial_score: ArrayLike = 0.5
    damping: bool = True
    rescale: bool = False
    where: Where | None = None
    blocks: Granularity = "leaf"
    key: Any = 0
    axis_name: AxisName = None
    momentum_dtype: Any = None
    score: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.survival_prob, optax.GradientTransformation) or makes_optimizer(
            self.survival_prob
        ):
            raise TypeError(
                "survival_prob must be a number or a schedule, got an optimizer. magma and "
                "skip_update are links of a chain and take none: write optax.chain(base, magma()), "
                "optax.chain(base, skip_update()) or with_magma(base)"
            )
        if not (isinstance(self.survival_prob, str) and self.survival_prob == "alignment"):
            check_number("survival_prob", self.survival_prob, lambda p: 0 < p <= 1, "in (0, 1]")
        check_number("temperature", self.temperature, lambda t: t > 0, "greater than 0")
        check_number("b1", self.b1, lambda b: 0 <= b < 1, "in [0, 1)", schedule=False)
        check_number("score_decay", self.score_decay, lambda b: 0 <= b < 1, "in [0, 1)")
        check_number(
            "initial_score", self.initial_score, lambda s: 0 <= s <= 1, "in [0, 1]", schedule=False
        )
        check_bool("damping", self.damping)
        check_bool("rescale", self.rescale)
        granularity = isinstance(self.blocks, str) and self.blocks in GRANULARITIES
        if not (granularity or callable(self.blocks)):
            raise ValueError(
                f"blocks must be one of {', '.join(map(repr, GRANULARITIES))} or a function "
                f"(path, leaf) -> axes such as stacked(0), got {self.blocks!r}"
            )
        if callable(self.blocks) and (isinstance(self.blocks, type) or not takes(self.blocks, 2)):
            raise TypeError(
                f"blocks must be a function of two arguments, (path, leaf) -> axes, got "
                f"{self.blocks!r}; for leaves stacked along axis 0 call stacked: blocks=stacked(0)"
            )
        if is_predicate(self.where) and not takes(self.where, 2):
            raise TypeError(
                "`where` must be a predicate of two arguments, (path, leaf) -> bool, got "
                f"{self.where!r}, which does not take two; of a function that makes a mask of "
                "parameters, as optax.masked takes, pass the mask itself: where=mask(params)"
            )
        if self.momentum_dtype is not None:
            _check_float_dtype("momentum_dtype", self.momentum_dtype)
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        if self.axis_name is not None and not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"axis_name must be a mesh axis or a tuple of them, got {self.axis_name!r}"
            )
        if self.score is not None and not hasattr(self.score, "of_sums"):
            raise TypeError(
                f"score must be a magma_optax.Score(products, of_sums), got {self.score!r}"
            )
        self.key = raw_key(self.key)

    def find_cuts(self, tree: NamedTree, typed: NamedTree | None = None) -> dict[str, Cut]:
        """Return how each masked leaf of ``tree`` is cut; see `choosing.find_cuts`."""
        return find_cuts(tree, self.where, self.blocks, typed)

    def at_step(self, name: str, step: jax.Array) -> jax.Array:
        """Return the option ``name``, a number or a schedule, at ``step``; float32 ().

        Raises:
          ValueError: the schedule returned an array of several numbers.
          TypeError: it returned no number.
        """
        value = getattr(self, name)
        if callable(value):
            value = value(jnp.where(step < 0, np.int32(2**31 - 1), step))  # See MagmaState.step.
        try:
            number = jnp.asarray(value, jnp.float32)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be one number, its schedule gave {value!r}") from None
        if number.shape != ():
            raise ValueError(
                f"{name} must be one number, its schedule gave an array {number.shape}"
            )
        return number


def makes_optimizer(value: Any) -> bool:
    """Whether ``value`` is a function such as ``optax.adam``, not called."""
    try:
        made = inspect.signature(value).return_annotation
    except (TypeError, ValueError):
        return False
    return "GradientTransformation" in getattr(made, "__name__", str(made))


def takes(function: Any, count: int) -> bool:
    """Whether ``function`` can be called with ``count`` arguments by position."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # A builtin that does not tell.
        return True
    return True


def check_bool(name: str, value: Any) -> None:
    """Refuse what only looks like a choice, such as a string or a traced boolean."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_float_dtype(name: str, value: Any) -> None:
    try:  # `inject_hyperparams` makes an array of a dtype.
        real = not isinstance(value, jax.Array) and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        real = False
    if not real:
        raise ValueError(
            f"{name} must be a float dtype, got {value!r}; optax.inject_hyperparams takes it if "
            "named in static_args"
        )


def check_number(
    name: str, value: Any, holds: Callable[[Any], bool], says: str, schedule: bool = True
) -> None:
    """Refuse wrong numbers; of schedules and traced numbers the value is not known yet."""
    if schedule and callable(value):
        return
    known = int | float | np.number | np.ndarray | jax.Array
    other = jnp.bool_, jnp.complexfloating
    if not isinstance(value, known) or any(jnp.issubdtype(_dtype(value), kind) for kind in other):
        kinds = "a number or a schedule" if schedule else "a number"
        kinds += ' or "alignment"' if name == "survival_prob" else ""
        raise TypeError(f"{name} must be {kinds}, got {value!r}")
    if np.shape(value) != ():
        raise ValueError(f"{name} must be one number, got an array of shape {np.shape(value)}")
    if not isinstance(value, Tracer) and not holds(float(value)):  # Also refuses NaN.
        raise ValueError(f"{name} must be {says}, got {value!r}")


def _dtype(number: Any) -> Any:
    return getattr(number, "dtype", type(number))
