"""fused_adam takes the steps of the plain transformations, on their states and coins.

Its kernels run interpreted here; that they can be compiled is checked as far as Triton's input.
"""

import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from sharded import P, make_mesh, state_specs

from magma_optax import skip_update, stacked, with_magma
from magma_optax.experimental import _adam_kernels
from magma_optax.experimental.fused import fused_adam

# From jax 0.11 on, when a kernel is lowered.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

SHAPES = {"over": (1025,), "odd": (3, 5, 7), "none": (0, 3)}  # A tile is 1,024 elements.
MASKINGS = ("magma", "skip_update")
LR = 1e-2
RTOL, ATOL = 5e-7, 2e-8  # Four roundings of float32: the order of sums, fused products.


def normal(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.normal(size=s), jnp.float32) for path, s in shapes.items()}


PARAMS = normal(0)
# A common part, so that momentum and gradient align, and noise.
GRADS = [jax.tree.map(lambda a, b: a + 0.5 * b, normal(1), normal(2 + n)) for n in range(4)]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(_adam_kernels, "INTERPRET", True)


def apply_with(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(steps, state, params=PARAMS, grads=GRADS):
    """Parameters and state after every step; ``steps`` are jitted, one for each gradient."""
    history = []
    for step, g in zip(steps, grads, strict=True):
        params, state = step(g, state, params)
        history.append((params, state))
    return history


def assert_same(actual, expected):
    """Equal types, and values to rounding."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    chex.assert_trees_all_close(actual, expected, rtol=RTOL, atol=ATOL)


ADAMW = {
    "learning_rate": optax.linear_schedule(LR, LR / 2, 3),
    "weight_decay": 0.1,
    "b1": 0.8,
    "b2": 0.99,
    "eps": 1e-6,
    "eps_root": 1e-6,
    "survival_prob": lambda step: jnp.where(step < 2, 0.8, 0.5),
}
CASES = {
    "magma": {},
    "masking alone": {"damping": False},
    "by alignment": {"survival_prob": "alignment", "rescale": True, "key": 3},
    "magma, adamw, schedules": {
        "temperature": lambda step: 1.0 + step,
        "score_decay": 0.5,
        **ADAMW,
    },
    "skip_update": {"masking": "skip_update"},
    "skip_update, adamw, schedules": {"masking": "skip_update", **ADAMW},
}
ADAM = ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay")


def transformation(masking="magma", learning_rate=LR, **options):
    """What `fused_adam` of the same arguments stands for."""
    adam = {name: options.pop(name) for name in ADAM if name in options}
    base = (optax.adamw if "weight_decay" in adam else optax.adam)(learning_rate, **adam)
    if masking == "magma":
        return with_magma(base, **options)
    return optax.chain(base, skip_update(**options))


def assert_same_steps(shapes=None, **case):
    params, grads = (PARAMS, GRADS) if shapes is None else (normal(0, shapes), None)
    grads = grads or [normal(1 + n, shapes) for n in range(4)]
    tx, optimizer = transformation(**case), fused_adam(**{"learning_rate": LR, **case})
    state = tx.init(params)
    chex.assert_trees_all_equal(optimizer.init(params), state)
    expected = run([jax.jit(apply_with(tx))] * 4, state, params, grads)
    actual = run([jax.jit(optimizer.update_and_apply)] * 4, state, params, grads)
    assert_same(actual, expected)
    return actual


@pytest.mark.parametrize("case", CASES)
def test_kernels_take_the_steps_of_the_plain_transformation(case, interpreted):
    assert_same_steps(**CASES[case])


ENDS = [("magma", ()), ("magma", (1023,)), ("skip_update", (7,)), ("skip_update", (2, 1024))]


@pytest.mark.parametrize(("masking", "shape"), ENDS)
def test_kernels_mind_the_end_of_a_leaf(masking, shape, interpreted):
    assert_same_steps(masking=masking, shapes={"leaf": shape})


SLICES = [
    ("magma", stacked(0), (2, 1025)),
    ("magma", stacked((0, 1)), (2, 3, 5, 7)),
    ("skip_update", stacked(0), (2, 1025)),
    ("skip_update", "element", (4,)),
]


@pytest.mark.parametrize(("masking", "blocks", "shape"), SLICES)
def test_every_slice_along_leading_axes_is_a_block(masking, blocks, shape, interpreted):
    assert_same_steps(masking=masking, blocks=blocks, shapes={"leaf": shape})


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_kernels_on_a_gpu():
    """The cases above, not interpreted; in a process of its own, as this one has CPUs."""
    script = pathlib.Path(__file__).with_name("fused_on_gpu.py")
    env = os.environ | {"JAX_PLATFORMS": "cuda"}
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    found = subprocess.run(probe, env=env, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"JAX has no NVIDIA GPU here: {found.stderr.splitlines()[-1]}")
    subprocess.run([sys.executable, str(script)], env=env, check=True)


@pytest.mark.parametrize(
    ("case", "compile"),
    [
        ("magma", jax.jit),
        ("skip_update", jax.jit),
        ("magma, adamw, schedules", jax.jit),
        ("magma", lambda step: step),
    ],
)
def test_without_such_a_gpu_it_is_the_plain_transformation(case, compile):
    tx = transformation(**CASES[case])
    optimizer = fused_adam(**{"learning_rate": LR, **CASES[case]})
    expected = run([compile(apply_with(tx))] * 4, tx.init(PARAMS))
    actual = run([compile(optimizer.update_and_apply)] * 4, optimizer.init(PARAMS))
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("masking", MASKINGS)
def test_without_a_triton_backend_it_is_the_plain_transformation(masking, monkeypatch):
    tx, optimizer = transformation(masking), fused_adam(LR, masking=masking)
    state = optimizer.init(PARAMS)
    monkeypatch.setattr(_adam_kernels, "triton", None)
    steps = [jax.jit(optimizer.update_and_apply)] * 4
    chex.assert_trees_all_equal(run(steps, state), run([jax.jit(apply_with(tx))] * 4, state))
    traced = steps[0].trace(GRADS[0], state, PARAMS)
    assert "pallas_call" not in str(traced.jaxpr)


@pytest.mark.parametrize("masking", MASKINGS)
def test_one_can_switch_at_any_step(masking, interpreted):
    optimizer = fused_adam(LR, masking=masking)
    kernels, plain = jax.jit(optimizer.update_and_apply), jax.jit(apply_with(optimizer.plain))
    state = optimizer.init(PARAMS)
    expected = run([plain] * 4, state)
    assert_same(run([kernels, plain, kernels, plain], state), expected)
    assert kernels._cache_size() == plain._cache_size() == 1  # types never change


@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_a_momentum_of_its_own_takes_the_plain_path(b1, interpreted):
    """The kernels score by Adam's mu: of b1 = 0 that is the gradient, and 1 its cosine."""
    optimizer = fused_adam(LR, b1=b1)
    own = with_magma(optax.adam(LR, b1=b1), first_moment="own")
    state = own.init(PARAMS)
    expected = run([jax.jit(apply_with(own))] * 4, state)
    assert_same(run([jax.jit(optimizer.update_and_apply)] * 4, state), expected)
    assert jax.tree.leaves(expected[-1][1].magma.momentum)


def test_other_leaves_are_left_to_optax(interpreted):
    params = {
        "w": jnp.ones((3, 3)),
        "half": jnp.ones(3, jnp.bfloat16),
        "norm": jnp.ones(5),
        "count": jnp.arange(3),
        "absent": None,
    }
    grads = jax.tree.map(lambda x: (0.3 * jnp.ones_like(x, jnp.float32)).astype(x.dtype), params)
    optimizer = fused_adam(LR, where=lambda path, leaf: path == "w")
    state = optimizer.init(params)
    expected = jax.jit(apply_with(optimizer.plain))(grads, state, params)
    actual = jax.jit(optimizer.update_and_apply)(grads, state, params)
    assert_same(actual, expected)
    rest = [{k: v for k, v in p.items() if k != "w"} for p, _ in (actual, expected)]
    chex.assert_trees_all_equal(*rest)


@pytest.mark.parametrize(("masking", "bad"), [("magma", np.nan), ("skip_update", np.inf)])
def test_dropped_blocks_stay_bit_for_bit_and_bad_gradients_spare_scores(masking, bad, interpreted):
    shapes = {"layers": (8, 1030)}
    params, grads = normal(0, shapes), [normal(1 + n, shapes) for n in range(4)]
    grads[2] = {"layers": grads[2]["layers"].at[:, 1029].set(bad)}
    optimizer = fused_adam(LR, masking=masking, blocks=stacked(0), key=1)
    state = optimizer.init(params)
    actual = run([jax.jit(optimizer.update_and_apply)] * 4, state, params, grads)
    assert_same(actual, run([jax.jit(apply_with(optimizer.plain))] * 4, state, params, grads))
    bits = [np.asarray(p["layers"]).view(np.int32) for p in (params, *(p for p, _ in actual))]
    for before, now in itertools.pairwise(bits):
        assert 0 < np.all(now == before, axis=1).sum() < 8
    if masking == "magma":
        scores = [state.magma.alignment["layers"] for _, state in actual]
        assert jnp.all(scores[0] != scores[1]) and jnp.all(scores[1] == scores[2])


def test_kernels_in_a_scan(interpreted):
    optimizer = fused_adam(LR)
    state = optimizer.init(PARAMS)
    stacked_grads = jax.tree.map(lambda *xs: jnp.stack(xs), *GRADS)

    @jax.jit
    def steps(params, state):
        def body(carry, g):
            return optimizer.update_and_apply(g, carry[1], carry[0]), None

        return jax.lax.scan(body, (params, state), stacked_grads)[0]

    assert_same(steps(PARAMS, state), run([jax.jit(apply_with(optimizer.plain))] * 4, state)[-1])


def in_shard_map(optimizer, params, specs, **options):
    states = state_specs(optimizer.plain, params, specs)
    return jax.shard_map(
        optimizer.update_and_apply,
        mesh=make_mesh(shape=(4,), names=("fsdp",)),
        in_specs=(specs, states, specs),
        out_specs=(specs, states),
        **options,
    )


@pytest.mark.parametrize("masking", MASKINGS)
def test_in_shard_map_it_is_the_run_of_one_device(masking, interpreted):
    shapes, specs = {"w": (8, 300), "b": (5,)}, {"w": P("fsdp"), "b": P()}
    params, grads = normal(0, shapes), normal(1, shapes)
    optimizer = fused_adam(LR, masking=masking, **axis_name(masking))
    state = optimizer.init(params)
    expected = jax.jit(apply_with(transformation(masking)))(grads, state, params)
    step = in_shard_map(optimizer, params, specs, check_vma=False)  # JAX cannot interpret with it.
    assert_same(jax.jit(step)(grads, state, params), expected)


def axis_name(masking):
    return {"axis_name": "fsdp"} if masking == "magma" else {}


# ---------------------------------------------------------------------------------------------
# What XLA gets for an NVIDIA GPU, without one.


@functools.cache
def lowers():
    """Whether this jaxlib lowers Pallas kernels for CUDA without a GPU, as 0.10 does."""
    like = jax.ShapeDtypeStruct((8,), jnp.float32)
    double = pl.pallas_call(
        lambda x, y: y.__setitem__(..., 2 * x[...]),
        out_shape=like,
        compiler_params=plgpu.CompilerParams(),
    )
    try:
        jax.jit(double).trace(like).lower(lowering_platforms=("cuda",))
    except RuntimeError:  # jax 0.11: no supported GPU found
        return False
    return True


def lowered(step, *args):
    """The program for CUDA, as text; its kernels are lowered to Triton's input."""
    if not lowers():
        pytest.skip("this jaxlib needs a GPU to lower kernels")
    traced = jax.jit(step, donate_argnums=(1, 2)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    return re.findall(r"custom_call @\S*triton\S*\(.*", text)


@pytest.mark.parametrize("case", CASES)
def test_kernels_lower_for_cuda_and_update_in_place(case):
    optimizer = fused_adam(**{"learning_rate": LR, **CASES[case]})
    state = optimizer.init(PARAMS)
    text = lowered(optimizer.update_and_apply, GRADS[0], state, PARAMS)
    calls, leaves = kernels(text), sum(x.size > 0 for x in PARAMS.values())
    skip = CASES[case].get("masking") == "skip_update"
    assert len(calls) == leaves * (1 if skip else 2)
    aliases = sum(call.count("output_operand_alias<") for call in calls)
    assert aliases == 3 * leaves  # parameters and two moments
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves((state, PARAMS)))


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("x64", [False, True])
def test_blocks_lower_for_cuda(masking, x64):
    with jax.enable_x64(x64):
        optimizer = fused_adam(lambda step: LR, masking=masking, blocks=stacked(0))
        shapes = {"layers": (3, 5, 70), "many": (70_000, 1025), "large": (3, 2**15, 2**15)}
        params = {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in shapes.items()}
        state = jax.eval_shape(optimizer.init, params)
        assert kernels(lowered(optimizer.update_and_apply, params, state, params))


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_lowers_for_cuda(masking, check_vma):
    params, specs = normal(0, {"w": (8, 300), "b": (5,)}), {"w": P("fsdp"), "b": P()}
    optimizer = fused_adam(LR, masking=masking, **axis_name(masking))
    step = in_shard_map(optimizer, params, specs, check_vma=check_vma)
    assert kernels(lowered(step, params, optimizer.init(params), params))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_replicated_parameters_lower_for_cuda(kind):
    mesh = make_mesh(kind, (4,), ("data",))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    optimizer = fused_adam(LR)
    assert kernels(lowered(optimizer.update_and_apply, params, optimizer.init(params), params))


# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"w": jnp.ones(3, jnp.bfloat16)}, {}, "'w' in `params` is bfloat16, .* take float32"),
        ({"w": jnp.ones(3, jnp.complex64)}, {}, "'w' in `params` is complex64, .* take float32"),
        ({"w": jnp.ones((3, 4))}, {"blocks": "column"}, r"'w' count along axes \(1,\), .* leading"),
        ({"w": jnp.ones((3, 4))}, {"where": lambda path, leaf: False}, "`where` selects none"),
    ],
)
def test_init_refuses_what_the_kernels_cannot_take(masking, params, options, message):
    with pytest.raises(ValueError, match=message):
        fused_adam(LR, masking=masking, **options).init(params)


