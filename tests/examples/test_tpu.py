"""Programs compiled for TPU slices by TPU's own compiler: traffic, collectives, buffers."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from trainers import refusal

from examples import pmap_linen
from examples.kit.aot import topology
from examples.kit.aot.hlo import computations, counts
from examples.kit.aot.program import compiled
from examples.kit.aot.traffic import hbm_bytes
from examples.kit.mesh import device_mesh
from examples.kit.optimizers import direction
from examples.llama import sharding, train
from examples.llama.aot import with_vocabulary
from examples.llama.options import CommandLine
from examples.scaling import tpu_branches, tpu_step, tpu_update
from examples.scaling.step import lower_update
from magma_optax import magma, skip_update, with_magma

pytest.importorskip("libtpu", reason="TPU's compiler is not installed: the extra tpu has it")

SLICE = "v5e:2x4"
LAYERS = 4


def model(separate=False, expert=False):
    """Shapes and specs of a model with 1.4 GB of float32, far more than fast memory holds."""
    wide = {"q": ((4096, 4096), P("fsdp", "other")), "up": ((4096, 8192), P("fsdp", "other"))}
    down = {"down": ((8192, 4096), P("other", "fsdp"))}
    layer = {"attn": {"q": wide["q"]}, "mlp": {"up": wide["up"], **down}}
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    stack = lambda leaf: ((LAYERS, *leaf[0]), P(None, *leaf[1]))  # noqa: E731
    if separate:
        layers = {str(n): layer for n in range(LAYERS)}
    elif expert:
        layers = {"experts": {"up": ((LAYERS, 8, 1024, 4096), P(None, "other", "fsdp"))}}
    else:
        layers = jax.tree.map(stack, layer, is_leaf=is_leaf)
    both = {"layers": layers, "embed": ((32_768, 4096), P("fsdp", "other"))}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x[0], jnp.float32), both, is_leaf=is_leaf)
    return shapes, jax.tree.map(lambda x: x[1], both, is_leaf=is_leaf)


def where(path, leaf):
    return "layers" in path


def blocks(path, leaf):
    if "layers" not in path:
        return ()
    return (0, 1) if "experts" in path else (0,)


BASE = {"adam": lambda: optax.adam(1e-3), "mu": lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16)}
FORMS = {
    "base": lambda base, **options: base,
    "skip_update": lambda base, **options: optax.chain(base, skip_update(**options)),
    "with_magma": with_magma,
    "magma(grad=)": lambda base, **options: optax.chain(base, magma(**options)),
}


@functools.cache
def update(form, base="adam", sizes=(8, 1), kind="Auto", separate=False, **more):
    """One update for 8 devices in a mesh of these sizes, compiled."""
    shapes, specs = model(separate, **more)
    tx = FORMS[form](BASE[base](), where=where, blocks="leaf" if separate else blocks)
    mesh = jax.make_mesh(
        sizes, ("fsdp", "other"), (AxisType[kind],) * 2, devices=topology.devices(SLICE)
    )
    return compiled(lambda: lower_update(tx, shapes, specs, mesh)), tx, shapes


def traffic(form, **options):
    return hbm_bytes(update(form, **options)[0].text)


# ---------------------------------------------------------------------------------------------
# One update


def test_the_bare_update_moves_seven_arrays():
    bytes_a_device = sum(x.size * 4 for x in jax.tree.leaves(model()[0])) / 8
    # Reads parameters, gradients and two moments, writes all but gradients.
    assert 7 * bytes_a_device <= traffic("base") <= 7.02 * bytes_a_device


@pytest.mark.parametrize(
    ("form", "bound"), [("skip_update", 1.005), ("with_magma", 1.26), ("magma(grad=)", 1.52)]
)
def test_traffic_stays_at_what_the_arithmetic_says(form, bound):
    assert traffic(form) <= bound * traffic("base")


def test_traffic_with_a_bfloat16_moment():
    # The base reads and writes 24 bytes per parameter then, where it was 28.
    assert traffic("with_magma", base="mu") <= 1.30 * traffic("base") * 24 / 28


def test_traffic_of_separate_leaves():
    assert traffic("with_magma", separate=True) <= 1.26 * traffic("base")


@pytest.mark.parametrize("form", FORMS)
def test_every_buffer_of_parameters_and_state_is_reused(form):
    program, tx, shapes = update(form)
    state = jax.tree.leaves(jax.eval_shape(tx.init, shapes))
    assert program.reused == len(state) + len(jax.tree.leaves(shapes))


@pytest.mark.parametrize("form", ["skip_update", "with_magma"])
def test_no_memory_like_a_parameter_is_added(form):
    smallest = min(x.size * 4 // 8 for x in jax.tree.leaves(model()[0]))
    assert update(form)[0].memory - update("base")[0].memory < smallest / 8


@pytest.mark.parametrize(
    ("options", "reduces"),
    [
        ({}, 1),
        ({"kind": "Explicit"}, 1),
        ({"separate": True}, 1),
        ({"sizes": (4, 2)}, 3),
        ({"sizes": (4, 2), "kind": "Explicit"}, 3),
    ],
)
def test_the_sums_of_all_blocks_travel_together(options, reduces):
    """Along one axis as one all-reduce; along two, as at most one per axis and order of axes."""
    ops = update("with_magma", **options)[0].collectives
    assert counts(ops).keys() == {"all-reduce"}
    assert len(ops) <= reduces
    count = 3 * LAYERS  # blocks
    assert sum(op.bytes for op in ops) <= 2 * 3 * 4 * count  # three sums each, over two axes


@pytest.mark.parametrize("form", ["base", "skip_update"])
def test_without_scores_nothing_travels(form):
    assert update(form, sizes=(4, 2))[0].collectives == ()


def test_of_experts_only_scores_are_gathered():
    ops = update("with_magma", sizes=(2, 4), expert=True)[0].collectives
    assert update("base", sizes=(2, 4), expert=True)[0].collectives == ()
    assert counts(ops).keys() <= {"all-reduce", "all-gather"}
    assert max(op.bytes for op in ops) <= 3 * 4 * LAYERS * 8  # a number or three a block


def test_pmap_of_the_linen_example_sends_one_sum():
    """The mean of gradients and loss; Magma adds nothing, as every device has all of them."""
    model = pmap_linen.MLP()

    def start(tx):
        params = model.init(jax.random.key(1), jnp.zeros((16, 8)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def program(tx):
        step = jax.pmap(
            pmap_linen.train_step.__wrapped__,
            axis_name="batch",
            donate_argnums=0,
            devices=topology.devices(SLICE),
        )
        state = jax.eval_shape(lambda: start(tx))
        batch = jnp.zeros((16, 8)), jnp.zeros((16, 1))
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), (state, *batch)
        )
        return compiled(lambda: step.lower(*shapes)), len(jax.tree.leaves(state))

    bare, _ = program(optax.adam(1e-2))
    masked, leaves = program(with_magma(optax.adam(1e-2)))
    assert masked.collectives == bare.collectives
    assert counts(masked.collectives) == {"all-reduce": 1}
    assert masked.reused == leaves


# ---------------------------------------------------------------------------------------------
# Meshes of TPUs


def test_only_data_runs_between_slices():
    devices = topology.devices("v5e:2x2,slices=2")
    mesh = sharding.make_mesh({"data": 4, "fsdp": 2, "tensor": 1}, devices=devices)
    rows = [{d.slice_index for d in row.flat} for row in mesh.devices]
    assert rows == [{0}, {0}, {1}, {1}]
    with pytest.raises(ValueError, match="data=1 is not a multiple of the 2 slices"):
        sharding.make_mesh({"data": 1, "fsdp": 8, "tensor": 1}, devices=devices)


@pytest.mark.parametrize(
    ("name", "count", "hosts"),
    [("v4:2x2x2", 8, 2), ("v5e:4x4", 16, 4), ("v5p:2x2x2", 8, 2), ("v6e:2x2,slices=2", 8, 2)],
)
def test_slices_have_a_device_a_chip(name, count, hosts):
    assert len(topology.devices(name)) == count
    assert topology.describe(name).endswith(f"on {hosts} host(s)")


# ---------------------------------------------------------------------------------------------
# The commands

TINY = ["--preset", "tiny", "--seq-len", "128", "--scan-layers", "--mesh", "fsdp=8"]


def table(text):
    """The rows of the table in a command's output, cell by cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_trainer_says_what_its_run_would_need(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # What a pod would be given: with the other hosts and a folder that isn't there.
    pod = ["--distributed", "--out", "/nowhere/run"]
    assert train.main([*TINY, *pod, "--magma", "--batch-size", "16", "--aot", SLICE]) == 0
    out = capsys.readouterr().out
    assert "v5e:2x4: 8 TPU v5 lite devices on 2 host(s)" in out
    assert "257 token ids (the preset's" in out
    assert "16 x 128 tokens per step, bfloat16, splash" in out
    rows = {name: cells for name, *cells in table(out)}
    assert list(rows) == ["train step", "start", "validation", "samples"]
    assert "all-reduce" in rows["train step"][2]
    assert all(cells[0].endswith(" GiB") for cells in rows.values())
    assert not list(tmp_path.iterdir())


