"""The Llama trainer on meshes of eight emulated devices: placement, and the same run on all."""

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from llama_place import Place
from trainers import refusal

from examples.kit import checkpoint
from examples.kit.optimizers import LEARNING_RATES, OptimizerConfig, assemble
from examples.kit.paths import by_path
from examples.llama import sharding, train
from examples.llama.config import LlamaConfig
from examples.llama.options import whole_mesh
from examples.llama.step import abstract_model, decays, layer_blocks, make_functions
from magma_optax import MagmaState

SEED = 0
ROWS, LENGTH = 8, 8


def model(**changes):
    return LlamaConfig(
        **{
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "num_layers": 2,
        }
        | changes
    )


def optimizer(name="rmsprop", masking="magma", scan_layers=False):
    settings = OptimizerConfig(name, 0.003, steps=10, warmup=0, masking=masking)
    return assemble(settings, layer_blocks(scan_layers), decays)


def sizes(data=1, fsdp=1, tensor=1):
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


def layout_of(mesh, config, tx):
    return sharding.make_layout(mesh, config, tx, abstract_model(config, SEED)[1])


# ---------------------------------------------------------------------------------------------
# Placement


@pytest.mark.parametrize("scan_layers", [False, True])
def test_parameters_are_split_over_fsdp_and_tensor(scan_layers):
    config = model(scan_layers=scan_layers)
    mesh = sharding.make_mesh(sizes(2, 2, 2))
    specs = jax.tree.map(lambda x: x.spec, layout_of(mesh, config, optimizer()).params)
    first = "layers/0/" if not scan_layers else "layers/"
    stack = () if not scan_layers else (None,)  # the layer axis is not split
    expected = {
        "embed_tokens/embedding": PartitionSpec("tensor", "fsdp"),
        "lm_head/kernel": PartitionSpec("fsdp", "tensor"),
        "norm/weight": PartitionSpec(),
        f"{first}input_layernorm/weight": PartitionSpec(),
        f"{first}self_attn/q_proj/kernel": PartitionSpec(*stack, "fsdp", "tensor"),
        f"{first}self_attn/k_proj/kernel": PartitionSpec(*stack, "fsdp", "tensor"),
        f"{first}self_attn/v_proj/kernel": PartitionSpec(*stack, "fsdp", "tensor"),
        f"{first}self_attn/o_proj/kernel": PartitionSpec(*stack, "tensor", "fsdp"),
        f"{first}mlp/gate_proj/kernel": PartitionSpec(*stack, "fsdp", "tensor"),
        f"{first}mlp/up_proj/kernel": PartitionSpec(*stack, "fsdp", "tensor"),
        f"{first}mlp/down_proj/kernel": PartitionSpec(*stack, "tensor", "fsdp"),
    }
    actual = by_path(specs)
    assert {path: actual[path] for path in expected} == expected


def test_what_does_not_divide_stays_whole():
    config = model(vocab_size=33, num_heads=4, intermediate_size=20)
    mesh = sharding.make_mesh(sizes(tensor=8))  # of hidden 16, heads 4, width 20, vocabulary 33
    for leaf in jax.tree.leaves(layout_of(mesh, config, optimizer()).params):
        assert "tensor" not in leaf.spec
    mesh = sharding.make_mesh(sizes(data=2, tensor=4))
    specs = by_path(layout_of(mesh, config, optimizer()).params)
    assert specs["layers/0/self_attn/q_proj/kernel"].spec == PartitionSpec("fsdp", "tensor")
    assert specs["lm_head/kernel"].spec == PartitionSpec("fsdp", None)


@pytest.mark.parametrize("masking", ["none", "magma", "skip"])
@pytest.mark.parametrize("name", LEARNING_RATES)
def test_every_optimizer_state_has_shardings(name, masking):
    config, tx = model(scan_layers=True), optimizer(name, masking, scan_layers=True)
    _, params = abstract_model(config, SEED)
    layout = layout_of(sharding.make_mesh(sizes(2, 2, 2)), config, tx)
    state = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(layout.opt_state) == jax.tree.structure(state)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(layout.params), strict=True)
    split = {leaf.shape for leaf, place in pairs if not place.is_fully_replicated}
    assert len(split) == 5
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(layout.opt_state), strict=True)
    for leaf, place in pairs:
        assert place.is_fully_replicated == (leaf.shape not in split), leaf


