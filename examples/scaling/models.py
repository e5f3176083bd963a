"""Shapes of decoders, and how a pod would shard them: the Llama example's, and one of experts."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.llama import sharding
from examples.llama.config import PRESETS
from examples.llama.step import abstract_model

EXPERTS = "235b-experts"
NAMES = (*PRESETS, EXPERTS)


def axes(name: str) -> tuple[str, ...]:
    """Return the axes of a model's mesh."""
    return ("data", "fsdp", "expert") if name == EXPERTS else sharding.AXES


class Model(NamedTuple):
    """A model on a mesh.

    Attributes:
      params: tree of ``jax.ShapeDtypeStruct``.
      specs: tree of their PartitionSpecs.
    """

    params: Any
    specs: Any


def make(name: str, mesh: jax.sharding.Mesh, dtype: str, separate: bool) -> Model:
    """Return a model's shapes.

    Args:
      name: one of `NAMES`.
      mesh: with the axes that `axes` names.
      dtype: of the parameters.
      separate: a leaf for each matrix of each layer, not stacked layers.
    """
    if name == EXPERTS:
        params, specs = _experts(94, 4096, 8192, 512, 128, 1536, 151_936)
        if separate:
            raise ValueError(f"{name} has stacked layers alone")
    else:
        config = dataclasses.replace(PRESETS[name], scan_layers=not separate)
        params = abstract_model(config, 0)[1]
        specs = jax.tree.map_with_path(
            lambda path, x: sharding.parameter_spec(path, x.shape, config, mesh), params
        )
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), params)
    return Model(params, specs)


def _experts(
    layers: int, dim: int, q_dim: int, kv_dim: int, count: int, hidden: int, vocab: int
) -> tuple[Any, Any]:
    """A mixture of experts of the sizes of Qwen3-235B-A22B."""
    leaves = {
        "embed_tokens": ((vocab, dim), P("expert", "fsdp")),
        "layers": {
            "self_attn": {
                "q_proj": ((layers, dim, q_dim), P(None, "fsdp", "expert")),
                "k_proj": ((layers, dim, kv_dim), P(None, "fsdp", "expert")),
                "v_proj": ((layers, dim, kv_dim), P(None, "fsdp", "expert")),
                "o_proj": ((layers, q_dim, dim), P(None, "expert", "fsdp")),
            },
            "experts": {
                "gate_proj": ((layers, count, dim, hidden), P(None, "expert", "fsdp")),
                "up_proj": ((layers, count, dim, hidden), P(None, "expert", "fsdp")),
                "down_proj": ((layers, count, hidden, dim), P(None, "expert", None, "fsdp")),
            },
            "router": {"kernel": ((layers, dim, count), P(None, "fsdp"))},
            "norm": {"scale": ((layers, 2, dim), P())},
        },
        "lm_head": ((dim, vocab), P("fsdp", "expert")),
    }
    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf[0], jnp.float32), leaves, is_leaf=is_leaf
    )
    return shapes, jax.tree.map(lambda leaf: leaf[1], leaves, is_leaf=is_leaf)
