"""Which leaves are masked, in a form to read before a run."""

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp

from magma_optax._blocks.choosing import Where, candidate_leaves
from magma_optax._blocks.cutting import Granularity
from magma_optax._blocks.paths import NamedTree, distinct
from magma_optax._step.options import Options

_LAYER = re.compile(r"(?<![^/_])\d+(?![^/])")  # The 3 of "layers/3" and of "blocks_3".


@dataclasses.dataclass(frozen=True)
class Masking:
    """Which leaves Magma or SkipUpdate masks; ``print`` it for a table.

    Attributes:
      masked: the shape of each masked leaf, by path.
      blocks: how many blocks each masked leaf is cut into, by path.
      left_out: the shape of each other leaf, by path.
    """

    masked: dict[str, tuple[int, ...]]
    blocks: dict[str, int]
    left_out: dict[str, tuple[int, ...]]

    @property
    def summary(self) -> str:
        """Leaves, blocks and the share of the parameters, in one line."""
        inside, outside = (
            sum(map(math.prod, shapes.values())) for shapes in (self.masked, self.left_out)
        )
        total, leaves = inside + outside, len(self.masked) + len(self.left_out)
        blocks, share = sum(self.blocks.values()), 100 * inside / max(total, 1)
        return (
            f"masked: {len(self.masked):,} of {leaves:,} leaves in {blocks:,} "
            f"block{'s' * (blocks != 1)}, {share:.1f} % of {total:,} parameters"
        )

    def __str__(self) -> str:
        """The summary, then a line per kind of leaf; layers are counted together."""
        masked, left_out = _rows(self.masked, self.blocks), _rows(self.left_out, {})
        return "\n".join([self.summary, *masked, "left out:", *left_out])


def describe_masking(
    params: Any,
    *,
    where: Where | None = None,
    blocks: Granularity = "leaf",
) -> Masking:
    """Tell which parameters `magma`, `with_magma` and `skip_update` mask with these options.

    Example:
      >>> import jax.numpy as jnp
      >>> from magma_optax import attention_and_mlp, describe_masking
      >>> params = {"mlp": {"up_proj": jnp.ones((4, 8))}, "norm": {"scale": jnp.ones(4)}}
      >>> print(describe_masking(params, where=attention_and_mlp))
      masked: 1 of 2 leaves in 1 block, 88.9 % of 36 parameters
           1 x (4, 8)               1 block each       mlp/up_proj
      left out:
           1 x (4,)                                    norm/scale

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``.
      where: which leaves are masked: None for all, ``(path, leaf) -> bool`` or a tree of bools.
      blocks: how a leaf is cut: ``"leaf"``, ``"row"``, ``"column"``, ``"element"``, or
        ``(path, leaf) -> axes`` that index blocks, such as `stacked`.

    Raises:
      ValueError: ``where`` selects nothing, an axis is out of range.
      TypeError: an argument of the wrong kind, or a leaf that is no array.
    """
    named = NamedTree(params)
    cuts = Options(where=where, blocks=blocks).find_cuts(named)
    candidates = candidate_leaves(named)
    return Masking(
        masked={path: candidates[path].shape for path in cuts},
        blocks={path: cut.size for path, cut in cuts.items()},
        left_out={
            path: jnp.shape(x)
            for path, (_, x) in zip(distinct([p for p, _ in named.pairs]), named.pairs, strict=True)
            if path not in cuts
        },
    )


def _rows(shapes: dict[str, tuple[int, ...]], blocks: dict[str, int]) -> list[str]:
    """One line per kind of leaf: those that differ by the number of their layer alone."""
    kinds: dict[Any, list[str]] = {}
    for path, shape in shapes.items():
        kinds.setdefault((_LAYER.sub("*", path), shape, blocks.get(path)), []).append(path)
    rows = []
    for (pattern, shape, count), paths in kinds.items():
        name = pattern if len(paths) > 1 else paths[0]
        cut = "" if count is None else f"{count:,} block{'s' * (count != 1)} each"
        rows.append(f"{len(paths):>6} x {shape!s:<20} {cut:<18} {name}")
    return rows
