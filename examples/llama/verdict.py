"""What a comparison says, in one sentence: paired differences, their interval, and the advice."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from examples.paper.search import (
    TUNED,
    Best,
    Record,
    best,
    losses,
    losses_by_seed,
    select,
    valid_loss,
)

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far an arm ends from another, seed by seed, in nats per token; below 0: lower.

    Attributes:
        arm: The one.
        reference: The other.
        by_seed: A difference for each fresh seed from which both ended and neither diverged.
        mean: Of these; None without any.
        low: Lower end of the interval of Student's t; None from fewer than two seeds.
        high: Upper end.
    """

    arm: str
    reference: str
    by_seed: dict[int, float]
    mean: float | None
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """-1 if the arm is lower, 1 if it is higher, 0 if the seeds don't tell."""
        if self.low is None or self.high is None:
            return 0
        return -1 if self.high < 0 else 1 if self.low > 0 else 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is known.

    Attributes:
        rates: The best rate of each arm.
        interior: Whether it lies between two worse ones.
        constant: The arm that is the control: the best of the constants that were tried.
        differences: Of Magma, SkipUpdate and the control from the base, and of Magma from the
            control.
        sentence: For a person.
    """

    rates: dict[str, float]
    interior: dict[str, bool]
    constant: str
    differences: list[Difference]
    sentence: str


def judge(
    records: Sequence[Record], base: str, names: Sequence[str] | None = None, seeds: int = 0
) -> Verdict:
    """Returns what the records of a comparison say.

    Args:
        records: Of one task.
        base: The optimizer's name; arms are called after it.
        names: The arms that were asked for. There is no verdict before base, Magma and all of the
            constants are tuned. By default those that have records.
        seeds: How many fresh seeds were asked for.
    """
    arms = list(names or dict.fromkeys(record["settings"]["arm"] for record in records))
    found = {arm: best(records, arm, allow_edge=True) for arm in arms if losses(records, arm)}
    constants = [arm for arm in found if arm.startswith(f"{base}+constant")]
    constant = min(constants, key=lambda arm: found[arm].loss, default=f"{base}+constant")
    pairs = [
        *((arm, base) for arm in (f"{base}+magma", constant, f"{base}+skip")),
        (f"{base}+magma", constant),
    ]
    differences = [_difference(records, *pair, found) for pair in pairs]
    interior = {arm: at.interior for arm, at in found.items()}
    diverged = [arm for arm, at in found.items() if _diverged(records, arm, at.learning_rate)]
    return Verdict(
        {arm: at.learning_rate for arm, at in found.items()},
        interior,
        constant,
        differences,
        _unfinished(records, [base, f"{base}+magma", constant, *arms], found, seeds)
        or _sentence(base, constant, interior, diverged, differences),
    )


def _unfinished(
    records: Sequence[Record], arms: Sequence[str], found: Mapping[str, Best], seeds: int
) -> str:
    """Says what the verdict on Magma still waits for, or nothing."""
    arms = [arm for arm in dict.fromkeys(arms) if not arm.endswith("+skip")]
    if absent := [arm for arm in arms if arm not in found]:
        return f"No verdict yet: {', '.join(absent)} has no run; repeat the command."
    if edges := [arm for arm in arms if not found[arm].interior]:
        return (
            f"No verdict yet: the best learning rate of {', '.join(edges)} is the lowest or the "
            "highest that was tried; repeat the command, with a larger --reach if it ended."
        )
    for arm in arms:
        done = losses_by_seed(records, arm, found[arm].learning_rate).keys() - {TUNED}
        if len(done) < seeds:
            return (
                f"No verdict yet: {arm} has {len(done)} of {seeds} fresh seeds; repeat the command."
            )
    return ""


def _difference(
    records: Sequence[Record], arm: str, reference: str, found: Mapping[str, Any]
) -> Difference:
    by_seed: dict[int, float] = {}
    if arm in found and reference in found:
        ours, theirs = (
            losses_by_seed(records, name, found[name].learning_rate) for name in (arm, reference)
        )
        for seed in sorted(ours.keys() & theirs.keys() - {TUNED}):
            if math.isfinite(ours[seed]) and math.isfinite(theirs[seed]):
                by_seed[seed] = ours[seed] - theirs[seed]
    values = list(by_seed.values())
    if not values:
        return Difference(arm, reference, by_seed, None, None, None)
    mean = statistics.mean(values)
    if len(values) < 2:
        return Difference(arm, reference, by_seed, mean, None, None)
    error = statistics.stdev(values) / len(values) ** 0.5
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return Difference(arm, reference, by_seed, mean, mean - half, mean + half)


def _diverged(records: Sequence[Record], arm: str, rate: float) -> bool:
    """Whether a run at the arm's best rate diverged."""
    runs = select(records, {"arm": arm, "learning_rate": rate})
    return any(not math.isfinite(valid_loss(record)) for record in runs)