@pytest.mark.parametrize("masking", MASKINGS)
def test_update_refuses_what_the_kernels_cannot_take(masking):
    optimizer = fused_adam(LR, masking=masking)
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)
    step = optimizer.update_and_apply
    with pytest.raises(ValueError, match="'w' in `grads` is bfloat16"):
        step({"w": jnp.ones((4, 4), jnp.bfloat16)}, state, params)
    with pytest.raises(ValueError, match=r"`grads` differs .* 'w': shape \(4,\)"):
        step({"w": jnp.ones(4)}, state, params)
    with pytest.raises(ValueError, match=r"update expects a (WithMagma|Magma)State"):
        step(params, optax.adam(LR).init(params), params)
    mesh = make_mesh("Explicit", (4,), ("fsdp",))
    sharded = jax.device_put(params, jax.NamedSharding(mesh, P("fsdp")))
    with pytest.raises(ValueError, match=r"'w' in `params` is sharded over \['fsdp'\].* shard_map"):
        step(params, state, sharded)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"masking": "skip"}, ValueError, "masking must be .* got 'skip'"),
        (
            {"first_moment": "own"},
            TypeError,
            "fused_adam has no option 'first_moment'; it has .*key",
        ),
        ({"masking": "skip_update", "temperature": 1}, TypeError, "keyword argument 'temperature'"),
        ({"survival_prob": 0}, ValueError, r"survival_prob must be in \(0, 1\], got 0"),
        ({"b1": None}, TypeError, "NoneType"),
    ],
)
def test_arguments(options, error, message):
    with pytest.raises(error, match=message):
        fused_adam(LR, **options)
