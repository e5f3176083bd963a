"""Numbers on the page of the white-noise score follow from its formulas or from the records."""

import re

import numpy as np
import pytest
from test_readme import ROOT

from magma_optax import mean_multiplier

recorded_scores = pytest.importorskip("examples.paper.recorded_scores")

from examples.kit import records  # noqa: E402
from examples.kit.optimizers import MOMENTUM_DECAYS  # noqa: E402
from examples.paper import RESULTS, alignment_report, white_noise  # noqa: E402

PAGE = (ROOT / "docs/white_noise.md").read_text()
MEASURED = RESULTS / "alignment_40m.jsonl"
RATES = {"adam": 1e-3, "muon": 4e-3}


def rows(head):
    """The cells of the table whose first line begins with `head`."""
    [table] = re.findall(rf"^\| {re.escape(head)} .*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_recorded_scores():
    """If records were added: python -m examples.paper.recorded_scores prints the table."""
    assert recorded_scores.table() in PAGE


def test_what_is_said_about_the_records():
    means = {group: sum(s) / len(s) for group, s in recorded_scores.grouped().items()}
    away = [
        abs(mean - group.white_noise)
        for group, mean in means.items()
        if group.blocks.startswith("matrices") and group.temperature == 2
    ]
    assert max(away) < 0.004 and sum(x < 0.00105 for x in away) > len(away) / 2
    files = ("llama_40m.jsonl", "llama_60m.jsonl")
    runs = [r for name in files for r in records.read(RESULTS / name)]
    runs = [r for r in runs if r["settings"]["arm"] in ("adam+magma", "adam+damping")]
    lowest, second = sorted(runs, key=lambda r: r["results"]["alignment"])[:2]
    assert lowest["settings"]["learning_rate"] == 8e-3
    assert f"{lowest['results']['valid_loss']:.2f}" == "5.27"
    assert f"Without it the lowest is {second['results']['alignment']:.4f}." in PAGE
    ablations = records.read(RESULTS / "ablations_nano.jsonl")
    scored = [r["results"]["curve"] for r in ablations if r["results"].get("alignment")]
    again = len(scored) - len({str(curve) for curve in scored})
    assert f"{again} of the runs of the 0.13M Llama stand there once more" in " ".join(PAGE.split())
    resnet = records.read(RESULTS / "negative_control.jsonl")
    losses = [r["results"]["train_loss_last"] for r in resnet if r["results"]["alignment"]]
    assert max(losses) < 0.01


def test_the_formula_by_decay():
    for cells in rows("$b_1$"):
        b1 = float(cells[0])
        cosine = white_noise.noise_cosine(b1)
        found = [cosine, white_noise.score(cosine), mean_multiplier(b1)]
        assert cells[1:] == [f"{x:.4f}" for x in found]


def test_what_another_score_says():
    for cells in rows("$\\cos(\\mu_{t-1}, g_t)$"):
        now = white_noise.cosine_now(float(cells[0]), 0.9)
        ratio = white_noise.signal_to_noise(float(cells[0]), 0.9)
        expected = [f"{now:.3f}", f"{white_noise.score(now):.4f}", f"{ratio:.3f}"]
        assert cells[1:3] == expected[:2]
        assert cells[3] == ("no noise" if float(cells[0]) == 1 else expected[2])
    edge = white_noise.score(white_noise.cosine_now(0.1, 0.9))
    assert 0.001 < edge - white_noise.score(white_noise.noise_cosine(0.9)) < 0.0012


def test_young_momentum_and_elements():
    for b1, steps in ((0.9, 19), (0.95, 39)):
        limit = white_noise.noise_cosine(b1)
        assert f"after {steps} " in PAGE
        assert white_noise.noise_cosine(b1, steps) < 1.01 * limit
        assert white_noise.noise_cosine(b1, steps - 1) > 1.01 * limit
    assert f"{white_noise.score_of_elements(0.9):.4f} instead of\n0.5543" in PAGE


def test_what_was_measured_is_on_the_page():
    """If the run was made: python -m examples.paper.alignment --size 40m --report prints it."""
    found = records.read(MEASURED)
    shown = alignment_report.tables(found).split("\n\n") if found else []
    assert all(part in PAGE for part in shown if part.startswith("|"))
    assert ("images/alignment.png" in PAGE) == bool(found)


def test_what_is_said_about_what_was_measured():
    found = records.read(MEASURED)
    runs = {base: alignment_report.select(found, measured="run", base=base) for base in RATES}
    still = {base: alignment_report.select(found, measured="frozen", base=base) for base in RATES}
    excess, lost = {}, {}
    for base, points in runs.items():
        for record in points:
            step, results, b1 = record["settings"]["step"], record["results"], MOMENTUM_DECAYS[base]
            now, before = (np.array(list(results[name].values())) for name in ("now", "before"))
            assert len(now) == 56
            noise = white_noise.score(white_noise.noise_cosine(b1))
            excess[base, step] = np.mean(white_noise.score(now)) - noise
            assert step < 150 or before.mean() < 0
            if step == 50:
                kept = b1 * np.sqrt((1 - before**2) / (1 - now**2))
                assert excess[base, step] < 0
                lost[base] = round(100 * (1 - kept.mean()))
    assert f"loses {lost['muon']} to {lost['adam']} %" in PAGE
    assert f"{max(excess.values()):.3f} at most" in PAGE
    assert f"by {excess['muon', 600]:.3f} at step 600" in PAGE
    assert f"Adam's is above by {excess['adam', 600]:.3f}" in PAGE
    assert max(abs(excess[base, 1500]) for base in RATES) < 0.0005
    for step in (600, 900, 1200, 1500):
        means = [
            alignment_report.mean(record["results"]["before"])
            for base in ("muon", "adam")
            for record in runs[base]
            if record["settings"]["step"] == step
        ]
        assert means[0] < means[1] < 0

    ratios = {
        base: np.array([alignment_report.mean_ratio(r["results"]) for r in records_]).reshape(
            3, 4, 2
        )
        for base, records_ in still.items()
    }
    growth = np.stack([x[:, 1:, 0] / x[:, :-1, 0] for x in ratios.values()])
    assert f"{growth.min():.1f} to {growth.max():.1f} times the ratio" in PAGE
    falls = ratios["adam"][:, 1, 0]
    assert f"from {falls[0]:.2f} to {falls[-1]:.3f} on Adam" in PAGE
    equal = 65_536 / falls  # where it is 1, if it grows with the batch
    assert equal[0] == pytest.approx(15e3, rel=0.05) and equal[-1] == pytest.approx(0.9e6, rel=0.05)
    for x in ratios.values():
        assert x[2, 1, 0] > 8 * x[2, 1, 1]
    against = ratios["muon"][:, :, 0] / ratios["adam"][:, :, 0]
    assert f"Muon has {against.min():.1f} to {against.max():.1f} times" in PAGE


def test_what_is_said_about_matrices_and_layers():
    found = records.read(MEASURED)
    for base in RATES:
        later = alignment_report.later(alignment_report.select(found, measured="run", base=base))
        end = alignment_report.select(found, measured="frozen", base=base, step=1500, rows=256)[0]
        for of, first in (
            (alignment_report.kind_of, ["v", "o"]),
            (alignment_report.layer_of, ["0"]),
        ):
            before = alignment_report.mean_by(of, alignment_report.over_points(later, "before"))
            ratio = alignment_report.mean_by(of, end["results"]["signal_to_noise"])
            assert sorted(before, key=before.get)[: len(first)] == first
            assert sorted(ratio, key=ratio.get, reverse=True)[: len(first)] == first
        now = alignment_report.over_points(later, "now")
        if base == "adam":
            kinds = alignment_report.mean_by(alignment_report.kind_of, now)
            away = [abs(x - white_noise.noise_cosine(0.9)) for k, x in kinds.items() if k != "v"]
            assert max(away) < 0.002
