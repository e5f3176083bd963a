"""The theory: curvature of blocks, both sides of Proposition 1, the descent lemma, the command."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.kit import records
from examples.kit.loss import cross_entropy
from examples.llama.config import LlamaConfig
from examples.llama.model import Llama
from examples.paper import section5_theory as theory
from magma_optax import with_magma

BLOCKS = ("a", "b", "c")
SIZES = {"a": 2, "b": 3, "c": 4}


def random_tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {b: jnp.asarray(scale * rng.normal(size=n), jnp.float32) for b, n in SIZES.items()}


def flat(tree):
    return jnp.concatenate([tree[b] for b in BLOCKS])


def quadratic(seed=0, definite=False):
    """(H, loss): H symmetric, or block-diagonal and positive definite."""
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(9, 9))
    if definite:
        same = np.repeat(BLOCKS, list(SIZES.values()))
        h = np.where(same[:, None] == same, h, 0)
    h = h @ h.T if definite else h + h.T
    return h, lambda w: flat(w) @ jnp.asarray(h, jnp.float32) @ flat(w) / 2


def block_of(h, block):
    start = sum(SIZES[b] for b in BLOCKS[: BLOCKS.index(block)])
    return h[start : start + SIZES[block], start : start + SIZES[block]]


def perceptron(params):
    """A loss with higher derivatives, also between blocks: tanh units on fixed inputs."""
    x = jnp.linspace(-1, 1, 16)[:, None]
    hidden = jnp.tanh(x * params["a"][0] + params["a"][1])
    hidden = jnp.tanh(hidden * params["b"][None] + params["c"][None, :3])
    return jnp.mean((jnp.sum(hidden, axis=1) * params["c"][3] - x[:, 0] ** 2) ** 2)


@pytest.mark.parametrize("p", [0.25, 0.5, 1.0])
def test_the_regularizer_is_the_curvature_of_each_block(p):
    h, loss = quadratic()
    delta = random_tree(1)
    got = theory.geometric_regularizer(loss, random_tree(2), delta, p, BLOCKS)
    for block, value in got.items():
        d = np.asarray(delta[block], np.float64)
        expected = (1 - p) / (2 * p) * d @ block_of(h, block) @ d
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_smoothness_is_the_largest_eigenvalue_of_the_block():
    """Power iteration: to 2 % in 200 steps."""
    h, loss = quadratic()
    for block, got in theory.smoothness(loss, random_tree(2), BLOCKS, steps=200).items():
        largest = np.abs(np.linalg.eigvalsh(block_of(h, block))).max()
        np.testing.assert_allclose(got, largest, rtol=0.02)


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_both_sides_agree_on_a_quadratic(p):
    """No remainder there: within 5 standard errors, below 4 % of the curvature, and rounding.

    At p = 1/2 coins change the sign of a difference alone: without curvature between blocks every
    draw is the mean, and the standard error is zero.
    """
    _, loss = quadratic(definite=True)
    theta, delta = random_tree(2, 0.1), random_tree(1)
    sides = theory.proposition(
        lambda w, _: loss(w), theta, delta, None, p=p, blocks=BLOCKS, draws=4096
    )
    tolerance = 2e-6 * sides["predicted"]
    assert (abs(sides["measured"] - sides["predicted"]) < 5 * sides["error"] + tolerance).all()
    assert (sides["error"] < 0.04 * sides["predicted"]).all()


def test_the_remainder_vanishes_with_the_update():
    """Relative to the curvature it is O(|delta|): an update of an eighth has less than a fourth."""
    sides = theory.proposition(
        lambda w, _: perceptron(w), random_tree(2), random_tree(1, 0.2), None,
        p=0.5, blocks=BLOCKS, draws=2**14,
    )  # fmt: skip
    gap = np.abs(sides["measured"] / sides["predicted"] - 1)
    noise = np.abs(sides["error"] / sides["predicted"])
    assert gap[0] > 5 * noise[0]
    assert gap[-1] < gap[0] / 4 + 5 * noise[-1]
    assert noise[-1] < 0.02


def test_the_descent_terms_with_one_batch_and_equal_scores():
    """Then S = s and rho = s^2: alpha is s, the penalty's ratio s^2 / p, the best decrease's p."""
    h, loss = quadratic(definite=True)
    loss_of = lambda w, scale: scale * loss(w)  # noqa: E731
    params, eta, p = random_tree(2), 0.01, 0.5
    tx = with_magma(optax.sgd(eta), p, rescale=True, score_decay=0.0)
    state = tx.init(params)  # mu is 0.1 g, so every cosine is 1
    got = theory.descent(
        loss_of, params, state, jnp.ones(1), tx=tx, eta=eta, p=p, blocks=BLOCKS, draws=2000
    )
    s = 1 / (1 + np.exp(-1 / 2))
    g = h @ np.asarray(flat(params), np.float64)
    np.testing.assert_allclose(got["alpha"], s, rtol=1e-5)
    np.testing.assert_allclose(got["penalty_ratio"], s**2 / p, rtol=1e-5)
    np.testing.assert_allclose(got["best_decrease_ratio"], p, rtol=1e-5)
    np.testing.assert_allclose(got["descent"], eta * s * g @ g, rtol=1e-5)
    # Within 5 standard errors of coins; the lemma holds, no curvature being between blocks here.
    mean = got["descent"] - (eta * s) ** 2 / (2 * p) * g @ h @ g
    squares = np.array([sum(np.square(x)) for x in np.split(g, [2, 5])])
    error = eta * s * np.linalg.norm(squares) * np.sqrt((1 - p) / p / 2000)
    assert abs(got["decrease"] - mean) < 5 * error
    assert mean > got["descent"] - got["penalty"]
    np.testing.assert_allclose(got["descent"] - got["within"], mean, rtol=1e-5)
    np.testing.assert_allclose(got["between"], 0, atol=1e-5 * got["within"])


@pytest.mark.parametrize(("p", "s"), [(1.0, 1.0), (0.5, 1.0), (0.5, 0.55), (0.9, 0.4)])
@pytest.mark.parametrize("eta", [1e-3, 0.1, 0.5])
def test_the_descent_lemma_misses_curvature_between_blocks(p, s, eta):
    """By eta^2 s^2 g_x g_y H_xy = 4 eta^2 s^2 for l = (x + y)^2 / 2 at (1, 1), whatever p is."""
    sides = theory.counterexample(eta, p, s)
    np.testing.assert_allclose(
        sides["expected_loss"] - sides["bound"], 4 * eta**2 * s**2, rtol=1e-9
    )


def test_the_model_is_the_llama_of_the_example_by_path():
    config = LlamaConfig(11, 8, 16, 2, 1)
    loss, params = theory.make_model(config, seed=0)
    blocks = theory.masked_blocks(params)
    assert len(blocks) == 7
    assert {block.split("/")[2] for block in blocks} == {"self_attn", "mlp"}
    tokens = jnp.arange(10).reshape(2, 5)
    logits = nnx.jit(Llama(config, rngs=nnx.Rngs(0)))(tokens)
    total, count = cross_entropy(logits, tokens)
    got = jax.jit(loss)(params, {"inputs": tokens, "targets": tokens})
    np.testing.assert_allclose(got, total / count, rtol=1e-6)


def tiny_setup(args):
    """In place of the Llama, whose compilation takes half a minute: two matrices and a bias."""

    def loss(params, batch):
        up, down = (params[f"layers/0/mlp/{name}_proj/kernel"] for name in ("up", "down"))
        return jnp.mean((jnp.tanh(batch @ up + params["bias"]) @ down - batch) ** 2)

    rng = np.random.default_rng(args.seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    shapes = {"layers/0/mlp/up_proj/kernel": (3, 5), "layers/0/mlp/down_proj/kernel": (5, 3)}
    params = {path: draw(*shape) for path, shape in shapes.items()} | {"bias": jnp.zeros((1, 5))}
    return loss, params, iter(lambda: draw(args.batch_size, 3), None)


def test_the_command_records_skips_what_is_recorded_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(theory, "setup", tiny_setup)
    out = tmp_path / "new" / "theory.jsonl"
    run = ["--steps", "4", "--every", "2", "--draws", "64", "--out", str(out)]
    assert theory.main(run) == 0
    written = out.read_bytes()
    done = records.read(out)
    of = lambda kind: [r for r in done if r["settings"]["experiment"] == kind]  # noqa: E731
    assert [(r["settings"]["step"], r["settings"]["p"]) for r in of("proposition")] == [
        (step, p) for step in (2, 4) for p in (0.25, 0.5, 0.75)
    ]
    assert len(of("proposition")[0]["results"]["regularizer"]) == 2
    assert [r["settings"]["step"] for r in of("descent")] == [2, 4]
    for r in of("descent"):  # from sigmoid(-1/2)^2 / p to sigmoid(1/2)^2 / p
        assert all(0.286 < x < 0.775 for x in r["results"]["rho_over_p"].values())
    assert "exceeds the bound" in capsys.readouterr().out

    assert theory.main(run) == 0
    assert out.read_bytes() == written
    assert theory.main(["--plot", "--out", str(out), "--images", str(tmp_path)]) == 0
    assert (tmp_path / "theory.png").stat().st_size > 1000

    # Stopped before the lemma's turn.
    first = tmp_path / "first.jsonl"
    first.write_text(out.read_text().splitlines(keepends=True)[0])
    assert theory.main(["--plot", "--out", str(first), "--images", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--width 10", "--width must be a multiple of 4, got 10"),
        ("--survival-probs 0", "must be more than 0"),
        ("--plot --out no/such/file", "no records in no/such/file"),
        ("--images figures", "--images does nothing without --plot"),
    ],
)
def test_a_wrong_option_is_one_line(options, message, capsys):
    try:
        status = theory.main(options.split())
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1
