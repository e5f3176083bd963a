"""One run of an arm, on a small Llama."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paper_records import write_words

from examples.kit import records
from examples.llama.config import LlamaConfig
from examples.paper import trainer as trainers
from examples.paper.arms import ARMS
from examples.paper.tasks.llama import SIZES, Task
from examples.paper.trainer import State, Trainer, curve, evenly, stacked

TASK = Task("nano", steps=20, batch_size=4, seq_len=16, dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def one_narrow_layer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "nano", LlamaConfig(257, 32, 48, 2, 1))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def task(text):
    return dataclasses.replace(TASK, data=text)


@pytest.fixture(scope="module")
def trainer(task):
    return Trainer(task)


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


def test_validation_along_a_run_shows_it_and_changes_nothing(task, monkeypatch):
    monkeypatch.setattr(trainers, "CHUNK", 2)
    name, arm, key = "adam+magma", ARMS["adam+magma"], jnp.uint32(0)
    watched = Trainer(dataclasses.replace(task, validations=4)).run(name, arm, 4e-3, 0)
    once = Trainer(task)
    plain = once.run(name, arm, 4e-3, 0)
    for result in ("curve", "valid_loss", "alignment"):
        assert watched[result] == plain[result]
    steps, losses = zip(*watched["valid_curve"], strict=True)
    assert steps == (4, 10, 16, 20)
    assert plain["valid_curve"] == [[20, losses[-1]]] == [[20, round(plain["valid_loss"], 4)]]
    # What step 4 shows is the loss of parameters that have had four steps.
    problem, rate = once.problem, jnp.float32(4e-3)
    batches = stacked(problem.batches(0), 2)
    params, variables = problem.initial(0)
    init, train = once._compiled[name]
    state = State(params, variables, init(params, rate, key))
    for _ in range(2):
        state, _ = train(state, next(batches), rate, key)
    assert losses[0] == round(problem.evaluate(state.params, state.variables)["valid_loss"], 4)


def test_validations_are_evenly_spaced_and_no_more_than_there_are_dispatches():
    assert evenly(60, 20) == set(range(3, 60, 3))
    assert evenly(3, 50) == {1, 2}
    assert evenly(60, 1) == evenly(1, 50) == set()


def test_a_diverged_run_stops_early_and_is_written(task, tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, "CHUNK", 5)
    fresh = Trainer(dataclasses.replace(task, steps=50))
    results = fresh.run("adam", ARMS["adam"], 1e30, 0)
    assert results["diverged"] and results["steps"] < 50
    written = records.append(tmp_path / "r.jsonl", {"arm": "adam"}, results, "cpu")
    assert written["results"]["valid_loss"] == "inf"
    assert written["results"]["valid_curve"] == [[results["steps"], "inf"]]
    assert written["provenance"]["device"] == "cpu"


def test_micro_batches_change_nothing_but_memory(task, trainer):
    whole, cut = trainer.problem, dataclasses.replace(task, micro_batches=2).open()
    params, variables = whole.initial(0)
    batch = next(whole.batches(0))
    one = jax.jit(whole.backward)(params, variables, batch)
    two = jax.jit(cut.backward)(params, variables, batch)
    np.testing.assert_allclose(one.loss, two.loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one.grads, two.grads)
    assert cut.valid["inputs"].shape[1:] == (2, 16)


def test_all_arms_see_the_same_batches(task, trainer):
    first = next(stacked(trainer.problem.batches(0), 3))
    again = next(stacked(task.open().batches(0), 3))
    other = next(stacked(trainer.problem.batches(1), 3))
    assert np.array_equal(first["inputs"], again["inputs"])
    assert not np.array_equal(first["inputs"], other["inputs"])


def test_the_loss_curve_is_short_and_loses_nothing():
    losses = np.random.default_rng(0).normal(size=1500).tolist()
    points = curve(losses)
    assert len(points) == 30 and points[-1][0] == 1500
    np.testing.assert_allclose(np.mean([loss for _, loss in points]), np.mean(losses), atol=1e-4)
    assert curve([1.0, 2.0]) == [[1, 1.0], [2, 2.0]]
