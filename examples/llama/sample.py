"""Text from a model, for a look at what it has learned."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.typing import ArrayLike


@partial(jax.jit, static_argnames=("graphdef", "length"))
def sample(
    graphdef: nnx.GraphDef,
    params: optax.Params,
    prompt: Array,
    key: Array,
    *,
    length: int,
    temperature: ArrayLike = 0.8,
) -> Array:
    """Continues prompts.

    Each token costs a pass over the whole text (there is no cache), which is fast enough for the
    few lines that end a run.

    Args:
        graphdef: The model's structure, from `nnx.split`.
        params: The model's parameters.
        prompt: int32 (B, P).
        key: A JAX random key.
        length: Number of tokens T of the result, prompt included.
        temperature: Divides the logits; above 0.

    Returns:
        int32 (B, T).
    """
    batch, start = prompt.shape
    tokens = jnp.zeros((batch, length), jnp.int32).at[:, :start].set(prompt)

    def extend(position: Array, tokens: Array) -> Array:
        model = nnx.merge(graphdef, params)  # NNX wants it made where it is used
        logits = model(tokens)[:, position - 1].astype(jnp.float32)  # (B, V)
        chosen = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
        return tokens.at[:, position].set(chosen.astype(tokens.dtype))

    return jax.lax.fori_loop(start, length, extend, tokens)
