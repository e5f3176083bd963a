"""The quadratics: the problem as stated, the arms against each other, and the command line."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.kit import records
from examples.paper import RESULTS
from examples.paper import figure4_quadratics as quadratics
from examples.paper.figure4_quadratics import EIGENVALUES

every_case = pytest.mark.parametrize("case", EIGENVALUES)
TINY = "--steps 50 --seeds 2 --rates 3 --cases grouped --rows 2 --schedules constant".split()


def design(case, seed=0):
    return quadratics.design(jnp.array(EIGENVALUES[case], jnp.float32), jax.random.key(seed))


def weights(seed=0):
    drawn = jax.random.normal(jax.random.key(seed), (3, 3))
    return {str(b): drawn[b] for b in range(3)}


@every_case
def test_each_block_has_the_stated_eigenvalues(case):
    with jax.enable_x64(True):
        x = np.asarray(design(case), np.float64)
    np.testing.assert_allclose(x, np.swapaxes(x, 1, 2), atol=1e-4)
    np.testing.assert_allclose(np.linalg.eigvalsh(x @ x), EIGENVALUES[case], rtol=2e-4)


def test_both_cases_have_one_spectrum_and_rotations_differ_by_block_and_seed():
    grouped, interleaved = (sorted(itertools.chain(*e)) for e in EIGENVALUES.values())
    assert grouped == interleaved == [1, 2, 3, 99, 100, 101, 4998, 4999, 5000]
    x = design("interleaved")
    assert not np.allclose(x[0] / x[0].max(), x[1] / x[1].max(), atol=0.01)
    assert not np.allclose(x, design("interleaved", seed=1), rtol=0.01)


@every_case
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_mean_gradient_over_all_choices_of_rows_is_the_gradient(case, rows):
    x, w = design(case), weights()
    choices = list(itertools.combinations(range(9), rows))
    seen = np.zeros((len(choices), 9), bool)
    for row, choice in zip(seen, choices, strict=True):
        row[list(choice)] = True
    gradient = jax.vmap(jax.grad(quadratics.minibatch_loss), (None, None, 0))
    drawn = gradient(w, x, jnp.asarray(seen.reshape(-1, 3, 3)))
    for block, full in jax.grad(quadratics.loss)(w, x).items():
        np.testing.assert_allclose(drawn[block].mean(axis=0), full, rtol=1e-4, atol=1e-2)
        hessian_times_w = x[int(block)] @ x[int(block)] @ w[block]
        np.testing.assert_allclose(full, hessian_times_w, rtol=1e-4, atol=1e-2)


def test_rows_are_drawn_without_replacement_and_equally_often():
    """Each of 9 counts of 3000 draws within 5 standard deviations."""
    seen = np.asarray(quadratics.draw_rows(jax.random.key(0), 3, 3000)).reshape(-1, 9)
    assert (seen.sum(axis=1) == 3).all()
    assert (np.abs(seen.sum(axis=0) - 1000) < 5 * np.sqrt(3000 / 3 * 2 / 3)).all()


@pytest.mark.parametrize(("arm", "base"), [("constant", "adamw"), ("constant_mask", "skip_update")])
def test_one_constant_for_all_blocks_is_another_learning_rate(arm, base):
    """So the controls that say more take a constant for each block. To float32's rounding."""

    @functools.partial(jax.jit, static_argnums=0)
    def updates(arm, rate):
        make = quadratics.optimizer
        tx = make(arm, rate, jax.random.key(0), jnp.full(3, 0.25), (0.9, 0.999))
        state, seen = tx.init(weights()), []
        for step in range(4):
            update, state = tx.update(weights(step), state, weights())
            seen.append(update)
        return seen

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5),
        updates(arm, 0.04),
        updates(base, 0.01),
    )


def test_the_summary_takes_the_rate_of_lowest_median_and_knows_the_edge():
    final = np.array([[3.0, 1.0, np.nan], [3.0, 2.0, 1.0], [3.0, 9.0, np.nan]])  # (seeds, R)
    result = quadratics.summary(np.array([0.1, 0.2, 0.4]), final[..., None])
    assert (result["best"], result["rate"], result["interior"]) == (1, 0.2, True)
    np.testing.assert_allclose(10 ** np.array(result["log10_loss"]), [1, 2, 9], rtol=2e-3)
    assert not quadratics.summary(np.array([0.2, 0.4]), final[:, 1:, None])["interior"]


def test_the_command_records_skips_what_is_recorded_and_draws(tmp_path, capsys):
    out = tmp_path / "new" / "quadratics.jsonl"
    assert quadratics.main([*TINY, "--out", str(out)]) == 0
    written = out.read_bytes()
    [record] = records.read(out)
    assert record["settings"]["case"] == "grouped"
    assert record["results"].keys() == set(quadratics.ARMS)
    assert all(0.5 < s < 0.6 for s in record["results"]["magma"]["score"])
    assert "Magma / AdamW" in capsys.readouterr().out

    assert quadratics.main([*TINY, "--out", str(out)]) == 0
    assert out.read_bytes() == written
    assert "1 of 1 settings are in" in capsys.readouterr().out

    assert quadratics.main(["--plot", "--out", str(out), "--images", str(tmp_path)]) == 0
    assert (tmp_path / "quadratics_ratios.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 30", "must be a multiple of 25"),
        ("--rows 10", "invalid choice: 10"),
        ("--lowest-rate 0", "must be more than 0"),
        ("--lowest-rate 2 --highest-rate 1", "--lowest-rate 2.0 must be below 1.0"),
        ("--plot --out no/such/file", "no records in no/such/file"),
        ("--full --steps 25", "--steps does nothing beside --full"),
        ("--images figures", "--images does nothing without --plot"),
        ("--out s3://bucket/records", "'s3://bucket/records' is an address"),
    ],
)
def test_a_wrong_option_is_one_line(options, message, capsys):
    try:
        status = quadratics.main(options.split())
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


def test_the_committed_records_are_whole_and_small():
    path = RESULTS / "quadratics.jsonl"
    assert path.stat().st_size < 200_000
    done = records.read(path)
    names = ("case", "rows", "schedule", "steps", "betas")
    settings = [json.dumps([r["settings"][name] for name in names]) for r in done]
    assert len(settings) == len(set(settings))
    for record in done:
        if not quadratics.at_floor(record):
            assert all(result["interior"] for result in record["results"].values())


def test_of_two_records_of_a_setting_the_one_of_more_seeds_is_drawn():
    records = [{"settings": {"case": c, "seeds": n}} for c, n in [("a", 60), ("b", 10), ("a", 10)]]
    drawn = [record["settings"] for record in quadratics.most_seeds(records)]
    assert sorted(drawn, key=str) == [{"case": "a", "seeds": 60}, {"case": "b", "seeds": 10}]
