"""Which parameters are attention and MLP matrices, by their names in common model libraries."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from magma_optax._blocks.paths import path_string

# Modules that hold the matrices, in lower case and without a counter ("MlpBlock_0" -> "mlpblock").
_ATTENTION = frozenset(
    "attention attn self_attention self_attn selfattention causalselfattention cross_attention "
    "cross_attn crossattention encoder_decoder_attention multi_head_attention multiheadattention "
    "multiheaddotproductattention mha".split()
)
_MLP = frozenset(
    "mlp mlpblock mlp_block feed_forward feedforward ffn ffw moe moeblock moe_block moe_mlp "
    "sparse_moe block_sparse_moe experts shared_expert shared_experts".split()
)
# Components that are none of the matrices, wherever they stand. In mixtures "gate" is the router;
# the gate of a gated MLP has a longer name (gate_proj, gating_einsum, wi_0, w1).
_OUTSIDE = frozenset(
    "embed embedder embedding embeddings wte wpe lm_head head logitdense logits_dense router "
    "gate".split()
)
_VECTOR = re.compile(r"(^|_)(bias|scale|norm|layernorm|rmsnorm|ln)$")
_COUNTER = re.compile(r"_?\d+$")


def attention(path: str | Sequence[Any], leaf: Any = None) -> bool:
    """Tell whether a parameter is an attention matrix (query, key, value, output, fused or not).

    Whole components of the path decide, never parts of a word. Norms, biases, embeddings, heads and
    routers are out, even inside an attention module and whatever their rank.

    Args:
      path: the parameter's path, ``"layers/0/self_attn/q_proj/kernel"``, or a JAX key path, so that
        ``jax.tree_util.tree_map_with_path(attention, params)`` is a mask for optax.
      leaf: the parameter or its ``jax.ShapeDtypeStruct``; vectors and scalars are out. Optional.

    Returns:
      True or False.
    """
    return _is_matrix_in(_ATTENTION, path, leaf)


def mlp(path: str | Sequence[Any], leaf: Any = None) -> bool:
    """Tell whether a parameter is a matrix of an MLP or of a mixture's experts.

    Args:
      path: as in `attention`.
      leaf: as in `attention`.

    Returns:
      True or False. A mixture's router (``router`` or ``gate``) is out; ``gate_proj`` is in.
    """
    return _is_matrix_in(_MLP, path, leaf)


def attention_and_mlp(path: str | Sequence[Any], leaf: Any = None) -> bool:
    """Tell whether a parameter is one of those that the paper masks (section 4.1).

    Args:
      path: as in `attention`.
      leaf: as in `attention`.

    Returns:
      True or False.
    """
    return _is_matrix_in(_ATTENTION | _MLP, path, leaf)


def _is_matrix_in(modules: frozenset[str], path: str | Sequence[Any], leaf: Any) -> bool:
    if leaf is not None and len(np.shape(leaf)) < 2:
        return False
    if not isinstance(path, str):
        if not isinstance(path, Sequence):
            raise TypeError(
                f"a predicate of paths got {path!r} instead of a path; optax.inject_hyperparams "
                'takes it for a schedule unless it is named: static_args=("where",)'
            )
        path = path_string(path)
    names = [name.strip("_") for name in re.split(r"[/.]", path.lower())]
    stems = [_COUNTER.sub("", name) for name in names]
    outside = any(
        name in _OUTSIDE or stem in _OUTSIDE - {"head"} or _VECTOR.search(stem)
        for name, stem in zip(names, stems, strict=True)
    )
    return not outside and not modules.isdisjoint(stems)
