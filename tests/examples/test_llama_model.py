"""The Llama of the example: sizes, names, and its function against a NumPy reference."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.kit.loss import cross_entropy
from examples.llama.config import PRESETS, LlamaConfig
from examples.llama.model import Llama

CONFIG = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=44, num_heads=4, num_layers=3)
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 11))  # (B, T)


def make(config, seed=0):
    graphdef, state = nnx.split(Llama(config, rngs=nnx.Rngs(seed)))
    return graphdef, nnx.to_pure_dict(state)


def logits(graphdef, params, tokens=TOKENS):
    return jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, tokens)


def stack_layers(params):
    """Turns the parameters of separate layers into those of scanned ones."""
    layers = [params["layers"][i] for i in range(len(params["layers"]))]
    return params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def reference(params, tokens, config):
    """Llama in float64 NumPy, one sequence, head and position at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    width = config.hidden_size // config.num_heads
    angles = config.rope_base ** (-np.arange(0, width, 2) / width)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def turn(vector, position):
        first, second = np.split(vector, 2)
        c, s = np.cos(position * angles), np.sin(position * angles)
        return np.concatenate([first * c - second * s, second * c + first * s])

    def attention(x, p):
        q, k, v = (x @ p[name]["kernel"] for name in ("q_proj", "k_proj", "v_proj"))
        out = np.zeros_like(x)
        for head in range(config.num_heads):
            mine = slice(head * width, (head + 1) * width)
            shared = head // (config.num_heads // (config.num_kv_heads or config.num_heads))
            kv = slice(shared * width, (shared + 1) * width)
            for t in range(len(x)):
                scores = np.array([turn(q[t, mine], t) @ turn(k[s, kv], s) for s in range(t + 1)])
                weights = np.exp(scores / np.sqrt(width))
                out[t, mine] = weights / weights.sum() @ v[: t + 1, kv]
        return out @ p["o_proj"]["kernel"]

    def mlp(x, p):
        gate, up = x @ p["gate_proj"]["kernel"], x @ p["up_proj"]["kernel"]
        return (gate / (1 + np.exp(-gate)) * up) @ p["down_proj"]["kernel"]

    def sequence(row):
        x = params["embed_tokens"]["embedding"][row]
        for i in range(config.num_layers):
            p = params["layers"][i]
            x = x + attention(norm(x, p["input_layernorm"]["weight"]), p["self_attn"])
            x = x + mlp(norm(x, p["post_attention_layernorm"]["weight"]), p["mlp"])
        return norm(x, params["norm"]["weight"]) @ params["lm_head"]["kernel"]

    return np.stack([sequence(row) for row in tokens])


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(
    ("preset", "count"),
    [
        *[("60m", 58_073_600), ("130m", 134_105_856), ("350m", 367_969_280), ("1b", 1_339_082_752)],
        *[("8b", 8_030_261_248), ("70b", 70_553_706_496)],
    ],
)
def test_presets_have_the_parameter_counts_of_the_paper_and_of_llama_3(preset, count, scan_layers):
    config = dataclasses.replace(PRESETS[preset], scan_layers=scan_layers)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == count


@pytest.mark.parametrize("scan_layers", [False, True])
def test_parameter_paths_are_hugging_faces(scan_layers):
    config = dataclasses.replace(CONFIG, scan_layers=scan_layers, num_layers=2)
    _, params = make(config)
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(params)
    }
    in_layer = (
        *(f"self_attn/{name}_proj/kernel" for name in "qkvo"),
        *(f"mlp/{name}_proj/kernel" for name in ("gate", "up", "down")),
        "input_layernorm/weight",
        "post_attention_layernorm/weight",
    )
    layers = ["layers"] if scan_layers else ["layers/0", "layers/1"]
    assert paths == {
        *(f"{layer}/{name}" for layer in layers for name in in_layer),
        *("embed_tokens/embedding", "norm/weight", "lm_head/kernel"),
    }


