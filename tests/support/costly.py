"""Bases whose direction is costly, their runs, and what of a function runs as the coins say."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

C = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)


def normal(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


class CostlyState(NamedTuple):
    mu: Any


def costly(direction, b1=0.9) -> optax.GradientTransformation:
    """A base with an EMA of gradients per leaf, whose updates are ``direction(mu)``."""

    def update(updates, state, params=None):
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        return jax.tree.map(direction, mu), CostlyState(mu)

    return optax.GradientTransformation(
        lambda params: CostlyState(jax.tree.map(lambda p: 0 * p, params)), update
    )


def products(function, *args) -> dict[str, int]:
    """How many matrix products of ``function`` are in a branch or a loop of unknown length."""
    count = {"by the coins": 0, "always": 0}

    def walk(jaxpr, where):
        for eqn in jaxpr.eqns:
            count[where] += eqn.primitive.name == "dot_general"
            inside = "by the coins" if eqn.primitive.name in ("cond", "while") else where
            for value in eqn.params.values():
                for body in value if isinstance(value, tuple) else (value,):
                    if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                        walk(getattr(body, "jaxpr", body), inside)

    walk(jax.make_jaxpr(function)(*args).jaxpr, "always")
    return count


def whiten(x):
    """(X X^T)^(-1/2) X, by an eigendecomposition, as Shampoo's directions are."""
    gram = (
        x @ jnp.swapaxes(x, -1, -2)
        + 0.1 * jnp.eye(x.shape[-2], dtype=x.dtype)[(None,) * (x.ndim - 2)]
    )
    values, vectors = jnp.linalg.eigh(gram)
    root = (vectors / jnp.sqrt(values)[..., None, :]) @ jnp.swapaxes(vectors, -1, -2)
    return root @ x


@jax.custom_vjp
def unchanged(x):
    """A product whose derivative says that it changes nothing."""
    return x @ C


unchanged.defvjp(lambda x: (x @ C, None), lambda _, g: (g,))


def steps(tx, params, grads, donate=False):
    """Updates and states of a few jitted steps."""
    step = jax.jit(tx.update, donate_argnums=1 if donate else ())
    state, seen = tx.init(params), []
    for g in grads:
        updates, state = step(g, state, params)
        seen.append(jax.device_get((updates, state)))
    return seen


def assert_same(one, other, atol=1e-5):
    chex.assert_trees_all_close(one, other, rtol=1e-4, atol=atol)
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
