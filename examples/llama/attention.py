"""Causal attention, by the implementation that suits the device.

Shapes: B sequences, T positions, N query heads, K key and value heads, H their width.
"""

import functools

import jax
from jax import Array
from jax.sharding import PartitionSpec

from examples.llama.sharding import AXES, row_spec

LANES = 128  # of a TPU: splash attention works on blocks of a multiple of so many positions
BLOCK = 512


def attend(q: Array, k: Array, v: Array, implementation: str) -> Array:
    """Mixes `v` (B, T, K, H) as `q` (B, T, N, H) and `k` (B, T, K, H) say; returns (B, T, N, H).

    Args:
        q: Queries; N is a multiple of K, whose heads serve N / K queries each.
        k: Keys.
        v: Values.
        implementation: ``"xla"`` and ``"cudnn"`` are `jax.nn.dot_product_attention`'s, ``"splash"``
            is JAX's flash attention for TPUs, which never holds the (T, T) scores. A length that
            it doesn't take goes through ``"xla"``.
    """
    if implementation == "splash":
        if takes_length(q.shape[1]):
            return splash(q, k, v)
        implementation = "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def takes_length(length: int) -> bool:
    """Says whether splash attention takes sequences of `length` positions."""
    return length % LANES == 0


def splash(q: Array, k: Array, v: Array, interpret: bool = False) -> Array:
    """Computes `attend` with splash attention on this mesh's devices, each its rows and heads.

    Args:
        q: Queries (B, T, N, H).
        k: Keys (B, T, K, H).
        v: Values (B, T, K, H).
        interpret: Computes on any device what a TPU would, slowly; for tests.
    """
    local = functools.partial(_splash, interpret=interpret)
    rows = row_spec(q.shape[0])  # None without a mesh
    if rows is None:
        return local(q, k, v)
    tensor = jax.sharding.get_abstract_mesh().shape["tensor"]
    heads = "tensor" if k.shape[2] % tensor == 0 else None
    spec = PartitionSpec(*(rows or (None,)), None, heads, None)
    return jax.shard_map(
        local, in_specs=(spec, spec, spec), out_specs=spec, axis_names=set(AXES), check_vma=False
    )(q, k, v)


def _splash(q: Array, k: Array, v: Array, interpret: bool) -> Array:
    # Here, as nothing but a TPU needs it: its import takes longer than those of JAX's other parts.
    from jax.experimental.pallas.ops.tpu import splash_attention

    length, heads, width = q.shape[1:]
    block = max(size for size in range(LANES, BLOCK + 1, LANES) if length % size == 0)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * heads),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q * width**-0.5, k, v))  # (B, heads, T, H)
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)
