"""The tables and the figure of an experiment's records."""

import json
import math
import random

import pytest
from matplotlib.figure import Figure
from paper_records import record

from examples.paper import report
from examples.paper.search import summarise


def test_the_table_shows_medians_and_marks_edges():
    found = [record("inside", rate, loss) for rate, loss in [(1, 3.0), (2, 2.0), (4, 3.0)]]
    found += [record("inside", 2, 2.5, 1, alignment=0.5), record("inside", 2, 9.0, 2)]
    found += [record("edge", 1, 1.0), record("edge", 2, 2.0), record("nan", 1, "nan")]
    row = summarise(found, "inside")
    assert (row.median, row.losses) == (2.5, [2.0, 2.5, 9.0])
    best, _, rates = report.tables(found).split("\n\n")
    head, _, *lines = best.splitlines()
    assert head == "| arm | best rate | interior | validation loss | seeds | score |"
    assert lines[0] == "| edge | 1 | **no, edge** | 1.0000 | 1 |  |"
    assert lines[1] == "| inside | 2 | yes | 2.5000 (2.0000 to 9.0000) | 3 | 0.500 |"
    assert lines[2] == "| nan | diverged at every rate |  |  |  |  |"
    assert rates.splitlines()[3] == "| inside | 3.0000 (1) | 2.5000 (3) | 3.0000 (1) | 2 |"
    assert summarise(found, "none") is None
    assert report.tables(found, ["inside", "none"]).count("| inside |") == 2


def test_fresh_seeds_say_how_good_what_seed_0_chose_is(tmp_path, capsys):
    found = [record("a", rate, loss) for rate, loss in [(1, 3.0), (2, 2.0), (4, 3.0)]]
    found += [record("a", 2, loss, seed) for seed, loss in [(1, 2.5), (2, 2.7), (3, 2.6)]]
    found += [record("a", 1, 0.0, seed=1)]  # at a rate that seed 0 didn't choose
    found += [record("b", 1, 1.9), record("b", 1, 2.4, seed=1), record("b", 1, 2.8, seed=2)]
    assert report.fresh_table(found, ["a", "b"], "a").splitlines()[2:] == [
        "| a | 2 | yes | 2.0000 | 2.6000 (2.5000 to 2.7000) | 3 |  |",
        "| b | 1 | **no, edge** | 1.9000 | 2.6000 (2.4000 to 2.8000) | 2 "
        "| -0.100 (1), +0.100 (2) |",
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in found))
    assert report.main([str(file), "--against", "b"]) == 0
    assert "against b, seed by seed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="error: no run of 'c' is recorded; there are a, b"):
        report.main([str(file), "--against", "c"])


def image(arm, rate, seed, loss):
    """A record of an image classifier."""
    accuracies = {"test_loss": 2 * loss, "test_accuracy": 1 - loss, "alignment": None}
    return record(arm, rate, loss, seed, **accuracies)


def test_results_that_are_there_have_a_column():
    found = [image("a", rate, 0, loss) for rate, loss in [(1.0, 0.3), (2.0, 0.1), (4.0, 0.2)]]
    found += [image("a", 2.0, 1, 0.4), image("a", 2.0, 2, 0.2)]
    random.Random(0).shuffle(found)
    assert report.best_table(found, ["a"]).splitlines()[2] == (
        "| a | 2 | yes | 0.2000 (0.1000 to 0.4000) | 0.4000 (0.2000 to 0.8000) "
        "| 80.00 (60.00 to 90.00) | 3 |  |"
    )


def test_more_seeds_choose_by_medians():
    lucky = [image("a", 1.0, 0, 0.1), image("a", 1.0, 1, 0.5), image("a", 1.0, 2, 0.5)]
    found = lucky + [image("a", 2.0, seed, 0.3) for seed in range(3)] + [image("a", 4.0, 0, 0.2)]
    lines = report.rate_table(found, ["a"]).splitlines()
    assert lines[0] == "| arm | 1 | 2 | 4 | lowest at | test accuracy, %, there |"
    assert lines[2] == (
        "| a | 0.5000 (3) | 0.3000 (3) | 0.2000 (1) | 2 **(edge)** | 70.00 (70.00 to 70.00) |"
    )
    found += [image("a", 4.0, seed, 0.4) for seed in (1, 2)]
    assert "| 2 | 70.00" in report.rate_table(found, ["a"])


def test_rates_are_compared_on_seeds_that_all_of_them_have():
    found = [record("a", rate, loss) for rate, loss in [(1.0, 2.2), (2.0, 2.0), (4.0, 2.1)]]
    found.append(record("a", 2.0, 2.5, seed=1))  # a harder seed, which ran at the best rate alone
    line = report.rate_table(found, ["a"]).splitlines()[2]
    assert line == "| a | 2.2000 (1) | 2.2500 (2) | 2.1000 (1) | 2 |"


def test_a_result_says_how_many_runs_have_it():
    found = [record("a", rate, 4.0, perplexity=54.0) for rate in (1.0, 4.0)]
    found += [record("a", 2.0, 3.0, seed, perplexity=50.0 + seed) for seed in (0, 1)]
    found.append(record("a", 2.0, math.inf, seed=2, perplexity=None))
    assert "50.50 (50.00 to 51.00), 2 of 3 runs" in report.best_table(found, ["a"])


def test_no_two_arms_of_a_panel_look_alike():
    names = ["adam", *(f"adam+{n}" for n in range(24))]
    figure = Figure()
    report.draw(figure, [record(name, 1.0, 2.0) for name in names], "a $ and a $")
    (axes,) = figure.axes
    looks = {(x.get_marker(), x.get_color(), x.get_linestyle()) for x in axes.lines}
    assert len(looks) == len(names)


def test_the_figure_has_a_panel_for_each_base():
    names = ["soap", "adam", "muon", "adam+magma", "adam/p=0.5/tau=2", "muon+skip"]
    assert report.families(names) == {
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
    report.draw(figure, found, "task")
    (axes,) = figure.axes
    assert 5.0 < axes.get_ylim()[1] < 9.0
    lines = [line.get_xydata().tolist() for line in axes.lines]
    assert lines == [
        [[1e-3, 4.0], [2e-3, 4.1], [4e-3, 9.0]],
        [[1e-3, 4.0], [1e-3, 4.05]],
        [[2e-3, 5.0]],
        [],
    ]


def test_a_line_goes_through_medians_where_several_rates_have_several_seeds():
    found = [image("a", rate, seed, rate + seed) for rate in (1.0, 2.0) for seed in range(3)]
    found.append(image("a", 4.0, 0, 0.5))
    figure = Figure()
    report.draw(figure, found, "task")
    losses, accuracies = figure.axes
    assert losses.lines[0].get_xydata().tolist() == [[1.0, 2.0], [2.0, 3.0]]
    assert accuracies.get_xlabel().startswith("test accuracy, %")
