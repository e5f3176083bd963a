"""Which leaves are matrices, and what within a leaf is one matrix."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.kit.optimizers import path_string
from magma_optax import attention_and_mlp

Where = Callable[[str, Any], bool]


def select(tree: Any, where: Where) -> Any:
    """Marks the leaves that `where` selects.

    Raises:
        ValueError: If there are leaves and it selects none.
    """
    chosen = jax.tree.map_with_path(lambda path, x: bool(where(path_string(path), x)), tree)
    marks = jax.tree.leaves(chosen)
    if marks and not any(marks):
        paths = [path_string(path) for path, _ in jax.tree.leaves_with_path(tree)]
        raise ValueError(f"`where` selects none of the leaves, such as {paths[:3]}")
    return chosen


def on_matrices(
    matrices: optax.GradientTransformation,
    others: optax.GradientTransformation,
    where: Where = attention_and_mlp,
) -> optax.GradientTransformationExtraArgs:
    """Sends the leaves that `where` selects to one transformation, all else to another.

    APOLLO, SGG and SOAP precondition attention and MLP matrices and leave the rest to Adam:
    ``on_matrices(scale_by_apollo(), optax.scale_by_adam())``. Each transformation sees
    ``optax.MaskedNode()`` in the place of the other's leaves.

    Args:
        matrices: For the leaves that `where` selects.
        others: For all other leaves.
        where: ``(path, leaf) -> bool``, with the path as text: ``"layers/0/mlp/up_proj/kernel"``.

    Returns:
        The two as one transformation.

    Raises:
        ValueError: In ``init``, if `where` selects nothing.
    """

    def labels(params: optax.Params) -> optax.Params:
        chosen = select(params, where)
        return jax.tree.map(lambda selected: "matrices" if selected else "others", chosen)

    return optax.partition({"matrices": matrices, "others": others}, labels)


def check_matrices(name: str, tree: optax.Params) -> None:
    """Refuses leaves with fewer than two axes.

    Raises:
        ValueError: With the path and the shape of the first such leaf.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        if leaf.ndim < 2:
            raise ValueError(
                f"{name} takes matrices, but {path_string(path)!r} has shape {leaf.shape}; "
                "on_matrices() sends such leaves elsewhere"
            )


def matrix_axes(x: jax.Array) -> tuple[int, ...]:
    """The axes within one matrix (or vector): the last two."""
    return tuple(range(max(x.ndim - 2, 0), x.ndim))


def zero_per_matrix(x: jax.Array) -> jax.Array:
    """A float32 zero for each matrix of a leaf, that broadcasts against the leaf."""
    within = matrix_axes(x)
    return jnp.zeros([1 if axis in within else n for axis, n in enumerate(x.shape)], jnp.float32)


def flat_matrices(x: jax.Array) -> jax.Array:
    """Each matrix of a leaf as one row: shape (matrices, elements)."""
    elements = 1
    for axis in matrix_axes(x):
        elements *= x.shape[axis]
    return x.reshape(-1, elements)
