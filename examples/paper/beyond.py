"""Arms beyond the paper, by names that say what they do: scores with a range, at any ratio.

    BASE+KIND@RATIO

multiplies the attention and MLP updates of a base by RATIO in the mean, where gradients are noise.
How the multiplier varies around it is the KIND:

    adam+constant@0.1386        not at all
    adam+aligned@0.1386         by (cos(mu_t, g_t) / its value on white noise)^2
    adam+aligned^4@0.1386       to the fourth instead
    adam+previous@0.1386        by the cosine with mu_{t-1}, which doesn't contain g_t
    adam+aligned/mean@0.1386    by the score over the mean score of all blocks
    adam+aligned*mask@0.1386    and by Magma's coins at p = 0.5; what survives is divided by p

`^POWER`, `/mean` and `*mask` can be combined, in this order. Bases are those of the experiment,
such as adam, muon, and c_adam, which masks single elements. The scores are in
`examples.paper.baselines.aligned`; they need no buffer that Magma doesn't need.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import optax
from jax.typing import ArrayLike

from examples.kit.optimizers import MOMENTUM_DECAYS
from examples.kit.options import SettingsError, number
from examples.paper.arms import Arm, Base, Build, plain, then
from examples.paper.baselines.aligned import aligned, previous, relative
from examples.paper.baselines.controls import constant_times_mask
from magma_optax import attention_and_mlp, control, with_magma

SCORES = {"aligned": aligned, "previous": previous}
KINDS = ("constant", *SCORES)
P = 0.5  # of the coins
POWER = 2.0  # where a name gives none
NAME = re.compile(r"(\w+)\+(\w+)(?:\^([^@*/]+))?(/mean)?(\*mask)?@(.*)")
FORM = "BASE+KIND@RATIO, as in adam+aligned@0.1386, adam+aligned^4@0.1386 or adam+constant*mask@0.1"


class Spelled(NamedTuple):
    """What a name says.

    Attributes:
        base: Which optimizer.
        kind: What the multiplier follows.
        power: How strongly.
        over_mean: Whether scores are divided by their mean over blocks.
        coins: Whether blocks are dropped.
        ratio: The mean multiplier.
    """

    base: str
    kind: str
    power: float
    over_mean: bool
    coins: bool
    ratio: float


class Beyond(Mapping[str, Arm]):
    """The arms of an experiment, and those that `BASE+KIND@RATIO` spells out."""

    def __init__(
        self,
        named: Mapping[str, Arm],
        bases: Mapping[str, Base],
        wrap: Callable[[Build], Build] = lambda build: build,
    ):
        """Takes what an experiment has.

        Args:
            named: Arms with names of their own; iteration yields these alone.
            bases: Directions; `named` has an arm of each, whose centre the search takes.
            wrap: What the experiment does to each arm.
        """
        self._named = named
        self._bases = bases
        self._wrap = wrap

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __getitem__(self, name: str) -> Arm:
        """Returns an arm.

        Raises:
            KeyError: For a name that is none of the named ones and has no `@`.
            SettingsError: For one that has, and can't be read.
        """
        if "@" not in name:
            return self._named[name]
        spelled = read(name, self._bases)
        build = self._wrap(make(self._bases[spelled.base], spelled))
        # As for whatever shrinks updates, the search begins at twice the base's rate.
        return Arm(build, 2 * self._named[spelled.base].centre)


def read(name: str, bases: Mapping[str, Any]) -> Spelled:
    """Reads a name.

    Args:
        name: With an `@`.
        bases: Those that there are, by name.

    Raises:
        SettingsError: If it says nothing.
    """
    if not (match := NAME.fullmatch(name)):
        raise SettingsError(f"arm {name!r} is not of the form {FORM}")
    base, kind, power, over_mean, coins, ratio = match.groups()
    if base not in bases:
        raise SettingsError(f"arm {name!r}: no base {base!r}; there are {', '.join(bases)}")
    if kind not in KINDS:
        raise SettingsError(f"arm {name!r}: no kind {kind!r}; there are {', '.join(KINDS)}")
    if kind == "constant" and (power or over_mean):
        raise SettingsError(f"arm {name!r}: a constant has neither power nor mean; leave it out")
    exponent = POWER if power is None else _number(name, "power", power)
    if exponent == POWER and power is not None:
        raise SettingsError(f"arm {name!r}: {power} is the power without being told; leave it out")
    return Spelled(
        base, kind, exponent, bool(over_mean), bool(coins), _number(name, "ratio", ratio)
    )


def _number(name: str, what: str, text: str) -> float:
    """Reads a number as it is printed: records are found by the arm's name."""
    try:
        value = number(0.0, above=True)(text)
    except argparse.ArgumentTypeError as error:
        raise SettingsError(f"arm {name!r}: the {what} {error}") from None
    if text != f"{value:g}":
        raise SettingsError(f"arm {name!r}: write the {what} as {value:g}, not {text}")
    return value


def make(base: Base, spelled: Spelled) -> Build:
    """Builds what a name says on a base."""
    shrink = control(spelled.ratio, where=attention_and_mlp)
    if spelled.kind == "constant":
        if not spelled.coins:
            return then(base, lambda key: shrink)
        return then(base, lambda key: constant_times_mask(spelled.ratio / P, P, key=key))
    # The base's own decay; C-Adam has Adam's.
    b1 = MOMENTUM_DECAYS.get(spelled.base, MOMENTUM_DECAYS["adam"])
    options = {"score": SCORES[spelled.kind](b1, spelled.power), "initial_score": 1.0, "b1": b1}
    # Survivors over p, so that coins leave the mean as it is.
    options |= {"survival_prob": P, "rescale": True} if spelled.coins else {"survival_prob": 1.0}
    wrapper = relative if spelled.over_mean else with_magma

    def build(learning_rate: ArrayLike | optax.Schedule, key: ArrayLike):
        bare = plain(base)(learning_rate, key)
        scored = wrapper(bare, where=attention_and_mlp, key=key, **options)
        return optax.chain(scored, shrink)

    return build
