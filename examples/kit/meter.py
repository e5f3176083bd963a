"""What the steps since the last record measured, and how fast they were."""

import time
from typing import Any

import jax


class Meter:
    """Gathers the metrics of steps on the device, so that no step waits for the one before.

    Args:
        tokens: Tokens a step, over all devices.
    """

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._seen: list[Any] = []
        self._clock: float | None = None

    def add(self, metrics: Any) -> None:
        """Notes what a step returned, a tree of arrays that may still be computed."""
        if self._clock is None:
            self._clock = time.perf_counter()  # the first call compiles; speed counts from here
        self._seen.append(metrics)

    def take(self) -> tuple[list[Any], float]:
        """Fetches what was noted since the last record.

        Returns:
            The metrics of each step, as numpy arrays, and the tokens a second.
        """
        fetched = jax.device_get(self._seen)
        seconds = time.perf_counter() - self._clock
        self._seen = []
        return fetched, len(fetched) * self._tokens / seconds

    def go_on(self) -> None:
        """Starts the clock again; what the record and a validation took does not count."""
        self._clock = time.perf_counter()
