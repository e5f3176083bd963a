"""Checkpoints that were damaged, moved or written by an earlier version, and runs made longer."""

import dataclasses
import errno
import json
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_place import Place
from trainers import WORDS

from examples.kit import checkpoint, folder, metrics, text
from examples.kit.options import SettingsError
from examples.kit.paths import by_path
from examples.llama import train
from examples.llama.config import PRESETS


def tree(step):
    """Parameters and optimizer state of a run with scores, at a step."""
    scores = {"layers": {"0": {"mlp": {"kernel": jnp.float32(0.5 + step / 100)}}}}
    params = {"layers": {"0": {"mlp": {"kernel": jnp.arange(600.0) + step}}}}
    return params, (None, {"mu": params, "alignment": scores, "step": jnp.int32(step)})


def written(path, steps=(2, 4), place="line", config=None):
    """Writes checkpoints of these steps and returns their folder."""
    with checkpoint.open_manager(path) as manager:
        for step in steps:
            data = Place(**{place: step})
            checkpoint.save(manager, step, *tree(step), data, 1, config or {"seed": 0})
    return path


def restored(path, config=None, place="line"):
    """Restores, checks that arrays and place belong to one step, and saves step 4 anew."""
    data = Place(**{place: 0})
    with checkpoint.open_manager(path) as manager:
        found = checkpoint.restore(manager, *tree(0), data, 1, config or {"seed": 0})
        if found is None:
            return None
        step, params, opt_state = found
        assert data.state == {place: step}
        for actual, wanted in zip(
            jax.tree.leaves((params, opt_state)), jax.tree.leaves(tree(step)), strict=True
        ):
            np.testing.assert_array_equal(actual, wanted)
        if step < 4:
            data = Place(**{place: 4})
            checkpoint.save(manager, 4, *tree(4), data, 1, config or {"seed": 0})
    if step < 4:
        assert restored(path, config, place) == 4
    return step


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return written(tmp_path_factory.mktemp("whole") / "checkpoints")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run" / "checkpoints")


# ---------------------------------------------------------------------------------------------
# Damage


def each_file(change):
    def damage(item):
        for file in item.rglob("*"):
            if file.is_file():
                change(file)

    return damage


