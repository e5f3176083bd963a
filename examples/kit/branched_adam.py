"""SkipUpdate on Adam with a branch per leaf, in plain JAX.

The parameters of a dropped leaf need neither be read nor written. Fused kernels leave them out;
`jax.lax.cond` can as well, and this is what it costs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from magma_optax import skip_update

B1, B2, EPS = 0.9, 0.999, 1e-8
FORMS = {"branched": False, "branched with moments": True}

Leaf = tuple[jax.Array, jax.Array, jax.Array]  # parameters and both moments


class BranchedState(NamedTuple):
    """State of `BranchedAdam`: Adam's and SkipUpdate's."""

    adam: optax.ScaleByAdamState
    masks: Any


class BranchedAdam:
    """Adam whose update is made and applied inside a branch on the leaf's coin."""

    def __init__(self, learning_rate: float, *, moments: bool = False, **masking: Any):
        """Takes what `skip_update` takes, but for blocks: a leaf is one.

        Args:
          learning_rate: a number.
          moments: whether the moments advance inside the branch too.
          **masking: `survival_prob`, `where` and `key`.
        """
        self._learning_rate, self._moments = learning_rate, moments
        self._skip = skip_update(**masking)

    def init(self, params: Any) -> BranchedState:
        """Returns the state before the first step."""
        return BranchedState(optax.scale_by_adam().init(params), self._skip.init(_ones(params)))

    def update_and_apply(self, grads: Any, state: BranchedState, params: Any) -> tuple[Any, Any]:
        """Returns parameters and state after a step."""
        count = state.adam.count + 1
        # Coins depend on paths alone: one element stands for a leaf. It becomes 0 or 1/p.
        factors, masks = self._skip.update(_ones(params), state.masks, _ones(params))

        def step(p: jax.Array, mu: jax.Array, nu: jax.Array, g: jax.Array, f: jax.Array) -> Leaf:
            factor = self._learning_rate * f.reshape(())
            return step_leaf((p, mu, nu), g, factor, count, moments=self._moments)

        made = jax.tree.map(step, params, state.adam.mu, state.adam.nu, grads, factors)
        params, mu, nu = jax.tree.transpose(
            jax.tree.structure(params), jax.tree.structure((0, 0, 0)), made
        )
        return params, BranchedState(optax.ScaleByAdamState(count, mu, nu), masks)


def step_leaf(
    leaf: Leaf, g: jax.Array, factor: jax.Array, count: jax.Array, *, moments: bool
) -> Leaf:
    """Returns a leaf's parameters and moments after a step of Adam.

    Args:
      leaf: those before it.
      g: its gradient.
      factor: what Adam's direction is multiplied by; 0 drops it.
      count: of steps, this one included.
      moments: whether the moments advance inside the branch.
    """

    def advance(mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
        return optax.tree.update_moment(g, mu, B1, 1), optax.tree.update_moment(g, nu, B2, 2)

    def apply(p: jax.Array, mu: jax.Array, nu: jax.Array) -> jax.Array:
        mu_hat = optax.tree.bias_correction(mu, B1, count)
        nu_hat = optax.tree.bias_correction(nu, B2, count)
        return p - factor * mu_hat / (jnp.sqrt(nu_hat) + EPS)

    def survive(p: jax.Array, mu: jax.Array, nu: jax.Array) -> Leaf:
        mu, nu = advance(mu, nu)
        return apply(p, mu, nu), mu, nu

    if moments:
        return jax.lax.cond(factor != 0, survive, lambda p, *m: (p, *advance(*m)), *leaf)
    p, (mu, nu) = leaf[0], advance(*leaf[1:])
    return jax.lax.cond(factor != 0, apply, lambda p, *_: p, p, mu, nu), mu, nu


def _ones(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.ones((1,) * p.ndim), params)
