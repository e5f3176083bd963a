"""The predicates pick attention and MLP matrices in the trees of common libraries."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
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


# Parameters of models as their libraries build them, with their shapes: in as attention, in as MLP,
# or out. Layers are stacked where it matters, so that vectors are matrices.
MODELS = {
    "nanodo": """
        attention blocks_0/CausalAttn_0/query/kernel 64,4,16
        attention blocks_1/CausalAttn_0/attn_out_proj/kernel 4,16,64
        mlp       blocks_0/Mlp_0/Dense_1/kernel 128,64
        out       blocks_0/LayerNorm_0/scale 64
        out       out_ln/scale 64
        out       pos_embed/embedding 32,64
    """,
    "MaxText gpt-oss": """
        attention decoder/layers/layers_0/GptOssAttention/query/kernel 2880,12,64,64
        attention decoder/layers/layers_1/GptOssAttention/out/kernel 64,12,64,2880
        mlp       decoder/layers/layers_0/GptOssMlp/wi_0 32,12,2880,2880
        mlp       decoder/layers/layers_0/GptOssMlp/wo 32,12,2880,2880
        out       decoder/layers/layers_0/GptOssAttention/query/bias 64,12,64
        out       decoder/layers/layers_0/GptOssAttention/sinks 64,12
        out       decoder/layers/layers_0/GptOssMlp/gate/kernel 2880,12,32
        out       decoder/layers/layers_0/GptOssMlp/gate/bias 32,12
        out       decoder/layers/layers_0/GptOssMlp/wi_0_bias 32,12,2880
        out       decoder/layers/layers_0/post_self_attention_layer_norm/scale 2880,12
    """,
    "MaxText gemma2": """
        attention decoder/layers/self_attention_global/key/kernel 2304,13,4,256
        attention decoder/layers/self_attention_local/out/kernel 8,13,256,2304
        mlp       decoder/layers/mlp_global/wi_0/kernel 2304,13,9216
        mlp       decoder/layers/mlp_local/wo/kernel 9216,13,2304
        out       decoder/layers/pre_self_attention_norm_global/scale 2304,13
        out       decoder/layers/post_ffw_norm_local/scale 2304,13
    """,
    "MaxText gemma4": """
        attention scanned_blocks/local_layers/self_attention/key/kernel 2816,5,5,8,256
        mlp       scanned_blocks/local_layers/mlp/moe_block/MoeBlock_0/wo 128,5,5,704,2816
        mlp       scanned_blocks/global_layer/mlp/moe_block/shared_experts/wo/kernel 2112,5,2816
        out       scanned_blocks/local_layers/mlp/moe_block/MoeBlock_0/gate/kernel 2816,5,5,128
        out       scanned_blocks/global_layer/mlp/moe_block/MoeBlock_0/per_expert_scale 128,5
        out       scanned_blocks/local_layers/mlp/pre_forward_scale_2 2816,5,5
        out       scanned_blocks/local_layers/mlp/post_feedforward_layernorm_1/scale 2816,5,5
        out       scanned_blocks/local_layers/self_attention/key_norm/scale 256,5,5
        out       decoder/layers_0/per_layer_input_gate/kernel 1536,256
        out       decoder/per_layer_embedder/embed_tokens_per_layer 262144,8960
    """,
    "MaxText deepseek 3 and 3.2": """
        attention decoder/dense_layers/self_attention/wkv_b/kernel 16,3,4,256
        attention decoder/moe_layers/self_attention/wq_a/kernel 64,58,32
        attention decoder/moe_layers/self_attention/indexer/wq_b/kernel 1536,58,64,128
        mlp       decoder/dense_layers/mlp/wi_1/kernel 64,3,64
        mlp       decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/wi_0 16,58,64,64
        mlp       decoder/moe_layers/DeepSeekMoeBlock_0/shared_experts/wi_0/kernel 64,58,64
        out       decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel 64,58,16
        out       decoder/moe_layers/self_attention/kv_norm/scale 16,58
        out       decoder/moe_layers/self_attention/indexer/k_norm/bias 128,58
    """,
    "MaxText deepseek 4": """
        attention scanned_blocks/layers_0/self_attention/o_a_proj/kernel 4,20,32,16
        attention scanned_blocks/layers_0/self_attention/hca_compressor/kv_proj/kernel 64,20,32
        mlp       scanned_blocks/layers_0/mlp/shared_experts/wo/kernel 64,20,64
        out       scanned_blocks/layers_0/self_attention/sinks 4,20
        out       scanned_blocks/layers_0/self_attention/hca_compressor/position_bias 128,20,32
        out       scanned_blocks/layers_0/mhc_attention/res_alpha 256,20,16
        out       scanned_blocks/layers_0/mhc_mlp/pre_beta 4,20
        out       scanned_blocks/layers_0/mlp/MoeBlock_0/gate/kernel 64,20,16
    """,
    "MaxText qwen3-next": """
        attention decoder/layers/global_layer/attention/attention/key/kernel 2048,12,2,256
        attention decoder/layers/local_layers/attention/in_proj_qkvz/kernel 2048,12,3,12288
        attention decoder/layers/local_layers/attention/out_proj/kernel 4096,12,3,2048
        mlp       decoder/layers/global_layer/mlp/routed_experts/wi_1 512,12,2048,512
        mlp       decoder/layers/local_layers/mlp/shared_expert/wo/kernel 512,12,3,2048
        out       decoder/layers/local_layers/attention/A_log 32,12,3
        out       decoder/layers/local_layers/attention/dt_bias 32,12,3
        out       decoder/layers/local_layers/attention/conv1d/kernel 4,12,3,1,8192
        out       decoder/layers/local_layers/attention/norm/rms_norm/scale 128,12,3
        out       decoder/layers/local_layers/mlp/routed_experts/gate/kernel 2048,12,3,512
        out       decoder/layers/local_layers/mlp/shared_expert_gate/kernel 2048,12,3,1
    """,
    "MaxText llama4, qwen3-omni": """
        mlp       decoder/layers/layers_0/Llama4MoEBlock_0/MoeBlock_0/wi_0 16,12,5120,8192
        mlp       decoder/layers/layers_0/Llama4MoEBlock_0/shared_experts/wo/kernel 8192,12,5120
        attention Qwen3OmniAudioEncoder_0/layers_0/self_attention_audio/query/kernel 8,2,4
        mlp       Qwen3OmniAudioEncoder_0/layers_0/AudioMLP/wi/kernel 8,32
        mlp       vision_encoder/Qwen3OmniMoeVisionEncoder_0/blocks_0/mlp_out/kernel 32,8
        out       decoder/layers/layers_0/Llama4MoEBlock_0/MoeBlock_0/gate/kernel 5120,12,16
        out       audio_encoder/Qwen3OmniAudioEncoder_0/conv2d1/kernel 3,3,1,480
    """,
    "Tunix": """
        attention layers/0/attn/kv_einsum/w 2,8,2816,256
        attention layers/5/attn/k_einsum/w 2,2816,512
        attention layers/0/attn/q_proj/w_lora_a 64,4
        mlp       layers/0/moe/gating_einsum 128,2,704,2816
        mlp       layers/0/moe/linear 128,704,2816
        mlp       layers/0/mlp/gate_proj 128,2048,768
        out       layers/0/moe/router_logits 2816,128
        out       layers/0/moe/router_scale 2816
        out       layers/0/mlp/router/kernel 2048,128
        out       layers/0/moe_pre_ffw_norm/scale 2816
        out       embedder/per_layer_model_projection/w 1536,35,256
    """,
    "Levanter": """
        attention transformer/layers/stacked/self_attn/q_proj/weight 32,8,4,128,4096
        attention model/layers/0/attn/Wqkv/weight 3,12,64,768
        mlp       transformer/layers/stacked/block_sparse_moe/experts/w1/weight 32,8,4096,14336
        mlp       transformer/layers/stacked/mlp/experts/gate_proj/weight 48,128,2048,768
        mlp       model/layers/0/mlp/Wi/weight 2,1152,768
        out       transformer/layers/stacked/block_sparse_moe/gate/weight 32,8,4096
        out       transformer/layers/stacked/mlp/gate/weight 48,128,2048
        out       transformer/layers/stacked/self_attn/k_norm/weight 32,32,128
        out       transformer/layers/stacked/mlp/act_fn/alpha_p 32,1
        out       transformer/blocks/stacked/attn/c_attn/bias 12,3,12,64
        out       transformer/blocks/stacked/ln_1/weight 12,768
    """,
    "EasyDeL": """
        attention model/layers/0/linear_attn/in_proj_qkvz/kernel 2048,12288
        attention transformer/blocks/0/norm_attn_norm/attn/Wqkv/kernel 64,192
        mlp       transformer/blocks/0/ffn/experts/mlp/w1 128,64
        mlp       model/layers/0/mlp/experts/gate_up_proj 4,64,256
        out       transformer/blocks/0/norm_attn_norm/norm_1/scale 2,64
        out       transformer/blocks/0/ffn/router/layer/kernel 64,4
        out       model/layers/0/mlp/gate/e_score_correction_bias 2,4
        out       model/layers/0/self_attn/q_conv1d/kernel 4,1,64
        out       model/layers/0/self_attn/q_proj/quant_scales 64,2
        out       model/layers/0/self_attn/rotary_emb/inv_freq 2,32
    """,
    "HF-Flax": """
        attention encoder/layer/0/attention/self/query/kernel 768,768
        attention encoder/layer/0/attention/output/dense/kernel 768,768
        attention model/decoder/layers/0/encoder_attn/k_proj/kernel 384,384
        attention decoder/block/0/layer/1/EncDecAttention/q/kernel 512,512
        attention encoder/block/0/layer/0/LocalSelfAttention/o/kernel 512,512
        mlp       encoder/block/0/layer/1/DenseReluDense/wi/kernel 512,2048
        mlp       encoder/albert_layer_groups/0/albert_layers/0/ffn_output/kernel 3072,768
        out       encoder/layer/0/attention/output/LayerNorm/scale 12,768
        out       encoder/block/0/layer/0/SelfAttention/relative_attention_bias/embedding 32,8
        out       encoder/layer/0/attention/relative_position_bias_table 732,12
        out       model/decoder/layers/0/self_attn_layer_norm/scale 6,384
        out       model/decoder/layernorm_embedding/scale 6,384
    """,
    "big_vision, scanned": """
        attention Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel 12,192,3,64
        mlp       Transformer/encoderblock/MlpBlock_0/Dense_0/kernel 12,192,768
        out       Transformer/encoderblock/MlpBlock_0/Dense_0/bias 12,768
        out       Transformer/encoderblock/LayerNorm_0/scale 12,192
        out       embedding/kernel 16,16,3,192
        out       pos_embedding 1,196,192
        out       head/kernel 192,1000
    """,
    "T5X": """
        attention decoder/layers_0/encoder_decoder_attention/query/kernel 64,64
        mlp       encoder/layers_0/mlp/wi_0/kernel 64,128
        out       encoder/relpos_bias/rel_embedding 8,32
        out       encoder/layers_0/pre_mlp_layer_norm/scale 2,64
        out       token_embedder/embedding 128,64
    """,
    "praxis, axlearn, simply, jax-llm-examples": """
        attention repeat/sub/x_layers_0/self_attention/query/w 12,64,4,16
        mlp       repeat/sub/x_layers_0/ff_layer/ffn_layer1/linear/w 12,64,256
        mlp       repeat/sub/x_layers_0/ff_layer/wi_gate_0 12,4,64,256
        mlp       decoder/transformer/repeat/layer/feed_forward/wi_weight 12,4,64,256
        mlp       blocks/0/ffn/ffn_0_gate/w 4,64,256
        mlp       layers/0/ffw/w_gate 64,256
        mlp       layers/0/ffw/we_gate 4,64,256
        out       repeat/sub/x_layers_0/ff_layer/gate 12,64,4
        out       repeat/sub/x_layers_0/self_attention/per_dim_scale/per_dim_scale 12,16
        out       decoder/transformer/repeat/layer/feed_forward/gate_weight 12,64,4
        out       layers/0/ffw/w_router 64,4
        out       layers/0/attn/q_gamma 2,64
    """,
}


@pytest.mark.parametrize("model", MODELS)
def test_knows_the_parameters_of_models(model):
    for line in MODELS[model].split("\n")[1:-1]:
        expected, path, shape = line.split()
        leaf = jax.ShapeDtypeStruct([int(size) for size in shape.split(",")], jnp.float32)
        found = [name for name, f in (("attention", attention), ("mlp", mlp)) if f(path, leaf)]
        assert found == [expected] * (expected != "out"), line
        assert attention_and_mlp(path, leaf) == (expected != "out"), line


@pytest.mark.parametrize("library", LIBRARIES)
def test_selects_the_matrices_and_nothing_else(library):
    of_attention, of_mlp, outside = LIBRARIES[library]
    every = of_attention + of_mlp + outside
    # Norms are matrices where layers are stacked, so the rank must not be what keeps them out.
    leaf = jax.ShapeDtypeStruct((4, 4, 4), jnp.float32)
    assert [path for path in every if attention(path, leaf)] == of_attention
    assert [path for path in every if mlp(path, leaf)] == of_mlp
    assert [path for path in every if attention_and_mlp(path, leaf)] == of_attention + of_mlp


# Classes of modules, split into their words.
CLASSES = {
    "attention": "Attention, Attn, SelfAttention, CausalSelfAttention, SdpaAttention, MHA, MLA, "
    "MultiHeadDotProductAttention, EncDecAttention, AttentionBlock, AttentionLayer",
    "mlp": "MLP, Mlp, MlpBlock, FeedForward, FFN, FFW, MoE, MoeBlock, SparseMoeBlock, MoELayer, "
    "Experts, SharedExpert, SwiGLU, DenseReluDense",
}
SNAKE = {
    "attention": "attention attn self_attn cross_attention multi_head_attention mha",
    "mlp": "mlp mlp_block feed_forward ffn ffw moe moe_block block_sparse_moe experts",
}
# Letters without a vowel or f, l, m, n make up no word that a predicate knows.
letters = st.text("bcdghkpqstvz", min_size=2, max_size=8)
counters = st.sampled_from(["", "_0", "_12", "0", "3"])
a_class = st.sampled_from([(k, name) for k in CLASSES for name in CLASSES[k].split(", ")])
a_snake = st.sampled_from([(k, name) for k in SNAKE for name in SNAKE[k].split()])


def kinds(path):
    return [name for name, f in (("attention", attention), ("mlp", mlp)) if f(path)]


@given(a_class, st.lists(letters.map(str.capitalize), max_size=3), counters)
def test_a_class_is_known_by_its_last_word(case, before, counter):
    kind, name = case
    name = "".join(before) + name + counter
    assert kinds(f"layers_0/{name}/kernel") == [kind]
    assert kinds(f"layers_0/{name}/gate/kernel") == []
    assert kinds(f"layers_0/{name}/LayerNorm_0/scale") == []
    assert kinds(f"layers_0/{name}Norm/kernel") == []


@given(a_snake, st.lists(letters, max_size=3), counters)
def test_a_snake_case_name_is_known_by_its_last_word(case, before, counter):
    kind, name = case
    name = "_".join([*before, name])
    assert kinds(f"layers.0.{name}{counter}.kernel") == [kind]
    assert kinds(f"layers.0.{name}{counter}.router.kernel") == []
    assert kinds(f"layers.0.{name}_norm{counter}.kernel") == []
    assert kinds(f"layers.0.ln_{name}{counter}.kernel") == []


@given(a_snake, letters, st.booleans())
def test_parts_of_words_say_nothing(case, glued, before):
    _, name = case
    *first, last = name.split("_")
    name = "_".join([*first, glued + last if before else last + glued])
    assert kinds(f"layers/{name}/kernel") == []


@pytest.mark.parametrize(
    "name",
    "flattener attnorm mlpack attention_free_mixer my_mlp_free attention_norm patterns attentional "
    "post_attention_layernorm AttentionNorm MLPNorm ln_mlp norm_attn moe_layers mlp_head".split(),
)
def test_other_names_are_no_modules(name):
    assert kinds(f"{name}/kernel") == []


@pytest.mark.parametrize("gate", ["gate", "MoEGate_0", "shared_expert_gate", "moe_gate", "Router"])
def test_routers_and_their_gates_are_out(gate):
    assert kinds(f"Qwen3MoeSparseMoeBlock_0/{gate}/kernel") == []


@pytest.mark.parametrize("gate", ["gate_proj", "gating_einsum", "gate_up_proj", "w_gate", "wi_0"])
def test_gates_of_gated_mlps_are_in(gate):
    assert kinds(f"layers_0/FlaxLlamaMLP_0/{gate}") == ["mlp"]


def test_the_innermost_module_decides():
    assert kinds("moe_layer/self_attn/q_proj") == ["attention"]
    assert kinds("AttentionBlock_0/MLPBlock_0/Dense_0/kernel") == ["mlp"]
    assert kinds("embedder/attn/q_proj") == kinds("router/mlp/up") == kinds("head/mlp/up") == []


def test_vectors_are_no_matrices():
    path = "layers/0/self_attn/gain"
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


@pytest.mark.parametrize(
    "path",
    [
        *(f"layers/mlp/{name}" for name in ("b1", "b_up", "fc1_b", "linear/b")),
        *(f"layers/attn/{name}" for name in ("bq", "b_q", "b_Q", "b_qkv", "bo")),
        *(f"moe/{name}/kernel" for name in ("TopKGate_0", "switch_gate", "gating", "routing")),
        *("moe/gating_network/kernel", "moe/experts/b1", "mlp/unembed/kernel"),
        "mlp/layer_norm/offset",
    ],
)
def test_biases_and_routers_by_other_names_are_out(path):
    assert not attention_and_mlp(path, jax.ShapeDtypeStruct((8, 16), jnp.float32))


@pytest.mark.parametrize(
    "path",
    [
        *(f"layers/attn/{name}" for name in ("wq_b/kernel", "wkv_b", "kv_b", "q_b_proj/kernel")),
        *(f"layers/attn/q_proj/{name}" for name in ("lora_b", "lora_B", "B", "b/kernel")),
        *(f"moe/experts/{name}" for name in ("w_gate", "gating_einsum", "gate_proj/kernel")),
        "layers/mlp/bottleneck/kernel",
    ],
)
def test_matrices_with_a_b_or_a_gate_in_their_names_are_in(path):
    assert attention_and_mlp(path, jax.ShapeDtypeStruct((8, 16), jnp.float32))
