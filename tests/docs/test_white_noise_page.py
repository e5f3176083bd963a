"""Numbers on the page of the white-noise score follow from its formulas or from the records."""

import re

import pytest
from test_readme import ROOT

from magma_optax import mean_multiplier

recorded_scores = pytest.importorskip("examples.paper.recorded_scores")

from examples.kit import records  # noqa: E402
from examples.paper import RESULTS, alignment_report, white_noise  # noqa: E402

PAGE = (ROOT / "docs/white_noise.md").read_text()
MEASURED = RESULTS / "alignment_40m.jsonl"


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
    runs = [r for r in records.read(RESULTS / "llama_40m.jsonl")]
    runs = [r for r in runs if r["settings"]["arm"] in ("adam+magma", "adam+damping")]
    lowest, second = sorted(runs, key=lambda r: r["results"]["alignment"])[:2]
    assert lowest["settings"]["learning_rate"] == 8e-3
    assert f"{lowest['results']['valid_loss']:.2f}" == "5.27"
    assert f"{second['results']['alignment']:.4f}" == "0.5542"
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
