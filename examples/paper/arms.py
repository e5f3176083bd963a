"""What Table 1 compares: optimizers by name, and the controls that tell what masking itself does.

Magma multiplies the attention and MLP updates by 0.2765 in the mean (survival 0.5 times a score of
about 0.553) and leaves embeddings, head and norms at the full rate. The controls keep this ratio
without the mask, the scores or both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from examples.llama.optimizers import direction, path_string
from magma_optax import attention_and_mlp, skip_update, with_magma

MEAN_MULTIPLIER = 0.2765  # of Magma at p = 0.5 and tau = 2, measured on Adam

Build = Callable[[ArrayLike | optax.Schedule, ArrayLike], optax.GradientTransformation]
Base = Callable[[], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One row of a table.

    Attributes:
        build: From a learning rate or schedule, traced or not, and the coins' seed to the
            optimizer.
        centre: The learning rate around which the search begins.
    """

    build: Build
    centre: float


def body(tree: optax.Params) -> optax.Params:
    """Marks attention and MLP matrices."""
    return jax.tree.map_with_path(
        lambda path, leaf: attention_and_mlp(path_string(path), leaf), tree
    )


def plain(base: Base, *after: optax.GradientTransformation) -> Build:
    """The base's direction, `after`, then the learning rate."""

    def build(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        del key  # no coins
        return optax.chain(base(), *after, optax.scale_by_learning_rate(learning_rate))

    return build


def magma(base: Base, where: Any = attention_and_mlp, **options: Any) -> Build:
    """Magma around the whole base."""

    def build(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        return with_magma(plain(base)(learning_rate, key), where=where, key=key, **options)

    return build


def skip(base: Base, multiplier: float = 1.0) -> Build:
    """SkipUpdate after the base, times a constant on the same matrices."""

    def build(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        mask = skip_update(0.5, where=attention_and_mlp, key=key)
        return optax.chain(plain(base, scaled(multiplier))(learning_rate, key), mask)

    return build


def scaled(multiplier: float) -> optax.GradientTransformation:
    """Attention and MLP updates times a constant."""
    return optax.masked(optax.scale(multiplier), body)


def family(name: str, centre: float) -> dict[str, Arm]:
    """A base, the paper's two maskings of it, and the controls.

    Whatever shrinks the updates starts its search at twice the base's rate.
    """

    def base() -> optax.GradientTransformation:
        return direction(name)

    return {
        name: Arm(plain(base), centre),
        f"{name}+magma": Arm(magma(base), 2 * centre),
        f"{name}+skip": Arm(skip(base), centre),
        # The mean multiplier alone; with the coins but without scores (0.553 x Bernoulli(0.5));
        # and the scores without coins.
        f"{name}+constant": Arm(plain(base, scaled(MEAN_MULTIPLIER)), 2 * centre),
        f"{name}+constant*mask": Arm(skip(base, MEAN_MULTIPLIER), 2 * centre),
        f"{name}+damping": Arm(magma(base, survival_prob=1.0), 2 * centre),
    }


ARMS: dict[str, Arm] = {
    **family("adam", 2e-3),
    **family("rmsprop", 2e-3),
    **family("laprop", 2e-3),
    **family("muon", 4e-3),
    "adafactor": Arm(plain(lambda: direction("adafactor")), 4e-3),
}
