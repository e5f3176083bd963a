"""The Nano MoE comparison: its arms, one run, and the command."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arm_steps import assert_steps
from flax import nnx
from paper_records import write_words

from examples.kit import optimizers, records
from examples.kit.optimizers import OptimizerConfig
from examples.nanomoe.config import PRESETS, RECIPES
from examples.nanomoe.model import NanoMoE
from examples.nanomoe.step import expert_axis, matrices
from examples.paper import command, figure2_nano_moe, runner
from examples.paper.figure2_nano_moe import ARMS, CENTRE
from examples.paper.search import RATIO
from examples.paper.tasks.nano_moe import Task
from examples.paper.trainer import Trainer
from magma_optax import attention_and_mlp, mean_multiplier, summarize

TINY = "--preset tiny --steps 6 --batch-size 4 --seq-len 16 --seeds 2"


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compiling is most of the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("text"), 6_000)


@pytest.fixture(scope="module")
def trainer(text):
    small = dataclasses.replace(PRESETS["tiny"], width=16, num_layers=1, num_experts=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", small)
        return Trainer(Task("tiny", 20, 2, 8, 1, 32, "float32", text))


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
            factor = mean_multiplier() if attention_and_mlp(path, u) else 1.0
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
def test_every_arm_takes_a_step(trainer, name):
    assert_steps(ARMS[name], trainer)


@pytest.mark.parametrize("name", ["adam", "adam+magma", "muon+constant*mask"])
def test_arms_learn(trainer, name):
    results = trainer.run(name, ARMS[name], learning_rate=1e-2, seed=0)
    losses = [loss for _, loss in results["curve"]]
    assert losses[-1] < losses[0] - 0.2
    assert not results["diverged"] and results["valid_loss"] < math.log(257)
    assert results["steps"] == 20 and results["perplexity"] == math.exp(results["valid_loss"])
    assert 0 <= results["dropped"] < 1 and 1 / 4 <= results["busiest"] <= 1 / 2
    assert (results["alignment"] is not None) == ("magma" in name or "damping" in name)


def test_divergence_is_recorded(trainer):
    results = trainer.run("adam", ARMS["adam"], 1e30, 0)
    assert results["diverged"] and results["valid_loss"] == math.inf


# ---------------------------------------------------------------------------------------------
# The command


def run(tmp_path, text, *more):
    out = str(tmp_path / "r.jsonl")
    return figure2_nano_moe.main([*TINY.split(), "--data", text, "--out", out, *more])


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Spares the process that looks for devices."""
    monkeypatch.setattr(command, "find_devices", lambda: ("cpu", [{}]))


def test_the_command_records_once_and_reports(tmp_path, text, capfd, monkeypatch, on_a_cpu):
    arms = ["--arms", "adam+magma/expert", "--seeds", "1", "--fixed-rate", "1e-2", "2e-2"]
    assert run(tmp_path, text, *arms) == 0
    found = records.read(tmp_path / "r.jsonl")
    assert [r["settings"]["learning_rate"] for r in found] == [1e-2, 2e-2]
    assert {r["settings"]["arm"] for r in found} == {"adam+magma/expert"}
    assert all(r["settings"]["experiment"] == "nano_moe" for r in found)
    assert all(0 < r["results"]["active_parameters"] < r["results"]["parameters"] for r in found)
    assert "| adam+magma/expert |" in capfd.readouterr().out
    assert all(json.loads(json.dumps(r)) == r for r in found)

    monkeypatch.setattr(runner, "Worker", None)  # none is started
    assert run(tmp_path, text, *arms) == 0
    assert len(records.read(tmp_path / "r.jsonl")) == len(found)


def test_nothing_starts_after_the_time_limit(tmp_path, text, capfd, on_a_cpu):
    assert run(tmp_path, text, "--time-limit", "0") == 0
    assert "time limit: stopped" in capfd.readouterr().out
    assert not (tmp_path / "r.jsonl").exists()


def test_mistakes_are_one_line(tmp_path, text, capfd, on_a_cpu):
    with pytest.raises(SystemExit, match="error: no arm 'adamax'; there are adam, "):
        run(tmp_path, text, "--arms", "adamax")
    assert run(tmp_path, str(tmp_path / "nothing")) == 1
    error = capfd.readouterr().err
    # Grain warns of a jaxlib before 0.11.
    [line] = [line for line in error.splitlines() if not line.startswith("WARNING:absl:Grain")]
    assert "nothing: no such file or folder" in line


def test_the_papers_size_by_default(monkeypatch):
    def task(*options):
        made = []
        monkeypatch.setattr(
            figure2_nano_moe,
            "conduct",
            lambda _, __, args, ___, make, *____: made.append(make(args, "gpu")),
        )
        figure2_nano_moe.main(options)
        return made[0]

    paper = task("--preset", "paper")
    assert paper.batch_size * paper.seq_len == 491_520 and paper.steps == 50_000
    assert paper.warmup == 2000 and paper.dtype == "bfloat16"
    assert task("--preset", "paper", "--steps", "2000").warmup == 80
    assert task("--warmup", "0").warmup == 0
