"""Names of the leaves of a tree."""

from typing import Any

import jax


def path_string(path: tuple[Any, ...]) -> str:
    """Writes a tree path as ``layers/0/mlp/up_proj/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths; alike for nested and for flat dictionaries."""
    return {path_string(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