def test_magma_adds_at_most_one_all_reduce_to_the_trainers_step(capsys):
    assert tpu_step.main([*TINY, "--mesh-axes", "explicit", "--aot", SLICE]) == 0
    rows = {name: cells for name, *cells in table(capsys.readouterr().out)}
    added = {name: cells[3] for name, cells in rows.items()}
    assert added["base"] == added["SkipUpdate"] == "none"
    assert added["Magma"] in ("1 all-reduce", "none")  # none where merged with the gradients'


def test_directions_are_computed_as_the_coins_say():
    shapes = {"layers": {"mlp": {"up": jax.ShapeDtypeStruct((3, 256, 512), jnp.float32)}}}
    specs = {"layers": {"mlp": {"up": P(None, "fsdp", None)}}}
    mesh = device_mesh((8,), ("fsdp",), (AxisType.Auto,), topology.devices(SLICE))
    base = optax.chain(direction("muon"), optax.scale(-1e-3))
    tx = with_magma(base, where=where, blocks=blocks, lazy=True)
    parts = computations(compiled(lambda: lower_update(tx, shapes, specs, mesh)).text)
    entry = "\n".join(list(parts.values())[-1])
    loops = re.findall(r" while\(.*", "\n".join(map("\n".join, parts.values())))
    assert any("known_trip_count" not in loop for loop in loops)
    assert "all-gather" not in entry  # A product needs one: the axis is sharded.
    assert "all-gather" in "\n".join(map("\n".join, parts.values()))