def _sentence(
    base: str,
    constant: str,
    interior: Mapping[str, bool],
    diverged: Sequence[str],
    differences: Sequence[Difference],
) -> str:
    magma, control, skip, against = differences
    if unstable := [arm for arm in (base, magma.arm, constant) if arm in diverged]:
        return (
            f"No verdict: {', '.join(unstable)} diverged from a fresh seed at its best learning "
            "rate: it is too high to compare at; use more --steps, which warm up for longer."
        )
    count = min(len(difference.by_seed) for difference in (magma, control, against))
    if count < 2:
        return f"No verdict: {count} fresh seed(s) say nothing of chance; use --seeds 3 or more."
    said = _advice(base, magma, control, against, count)
    if skip.sign < 0 and interior[skip.arm]:
        return f"{said} SkipUpdate alone ends {_words(skip, base)}."
    return said


def _advice(
    base: str, magma: Difference, control: Difference, against: Difference, count: int
) -> str:
    from_base, from_constant = _words(magma, base), _words(against, "the constant")
    if against.sign < 0 and magma.sign < 0:
        return f"Use Magma: it ends {from_base} and {from_constant}."
    if against.sign > 0 and control.sign < 0:
        return (
            f"Use the constant: it ends {_words(control, base)}, and Magma ends {from_constant}; "
            "the coins and scores of Magma cost more than they bring."
        )
    if magma.sign > 0:
        return f"Do not use Magma: it ends {from_base}."
    if magma.sign < 0 and control.sign < 0:
        return (
            f"Shrinking the body's updates helps, but not enough is known to tell Magma from the "
            f"constant: Magma ends {from_base} and {from_constant}; use the constant, which is "
            "simpler, or more --seeds."
        )
    if magma.sign < 0:
        return f"Magma ends {from_base}, but not enough is known of the constant; more --seeds."
    return (
        f"Not enough evidence that Magma helps: it ends {from_base} and {from_constant}, from "
        f"{count} seeds; use more --seeds or more --steps."
    )


def _words(difference: Difference, reference: str) -> str:
    """Such as "0.101 below adam (0.090 to 0.112)"."""
    assert difference.mean is not None and difference.low is not None
    assert difference.high is not None
    if difference.sign == 0:
        return (
            f"level with {reference} ({difference.mean:+.3f}, {difference.low:+.3f} to "
            f"{difference.high:+.3f})"
        )
    side = "below" if difference.sign < 0 else "above"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{abs(difference.mean):.3f} {side} {reference} ({low:.3f} to {high:.3f})"


def table(verdict: Verdict) -> str:
    """Returns the differences as Markdown."""
    lines = [
        "| difference in nats per token | fresh seeds | mean | 95 % interval |",
        "|" + "---|" * 4,
    ]
    for x in verdict.differences:
        seeds = ", ".join(f"{value:+.4f}" for value in x.by_seed.values())
        mean = "" if x.mean is None else f"{x.mean:+.4f}"
        interval = "" if x.low is None else f"{x.low:+.4f} to {x.high:+.4f}"
        lines.append(f"| {x.arm} - {x.reference} | {seeds} | {mean} | {interval} |")
    return "\n".join(lines)
