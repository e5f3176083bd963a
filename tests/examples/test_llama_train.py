"""The Llama example's optimizers and its trainer, killed, resumed and misused."""

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from trainers import refusal, write_corpus

from examples.kit import checkpoint, folder, metrics, optimizers
from examples.kit.folder import fresh_folder
from examples.kit.loss import cross_entropy
from examples.kit.optimizers import LEARNING_RATES, OptimizerConfig, assemble, direction, schedule
from examples.kit.paths import by_path
from examples.llama import options as llama_options
from examples.llama import train
from examples.llama.config import LlamaConfig
from examples.llama.model import Llama
from examples.llama.step import abstract_model, decays, layer_blocks
from magma_optax import attention_and_mlp

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------------------------------------
# Optimizers


def tiny(scan_layers):
    config = LlamaConfig(20, 8, 12, 2, 3, scan_layers=scan_layers)
    graphdef, state = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    return graphdef, nnx.to_pure_dict(state)


def settings(name="adam", **changes):
    defaults = {"name": name, "learning_rate": 0.01, "steps": 10, "warmup": 0}
    return OptimizerConfig(**defaults | changes)


def build(config, scan_layers):
    return assemble(config, layer_blocks(scan_layers), decays)


@pytest.fixture(scope="module")
def gradients():
    """Parameters and gradients of the tiny model, for separate and for scanned layers."""

    def both(scan_layers):
        graphdef, params = tiny(scan_layers)
        tokens = jnp.arange(24).reshape(2, 12) % 20

        def loss(params):
            nll, count = cross_entropy(nnx.merge(graphdef, params)(tokens), tokens)
            return nll / count

        return jax.jit(jax.value_and_grad(loss)), params

    return {scan_layers: both(scan_layers) for scan_layers in (False, True)}


@pytest.mark.parametrize("masking", ["none", "magma", "skip"])
@pytest.mark.parametrize("name", LEARNING_RATES)
def test_two_steps_of_every_optimizer(gradients, name, masking):
    value_and_grad, params = gradients[True]
    tx = build(settings(name, masking=masking, weight_decay=0.1, clip=1.0), scan_layers=True)
    state = tx.init(params)

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    before, grads = value_and_grad(params)
    for _ in range(2):
        params, state = step(grads, state, params)
        after, grads = value_and_grad(params)
    assert np.isfinite(after)
    assert after < before


@pytest.mark.parametrize("masking", ["magma", "skip"])
def test_scanned_layers_have_a_coin_and_a_score_each(gradients, masking):
    _, params = gradients[True]
    tx = build(settings(masking=masking), scan_layers=True)
    update, state = jax.jit(tx.update), tx.init(params)
    for key in jax.random.split(jax.random.key(0)):  # in the first step all are aligned alike
        grads = optax.tree.random_like(key, params)
        updates, state = update(grads, state, params)
    kept = {
        path: np.any(np.asarray(leaf) != 0, axis=(1, 2))  # (L,)
        for path, leaf in by_path(updates).items()
        if attention_and_mlp(path, leaf)
    }
    assert len(kept) == 7
    assert any(coins.any() and not coins.all() for coins in kept.values())
    for path, leaf in by_path(updates).items():
        if path in kept:  # all of a layer's slice, or nothing
            np.testing.assert_array_equal(np.asarray(leaf != 0).all(axis=(1, 2)), kept[path])
        else:
            assert np.any(np.asarray(leaf) != 0)
    if masking == "magma":
        scores = by_path(optax.tree.get(state, "alignment"))
        assert {path: score.shape for path, score in scores.items()} == dict.fromkeys(kept, (3,))
        assert len(np.unique(scores["layers/mlp/up_proj/kernel"])) == 3


@pytest.mark.parametrize("scan_layers", [False, True])
def test_muon_takes_the_attention_and_mlp_matrices_alone(gradients, scan_layers):
    _, params = gradients[scan_layers]
    state = build(settings("muon"), scan_layers).init(params)
    groups = next(
        node
        for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.PartitionState))
        if isinstance(node, optax.PartitionState)
    ).inner_states
    assert set(by_path(optax.tree.get(groups["muon"], "mu"))) == {
        path for path, leaf in by_path(params).items() if attention_and_mlp(path, leaf)
    }


