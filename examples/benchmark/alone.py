"""Compiles one step in a process of its own.

In one process XLA compiles later programs sooner, as it remembers kernels that it tuned before.
"""

import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax

from examples.benchmark.forms import all_forms, update_and_apply
from examples.benchmark.timing import compile_step
from examples.benchmark.trees import masking, tree


def compile_times(rounds: int, *what: Any) -> tuple[float, float]:
    """Compile a step several times, each time in a new process; arguments: see `compile_alone`.

    Returns:
      The medians of the seconds to trace the step and of those to compile it.
    """
    # The caller's process may hold most of a GPU's memory: take no more than is needed.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=new, max_tasks_per_child=1) as pool:
        times = [pool.submit(compile_alone, *what).result() for _ in range(rounds)]
    trace, compiling = map(statistics.median, zip(*times, strict=True))
    return trace, compiling


def compile_alone(
    name: str, layout: str, base_name: str, where: str, form: str
) -> tuple[float, float]:
    """Compile update and apply of one form.

    Args:
      name: of the tree.
      layout: "separate" or "stacked" layers.
      base_name: of the base optimizer.
      where: what is masked, as `masking` takes it.
      form: its name among the forms of the base.

    Returns:
      Seconds to trace the step, and seconds to compile it.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    shapes = tree(name, layout == "stacked")
    tx = all_forms(base_name, **masking(layout, where))[form]
    jax.block_until_ready(jax.jit(lambda: 0)())  # start the device's own compiler
    step = update_and_apply(tx)
    compiled = compile_step(step, shapes, jax.eval_shape(tx.init, shapes), shapes, donate=2)
    return compiled.trace_s, compiled.compile_s
