"""The mixture of experts: sizes, names, its function against NumPy loops, and its trainer."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import refusal, write_corpus

from examples.kit import metrics
from examples.kit.data.load import load
from examples.kit.folder import SETTINGS
from examples.kit.optimizers import OptimizerConfig, assemble
from examples.kit.paths import by_path
from examples.nanomoe import train
from examples.nanomoe.config import PRESETS, NanoMoEConfig
from examples.nanomoe.model import (
    MoE,
    NanoMoE,
    Routing,
    capacity,
    count_parameters,
    route,
    router_loss,
)
from examples.nanomoe.step import expert_axis, make_functions, matrices
from magma_optax import attention_and_mlp

CONFIG = NanoMoEConfig(vocab_size=50, length=12, width=16, num_heads=2, num_layers=3)
ROUTE = jax.jit(route, static_argnums=(1, 2))  # logits, top_k, capacity
TOKENS = np.random.default_rng(0).integers(0, 50, (3, 11))  # (B, T)


@functools.cache
def make(config=CONFIG, seed=0):
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: NanoMoE(config, rngs=nnx.Rngs(seed))))
    init = jax.jit(lambda: nnx.to_pure_dict(nnx.state(NanoMoE(config, rngs=nnx.Rngs(seed)))))
    return graphdef, init()


def louder(params, factor=5.0):
    """Makes routers decided, attention uneven and the norms' weights matter."""
    scale = np.linspace(0.5, 1.5, CONFIG.width, dtype=np.float32)
    return jax.tree.map(lambda x: x * (factor if x.ndim > 1 else scale), params)


# ---------------------------------------------------------------------------------------------
# Sizes and names


