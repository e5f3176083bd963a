"""Coins: one uniform number per block, a function of (key, step, path, block index) alone."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from magma_optax._blocks.cutting import Cut

# Leaves of at most so many blocks share one vectorised draw; finer ones draw each for itself, so
# that a draw as large as a parameter is never concatenated with others.
_FEW = 256


def raw_key(key: ArrayLike) -> np.ndarray | jax.Array:
    """Return a seed or a key as raw threefry data, uint32 (2,), whatever the default PRNG is.

    Concrete keys come back as host arrays, so that no device buffer is shared or donated.

    Args:
      key: an int (also a traced one), a typed key, or raw key data of two or four words.

    Raises:
      TypeError: not one of these.
      ValueError: an int of more than 64 bits.
    """
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        key = int(key)
        if not -(2**63) <= key < 2**64:
            raise ValueError(f"key must be an int of up to 64 bits, got {key}")
        return np.array([key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF], np.uint32)
    array = key if isinstance(key, jax.Array | np.ndarray) else None
    if array is not None and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    elif array is not None and array.shape == () and jnp.issubdtype(array.dtype, jnp.integer):
        if not isinstance(array, Tracer):
            return raw_key(int(array))
        high = array >> 32 if array.dtype.itemsize == 8 else -(array < 0).astype(jnp.int32)
        array = jnp.stack([high.astype(jnp.uint32), array.astype(jnp.uint32)])
    if array is None or array.dtype != jnp.uint32 or array.shape not in [(2,), (4,)]:
        raise TypeError(
            "key must be an int, a jax.random.key or raw uint32 key data of shape (2,), got "
            f"{key!r}"
        )
    if array.shape == (4,):  # rbg: two hash words, repeated, so they may not be xored
        folded = _threefry(array[:2])
        for word in (array[2], array[3]):
            folded = jax.random.fold_in(folded, word)
        array = jax.random.key_data(folded)
    return array if isinstance(array, Tracer) else np.asarray(array)


def uniforms(key: jax.Array, step: jax.Array, cuts: dict[str, Cut]) -> dict[str, jax.Array]:
    """Draw a uniform number in [0, 1) for every block.

    Adding, renaming or reordering other leaves changes none of them; nor do sharding, x64 mode or
    the default PRNG.

    Args:
      key: raw threefry data, uint32 (2,).
      step: int32 ().
      cuts: how each masked leaf is cut.

    Returns:
      float32 arrays of the cuts' shapes, by path; multiples of 2**-23.
    """
    if not cuts:
        return {}
    step_key = jax.random.fold_in(_threefry(key), jnp.asarray(step).astype(jnp.uint32))
    words = np.stack([_path_words(path) for path in cuts])  # (leaves, 2)
    leaf_keys = jax.vmap(lambda w: jax.random.fold_in(jax.random.fold_in(step_key, w[0]), w[1]))(
        words
    )
    by_leaf = list(cuts.values())
    few = [n for n, cut in enumerate(by_leaf) if cut.size <= _FEW]
    drawn: dict[int, jax.Array] = {}
    if few:
        sizes = [by_leaf[n].size for n in few]
        index = jnp.concatenate([by_leaf[n].indices() for n in few])
        together = _uniform(leaf_keys[np.repeat(few, sizes)], index)
        for n, start in zip(few, np.cumsum([0, *sizes[:-1]]), strict=True):
            drawn[n] = _pick(together, start, by_leaf[n].size)
    for n, cut in enumerate(by_leaf):
        if n not in drawn:
            drawn[n] = _uniform(leaf_keys[n], cut.indices())
    return {path: drawn[n].reshape(cut.shape) for n, (path, cut) in enumerate(cuts.items())}


def _pick(vector: jax.Array, start: int, size: int) -> jax.Array:
    """``vector[start : start + size]``, written so that ``start`` is data and not code.

    XLA fuses a slice into the kernel that applies the coin, and compiles that kernel anew for each
    leaf, as each has another ``start`` in it: 17 times Adam's compile time at 400 leaves, now 1.6.
    An array of indices is an argument of the kernel, so all leaves of one shape share it. The 0 at
    its end keeps it an array: one of a single number would become a constant in the code again.
    """
    indices = np.append(np.arange(start, start + size), 0).astype(np.uint32)
    return vector.at[indices].get(mode="promise_in_bounds")[:size]


def _uniform(leaf_keys: jax.Array, index: jax.Array) -> jax.Array:
    """Uniform float32 of each block ``index`` under its leaf's key (or under one key for all)."""
    block_keys = jax.vmap(jax.random.fold_in, (0 if leaf_keys.ndim else None, 0))(leaf_keys, index)
    words = jax.random.key_data(block_keys)
    bits = words[..., 0] ^ words[..., 1]
    return (bits >> 9).astype(jnp.float32) * np.float32(2**-23)


def _threefry(data: ArrayLike) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl="threefry2x32")


def _path_words(path: str) -> np.ndarray:
    """64 bits of a hash of the path: two of 2,000 leaves collide with probability 1e-13."""
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u4").astype(np.uint32)
