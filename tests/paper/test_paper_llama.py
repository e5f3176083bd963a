"""The sweep of the paper's Table 1: its plan, its arms, its runs, and its interruptions."""

import dataclasses
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from matplotlib.figure import Figure

from examples.kit import records
from examples.kit.loss import cross_entropy
from examples.llama.config import LlamaConfig
from examples.llama.model import Llama
from examples.paper import llama_c4, llama_report, llama_run, runner
from examples.paper.ablations import ABLATIONS, SETS
from examples.paper.arms import ARMS
from examples.paper.baselines.matrices import select as matrices
from examples.paper.llama_run import Task, Trainer, curve
from examples.paper.sweep import (
    EdgeError,
    Run,
    Search,
    best,
    missing,
    missing_of_all,
    select,
    summarise,
)
from magma_optax import attention_and_mlp

ROOT = Path(__file__).parents[2]
WORDS = "the a mask of update moment gradient block keeps drops moves layer each every some".split()
TASK = Task("nano", steps=20, batch_size=4, seq_len=16, dtype="float32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = random.Random(0).choices(WORDS, k=20_000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(" ".join(words[i : i + 50]) for i in range(0, len(words), 50)))
    return str(path)


# ---------------------------------------------------------------------------------------------
# The plan


def record(arm, rate, loss, seed=0, **results):
    return {
        "settings": {"arm": arm, "learning_rate": rate, "seed": seed},
        "results": {"valid_loss": loss} | results,
    }


def play(search, loss, limit=50):
    """Runs a search against a function (rate, seed) -> loss; returns its runs and records."""
    found, runs = [], []
    while todo := missing(search, found):
        assert len(runs) < limit
        runs.append(todo[0])
        found.append(record(*dataclasses.astuple(todo[0])[:2], loss(todo[0]), todo[0].seed))
    return runs, found


def valley(rate):
    return lambda run: abs(math.log2(run.learning_rate / rate))


def test_the_search_begins_with_three_rates_in_steps_of_two():
    runs = missing(Search("a", 0.004), [])
    assert runs == [Run("a", 0.004, 0), Run("a", 0.008, 0), Run("a", 0.002, 0)]


def test_an_interior_best_rate_gets_the_other_seeds():
    runs, found = play(Search("a", 0.004), valley(0.004))
    assert runs[3:] == [Run("a", 0.004, 1), Run("a", 0.004, 2)]
    assert best(found, "a").interior


@pytest.mark.parametrize("optimum", [0.00025, 0.001, 0.002, 0.008, 0.064])
def test_the_search_follows_the_edge_until_the_best_rate_is_inside(optimum):
    runs, found = play(Search("a", 0.004), valley(optimum))
    rates = [run.learning_rate for run in runs if run.seed == 0]
    assert best(found, "a").learning_rate == optimum
    assert {optimum / 2, optimum, optimum * 2} <= set(rates)
    steps = abs(round(math.log2(optimum / 0.004)))
    assert len(rates) == 3 + steps  # none too many
    assert [run.seed for run in runs[-2:]] == [1, 2]


def test_the_search_ends_at_its_reach_without_seeds_or_a_best_rate():
    runs, found = play(Search("a", 0.004, reach=8), lambda run: -run.learning_rate)
    assert max(run.learning_rate for run in runs) == 0.032
    assert {run.seed for run in runs} == {0}
    with pytest.raises(EdgeError, match=r"a: the best learning rate, 0\.032, lies on the edge"):
        best(found, "a")
    assert not best(found, "a", allow_edge=True).interior


def test_a_diverged_rate_is_a_bad_rate():
    def loss(run):
        return math.inf if run.learning_rate > 0.003 else valley(0.001)(run)

    _, found = play(Search("a", 0.004), loss)
    assert best(found, "a").learning_rate == 0.001
    # As read from a file, where infinity is a string.
    text = [record("a", rate, "inf") for rate in (0.002, 0.004, 0.008)]
    assert missing(Search("a", 0.004), text) == [Run("a", 0.001, 0)]
    with pytest.raises(EdgeError):
        best(text, "a")


def test_where_all_rates_diverge_the_search_goes_down_and_ends():
    runs, found = play(Search("a", 0.004, reach=8), lambda run: math.inf)
    assert min(run.learning_rate for run in runs) == 0.0005
    with pytest.raises(EdgeError):
        best(found, "a")


def test_what_is_recorded_is_not_run_again():
    search = Search("a", 0.004)
    runs, found = play(search, valley(0.008))
    for done in range(len(found) + 1):
        todo = missing(search, found[:done])
        assert not set(todo) & set(runs[:done])
        assert todo if done < len(found) else not todo
    for hole in range(3, len(found)):
        assert runs[hole] in missing(search, found[:hole] + found[hole + 1 :])


def test_more_seeds_later_add_only_those():
    _, found = play(Search("a", 0.004, seeds=2), valley(0.004))
    assert missing(Search("a", 0.004, seeds=4), found) == [Run("a", 0.004, 2), Run("a", 0.004, 3)]


def test_other_arms_and_seeds_dont_decide_a_rate():
    found = [record("a", rate, 1.0 + abs(rate - 0.004)) for rate in (0.002, 0.004, 0.008)]
    noise = [record("b", 0.002, 0.0), record("a", 0.002, 0.0, seed=1)]
    assert best(found + noise, "a") == best(found, "a")


def test_a_best_rate_needs_both_neighbours():
    found = [record("a", rate, abs(rate - 0.004)) for rate in (0.001, 0.004, 0.008)]
    with pytest.raises(EdgeError):
        best(found, "a")
    assert missing(Search("a", 0.004), found) == [Run("a", 0.002, 0)]
    with pytest.raises(ValueError, match="b: no run"):
        best(found, "b")


def test_a_fixed_rate_is_not_searched():
    runs, _ = play(Search("a", 1e-3, fixed=True), valley(0.1))
    assert runs == [Run("a", 1e-3, seed) for seed in range(3)]


def test_the_command_line_says_where_searches_begin_or_which_rates_are_run():
    def searches(*options):
        args = llama_c4.parser().parse_args(["--seeds", "2", *options])
        return llama_c4.searches_of(args, ARMS, ["adam", "muon"])

    ours = ARMS["muon"].centre
    assert searches("--centre", "adam=0.03") == [Search("adam", 0.03, 2), Search("muon", ours, 2)]
    fixed = searches("--fixed-rate", "1e-3", "0.064")
    assert [(s.arm, s.centre) for s in fixed] == [
        (arm, rate) for rate in (1e-3, 0.064) for arm in ("adam", "muon")
    ]
    assert all(search.fixed and search.seeds == 2 for search in fixed)


def test_arms_come_in_the_order_given():
    searches = [Search("b", 0.004), Search("a", 0.004)]
    assert [run.arm for run in missing_of_all(searches, [])] == ["b"] * 3 + ["a"] * 3


def test_records_of_other_tasks_dont_count():
    ours, theirs = record("a", 0.1, 1.0), record("a", 0.1, 1.0)
    ours["settings"] |= TASK.settings()
    theirs["settings"] |= dataclasses.replace(TASK, steps=21).settings()
    assert select([ours, theirs, record("a", 0.1, 1.0)], TASK.settings()) == [ours]


def test_a_recorded_run_counts_however_often_it_was_validated():
    often = dataclasses.replace(TASK, validations=9).settings()
    assert often == TASK.settings() and "validations" not in often


def test_the_task_is_recorded_without_the_folders_above_the_data():
    settings = dataclasses.replace(TASK, data="/some/where/corpus").settings()
    assert settings["data"] == "corpus"
    assert json.loads(json.dumps(settings)) == settings


# ---------------------------------------------------------------------------------------------
# The table


def test_the_table_shows_medians_and_marks_edges():
    found = [record("inside", rate, loss) for rate, loss in [(1, 3.0), (2, 2.0), (4, 3.0)]]
    found += [record("inside", 2, 2.5, 1, alignment=0.5), record("inside", 2, 9.0, 2)]
    found += [record("edge", 1, 1.0), record("edge", 2, 2.0), record("nan", 1, "nan")]
    row = summarise(found, "inside")
    assert (row.median, row.losses, row.alignment) == (2.5, [2.0, 2.5, 9.0], 0.5)
    lines = llama_report.table(found).splitlines()
    assert "| edge | 1 | **no, edge** | 1.0000" in lines[2]
    assert "| inside | 2 | yes | 2.5000 | 2.0000 to 9.0000 | 12.18 | 3 | 0.500 |" == lines[3]
    assert "diverged" in lines[4]
    assert summarise(found, "none") is None


def test_the_figure_has_a_panel_for_each_base():
    names = ["soap", "adam", "muon", "adam+magma", "adam/p=0.5/tau=2", "muon+skip"]
    assert llama_report.families(names) == {
        "adam": ["adam", "adam+magma", "adam/p=0.5/tau=2"],
        "muon": ["muon", "muon+skip"],
        "others": ["soap"],
    }


def test_a_diverging_rate_leaves_the_panel_and_hides_no_arm():
    found = [
        record("adam", rate, loss)
        for rate, loss in [(1e-3, 4.0), (2e-3, 4.1), (4e-3, 9.0), (8e-3, math.inf)]
    ]
    found += [record("adam", 1e-3, 4.05, seed=1), record("adam+magma", 2e-3, 5.0)]
    found += [record("adam+skip", 1e-3, math.inf)]
    figure = Figure()
    llama_report.draw(figure, found, "task")
    (axes,) = figure.axes
    assert 5.0 < axes.get_ylim()[1] < 9.0
    lines = [line.get_xydata().tolist() for line in axes.lines]
    assert lines == [
        [[1e-3, 4.0], [2e-3, 4.1], [4e-3, 9.0]],
        [[1e-3, 4.05]],
        [[2e-3, 5.0]],
        [],
    ]


def test_the_loss_curve_is_short_and_loses_nothing():
    losses = np.random.default_rng(0).normal(size=1500).tolist()
    points = curve(losses)
    assert len(points) == 30 and points[-1][0] == 1500
    np.testing.assert_allclose(np.mean([loss for _, loss in points]), np.mean(losses), atol=1e-4)
    assert curve([1.0, 2.0]) == [[1, 1.0], [2, 2.0]]


# ---------------------------------------------------------------------------------------------
# The arms


@pytest.fixture(scope="module")
def tiny():
    """Parameters of a very small Llama and two steps' gradients."""
    config = LlamaConfig(20, 8, 12, 2, 1)
    graphdef, state = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(24).reshape(2, 12) % 20

    @jax.jit
    @jax.grad
    def gradient(params, tokens):
        nll, count = cross_entropy(nnx.merge(graphdef, params)(tokens), tokens)
        return nll / count

    params = nnx.to_pure_dict(state)
    return params, [gradient(params, tokens), gradient(params, 19 - tokens)]


def updates_of(arm, tiny, rate, key):
    """Both steps' updates, stacked, and the last state; rate and key are traced."""
    params, gradients = tiny
    stacked = jax.tree.map(lambda *steps: jnp.stack(steps), *gradients)

    @jax.jit
    def run(rate, key):
        tx = optax.with_extra_args_support(arm.build(lambda step: rate / (step + 1), key))

        def step(state, grads):
            updates, state = tx.update(grads, state, params)
            return state, updates

        state, updates = jax.lax.scan(step, tx.init(params), stacked)
        return updates, state

    return run(rate, key)


@pytest.mark.parametrize("name", ARMS)
def test_two_steps_of_every_arm(tiny, name):
    updates, _ = updates_of(ARMS[name], tiny, jnp.float32(0.01), jnp.uint32(3))
    for update, masked in zip(jax.tree.leaves(updates), inside(tiny), strict=True):
        assert jnp.all(jnp.isfinite(update))
        # Embeddings, head and norms move whatever the coins (SOAP skips its first step).
        assert masked or jnp.any(update[1] != 0)


def inside(tiny):
    """Which leaves are attention and MLP matrices."""
    return jax.tree.leaves(matrices(tiny[0], attention_and_mlp))


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_builds(tiny, name):
    updates, _ = jax.eval_shape(lambda: updates_of(ABLATIONS[name], tiny, 0.01, 0))
    assert jax.tree.all(jax.tree.map(lambda u, p: u.shape == (2, *p.shape), updates, tiny[0]))


def test_ablations_cover_the_papers_tables():
    sizes = {"components": 3, "granularity": 20, "sampling": 12, "momentum": 4, "decay": 6}
    for sets in SETS.values():
        assert {name: len(arms) for name, arms in sets.items()} == sizes
    assert len(ABLATIONS) == 2 * sum(sizes.values())
    assert not ABLATIONS.keys() & ARMS.keys()


@pytest.mark.parametrize(("base", "usual"), [("rmsprop", "0.99"), ("adam", "0.999")])
def test_decays_of_the_second_moment(tiny, base, usual):
    def updates(arm):
        return jax.tree.leaves(updates_of(arm, tiny, jnp.float32(0.01), jnp.uint32(0))[0])

    own = updates(ARMS[base])
    for b2 in ("0.95", "0.99", "0.999"):
        other = updates(ABLATIONS[f"{base}/b2={b2}"])
        same = all(map(np.array_equal, own, other))
        assert same == (b2 == usual)


@pytest.mark.parametrize("name", ["adam", "adam+magma", "adam+skip", "muon+constant"])
def test_a_traced_rate_and_seed_are_as_good_as_numbers(tiny, name):
    updates, _ = updates_of(ARMS[name], tiny, jnp.float32(0.01), jnp.uint32(3))
    params, gradients = tiny
    tx = optax.with_extra_args_support(ARMS[name].build(lambda step: 0.01 / (step + 1), 3))
    update = jax.jit(tx.update)
    first, state = update(gradients[0], tx.init(params), params)
    second, _ = update(gradients[1], state, params)
    jax.tree.map(
        lambda ours, *theirs: np.testing.assert_allclose(
            ours, np.stack(theirs), rtol=2e-5, atol=1e-7
        ),
        updates,
        first,
        second,
    )


def test_magma_reuses_adams_moment_under_a_traced_rate(tiny):
    *_, state = updates_of(ARMS["adam+magma"], tiny, jnp.float32(0.01), jnp.uint32(0))
    assert optax.tree.get(state, "momentum") is None


def test_controls_scale_attention_and_mlp_alone(tiny):
    def norms(name, key=0):
        updates, _ = updates_of(ARMS[name], tiny, jnp.float32(0.01), jnp.uint32(key))
        return np.array([jnp.linalg.norm(u[0]) for u in jax.tree.leaves(updates)])

    masked, base = np.array(inside(tiny)), norms("adam")
    names = ["adam+constant", "adam+constant*mask", "adam+damping", "adam+damping/2"]
    constant, coins, damping, half = (norms(name) / base for name in names)
    for ratios in (constant, coins, damping, half):
        np.testing.assert_allclose(ratios[~masked], 1, rtol=1e-5)
    np.testing.assert_allclose(constant[masked], 0.2765, rtol=1e-5)
    np.testing.assert_allclose(coins[masked] * (coins[masked] - 0.553), 0, atol=1e-5)
    assert 0 < np.count_nonzero(coins[masked]) < masked.sum()
    assert ((damping[masked] > 0.4) & (damping[masked] < 0.7)).all()
    np.testing.assert_allclose(half[masked], damping[masked] / 2, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# One run


@pytest.fixture(scope="module")
def trainer(text):
    return Trainer(dataclasses.replace(TASK, data=text))


@pytest.mark.parametrize("name", ["adam", "rmsprop+magma", "muon+constant"])
def test_a_run_learns_and_compiles_once_for_all_rates_and_seeds(trainer, name):
    first = trainer.run(name, ARMS[name], 4e-3, 0)
    compiled = trainer._compiled[name]
    again = trainer.run(name, ARMS[name], 4e-3, 0)
    other = trainer.run(name, ARMS[name], 8e-3, 1)
    assert trainer._compiled[name] is compiled
    assert first["curve"][0][1] - first["train_loss_last"] > 0.3
    assert first["curve"] == again["curve"] != other["curve"]
    assert first["valid_loss"] == again["valid_loss"] < 5.3  # log(257) is 5.5
    assert (first["alignment"] is not None) == ("magma" in name)
    assert not first["diverged"] and first["steps"] == 20


def test_validation_along_a_run_shows_it_and_changes_nothing(trainer, monkeypatch):
    monkeypatch.setattr(llama_run, "CHUNK", 2)
    name, arm, key = "adam+magma", ARMS["adam+magma"], jnp.uint32(0)
    watched = Trainer(dataclasses.replace(trainer.task, validations=4)).run(name, arm, 4e-3, 0)
    once = Trainer(trainer.task)
    plain = once.run(name, arm, 4e-3, 0)
    for result in ("curve", "valid_loss", "alignment"):
        assert watched[result] == plain[result]
    steps, losses = zip(*watched["valid_curve"], strict=True)
    assert steps == (4, 10, 16, 20)
    assert plain["valid_curve"] == [[20, losses[-1]]] == [[20, round(plain["valid_loss"], 4)]]
    # What step 4 shows is the loss of parameters that have had four steps.
    rate, params, batches = jnp.float32(4e-3), once.initial(0), llama_run.chunks(once.data(0), 2)
    init, train = once._compiled[name]
    state = init(params, rate, key)
    for _ in range(2):
        params, state, _ = train(params, state, next(batches), rate, key)
    assert losses[0] == round(float(once.evaluate(params, once.valid)), 4)


def test_validations_are_evenly_spaced_and_no_more_than_there_are_dispatches():
    assert llama_run.evenly(60, 20) == set(range(3, 60, 3))
    assert llama_run.evenly(3, 50) == {1, 2}
    assert llama_run.evenly(60, 1) == llama_run.evenly(1, 50) == set()


def test_a_diverged_run_stops_early_and_is_written(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_run, "CHUNK", 5)
    fresh = Trainer(dataclasses.replace(trainer.task, steps=50))
    results = fresh.run("adam", ARMS["adam"], 1e30, 0)
    assert results["diverged"] and results["steps"] < 50
    written = records.append(tmp_path / "r.jsonl", {"arm": "adam"}, results, "cpu")
    assert written["results"]["valid_loss"] == "inf"
    assert written["results"]["valid_curve"] == [[results["steps"], "inf"]]
    assert written["provenance"]["device"] == "cpu"


def test_micro_batches_change_nothing_but_memory(trainer):
    params = trainer.initial(0)
    batch = jax.tree.map(lambda x: x[0], next(llama_run.chunks(trainer.data(0), 1)))
    loss, grads = jax.jit(trainer.value_and_grad)(params, batch)
    cut = Trainer(dataclasses.replace(trainer.task, micro_batches=2))
    cut_loss, cut_grads = jax.jit(cut.value_and_grad)(params, batch)
    np.testing.assert_allclose(loss, cut_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, cut_grads)
    assert cut.valid["inputs"].shape[1:] == (2, 16)


def test_all_arms_see_the_same_batches(trainer):
    first = next(llama_run.chunks(trainer.data(0), 3))
    again = next(llama_run.chunks(Trainer(trainer.task).data(0), 3))
    other = next(llama_run.chunks(trainer.data(1), 3))
    assert np.array_equal(first["inputs"], again["inputs"])
    assert not np.array_equal(first["inputs"], other["inputs"])


# ---------------------------------------------------------------------------------------------
# The runner, with workers that only pretend


class Pretender:
    """A worker whose loss depends on the rate alone; counts what it is given."""

    given: list[tuple[str, Run]] = []  # noqa: RUF012 - renewed by the fixture
    pause = 0.0
    broken = ""

    def __init__(self, environment):
        self.device = environment["DEVICE"]
        self.alive = True

    def run(self, task, run):
        self.given.append((self.device, run))
        time.sleep(self.pause)
        if run.arm == self.broken:
            raise runner.WorkerError("out of memory")
        loss = abs(math.log2(run.learning_rate / 0.002)) + 3
        results = {"valid_loss": loss, "train_loss_last": loss, "diverged": False}
        return {"results": results | {"tokens_per_second": 1}, "device": "pretended"}

    def kill(self):
        self.alive = False

    close = kill


@pytest.fixture
def pretender(monkeypatch):
    monkeypatch.setattr(Pretender, "given", [])
    monkeypatch.setattr(runner, "Worker", Pretender)
    return Pretender


def run_sweep(tmp_path, arms, devices=2, deadline=math.inf):
    searches = [Search(arm, 0.004) for arm in arms]
    state = runner.Sweep(TASK, searches, tmp_path / "r.jsonl", deadline)
    status = runner.execute(state, [{"DEVICE": str(i)} for i in range(devices)])
    return status, state


def test_a_sweep_over_two_devices_runs_everything_once(tmp_path, pretender, monkeypatch):
    monkeypatch.setattr(pretender, "pause", 0.05)
    status, state = run_sweep(tmp_path, ["a", "b", "c"])
    runs = [run for _, run in pretender.given]
    assert status == 0 and len(runs) == len(set(runs)) == 3 * (4 + 2)
    assert {device for device, _ in pretender.given} == {"0", "1"}
    assert all(best(state.records, arm).learning_rate == 0.002 for arm in "abc")
    # Each device begins with an arm of its own and stays with it.
    assert len({run.arm for device, run in pretender.given[:6] if device == "0"}) == 1

    pretender.given.clear()
    assert run_sweep(tmp_path, ["a", "b", "c"])[0] == 0
    assert not pretender.given
    assert len(records.read(tmp_path / "r.jsonl")) == 18


def test_a_broken_arm_is_given_up_and_the_others_finish(tmp_path, pretender, monkeypatch, capfd):
    monkeypatch.setattr(pretender, "broken", "a")
    status, state = run_sweep(tmp_path, ["a", "b"], devices=1)
    assert status == 1
    assert [run.arm for _, run in pretender.given].count("a") == 1
    assert len(state.records) == 6
    assert "out of memory" in capfd.readouterr().err


def test_a_file_that_cant_be_written_ends_the_sweep(tmp_path, pretender, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner.records, "append", full)
    status, state = run_sweep(tmp_path, ["a", "b", "c"])
    assert status == 1 and not state.records and len(pretender.given) <= 2
    assert "r.jsonl can't be written ([Errno 28]" in capfd.readouterr().err


def test_a_worker_that_cant_be_started_fails_its_run(tmp_path, monkeypatch, capfd):
    def missing(environment):
        raise FileNotFoundError("no interpreter")

    monkeypatch.setattr(runner, "Worker", missing)
    status, state = run_sweep(tmp_path, ["a", "b"])
    assert status == 1 and {run.arm for run in state.failed} == {"a", "b"}
    assert "no interpreter" in capfd.readouterr().err


def test_a_torn_reply_is_an_error_of_the_worker(monkeypatch):
    worker = object.__new__(runner.Worker)
    pipes = types.SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO('{"results": {"va\n'))
    worker._process = pipes
    with pytest.raises(runner.WorkerError, match=r"wrote '{\"results\": {\"va\\n' instead"):
        worker.run(TASK, Run("a", 1.0, 0))


def test_two_searches_that_want_a_run_get_it_once():
    searches = [Search("a", 1.0), Search("a", 1.0, fixed=True)]
    runs = missing_of_all(searches, [])
    assert len(runs) == len(set(runs)) == 3


def test_no_run_starts_that_would_end_after_the_deadline(tmp_path, pretender, monkeypatch, capfd):
    clock = [0.0]
    watch = types.SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)

    def run(self, task, run, answer=pretender.run):
        clock[0] += 10.0
        return answer(self, task, run)

    monkeypatch.setattr(runner, "time", watch)
    monkeypatch.setattr(pretender, "run", run)
    status, _ = run_sweep(tmp_path, ["a", "b"], devices=1, deadline=29.0)
    assert status == 0 and len(pretender.given) == 2  # the third would have ended at 30
    assert "time limit" in capfd.readouterr().out