def test_the_papers_size():
    config = PRESETS["paper"]
    model = nnx.eval_shape(lambda: NanoMoE(config, rngs=nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.state(model))
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    expert = 2 * 384 * 1536
    assert total == 55_113_600
    assert total - 3 * 6 * expert == 33_879_936  # three mixtures, six of eight experts idle
    assert count_parameters(shapes, config) == (55_113_600, 33_879_936)
    mixture = {path: leaf.shape for path, leaf in by_path(shapes["h"][2]["mlp"]).items()}
    assert mixture == {
        "experts/c_fc": (8, 384, 1536),
        "experts/c_proj": (8, 1536, 384),
        "router": (8, 384),
    }


def test_parameter_paths_are_nanomoes():
    common = ("attn/c_attn", "attn/c_proj", "ln_1/scale", "ln_2/scale")
    mixture = ("mlp/experts/c_fc", "mlp/experts/c_proj", "mlp/router")
    assert set(by_path(make()[1])) == {
        *("wte", "wpe", "ln_f/scale"),
        *(f"h/{i}/{name}" for i in (0, 2) for name in common + mixture),
        *(f"h/1/{name}" for name in (*common, "mlp/c_fc", "mlp/c_proj")),
    }


def test_initial_values():
    _, params = make(NanoMoEConfig(257, 64, 128, 4, 4))
    # A normal distribution cut at two standard deviations has 0.8796 of its width.
    switch = 0.8796 / math.sqrt(128)
    for path, leaf in by_path(params).items():
        assert leaf.dtype == jnp.float32
        if path.endswith("scale"):
            np.testing.assert_array_equal(leaf, 1.0)
            continue
        if path == "wpe":
            std = 0.02
        elif path.endswith("c_proj"):
            std = 0.02 / math.sqrt(8)
        else:  # 128 inputs, the head's too
            std = switch
            assert np.abs(leaf).max() <= 2 / math.sqrt(128)
        error = 5 / math.sqrt(2 * leaf.size)  # five standard errors
        assert abs(np.std(leaf) / std - 1) < error, path
        assert abs(np.mean(leaf)) < 5 * std / math.sqrt(leaf.size)
    experts = params["h"][0]["mlp"]["experts"]["c_fc"]
    assert not np.array_equal(experts[0], experts[1])


# ---------------------------------------------------------------------------------------------
# References in float64 NumPy: loops over tokens, choices and experts


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def moe_reference(x, params, top_k, room):
    """A mixture for `x` (M, D): its output, losses, the experts' loads and the dropped share."""
    router, experts = params["router"], params["experts"]
    num_experts = len(router)
    logits = np.array([[row @ token for row in router] for token in x])  # (M, E)
    order = [sorted(range(num_experts), key=lambda e: (-row[e], e))[:top_k] for row in logits]
    weights = []
    for row, chosen in zip(logits, order, strict=True):
        exps = [math.exp(row[e]) for e in chosen]
        weights.append([value / sum(exps) for value in exps])

    out = np.zeros_like(x)
    used, dropped = [0] * num_experts, 0
    for choice in range(top_k):  # all first choices come before any second choice
        for token in range(len(x)):
            expert = order[token][choice]
            if used[expert] == room:
                dropped += 1
                continue
            used[expert] += 1
            hidden = gelu(x[token] @ experts["c_fc"][expert])
            out[token] += weights[token][choice] * (hidden @ experts["c_proj"][expert])

    balance = 0.0
    loads = []
    for expert in range(num_experts):
        prob = sum(
            w
            for chosen, ws in zip(order, weights, strict=True)
            for e, w in zip(chosen, ws, strict=True)
            if e == expert
        )
        count = sum(chosen.count(expert) for chosen in order)
        balance += num_experts * (prob / len(x)) * (count / len(x))
        loads.append(count / (len(x) * top_k))
    z = np.mean([math.log(sum(math.exp(value) for value in row)) ** 2 for row in logits])
    return out, Routing(balance, z, np.array(loads), dropped / (len(x) * top_k))


def reference(params, tokens, config, train):
    """The whole model for `tokens` (B, T): logits (B, T, V) and each mixture's routing."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    head = config.width // config.num_heads
    room = capacity(config, tokens.size, train)

    def norm(x, scale):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale

    def attention(x, p):
        q, k, v = np.split(x @ p["c_attn"], 3, axis=-1)
        out = np.zeros_like(x)
        for n in range(config.num_heads):
            part = slice(n * head, (n + 1) * head)
            for t in range(len(x)):
                weights = np.exp(k[: t + 1, part] @ q[t, part] / np.sqrt(head))
                out[t, part] = weights / weights.sum() @ v[: t + 1, part]
        return out @ p["c_proj"]

    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]  # (B, T, D)
    routings = []
    for i in range(config.num_layers):
        p = params["h"][i]
        normed = norm(x, p["ln_1"]["scale"])
        x = x + np.stack([attention(sequence, p["attn"]) for sequence in normed])
        normed = norm(x, p["ln_2"]["scale"])
        if i % 2:
            x = x + gelu(normed @ p["mlp"]["c_fc"]) @ p["mlp"]["c_proj"]
        else:
            flat = normed.reshape(-1, config.width)
            out, routing = moe_reference(flat, p["mlp"], config.top_k, room)
            x = x + out.reshape(x.shape)
            routings.append(routing)
    return norm(x, params["ln_f"]["scale"]) @ params["wte"].T, routings


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("factor", [0.4, 1.25, 8.0])
def test_a_mixture_agrees_with_a_loop_over_tokens_and_experts(factor, train):
    changes = {"train_capacity": factor} if train else {"valid_capacity": factor}
    config = dataclasses.replace(CONFIG, **changes)
    graphdef, state = nnx.split(MoE(config, rngs=nnx.Rngs(1)))
    params = nnx.to_pure_dict(state)
    params["router"] *= 20.0
    x = np.random.default_rng(2).normal(size=(2, 20, 16)) + 0.5  # (B, T, D); uneven loads

    @jax.jit
    def run(params, x):
        return nnx.merge(graphdef, params)(x, train)

    actual, routing = run(params, jnp.asarray(x, jnp.float32))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    room = {0.4: 4, 1.25: 12, 8.0: 80}[factor]  # of 40 tokens with two choices each
    expected, expected_routing = moe_reference(x.reshape(40, 16), wide, 2, room)
    np.testing.assert_allclose(actual.reshape(40, 16), expected, rtol=1e-4, atol=1e-6)
    for name, value in routing._asdict().items():
        wanted = getattr(expected_routing, name)
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7, err_msg=name)
    assert (float(routing.dropped) == 0) == (factor == 8.0)


@pytest.mark.parametrize("train", [True, False])
def test_the_model_agrees_with_a_float64_reference(train):
    graphdef, params = make()
    params = louder(params)
    run = jax.jit(lambda params: nnx.merge(graphdef, params)(TOKENS, train=train))
    logits, routing = run(params)
    expected, expected_routing = reference(params, TOKENS, CONFIG, train)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    for layer, wanted in enumerate(expected_routing):
        for name, value in routing._asdict().items():
            np.testing.assert_allclose(value[layer], getattr(wanted, name), rtol=1e-4, atol=1e-6)
    if train:
        assert np.any(np.asarray(routing.dropped) > 0)  # the reference went through overflow too


def test_first_choices_come_before_second_ones_and_tokens_in_order():
    logits = np.full((4, 4), -9.0, np.float32)
    for token, (first, second) in enumerate([(1, 0), (0, 2), (0, 1), (0, 3)]):
        logits[token, first], logits[token, second] = 2.0, 1.0
    weights, slots, routing = ROUTE(logits, 2, 2)
    # Expert 0 takes tokens 1 and 2, whose first choice it is, and neither 3 nor, as its second
    # choice, 0. The slots of expert e are 2 e and 2 e + 1; 8 means dropped.
    np.testing.assert_array_equal(slots, [[2, 0, 1, 8], [8, 4, 3, 6]])
    odds = math.e / (1 + math.e)
    np.testing.assert_allclose(weights, [[odds] * 4, [1 - odds] * 4], rtol=1e-6)
    assert routing.dropped == 2 / 8
    np.testing.assert_array_equal(routing.load, np.array([4, 2, 1, 1]) / 8)


def test_capacities():
    assert capacity(PRESETS["paper"], 12 * 1024, train=True) == 3840  # 1.25 x 2 x 12,288 / 8
    assert capacity(PRESETS["paper"], 12 * 1024, train=False) == 6144
    assert capacity(CONFIG, 33, train=True) == 10  # 10.3 rounded down
    assert capacity(CONFIG, 36, train=True) == 12  # 11.25 rounded down, then made even
    assert capacity(CONFIG, 1, train=True) == 4


def test_router_losses_by_hand():
    even = np.zeros((8, 8), np.float32)
    for token in range(8):  # each expert is a first and a second choice once
        even[token, token], even[token, (token + 1) % 8] = 3.0, 3.0
    _, _, routing = ROUTE(jnp.asarray(even), 2, 8)
    lse = math.log(2 * math.exp(3) + 6)
    np.testing.assert_allclose(routing.balance, 8 * 8 * (1 / 8) * (2 / 8), rtol=1e-6)
    np.testing.assert_allclose(routing.z, lse**2, rtol=1e-6)
    two_layers = jax.tree.map(lambda x: jnp.stack([x, x]), routing)
    expected = 2 * (0.01 * 2 + 0.001 * lse**2)
    np.testing.assert_allclose(router_loss(two_layers, CONFIG), expected, rtol=1e-6)


def test_router_losses_even_the_loads_out():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(64, 16)) + 1.0, jnp.float32)
    router = jnp.asarray(rng.normal(size=(8, 16)) * 0.2, jnp.float32)

    @jax.jit
    @jax.grad
    def slope(router):
        return route(x @ router.T, 2, 64)[2].balance

    before = ROUTE(x @ router.T, 2, 64)[2]
    for _ in range(50):
        router -= 0.1 * slope(router)
    after = ROUTE(x @ router.T, 2, 64)[2]
    assert before.load.max() >= 0.25
    assert after.load.max() < 0.2
    assert after.balance < before.balance


# ---------------------------------------------------------------------------------------------
# Gradients, causality, dtypes


def test_gradients_flow_to_the_experts_that_are_used_and_to_no_other():
    graphdef, state = nnx.split(MoE(CONFIG, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    params["router"] = (20 * params["router"]).at[jnp.array([2, 5])].set(-9.0)
    x = jnp.asarray(np.random.default_rng(4).uniform(0.1, 1.0, (2, 20, 16)), jnp.float32)

    @jax.jit
    def gradient(params):
        def loss(params):
            out, routing = nnx.merge(graphdef, params)(x, True)
            return jnp.sum(out**2), routing

        return jax.grad(loss, has_aux=True)(params)

    grads, routing = gradient(params)
    used = np.asarray(routing.load) > 0  # (E,); every queue has room for its first token
    assert not used[2]
    assert not used[5]
    assert used.sum() > 3
    for name in ("c_fc", "c_proj"):
        moved = np.any(np.asarray(grads["experts"][name]), axis=(1, 2))
        np.testing.assert_array_equal(moved, used)
    assert np.any(np.asarray(grads["router"])[used])  # through the weights of the choices


def test_gradients_flow_to_every_parameter():
    graphdef, params = make()

    @jax.jit
    @jax.grad
    def gradient(params):
        logits, _ = nnx.merge(graphdef, params)(TOKENS, train=True)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))  # without the router's own losses

    for path, leaf in by_path(gradient(louder(params))).items():
        assert np.any(np.asarray(leaf)), path


def test_the_future_changes_nothing_while_no_expert_is_full():
    graphdef, params = make(dataclasses.replace(CONFIG, train_capacity=8.0))
    params = louder(params)
    run = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens, train=True)[0])
    changed = TOKENS.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % CONFIG.vocab_size
    before, after = run(params, TOKENS), run(params, changed)
    np.testing.assert_allclose(before[:, :6], after[:, :6], rtol=1e-4, atol=1e-5)
    assert not np.allclose(before[:, 6:], after[:, 6:], rtol=0.1)


def test_the_embeddings_gradient_is_summed_in_float32():
    graphdef, params = make(dataclasses.replace(CONFIG, dtype="bfloat16"))

    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params)(TOKENS, train=True)[0].astype(jnp.float32))

    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    scatters = re.findall(r'"stablehlo\.scatter".*?^ *\}\) : \(tensor<(\w+)>', text, re.M | re.S)
    wte = f"{CONFIG.vocab_size}x{CONFIG.width}x"
    assert [shape for shape in scatters if shape.startswith(wte)] == [f"{wte}f32"]


def test_bfloat16_computes_narrow_and_routes_wide():
    narrow, params = make(dataclasses.replace(CONFIG, dtype="bfloat16"))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    logits, routing = jax.jit(lambda p: nnx.merge(narrow, p)(TOKENS, train=False))(params)
    assert logits.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in routing} == {jnp.dtype("float32")}
    # Half a unit of bfloat16 on the router would tie these two experts.
    graphdef, state = nnx.split(MoE(CONFIG, rngs=nnx.Rngs(0)))
    mixture = nnx.to_pure_dict(state)
    mixture["router"] = jnp.zeros((8, 16)).at[3].set(1.0).at[6].set(1.001)
    x = jnp.ones((1, 4, 16), jnp.bfloat16)
    _, routing = jax.jit(lambda p: nnx.merge(graphdef, p)(x, True))(mixture)
    lse = math.log(math.exp(16) + math.exp(16.016) + 6)
    np.testing.assert_allclose(routing.z, lse**2, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# Magma's blocks


def settings(**changes):
    defaults = {"name": "adamw", "learning_rate": 0.01, "steps": 10, "warmup": 0, "b2": 0.95}
    return OptimizerConfig(**defaults | {"masking": "magma"} | changes)


def steps(tx, params, count=3):
    """Yields the updates and the state of steps with random gradients."""
    update, state = jax.jit(tx.update), tx.init(params)
    for key in jax.random.split(jax.random.key(0), count):
        updates, state = update(optax.tree.random_like(key, params), state, params)
        yield by_path(updates), state


MASKED = {
    *(f"h/{i}/attn/{name}" for i in range(3) for name in ("c_attn", "c_proj")),
    *(f"h/{i}/mlp/experts/{name}" for i in (0, 2) for name in ("c_fc", "c_proj")),
    *("h/1/mlp/c_fc", "h/1/mlp/c_proj"),
}


@pytest.mark.parametrize(
    ("name", "apart"), [("adamw", False), ("adamw", True), ("adam", True), ("muon", True)]
)
def test_experts_have_coins_and_scores_of_their_own_if_asked(name, apart):
    _, params = make()
    blocks = expert_axis if apart else "leaf"
    tx = assemble(settings(name=name, weight_decay=0.1), blocks, matrices)
    mixed = False
    for updates, state in steps(tx, params):
        scores = by_path(optax.tree.get(state, "alignment"))
        for path, leaf in updates.items():
            moved = np.asarray(leaf) != 0
            if path not in MASKED:  # router, norms, wte and wpe are never masked
                assert moved.any()
            elif apart and "experts" in path:  # all of an expert or nothing of it
                coins = moved.any(axis=(1, 2))
                np.testing.assert_array_equal(moved.mean(axis=(1, 2)) > 0.99, coins)
                mixed |= coins.any() and not coins.all()
            else:
                assert moved.mean() > 0.99 or not moved.any()
    assert mixed == apart
    assert set(scores) == MASKED
    for path, score in scores.items():
        assert score.shape == ((8,) if apart and "experts" in path else ())
        if score.shape:
            assert len(np.unique(score)) > 4
        assert attention_and_mlp(path, by_path(params)[path])


def test_muon_takes_each_expert_for_a_matrix():
    _, params = make()
    tx = assemble(settings(name="muon", masking="none"), "leaf", matrices)
    updates, _ = next(steps(tx, params))
    expert = np.asarray(updates["h/0/mlp/experts/c_fc"][3])  # (D, F)
    values = np.linalg.svd(expert, compute_uv=False)
    assert values.max() < 2 * values.min()  # five Newton-Schulz steps: 1 to a factor of 1.6


def test_matrices_decay_and_norms_do_not():
    _, params = make()
    tx = assemble(settings(masking="none", weight_decay=0.1), "leaf", matrices)
    zeros = optax.tree.zeros_like(params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    for path, update in by_path(updates).items():
        expected = 0 if path.endswith("scale") else -0.01 * 0.1 * by_path(params)[path]
        np.testing.assert_allclose(update, jnp.broadcast_to(expected, update.shape), rtol=1e-5)


def test_adams_second_decay_rate_is_used():
    grads = [jnp.full(3, value) for value in (1.0, 3.0)]
    for name in ("adamw", "muon"):  # vectors are Adam's under Muon too, with Nesterov's momentum
        tx = assemble(settings(name=name, masking="none"), "leaf", matrices)
        params = {"mlp": {"c_fc": jnp.ones((3, 3))}, "bias": jnp.ones(3)}
        update, state = jax.jit(tx.update), tx.init(params)
        for grad in grads:
            gradients = {"mlp": {"c_fc": jnp.eye(3)}, "bias": grad}
            updates, state = update(gradients, state, params)
        m = (0.9 * 0.1 * 1 + 0.1 * 3) / (1 - 0.9**2)
        if name == "muon":
            m = 0.9 * (0.9 * 0.1 * 1 + 0.1 * 3) / (1 - 0.9**3) + 0.1 * 3 / (1 - 0.9**2)
        v = (0.95 * 0.05 * 1 + 0.05 * 9) / (1 - 0.95**2)
        rate = 0.001 + 0.009 * (1 + math.cos(math.pi / 10)) / 2
        np.testing.assert_allclose(updates["bias"], [-rate * m / math.sqrt(v)] * 3, rtol=1e-4)


# ---------------------------------------------------------------------------------------------
# The trainer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_accumulation_averages_gradients(corpus):
    config = dataclasses.replace(PRESETS["tiny"], train_capacity=8.0, balance_weight=0.0)
    data = load(str(corpus), seq_len=32, batch_size=8)
    batch = next(iter(data.train))
    after = {}
    for count in (1, 4):
        init, step, _ = make_functions(config, optax.sgd(1.0), 0, count)
        params, _, now = step(*init(), batch)
        after[count] = by_path(params), now
    # Nothing is dropped and all micro-batches have equally many tokens: the mean loss has the mean
    # gradient. (The balancing loss, a product of means, has not.)
    for path, leaf in after[1][0].items():
        np.testing.assert_allclose(after[4][0][path], leaf, rtol=1e-3, atol=2e-6, err_msg=path)
    np.testing.assert_allclose(after[4][1]["loss"], after[1][1]["loss"], rtol=1e-5)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The folder of a short run with an own coin for each expert."""
    out = tmp_path_factory.mktemp("finished") / "run"
    options = "--preset tiny --magma --experts-as-blocks --steps 60 --warmup 6 --eval-every 30"
    options += " --learning-rate 0.01"
    argv = [*options.split(), "--data", str(corpus), "--out", str(out)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train.main(argv) == 0
    (out.parent / "printed").write_text(printed.getvalue())
    return out


def test_validation_has_its_own_interval(corpus, tmp_path):
    options = "--preset tiny --steps 12 --warmup 2 --eval-every 3 --log-every 2"
    out = tmp_path / "run"
    assert train.main([*options.split(), "--data", str(corpus), "--out", str(out)]) == 0
    records = metrics.read(out)
    assert [r["step"] for r in records if "valid_loss" in r] == [3, 6, 9, 12]
    assert [r["step"] for r in records] == [2, 3, 4, 6, 8, 9, 10, 12]


def test_a_diverged_run_says_so(capsys, corpus, tmp_path):
    options = "--preset tiny --steps 12 --warmup 11 --log-every 2 --learning-rate 1e20"
    argv = [*options.split(), "--data", str(corpus), "--out", str(tmp_path / "run")]
    assert train.main(argv) == 1
    assert "loss nan" in capsys.readouterr().err.splitlines()[-1]


def test_validation_in_parts_is_that_of_the_whole(corpus):
    batch = next(load(str(corpus), seq_len=32, batch_size=8).valid())
    sums = []
    for count in (1, 4):
        init, _, valid_step = make_functions(PRESETS["tiny"], optax.sgd(1.0), 0, count)
        sums.append(valid_step(init()[0], batch))
    np.testing.assert_allclose(*sums, rtol=1e-6)


def test_a_short_run_learns_more_than_how_frequent_each_byte_is(finished, corpus):
    records = metrics.read(finished)
    entropy = load(str(corpus), seq_len=32, batch_size=8).unigram_entropy
    assert records[-1]["valid_loss"] < entropy - 0.1
    assert records[0]["loss"] > entropy


def test_a_run_leaves_records_and_a_picture(finished):
    records = metrics.read(finished)
    assert [record["step"] for record in records] == [10, 20, 30, 40, 50, 60]
    assert [record["step"] for record in records if "valid_loss" in record] == [30, 60]
    for record in records:
        load = np.array(record["load"])
        assert load.shape == (1, 8)
        np.testing.assert_allclose(load.sum(), 1, atol=1e-3)
        assert abs(record["busiest"] - load.max()) < 1e-4
        assert 0 <= record["dropped"] < 1
        assert record["num_blocks"] == 4 + 2 * 8 + 2  # two layers' attention, experts, one MLP
        scores = record["scores"]
        assert len(scores["h/0/mlp/experts/c_fc"]) == 8
        assert 0 < scores["h/1/mlp/c_fc"] < 1
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_optimizer_what_is_masked_and_all_settings_are_told(finished):
    printed = (finished.parent / "printed").read_text()
    assert "adamw with Magma, peak learning rate 0.01: 6 steps of linear warm-up" in printed
    assert " leaves in 22 blocks, " in printed
    settings = json.loads((finished / SETTINGS).read_text())
    assert settings["command"].startswith("python -m examples.nanomoe.train --preset tiny ")
    assert settings["options"]["learning_rate"] == 0.01
    assert settings["options"]["weight_decay"] == 0.1  # as resolved
    assert len(settings["data"]["digest"]) == 32


def error(capsys, argv):
    return refusal(capsys, train.main, argv)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--experts-as-blocks", "--experts-as-blocks needs --magma"),
        ("--survival-prob alignment", "needs --magma"),
        ("--survival-prob 2 --magma", "survival_prob"),
        ("--preset huge", "'huge'"),
        ("--optimizer lion", "'lion'"),
        ("--seq-len 65", "--seq-len 65 is more than the 64 positions"),
        ("--accumulate 3", "--accumulate 3 does not cut --batch-size 16"),
        ("--steps 9 --warmup 9", "--warmup 9"),
        ("--learning-rate 0", "must be more than 0.0"),
        ("--magm", "unrecognized arguments: --magm"),
        ("--data missing.txt", "missing.txt"),
        ("--survival-prob 0.5", "--survival-prob 0.5 needs --magma"),
        ("--temperature 2", "--temperature 2.0 needs --magma"),
        ("--mask-key 1", "--mask-key 1 needs --magma"),
        ("--out gs://bucket/run", "'gs://bucket/run' is an address"),
    ],
)
def test_wrong_options_are_one_line(capsys, tmp_path, monkeypatch, wrong, message):
    monkeypatch.chdir(tmp_path)
    assert message in error(capsys, shlex.split(wrong))
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_a_folder_with_something_in_it_is_not_written_over(capsys, finished, corpus, tmp_path):
    argv = ["--preset", "tiny", "--data", str(corpus), "--out"]
    before = (finished / metrics.FILE).read_bytes()
    assert "not empty" in error(capsys, [*argv, str(finished)])
    assert (finished / metrics.FILE).read_bytes() == before
    assert str(corpus) in error(capsys, [*argv, str(corpus / "run")])
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert "short.txt" in error(capsys, ["--data", str(short), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
