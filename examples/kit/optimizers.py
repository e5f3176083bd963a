"""Optimizers by name, with Magma or SkipUpdate on the attention and MLP matrices."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import optax
import optax.contrib

from examples.kit.options import SettingsError
from examples.kit.paths import path_string
from magma_optax import (
    attention_and_mlp,
    control,
    describe_masking,
    mean_multiplier,
    skip_update,
    with_magma,
    with_skip_update,
)

# Peak learning rates: for the base as it is, and under Magma. Magma scales the attention and MLP
# updates by about 0.28 on average and wants about three times the rate. Adam's pair was measured:
# nano preset, seed 0, validation loss after 600 steps at 0.5, 1, 2, 3 and 6e-3 was 1.788, 1.663,
# 1.650, 1.753 and 2.105 for Adam (1.771, 1.641, 1.750, 1.806 and 2.050 with other initial draws),
# and at 2, 3 and 6e-3 1.634, 1.580 and 1.589 for Adam with Magma.
# The other bases had one to three runs of 200 steps; under Magma they take three times their rate.
LEARNING_RATES = {
    "adam": (1e-3, 3e-3),
    "adamw": (1e-3, 3e-3),
    "rmsprop": (1e-3, 3e-3),
    "laprop": (1e-3, 3e-3),
    "lion": (1e-3, 3e-3),
    "adafactor": (1e-3, 3e-3),
    "muon": (3e-3, 9e-3),
}


# Decay of the first moment that Magma scores; where the base has none, Magma keeps its own.
MOMENTUM_DECAYS = dict.fromkeys(LEARNING_RATES, 0.9) | {"muon": 0.95, "lion": 0.99}

Masking = Literal["none", "magma", "skip", "control"]
Blocks = str | Callable  # What magma_optax takes as `blocks`.


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What decides every update.

    Attributes:
        name: A key of `LEARNING_RATES`.
        learning_rate: Peak of the schedule.
        steps: Length of the schedule.
        warmup: Steps of linear warm-up from 0; a cosine to a tenth of the peak follows.
        weight_decay: Decoupled decay of everything but the norms, times the learning rate.
        clip: Largest global gradient norm; 0 turns clipping off.
        b2: Decay rate of Adam's second moment.
        masking: What is done to the attention and MLP updates.
        survival_prob: Probability that a block is updated, or ``"alignment"`` (Magma only).
        temperature: Magma's temperature.
        mask_key: Seed of the coins.
        multiplier: What the control multiplies attention and MLP updates by; None for Magma's mean.
        lazy: Whether no direction is computed for a dropped block.
    """

    name: str
    learning_rate: float
    steps: int
    warmup: int
    weight_decay: float = 0.0
    clip: float = 0.0
    b2: float = 0.999
    masking: Masking = "none"
    survival_prob: float | str = 0.5
    temperature: float = 2.0
    mask_key: int = 0
    multiplier: float | None = None
    lazy: bool = False

    @property
    def constant(self) -> float:
        """The control's multiplier."""
        if self.multiplier is not None:
            return self.multiplier
        return mean_multiplier(MOMENTUM_DECAYS[self.name], self.survival_prob, self.temperature)

    @property
    def noise_score(self) -> float:
        """Magma's score where gradients are independent from step to step: their mean is noise."""
        return mean_multiplier(MOMENTUM_DECAYS[self.name], 1.0, self.temperature)


def muon_dimensions(params: optax.Params) -> optax.Params:
    """Sends attention and MLP matrices to Muon, all else to Adam.

    Muon alone would take 2-D embeddings for hidden matrices and leave stacked 3-D ones to Adam.
    """

    def dimensions(path: tuple[Any, ...], leaf: jax.Array):
        if not attention_and_mlp(path_string(path), leaf):
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree.map_with_path(dimensions, params)


def rms(decay: float, eps: float = 1e-8) -> optax.GradientTransformation:
    """Divides by the root of the mean square: eps outside as in PyTorch, with bias correction."""
    return optax.scale_by_rms(decay, eps=eps, eps_in_sqrt=False, bias_correction=True)