@pytest.fixture(scope="module")
def initial():
    """Parameters and state on a mesh, by optimizer."""

    def make(name):
        config, tx = model(), optimizer(name)
        mesh = sharding.make_mesh(sizes(2, 2, 2))
        layout = layout_of(mesh, config, tx)
        functions = make_functions(config, tx, SEED, layout)
        with jax.set_mesh(mesh):
            params, opt_state = functions[0]()
            batch = sharding.place(batches(1)[0], layout, 1)
            donated = (params, opt_state)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # JAX warns of donated buffers without a use
                params, opt_state, _ = functions[1](params, opt_state, batch)
        return params, opt_state, donated

    return {name: make(name) for name in ("adam", "rmsprop")}


def batches(count):
    """Rows with gaps, so that micro-batches have different numbers of tokens."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        rows = rng.integers(32, size=(ROWS, LENGTH + 1)).astype(np.int32)
        counted = rng.random((ROWS, LENGTH)) < np.linspace(0.2, 1, ROWS)[:, None]
        targets = np.where(counted, rows[:, 1:], -1)
        made.append({"inputs": rows[:, :-1], "targets": targets.astype(np.int32)})
    return made


@pytest.mark.parametrize(("name", "moments"), [("adam", ["mu", "nu"]), ("rmsprop", ["nu"])])
def test_moments_lie_like_their_parameters(initial, name, moments):
    params, opt_state, _ = initial[name]
    expected = {path: leaf.sharding for path, leaf in by_path(params).items()}
    shards = {path: leaf.addressable_shards[0].data.shape for path, leaf in by_path(params).items()}
    assert shards["layers/0/mlp/up_proj/kernel"] == (16 // 2, 24 // 2)
    assert shards["embed_tokens/embedding"] == (32 // 2, 16 // 2)
    trees = [by_path(optax.tree.get(opt_state, moment)) for moment in moments]
    if name == "rmsprop":  # it has no first moment, so Magma keeps its own where it masks
        momentum = by_path(magma_state(opt_state).momentum)
        assert len(momentum) == 14
        trees.append(momentum)
    else:
        assert magma_state(opt_state).momentum is None
    for path, leaf in itertools.chain.from_iterable(tree.items() for tree in trees):
        assert leaf.sharding.is_equivalent_to(expected[path], leaf.ndim), path
        assert leaf.addressable_shards[0].data.shape == shards[path], path


def magma_state(opt_state):
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, MagmaState))
    [state] = [node for node in nodes if isinstance(node, MagmaState)]
    return state


def test_scores_step_and_key_are_replicated(initial):
    state = magma_state(initial["rmsprop"][1])
    leaves = [*jax.tree.leaves(state.alignment), state.step, state.key]
    assert len(leaves) == 16
    assert all(leaf.sharding.is_fully_replicated for leaf in leaves)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in leaves)


def test_a_step_takes_over_all_buffers(initial):
    for _, _, donated in initial.values():
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))


@pytest.mark.parametrize("explicit", [False, True])
def test_tensor_splits_the_matrix_products_and_gathers_nothing(explicit):
    config = model(num_layers=1, num_heads=4)
    mesh = sharding.make_mesh(sizes(data=2, tensor=4), explicit)
    graphdef, shapes = abstract_model(config, SEED)
    layout = layout_of(mesh, config, optimizer())
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        layout.params,
    )
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=layout.rows)
    with jax.set_mesh(mesh):
        forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
        text = forward.lower(params, tokens).compile().as_text()
    products = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", text)
    widths = sorted(int(columns) for _, columns in products)
    # q, k, v: a head; gate, up: a quarter of 24; head: a quarter of 32; o, down: whole sums
    assert widths == [4, 4, 4, 6, 6, 8, 16, 16]
    assert len(re.findall(r" all-reduce\(", text)) == 3  # embedding, o, down
    assert "all-gather" not in text


# ---------------------------------------------------------------------------------------------
# The same run on every mesh


STEPS = 3


def run(mesh_sizes, explicit=False, accumulate=1, scan_layers=False, remat=False):
    """Returns the losses of a few steps and of a validation, and the state after them."""
    config = model(scan_layers=scan_layers, remat=remat, num_layers=1 + scan_layers)
    tx = optimizer(scan_layers=scan_layers)
    mesh = sharding.make_mesh(mesh_sizes, explicit)
    layout = layout_of(mesh, config, tx)
    init, train_step, valid_step = make_functions(config, tx, SEED, layout)
    losses = []
    with jax.set_mesh(mesh):
        params, opt_state = init()
        for batch in batches(STEPS):
            placed = sharding.place(batch, layout, accumulate)
            params, opt_state, now = train_step(params, opt_state, placed)
            losses.append(float(now["loss"]))
        nll, count = valid_step(params, placed)
    for leaf, place in zip(
        jax.tree.leaves((params, opt_state)),
        jax.tree.leaves((layout.params, layout.opt_state)),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    return [*losses, float(nll / count)], jax.device_get((params, opt_state))


@pytest.fixture(scope="module")
def reference():
    """Everything replicated but the rows, for separate and for scanned layers."""
    return {scan: run(sizes(data=8), scan_layers=scan) for scan in (False, True)}


@pytest.mark.parametrize(
    ("mesh", "explicit", "accumulate", "scan_layers", "remat"),
    [
        (sizes(2, 2, 2), False, 1, False, False),
        (sizes(fsdp=4, tensor=2), False, 2, True, True),
        (sizes(fsdp=8), True, 1, False, True),
        (sizes(2, 2, 2), True, 2, True, True),
    ],
)
def test_meshes_agree(reference, mesh, explicit, accumulate, scan_layers, remat):
    losses, state = run(mesh, explicit, accumulate, scan_layers, remat)
    expected_losses, expected = reference[scan_layers]
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    actual, wanted = by_path(state), by_path(expected)
    assert actual.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_allclose(actual[path], leaf, rtol=1e-4, atol=2e-5, err_msg=path)


# ---------------------------------------------------------------------------------------------
# Options and the data's place


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--mesh data=3", "--mesh data=3,fsdp=1,tensor=1 is not made of all 8 devices"),
        ("--mesh fsdp=16", "is not made of all 8 devices"),
        ("--mesh rows=8", "'rows=8': give each of data, fsdp, tensor once"),
        ("--mesh fsdp=2,fsdp=4", "'fsdp=4': give each of data, fsdp, tensor once"),
        ("--mesh fsdp=0", "--mesh"),
        ("--mesh fsdp", "'' is not a whole number"),
        ("--batch-size 12", "multiple of the 8 devices"),
        ("--batch-size 8 --accumulate 2", "--accumulate 2 does not cut --batch-size 8"),
        ("--distributed host,2,0", "'host,2,0' is not ADDRESS:PORT,COUNT,NUMBER"),
    ],
)
def test_wrong_options_are_one_line(capsys, tmp_path, monkeypatch, wrong, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, train.main, wrong.split())


def test_data_takes_the_devices_that_are_left():
    assert whole_mesh({}, 8) == sizes(data=8)
    assert whole_mesh({"tensor": 2}, 8) == sizes(data=4, tensor=2)
    assert whole_mesh({"data": 1, "fsdp": 8}, 8) == sizes(fsdp=8)


@pytest.mark.parametrize("memory", [True, False])
def test_another_number_of_hosts_goes_on_in_memory_and_not_in_a_stream(tmp_path, memory):
    tree = {"w": jnp.arange(4.0)}
    with checkpoint.open_manager(tmp_path / "checkpoints") as manager:
        checkpoint.save(manager, 5, tree, tree, Place(next_index=5), 4, {})
        manager.wait_until_finished()
        here = Place(next_index=0) if memory else Place(line=0)
        if memory:
            step, params, _ = checkpoint.restore(manager, tree, tree, here, 1, {})
            assert (step, here.state) == (5, {"next_index": 5})
            np.testing.assert_array_equal(params["w"], tree["w"])
        else:
            with pytest.raises(checkpoint.ConfigurationError, match="for 4 hosts, not for 1; go"):
                checkpoint.restore(manager, tree, tree, here, 1, {})
