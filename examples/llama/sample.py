"""Text from a model, for a look at what it has learned."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from examples.llama.sharding import Layout, put


def continuations(
    graphdef: nnx.GraphDef,
    params: optax.Params,
    layout: Layout,
    prompt: Sequence[int],
    *,
    length: int,
    temperature: float,
    seed: int,
) -> list[list[int]]:
    """Continues a prompt three times, on a mesh; call it under `jax.set_mesh`.

    Args:
        graphdef: The model's structure.
        params: The model's parameters.
        layout: Where these lie.
        prompt: Ids, the same on all hosts; cut where it leaves no room.
        length: Tokens of each text, the prompt included.
        temperature: Divides the logits.
        seed: Decides what is drawn.

    Returns:
        Three rows of `length` ids, on every host.
    """
    prompt = prompt[: length - 1] or [0]
    rows = np.tile(np.asarray(prompt, np.int32), (3, 1))  # (3, P)
    tokens = sample(
        graphdef,
        params,
        put(rows, layout.replicated),
        jax.jit(jax.random.key, static_argnums=0, out_shardings=layout.replicated)(seed),
        length=length,
        temperature=put(np.float32(temperature), layout.replicated),
    )
    with jax.transfer_guard("allow"):  # it is meant, and not left to us
        return multihost_utils.process_allgather(tokens, tiled=True).tolist()  # wherever they are


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
