"""Shapes of three decoders with scanned layers, and how a pod would shard them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

_Leaf = tuple[tuple[int, ...], P]


class Model(NamedTuple):
    """A model on a mesh.

    Attributes:
      mesh: sizes of the mesh's axes by name.
      params: tree of float32 ``jax.ShapeDtypeStruct``.
      specs: tree of their PartitionSpecs.
    """

    mesh: dict[str, int]
    params: Any
    specs: Any


def _attention(layers: int, dim: int, kv_dim: int, tensor: str | None) -> dict[str, _Leaf]:
    down, up = P(None, tensor, "fsdp"), P(None, "fsdp", tensor)
    return {
        "q_proj": ((layers, dim, dim), up),
        "k_proj": ((layers, dim, kv_dim), up),
        "v_proj": ((layers, dim, kv_dim), up),
        "o_proj": ((layers, dim, dim), down),
    }


def _mlp(layers: int, dim: int, hidden: int, tensor: str | None) -> dict[str, _Leaf]:
    return {
        "gate_proj": ((layers, dim, hidden), P(None, "fsdp", tensor)),
        "up_proj": ((layers, dim, hidden), P(None, "fsdp", tensor)),
        "down_proj": ((layers, hidden, dim), P(None, tensor, "fsdp")),
    }


def _experts(layers: int, count: int, dim: int, hidden: int) -> dict[str, _Leaf]:
    return {
        "gate_proj": ((layers, count, dim, hidden), P(None, "expert", "fsdp")),
        "up_proj": ((layers, count, dim, hidden), P(None, "expert", "fsdp")),
        "down_proj": ((layers, count, hidden, dim), P(None, "expert", None, "fsdp")),
    }


def _model(mesh: dict[str, int], vocab: int, layers: int, dim: int, body: Any) -> Model:
    tensor = "tensor" if "tensor" in mesh else None
    tree = {
        "embed_tokens": ((vocab, dim), P(tensor, "fsdp")),
        "layers": {**body, "norm": {"scale": ((layers, 2, dim), P())}},
        "lm_head": ((dim, vocab), P("fsdp", tensor)),
    }
    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf[0], jnp.float32), tree, is_leaf=is_leaf
    )
    return Model(mesh, params, jax.tree.map(lambda leaf: leaf[1], tree, is_leaf=is_leaf))


def models() -> dict[str, Model]:
    """Return the models by name: Llama 1B and 70B, and a mixture of 384 experts with 1T."""
    return {
        "1B": _model(
            {"fsdp": 256}, 32_000, 24, 2048,
            {"self_attn": _attention(24, 2048, 2048, None), "mlp": _mlp(24, 2048, 5632, None)},
        ),
        "70B": _model(
            {"fsdp": 32, "tensor": 8}, 128_256, 80, 8192,
            {
                "self_attn": _attention(80, 8192, 1024, "tensor"),
                "mlp": _mlp(80, 8192, 28_672, "tensor"),
            },
        ),
        "1T": _model(
            {"fsdp": 8, "expert": 32}, 163_840, 61, 7168,
            {
                "self_attn": _attention(61, 7168, 7168, "expert"),
                "experts": _experts(61, 384, 7168, 2048),
            },
        ),
    }  # fmt: skip
