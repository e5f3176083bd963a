"""The predicates pick attention and MLP matrices in the trees of common libraries."""

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from magma_optax import attention, attention_and_mlp, mlp

# library: (attention, MLP, must stay out)
LIBRARIES = {
    "HF-Flax Llama": (
        [f"model/layers/0/self_attn/{n}_proj/kernel" for n in "qkvo"],
        [f"model/layers/11/mlp/{n}_proj/kernel" for n in ("gate", "up", "down")],
        [
            "model/layers/0/input_layernorm/weight",
            "model/layers/0/post_attention_layernorm/weight",
            "model/norm/weight",
            "model/embed_tokens/embedding",
            "lm_head/kernel",
        ],
    ),
    "EasyLM": (
        [f"transformer/h/0/attention/{n}/kernel" for n in ("wq", "wk", "wv", "wo")],
        [f"transformer/h/0/feed_forward/{n}/kernel" for n in ("w1", "w2", "w3")],
        [
            "transformer/h/0/attention_norm/kernel",
            "transformer/h/0/ffn_norm/kernel",
            "transformer/ln_f/kernel",
            "transformer/wte/embedding",
            "lm_head/kernel",
        ],
    ),
    "MaxText": (
        [f"decoder/layers/self_attention/{n}/kernel" for n in ("query", "key", "value", "out")],
        [f"decoder/layers/mlp/{n}/kernel" for n in ("wi_0", "wi_1", "wo")]
        + [f"decoder/layers/MoeBlock_0/{n}" for n in ("wi_0", "wi_1", "wo")],
        [
            "decoder/layers/MoeBlock_0/gate/kernel",
            "decoder/layers/pre_self_attention_layer_norm/scale",
            "decoder/layers/post_self_attention_layer_norm/scale",
            "decoder/layers/self_attention/query_norm/scale",
            "decoder/layers/self_attention/query/bias",
            "decoder/decoder_norm/scale",
            "decoder/logits_dense/kernel",
            "token_embedder/embedding",
        ],
    ),
    "flax gemma": (
        [
            f"layers/0/attn/{n}/kernel"
            for n in ("qkv_einsum", "q_einsum", "kv_einsum", "attn_vec_einsum")
        ],
        [f"layers/0/mlp/{n}_proj/kernel" for n in ("gate", "up", "down")],
        [
            "layers/0/attn/_query_norm/scale",
            "layers/0/attn/_key_norm/scale",
            "layers/0/pre_attention_norm/scale",
            "layers/0/post_attention_norm/scale",
            "layers/0/pre_ffw_norm/scale",
            "layers/0/post_ffw_norm/scale",
            "embedder/input_embedding",
        ],
    ),
    "google-deepmind gemma": (
        [f"layer_0/attn/{n}/w" for n in ("qkv_einsum", "q_einsum", "kv_einsum", "attn_vec_einsum")],
        ["layer_0/mlp/gating_einsum", "layer_0/mlp/linear"],
        [
            "layer_0/attn/_query_norm/scale",
            "layer_0/pre_attention_norm/scale",
            "layer_0/post_ffw_norm/scale",
            "embedder/input_embedding",
        ],
    ),
    "Tunix": (
        [f"layers/0/attn/{n}_proj/w" for n in "qkvo"],
        [f"layers/0/mlp/{n}_proj/kernel" for n in ("gate", "up", "down")],
        [
            "layers/0/attn/q_norm/w",
            "layers/0/attn/k_norm/w",
            "layers/0/mlp/router/kernel",
            "layers/0/input_layernorm/w",
            "layers/0/post_attention_layernorm/w",
            "embedder/input_embedding",
            "lm_head/w",
        ],
    ),
    "Levanter": (
        [f"transformer/layers/stacked/self_attn/{n}_proj/weight" for n in "qkvo"],
        [f"transformer/layers/stacked/mlp/{n}_proj/weight" for n in ("gate", "up", "down")],
        [
            "transformer/layers/stacked/input_layernorm/weight",
            "transformer/layers/stacked/post_attention_layernorm/weight",
            "embeddings/token_embeddings/weight",
            "lm_head/weight",
        ],
    ),
    "flax lm1b": (
        [
            f"decoder/encoderdecoderblock_0/MultiHeadDotProductAttention_0/{n}/kernel"
            for n in ("query", "key", "value", "out")
        ],
        [f"decoder/encoderdecoderblock_0/MlpBlock_0/Dense_{n}/kernel" for n in (0, 1)],
        [
            "decoder/encoderdecoderblock_0/MlpBlock_0/Dense_0/bias",
            "decoder/encoderdecoderblock_0/LayerNorm_0/scale",
            "decoder/Embed_0/embedding",
            "decoder/logitdense/kernel",
        ],
    ),
    "nanoMoE": (
        ["h/0/attn/c_attn", "h/0/attn/c_proj"],
        ["h/0/mlp/c_fc", "h/0/mlp/c_proj", "h/2/mlp/experts/c_fc", "h/2/mlp/experts/c_proj"],
        ["h/0/ln_1", "h/0/ln_2", "wte", "wpe", "h/2/mlp/router"],
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_selects_the_matrices_and_nothing_else(library):
    of_attention, of_mlp, outside = LIBRARIES[library]
    every = of_attention + of_mlp + outside
    # Norms are matrices where layers are stacked, so the rank must not be what keeps them out.
    leaf = jax.ShapeDtypeStruct((4, 4, 4), jnp.float32)
    assert [path for path in every if attention(path, leaf)] == of_attention
    assert [path for path in every if mlp(path, leaf)] == of_mlp
    assert [path for path in every if attention_and_mlp(path, leaf)] == of_attention + of_mlp


def test_whole_components_decide_not_substrings():
    assert not attention_and_mlp("attention_free_mixer/kernel")
    assert not attention_and_mlp("my_mlp_free/kernel")
    assert not attention_and_mlp("post_attention_layernorm/weight")
    assert not attention_and_mlp("patterns/kernel")


def test_vectors_are_no_matrices():
    path = "layers/0/self_attn/sinks"
    assert attention(path)
    assert not attention(path, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert not attention(path, 1.0)


def test_reads_key_paths_of_jax_so_that_it_builds_masks():
    key_path = (DictKey("layers"), SequenceKey(0), GetAttrKey("mlp"), DictKey("up_proj"))
    assert mlp(key_path)
    assert mlp((*key_path, GetAttrKey("value")))
    params = {"mlp": {"up_proj": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "norm": jnp.ones(2)}
    mask = jax.tree_util.tree_map_with_path(attention_and_mlp, params)
    assert mask == {"mlp": {"up_proj": True, "bias": False}, "norm": False}
