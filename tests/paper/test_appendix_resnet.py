"""The negative control: CIFAR-10's folders, augmentation, ResNets, arms, and the command."""

import dataclasses
import math
import pickle
import struct
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arm_steps import assert_steps
from flax import nnx

from examples.kit import records
from examples.kit.data.error import DataError
from examples.paper import appendix_resnet, command, runner
from examples.paper import trainer as trainers
from examples.paper.appendix_resnet import ARMS, kernels
from examples.paper.tasks.resnet import Task, order
from examples.paper.trainer import Trainer
from examples.paper.vision import cifar, images
from examples.paper.vision.augment import PAD, crop_and_flip
from examples.paper.vision.resnet import MODELS, ResNet

TASK = Task("tiny", epochs=2, batch_size=64, warmup=0.05, dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compiling is most of the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# ---------------------------------------------------------------------------------------------
# CIFAR-10's folders


class Python2Pickler(pickle._Pickler):
    """Writes `bytes` and `str` as Python 2 wrote its strings, which is what CIFAR-10's are."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text):
        data = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)

    dispatch[bytes] = dispatch[str] = save_string


@pytest.fixture(scope="module")
def batches():
    """Six files' worth of three images each, as (labels, rows of 3072 bytes)."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 10, 3), rng.integers(0, 256, (3, 3072), dtype=np.uint8))
        for name in [*cifar.TRAIN, cifar.TEST]
    }


def write_python(folder, batches):
    folder.mkdir(parents=True)
    for name, (labels, rows) in batches.items():
        names = [f"{i}.png" for i in range(len(labels))]
        content = {"batch_label": name, "labels": labels.tolist(), "data": rows, "filenames": names}
        with (folder / name).open("wb") as file:
            Python2Pickler(file, protocol=2).dump(content)
    (folder / "batches.meta").write_bytes(b"not read")


def write_binary(folder, batches):
    folder.mkdir(parents=True)
    for name, (labels, rows) in batches.items():
        content = np.column_stack([labels.astype(np.uint8), rows])
        (folder / f"{name}.bin").write_bytes(content.tobytes())
    (folder / "batches.meta.txt").write_text("airplane\n")


WRITERS = {cifar.PYTHON: write_python, cifar.BINARY: write_binary}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("above", [True, False])
def test_a_folder_gives_back_every_pixel(tmp_path, batches, name, above):
    WRITERS[name](tmp_path / name, batches)
    found, test = cifar.read(tmp_path if above else tmp_path / name)
    assert found.images.shape == (15, 32, 32, 3) and found.images.dtype == np.uint8
    assert test.images.shape == (3, 32, 32, 3) and test.labels.dtype == np.int32
    expected = [batches[name][0] for name in cifar.TRAIN]
    np.testing.assert_array_equal(found.labels, np.concatenate(expected))
    # Image 4 is the second of data_batch_2; green is the second of the three planes.
    row = batches["data_batch_2"][1][1]
    for y, x, channel in [(0, 0, 0), (5, 17, 1), (31, 30, 2)]:
        assert found.images[4, y, x, channel] == row[1024 * channel + 32 * y + x]


def test_a_pickle_of_python_3_is_read_too(tmp_path, batches):
    labels, rows = batches["test_batch"]
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps({"labels": labels.tolist(), "data": rows}))
    np.testing.assert_array_equal(cifar.read_python(path).labels, labels)