def direction(name: str, b2: float = 0.999) -> optax.GradientTransformation:
    """Returns the base `name` without learning rate and decay; it points uphill."""
    match name:
        case "adam" | "adamw":
            return optax.scale_by_adam(b1=0.9, b2=b2, eps=1e-8)
        case "rmsprop":
            return rms(0.99)
        case "laprop":
            # Ziyin et al., 2002.04839: first normalised, then averaged. There the learning rate is
            # inside the average, which differs only while the rate changes.
            return optax.chain(rms(0.999, eps=1e-15), optax.ema(0.9))
        case "lion":
            return optax.scale_by_lion(b1=0.9, b2=0.99)
        case "adafactor":
            adafactor = optax.adafactor(
                None,
                multiply_by_parameter_scale=False,
                momentum=None,
                clipping_threshold=1.0,
                decay_rate=0.8,
            )
            return optax.chain(adafactor, optax.scale(-1.0))
        case "muon":  # root mean square 0.2, as Adam's: one learning rate suits both groups
            muon = optax.contrib.muon(
                1.0,
                adam_learning_rate=1.0,
                adam_b2=b2,
                muon_weight_dimension_numbers=muon_dimensions,
                consistent_rms=0.2,
            )
            return optax.chain(muon, optax.scale(-1.0))
    raise ValueError(f"unknown optimizer {name!r}; choose from {', '.join(LEARNING_RATES)}")


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Returns the learning rate as a function of the number of steps done."""
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup, config.steps, 0.1 * config.learning_rate
    )


def rate_at(schedule: optax.Schedule, step: int) -> float:
    """Returns the learning rate after `step` steps, computed on its own beside the training."""
    with jax.transfer_guard("allow"):
        return float(schedule(step))


@contextlib.contextmanager
def refusals(config: OptimizerConfig) -> Iterator[None]:
    """Says in one line what ``--lazy`` refuses when the optimizer first meets the parameters.

    Raises:
        SettingsError: In the place of Magma's ValueError.
    """
    try:
        yield
    except ValueError as error:
        if not config.lazy:
            raise
        raise SettingsError(f"--{error}; that is: leave --lazy out") from None


def describe(config: OptimizerConfig, blocks: Blocks, params: optax.Params) -> str:
    """Says in two lines which optimizer it is, at which rate, and what is masked.

    Args:
        config: What is built.
        blocks: How magma_optax cuts parameters into blocks.
        params: The parameters, or their `jax.ShapeDtypeStruct`.
    """
    name = {
        "none": "",
        "magma": " with Magma",
        "skip": " with SkipUpdate",
        "control": " with the control in Magma's place",
    }[config.masking]
    plain, shrunk = LEARNING_RATES[config.name]
    rate = f"{config.learning_rate:g}"
    if config.masking in ("magma", "control") and config.learning_rate == shrunk != plain:
        rate += f" (the default with --{config.masking}; {plain:g} without)"
    masked = "masked: nothing"
    if config.masking == "control":
        masked += f"; attention and MLP updates times {config.constant:.4g}"
    elif config.masking != "none":
        masked = describe_masking(params, where=attention_and_mlp, blocks=blocks).summary
        masked += "; a dropped block's direction is not computed" if config.lazy else ""
    return (
        f"{config.name}{name}, peak learning rate {rate}: {config.warmup} steps of linear "
        f"warm-up, then a cosine to a tenth at step {config.steps}\n{masked}"
    )


def make(
    config: OptimizerConfig, blocks: Blocks, decays: Callable[[optax.Params], optax.Params]
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """Returns what `assemble` does, and the learning rate as a function of the steps done.

    Raises:
        SettingsError: For values that optax or magma_optax refuse.
    """
    try:
        return assemble(config, blocks, decays), schedule(config)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def assemble(
    config: OptimizerConfig, blocks: Blocks, decays: Callable[[optax.Params], optax.Params]
) -> optax.GradientTransformationExtraArgs:
    """Builds the optimizer of any model.

    Weight decay is part of the update that Magma damps and masks, so that it stays in the same
    proportion to the base's step. (After Magma it would be dense, and about 3.6 times stronger in
    relative terms.) Clipping comes first: Magma then sees the gradients that the base sees.

    Args:
        config: What to build.
        blocks: How magma_optax cuts parameters into blocks.
        decays: From parameters to a tree of bools: what weight decay shrinks.

    Raises:
        ValueError: For values that optax or magma_optax refuse.
    """
    decay = optax.add_decayed_weights(config.weight_decay, mask=decays)
    base = optax.chain(
        direction(config.name, config.b2),
        decay if config.weight_decay else optax.identity(),
        optax.scale_by_learning_rate(schedule(config)),
    )
    common = {"where": attention_and_mlp, "blocks": blocks, "key": config.mask_key}
    if config.masking == "magma":
        masked = {"lazy": config.lazy, **common}
        base = with_magma(base, config.survival_prob, config.temperature, **masked)
    elif config.masking == "skip" and config.lazy:
        base = with_skip_update(base, config.survival_prob, **common)
    elif config.masking == "skip":
        base = optax.chain(base, skip_update(config.survival_prob, **common))
    elif config.masking == "control":
        base = optax.chain(base, control(config.constant, where=attention_and_mlp))
    clip = optax.clip_by_global_norm(config.clip) if config.clip else optax.identity()
    return optax.chain(clip, base)
