"""Which parameters are attention and MLP matrices, by their names in common model libraries."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from magma_optax._blocks.paths import path_string

# Words of a path's component, without digits: "DeepSeekMoeBlock_0" -> deep, seek, moe, block, and
# "DeepseekV3MoE" -> deepseek, v, moe.
_WORD = re.compile(r"MoE(?![a-z])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# How the names of the modules that hold the matrices end.
_ATTENTION = frozenset(
    "attention attn mha mqa gqa mla selfattention crossattention multiheadattention".split()
)
_MLP = frozenset("mlp ffn ffw ff feedforward glu swiglu geglu moe expert experts".split()) | {
    ("feed", "forward"),
    ("relu", "dense"),  # T5's DenseReluDense
    ("act", "dense"),  # T5's DenseGatedActDense
}
# Words after that end: which part of the module, or which of its kind.
_SUFFIXES = frozenset("block layer module local global vision audio in out output fc".split())

# Components that hold none of the matrices, whatever is inside them. Manifold hyper-connections
# ("mhc_attention") only mix residual streams.
_OUTSIDE = frozenset(
    "embed embedder embedding embeddings emb unembed unembedding wte wpe "
    "router routing logit logits logitdense mhc".split()
)
_OF_ROUTERS = frozenset("expert experts moe top topk switch noisy".split())  # beside "gate"
_NORM = frozenset("norm layernorm rmsnorm ln".split())
# What else attention and MLP modules hold, of whatever rank where layers are stacked: biases and
# scales of all kinds, attention sinks, the decay (A_log) and the convolutions of linear attention,
# tables of relative or rotary positions.
_INSIDE = _NORM | frozenset(
    "bias biases offset scale scales alpha beta gamma lambda sink sinks log decay conv dwconv "
    "rel relative relpos rotary freq freqs".split()
)
# A parameter's own name that says bias: "b", "b1", "b_qkv", "bq", "fc1_b". LoRA's factor is "B" or
# "lora_b", and MLA has matrices called "wkv_b" and "kv_b".
_BIAS = re.compile(r"b\d*|b_\w+|b[qkvo]+|(?:fc|linear|dense|proj)\d*_b")


def attention(path: str | Sequence[Any], leaf: Any = None) -> bool:
    """Tell whether a parameter is an attention matrix (query, key, value, output, fused or not).

    The innermost module of the path that is called attention or MLP decides. It is known by its
    last whole word, in CamelCase or snake_case: ``self_attn``, ``GptOssAttention_0``. Norms,
    biases, scales, embeddings, heads and routers are out, even inside an attention module and
    whatever their rank.

    Args:
      path: the parameter's path, ``"layers/0/self_attn/q_proj/kernel"``, or a JAX key path, so that
        ``jax.tree_util.tree_map_with_path(attention, params)`` is a mask for optax.
      leaf: the parameter or its ``jax.ShapeDtypeStruct``; vectors and scalars are out. Optional.

    Returns:
      True or False.
    """
    return _kind(path, leaf) == "attention"


def mlp(path: str | Sequence[Any], leaf: Any = None) -> bool:
    """Tell whether a parameter is a matrix of an MLP or of a mixture's experts.

    Args:
      path: the parameter's path, ``"layers/0/mlp/up_proj/kernel"``, or a JAX key path, so that
        ``jax.tree_util.tree_map_with_path(mlp, params)`` is a mask for optax.
      leaf: the parameter or its ``jax.ShapeDtypeStruct``; vectors and scalars are out. Optional.

    Returns:
      True or False. A mixture's router (``router`` or ``gate``) and the gate of its shared expert
      are out; ``gate_proj`` is in.
    """
    return _kind(path, leaf) == "mlp"


def attention_and_mlp(path: str | Sequence[Any], leaf: Any = None) -> bool:
    """Tell whether a parameter is one of those that the paper masks (section 4.1).

    Args:
      path: the parameter's path, ``"layers/0/mlp/up_proj/kernel"``, or a JAX key path, so that
        ``jax.tree_util.tree_map_with_path(attention_and_mlp, params)`` is a mask for optax.
      leaf: the parameter or its ``jax.ShapeDtypeStruct``; vectors and scalars are out. Optional.

    Returns:
      True or False.
    """
    return _kind(path, leaf) is not None


def _kind(path: str | Sequence[Any], leaf: Any) -> str | None:
    """Return the kind of module whose matrix the parameter is, or None."""
    if leaf is not None and len(np.shape(leaf)) < 2:
        return None
    if not isinstance(path, str):
        if not isinstance(path, Sequence):
            raise TypeError(
                f"a predicate of paths got {path!r} instead of a path; optax.inject_hyperparams "
                'takes it for a schedule unless it is named: static_args=("where",)'
            )
        path = path_string(path)
    kind, inside = None, set()
    names = re.split(r"[/.]", path)
    if _BIAS.fullmatch(names[-1]):
        return None
    for name in names:
        words = [word.lower() for word in _WORD.findall(name)]
        if _is_outside(name, words):
            return None
        module = _module(words)
        kind, inside = (module, set()) if module else (kind, inside.union(words))
    return kind if inside.isdisjoint(_INSIDE) else None


def _module(words: list[str]) -> str | None:
    """Return the kind of module that a component names, or None."""
    if words and words[0] in _NORM:  # "ln_attn"
        return None
    while words and words[-1] in _SUFFIXES:
        words = words[:-1]
    ends = {*words[-1:], tuple(words[-2:])}
    if not _ATTENTION.isdisjoint(ends):
        return "attention"
    return None if _MLP.isdisjoint(ends) else "mlp"


def _is_outside(name: str, words: list[str]) -> bool:
    if not _OUTSIDE.isdisjoint(words) or words[-2:] == ["lm", "head"]:
        return True
    return name.lower().strip("_") == "head" or _is_router(words)


def _is_router(words: list[str]) -> bool:
    """Tell "gate", "gate_weight", "shared_expert_gate", "TopKGate" from "gate_proj", "w_gate"."""
    if words[-1:] in (["weight"], ["kernel"], ["network"]):
        words = words[:-1]
    if words == ["gating"]:
        return True
    return words[-1:] == ["gate"] and (len(words) == 1 or not _OF_ROUTERS.isdisjoint(words))
