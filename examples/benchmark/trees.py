"""Trees of parameters that are timed, what of them is masked, and how much of that survives."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.kit.paths import by_path
from examples.llama.config import PRESETS
from examples.llama.step import abstract_model
from magma_optax import attention_and_mlp, describe_masking, skip_update, stacked

WIDE = "1b-5504"  # the 1b tree with MLPs of 43 * 128 columns, where the paper's 5461 is odd
TREES = ("matrices", *PRESETS, WIDE)


def tree(name: str, scan_layers: bool = False) -> Any:
    """Returns a tree of float32 `jax.ShapeDtypeStruct`: a Llama's, or 12 matrices of 1024**2."""
    if name == "matrices":
        matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        return {f"layers/{i}/mlp/kernel": matrix for i in range(12)}
    config = PRESETS["1b"] if name == WIDE else PRESETS[name]
    width = 5504 if name == WIDE else config.intermediate_size
    config = dataclasses.replace(config, intermediate_size=width, scan_layers=scan_layers)
    return abstract_model(config, 0)[1]


def narrow_llama(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `leaves` matrices of a Llama of width 64: compile time hardly depends on width."""
    shapes = {f"self_attn/{name}_proj": (64, 64) for name in "qkvo"}
    shapes |= {"mlp/gate_proj": (64, 176), "mlp/up_proj": (64, 176), "mlp/down_proj": (176, 64)}
    names = list(shapes)
    return {
        f"layers/{i // 7}/{names[i % 7]}": jax.ShapeDtypeStruct(shapes[names[i % 7]], jnp.float32)
        for i in range(leaves)
    }


def filled(shapes: Any, value: float) -> Any:
    """Returns arrays of these shapes that are `value` plus a small wave, made on the device."""

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        return value + 1e-3 * jnp.sin(jax.lax.broadcasted_iota(x.dtype, x.shape, x.ndim - 1))

    return jax.jit(lambda: jax.tree.map(fill, shapes))()


def masking(layout: str, where: str) -> dict[str, Any]:
    """Returns `where` and `blocks`: each layer of a stacked matrix is a block of its own."""
    if where == "attention+mlp":
        return {"where": attention_and_mlp, "blocks": stacked(0) if layout == "stacked" else "leaf"}
    if layout == "stacked":
        return {"where": lambda path, leaf: leaf.ndim > 1, "blocks": layers_of_three}
    return {}


def survived(shapes: Any, p: float, options: dict[str, Any], steps: int) -> float:
    """Returns which share of the masked parameters survives in the steps that `in_turns` times."""
    masked = describe_masking(shapes, **options).masked
    # Coins depend on the number of blocks and not on their sizes: one element stands for each.
    small = jax.tree.map(lambda x: jnp.ones((*x.shape[:-2], *(1,) * min(x.ndim, 2))), shapes)
    tx = skip_update(survival_prob=p, **options)

    @jax.jit
    def toss(state: Any) -> tuple[dict[str, jax.Array], Any]:
        updates, state = tx.update(small, state, small)
        return {path: jnp.mean(x != 0) for path, x in by_path(updates).items()}, state

    state, shares = tx.init(small), []
    for _ in range(2 + steps):
        kept, state = toss(state)
        shares.append(sum(kept[path] * math.prod(shape) for path, shape in masked.items()))
    return float(np.mean(shares[2:]) / sum(map(math.prod, masked.values())))


def layers_of_three(path: str, leaf: jax.ShapeDtypeStruct) -> int | tuple[()]:
    """Cuts stacked matrices, the leaves of three axes, by layer."""
    return 0 if leaf.ndim == 3 else ()