def flip(file):
    """Changes one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


DAMAGES = {
    "missing": shutil.rmtree,
    "empty": each_file(lambda file: file.write_bytes(b"")),
    "cut short": each_file(lambda file: os.truncate(file, file.stat().st_size // 2)),
    "zeros": each_file(lambda file: file.write_bytes(bytes(file.stat().st_size))),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("item", ["params", "opt_state", "data", "config", "readers"])
def test_a_damaged_item_sends_back_to_the_checkpoint_before(copy, capsys, item, damage):
    DAMAGES[damage](copy / "4" / item)
    assert restored(copy) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: checkpoint 4 is damaged (")
    assert line.endswith("damaged-checkpoints/4; going on from step 2")
    assert (copy.parent / "damaged-checkpoints" / "4").is_dir()  # nothing is thrown away


@pytest.mark.parametrize("item", ["params", "opt_state"])
def test_one_wrong_bit_of_an_array_is_noticed(copy, item):
    arrays = max((copy / "4" / item).rglob("d/*"), key=lambda file: file.stat().st_size)
    flip(arrays)
    assert restored(copy) == 2


@pytest.mark.parametrize("damage", ["missing", "empty", "cut short"])
def test_a_damaged_array_file(copy, damage):
    for file in (copy / "4" / "opt_state").rglob("ocdbt.process_0/d/*"):
        file.unlink() if damage == "missing" else DAMAGES[damage](file.parent)
    assert restored(copy) == 2


def test_strays_named_like_steps_and_leftovers_of_a_kill(copy):
    (copy / "9").mkdir()
    (copy / "12").write_text("not a checkpoint")
    (copy / "15").symlink_to("nowhere")
    (copy / "6.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    for name in ("006", "-1", "1e3", "4 (copy)", "notes"):
        (copy / name).mkdir()
    assert restored(copy) == 4
    aside = copy.parent / "damaged-checkpoints"
    assert {entry.name for entry in aside.iterdir()} == {"9", "12", "15"}
    assert not list(copy.glob("*tmp*"))


def test_a_second_damaged_checkpoint_of_a_step_is_kept_too(copy):
    for _ in range(2):
        shutil.rmtree(copy / "4" / "params")
        assert restored(copy) == 2
    aside = copy.parent / "damaged-checkpoints"
    assert {entry.name for entry in aside.iterdir()} == {"4", "4-again"}


def test_without_a_whole_checkpoint_nothing_is_touched(copy):
    for step in "24":
        shutil.rmtree(copy / step / "params")
    before = sorted(copy.rglob("*"))
    with pytest.raises(checkpoint.DamagedError, match="is whole; 4, the last, is damaged") as error:
        restored(copy)
    assert "\n" not in str(error.value) and "another --out" in str(error.value)
    assert sorted(copy.rglob("*")) == before
    assert not (copy.parent / "damaged-checkpoints").exists()


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "some file"),
        MemoryError("some file"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: some file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_the_checkpoints_fault_is_not_taken_for_damage(copy, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(checkpoint.Path, "read_bytes", refuse)
    with pytest.raises(type(error), match="some file"):
        restored(copy)
    assert (copy / "4").exists()


def test_arrays_of_another_model_are_named(copy):
    params, opt_state = tree(0)
    more = params | {"more": jnp.zeros(2)}
    with checkpoint.open_manager(copy) as manager:
        with pytest.raises(checkpoint.DamagedError, match=r"params: it and .* differ in more"):
            checkpoint.restore(manager, more, opt_state, Place(line=0), 1, {"seed": 0})


@pytest.mark.parametrize("content", ["{}", "[4]", '{"row": 4}', "\xff"])
def test_a_place_that_is_none_is_damage(copy, content):
    [place] = (copy / "4" / "data").glob("process*.json")
    place.write_text(content, encoding="latin-1")
    assert restored(copy) == 2


def test_data_in_memory_needs_no_place(tmp_path):
    path = written(tmp_path / "run" / "checkpoints", place="next_index")
    shutil.rmtree(path / "4" / "data")
    shutil.rmtree(path / "4" / "readers")
    assert restored(path, place="next_index") == 4


# ---------------------------------------------------------------------------------------------
# Earlier versions, other places


def test_scores_of_earlier_versions_in_a_flat_dictionary(tmp_path):
    path = tmp_path / "run" / "checkpoints"
    params, (nothing, state) = tree(4)
    flat = by_path(state["alignment"])
    assert list(flat) == ["layers/0/mlp/kernel"]
    with checkpoint.open_manager(path) as manager:
        old = (nothing, state | {"alignment": flat})
        checkpoint.save(manager, 4, params, old, Place(line=4), 1, {"seed": 0})
    assert restored(path) == 4


def test_what_an_earlier_version_did_not_write_is_not_compared(copy, capsys):
    for step in "24":
        shutil.rmtree(copy / step / "sums")
        old = {"seed": 0, "data": "/elsewhere", "unigram_entropy": 3.1547}
        (copy / step / "config" / "metadata").write_text(json.dumps(old))
    assert restored(copy, {"seed": 0, "data digest": "0123"}) == 4
    assert "of an earlier version, has no data digest to compare" in capsys.readouterr().err


def test_what_differs_is_named_and_nothing_is_passed_over(copy):
    with pytest.raises(checkpoint.ConfigurationError, match="seed 0 there, 1 here"):
        restored(copy, {"seed": 1})
    assert sorted(entry.name for entry in copy.iterdir()) == ["2", "4"]


@pytest.mark.parametrize("part", ["[1]", "a*", "b?", "back\\slash", "by\udcfftes"])
def test_a_folder_that_checkpoints_cannot_be_read_from_is_refused(tmp_path, part):
    with pytest.raises(SettingsError, match="can't be read back"):
        folder.claim(tmp_path / part / "run", False, "llama")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------
# The trainer


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """To compile sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=1))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(WORDS, k=8000)))
    return path


def options(corpus, out, *more):
    common = "--preset tiny --batch-size 8 --seq-len 16 --magma --checkpoint-every 2 --log-every 1"
    return [*common.split(), "--data", str(corpus), "--out", str(out), *more]


@pytest.fixture(scope="module")
def ten(corpus, tmp_path_factory):
    """A run of ten steps, whose rate rises during the first four."""
    out = tmp_path_factory.mktemp("ten") / "run"
    assert train.main(options(corpus, out, "--steps", "10", "--warmup", "4")) == 0
    return out


def final(out, step):
    """The arrays' checksums and the place in the data of a checkpoint."""
    place = out / "checkpoints" / str(step)
    assert checkpoint.complete(out / "checkpoints")[0] == step
    sums = json.loads((place / "sums" / "metadata").read_text())
    [data] = (place / "data").glob("process*.json")
    return sums, json.loads(data.read_text())


def other_last_digit(load):
    """Another CPU or number of threads may round the entropy otherwise."""

    def load_there(*args, **kwargs):
        data = load(*args, **kwargs)
        return dataclasses.replace(data, unigram_entropy=np.nextafter(data.unigram_entropy, 9))

    return load_there