def test_no_folder(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such folder; unpack CIFAR-10 from https"):
        cifar.read(tmp_path / "nowhere")


def test_a_folder_of_something_else(tmp_path):
    with pytest.raises(DataError, match="neither cifar-10-batches-py nor cifar-10-batches-bin"):
        cifar.read(tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_an_incomplete_folder_names_what_is_missing(tmp_path, batches, name):
    WRITERS[name](tmp_path / name, batches)
    suffix = ".bin" if name == cifar.BINARY else ""
    (tmp_path / name / f"data_batch_3{suffix}").unlink()
    with pytest.raises(DataError, match=f"{name}: incomplete, without data_batch_3.*again"):
        cifar.read(tmp_path)


def test_damaged_files_are_named(tmp_path, batches):
    write_binary(tmp_path / "bin", batches)
    path = tmp_path / "bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_2.bin: 9218 bytes are no whole number.*3073"):
        cifar.read(tmp_path / "bin")
    write_python(tmp_path / "py", batches)
    path = tmp_path / "py" / "test_batch"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"test_batch: no batch of CIFAR-10 \(.*again"):
        cifar.read(tmp_path / "py")


def test_a_pickle_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(DataError, match=r"it wants (builtins|__builtin__)\.print"):
        cifar.read_python(path)


def test_labels_and_images_must_fit(tmp_path, batches):
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps({"labels": [1, 2], "data": batches["test_batch"][1]}))
    with pytest.raises(DataError, match=r"2 labels, but images of shape \(3, 3072\)"):
        cifar.read_python(path)
    path.write_bytes(pickle.dumps({"labels": [1, 2, 10], "data": batches["test_batch"][1]}))
    with pytest.raises(DataError, match="label 10"):
        cifar.read_python(path)


# ---------------------------------------------------------------------------------------------
# Parts and augmentation


def test_digits_are_cut_into_thirds_without_overlap():
    data = images.digits()
    parts = [data.train, data.valid, data.test]
    assert [part.images.shape for part in parts] == [(599, 8, 8, 1)] * 3
    seen = np.concatenate([part.images.reshape(599, 64) for part in parts])
    assert len(np.unique(seen, axis=0)) == 1797  # no two digits are the same picture
    again = images.digits()
    np.testing.assert_array_equal(data.test.labels, again.test.labels)
    assert all(set(part.labels.tolist()) == set(range(10)) for part in parts)


def test_cifar_keeps_its_test_images_and_gives_a_tenth_of_the_others(tmp_path, batches):
    write_binary(tmp_path / "bin", batches)
    data = images.load(tmp_path / "bin")
    assert [len(part.labels) for part in (data.train, data.valid, data.test)] == [14, 1, 3]
    np.testing.assert_array_equal(data.test.labels, batches["test_batch"][0])
    mean, std = data.statistics()
    pixels = data.train.images.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-6)
    np.testing.assert_allclose(std, pixels.std(0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_augmentation_is_keyed_and_keeps_shape_and_dtype(dtype):
    x = np.random.default_rng(0).integers(1, 256, (16, 32, 32, 3)).astype(dtype)
    augment = jax.jit(crop_and_flip)
    out = augment(jax.random.key(0), x)
    assert out.shape == x.shape and out.dtype == dtype
    np.testing.assert_array_equal(out, augment(jax.random.key(0), x))
    assert np.any(out != augment(jax.random.key(1), x))


def test_augmentation_only_moves_and_mirrors():
    x = np.random.default_rng(0).integers(1, 256, (32, 9, 10, 2)).astype(np.uint8)
    out = np.asarray(crop_and_flip(jax.random.key(0), x))
    padded = np.pad(x, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    seen = set()
    for image, big in zip(out, padded, strict=True):
        places = [
            (i, j, flip)
            for i in range(2 * PAD + 1)
            for j in range(2 * PAD + 1)
            for flip in (False, True)
            if np.array_equal(image[:, ::-1] if flip else image, big[i : i + 9, j : j + 10])
        ]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) > 20 and {flip for _, _, flip in seen} == {False, True}


def test_an_epoch_shows_every_image_once_and_differs_by_epoch_and_seed():
    first, second = order(10, 3, 2, seed=0)
    assert first.shape == (3, 3) and len(np.unique(first)) == 9
    assert np.any(first != second)
    assert np.any(first != next(order(10, 3, 2, seed=1)))
    np.testing.assert_array_equal(first, next(order(10, 3, 2, seed=0)))


# ---------------------------------------------------------------------------------------------
# Models


def abstract(model, channels, classes=10):
    return nnx.eval_shape(lambda: ResNet(MODELS[model], channels, classes, rngs=nnx.Rngs(0)))


def test_resnet_50_has_its_parameters():
    shapes = nnx.to_pure_dict(nnx.state(abstract("resnet50", 3), nnx.Param))
    leaves = jax.tree.leaves(shapes)
    # 25,557,032 of ImageNet's, with a 3x3 stem in the place of 7x7 and 10 classes for 1000.
    assert sum(math.prod(x.shape) for x in leaves) == 25_557_032 - 3 * 40 * 64 - 990 * 2049
    assert sum(x.ndim == 4 for x in leaves) == 53
    assert sum(x.ndim == 2 for x in leaves) == 1


@pytest.mark.parametrize(("name", "side"), [("resnet50", 4), ("small", 8)])
def test_resolution_is_halved_by_each_stage_but_the_first(name, side):
    def features(x):
        model = ResNet(MODELS[name], 3, 10, rngs=nnx.Rngs(0))
        x = model.stem(x, False)
        for block in model.blocks:
            x = block(x, False)
        return x

    out = nnx.eval_shape(features, jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32))
    assert out.shape[1:3] == (side, side)


def test_logits_are_float32_in_bfloat16_too():
    config = dataclasses.replace(MODELS["tiny"], dtype="bfloat16")

    def forward(x):
        model = ResNet(config, 1, 10, rngs=nnx.Rngs(0))
        before = nnx.state(model)
        return before, model(x, train=True), nnx.state(model)

    before, logits, after = nnx.eval_shape(forward, jax.ShapeDtypeStruct((2, 8, 8, 1), "float32"))
    assert logits.shape == (2, 10) and logits.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((before, after)))


