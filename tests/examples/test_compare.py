"""The comparison: its verdict on made-up runs, and the command on a small text."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
from trainers import refusal, write_corpus

from examples.kit import records
from examples.llama import compare, verdict
from examples.paper import RESULTS
from examples.paper.search import RATIO

# Losses at the middle of three rates by arm and seed; the outer rates are 0.1 worse.
SETTLED = {
    "adam": [2.00, 2.01, 2.00, 1.99],
    "adam+magma": [1.90, 1.91, 1.90, 1.89],
    "adam+constant": [1.90, 1.91, 1.90, 1.89],
    "adam+skip": [2.10, 2.11, 2.10, 2.09],
}


def run(arm, rate, seed, loss):
    return {
        "settings": {"arm": arm, "learning_rate": rate, "seed": seed},
        "results": {"valid_loss": loss},
    }


def runs(changes=None, edge=()):
    """Records of a search of each arm and of its fresh seeds."""
    found = []
    for arm, losses in (SETTLED | (changes or {})).items():
        found += [run(arm, 1.0, seed, loss) for seed, loss in enumerate(losses)]
        sides = [RATIO] if arm in edge else [RATIO, 1 / RATIO]
        found += [run(arm, side, 0, losses[0] + 0.1) for side in sides]
    return found


def shifted(by, spread=0.001):
    """Losses about `by` below Adam's, seed by seed."""
    return [2.0 - by, *(loss - by + spread * (n - 1) for n, loss in enumerate(SETTLED["adam"][1:]))]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"adam+magma": shifted(0.2), "adam+constant": shifted(0.1, 0.002)},
            "Use Magma: it ends 0.",
        ),
        (
            {"adam+magma": shifted(0.1), "adam+constant": shifted(0.2, 0.002)},
            "Use the constant: it ",
        ),
        ({"adam+magma": shifted(0.1), "adam+constant": shifted(0.1, 0.01)}, "Shrinking the body's"),
        ({"adam+magma": shifted(-0.1), "adam+constant": shifted(0.0, 0.01)}, "Do not use Magma"),
        ({"adam+magma": shifted(0.0, 0.01), "adam+constant": shifted(0.0, 0.02)}, "Not enough ev"),
        (
            {"adam+magma": shifted(0.1), "adam+constant": shifted(0.1, 0.2)},
            "not enough is known of",
        ),
    ],
)
def test_the_sentence(changes, says):
    assert says in verdict.judge(runs(changes), "adam").sentence


def test_a_verdict_waits_for_interior_rates_and_runs():
    sentence = verdict.judge(runs(edge=["adam+magma"]), "adam").sentence
    assert "the best learning rate of adam+magma is the lowest or the highest" in sentence
    without = [r for r in runs() if r["settings"]["arm"] != "adam+constant"]
    assert "adam+constant has no run" in verdict.judge(without, "adam").sentence
    one = [r for r in runs() if r["settings"]["seed"] < 2]
    assert "1 fresh seed(s) say nothing of chance" in verdict.judge(one, "adam").sentence
    assert "no run" in verdict.judge([], "adam").sentence


def test_a_verdict_waits_for_all_that_was_asked_for():
    names = ["adam", "adam+magma", "adam+constant", "adam+constant/2", "adam+skip"]
    found = runs({"adam+magma": shifted(0.2)})
    assert "adam+constant/2 has no run" in verdict.judge(found, "adam", names, 3).sentence
    names.remove("adam+constant/2")
    assert "has 3 of 4 fresh seeds; repeat" in verdict.judge(found, "adam", names, 4).sentence
    assert "Use Magma" in verdict.judge(found, "adam", names, 3).sentence
    older = {"adam+magma": shifted(0.2), "adam+constant/2": [1.0, 1.0]}
    old = runs(older, edge=["adam+constant/2"])
    assert verdict.judge(old, "adam", names, 3) == verdict.judge(found, "adam", names, 3)


def test_skip_update_is_named_where_it_gains():
    changes = {"adam+magma": shifted(0.1), "adam+skip": shifted(0.5, 0.002)}
    assert "SkipUpdate alone ends 0.500 below adam" in verdict.judge(runs(changes), "adam").sentence
    assert "SkipUpdate" not in verdict.judge(runs(), "adam").sentence