def test_a_finished_run_is_made_longer_exactly(ten, corpus, tmp_path, capsys, monkeypatch):
    """Both schedules have the same rates up to their peak at step 4: so have both runs."""
    out = tmp_path / "run"
    assert train.main(options(corpus, out, "--steps", "5", "--warmup", "4")) == 0
    capsys.readouterr()
    # The warm-up stays, and the data may lie elsewhere: its digest says what it is.
    moved = shutil.copy(corpus, tmp_path / "moved.txt")
    monkeypatch.setattr(text, "load", other_last_digit(text.load))
    assert train.main(options(moved, out, "--steps", "10", "--resume")) == 0
    printed = capsys.readouterr().out
    assert f"{out}: from step 5 to 10" in printed
    assert (
        "after step 5 the learning rate follows the schedule of 10 steps; until then it followed "
        "the one of 5 steps" in printed
    )
    assert final(out, 10) == final(ten, 10)
    for name in ("loss", "learning_rate", "alignment"):
        assert [record[name] for record in metrics.read(out)] == [
            record[name] for record in metrics.read(ten)
        ]

    # Without --steps it is finished; fewer than are done are refused; others differ as ever.
    assert train.main(options(corpus, out, "--resume")) == 0
    assert "from step 10 to 10" in capsys.readouterr().out
    for more, message in (
        (["--steps", "9"], f"--steps 9 is less than the 10 that the run in {out} has done"),
        (["--steps", "10", "--warmup", "3"], "warmup 4 there, 3 here"),
        (["--steps", "12", "--seed", "3"], "seed 0 there, 3 here"),
    ):
        assert train.main(options(corpus, out, *more, "--resume")) == 2
        [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
        assert message in line
    assert final(out, 10) == final(ten, 10)


def test_a_run_that_lost_its_last_checkpoint_ends_as_if_it_had_not(ten, corpus, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(ten, out)
    DAMAGES["cut short"](out / "checkpoints" / "10")
    again = options(corpus, out, "--steps", "10", "--warmup", "4", "--resume")
    assert train.main(options(corpus, out, "--resume")) == 0  # as long as the one before says
    printed = capsys.readouterr()
    assert f"{out}: from step 8 to 10" in printed.out
    [line] = [line for line in printed.err.splitlines() if line.startswith("warning: ")]
    assert "checkpoint 10 is damaged" in line
    assert final(out, 10) == final(ten, 10)

    for step in (out / "checkpoints").iterdir():
        shutil.rmtree(step / "opt_state")
    assert train.main(again) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no checkpoint in ")

    shutil.rmtree(out / "checkpoints")
    (out / metrics.FILE).write_bytes(b"\0" * 50 + b"\n[1]\n" + (out / metrics.FILE).read_bytes())
    assert train.main(again) == 0  # as a run that was killed before its first checkpoint
    assert "holds no checkpoint: the run starts again from step 0" in capsys.readouterr().err
    assert final(out, 10) == final(ten, 10)


def test_other_data_is_refused_wherever_it_lies(ten, corpus, tmp_path, capsys):
    corpus.write_text((text := corpus.read_text()) + " more")
    try:
        assert train.main(options(corpus, ten, "--steps", "10", "--resume")) == 2
    finally:
        corpus.write_text(text)
    [line] = capsys.readouterr().err.splitlines()
    assert "data digest" in line and "warmup" not in line


def test_settings_are_on_file_and_every_resume_is_added(ten, corpus, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(ten, out)
    assert train.main(options(corpus, out, "--steps", "10", "--resume", "--accumulate", "1")) == 0
    first = json.loads((ten / folder.SETTINGS).read_text())
    settings = json.loads((out / folder.SETTINGS).read_text())
    assert {name: settings[name] for name in first if name != "resumed"} == {
        name: value for name, value in first.items() if name != "resumed"
    }
    assert settings["options"]["learning_rate"] == 3e-3  # as resolved
    assert settings["options"]["warmup"] == 4
    assert settings["from_step"] == 0
    assert settings["devices"]["count"] == jax.device_count()
    assert settings["versions"]["jax"] == jax.__version__
    assert settings["versions"].keys() >= {"python", "magma_optax", "optax", "flax"}
    assert settings["command"].startswith("python -m examples.llama.train --preset tiny ")
    assert [again["from_step"] for again in settings["resumed"]] == [10]
    assert "--resume" in settings["resumed"][0]["command"]

    (out / folder.SETTINGS).write_text("{")
    folder.write_settings(out, "examples.llama.train", [], 10)
    assert json.loads((out / folder.SETTINGS).read_text())["from_step"] == 10
    assert (out / f"damaged-{folder.SETTINGS}").read_text() == "{"
