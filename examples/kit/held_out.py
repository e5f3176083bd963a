"""The held-out batches of a text, and a model's loss on them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax import Array

from examples.kit.data.load import Data


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out batches.

    Attributes:
        batches: One pass over this host's share, {"inputs": (B, T), "targets": (B, T)} each.
        count: How many there are, the same on all hosts.
    """

    batches: Callable[[], Iterator[dict[str, np.ndarray]]]
    count: int

    @classmethod
    def of(cls, data: Data) -> "HeldOut":
        """Counts the held-out batches of `data`.

        Raises:
            DataError: If one cannot be read.
        """
        return cls(data.valid, sum(1 for _ in data.valid()))

    def validate(
        self,
        losses: Callable[[dict[str, np.ndarray]], tuple[Array, Array]],
        limit: int | None = None,
    ) -> float:
        """Averages the loss over the tokens of `limit` batches, spread over the split.

        Args:
            losses: From a batch to the sum of its losses and its number of tokens.
            limit: How many batches, about; None for all.

        Returns:
            The loss in nats a token.
        """
        every = 1 if limit is None else max(1, self.count // limit)
        sums = [losses(batch) for batch in itertools.islice(self.batches(), 0, None, every)]
        nll, count = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
        return float(nll / count)