def test_the_verdict_is_said_on_a_full_disk(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare.Figure, "savefig", full)
    task = SimpleNamespace(data="a_$_and_$5.txt")  # no formula
    sweep = SimpleNamespace(records=runs(), task=task)
    names = ["adam", "adam+magma", "adam+constant", "adam+skip"]
    compare.conclude(sweep, names, 3, tmp_path)
    printed = capsys.readouterr()
    assert verdict.judge(runs(), "adam").sentence in printed.out
    assert "No space left on device" in printed.err


def test_the_plain_constant_is_tuned_first():
    args = compare.make_parser().parse_args(["--tune-multiplier"])
    assert compare.names_of(args)[2:6] == [f"adam+constant{x}" for x in ("", "/4", "/2", "*2")]


def test_differences_are_paired_and_leave_out_the_seed_that_chose():
    found = verdict.judge(runs({"adam+magma": [1.0, 1.91, 1.92, 1.90]}), "adam")
    magma = found.differences[0]
    assert magma.by_seed == pytest.approx({1: -0.10, 2: -0.08, 3: -0.09})
    # Student's t with 2 degrees of freedom at 97.5 %: 4.3027.
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (magma.low, magma.mean, magma.high) == pytest.approx((-0.09 - half, -0.09, -0.09 + half))
    assert "| adam+magma - adam | -0.1000, -0.0800, -0.0900 | -0.0900 |" in verdict.table(found)


def test_of_several_constants_the_best_is_the_control():
    tuned = {"adam+constant/2": shifted(0.3)}
    assert verdict.judge(runs(tuned), "adam").constant == "adam+constant/2"


def test_a_diverged_seed_is_no_reason_to_fail():
    found = verdict.judge(runs({"adam+magma": [1.9, math.inf, 1.9, 1.89]}), "adam")
    assert found.differences[0].by_seed.keys() == {2, 3}
    assert "adam+magma diverged from a fresh seed" in found.sentence
    json.dumps(dataclasses.asdict(found), allow_nan=False)


# ---------------------------------------------------------------------------------------------
# The command


def test_a_comparison_ends_with_a_verdict_and_repeated_does_nothing(tmp_path, capsys):
    text, out = write_corpus(tmp_path), tmp_path / "out"
    argv = ["--data", str(text), "--steps", "6", "--batch-size", "4", "--seq-len", "16"]
    argv += ["--seeds", "2", "--reach", "2", "--out", str(out)]
    assert compare.main(argv) == 0
    printed = capsys.readouterr().out
    found = json.loads((out / "verdict.json").read_text())
    assert printed.strip().splitlines()[-1] == found["sentence"]
    assert set(found["rates"]) == {"adam", "adam+magma", "adam+constant", "adam+skip"}
    assert (out / "curves.png").stat().st_size > 1000
    written = (out / "records.jsonl").read_bytes()
    first, *_ = records.read(out / "records.jsonl")
    assert first["settings"]["experiment"] == "llama_compare" and first["settings"]["digest"]

    assert compare.main(argv) == 0
    assert (out / "records.jsonl").read_bytes() == written
    # Another text of the same name is other data.
    text.write_text(text.read_text()[::-1])
    task = compare.make_task(compare.make_parser().parse_args(argv), "cpu")
    assert task.digest != first["settings"]["digest"]


def test_each_optimizer_has_the_arms():
    for name in compare.OPTIMIZERS:
        assert {
            f"{name}{end}" for end in ("", "+magma", "+skip", "+constant")
        } <= compare.ARMS.keys()
    args = compare.make_parser().parse_args(["--optimizer", "muon", "--tune-multiplier"])
    assert compare.names_of(args) == [
        "muon", "muon+magma", "muon+constant", "muon+constant/4", "muon+constant/2",
        "muon+constant*2", "muon+skip",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (f"--out {RESULTS}", "is where the package keeps its own records; name another"),
        (f"--out {RESULTS}/mine", "is where the package keeps its own records; name another"),
        ("--out pyproject.toml", "is a file; name a folder"),
        ("--data nowhere.txt", "nowhere.txt"),
        ("--optimizer sgd", "invalid choice: 'sgd'"),
        ("--seeds 0", "must be at least 1"),
    ],
)
def test_wrong_options_are_one_line(capsys, wrong, message):
    assert message in refusal(capsys, compare.main, wrong.split())