def test_base_rules_are_those_of_the_benchmarks():
    grads = np.random.default_rng(0).normal(size=(4, 5))
    expected = {"rmsprop": [], "laprop": []}
    for name, decay in (("rmsprop", 0.99), ("laprop", 0.999)):
        v = m = np.zeros(5)
        for t, g in enumerate(grads, 1):
            v = decay * v + (1 - decay) * g**2
            root = np.sqrt(v / (1 - decay**t))
            m = 0.9 * m + 0.1 * g / (root + 1e-15)
            step = g / (root + 1e-8) if name == "rmsprop" else m / (1 - 0.9**t)
            expected[name].append(step)
    for name, steps in expected.items():
        tx = direction(name)
        state = tx.init(jnp.zeros(5))
        for g, step in zip(grads, steps, strict=True):
            actual, state = tx.update(jnp.asarray(g, jnp.float32), state)
            np.testing.assert_allclose(actual, step, rtol=1e-4, atol=1e-5)


def test_decay_is_masked_with_the_update_and_spares_norms(gradients):
    _, params = gradients[False]
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = build(settings(weight_decay=0.1, masking="magma"), scan_layers=False)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    shrink = {
        path: np.asarray(update / by_path(params)[path]).mean()
        for path, update in by_path(updates).items()
    }
    for path, factor in shrink.items():
        if path.endswith("weight"):
            assert factor == 0
        elif attention_and_mlp(path, by_path(params)[path]):  # rate x decay x score 0.5, or dropped
            assert factor == 0 or abs(factor / (-0.01 * 0.1 * 0.5) - 1) < 1e-4
        else:
            assert abs(factor / (-0.01 * 0.1) - 1) < 1e-4


