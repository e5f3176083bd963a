"""The Nano MoE comparison: its arms, one run, and the command."""

import dataclasses
import json
import math
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.kit import optimizers, records
from examples.kit.optimizers import OptimizerConfig
from examples.nanomoe.config import PRESETS, RECIPES
from examples.nanomoe.model import NanoMoE
from examples.nanomoe.train import expert_axis, matrices
from examples.paper import in_process, llama_report, nano_moe
from examples.paper.arms import MEAN_MULTIPLIER
from examples.paper.nano_moe import ARMS, CENTRE
from examples.paper.nano_moe_run import Task, Trainer
from examples.paper.sweep import RATIO, Search
from magma_optax import attention_and_mlp, summarize

WORDS = "the a mask of update moment gradient block keeps drops moves layer each every some".split()
TINY = "--preset tiny --steps 6 --batch-size 4 --seq-len 16 --seeds 2 --reach 2"


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compiling is most of the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = random.Random(0).choices(WORDS, k=6_000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(" ".join(words[i : i + 50]) for i in range(0, len(words), 50)))
    return str(path)


@pytest.fixture(scope="module")
def trainer(text):
    trainer = Trainer(Task("tiny", 20, 2, 8, 1, 32, "float32", text))
    trainer.config = dataclasses.replace(trainer.config, width=16, num_layers=1, num_experts=4)
    return trainer


@pytest.fixture(scope="module")
def params():
    config = dataclasses.replace(PRESETS["tiny"], width=16, num_layers=1)
    shapes = nnx.eval_shape(lambda: nnx.state(NanoMoE(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), nnx.to_pure_dict(shapes)
    )


# ---------------------------------------------------------------------------------------------
# Arms


def test_the_papers_arms_and_their_controls_are_there():
    assert set(ARMS) >= {"adam", "c_adam", "adam+magma", "adam+magma/expert", "muon", "muon+magma"}
    controls = ["constant", "constant*mask", "damping"]
    assert set(ARMS) >= {f"{base}+{control}" for base in ["adam", "muon"] for control in controls}


def test_all_arms_share_one_grid_which_has_nanomoes_rate():
    steps = [math.log2(arm.centre / CENTRE) for arm in ARMS.values()]
    assert all(step == int(step) for step in steps)
    assert CENTRE / RATIO == RECIPES["paper"].learning_rate


def updates(tx, params, steps=3):
    rng = np.random.default_rng(0)
    state, found = tx.init(params), []
    update = jax.jit(tx.update)
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        out, state = update(grads, state, params)
        found.append(out)
    return found, state


def named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def test_the_arm_with_magma_is_the_trainers_optimizer(params):
    config = OptimizerConfig("adamw", 1e-2, 10, 2, weight_decay=0.1, clip=1.0, b2=0.95)
    config = dataclasses.replace(config, masking="magma", mask_key=3)
    expected, _ = updates(optimizers.assemble(config, "leaf", matrices), params)
    found, _ = updates(ARMS["adam+magma"].build(optimizers.schedule(config), 3), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-9), found, expected)


def test_the_control_shrinks_attention_and_experts_alone(params):
    plain, _ = updates(ARMS["adam"].build(1e-2, 0), params)
    shrunk, _ = updates(ARMS["adam+constant"].build(1e-2, 0), params)
    for before, after in zip(map(named, plain), map(named, shrunk), strict=True):
        for path, u in before.items():
            factor = MEAN_MULTIPLIER if attention_and_mlp(path, u) else 1.0
            np.testing.assert_allclose(after[path], factor * u, rtol=1e-6)


def test_experts_have_coins_of_their_own(params):
    found, state = updates(ARMS["adam+magma/expert"].build(1e-2, 0), params, steps=6)
    dropped = np.stack([np.all(named(u)["h/0/mlp/experts/c_fc"] == 0, axis=(1, 2)) for u in found])
    assert dropped.shape == (6, 8)
    assert any(0 < row.sum() < 8 for row in dropped)
    assert int(summarize(state)["num_blocks"]) == 2 + 2 * 8  # attention's and the experts'
    assert expert_axis("h/0/mlp/experts/c_fc", None) == 0


# ---------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_learns(trainer, name):
    results = trainer.run(name, ARMS[name], learning_rate=1e-2, seed=0)
    losses = [loss for _, loss in results["curve"]]
    assert losses[-1] < losses[0] - 0.2
    assert not results["diverged"] and results["valid_loss"] < math.log(257)
    assert results["steps"] == 20 and results["perplexity"] == math.exp(results["valid_loss"])
    assert 0 <= results["dropped"] < 1 and 1 / 4 <= results["busiest"] <= 1 / 2
    assert (results["alignment"] is not None) == ("magma" in name or "damping" in name)


def test_rate_and_seed_are_in_the_state_of_one_compiled_step(trainer):
    runs = [trainer.run("adam", ARMS["adam"], rate, seed) for rate, seed in [(1e-3, 0), (1e-2, 1)]]
    assert runs[0]["valid_loss"] > runs[1]["valid_loss"]
    assert trainer._steps["adam"]._cache_size() == 1
    again = trainer.run("adam", ARMS["adam"], 1e-3, 0)
    assert again["valid_loss"] == runs[0]["valid_loss"]


