"""Every message that docs/faq.md quotes is what the package says, word for word."""

import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from costly import costly
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_readme import blocks

from magma_optax import attention_and_mlp, magma, skip_update, stacked, summarize, with_magma
from magma_optax.experimental.fused import fused_adam

W = {"w": jnp.ones((4, 4))}


def update(tx, state=None, grads=W, **kwargs):
    return tx.update(grads, tx.init(W) if state is None else state, grads, **kwargs)


def in_shard_map():
    tx = with_magma(optax.sgd(0.1))
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])

    def step(grads):
        return tx.update(grads, tx.init(grads))[0]

    jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))).lower(W)


def lazy(base, **kwargs):
    return with_magma(base, lazy=True, **kwargs)


def in_a_part_of_the_mesh():
    tx = lazy(costly(lambda x: x @ x.mT @ x), blocks=stacked(0, axis_name="expert"))
    mesh = jax.make_mesh(
        (2, 2), ("expert", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    spec = {"w": P("expert")}
    jax.jit(
        jax.shard_map(
            lambda grads: tx.update(grads, tx.init(grads))[0],
            mesh=mesh, in_specs=(spec,), out_specs=spec, axis_names={"expert"},
        )
    ).lower({"w": jnp.ones((4, 2, 3))})  # fmt: skip


TRIGGERS = {
    "with_magma wraps an optimizer": lambda: with_magma(optax.adam),
    "survival_prob must be a number": lambda: magma(optax.adam(1e-3)),
    "survival_prob must be in": lambda: magma(0.0),
    "for leaves stacked": lambda: magma(blocks=stacked),
    "`where` must be a predicate": lambda: magma(where=lambda path: True),
    "`where` selects none": lambda: magma(where=attention_and_mlp).init(
        {"fc1": W["w"], "fc2": W["w"]}
    ),
    "`where` has no entry": lambda: magma(where={"mlp": True}).init(
        {"mlp": W["w"], "norm": W["w"]}
    ),
    "a predicate of paths got 0": lambda: attention_and_mlp(0),
    "which is no array": lambda: magma().init({"act": jnp.tanh}),
    "two leaves have": lambda: magma().init({"a": {"b": W["w"]}, "a/b": W["w"]}),
    "block 'head' is in": lambda: update(magma(), magma().init(W), W | {"head": W["w"]}, grad=W),
    "'layers' has scores": lambda: update(
        magma(), magma(blocks=stacked(0)).init({"layers": W["w"]}), {"layers": W["w"]}
    ),
    "update expects a WithMagmaState": lambda: update(
        with_magma(optax.adam(1e-3)), with_magma(optax.adam(1e-3)).init(W)._asdict()
    ),
    "with_magma around optax.MultiSteps": lambda: with_magma(optax.MultiSteps(optax.adam(1e-3), 2)),
    "lazy: the base computes": lambda: lazy(
        optax.chain(costly(lambda x: x @ x), optax.clip_by_global_norm(1.0))
    ).init({"a": W["w"], "b": W["w"]}),
    "lazy: the base's direction of": lambda: lazy(
        costly(lambda x: x @ x / jnp.sum(x)), blocks=stacked(0)
    ).init({"layers": jnp.ones((3, 4, 4))}),
    "lazy: the base cannot be asked": lambda: lazy(
        costly(lambda x: jnp.ones((3, 1, 1)) * (x @ x)), blocks=stacked(0)
    ).init({"layers": jnp.ones((3, 4, 4))}),
    "lazy: each device tosses": in_a_part_of_the_mesh,
    "lazy: the base's new state": lambda: lazy(optax.sgd(1e-2)).init(W),
    "`grad` differs": lambda: update(magma(), grad={"v": W["w"]}),
    "'w': devices along": in_shard_map,
    "fused_adam: 'w'": lambda: fused_adam(1e-3).init({"w": jnp.ones((4, 4), jnp.bfloat16)}),
    "magma: no `grad`": lambda: update(magma()),
    "magma: `grad` is the very": lambda: update(optax.chain(magma(), optax.adam(1e-3)), grad=W),
    "summarize found no scores: skip_update": lambda: summarize(skip_update().init(W)),
    "summarize found no scores: the state": lambda: summarize(optax.adam(1e-3).init(W)),
    "optax.MultiSteps stands": lambda: summarize(
        optax.chain(optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(), magma()).init(
            W
        )
    ),
}
MESSAGES = [re.sub(r"\s+", " ", text).strip() for text in blocks("docs/faq.md", "text")]


def test_every_message_has_a_trigger():
    for message in MESSAGES:
        assert sum(message.startswith(start) for start in TRIGGERS) == 1, message
    assert len(MESSAGES) == len(TRIGGERS)


@pytest.mark.parametrize("start", TRIGGERS)
def test_message(start):
    [message] = [message for message in MESSAGES if message.startswith(start)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            TRIGGERS[start]()
        except (TypeError, ValueError) as error:
            said = [str(error)]
        else:
            said = [str(warning.message) for warning in caught]
    assert any(message in text for text in said), said