def test_schedule_warms_up_and_falls_to_a_tenth():
    rate = schedule(settings(steps=100, warmup=10))
    rates = [rate(step) for step in (0, 5, 10, 55, 100)]
    np.testing.assert_allclose(rates, [0, 0.005, 0.01, 0.0055, 0.001], rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# The trainer, in this process: eight devices share each batch


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def options(corpus, out, *more):
    common = "--preset tiny --batch-size 8 --seq-len 32 --magma --log-every 5 --checkpoint-every 20"
    return [*common.split(), "--data", str(corpus), "--out", str(out), *more]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The folder of a short run with scanned layers."""
    out = tmp_path_factory.mktemp("finished") / "run"
    more = ["--steps", "22", "--eval-every", "10", "--scan-layers", "--learning-rate", "0.01"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train.main(options(corpus, out, *more)) == 0
    (out.parent / "printed").write_text(printed.getvalue())
    return out, more


def test_a_run_leaves_records_events_and_a_picture(finished):
    out, _ = finished
    records = metrics.read(out)
    assert [record["step"] for record in records] == [5, 10, 15, 20, 22]
    assert records[0]["loss"] > records[-1]["loss"]
    for record in records:
        assert record["num_blocks"] == 14
        low, mean, high = (record[f"alignment_{name}"] for name in ("min", "mean", "max"))
        assert 0 < low <= mean <= high < 1
    assert [record["step"] for record in records if "valid_loss" in record] == [10, 20, 22]
    scores = records[-1]["alignment"]
    assert len(scores) == 7
    assert all(len(layers) == 2 for layers in scores.values())
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((out / "tensorboard").iterdir())) == 1


def test_going_on_with_a_finished_run_reports_it_again(finished, corpus, capsys):
    out, more = finished
    before = (out / metrics.FILE).read_bytes()
    assert train.main(options(corpus, out, *more, "--resume")) == 0
    assert (out / metrics.FILE).read_bytes() == before
    printed = capsys.readouterr().out
    loss = metrics.read(out)[-1]["valid_loss"]
    assert f"validation loss {loss:.4f}" in printed
    assert "unigram entropy" in printed
    assert printed.count("sample: ") == 3


def test_a_run_killed_before_its_first_checkpoint_starts_again(finished, corpus, tmp_path):
    out, more = finished
    (tmp_path / metrics.FILE).write_text('{"step": 5, "loss": 9.0}\n')
    assert train.main(options(corpus, tmp_path, *more, "--resume")) == 0
    timed = "tokens_per_second"
    expected, actual = (
        [{name: x for name, x in record.items() if name != timed} for record in metrics.read(run)]
        for run in (out, tmp_path)
    )
    assert actual == expected  # and a run is a function of its seed


def error(capsys, argv):
    return refusal(capsys, train.main, argv)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--magma --skip-update", "--magma, --skip-update and --control exclude each other"),
        ("--control --magma", "--magma, --skip-update and --control exclude each other"),
        ("--multiplier 0.5", "--multiplier 0.5 needs --control"),
        ("--control --survival-prob alignment", "needs --magma"),
        ("--control --mask-key 1", "--mask-key 1 needs --magma or --skip-update"),
        ("--learning-rate fast", "--learning-rate: 'fast' is not a number"),
        ("--learning-rate 0", "must be more than 0.0"),
        ("--learning-rate=-1e-3", "got -1e-3"),
        ("--learning-rate nan", "got nan"),
        ("--learning-rate inf", "got inf"),
        ("--steps 1.5", "'1.5' is not a whole number"),
        ("--magm", "unrecognized arguments: --magm"),
        ("--optimizer sgd", "'sgd'"),
        ("--survival-prob 2 --magma", "survival_prob"),
        ("--survival-prob alignment", "needs --magma"),
        ("--warmup 9 --steps 9", "--warmup 9"),
        ("--batch-size 9", "multiple of the 8 devices"),
        ("--attention cudnn", "needs a GPU"),
        ("--seed 99999999999", "at most"),
        ("--distributed --out run", "--distributed: "),
        ("--resume", "--resume needs --out"),
        ("--data missing.txt", "missing.txt"),
        ("--survival-prob 0.5", "--survival-prob 0.5 needs --magma or --skip-update"),
        ("--mask-key 1", "--mask-key 1 needs --magma or --skip-update"),
        ("--temperature 2", "--temperature 2.0 needs --magma"),
        ("--skip-update --temperature 2", "--temperature 2.0 needs --magma"),
        ("--skip-update --survival-prob alignment", "needs --magma"),
        ("--out gs://bucket/run", "'gs://bucket/run' is an address; only local folders"),
        ("--out s3://bucket/run --resume", "'s3://bucket/run' is an address"),
        ("--out file:///tmp/run", "mount the bucket"),
        ("--out=", "'' is no path"),
    ],
)
def test_wrong_options_are_one_line(capsys, tmp_path, monkeypatch, wrong, message):
    monkeypatch.chdir(tmp_path)
    assert message in error(capsys, shlex.split(wrong))
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_a_run_keeps_its_dtype_on_another_device(monkeypatch):
    monkeypatch.setattr(llama_options, "platform", lambda: "gpu")
    argv = "--preset tiny --batch-size 8 --out run --resume".split()
    for saved in ("float32", "bfloat16"):
        config = llama_options.resolve(llama_options.parser().parse(argv), {"dtype": saved})
        assert config.model.dtype == saved


@pytest.mark.parametrize("text", ["", "too short"])
def test_unusable_text_is_one_line(capsys, tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert "text.txt" in error(capsys, options(path, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_optimizer_its_rate_and_what_is_masked_are_told(finished):
    told = {
        "--magma": "adam with Magma, peak learning rate 0.003 (the default with --magma; 0.001 "
        "without): 0 steps of linear warm-up, then a cosine to a tenth at step 1\n"
        "masked: 14 of 21 leaves in 14 blocks, 60.2 % of 41,696 parameters\n",
        "--skip-update --scan-layers": "adam with SkipUpdate, peak learning rate 0.001: 0 steps of "
        "linear warm-up, then a cosine to a tenth at step 1\n"
        "masked: 7 of 12 leaves in 14 blocks, 60.2 % of 41,696 parameters\n",
        "": "adam, peak learning rate 0.001: 0 steps of linear warm-up, then a cosine to a tenth "
        "at step 1\nmasked: nothing\n",
        "--control": "adam with the control in Magma's place, peak learning rate 0.003 (the "
        "default with --control; 0.001 without): 0 steps of linear warm-up, then a cosine to a "
        "tenth at step 1\nmasked: nothing; attention and MLP updates times 0.2771\n",
        "--control --multiplier 0.1 --optimizer muon": "muon with the control in Magma's place, "
        "peak learning rate 0.009 (the default with --control; 0.003 without): 0 steps of linear "
        "warm-up, then a cosine to a tenth at step 1\n"
        "masked: nothing; attention and MLP updates times 0.1\n",
    }
    options = ["--preset", "tiny", "--batch-size", "8", "--seq-len", "16"]

    def describe(*more):
        config = llama_options.CommandLine([*options, *more]).resolve({})
        model = config.model
        shapes = abstract_model(model, 0)[1]
        return optimizers.describe(config.optimizer, layer_blocks(model.scan_layers), shapes) + "\n"

    for masking, expected in told.items():
        assert describe("--steps", "1", *masking.split()) == expected
    out, more = finished
    printed = (out.parent / "printed").read_text()
    assert describe("--magma", *more) in printed
    assert f"watch it with: tail -f {out}/metrics.jsonl, or tensorboard --logdir {out}\n" in printed


def test_a_folder_with_a_run_is_not_written_over(capsys, finished, corpus):
    out, more = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    message = error(capsys, options(corpus, out, *more))
    assert "--resume" in message
    assert "--out" in message
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_a_diverged_run_keeps_its_last_good_checkpoint(capsys, corpus, tmp_path):
    out = tmp_path / "run"
    wild = "--steps 40 --warmup 39 --checkpoint-every 2 --learning-rate 1e20".split()
    assert train.main(options(corpus, out, *wild)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    kept = max(checkpoint.complete(out / "checkpoints"))
    assert "loss nan" in said and f"{out} keeps the checkpoint of step {kept}." in said
    with checkpoint.open_manager(out / "checkpoints") as manager:
        params = manager.restore(kept, args=ocp.args.Composite(params=ocp.args.StandardRestore()))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params["params"]))


def test_two_runs_do_not_share_a_folder(capsys, finished, corpus):
    out, more = finished
    before = (out / metrics.FILE).read_bytes()
    with folder.held(out):
        assert "a run still goes on in" in error(capsys, options(corpus, out, *more, "--resume"))
    assert (out / metrics.FILE).read_bytes() == before


def test_a_run_made_shorter_is_validated_on_all_held_out_text(capsys, corpus, tmp_path):
    losses = []
    for out, steps in (("whole", "4"), ("cut", "8")):
        argv = ["--warmup", "2", "--checkpoint-every", "4", "--eval-every", "4"]
        argv += ["--eval-batches", "1", "--learning-rate", "1e-9"]
        assert train.main(options(corpus, tmp_path / out, *argv, "--steps", steps)) == 0
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "8")
    capsys.readouterr()
    for out in ("whole", "cut"):
        argv += ["--steps", "4", "--resume"]
        assert train.main(options(corpus, tmp_path / out, *argv)) == 0
        printed = capsys.readouterr().out
        losses.append(printed.partition("validation loss ")[2].split()[0])
    assert losses[0] == losses[1]


def test_a_base_with_nothing_to_leave_out_is_one_line(capsys, corpus, tmp_path):
    argv = options(corpus, tmp_path / "run", "--optimizer", "laprop", "--lazy")
    assert "leave --lazy out" in error(capsys, argv)


def test_nothing_to_resume(capsys, corpus, tmp_path):
    assert "no run" in error(capsys, options(corpus, tmp_path, "--resume"))


def test_another_configuration_is_named_with_both_values(capsys, finished, corpus):
    out, more = finished
    changed = ["0.02" if value == "0.01" else value for value in more]
    message = error(capsys, options(corpus, out, *changed, "--resume", "--seed", "3"))
    assert "learning_rate 0.01 there, 0.02 here" in message
    assert "seed 0 there, 3 here" in message
    assert "optimizer" not in message


def test_a_full_disk_is_one_line(capsys, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    argv = options(corpus, tmp_path / "run", "--steps", "22", "--scan-layers")
    assert train.main(argv) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_output_under_a_file_is_one_line(capsys, corpus):
    assert str(corpus) in error(capsys, options(corpus, corpus / "run"))
    assert str(corpus) in error(capsys, options(corpus, corpus))


def test_fresh_folders_are_numbered(tmp_path):
    folders = [fresh_folder(tmp_path / "runs", "llama") for _ in range(3)]
    assert [folder.name for folder in folders] == ["llama-1", "llama-2", "llama-3"]


def test_a_torn_record_and_later_ones_are_dropped(tmp_path):
    (tmp_path / metrics.FILE).write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    with metrics.Metrics(tmp_path, 2) as log:
        log.write(3, {"loss": 1.5})
    assert metrics.read(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.5}]


def test_scores_are_in_layer_order():
    separate = {f"layers/{i}/mlp/up_proj/kernel": np.float32(i) for i in (0, 1, 10, 11, 2, 3)}
    assert metrics.by_layer(separate) == {"mlp/up_proj/kernel": [0, 1, 2, 3, 10, 11]}
    scanned = {"layers/mlp/up_proj/kernel": np.arange(3.0)}
    assert metrics.by_layer(scanned) == {"mlp/up_proj/kernel": [0, 1, 2]}
    nested = {"layers": {str(i): {"mlp": {"kernel": np.float32(i)}} for i in (0, 1, 10, 2)}}
    assert metrics.by_layer(nested) == {"mlp/kernel": [0, 1, 2, 10]}
    nested = {"layers": {"mlp": {"kernel": np.arange(3.0)}}}
    assert metrics.by_layer(nested) == {"mlp/kernel": [0, 1, 2]}


# ---------------------------------------------------------------------------------------------
# The trainer in processes of its own: killed, and on a full disk


def start(argv, prefix=(), **env):
    """Starts the trainer with one device."""
    command = [*prefix, sys.executable, "-m", "examples.llama.train", *argv]
    one = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"}
    env = os.environ | one | {"PYTHONWARNINGS": "error"} | env
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(argv):
    process = start(argv)
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    return out


def interrupt(argv, out, number, step):
    """Starts the trainer, sends a signal once `step` is on record, and waits for the end."""
    process = start(argv)
    path = out / metrics.FILE
    deadline = time.monotonic() + 1200
    while not (path.exists() and any(r["step"] >= step for r in metrics.read(out))):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=1200)
    return process.returncode, printed


def final_state(out, step):
    """The arrays and the place in the data of the last checkpoint, by path."""
    arrays = {name: ocp.args.StandardRestore() for name in ("params", "opt_state")}
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        assert manager.latest_step() == step
        restored = manager.restore(step, args=ocp.args.Composite(**arrays))
    [place] = (out / "checkpoints" / str(step) / "data").glob("process*.json")
    return by_path((restored["params"], restored["opt_state"])), json.loads(place.read_text())


LONG = ("--steps", "200", "--eval-every", "200", "--checkpoint-every", "40")


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    finish(options(corpus, out, *LONG))
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_ends_as_if_it_had_not_been(uninterrupted, corpus, tmp_path, number):
    out = tmp_path / "run"
    status, printed = interrupt(options(corpus, out, *LONG), out, number, step=70)
    if number == signal.SIGTERM:
        assert status == 143
        [line] = [line for line in printed.splitlines() if line.startswith("SIGTERM")]
        command = shlex.split(line.split("go on with: ")[1])
        assert command[:3] == ["python", "-m", "examples.llama.train"]
        again = command[3:]
    else:
        assert status == -signal.SIGKILL
        again = options(corpus, out, *LONG, "--resume")
    started = finish(again).splitlines()[2]
    first = int(started.split("from step ")[1].split()[0])
    assert 40 <= first < 200

    expected, expected_place = final_state(uninterrupted, 200)
    actual, place = final_state(out, 200)
    assert place == expected_place
    assert actual.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(actual[path], expected[path], err_msg=path)

    steps = [record["step"] for record in metrics.read(out)]
    assert len(steps) == len(set(steps))
    assert steps == sorted(steps)
    assert metrics.read(out)[-1]["valid_loss"] == metrics.read(uninterrupted)[-1]["valid_loss"]


@pytest.mark.parametrize("kilobytes", [1, 100])
def test_a_failed_write_ends_the_run_with_one_line(corpus, tmp_path, kilobytes):
    """With files limited to 1 KB the records don't fit, with 100 KB the checkpoints don't."""
    limit = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "-"]
    env = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000",  # don't cache what is cut short
        "PYTHONWARNINGS": "error,ignore::ResourceWarning",  # tensorboardX can't close what is full
    }
    argv = options(corpus, tmp_path / "run", "--steps", "60")
    process = start(argv, prefix=limit, **env)
    _, err = process.communicate(timeout=1200)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith("error: [Errno 27] File too large")
