"""Bases whose direction is costly, and what of a traced function runs as the coins say."""

from typing import Any, NamedTuple

import jax
import optax


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
