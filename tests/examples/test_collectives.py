"""What Magma adds to a compiled step on a mesh: a few sums of scalars, however deep the model."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from sharded import P, abstract, make_mesh, shardings, state_specs, updater

from examples.kit.aot.hlo import Collective, collectives, counts
from examples.scaling.step import lower_update
from magma_optax import attention_and_mlp, magma, skip_update, stacked, with_magma

MESHES = {"fsdp": ((8,), ("fsdp",)), "fsdp x tensor": ((4, 2), ("fsdp", "tensor"))}


def model(layers, scanned, tensor):
    """Shapes and specs of a model; matrices of 64 x 64 and wider, 16 KiB and more."""
    axis = "tensor" if tensor else None
    matrices = {
        "attn": {"q": ((64, 64), P("fsdp", axis)), "o": ((64, 64), P(axis, "fsdp"))},
        "mlp": {"up": ((64, 128), P("fsdp", axis)), "down": ((128, 64), P(axis, "fsdp"))},
        "norm": {"scale": ((64,), P())},
    }
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    body = [matrices] * layers
    if scanned:
        body = jax.tree.map(
            lambda leaf: ((layers, *leaf[0]), P(None, *leaf[1])), matrices, is_leaf=is_leaf
        )
    both = {"layers": body, "embed": ((256, 64), P("fsdp", axis))}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x[0], jnp.float32), both, is_leaf=is_leaf)
    return shapes, jax.tree.map(lambda x: x[1], both, is_leaf=is_leaf)


def build(form, scanned):
    arguments = {"where": attention_and_mlp, "blocks": stacked(0) if scanned else "leaf"}
    return {
        "base": lambda: optax.adam(1e-3),
        "with_magma": lambda: with_magma(optax.adam(1e-3), **arguments),
        "magma(grad)": lambda: optax.chain(optax.adam(1e-3), magma(**arguments)),
        "skip_update": lambda: optax.chain(optax.adam(1e-3), skip_update(**arguments)),
    }[form]()


@functools.cache
def step(form, layers, scanned, kind, axes):
    params, specs = model(layers, scanned, "tensor" in axes)
    lowered = lower_update(build(form, scanned), params, specs, make_mesh(kind, *MESHES[axes]))
    return collectives(lowered.compile().as_text())


@pytest.mark.parametrize(
    ("form", "scanned", "kind", "axes"),
    [
        ("with_magma", False, "Explicit", "fsdp x tensor"),
        ("with_magma", True, "Auto", "fsdp x tensor"),
        ("magma(grad)", True, "Explicit", "fsdp"),
    ],
)
def test_few_all_reduces_at_any_depth_and_no_gather(form, scanned, kind, axes):
    assert step("base", 2, scanned, kind, axes) == []
    depth = 12 if scanned else 8
    shallow, deep = (step(form, layers, scanned, kind, axes) for layers in (2, depth))
    # Along two axes three: some leaves are summed over one axis first, some over the other.
    expected = {"fsdp": 1, "fsdp x tensor": 3}[axes]
    assert counts(shallow) == counts(deep) == {"all-reduce": expected}
    # Three sums of 4 bytes for each of 4 blocks a layer, over each axis of the mesh.
    assert sum(op.bytes for op in deep) == 3 * 4 * 4 * depth * len(MESHES[axes][1])


def test_skip_update_adds_no_collective():
    assert step("skip_update", 2, True, "Auto", "fsdp x tensor") == []


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_sum_in_shard_map(check_vma):
    """Over one axis or two that shard all leaves alike, unrolled or scanned, at any depth."""

    def lower(layers):
        params, specs = model(layers, False, False)
        specs = jax.tree.map(lambda spec: P(("fsdp", "tensor")) if spec else spec, specs)
        specs = jax.tree.map(lambda spec, x: P() if x.ndim == 1 else spec, specs, params)
        tx = with_magma(
            optax.adam(1e-3), where=attention_and_mlp, axis_name=("fsdp", "tensor")
        )  # fmt: skip
        mesh, states = make_mesh("Auto", (4, 2)), state_specs(tx, params, specs)
        update = jax.shard_map(
            updater(tx), mesh=mesh, in_specs=(specs, states, specs), out_specs=(specs, states),
            check_vma=check_vma,
        )  # fmt: skip
        state = jax.eval_shape(tx.init, params)
        trees = [(params, specs), (state, states), (params, specs)]
        place = [abstract(tree, shardings(mesh, spec)) for tree, spec in trees]
        return collectives(jax.jit(update).lower(*place).compile().as_text())

    (one,), (other,) = lower(1), lower(6)
    assert one == Collective("all-reduce", 3 * 4 * 4, 4)
    assert other == Collective("all-reduce", 3 * 4 * 4 * 6, 4)
