"""The linear transformer: the source's function, its values at the start, the arms, the command."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.kit import records
from examples.paper import figure3_heavy_tails as heavy_tails

LOSS_AND_GRADIENT = jax.jit(jax.value_and_grad(heavy_tails.loss))
# Drawn many times: optimized, the Gamma's loops take a fifth of the time.
QUICK_DRAW = jax.jit(heavy_tails.draw, compiler_options={"xla_backend_optimization_level": 1})


def sequences(seed, size=7):
    """A few sequences, written without `draw`: x (B, n+1, d), y (B, n+1)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, heavy_tails.N + 1, heavy_tails.D))
    w = rng.normal(size=(size, heavy_tails.D, 1))
    return x, (x @ w)[..., 0]


def attention_loss(params, x, y):
    """The model of Ahn et al. on whole sequences, in loops over B and L; float64."""
    errors = []
    for x_one, y_one in zip(x, y, strict=True):
        z = np.column_stack([x_one, y_one])  # (n+1, d+1)
        z[-1, -1] = 0
        context = np.eye(heavy_tails.N + 1)
        context[-1, -1] = 0  # Nothing attends to the query.
        for p, q in params:
            p_full, q_full = np.zeros((2, heavy_tails.D + 1, heavy_tails.D + 1))
            p_full[: heavy_tails.D, : heavy_tails.D], q_full[: heavy_tails.D, : heavy_tails.D] = (
                p,
                q,
            )
            p_full[-1, -1] = 1
            scores = z @ q_full @ z.T  # (to, from)
            z = z + scores @ context @ z @ p_full.T / heavy_tails.N
        errors.append((z[-1, -1] + y_one[-1]) ** 2)
    return np.mean(errors)


