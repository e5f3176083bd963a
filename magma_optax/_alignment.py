"""Momentum-gradient alignment: first moments, cosine similarity and scores (paper, section 3)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from magma_optax._blocks import AxisName, Blocks
from magma_optax._mesh import varying_axes


def update_momentum(momentum: jax.Array, gradient: jax.Array, b1: Any) -> jax.Array:
    """mu_t = b1 mu_{t-1} + (1 - b1) g_t, in float32 or wider; elements with non-finite g stay."""
    return keep_finite(gradient, mix(b1, momentum, 1 - b1, gradient), widen(momentum))


def mix(a: Any, x: jax.Array, b: Any, y: jax.Array) -> jax.Array:
    """A x + b y, in the dtype that holds both; numbers are rounded to it."""
    x, y = widen_together(x, y)
    return jnp.asarray(a, x.dtype) * x + jnp.asarray(b, y.dtype) * y


def read_apart(tree: Any) -> Any:
    """Return the arrays of ``tree`` so that what is computed of them is not merged with other uses.

    On a GPU, a first moment that is both summed and stored would be written by the kernel that sums
    it. That cannot write in place, so XLA copies the result into the donated buffer. Computed anew
    from what is returned here it is never stored: a step on Adam moves 9 arrays instead of 11. On a
    CPU sums read a stored array, so there it would be computed and stored twice.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        apart = functools.partial(jax.tree.map, jax.lax.optimization_barrier)
        return jax.lax.platform_dependent(tree, cpu=lambda tree: tree, default=apart)
    return tree  # Outside jit nothing is merged.


def keep_finite(gradient: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """``new`` where the gradient is finite, else ``old``: one NaN must not poison an average."""
    return jnp.where(jnp.isfinite(gradient), new, old.astype(new.dtype))


def cosine_similarity(
    mu: dict[str, jax.Array],
    g: dict[str, jax.Array],
    blocks: dict[str, Blocks],
    axis_name: AxisName = None,
) -> dict[str, jax.Array]:
    """cossim(mu, g) of every block, exact at any scale: no epsilon.

    Args:
      mu: first moments by path, real or complex.
      g: gradients by path, of the same shapes.
      blocks: the masked leaves.
      axis_name: mesh axes that shard the leaves inside ``shard_map``.

    Returns:
      float32 arrays of the blocks' shapes in [-1, 1], by path: 0 where a vector is zero, NaN where
      a sum is not finite.
    """
    products = {}
    for path, cut in blocks.items():
        x, y = widen_together(mu[path], g[path])
        products[path] = (cut.sum(_inner(x, y)), cut.sum(_inner(x, x)), cut.sum(_inner(y, y)))
    return cosine_of_sums(products, blocks, axis_name)


def cosine_of_sums(
    products: dict[str, tuple[jax.Array, ...]],
    blocks: dict[str, Blocks],
    axis_name: AxisName = None,
) -> dict[str, jax.Array]:
    """`cosine_similarity` from the sums <mu, g>, <mu, mu> and <g, g> of every block."""
    products = _sum_over_mesh(products, blocks, axis_name)
    return {path: _cosine(*sums).astype(jnp.float32) for path, sums in products.items()}


def _cosine(xy: jax.Array, xx: jax.Array, yy: jax.Array) -> jax.Array:
    # Two inverse roots: the product xx * yy would underflow for vectors of norm 1e-10.
    cosine = jnp.clip(xy * _inverse_root(xx) * _inverse_root(yy), -1.0, 1.0)
    return jnp.where(jnp.isfinite(xy + xx + yy), cosine, jnp.nan)


def _inverse_root(square: jax.Array) -> jax.Array:
    """1 / sqrt(square), and 0 at 0, where the derivative is 0 too."""
    positive = square > 0
    # Not rsqrt, whose derivative in JAX divides by the square: infinite from vectors of 5e-13 on.
    return jnp.where(positive, 1.0 / jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)


def _inner(x: jax.Array, y: jax.Array) -> jax.Array:
    """Elements whose sum is Re <x, y>."""
    if jnp.iscomplexobj(x):
        return x.real * y.real + x.imag * y.imag
    return x * y


def widen(x: jax.Array) -> jax.Array:
    """Cast floats narrower than float32 to float32; leave wider and complex arrays."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def widen_together(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cast both to the dtype that holds either, float32 at least."""
    dtype = np.promote_types(widen(x).dtype, widen(y).dtype)  # NumPy's is never strict.
    return x.astype(dtype), y.astype(dtype)


def _sum_over_mesh(
    products: dict[str, Any], blocks: dict[str, Blocks], axis_name: AxisName
) -> dict[str, Any]:
    """Sum over the mesh axes that shard a block, in one collective for each set of axes."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, cut in blocks.items():
        axes = tuple(name for name in names if name not in cut.axis_names)
        varying = frozenset[str]().union(*map(varying_axes, products[path]))
        if varying:  # A leaf sharded over some of the axes: JAX refuses to sum over the others.
            axes = tuple(name for name in axes if name in varying)
        groups.setdefault(axes, []).append(path)
    return {
        path: sums
        for axes, paths in groups.items()
        for path, sums in _psum({p: products[p] for p in paths}, axes).items()
    }


def _psum(tree: dict[str, Any], axes: tuple[str, ...]) -> dict[str, Any]:
    return jax.lax.psum(tree, axes) if axes else tree