def test_divergence_is_recorded(trainer):
    results = trainer.run("adam", ARMS["adam"], 1e30, 0)
    assert results["diverged"] and results["valid_loss"] == results["perplexity"] == math.inf


# ---------------------------------------------------------------------------------------------
# The command


def run(tmp_path, text, *more):
    out = str(tmp_path / "r.jsonl")
    return nano_moe.main([*TINY.split(), "--data", text, "--out", out, *more])


def test_the_command_records_once_and_reports(tmp_path, text, capsys, monkeypatch):
    small = dataclasses.replace(PRESETS["tiny"], width=16, num_layers=1)
    monkeypatch.setitem(PRESETS, "tiny", small)
    arms = ["--arms", "adam+magma/expert"]
    assert run(tmp_path, text, *arms) == 0
    out = capsys.readouterr().out
    found = records.read(tmp_path / "r.jsonl")
    assert {r["settings"]["arm"] for r in found} == {"adam+magma/expert"}
    assert all(r["settings"]["experiment"] == "nano_moe" for r in found)
    assert "| adam+magma/expert |" in out
    assert all(json.loads(json.dumps(r)) == r for r in found)

    monkeypatch.setattr(Trainer, "run", None)  # would fail if called
    assert run(tmp_path, text, *arms) == 0
    assert len(records.read(tmp_path / "r.jsonl")) == len(found)

    assert llama_report.main([str(tmp_path / "r.jsonl")]) == 0
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_nothing_starts_after_the_time_limit(tmp_path, text, capsys):
    assert run(tmp_path, text, "--time-limit", "0") == 0
    assert "time limit: stopped" in capsys.readouterr().out
    assert not (tmp_path / "r.jsonl").exists()


def test_mistakes_are_one_line(tmp_path, text):
    with pytest.raises(SystemExit, match="error: no arm 'adamax'; there are adam, "):
        run(tmp_path, text, "--arms", "adamax")
    with pytest.raises(SystemExit, match=r"error: .*nothing: no such file or folder"):
        run(tmp_path, str(tmp_path / "nothing"))


def test_the_papers_size_by_default():
    args = nano_moe.parser().parse_args(["--preset", "paper", "--data", "x"])
    task = nano_moe.make_task(args)
    assert task.batch_size * task.seq_len == 491_520 and task.steps == 50_000
    assert task.warmup == 2000
    short = nano_moe.parser().parse_args(["--preset", "paper", "--data", "x", "--steps", "2000"])
    assert nano_moe.make_task(short).warmup == 80
    none = nano_moe.parser().parse_args(["--warmup", "0"])
    assert nano_moe.make_task(none).warmup == 0


# ---------------------------------------------------------------------------------------------
# One thread a device


def test_runs_are_spread_over_the_devices(tmp_path, monkeypatch):
    """Eight devices are busy at once, each with its own default device, and all is recorded."""
    monkeypatch.setattr(in_process.jax, "default_backend", lambda: "gpu")
    devices = jax.local_devices()
    together = threading.Barrier(3, timeout=30)

    def train(run):
        if run.seed == 0 and run.learning_rate in (0.5, 1.0, 2.0):
            together.wait()  # passes only if three runs are in flight
        [device] = jnp.ones(()).devices()
        loss = abs(math.log2(run.learning_rate)) + 0.01 * run.seed
        return {
            "valid_loss": loss,
            "train_loss_last": loss,
            "diverged": False,
            "seconds": 0.0,
            "device": device.id,
        }

    out = tmp_path / "r.jsonl"
    found = in_process.execute([Search("a", 1.0, seeds=3)], {"experiment": "x"}, out, train)
    runs = [(r["settings"]["learning_rate"], r["settings"]["seed"]) for r in found]
    assert sorted(runs) == [(0.5, 0), (1.0, 0), (1.0, 1), (1.0, 2), (2.0, 0)]
    assert len({r["results"]["device"] for r in found}) == min(3, len(devices))
    assert records.read(out) == found


def test_a_failing_run_stops_the_search_and_the_others_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(in_process.jax, "default_backend", lambda: "gpu")
    together, failed = threading.Barrier(3, timeout=30), threading.Event()

    def train(run):
        together.wait()
        if run.learning_rate == 1.0:
            failed.set()
            raise RuntimeError("no memory")
        failed.wait(30)
        time.sleep(0.2)  # the failure is seen first
        return {"valid_loss": 1.0, "train_loss_last": 1.0, "diverged": False, "seconds": 0.0}

    out = tmp_path / "r.jsonl"
    with pytest.raises(RuntimeError, match="no memory") as raised:
        in_process.execute([Search("a", 1.0)], {}, out, train)
    assert "learning_rate=1.0" in raised.value.__notes__[0]
    assert sorted(r["settings"]["learning_rate"] for r in records.read(out)) == [0.5, 2.0]


def test_the_optimizer_keeps_peak_and_seed_in_its_state(trainer, params):
    tx = trainer.optimizer(ARMS["adam+magma"], 3e-3, 5)
    state = tx.init(params)
    assert float(state.hyperparams["peak"]) == pytest.approx(3e-3)
    assert int(state.hyperparams["key"]) == 5
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
