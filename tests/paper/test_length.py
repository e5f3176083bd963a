"""The gap to Adam against the length of a run, from records."""

import pytest

from examples.kit.figure import Figure
from examples.paper import length


def record(arm, rate, loss, seed=0, steps=100, data="text"):
    settings = {"arm": arm, "learning_rate": rate, "seed": seed, "steps": steps}
    settings |= {"batch_size": 4, "seq_len": 8, "data": data}
    return {"settings": settings, "results": {"valid_loss": loss}}


ADAM = [
    *(record("adam", rate, loss) for rate, loss in ((1.0, 3.5), (2.0, 3.0), (4.0, 3.25))),
    *(record("adam", 2.0, 3.0 + seed / 8, seed) for seed in (1, 2)),
]
MAGMA = [
    *(record("adam+magma", rate, loss) for rate, loss in ((2.0, 3.5), (4.0, 2.5), (8.0, 3.0))),
    record("adam+magma", 4.0, 3.0, seed=2),
]


def test_gaps_are_those_of_seeds_that_both_have():
    [point] = length.points([*ADAM, *MAGMA])
    assert point == length.Point("adam+magma", 3200, "text", (4.0, 2.0), [-0.5, -0.25], True)


@pytest.mark.parametrize("edge", [ADAM[0], MAGMA[2]])
def test_a_rate_on_the_edge_is_told(edge):
    [point] = length.points([r for r in [*ADAM, *MAGMA] if r is not edge])
    assert not point.interior


def test_each_length_and_each_text_is_compared_with_its_own_adam():
    longer = [record("adam", 2.0, 2.0, steps=200), record("c_adam", 2.0, 2.5, steps=200)]
    alone = [record("adam+magma", 2.0, 1.0, steps=400)]
    other = [record("adam", 2.0, 1.0, data="x"), record("adam+magma", 2.0, 1.5, data="x")]
    made = length.points([*longer, *alone, *other, *ADAM, *MAGMA])
    assert [(p.tokens, p.data, p.arm, p.gaps) for p in made] == [
        (3200, "text", "adam+magma", [-0.5, -0.25]),
        (3200, "x", "adam+magma", [0.5]),
        (6400, "text", "c_adam", [0.5]),
    ]


def test_the_figure_has_a_mark_for_each_seed_and_a_line_through_medians():
    longer = [record("adam", 2.0, 2.0, steps=200), record("adam+magma", 2.0, 2.5, steps=200)]
    axes = Figure().subplots()
    length.draw(axes, length.points([*ADAM, *MAGMA, *longer]))
    assert axes.lines[0].get_xydata().tolist() == [[3200, -0.375], [6400, 0.5]]
    short, long = axes.collections
    assert short.get_offsets().tolist() == [[3200, -0.5], [3200, -0.25]]
    assert short.get_facecolors().size and not long.get_facecolors().size


def test_the_command_prints_the_table_and_draws(tmp_path, capsys):
    assert length.main(["--figure", str(tmp_path / "gap.png")]) == 0
    assert "| 98 M | corpus | adam+magma | 0.004 | 0.001 | yes | " in capsys.readouterr().out
    assert (tmp_path / "gap.png").stat().st_size
