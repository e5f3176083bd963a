"""Which runs a fair comparison still needs."""

import dataclasses
import math

import pytest
from paper_records import record

from examples.paper.search import EdgeError, Run, Search, best, missing, missing_of_all


def play(search, loss, limit=50):
    """Runs a search against a function (rate, seed) -> loss; returns its runs and records."""
    found, runs = [], []
    while todo := missing(search, found):
        assert len(runs) < limit
        runs.append(todo[0])
        found.append(record(*dataclasses.astuple(todo[0])[:2], loss(todo[0]), todo[0].seed))
    return runs, found


def valley(rate):
    return lambda run: abs(math.log2(run.learning_rate / rate))


def test_the_search_begins_with_three_rates_in_steps_of_two():
    runs = missing(Search("a", 0.004), [])
    assert runs == [Run("a", 0.004, 0), Run("a", 0.008, 0), Run("a", 0.002, 0)]


def test_an_interior_best_rate_gets_the_other_seeds():
    runs, found = play(Search("a", 0.004), valley(0.004))
    assert runs[3:] == [Run("a", 0.004, 1), Run("a", 0.004, 2)]
    assert best(found, "a").interior


@pytest.mark.parametrize("optimum", [0.00025, 0.001, 0.002, 0.008, 0.064])
def test_the_search_follows_the_edge_until_the_best_rate_is_inside(optimum):
    runs, found = play(Search("a", 0.004), valley(optimum))
    rates = [run.learning_rate for run in runs if run.seed == 0]
    assert best(found, "a").learning_rate == optimum
    assert {optimum / 2, optimum, optimum * 2} <= set(rates)
    steps = abs(round(math.log2(optimum / 0.004)))
    assert len(rates) == 3 + steps  # none too many
    assert [run.seed for run in runs[-2:]] == [1, 2]


def test_the_search_ends_at_its_reach_without_seeds_or_a_best_rate():
    runs, found = play(Search("a", 0.004, reach=8), lambda run: -run.learning_rate)
    assert max(run.learning_rate for run in runs) == 0.032
    assert {run.seed for run in runs} == {0}
    with pytest.raises(EdgeError, match=r"a: the best learning rate, 0\.032, lies on the edge"):
        best(found, "a")
    assert not best(found, "a", allow_edge=True).interior


def test_a_diverged_rate_is_a_bad_rate():
    def loss(run):
        return math.inf if run.learning_rate > 0.003 else valley(0.001)(run)

    _, found = play(Search("a", 0.004), loss)
    assert best(found, "a").learning_rate == 0.001
    # As read from a file, where infinity is a string.
    text = [record("a", rate, "inf") for rate in (0.002, 0.004, 0.008)]
    assert missing(Search("a", 0.004), text) == [Run("a", 0.001, 0)]
    with pytest.raises(EdgeError):
        best(text, "a")


def test_where_all_rates_diverge_the_search_goes_down_and_ends():
    runs, found = play(Search("a", 0.004, reach=8), lambda run: math.inf)
    assert min(run.learning_rate for run in runs) == 0.0005
    with pytest.raises(EdgeError):
        best(found, "a")


def test_what_is_recorded_is_not_run_again():
    search = Search("a", 0.004)
    runs, found = play(search, valley(0.008))
    for done in range(len(found) + 1):
        todo = missing(search, found[:done])
        assert not set(todo) & set(runs[:done])
        assert todo if done < len(found) else not todo
    for hole in range(3, len(found)):
        assert runs[hole] in missing(search, found[:hole] + found[hole + 1 :])


def test_more_seeds_later_add_only_those():
    _, found = play(Search("a", 0.004, seeds=2), valley(0.004))
    assert missing(Search("a", 0.004, seeds=4), found) == [Run("a", 0.004, 2), Run("a", 0.004, 3)]


def test_other_arms_and_seeds_dont_decide_a_rate():
    found = [record("a", rate, 1.0 + abs(rate - 0.004)) for rate in (0.002, 0.004, 0.008)]
    noise = [record("b", 0.002, 0.0), record("a", 0.002, 0.0, seed=1)]
    assert best(found + noise, "a") == best(found, "a")


def test_a_best_rate_needs_both_neighbours():
    found = [record("a", rate, abs(rate - 0.004)) for rate in (0.001, 0.004, 0.008)]
    with pytest.raises(EdgeError):
        best(found, "a")
    assert missing(Search("a", 0.004), found) == [Run("a", 0.002, 0)]
    with pytest.raises(ValueError, match="b: no run"):
        best(found, "b")


def test_a_fixed_rate_is_not_searched():
    runs, _ = play(Search("a", 1e-3, fixed=True), valley(0.1))
    assert runs == [Run("a", 1e-3, seed) for seed in range(3)]


def test_arms_come_in_the_order_given():
    searches = [Search("b", 0.004), Search("a", 0.004)]
    assert [run.arm for run in missing_of_all(searches, [])] == ["b"] * 3 + ["a"] * 3


def test_two_searches_that_want_a_run_get_it_once():
    searches = [Search("a", 1.0), Search("a", 1.0, fixed=True)]
    runs = missing_of_all(searches, [])
    assert len(runs) == len(set(runs)) == 3
