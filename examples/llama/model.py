"""Llama in Flax NNX.

Shapes: B sequences, T positions, D hidden, N heads of queries, K of keys and values, H = D / N the
width of a head, F MLP width, V tokens, L layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from examples.llama.attention import attend
from examples.llama.config import LlamaConfig
from examples.llama.sharding import embed, gathered, spread


def linear(config: LlamaConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a bias-free projection from `inputs` to `outputs` features."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nnx.initializers.normal(config.initializer_range),
        rngs=rngs,
    )


def rope(config: LlamaConfig, length: int) -> tuple[Array, Array]:
    """Returns the cosines and sines of the rotary embedding, float32 (T, 1, H)."""
    head = config.head_size
    inverse_wavelength = config.rope_base ** (-jnp.arange(0, head, 2) / head)  # (H/2,)
    angle = jnp.arange(length)[:, None] * inverse_wavelength[None, :]  # (T, H/2)
    angle = jnp.concatenate([angle, angle], axis=-1)[:, None, :]  # (T, 1, H)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns the two halves of each head of `x` (B, T, N, H) by the position's angles."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (x * cos[None] + turned * sin[None]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32."""

    def __init__(self, config: LlamaConfig):
        self.config = config
        self.weight = nnx.Param(jnp.ones(config.hidden_size))

    def __call__(self, x: Array) -> Array:
        """Normalises `x` (B, T, D)."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.config.rms_norm_eps)
        return (normed * self.weight[None, None]).astype(self.config.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Draws two (D, D) matrices and two (D, K H) ones."""
        self.config = config
        width, kv_width = config.hidden_size, config.kv_heads * config.head_size
        self.q_proj = linear(config, width, width, rngs)
        self.k_proj = linear(config, width, kv_width, rngs)
        self.v_proj = linear(config, width, kv_width, rngs)
        self.o_proj = linear(config, width, width, rngs)

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        """Mixes positions of `x` (B, T, D); `cos` and `sin` are `rope`'s."""

        def heads(x: Array) -> Array:
            return x.reshape(*x.shape[:2], -1, self.config.head_size)

        q = rotate(heads(self.q_proj(x)), cos, sin)  # (B, T, N, H)
        k = rotate(heads(self.k_proj(x)), cos, sin)  # (B, T, K, H)
        out = attend(q, k, heads(self.v_proj(x)), self.config.attention)  # (B, T, N, H)
        return self.o_proj(out.reshape(x.shape))  # (B, T, D)


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Draws two (D, F) matrices and one (F, D)."""
        self.gate_proj = linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.up_proj = linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.down_proj = linear(config, config.intermediate_size, config.hidden_size, rngs)

    def __call__(self, x: Array) -> Array:
        """Maps each position of `x` (B, T, D)."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """One decoder layer: attention and MLP, each behind a norm and a residual connection."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        """Maps `x` (B, T, D) to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)  # (B, T, D)
        return x + self.mlp(self.post_attention_layernorm(x))


def stacked_layers(config: LlamaConfig, rngs: nnx.Rngs) -> Layer:
    """Returns one `Layer` whose parameters have a leading axis of `config.num_layers`.

    Drawn together even where the layers are used apart: XLA takes about a second a kernel to
    compile random draws for a GPU, so one a shape and not one a matrix.
    """

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(config, rngs=rngs)

    return make(rngs)


def separate(layers: Layer, count: int) -> nnx.List[Layer]:
    """Takes `count` stacked layers apart."""
    graphdef, params = nnx.split(layers)
    params = jax.lax.optimization_barrier(params)  # else XLA draws anew in each slice's kernel

    def layer(number: int) -> Layer:
        return nnx.merge(graphdef, jax.tree.map(lambda x: x[number], params))

    return nnx.List([layer(number) for number in range(count)])


class Llama(nnx.Module):
    """A Llama language model with an untied head.

    Parameter paths are Hugging Face's: ``layers/0/self_attn/q_proj/kernel`` and so on; with
    `scan_layers`, ``layers/self_attn/q_proj/kernel`` with the layer axis first.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        # In float32: the gradient of a frequent token sums thousands of positions, which bfloat16
        # would round at every one, in atomic operations that a GPU has for float32 alone.
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=nnx.initializers.normal(config.initializer_range),
            rngs=rngs,
        )
        layers = stacked_layers(config, rngs)
        self.layers = layers if config.scan_layers else separate(layers, config.num_layers)
        self.norm = RMSNorm(config)
        self.lm_head = linear(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(self, tokens: Array) -> Array:
        """Predicts each next token.

        Args:
            tokens: int32 (B, T).

        Returns:
            Logits, `config.dtype` (B, T, V).
        """
        cos, sin = rope(self.config, tokens.shape[1])

        def apply(x: Array, layer: Layer) -> Array:
            return spread(gathered(layer)(x, cos, sin))

        if self.config.remat:
            apply = nnx.remat(apply)
        x = embed(self.embed_tokens, tokens).astype(self.config.dtype)  # (B, T, D)
        if self.config.scan_layers:
            x = nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for layer in self.layers:
                x = apply(x, layer)
        return gathered(self.lm_head)(gathered(self.norm)(x))  # (B, T, V)