def test_blocks_are_kernels_alone():
    params = nnx.to_pure_dict(nnx.state(abstract("small", 1), nnx.Param))
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert kernels(name, leaf) == (leaf.ndim > 1)


# ---------------------------------------------------------------------------------------------
# Training


@pytest.fixture(scope="module")
def trainer():
    return Trainer(TASK)


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_takes_a_step(trainer, name):
    assert_steps(ARMS[name], trainer)


@pytest.mark.parametrize("name", ["adamw", "adamw+magma", "adamw+constant*mask"])
def test_arms_learn(trainer, name):
    results = trainer.run(name, ARMS[name], learning_rate=8e-3, seed=0)
    losses = [loss for _, loss in results["curve"]]
    assert losses[-1] < losses[0] - 0.2
    assert not results["diverged"] and results["valid_loss"] < math.log(10)
    assert results["steps"] == 18
    scores = results["alignment"], results["alignment_over_training"]
    if "magma" in name or "damping" in name:
        assert all(0.4 < score < 0.63 for score in scores)
    else:
        assert scores == (None, None)


def test_a_step_is_the_models_and_moves_the_statistics(trainer):
    """Loss and gradient agree with the eager model's; evaluation moves no statistic."""
    problem = trainer.problem
    params, stats = problem.initial(0)
    model = nnx.merge(problem.graphdef, params, stats)
    images_, labels = problem.data.train.images[:8], problem.data.train.labels[:8]
    x = (images_ - problem.mean[None, None, None]) / problem.std[None, None, None]

    def loss(model):
        logits = model(jnp.asarray(x, jnp.float32), train=True)
        return -jnp.mean(jax.nn.log_softmax(logits)[np.arange(8), labels])

    value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
    batch = {"images": images_, "labels": labels, "seed": np.uint32(0), "step": np.int32(0)}
    found = jax.jit(problem.backward)(params, stats, batch)
    np.testing.assert_allclose(found.loss, value, rtol=1e-5)
    expected = nnx.to_pure_dict(grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found.grads, expected)
    moved = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found.variables, moved)
    assert not np.allclose(found.variables["stem"]["norm"]["mean"], stats["stem"]["norm"]["mean"])
    first, again = (problem.evaluate(params, stats) for _ in range(2))
    assert first == again


