"""What Table 1 compares: optimizers by name, and the controls that tell what masking itself does.

Magma multiplies the attention and MLP updates by 0.277 in the mean on Adam (survival 0.5 times a
score of about 0.554) and leaves embeddings, head and norms at the full rate. The controls keep this
ratio, in closed form, without the mask, the scores or both. `examples.paper.beyond` has more arms,
at any ratio.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jax.typing import ArrayLike

from examples.kit.optimizers import MOMENTUM_DECAYS, direction
from examples.kit.soap import scale_by_soap
from examples.paper.baselines.apollo import scale_by_apollo
from examples.paper.baselines.c_adam import scale_by_c_adam
from examples.paper.baselines.controls import constant_times_mask, damping_only
from examples.paper.baselines.matrices import on_matrices
from examples.paper.baselines.mgup import mgup
from examples.paper.baselines.sgg import sgg
from examples.paper.baselines.stable_spam import scale_by_stable_spam
from magma_optax import attention_and_mlp, control, mean_multiplier, skip_update, with_magma

Build = Callable[[ArrayLike | optax.Schedule, ArrayLike], optax.GradientTransformation]
Base = Callable[[], optax.GradientTransformation]  # a direction, uphill, without learning rate


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


def plain(base: Base) -> Build:
    """The base as it is."""

    def build(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        del key  # no coins
        return optax.chain(base(), optax.scale_by_learning_rate(learning_rate))

    return build


def then(base: Base, link: Callable[[ArrayLike], optax.GradientTransformation]) -> Build:
    """The base, then what `link` makes of the coins' seed."""

    def build(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        return optax.chain(plain(base)(learning_rate, key), link(key))

    return build


def magma(base: Base, where: Any = attention_and_mlp, **options: Any) -> Build:
    """Magma around the whole base."""

    def build(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        return with_magma(plain(base)(learning_rate, key), where=where, key=key, **options)

    return build


def family(name: str, base: Base, centre: float) -> dict[str, Arm]:
    """A base, the paper's two maskings of it, and the controls.

    The search of whatever shrinks updates begins at twice the base's rate.

    Args:
        name: Of the base, a key of `MOMENTUM_DECAYS`: the decay decides Magma's mean multiplier.
        base: The base.
        centre: Where its search begins.
    """
    multiplier = mean_multiplier(MOMENTUM_DECAYS[name])

    def skip(key: ArrayLike) -> optax.GradientTransformation:
        return skip_update(0.5, where=attention_and_mlp, key=key)

    def shrink(key: ArrayLike) -> optax.GradientTransformation:
        del key
        return control(multiplier, where=attention_and_mlp)

    def shrink_and_mask(key: ArrayLike) -> optax.GradientTransformation:
        return constant_times_mask(2 * multiplier, 0.5, key=key)

    def damp_by_half(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        return damping_only(plain(base)(learning_rate, key), c=0.5)

    return {
        name: Arm(plain(base), centre),
        f"{name}+magma": Arm(magma(base), 2 * centre),
        f"{name}+skip": Arm(then(base, skip), centre),
        f"{name}+constant": Arm(then(base, shrink), 2 * centre),
        f"{name}+constant*mask": Arm(then(base, shrink_and_mask), 2 * centre),
        f"{name}+damping": Arm(magma(base, survival_prob=1.0), 2 * centre),
        f"{name}+damping/2": Arm(damp_by_half, 2 * centre),
    }


class RememberingState(NamedTuple):
    """State of `remembering`."""

    momentum: optax.EmaState
    inner_state: Any


def remembering(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps an EMA of the gradients beside `inner`, for SGG over a base that has none."""
    ema = optax.ema(0.9, debias=False)

    def init_fn(params):
        return RememberingState(ema.init(params), inner.init(params))

    def update_fn(updates, state, params=None):
        directions, inner_state = inner.update(updates, state.inner_state, params)
        _, momentum = ema.update(updates, state.momentum)
        return directions, RememberingState(momentum, inner_state)

    return optax.GradientTransformation(init_fn, update_fn)


def adam() -> optax.GradientTransformation:
    """Adam everywhere; APOLLO and SGG leave embeddings, head and norms to it."""
    return direction("adam")


def adam_sgg() -> optax.GradientTransformation:
    """Adam with SGG on the matrices."""
    return on_matrices(sgg(adam()), adam())


def apollo() -> optax.GradientTransformation:
    """APOLLO on the matrices."""
    return on_matrices(scale_by_apollo(), adam())


def apollo_sgg() -> optax.GradientTransformation:
    """APOLLO with SGG on the matrices; its own moments are of low rank."""
    grouped = sgg(remembering(scale_by_apollo()), momentum=lambda state: state.momentum.ema)
    return on_matrices(grouped, adam())


def rmsprop() -> optax.GradientTransformation:
    """RMSProp everywhere."""
    return direction("rmsprop")


def laprop() -> optax.GradientTransformation:
    """LaProp everywhere."""
    return direction("laprop")


def muon() -> optax.GradientTransformation:
    """Muon on the matrices, Adam on the rest."""
    return direction("muon")


# What arms beyond the paper can stand on.
BASES: dict[str, Base] = {
    "adam": adam,
    "c_adam": scale_by_c_adam,
    "laprop": laprop,
    "rmsprop": rmsprop,
    "muon": muon,
}

ARMS: dict[str, Arm] = {
    **family("adam", adam, 2e-3),
    **family("rmsprop", rmsprop, 2e-3),
    **family("laprop", laprop, 2e-3),
    **family("muon", muon, 4e-3),
    "c_adam": Arm(plain(scale_by_c_adam), 2e-3),
    "adam+sgg": Arm(plain(adam_sgg), 2e-3),
    "adafactor": Arm(plain(lambda: direction("adafactor")), 4e-3),
    "apollo": Arm(plain(apollo), 1e-2),
    "apollo+sgg": Arm(plain(apollo_sgg), 1e-2),
    "mgup": Arm(plain(lambda: mgup(adam())), 2e-3),
    "stable_spam": Arm(plain(scale_by_stable_spam), 2e-3),
    "soap": Arm(plain(scale_by_soap), 2e-3),
}
