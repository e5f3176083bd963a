"""nanoMoE in Flax NNX: a GPT-2 with a mixture of experts in every other layer.

Shapes: B sequences, T positions, D width, N heads, H = D / N, F = 4 D, V tokens, L layers;
M = B T tokens of a batch, E experts, K choices a token, C tokens that an expert can take.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from examples.nanomoe.config import NanoMoEConfig


class Routing(NamedTuple):
    """What the router of a layer did, float32; a leading axis where it speaks of several layers.

    Attributes:
        balance: E x sum over experts of mean weight times mean number of choices, ().
        z: Mean squared logsumexp of the logits, ().
        load: Share of all choices that each expert got before its capacity cut in, (E,).
        dropped: Share of all choices beyond an expert's capacity, ().
    """

    balance: Array
    z: Array
    load: Array
    dropped: Array


def capacity(config: NanoMoEConfig, tokens: int, train: bool) -> int:
    """Returns how many of `tokens` tokens an expert takes: an even number, 4 at least."""
    factor = config.train_capacity if train else config.valid_capacity
    room = int(factor * config.top_k * tokens / config.num_experts)
    return max(4, room + room % 2)


def route(logits: Array, top_k: int, capacity: int) -> tuple[Array, Array, Routing]:
    """Assigns tokens to experts.

    Each expert has a queue: first choices in the order of the tokens, then second choices. What
    stands beyond `capacity` is dropped, and its weight is not given to the other choice.

    Args:
        logits: float32 (M, E).
        top_k: Experts a token chooses, K.
        capacity: Tokens an expert takes, C.

    Returns:
        The weight of each choice, float32 (K, M), a softmax over a token's choices; its slot, int32
        (K, M), which is ``expert * C + place``, or ``E * C`` for a dropped choice; and statistics.
    """
    experts = logits.shape[1]
    chosen, expert = jax.lax.top_k(logits, top_k)  # (M, K)
    weights = jax.nn.softmax(chosen, axis=-1).T  # (K, M)
    choices = jax.nn.one_hot(expert.T, experts, dtype=jnp.int32)  # (K, M, E)

    queues = jnp.cumsum(choices.reshape(-1, experts), axis=0).reshape(choices.shape)
    place = jnp.sum(queues * choices, axis=-1) - 1  # (K, M)
    kept = place < capacity
    slots = jnp.where(kept, expert.T * capacity + place, experts * capacity)

    # As in nanoMoE an expert's probability is its weight, 0 where it was not chosen.
    probability = jnp.sum(weights[..., None] * choices, axis=0)  # (M, E)
    count = jnp.sum(choices, axis=0).astype(jnp.float32)  # (M, E)
    routing = Routing(
        balance=experts * jnp.sum(jnp.mean(probability, axis=0) * jnp.mean(count, axis=0)),
        z=jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2),
        load=jnp.mean(count, axis=0) / top_k,
        dropped=jnp.mean((~kept).astype(jnp.float32)),
    )
    return weights, slots, routing


def router_loss(routing: Routing, config: NanoMoEConfig) -> Array:
    """Returns the weighted load-balancing and z-losses, summed over layers, ()."""
    balance, z = jnp.sum(routing.balance), jnp.sum(routing.z)
    return config.balance_weight * balance + config.z_weight * z


def normal(rngs: nnx.Rngs, std: float, *shape: int) -> nnx.Param:
    """Returns a parameter with entries N(0, std^2), float32."""
    return nnx.Param(nnx.initializers.normal(std)(rngs.params(), shape))


def switch_normal(rngs: nnx.Rngs, *shape: int, inputs: int = -2) -> nnx.Param:
    """Returns a parameter with entries N(0, 1 / inputs), cut at two standard deviations.

    Args:
        rngs: Gives the key.
        shape: Of the parameter.
        inputs: Its axis that counts inputs.
    """
    draw = nnx.initializers.truncated_normal(shape[inputs] ** -0.5)
    return nnx.Param(draw(rngs.params(), shape))


def residual_std(config: NanoMoEConfig) -> float:
    """Returns the standard deviation of projections back to the residual stream, as in GPT-2."""
    return 0.02 / (2 * config.num_layers) ** 0.5


def layer_norm(config: NanoMoEConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a norm without bias."""
    return nnx.LayerNorm(config.width, epsilon=1e-5, use_bias=False, dtype=config.dtype, rngs=rngs)


