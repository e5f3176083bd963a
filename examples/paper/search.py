"""Which runs a fair comparison still needs: a pure function of what is recorded.

Every arm gets the same search: three learning rates around its centre, in steps of two, from seed
0; one more beyond the edge for as long as the edge is best; then the other seeds at the best rate.
A best rate counts only between two worse ones.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
RATIO = 2.0  # between neighbouring rates; a power of two, so that rates compare exactly
TUNED = 0  # the seed that decides the rate


class EdgeError(ValueError):
    """The best learning rate lies on the edge of what was tried."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What tells one run of a sweep from another."""

    arm: str
    learning_rate: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Search:
    """How one arm is tuned.

    Attributes:
        arm: Its name.
        centre: The middle of the first three rates.
        seeds: Number of seeds at the best rate, the tuning seed included.
        reach: Rates beyond the centre times or divided by this are not tried.
        fixed: Run the seeds at the centre, without a search.
    """

    arm: str
    centre: float
    seeds: int = 3
    reach: float = 32.0
    fixed: bool = False

    @property
    def first(self) -> list[float]:
        """The rates to begin with."""
        return [self.centre] if self.fixed else [self.centre * RATIO**k for k in (0, 1, -1)]


@dataclasses.dataclass(frozen=True)
class Best:
    """The rate with the lowest validation loss at the tuning seed.

    Attributes:
        learning_rate: The rate.
        loss: Its loss.
        interior: Both neighbouring rates were tried and are worse.
    """

    learning_rate: float
    loss: float
    interior: bool


def select(records: Iterable[Record], settings: Mapping[str, Any]) -> list[Record]:
    """The records that have all of `settings`."""
    return [
        record
        for record in records
        if all(record["settings"].get(name) == value for name, value in settings.items())
    ]


def valid_loss(record: Record) -> float:
    """The validation loss; infinity for a run that diverged."""
    loss = float(record["results"]["valid_loss"])
    return loss if math.isfinite(loss) else math.inf


def losses(records: Iterable[Record], arm: str, seed: int = TUNED) -> dict[float, float]:
    """Validation loss at each rate of an arm, by rate."""
    found = select(records, {"arm": arm, "seed": seed})
    return {record["settings"]["learning_rate"]: valid_loss(record) for record in found}


def losses_by_seed(records: Iterable[Record], arm: str, learning_rate: float) -> dict[int, float]:
    """Validation loss of each seed of an arm at one rate, the lowest seed first."""
    found = select(records, {"arm": arm, "learning_rate": learning_rate})
    by_seed = {record["settings"]["seed"]: valid_loss(record) for record in found}
    return dict(sorted(by_seed.items()))


def best(records: Iterable[Record], arm: str, allow_edge: bool = False) -> Best:
    """The best rate of an arm.

    Args:
        records: Of one task.
        arm: Its name.
        allow_edge: Return a rate on the edge too, with ``interior=False``.

    Raises:
        EdgeError: If the best rate is the lowest or the highest that was tried, or all diverged.
        ValueError: If there is no run of the arm.
    """
    grid = losses(records, arm)
    if not grid:
        raise ValueError(f"{arm}: no run from seed {TUNED} is recorded")
    # Of equal losses the lowest rate: where all diverged, the search goes down.
    rate = min(sorted(grid), key=grid.__getitem__)
    interior = math.isfinite(grid[rate]) and {rate / RATIO, rate * RATIO} <= grid.keys()
    if not interior and not allow_edge:
        tried = ", ".join(f"{rate:g}" for rate in sorted(grid))
        raise EdgeError(
            f"{arm}: the best learning rate, {rate:g}, lies on the edge of those tried ({tried})"
        )
    return Best(rate, grid[rate], interior)


def missing(search: Search, records: Sequence[Record]) -> list[Run]:
    """The runs that can be started now, most urgent first.

    Empty if nothing is left, or if what is left depends on runs that are not recorded yet: a
    caller who has those in flight asks again.

    Args:
        search: The arm and its search.
        records: Of one task, of any arms.
    """
    grid = losses(records, search.arm)
    if first := [rate for rate in search.first if rate not in grid]:
        return [Run(search.arm, rate, TUNED) for rate in first]
    if search.fixed:
        return _seeds(search, search.centre, records)
    found = best(records, search.arm, allow_edge=True)
    if found.interior:
        return _seeds(search, found.learning_rate, records)
    rates = (found.learning_rate / RATIO, found.learning_rate * RATIO)
    lowest, highest = search.centre / search.reach, search.centre * search.reach
    return [
        Run(search.arm, rate, TUNED)
        for rate in rates
        if rate not in grid and lowest <= rate <= highest
    ]


def _seeds(search: Search, rate: float, records: Sequence[Record]) -> list[Run]:
    """The other seeds at `rate`."""
    return [
        Run(search.arm, rate, seed)
        for seed in range(search.seeds)
        if rate not in losses(records, search.arm, seed)
    ]


def missing_of_all(searches: Sequence[Search], records: Sequence[Record]) -> list[Run]:
    """The runs that can be started now, in the order of the arms, each once."""
    return list(dict.fromkeys(run for search in searches for run in missing(search, records)))


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of an arm.

    Attributes:
        best: The best rate at the tuning seed.
        losses: Validation losses at that rate, one for each seed.
    """

    best: Best
    losses: list[float]

    @property
    def median(self) -> float:
        """Median of the losses."""
        return statistics.median(self.losses)


def summarise(records: Sequence[Record], arm: str) -> Row | None:
    """Returns what is known of an arm; None if it has no run."""
    if not losses(records, arm):
        return None
    found = best(records, arm, allow_edge=True)
    return Row(found, [*losses_by_seed(records, arm, found.learning_rate).values()])