def test_what_is_still_running_at_the_deadline_is_killed(tmp_path, pretender, monkeypatch):
    killed = threading.Event()

    def hang(self, task, run):
        assert killed.wait(20)
        raise runner.WorkerError("the worker ended")

    monkeypatch.setattr(pretender, "run", hang)
    monkeypatch.setattr(pretender, "kill", lambda self: killed.set())
    status, state = run_sweep(tmp_path, ["a"], devices=1, deadline=time.monotonic() + 0.5)
    assert status == 0 and not state.records and not state.failed


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("2,3", ["2", "3"]), ("GPU-a", ["GPU-a"])]
)
def test_each_worker_sees_one_gpu(monkeypatch, visible, names):
    count = len(names)
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: f"a warning\ngpu {count}\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    platform, environments = runner.find_devices()
    assert platform == "gpu"
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == names


# ---------------------------------------------------------------------------------------------
# The whole, in real processes


def options(text, out):
    sizes = ["--steps", "100", "--batch-size", "4", "--seq-len", "32", "--reach", "2"]
    return ["--data", text, "--out", str(out), "--arms", "adam", "--seeds", "2", *sizes]


def test_a_sweep_ends_and_repeated_does_nothing(text, tmp_path, monkeypatch, capfd):
    out = tmp_path / "records.jsonl"
    arguments = options(text, out)
    command = [sys.executable, "-m", "examples.paper.llama_c4", *arguments]
    # Stopped after the first record, by a signal it hears and then by one that it can't.
    for number, code in [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]:
        before = len(records.read(out))
        with subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"COMMIT": "abc"}, stderr=subprocess.PIPE
        ) as process:
            while len(records.read(out)) == before and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(number)
            process.stderr.read()  # ends when the worker, which holds it too, is gone
        assert process.returncode == code
        assert before < len(records.read(out)) <= before + 2

    monkeypatch.setattr(llama_c4, "find_devices", lambda: ("cpu", [{}]))
    assert llama_c4.main(arguments) == 0
    found = records.read(out)
    runs = [tuple(record["settings"].items()) for record in found]
    assert len(runs) == len(set(runs)) >= 3
    assert found[0]["provenance"]["command"].startswith("python -m examples.paper.llama_c4 --data")
    assert found[0]["provenance"]["commit"] == "abc"
    assert "| adam |" in capfd.readouterr().out

    content = out.read_bytes()
    monkeypatch.setattr(runner, "Worker", None)  # none is started
    assert llama_c4.main(arguments) == 0
    assert out.read_bytes() == content

    assert llama_report.main([str(out)]) == 0
    assert out.with_suffix(".png").stat().st_size > 1000


def test_an_unknown_arm_is_refused_by_name():
    with pytest.raises(SystemExit, match="no arm 'adamm'; there are adam, "):
        llama_c4.main(["--arms", "adamm"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seeds 0", "--seeds: must be at least 1"),
        ("--centre adam=x", "--centre: 'x' is not a number"),
        ("--reach 0.5", "--reach: must be at least 1"),
        ("--time-limit -1", "--time-limit: must be at least 0"),
        ("--fixed-rate 0.1 --reach 2", "--reach does nothing beside --fixed-rate"),
        ("--out gs://bucket/records", "'gs://bucket/records' is an address"),
        ("--arms adm", "no arm 'adm'; there are adam, "),
        ("--arms adam --centre adm=1", "no arm 'adm'; there are adam, "),
    ],
)
def test_a_wrong_option_is_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        llama_c4.main(options.split())
    error = capsys.readouterr().err + str(stop.value.code)
    assert message in error and error.strip().count("\n") <= 1