def gelu_mlp(x: Array, c_fc: nnx.Param, c_proj: nnx.Param) -> Array:
    """Maps `x` (..., tokens, D) by matrices (..., D, F) and (..., F, D), in the dtype of `x`."""
    hidden = jax.nn.gelu(x @ c_fc[...].astype(x.dtype), approximate=False)  # (..., tokens, F)
    return hidden @ c_proj[...].astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with query, key and value in one matrix."""

    def __init__(self, config: NanoMoEConfig, *, rngs: nnx.Rngs):
        """Draws (D, 3 D) and (D, D)."""
        self.num_heads = config.num_heads
        self.c_attn = switch_normal(rngs, config.width, 3 * config.width)
        self.c_proj = normal(rngs, residual_std(config), config.width, config.width)

    def __call__(self, x: Array) -> Array:
        """Mixes positions of `x` (B, T, D)."""
        qkv = x @ self.c_attn[...].astype(x.dtype)  # (B, T, 3 D)
        heads = (*x.shape[:2], self.num_heads, -1)
        q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))  # (B, T, N, H)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # (B, T, N, H)
        return out.reshape(x.shape) @ self.c_proj[...].astype(x.dtype)  # (B, T, D)


class MLP(nnx.Module):
    """A dense GELU MLP."""

    def __init__(self, config: NanoMoEConfig, *, rngs: nnx.Rngs):
        """Draws (D, F) and (F, D)."""
        self.c_fc = switch_normal(rngs, config.width, 4 * config.width)
        self.c_proj = normal(rngs, residual_std(config), 4 * config.width, config.width)

    def __call__(self, x: Array) -> Array:
        """Maps each position of `x` (B, T, D)."""
        return gelu_mlp(x, self.c_fc, self.c_proj)


class Experts(nnx.Module):
    """The MLPs of a mixture, stacked: axis 0 counts experts."""

    def __init__(self, config: NanoMoEConfig, *, rngs: nnx.Rngs):
        """Draws (E, D, F) and (E, F, D)."""
        experts, width = config.num_experts, config.width
        self.c_fc = switch_normal(rngs, experts, width, 4 * width)
        self.c_proj = normal(rngs, residual_std(config), experts, 4 * width, width)

    def __call__(self, x: Array) -> Array:
        """Maps the tokens of each expert, (E, C, D)."""
        return gelu_mlp(x, self.c_fc, self.c_proj)


class MoE(nnx.Module):
    """A mixture of experts: each token goes through the K that its router likes best."""

    def __init__(self, config: NanoMoEConfig, *, rngs: nnx.Rngs):
        """Draws the router (E, D) and the experts."""
        self.config = config
        self.router = switch_normal(rngs, config.num_experts, config.width, inputs=-1)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: Array, train: bool) -> tuple[Array, Routing]:
        """Maps each position of `x` (B, T, D), in competition with all others for the experts."""
        experts, width = self.router.shape
        tokens = x.reshape(-1, width)  # (M, D)
        top_k, room = self.config.top_k, capacity(self.config, len(tokens), train)
        logits = jnp.matmul(  # in full float32 also where matrices are multiplied in less
            tokens.astype(jnp.float32), self.router[...].T, precision=jax.lax.Precision.HIGHEST
        )  # (M, E)
        weights, slots, routing = route(logits, top_k, room)

        # No two kept choices share a slot. A dropped choice's slot does not exist: nothing is
        # written there, and zeros are read.
        queues = jnp.zeros((experts * room, width), x.dtype)
        copies = jnp.broadcast_to(tokens, (top_k, *tokens.shape))  # (K, M, D)
        queues = queues.at[slots].add(copies, mode="drop")  # (E C, D)
        out = self.experts(queues.reshape(experts, room, width))  # (E, C, D)
        read = out.reshape(-1, width).at[slots].get(mode="fill", fill_value=0)  # (K, M, D)
        mixed = jnp.sum(weights[..., None].astype(x.dtype) * read, axis=0)  # (M, D)
        return mixed.reshape(x.shape), routing


class Block(nnx.Module):
    """Attention and a dense MLP or a mixture, each behind a norm and a residual connection."""

    def __init__(self, config: NanoMoEConfig, layer: int, *, rngs: nnx.Rngs):
        """Draws the matrices; the layer's number decides whether it is a mixture."""
        self.ln_1 = layer_norm(config, rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = layer_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs) if layer % 2 else MoE(config, rngs=rngs)

    def __call__(self, x: Array, train: bool) -> tuple[Array, Routing | None]:
        """Maps `x` (B, T, D) to the same shape; a mixture also tells of its router."""
        x = x + self.attn(self.ln_1(x))  # (B, T, D)
        if isinstance(self.mlp, MLP):
            return x + self.mlp(self.ln_2(x)), None
        mixed, routing = self.mlp(self.ln_2(x), train)
        return x + mixed, routing


class NanoMoE(nnx.Module):
    """A GPT-2 with mixtures of experts and a tied head.

    Parameter paths are nanoMoE's: ``h/0/attn/c_attn``, ``h/0/mlp/experts/c_fc`` and so on.
    """

    def __init__(self, config: NanoMoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = switch_normal(rngs, config.vocab_size, config.width, inputs=-1)  # the head too
        self.wpe = normal(rngs, 0.02, config.length, config.width)
        self.h = nnx.List([Block(config, i, rngs=rngs) for i in range(config.num_layers)])
        self.ln_f = layer_norm(config, rngs)

    def __call__(self, tokens: Array, *, train: bool) -> tuple[Array, Routing]:
        """Predicts each next token.

        Args:
            tokens: int32 (B, T), T at most `config.length`.
            train: Whether the experts have the capacity of training or of evaluation.

        Returns:
            Logits, `config.dtype` (B, T, V), and what the routers did, (layers with experts, ...).
        """
        # Looked up in float32: in bfloat16 the gradient of a frequent token would round at each of
        # its thousands of positions.
        x = self.wte[tokens] + self.wpe[: tokens.shape[1]][None]  # (B, T, D)
        x = x.astype(self.config.dtype)
        routings = []
        for block in self.h:
            x, routing = block(x, train)
            if routing is not None:
                routings.append(routing)
        logits = self.ln_f(x) @ self.wte[...].astype(x.dtype).T  # (B, T, V)
        return logits, jax.tree.map(lambda *layers: jnp.stack(layers), *routings)


def count_parameters(params: Any, config: NanoMoEConfig) -> tuple[int, int]:
    """Counts the parameters, and those that one token uses: K of E experts.

    Args:
        params: Parameters or their shapes.
        config: Their configuration.

    Returns:
        Total and active number.
    """
    total = idle = 0
    for path, leaf in jax.tree.leaves_with_path(params):
        total += leaf.size
        if "experts" in (getattr(part, "key", None) for part in path):
            idle += leaf.size * (config.num_experts - config.top_k) // config.num_experts
    return total, total - idle
