"""Adam as Pallas kernels for NVIDIA GPUs that spare the parameters of dropped blocks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:  # Deprecated in jax 0.11. Without it `fused_adam` takes its plain path.
    triton: Any = None

TILE, WARPS = 1024, 4  # Elements and warps of one program of a kernel.
INTERPRET = False  # For tests: run the kernels, interpreted, on any device.


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam's equations, and the kernels: functions of ``load``, ``store`` and references."""

    b1: float
    b2: float
    eps: float
    eps_root: float
    weight_decay: float

    def numbers(self, learning_rate, count):
        corrections = (1 - self.b1**count, 1 - self.b2**count)
        return -learning_rate, *(x.astype(jnp.float32) for x in corrections)

    def moments(self, mu, nu, g):
        return (1 - self.b1) * g + self.b1 * mu, (1 - self.b2) * (g * g) + self.b2 * nu

    def move(self, p, mu, nu, per_block):
        factor, step_size, correction_1, correction_2 = (per_block[n] for n in range(1, 5))
        delta = mu / correction_1 / (jnp.sqrt(nu / correction_2 + self.eps_root) + self.eps)
        if self.weight_decay:
            delta += self.weight_decay * p
        return p + step_size * delta * factor

    def average(self, load, store, mu, nu, g, new_mu, new_nu, sums):
        g = load(g)
        x, y = self.moments(load(mu), load(nu), g)
        store(new_mu, x)
        store(new_nu, y)
        for n, product in enumerate((x * g, x * x, g * g)):
            sums[n] = jnp.sum(product)

    def apply(self, load, store, p, mu, nu, per_block, new_p):
        @pl.when(per_block[0] != 0)
        def _():
            store(new_p, self.move(load(p), load(mu), load(nu), per_block))

    def both(self, load, store, p, mu, nu, g, per_block, new_p, new_mu, new_nu):
        x, y = self.moments(load(mu), load(nu), load(g))
        store(new_mu, x)
        store(new_nu, y)

        @pl.when(per_block[0] != 0)
        def _():
            store(new_p, self.move(load(p), x, y, per_block))


def launch(kernel, cut, updated, read, per_block=(), sums=0):
    """Run a kernel on every tile of every block of a leaf.

    Args:
      kernel: a function of ``load``, ``store`` and a reference for each argument and each result.
      cut: how the leaf is cut, along leading axes.
      updated: arrays of the leaf's shape that are updated in place: the first results.
      read: further such arrays.
      per_block: numbers, () or of the blocks' shape, handed over as one float32 array.
      sums: how many sums over a tile are the last result, of shape (sums, blocks, tiles).
    """
    arrays = [x.reshape(cut.size, -1) for x in (*updated, *read)]
    rows, length = arrays[0].shape
    size = min(TILE, pl.next_power_of_2(length))
    tiles = pl.cdiv(length, size)
    tile = pl.BlockSpec((None, size), lambda i, row: (row, i))
    in_specs, out_specs = [tile] * len(arrays), [tile] * len(updated)
    # Inside shard_map, a result varies along all mesh axes along which an argument does.
    like = jax.eval_shape(lambda *xs: sum(xs), *arrays)
    out_shape = [like] * len(updated)
    if per_block:
        arrays.append(jnp.stack([jnp.broadcast_to(x, cut.shape).ravel() for x in per_block]))
        in_specs.append(pl.BlockSpec((len(per_block), None), lambda i, row: (0, row)))
    if sums:
        shape = (sums, rows, tiles)
        out_shape.append(jax.eval_shape(lambda x: jnp.broadcast_to(x[0, 0], shape), like))
        out_specs.append(pl.BlockSpec((sums, None, None), lambda i, row: (0, row, i)))

    def body(*refs):
        load, store = triton.load, triton.store
        if length % size:  # Without a mask Triton reads and writes past the end of a block.
            inside = pl.program_id(0) * size + jnp.arange(size, dtype=jnp.int32) < length
            load = functools.partial(load, mask=inside, other=0.0)
            store = functools.partial(store, mask=inside)
        kernel(load, store, *refs)

    results = pl.pallas_call(
        body,
        grid=(tiles, rows),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases={n: n for n in range(len(updated))},
        compiler_params=triton.CompilerParams(num_warps=WARPS),
        interpret=INTERPRET,
        name=f"fused_adam_{kernel.__name__}",
    )(*arrays)
    return *(x.reshape(updated[0].shape) for x in results[: len(updated)]), *results[len(updated) :]