def test_divergence_is_recorded_and_ends_the_run(monkeypatch):
    monkeypatch.setattr(trainers, "CHUNK", 3)
    results = Trainer(TASK).run("adamw", ARMS["adamw"], learning_rate=1e30, seed=0)
    assert results["diverged"] and results["valid_loss"] == math.inf and results["steps"] < 18


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match="a batch of 600, but only 599 training images"):
        dataclasses.replace(TASK, batch_size=600).open()


# ---------------------------------------------------------------------------------------------
# The command

TINY = "--model tiny --epochs 1 --batch-size 128 --arms adamw+magma --seeds 2"


def run(tmp_path, *more):
    return appendix_resnet.main([*TINY.split(), "--out", str(tmp_path / "r.jsonl"), *more])


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Spares the process that looks for devices."""
    monkeypatch.setattr(command, "find_devices", lambda: ("cpu", [{}]))


def test_the_command_records_once_and_reports(tmp_path, capfd, monkeypatch, on_a_cpu):
    rates = ["--fixed-rate", "4e-3", "8e-3"]
    assert run(tmp_path, *rates) == 0
    out = capfd.readouterr().out
    found = records.read(tmp_path / "r.jsonl")
    settings = found[0]["settings"]
    assert settings["data"] == "digits" and settings["experiment"] == "negative_control"
    assert "| adamw+magma |" in out and "test accuracy, %" in out
    assert sorted((r["settings"]["learning_rate"], r["settings"]["seed"]) for r in found) == [
        (rate, seed) for rate in (4e-3, 8e-3) for seed in (0, 1)
    ]
    monkeypatch.setattr(runner, "Worker", None)  # none is started
    assert run(tmp_path, *rates) == 0
    assert len(records.read(tmp_path / "r.jsonl")) == len(found)


def test_a_folder_of_cifar_is_trained_on_with_augmentation(tmp_path, batches):
    write_python(tmp_path / "cifar-10-batches-py", batches)
    task = dataclasses.replace(TASK, batch_size=7, epochs=1, data=str(tmp_path))
    assert task.settings()["data"] == "cifar10"
    problem = task.open()
    assert problem.data.augment and problem.steps == 2
    seen = list(problem.batches(3))
    assert [int(batch["step"]) for batch in seen] == [0, 1] and seen[0]["seed"] == 3
    params, stats = jax.eval_shape(lambda: problem.initial(0))
    found = jax.eval_shape(problem.backward, params, stats, seen[0])
    assert jax.tree.map(like, found.grads) == jax.tree.map(like, params)
    assert jax.tree.map(like, found.variables) == jax.tree.map(like, stats)


def test_the_step_decides_the_augmentation(tmp_path, batches):
    write_python(tmp_path / "cifar-10-batches-py", batches)
    problem = dataclasses.replace(TASK, batch_size=7, data=str(tmp_path)).open()
    params, stats = problem.initial(0)
    batch = next(problem.batches(0))
    loss = jax.jit(lambda batch: problem.backward(params, stats, batch).loss)
    assert loss(batch) == loss(batch)
    assert loss(batch) != loss(batch | {"step": np.int32(1)})
    assert loss(batch) != loss(batch | {"seed": np.uint32(1)})


def like(x):
    return x.shape, x.dtype


def test_mistakes_are_one_line(tmp_path, capfd, on_a_cpu):
    with pytest.raises(SystemExit, match="error: no arm 'adamax'; there are adamw, "):
        run(tmp_path, "--arms", "adamax")
    assert run(tmp_path, "--data", str(tmp_path / "nothing")) == 1
    error = capfd.readouterr().err
    assert "nothing: no such folder" in error and error.count("\n") == 1