def test_what_a_branch_around_adams_parameters_moves(capsys):
    """Moments outside are read twice by survivors, so nothing is gained at p = 0.5."""
    assert tpu_branches.main([]) == 0
    rows = {name: list(map(float, cells)) for name, *cells in table(capsys.readouterr().out)}
    assert rows["adam"] == [7, 7, 7]
    assert rows["branched with moments"] == [5, 7, 6]
    dropped, survives, mean = rows["branched"]
    assert dropped in (5, 7) and survives == 9 and mean == (dropped + survives) / 2
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    [shown] = re.findall(r"\| `python -m examples\.scaling\.tpu_branches`.*?\n[-\n]", page, re.S)
    shown = table("\n".join(line.strip() for line in shown.splitlines()))
    told = dict(zip(rows, (list(map(float, row[1:])) for row in shown), strict=True))
    assert told | {"branched": None} == rows | {"branched": None}
    assert told["branched"] == [5, 9, 7]  # as libtpu 0.0.42.1 has it


def test_the_table_of_updates(capsys):
    assert tpu_update.main([SLICE, "--model", "tiny", "--mesh", "fsdp=8"]) == 0
    rows = {name: cells for name, *cells in table(capsys.readouterr().out)}
    assert list(rows) == ["adam", "skip_update", "with_magma", "magma(grad=)"]
    assert rows["adam"][1] == "1.000"
    assert rows["skip_update"][4] == "none"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--aot v5e", "topology 'v5e': write GENERATION:SHAPE, such as v5p:4x4x4"),
        ("--aot v9:2x2", "topology 'v9:2x2': TPU's compiler refuses it"),
        ("--aot v5e:3x3", "topology 'v5e:3x3': TPU's compiler refuses it"),
        ("--aot v5e:2x4 --mesh fsdp=4,data=1", "is not made of all 8 devices"),
        ("--aot v5e:2x2,slices=2 --mesh fsdp=8", "data=1 is not a multiple of the 2 slices"),
        ("--aot v5e:2x4 --attention cudnn", "--attention cudnn needs a GPU"),
        ("--aot v5e:2x4 --seq-len 100 --attention splash", "a multiple of 128"),
        ("--attention splash", "--attention splash needs a TPU"),
        ("--aot v5e:2x4 --data /nowhere", "/nowhere"),
        (
            "--aot v5e:2x4 --preset 1b --scan-layers --batch-size 512 --seq-len 2048 --mesh data=8",
            "does not fit into a device's memory: it needs",
        ),
    ],
)
def test_what_cannot_be_compiled_is_one_line(capsys, wrong, message):
    assert message in refusal(capsys, train.main, wrong.split())


def test_without_the_compiler_the_trainer_says_what_to_install(capsys, monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", missing)
    message = refusal(capsys, train.main, ["--aot", "v5e:4x8"])
    assert "libtpu is not installed here" in message and ".[examples,tpu]" in message


def test_the_vocabulary_is_the_datas_or_else_the_presets(tmp_path):
    def size(*argv):
        line = CommandLine(["--preset", "60m", "--aot", SLICE, *argv])
        return with_vocabulary(line.resolve({})).vocab_size

    (tmp_path / "text.txt").write_text("some text\n")
    assert size() == 32_000
    assert size("--data", str(tmp_path)) == 257


def test_what_the_tables_cannot_compile_is_one_line(capsys):
    step = refusal(capsys, tpu_step.main, ["--aot", SLICE, "--data", "/nowhere"])
    assert "/nowhere" in step
    assert "name the slice with --aot" in refusal(capsys, tpu_step.main, [])
    update = refusal(capsys, tpu_update.main, [SLICE, "--mesh", "expert=8"])
    assert "--mesh expert: 1b has the axes data, fsdp, tensor" in update