@pytest.mark.parametrize("seed", range(3))
def test_the_small_matrices_compute_the_attention(seed):
    params = heavy_tails.init(jax.random.key(seed))
    x, y = sequences(seed)
    batch = heavy_tails.reduce_sequences(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    expected = attention_loss(np.asarray(params["PQ"], np.float64), x, y)
    np.testing.assert_allclose(heavy_tails.loss(params, batch), expected, rtol=1e-5)


@pytest.mark.parametrize(("heavy", "loss", "norm"), [(False, 5.38, 9.0), (True, 0.97, 0.45)])
def test_values_at_the_start(heavy, loss, norm):
    """Medians of 20 starts and batches; the stated numbers are of one, so within a tenth.

    The heavy-tailed gradient norm varies fourfold between batches: within a third.
    """
    values = []
    for seed in range(20):
        batch = QUICK_DRAW(jax.random.key(seed), heavy)
        value, gradient = LOSS_AND_GRADIENT(heavy_tails.init(jax.random.key(100 + seed)), batch)
        values.append((value, optax.tree.norm(gradient)))
    median_loss, median_norm = np.median(values, axis=0)
    np.testing.assert_allclose(median_loss, loss, rtol=0.1)
    np.testing.assert_allclose(median_norm, norm, rtol=1 / 3 if heavy else 0.1)


def test_tails_have_one_variance_and_differ_in_the_fourth_moment(monkeypatch):
    """E |x|^2 = d or 1; E |x|^4 / (E |x|^2)^2 = 1 + 2/d, or 1 + 1/0.1 for the Gamma.

    Of the queries, so with one example each.
    """
    monkeypatch.setattr(heavy_tails, "N", 1)
    for heavy, second, kurtosis in [
        (False, heavy_tails.D, 1 + 2 / heavy_tails.D),
        (True, 1.0, 11.0),
    ]:
        query = heavy_tails.draw(jax.random.key(0), heavy, size=100_000)[1]
        squares = np.sum(np.square(query[: heavy_tails.D, 0], dtype=np.float64), axis=0)
        np.testing.assert_allclose(squares.mean(), second, rtol=0.05)
        np.testing.assert_allclose((squares**2).mean() / second**2, kurtosis, rtol=0.15)


def test_the_last_p_has_no_gradient():
    """Nothing reads what it writes, so 25 of the 150 diagonal entries are zero."""
    _, gradient = LOSS_AND_GRADIENT(
        heavy_tails.init(jax.random.key(0)), heavy_tails.draw(jax.random.key(1), False)
    )
    last_p = np.zeros((heavy_tails.LAYERS, 2), bool)
    last_p[-1, 0] = True
    np.testing.assert_array_equal(np.abs(gradient["PQ"]).max(axis=(2, 3)) == 0, last_p)


def test_condition_numbers_of_a_known_hessian(monkeypatch):
    """l = x' H x / 2: the diagonal and the eigenvalues have different ratios."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(150, 150))
    h = h + h.T
    flat = lambda params: params["PQ"].ravel()  # noqa: E731
    monkeypatch.setattr(
        heavy_tails, "loss", lambda params, batch: flat(params) @ batch @ flat(params) / 2
    )
    values = heavy_tails.condition_numbers(
        heavy_tails.init(jax.random.key(0)), jnp.asarray(h, jnp.float32)
    )
    for value, exact in zip(values, [np.diagonal(h), np.linalg.eigvalsh(h)], strict=True):
        np.testing.assert_allclose(value, abs(exact).max() / np.median(abs(exact)), rtol=1e-3)


def test_blocks_are_p_and_q_of_each_layer_or_all_as_one():
    params = heavy_tails.init(jax.random.key(0))

    def moved(arm):
        tx = heavy_tails.optimizer(arm, 0.1, jax.random.key(3), jnp.full((3, 2), 0.5))
        state, seen = tx.init(params), []
        for _ in range(12):
            updates, state = tx.update(params, state, params)
            seen.append(np.asarray(updates["PQ"]) != 0)
        return np.stack(seen)

    assert moved("adam").all() and moved("damping").all() and moved("constant").all()
    for arm in ("magma", "skip_update", "constant_mask"):
        blocks = moved(arm)
        per_block = blocks.any(axis=(3, 4))
        np.testing.assert_array_equal(blocks, per_block[..., None, None] & np.ones((5, 5), bool))
        assert (per_block.any(axis=(1, 2)) & ~per_block.all(axis=(1, 2))).any()  # not one coin
    np.testing.assert_array_equal(moved("skip_update"), moved("magma"))  # the same coins
    single = moved("magma_single").reshape(12, -1)
    assert (single.all(axis=1) == single.any(axis=1)).all() and not single.all()


def test_the_command_records_skips_what_is_recorded_and_draws(tmp_path, capsys, monkeypatch):
    """With few and small matrices and a batch of 2, to compile and run in seconds."""
    for name, size in {"D": 2, "N": 3, "LAYERS": 2, "BATCH": 2}.items():
        monkeypatch.setattr(heavy_tails, name, size)
    monkeypatch.setattr(heavy_tails, "draw", lambda key, heavy: DRAW(key, heavy, 2))
    out = tmp_path / "new" / "heavy_tails.jsonl"
    options = "--tails light --arms constant adam magma --steps 250 --seeds 1 --rates 0.04 0.02"
    run = [*options.split(), "--out", str(out)]
    assert heavy_tails.main(run) == 0
    written = out.read_bytes()
    done = records.read(out)
    assert [record["settings"]["arm"] for record in done] == ["adam", "magma", "constant"]
    assert all(record["settings"]["rates"] == [0.02, 0.04] for record in done)
    assert np.shape(done[1]["results"]["score"]) == (heavy_tails.LAYERS, 2)
    assert np.shape(done[0]["results"]["eigenvalue_over_time"]) == (3, 1)
    capsys.readouterr()

    assert heavy_tails.main(run) == 0
    assert out.read_bytes() == written
    assert capsys.readouterr().out.count("recorded already") == 3
    assert heavy_tails.main(["--plot", "--out", str(out), "--images", str(tmp_path)]) == 0
    assert (tmp_path / "linear_transformer.png").stat().st_size > 1000


DRAW = heavy_tails.draw


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 100", "must be a multiple of 250"),
        ("--rates -1", "must be more than 0"),
        ("--arms sgd", "invalid choice: 'sgd'"),
        ("--arms constant --out no/such/file", "constant needs the record of magma first"),
        ("--plot --out no/such/file", "no records in no/such/file"),
        ("--full --seeds 3", "--seeds does nothing beside --full"),
        ("--images figures", "--images does nothing without --plot"),
    ],
)
def test_a_wrong_option_is_one_line(options, message, capsys):
    try:
        status = heavy_tails.main(options.split())
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


def test_the_hessians_of_a_long_run_take_the_memory_of_one(monkeypatch):
    """As an accelerator does it: 40 times of 24 seeds at once asked for 166 GB of a card."""
    monkeypatch.setattr(heavy_tails, "each", jax.vmap)
    monkeypatch.setattr(heavy_tails, "fixed_batch", lambda heavy: None)
    matrix = lambda params, _: jnp.full((150, 150), jnp.sum(params["PQ"]))  # noqa: E731
    monkeypatch.setattr(
        heavy_tails, "condition_numbers", lambda *a: jnp.linalg.eigvalsh(matrix(*a))[:2]
    )

    def temporary(times):
        params = {"PQ": jnp.zeros((1, times, heavy_tails.LAYERS, 2, heavy_tails.D, heavy_tails.D))}
        compiled = jax.jit(heavy_tails.curvature.__wrapped__).lower(params, True).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8) < 1.1 * temporary(1)
