"""Times steps that take over their state's buffers, in turns, so that noise meets all alike."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Arm(NamedTuple):
    """Something to time.

    Attributes:
      init: makes a fresh state.
      step: maps a state to the next; may take over its buffers. Compiled already.
    """

    init: Callable[[], Any]
    step: Callable[[Any], Any]


class Compiled(NamedTuple):
    """A function compiled ahead of time and what that took.

    Attributes:
      call: the function.
      trace_s: seconds to trace and lower it.
      compile_s: seconds XLA took.
    """

    call: Callable[..., Any]
    trace_s: float
    compile_s: float


def compile_step(step: Callable[..., Any], *shapes: Any, donate: int = 1) -> Compiled:
    """Compile ``step``, whose first ``donate`` arguments are donated, for arguments like these."""
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=tuple(range(donate))).lower(*shapes)
    middle = time.perf_counter()
    call = lowered.compile()
    return Compiled(call, middle - start, time.perf_counter() - middle)


def in_turns(arms: dict[str, Arm], rounds: int, steps: int) -> dict[str, float]:
    """Time one step of each arm.

    Only one arm's state exists at a time. Each turn starts with two steps that are not counted.

    Args:
      arms: by name.
      rounds: turns of each arm.
      steps: timed together in a turn.

    Returns:
      The median over the rounds of the milliseconds a step, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            state = arm.init()
            for _ in range(2):
                state = arm.step(state)
            jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(steps):
                state = arm.step(state)
            jax.block_until_ready(state)
            times[name].append((time.perf_counter() - start) / steps * 1e3)
            del state
            gc.collect()
    return {name: statistics.median(turns) for name, turns in times.items()}
