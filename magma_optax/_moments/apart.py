"""Reading arrays so that XLA does not merge what is summed with what is stored."""

import functools
from typing import Any

import jax
from jax.core import Tracer


def read_apart(tree: Any) -> Any:
    """Return the arrays of ``tree`` so that what is computed of them is not merged with other uses.

    On a GPU, a first moment that is both summed and stored would be written by the kernel that sums
    it. That cannot write in place, so XLA copies the result into the donated buffer. Computed anew
    from what is returned here it is never stored: a step on Adam moves 9 arrays instead of 11. On a
    CPU sums read a stored array, so there it would be computed and stored twice.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        apart = functools.partial(jax.tree.map, jax.lax.optimization_barrier)
        return jax.lax.platform_dependent(tree, cpu=lambda tree: tree, default=apart)
    return tree  # Outside jit nothing is merged.
