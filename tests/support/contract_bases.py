"""The forms and bases over which the contract is tested, and a small problem for them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from magma_optax import MagmaState, magma, skip_update, with_magma

LR = 1e-2
BASES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(LR),
    "momentum": lambda: optax.sgd(LR, momentum=0.9),
    "adam": lambda: optax.adam(LR),
    "adamw": lambda: optax.adamw(LR, weight_decay=0.1),
    "nadam": lambda: optax.nadam(LR),
    "lion": lambda: optax.lion(LR),
    "rmsprop": lambda: optax.rmsprop(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(LR),
    "muon": lambda: optax.contrib.muon(LR),
    "adopt": lambda: optax.contrib.adopt(LR),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(LR),
    "sophia": lambda: optax.contrib.sophia(LR),
}
PARAMS = {
    "attn": {"kernel": jnp.linspace(-1.0, 1.0, 48).reshape(8, 6)},
    "mlp": [{"kernel": jnp.linspace(1.0, -1.0, 48).reshape(6, 8)}, {"bias": jnp.ones(8)}],
    "scale": jnp.ones(()),
}


def loss(params, seed=0):
    x = jax.random.normal(jax.random.key(seed), (16, 8))
    hidden = x @ params["attn"]["kernel"] * params["scale"].reshape(1, 1)
    y = jnp.tanh(hidden) @ params["mlp"][0]["kernel"] + params["mlp"][1]["bias"][None]
    return jnp.mean((y - x) ** 2)


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to use the package."""

    name: str
    needs_grad: bool
    wrap: Callable[..., optax.GradientTransformationExtraArgs]

    def state(self, state: Any) -> MagmaState:
        found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MagmaState))
        (state,) = [node for node in found if isinstance(node, MagmaState)]
        return state

    def base_state(self, state: Any) -> Any:
        return state.inner_state if self.name == "with_magma" else state[0]

    def link(self, **kwargs) -> optax.GradientTransformationExtraArgs:
        """What stands in a chain after the base: itself, but for the wrapper."""
        return skip_update(**kwargs) if self.name == "skip_update" else magma(**kwargs)


FORMS = {
    "magma": Form("magma", True, lambda base, **kw: optax.chain(base, magma(**kw))),
    "with_magma": Form("with_magma", False, with_magma),
    "skip_update": Form(
        "skip_update", False, lambda base, **kw: optax.chain(base, skip_update(**kw))
    ),
}


_gradient = jax.jit(jax.grad(loss))


@functools.cache
def grads_at(seed: int) -> Any:
    """Gradients at `PARAMS`: computed once, so that no test compiles the loss again."""
    return _gradient(PARAMS, seed)


def run_step(tx, grads, state, seed=0, **extra):
    """One step from `PARAMS`, with `grad` and what sophia asks for: (updates, state)."""
    extra = {"grad": grads, "obj_fn": lambda p: loss(p, seed), **extra}
    return tx.update(grads, state, PARAMS, **extra)


@functools.cache
def bare_steps(name: str, steps: int) -> Any:
    """Updates and states of a base alone, over steps at constant parameters."""
    return scan_steps(optax.with_extra_args_support(BASES[name]()), steps)


def scan_steps(tx, steps):
    """Jitted: (updates, state) after each of ``steps`` steps at constant parameters, stacked."""

    def body(state, given):
        updates, state = run_step(tx, given[1], state, given[0])
        return state, (updates, state)

    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(grads_at, range(steps)))
    run = jax.jit(lambda state, given: jax.lax.scan(body, state, given)[1])
    return run(tx.init(PARAMS), (jnp.arange(steps), grads))
