"""The benchmark runs every part, at sizes that take seconds, and counts what it says it counts."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from examples.benchmark import forms, optimizer, trees
from examples.benchmark.timing import Arm, in_turns
from examples.kit.branched_adam import BranchedAdam
from examples.kit.paths import by_path
from magma_optax import attention_and_mlp, skip_update, stacked


@pytest.fixture
def one_layer(monkeypatch):
    """To compile sooner."""
    small = dataclasses.replace(optimizer.PRESETS["tiny"], num_layers=1)
    monkeypatch.setitem(optimizer.PRESETS, "tiny", small)


@pytest.fixture(autouse=True)
def _keep_the_compilation_cache():
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def run(tmp_path, *argv):
    out = tmp_path / "results.jsonl"
    small = ["--rounds", "1", "--steps", "1", "--trees", "tiny", "--train-trees", "tiny"]
    optimizer.main([*small, "--batch", "2", "8", "--leaves", "3", "--out", str(out), *argv])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_arms_take_turns_on_fresh_states():
    log = []

    def arm(name):
        def init():
            log.append(name)
            return jnp.zeros(())

        def step(state):
            log.append(float(state))
            return state + 1

        return Arm(init, step)

    times = in_turns({"a": arm("a"), "b": arm("b")}, rounds=2, steps=1)
    turn = [0.0, 1.0, 2.0]  # two to warm up, one to time
    assert log == ["a", *turn, "b", *turn, "a", *turn, "b", *turn]
    assert times.keys() == {"a", "b"} and min(times.values()) > 0


def test_step_times_every_form_of_both_layouts(one_layer, tmp_path, capsys):
    layouts = ["--layouts", "separate", "stacked", "--where", "all"]
    records = run(tmp_path, "--parts", "step", "--bases", "adam", *layouts)
    settings = [record["settings"] for record in records]
    assert len({tuple(row.items()) for row in settings}) == 2 * 4 + 2
    for record in records:
        assert record["results"]["ms"] > 0 and record["results"]["compile_s"] > 0
        if record["settings"]["form"] == "bare":
            assert record["results"]["ratio"] == 1
        assert 0 <= record["results"]["survived"] <= 1
    assert f"| tiny | {1 * 9 + 3} separate | adam | all | 0.5 |" in capsys.readouterr().out


@pytest.mark.parametrize("moments", [False, True])
def test_branches_make_the_step_of_the_chain(moments):
    shapes = trees.tree("tiny")
    options = {"where": attention_and_mlp, "key": 1}
    branched = BranchedAdam(1e-3, moments=moments, survival_prob=0.25, **options)
    chain = optax.chain(optax.adam(1e-3), skip_update(0.25, **options))
    runs = {}
    for tx in (branched, chain):
        params = trees.filled(shapes, 0.1)
        step, state = jax.jit(forms.update_and_apply(tx)), tx.init(params)
        for n in range(3):
            params, state = step(params, state, trees.filled(shapes, n - 1.0))
        runs[tx is branched] = params
    chex.assert_trees_all_close(runs[True], runs[False], rtol=1e-6, atol=1e-7)
    text = str(jax.make_jaxpr(branched.update_and_apply)(params, branched.init(params), params))
    assert text.count("cond[") == len(jax.tree.leaves(shapes))


def test_branches_are_for_adam_and_whole_leaves():
    assert forms.branched_forms("adam", blocks="leaf").keys() <= set(forms.FORMS)
    assert forms.branched_forms("adam").keys() <= set(forms.FORMS)
    assert forms.branched_forms("adam", blocks=stacked(0)) == {}
    assert forms.branched_forms("muon") == {}


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_what_survived_is_counted_over_the_timed_steps(layout):
    shapes = trees.tree("tiny", layout == "stacked")
    options = trees.masking(layout, "attention+mlp")
    tx = skip_update(0.25, **options)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    state, kept, total = tx.init(ones), 0, 0
    for step in range(2 + 3):
        updates, state = jax.jit(tx.update)(ones, state, ones)
        if step >= 2:
            masked = [x for path, x in by_path(updates).items() if attention_and_mlp(path, x)]
            kept += sum(int((x != 0).sum()) for x in masked)
            total += sum(x.size for x in masked)
    share = trees.survived(shapes, 0.25, options, 3)
    assert share == pytest.approx(kept / total) and 0 < share < 0.5


def test_train_times_the_whole_step_and_the_optimizer(one_layer, tmp_path, monkeypatch):
    def run_and_pretend(arms, rounds, steps):
        assert in_turns(arms, rounds, steps).keys() == arms.keys()  # they run
        return {name: 2.0 if name.endswith("optimizer alone") else 8.0 for name in arms}

    monkeypatch.setattr(optimizer, "in_turns", run_and_pretend)
    records = run(tmp_path, "--parts", "train")
    assert [r["settings"]["form"] for r in records] == ["bare", "skip_update", "with_magma"]
    for record in records:
        assert record["results"]["ms"] > record["results"]["optimizer_ms"] > 0
        times = {"ms": 8.0, "ratio": 1.0, "optimizer_ms": 2.0, "optimizer_share": 0.25}
        assert record["results"] == times


def test_compile_times_are_of_the_asked_number_of_leaves(tmp_path):
    records = run(tmp_path, "--parts", "compile")
    assert {r["settings"]["leaves"] for r in records} == {3}
    assert min(r["results"]["compile_s"] for r in records) > 0
    assert len(trees.narrow_llama(2000)) == 2000


def test_forms_are_compiled_alone(tmp_path):
    arguments = ["--bases", "adam", "--layouts", "stacked", "--forms", "with_magma"]
    records = run(tmp_path, "--parts", "alone", *arguments)
    assert [r["settings"]["form"] for r in records] == ["bare", "with_magma"]
    assert {r["settings"]["layout"] for r in records} == {"stacked"}
    for record in records:
        assert record["results"]["trace_s"] > 0 and record["results"]["compile_s"] > 0


def test_state_is_what_the_contract_says(tmp_path):
    records = run(tmp_path, "--parts", "state", "--bases", "adam", "muon", "rmsprop")
    added = {(r["settings"]["base"], r["settings"]["form"]): r["results"] for r in records}
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 88) * 4  # bytes of attention and MLP
    for base in ("adam", "muon"):
        assert added[base, "skip_update"]["added_bytes"] == 12
        assert added[base, "with_magma"]["added_bytes"] == 12 + 14 * 4
        assert added[base, "magma(grad=)"]["added_bytes"] == 12 + 14 * 4 + matrices
    assert added["rmsprop", "with_magma"]["added_bytes"] == 12 + 14 * 4 + matrices


def test_absent_peers_are_named_and_left_out(tmp_path, capsys, monkeypatch):
    def absent(*_):
        raise ImportError("no such package")

    monkeypatch.setattr(optimizer, "rollfast_arms", absent)
    monkeypatch.setattr(optimizer, "torch_times", absent)
    records = run(tmp_path, "--parts", "peers")
    forms = [record["settings"]["form"] for record in records]
    assert forms == ["magma_optax, bare", "magma_optax, with_magma"]
    error = capsys.readouterr().err
    assert "rollfast is left out" in error and "pytorch_optimizer is left out" in error


def test_it_needs_jax_optax_and_flax_alone(tmp_path):
    """Nor does it need the laboratory, whose programs may import what they like."""
    out = tmp_path / "results.jsonl"
    absent = "grain tensorboardX orbax matplotlib tqdm tokenizers sklearn datasets examples.paper"
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent.split()}))  # importing one of them fails
from examples.benchmark.optimizer import main
main("--parts state --trees tiny --bases adam --out {out}".split())
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=3600)
    assert len(out.read_text().splitlines()) == 4