@pytest.mark.parametrize("scan_layers", [False, True])
def test_initial_matrices_are_normal_and_norms_one(scan_layers):
    config = LlamaConfig(257, 128, 344, 4, 2, scan_layers=scan_layers)
    for path, leaf in jax.tree.leaves_with_path(make(config)[1]):
        assert leaf.dtype == jnp.float32
        if path[-1].key == "weight":
            np.testing.assert_array_equal(leaf, 1.0)
        else:  # 16,384 draws or more: the standard error is 0.6 %
            assert abs(np.std(leaf) / 0.02 - 1) < 0.03
            assert abs(np.mean(leaf)) < 0.001
    stacked = make(config)[1]["layers"]
    if scan_layers:  # each layer has its own draws
        kernel = stacked["mlp"]["up_proj"]["kernel"]
        assert not np.array_equal(kernel[0], kernel[1])


@pytest.mark.parametrize("num_kv_heads", [0, 1, 2])
def test_agrees_with_a_float64_reference(num_kv_heads):
    config = dataclasses.replace(CONFIG, num_kv_heads=num_kv_heads)
    graphdef, params = make(config)
    params = jax.tree.map(lambda x: x * (5.0 if x.ndim > 1 else 1.0), params)  # uneven attention
    expected = reference(params, TOKENS, config)
    np.testing.assert_allclose(logits(graphdef, params), expected, rtol=1e-4, atol=1e-5)


def test_scanned_layers_are_the_same_function_from_the_same_start():
    graphdef, params = make(CONFIG)
    scanned, stacked = make(dataclasses.replace(CONFIG, scan_layers=True))
    chex.assert_trees_all_equal(stacked, stack_layers(params))
    expected = logits(graphdef, params)
    np.testing.assert_allclose(logits(scanned, stacked), expected, rtol=1e-5, atol=1e-6)


def test_depth_adds_no_random_kernel_to_the_start():
    def draws(num_layers):
        config = dataclasses.replace(CONFIG, num_layers=num_layers)
        return str(jax.make_jaxpr(lambda: make(config)[1])()).count("random_bits")

    assert draws(2) == draws(6) > 0


@pytest.mark.parametrize("scan_layers", [False, True])
def test_rematerialised_gradients_are_the_same(scan_layers):
    config = dataclasses.replace(CONFIG, scan_layers=scan_layers)
    graphdef, params = make(config)
    again, _ = make(dataclasses.replace(config, remat=True))

    def gradient(graphdef):
        def loss(params):
            return cross_entropy(nnx.merge(graphdef, params)(TOKENS), TOKENS)[0]

        return jax.jit(jax.grad(loss))(params)

    for expected, actual in zip(
        jax.tree.leaves(gradient(graphdef)), jax.tree.leaves(gradient(again)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_future_changes_nothing():
    graphdef, params = make(CONFIG)
    changed = TOKENS.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % CONFIG.vocab_size
    before, after = logits(graphdef, params), logits(graphdef, params, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert not np.array_equal(before[:, 6:], after[:, 6:])


def test_bfloat16_computes_narrow_and_keeps_wide_parameters():
    graphdef, params = make(dataclasses.replace(CONFIG, dtype="bfloat16"))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    narrow = logits(graphdef, params)
    assert narrow.dtype == jnp.bfloat16
    wide = logits(make(CONFIG)[0], params)
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=0.02 * np.abs(wide).max())


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_only_scatter_is_the_embeddings_gradient_in_float32(scan_layers):
    """In bfloat16 a sum over many positions stalls; of the logits' size a scatter costs memory."""
    graphdef, params = make(dataclasses.replace(CONFIG, dtype="bfloat16", scan_layers=scan_layers))

    def loss(params):
        return cross_entropy(nnx.merge(graphdef, params)(TOKENS), TOKENS)[0]

    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    scatters = re.findall(r'"stablehlo\.scatter".*?^ *\}\) : \(tensor<(\w+)>', text, re.M | re.S)
    assert scatters == [f"{CONFIG.vocab_size}x{CONFIG.hidden_size}xf32"]


def test_cross_entropy_leaves_out_marked_targets():
    values = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 5)), jnp.float32)
    targets = jnp.array([[4, -1, 0], [-1, -1, 2]])
    log_probs = jax.nn.log_softmax(values)
    nll, count = cross_entropy(values, targets)
    assert count == 3
    expected = -(log_probs[0, 0, 4] + log_probs[0, 2, 0] + log_probs[1, 2, 2])
    np.testing.assert_allclose(nll, expected, rtol=1e-6)
