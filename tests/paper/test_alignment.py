"""How gradients agree with their moments: closed forms, measures, the command, what it shows."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.kit import records
from examples.paper import alignment, alignment_report, cosines, white_noise
from examples.paper.tasks.llama import Task
from examples.paper.trainer import Pass

NAMES = {f"self_attn/{kind}_proj": (3, 3) for kind in "qkvo"}
NAMES |= {"mlp/gate_proj": (3, 5), "mlp/up_proj": (3, 5), "mlp/down_proj": (5, 3)}
SHAPES = {f"layers/{layer}/{name}/kernel": NAMES[name] for layer in (0, 1) for name in NAMES}


def random_tree(seed, extra=()):
    rng = np.random.default_rng(seed)
    shapes = SHAPES | {"norm/weight": (3,)}
    return {path: rng.normal(size=(*extra, *s)).astype(np.float32) for path, s in shapes.items()}


def cos(x, y):
    x, y = np.ravel(x).astype(np.float64), np.ravel(y).astype(np.float64)
    return x @ y / np.sqrt(x @ x * (y @ y))


# ---------------------------------------------------------------------------------------------
# Closed forms


@pytest.mark.parametrize("b1", [0.9, 0.95])
@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.5, 5.0])
def test_the_closed_forms_are_those_of_a_mean_gradient_in_noise(b1, ratio):
    """In 20,000 dimensions, in the mean over 50 steps: to 0.005, some five standard errors."""
    rng, n = np.random.default_rng(0), 20_000
    mean = np.sqrt(ratio) * np.ones(n)
    mu, before, now = np.zeros(n), [], []
    for step in range(200):
        g = mean + rng.normal(size=n)
        old, mu = mu, b1 * mu + (1 - b1) * g
        if step >= 150:
            before.append(cos(old, g))
            now.append(cos(mu, g))
    expected = white_noise.cosine_before(ratio, b1)
    np.testing.assert_allclose(np.mean(before), expected, atol=0.005)
    np.testing.assert_allclose(np.mean(now), white_noise.cosine_now(expected, b1), atol=0.005)
    np.testing.assert_allclose(white_noise.signal_to_noise(expected, b1), ratio, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 10, 30])
def test_white_noise_under_a_young_ema(steps):
    b1 = 0.95
    weights = (1 - b1) * b1 ** np.arange(steps)
    expected = weights[0] / np.sqrt(np.sum(weights**2))
    np.testing.assert_allclose(white_noise.noise_cosine(b1, steps), expected, rtol=1e-12)
    np.testing.assert_allclose(white_noise.noise_cosine(b1), np.sqrt(1 - b1**2), rtol=1e-12)


def test_ratios_beyond_what_a_cosine_can_say():
    found = white_noise.signal_to_noise([-0.3, 0.0, 1.0], 0.9)
    np.testing.assert_array_equal(found, [0.0, 0.0, np.inf])
    np.testing.assert_array_equal(white_noise.cosine_before([-0.5, 0.0], 0.9), [-1.0, 0.0])


def test_the_score_of_elements():
    """cos is then the sign of mu g; a million draws know its mean to 0.0005 in the score."""
    rng, b1 = np.random.default_rng(0), 0.9
    mu = np.zeros(1_000_000, np.float32)
    for _ in range(60):
        g = rng.standard_normal(mu.shape, np.float32)
        mu = b1 * mu + (1 - b1) * g
    measured = white_noise.score(np.sign(mu * g)).mean()
    np.testing.assert_allclose(white_noise.score_of_elements(b1), measured, atol=5e-4)


# ---------------------------------------------------------------------------------------------
# Measures


def test_watching_changes_nothing_and_sees_what_numpy_sees():
    b1, window, steps = 0.8, 3, 5
    tx = cosines.watch(b1, window)
    params = jax.tree.map(jnp.asarray, random_tree(0))
    state = tx.init(params)
    assert list(state.momentum) == list(cosines.blocks_of(params))
    assert set(state.momentum) == set(SHAPES)
    mu = {path: np.zeros(SHAPES[path]) for path in state.momentum}
    seen = []
    for step in range(steps):
        grads = random_tree(step + 1)
        out, state = tx.update(grads, state, params)
        assert all(out[path] is grads[path] for path in grads)
        old, mu = mu, {path: b1 * mu[path] + (1 - b1) * grads[path] for path in mu}
        now = [cos(mu[path], grads[path]) for path in mu]
        before = [cos(old[path], grads[path]) if step else 0.0 for path in mu]
        seen.append([now, before])
    np.testing.assert_allclose(state.cosines, seen[-window:], atol=1e-6)


class Linear:
    """A loss whose gradient is the batch: one number a row for each block."""

    def loss(self, params, batch):
        rows = batch["inputs"]  # (rows, 2): how often each of two directions is in the gradient
        a, b = (jnp.asarray(random_tree(seed)["layers/0/mlp/up_proj/kernel"]) for seed in (8, 9))
        w = params["layers/0/mlp/up_proj/kernel"]
        along = jnp.stack([jnp.sum(w * a), jnp.sum(w * b)])
        return jnp.sum(rows * along[None]), jnp.float32(rows.shape[0])


def test_inner_products_are_those_of_mean_gradients_of_the_first_rows():
    problem = Linear()
    rows = np.random.default_rng(0).normal(size=(4, 8, 2)).astype(np.float32)  # K, largest batch
    sizes = [2, 4, 8]
    slots = np.array([0, 1, 2, 2], np.int32)
    batches = {"inputs": rows.reshape(4, 4, 2, 2)}
    params = {"layers/0/mlp/up_proj/kernel": jnp.ones((3, 5)), "norm/weight": jnp.ones(3)}
    found = jax.jit(lambda p, b: cosines.inner_products(problem, p, b, slots, 3))(params, batches)
    a, b = (random_tree(seed)["layers/0/mlp/up_proj/kernel"].ravel() for seed in (8, 9))
    assert list(found) == ["layers/0/mlp/up_proj/kernel"]
    for products, size in zip(found["layers/0/mlp/up_proj/kernel"], sizes, strict=True):
        mean = rows[:, :size].mean(axis=1) @ np.stack([a, b])
        np.testing.assert_allclose(products, mean @ mean.T, rtol=1e-4, atol=1e-5)


def test_the_last_cosines_are_those_of_an_ema_in_any_turn():
    b1, count = 0.7, 5
    g = np.random.default_rng(0).normal(size=(count, 7)) + 0.5
    now, before = cosines.last_cosines(g @ g.T, b1)
    for last in range(count):
        mu = np.zeros(7)
        for step in range(last + 1, last + 1 + count):
            old, mu = mu, b1 * mu + (1 - b1) * g[step % count]
        np.testing.assert_allclose(now[last], cos(mu, g[last]), rtol=1e-9)
        np.testing.assert_allclose(before[last], cos(old, g[last]), rtol=1e-9)


def test_signal_to_noise_has_no_bias_and_knows_its_error():
    """Of 400 sets of 8 gradients, with a signal a tenth of the noise and with none."""
    rng, n = np.random.default_rng(0), 50
    for ratio in (0.0, 0.1):
        g = np.sqrt(ratio) + rng.normal(size=(400, 8, n))
        found, error = cosines.signal_to_noise(g @ g.swapaxes(1, 2))
        spread = found.std()
        assert abs(found.mean() - ratio) < 4 * spread / 20
        assert 0.9 < np.sqrt(np.mean(error**2)) / spread < 1.8


# ---------------------------------------------------------------------------------------------
# The command


class Tiny:
    """In place of the Llama: its kinds of matrices, with a quadratic loss around what rows say."""

    opened = 0

    def __init__(self, task):
        Tiny.opened += 1
        self.task, self.steps = task, task.steps
        self.schedule = optax.constant_schedule(1.0)
        self.validations, self.work = 1, {}

    def batches(self, seed):
        rng = np.random.default_rng(seed)
        while True:
            yield {"inputs": rng.normal(size=(self.task.batch_size, self.task.seq_len)) + 1}

    def initial(self, seed):
        return jax.tree.map(jnp.asarray, random_tree(seed)), {}

    def loss(self, params, batch):
        told = jnp.asarray(batch["inputs"], jnp.float32)[:, :3]  # (rows, 3)
        away = [x if x.ndim == 1 else x[:3, 0] for x in jax.tree.leaves(params)]
        return sum(jnp.sum((told - x[None]) ** 2) for x in away), jnp.float32(len(told))

    def backward(self, params, variables, batch):
        mean = lambda params: self.loss(params, batch)[0] / self.task.batch_size  # noqa: E731
        loss, grads = jax.value_and_grad(mean)(params)
        return Pass(loss, grads, variables, {})


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(Task, "open", lambda task: Tiny(task))


SIZES = ["--steps", "20", "--batch-size", "4", "--seq-len", "4", "--window", "5"]
COMMAND = [*SIZES, "--gradients", "4", "--bases", "adam=0.1"]


def test_the_command_records_repeats_nothing_and_shows(tiny, tmp_path, capsys):
    out = tmp_path / "new" / "alignment.jsonl"
    run = [*COMMAND, "--out", str(out)]
    assert alignment.main([*run, "--points", "5", "10", "--frozen", "10"]) == 0
    first = records.read(out)
    settings = [record["settings"] for record in first]
    assert [(s["measured"], s["step"], s.get("rows")) for s in settings] == [
        ("run", 5, None), ("run", 10, None), *(("frozen", 10, rows) for rows in (1, 4, 16, 64)),
    ]  # fmt: skip
    assert {s["experiment"] for s in settings} == {"alignment"}
    assert settings[0]["b1"] == 0.9 and settings[0]["learning_rate"] == 0.1
    assert first[0]["provenance"]["device"] == "cpu"
    assert set(first[0]["results"]["now"]) == set(SHAPES)
    assert first[-1]["results"]["tokens"] == 64 * 4
    ratios = [np.mean(list(r["results"]["signal_to_noise"].values())) for r in first[2:]]
    assert ratios == sorted(ratios)  # noise falls as the batch grows

    content, opened = out.read_bytes(), Tiny.opened
    assert alignment.main([*run, "--points", "5", "10", "--frozen", "10"]) == 0
    assert out.read_bytes() == content and Tiny.opened == opened
    assert "adam: 6 of 6 are in" in capsys.readouterr().out

    # More of the same run: what is there stays, and looking has not changed the run.
    assert alignment.main([*run, "--points", "5", "10", "15"]) == 0
    more = records.read(out)
    assert more[: len(first)] == first
    assert more[-1]["settings"]["step"] == 15
    alone = tmp_path / "alone.jsonl"
    assert alignment.main([*COMMAND, "--out", str(alone), "--points", "15"]) == 0
    assert records.read(alone)[0]["results"] == next(
        r["results"] for r in more if r["settings"]["step"] == 15
    )

    capsys.readouterr()
    assert alignment.main(["--report", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| adam | 10 |") == 5 and "| 256 |" in shown
    assert alignment.main(["--plot", "--out", str(out), "--images", str(tmp_path)]) == 0
    assert (tmp_path / "alignment.png").stat().st_size > 1000
    # Stopped after the first record.
    alone.write_text(out.read_text().splitlines(keepends=True)[0])
    assert alignment.main(["--report", "--out", str(alone)]) == 0
    assert alignment.main(["--plot", "--out", str(alone), "--images", str(tmp_path)]) == 0


def test_along_the_run_it_sees_what_the_gradients_of_the_run_say(tiny, tmp_path):
    """The whole run again in NumPy; Adam's steps are Optax's."""
    out = tmp_path / "records.jsonl"
    assert alignment.main([*COMMAND, "--out", str(out), "--points", "10", "--frozen", "20"]) == 0
    found = records.read(out)[0]["results"]

    problem = Tiny(types.SimpleNamespace(steps=20, batch_size=4, seq_len=4))
    params, _ = problem.initial(0)
    tx = optax.adam(0.1)
    state, mu, now, before = tx.init(params), dict.fromkeys(SHAPES, 0.0), [], []
    backward = jax.jit(problem.backward)
    for batch in itertools.islice(problem.batches(0), 10):
        grads = backward(params, {}, batch).grads
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
        g = {path: np.asarray(grads[path], np.float64) for path in SHAPES}
        old, mu = mu, {path: 0.9 * mu[path] + 0.1 * g[path] for path in SHAPES}
        now.append([cos(mu[path], g[path]) for path in SHAPES])
        before.append([cos(old[path], g[path]) if len(now) > 1 else 0 for path in SHAPES])
    for name, seen in (("now", now), ("before", before)):
        last = np.array(seen[5:])
        for column, path in enumerate(SHAPES):
            mean, error = last[:, column].mean(), last[:, column].std(ddof=1) / np.sqrt(5)
            np.testing.assert_allclose(found[name][path], mean, atol=1e-4)
            np.testing.assert_allclose(found[f"{name}_error"][path], error, atol=1e-4)
    null = np.mean([np.sqrt((1 - 0.81) / (1 - 0.81**n)) for n in range(6, 11)])
    np.testing.assert_allclose(found["null"], null, rtol=1e-4)


def test_the_defaults_are_the_known_runs():
    args = alignment.make_parser().parse_args(["--size", "40m"])
    task = alignment.make_task(args, "gpu")
    adam, muon = alignment.make_plans(args, task)
    assert (adam.base, adam.learning_rate, adam.b1) == ("adam", 1e-3, 0.9)
    assert (muon.base, muon.learning_rate, muon.b1) == ("muon", 4e-3, 0.95)
    assert adam.points == (50, 75, 150, 300, 600, 900, 1200, 1500)
    assert adam.frozen == (150, 600, 1500)
    assert [rows * 256 for rows in adam.rows] == [2**14, 2**16, 2**18, 2**20]
    nano = dataclasses.replace(task, steps=100, batch_size=16)
    assert alignment.make_plans(args, nano)[0].points == (25, 50, 75, 100)


def test_kinds_and_layers_of_the_llamas_paths():
    path = "layers/11/self_attn/q_proj/kernel"
    assert (alignment_report.kind_of(path), alignment_report.layer_of(path)) == ("q", "11")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--bases adm", "no base 'adm'; there are adam, "),
        ("--bases laprop", "laprop needs a rate, as in laprop=1e-3"),
        ("--bases adam=0", "must be more than 0"),
        ("--points 30", "--points 30 must be a multiple of --window 25, at most 100"),
        ("--frozen 125", "--frozen 125 must be a multiple of --window 25, at most 100"),
        ("--steps 10", "--window 25 is longer than the run of 10 steps"),
        ("--rows 3 4", "--rows 3 4 must rise, and be multiples of the first"),
        ("--rows 4 4", "--rows 4 4 must rise"),
        ("--gradients 2", "--gradients: must be at least 3"),
        ("--validations 3", "--validations does nothing in this program"),
        ("--images figures", "--images does nothing without --plot"),
        ("--plot --out no/such/file", "no records in no/such/file"),
        ("--report --out no/such/file", "no records in no/such/file"),
        ("--data no/such/folder", "no/such/folder"),
    ],
)
def test_a_wrong_option_is_one_line(options, message, capsys):
    try:
        status = alignment.main(options.split())
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


def test_a_run_that_diverges_ends_in_one_line(tiny, tmp_path, capsys):
    run = [*SIZES, "--bases", "adam=1e30", "--out", str(tmp_path / "a"), "--points", "20"]
    assert alignment.main(run) == 1
    assert "adam diverged at rate 1e+30; give a lower one" in capsys.readouterr().err
