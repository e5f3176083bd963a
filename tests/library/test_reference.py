"""The package against `reference.py`, a float64 transcription of Algorithm 1 by explicit loops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from magma_optax import magma, skip_update, stacked, with_magma

STEPS = 8
LR = reference.LEARNING_RATE

# Updates are at most a few LR, and a step from gradient to update is some tens of float32 roundings
# (6e-8 each) of terms of the size of LR, which may cancel: hence an absolute bound, about 40
# roundings of LR. Newton-Schulz multiplies an error in a small singular value by up to
# 3.4445^5 = 485; its normalised matrices have a few of them, so Muon's bound is 20 times wider.
# Scores are averages of numbers in (0, 1) from sums of at most 24 terms.
FLOAT32 = {"atol": 40 * 6e-8 * LR, "rtol": 1e-5}
FLOAT32_MUON = {"atol": 20 * 40 * 6e-8 * LR, "rtol": 1e-4}
FLOAT32_SCORES = {"atol": 2e-6, "rtol": 0}

# In float64 all that is float32 are the scores: 8 roundings of 6e-8, and one of the factor.
FLOAT64 = {"atol": 1e-12, "rtol": 1e-6}
# Without scores, and with powers of two for p, nothing is: the bound is float64's own.
FLOAT64_UNDAMPED = {"atol": 1e-13, "rtol": 1e-10}

BASES = {
    "adam": lambda: optax.adam(LR),
    "rmsprop": lambda: optax.rmsprop(LR, eps_in_sqrt=False),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
    "laprop": lambda: optax.chain(
        optax.scale_by_rms(0.999, eps=1e-15, eps_in_sqrt=False, bias_correction=True),
        optax.ema(0.9),
        optax.scale(-LR),
    ),
    "muon": lambda: optax.contrib.muon(LR),
}
BASE_KEEPS_MU = ("adam", "muon")
FLOAT32_OF = dict.fromkeys(BASES, FLOAT32) | {"muon": FLOAT32_MUON}
# Every case is compiled anew and runs for a moment: compile without optimizing.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
every_base = pytest.mark.parametrize("base", BASES)


# A small problem: gradients of sum(log(cosh(theta - target_t))), plus a leaf that gets none.

SHAPES = {
    "layers": [{"w": (3, 4), "b": (5,)}, {"w": (4, 3)}],
    "scale": (),
    "stack": (2, 3, 4),
    "unused": (3,),
}


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def random_tree(seed: int, *leading: int) -> Any:
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.normal(size=leading + shape)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=is_shape)


PARAMS = random_tree(0)
TARGETS = random_tree(1, STEPS)


def to_float64(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)


def by_path(tree: Any, convert: Any = to_float64) -> reference.Tree:
    """Leaves by path, as float64 (or complex128) NumPy arrays."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): convert(leaf) for path, leaf in named}


def as_dtype(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def gradient(params: Any, target: Any) -> Any:
    grads = jax.tree.map(lambda theta, goal: jnp.tanh(theta - goal), params, target)
    return grads | {"unused": jnp.zeros_like(grads["unused"])}


def reference_gradient(theta: reference.Tree, t: int) -> reference.Tree:
    targets = by_path(TARGETS)
    grads = {path: np.tanh(theta[path] - targets[path][t]) for path in theta}
    return grads | {"unused": np.zeros(3)}


# Coins, read off `skip_update` on updates of ones.


def surviving(tree: Any, steps: int, p: Any = 0.5, **options) -> Any:
    """Which elements survive, in each of the first steps: a tree of bools, steps leading."""
    tx = skip_update(p, **options)
    ones = jax.tree.map(jnp.ones_like, tree)

    def step(state, _):
        updates, state = tx.update(ones, state)
        return state, jax.tree.map(lambda u: u != 0, updates)

    return jax.lax.scan(step, tx.init(ones), None, steps)[1]


def coins_of_skip_update(tree: Any, steps: int, p: Any = 0.5, **options) -> list[reference.Tree]:
    survived = by_path(quick_jit(lambda tree: surviving(tree, steps, p, **options))(tree))
    return [coins_at_step(survived, t, options.get("blocks", "leaf")) for t in range(steps)]


@functools.cache
def coins_of_problem(p: Any, **options) -> list[reference.Tree]:
    return coins_of_skip_update(as_dtype(PARAMS, jnp.float32), STEPS, p, **options)


def coins_at_step(survived: reference.Tree, t: int, blocks: Any) -> reference.Tree:
    return {path: per_block(path, leaf[t] != 0, blocks) for path, leaf in survived.items()}


def per_block(path: str, survived: np.ndarray, blocks: Any) -> np.ndarray:
    """One bool a block, of a leaf of bools that are equal within each block."""
    axes = reference.block_axes(blocks, path, survived)
    coins = np.empty(reference.block_shape(survived, axes), bool)
    for b, place in reference.each_block(survived, axes):
        coins[b] = survived[place].all()
        assert coins[b] == survived[place].any(), f"a block of {path} is masked in part"
    return coins


# Both sides of the comparison.


def train(
    tx: Any, dtype: Any = jnp.float32, give_gradient: bool = False, gradient: Any = gradient
) -> tuple[Any, Any, Any]:
    """Parameters at the end, and updates and scores of every step, stacked."""

    @quick_jit
    def run(params, targets):
        def step(carry, target):
            params, state = carry
            grads = gradient(params, target)
            extra = {"grad": grads} if give_gradient else {}
            updates, state = tx.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
            return (params, state), (updates, magma_state(state).alignment)

        (params, _), history = jax.lax.scan(step, (params, tx.init(params)), targets)
        return params, *history

    return run(as_dtype(PARAMS, dtype), as_dtype(TARGETS, dtype))


def magma_state(state: Any) -> Any:
    return state.magma if hasattr(state, "magma") else state[-1]


def expect(
    base: str | Any, mu_from: str = "own", sparse_state: bool = False, key: int = 0, **options
) -> tuple[Any, list]:
    """What the reference makes of the same problem, with the package's coins."""
    layout = {name: options[name] for name in ("where", "blocks") if name in options}
    coins = coins_of_problem(options.get("survival_prob", 0.5), key=key, **layout)
    rule = reference.BASES[base] if isinstance(base, str) else base
    return reference.train(
        by_path(PARAMS),
        reference_gradient,
        rule,
        reference.Magma(**options),
        coins,
        mu_from,
        sparse_state,
    )


def assert_agrees(actual: Any, expected: Any, tolerance: dict, scores: dict | None = None) -> None:
    params, updates, alignment = actual
    theta, history = expected
    steps = len(history)
    updates, alignment = by_path(updates), by_path(alignment)
    assert alignment.keys() == history[-1].scores.keys()
    for t, step in enumerate(history):
        for path, score in step.scores.items():
            close = scores or FLOAT32_SCORES
            message = f"score of {path} at {t}"
            np.testing.assert_allclose(alignment[path][t], score, **close, err_msg=message)
        for path, update in step.update.items():
            message = f"update of {path} at {t}"
            np.testing.assert_allclose(-updates[path][t], update, **tolerance, err_msg=message)
    wider = {name: steps * bound for name, bound in tolerance.items()}
    for path, leaf in by_path(params).items():
        np.testing.assert_allclose(leaf, theta[path], **wider, err_msg=path)


# Every base, every way to wrap it.


@every_base
def test_a_chain_with_gradients_is_algorithm_1(base):
    tx = optax.chain(BASES[base](), magma())
    assert_agrees(train(tx, give_gradient=True), expect(base), FLOAT32_OF[base])


@every_base
def test_the_wrapper_is_algorithm_1(base):
    mu_from = "base" if base in BASE_KEEPS_MU else "own"
    actual = train(with_magma(BASES[base]()))
    assert_agrees(actual, expect(base, mu_from), FLOAT32_OF[base])


@every_base
def test_a_chain_in_float64_is_algorithm_1_but_for_float32_scores(base):
    expected = expect(base)
    with jax.enable_x64(True):
        actual = train(optax.chain(BASES[base](), magma()), jnp.float64, give_gradient=True)
    assert_agrees(actual, expected, FLOAT64, {"atol": 5e-7, "rtol": 0})


@pytest.mark.parametrize("base", ["rmsprop", "adam", "muon"])
def test_the_undamped_wrapper_in_float64_is_exact(base):
    mu_from = "base" if base in BASE_KEEPS_MU else "own"
    options = {"survival_prob": 0.25, "damping": False, "rescale": True}
    expected = expect(base, mu_from, **options)
    with jax.enable_x64(True):
        actual = train(with_magma(BASES[base](), **options), jnp.float64)
    assert_agrees(actual, expected, FLOAT64_UNDAMPED, {"atol": 5e-7, "rtol": 0})


def test_auto_reads_the_first_moment_of_the_base_with_its_own_decay():
    rule = functools.partial(reference.adam, b1=0.6)
    actual = train(with_magma(optax.adam(LR, b1=0.6), b1=0.99))
    assert_agrees(actual, expect(rule, "base"), FLOAT32)


def test_own_keeps_an_ema_with_its_own_decay():
    rule = functools.partial(reference.adam, b1=0.6)
    actual = train(with_magma(optax.adam(LR, b1=0.6), b1=0.95, first_moment="own"))
    assert_agrees(actual, expect(rule, "own", b1=0.95), FLOAT32)


def test_a_callable_first_moment_reads_the_state_of_the_base():
    actual = train(with_magma(optax.adam(LR, b1=0.6), first_moment=lambda state: state[0].mu))
    rule = functools.partial(reference.adam, b1=0.6)
    assert_agrees(actual, expect(rule, "base"), FLOAT32)


# Options.


def last_axis(path, leaf):
    """Separate blocks along the last axis: here as `stacked(-1)`, which a scalar has not."""
    return stacked(-1)(path, leaf) if leaf.shape else ()


def first_and_last_axis(path, leaf):
    return (0, -1) if len(leaf.shape) > 1 else ()


def matrices(path, leaf):
    return len(leaf.shape) >= 2


def in_the_first_layer(path, leaf):
    return path.startswith("layers/0/")


def falling(t):
    return 0.875 - 0.0625 * t  # Exact in float32.


def rising(t):
    return 1.0 + 0.25 * t


@pytest.mark.parametrize("blocks", ["row", "column", "element", last_axis, first_and_last_axis])
def test_each_block_of_a_chain_has_its_own_coin_and_score(blocks):
    tx = optax.chain(optax.rmsprop(LR, eps_in_sqrt=False), magma(blocks=blocks))
    assert_agrees(train(tx, give_gradient=True), expect("rmsprop", blocks=blocks), FLOAT32)


@pytest.mark.parametrize("blocks", ["row", first_and_last_axis])
def test_each_block_of_a_wrapper_has_its_own_coin_and_score(blocks):
    actual = train(with_magma(optax.adam(LR), blocks=blocks))
    assert_agrees(actual, expect("adam", "base", blocks=blocks), FLOAT32)


def test_stacked_cuts_along_its_axis():
    def where(path, leaf):
        return path == "stack"

    actual = train(with_magma(optax.adam(LR), where=where, blocks=stacked(1)))
    expected = expect("adam", "base", where=where, blocks=lambda path, leaf: 1)
    assert_agrees(actual, expected, FLOAT32)


OPTIONS = [
    {"survival_prob": 0.8, "key": 3},
    {"survival_prob": falling},
    {"survival_prob": 0.3, "rescale": True, "key": 1},
    {"survival_prob": falling, "rescale": True, "damping": False},
    {"survival_prob": 1.0, "temperature": 0.5},
    {"damping": False},
    {"temperature": 0.3, "score_decay": 0.5, "b1": 0.6, "initial_score": 0.9},
    {"temperature": rising, "score_decay": falling, "initial_score": 0.0},
    {"b1": 0.0, "score_decay": 0.0},
    {"where": matrices, "key": 2},
    {"where": in_the_first_layer, "blocks": "row", "rescale": True},
]


def describe(options: dict) -> str:
    return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items())


@pytest.mark.parametrize("options", OPTIONS, ids=describe)
def test_options_of_a_chain(options):
    tx = optax.chain(optax.rmsprop(LR, eps_in_sqrt=False), magma(**options))
    assert_agrees(train(tx, give_gradient=True), expect("rmsprop", **options), FLOAT32)


@pytest.mark.parametrize("options", OPTIONS[::3], ids=describe)
def test_options_of_the_wrapper(options):
    actual = train(with_magma(optax.adam(LR), **options))
    assert_agrees(actual, expect("adam", "base", **options), FLOAT32)


@pytest.mark.parametrize("blocks", ["leaf", "row"])
@pytest.mark.parametrize("options", [{}, {"damping": False, "rescale": True}], ids=describe)
def test_sampling_by_alignment_compares_the_same_draws_with_the_score(options, blocks):
    """m = [u < s~] with the u of `skip_update`, which is given the s~ of one block at a time."""
    options = options | {"survival_prob": "alignment", "temperature": 0.4, "blocks": blocks}
    frozen = by_path(TARGETS)

    def run_reference(coins):
        given = lambda theta, t: {path: frozen[path][t] for path in theta}  # noqa: E731
        algorithm = reference.Magma(**options)
        return reference.train(by_path(PARAMS), given, reference.rmsprop, algorithm, coins)

    # With gradients that do not depend on the parameters, s~ does not depend on the coins.
    _, history = run_reference(coins_of_problem(0.5, blocks=blocks))
    coins = coins_at_probabilities([step.s_tilde for step in history], blocks)
    expected = run_reference(coins)
    tx = optax.chain(optax.rmsprop(LR, eps_in_sqrt=False), magma(**options))
    actual = train(tx, give_gradient=True, gradient=lambda params, target: target)
    assert_agrees(actual, expected, FLOAT32)


def coins_at_probabilities(p: list[reference.Tree], blocks: Any) -> list[reference.Tree]:
    """Coins where each block has a p of its own in each step."""
    params = as_dtype(PARAMS, jnp.float32)
    names = [(path, b) for path, leaf in p[0].items() for b in np.ndindex(leaf.shape)]
    tables = jnp.asarray([[step[path][b] for step in p] for path, b in names], jnp.float32)

    def toss(table):
        return surviving(params, STEPS, lambda t: table[t], blocks=blocks)

    survived = by_path(quick_jit(jax.vmap(toss))(tables))
    coins = [{path: np.empty(leaf.shape, bool) for path, leaf in step.items()} for step in p]
    for n, (path, b) in enumerate(names):
        for t in range(STEPS):
            coins[t][path][b] = per_block(path, survived[path][n, t] != 0, blocks)[b]
    return coins


# The ablation: what is kept of a dropped block does not advance, its score does.


@every_base
def test_sparse_state_advances_with_surviving_blocks_alone(base):
    mu_from = "base" if base in BASE_KEEPS_MU else "own"
    expected = expect(base, mu_from, sparse_state=True)
    assert_agrees(train(with_magma(BASES[base](), sparse_state=True)), expected, FLOAT32_OF[base])


@pytest.mark.parametrize(
    "options",
    [
        {"first_moment": "own"},
        {"first_moment": "auto", "blocks": "row", "where": matrices, "survival_prob": 0.3},
        {"first_moment": "own", "blocks": "element", "where": matrices, "survival_prob": 0.3},
    ],
    ids=describe,
)
def test_sparse_state_holds_an_own_moment_and_blocks_within_leaves(options):
    actual = train(with_magma(optax.adam(LR), sparse_state=True, **options))
    mu_from = {"auto": "base", "own": "own"}[options["first_moment"]]
    options = {name: value for name, value in options.items() if name != "first_moment"}
    assert_agrees(actual, expect("adam", mu_from, sparse_state=True, **options), FLOAT32)


def test_sparse_state_tells_a_parameter_from_one_whose_path_ends_alike():
    params = {"w": jnp.ones(4), "mu": {"w": jnp.ones(4)}}  # the state has mu/w and mu/mu/w
    tx = with_magma(optax.adam(LR), sparse_state=True)
    state, seen = tx.init(params), set()
    for _ in range(8):
        before = state.inner_state[0].mu
        updates, state = tx.update(params, state, params)
        after = state.inner_state[0].mu
        advanced = [
            bool((a != b)[0]) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)
        ]
        assert advanced == [bool(u[0] != 0) for u in jax.tree.leaves(updates)]
        seen.add(tuple(advanced))
    assert {(True, False), (False, True)} <= seen


# Without gradients: alignment estimated from the incoming updates.


@pytest.mark.parametrize(
    "base, moves_like, options",
    [
        ("adam", "momentum", {}),
        ("sgd", "momentum", {}),
        ("laprop", "momentum", {"b1": 0.7, "blocks": "row", "rescale": True}),
        ("rmsprop", "gradient", {}),
        ("rmsprop", "gradient", {"b1": 0.7, "blocks": "row", "rescale": True}),
    ],
)
def test_without_gradients_alignment_is_estimated_from_updates(base, moves_like, options):
    tx = optax.chain(BASES[base](), magma(base=moves_like, **options))
    with pytest.warns(UserWarning, match="grad"):
        actual = train(tx)
    # Undoing an EMA subtracts numbers ten times as large as their difference; for one row of four
    # elements that can leave few digits of the smallest.
    assert_agrees(actual, expect(base, moves_like, **options), FLOAT32, {"atol": 1e-5, "rtol": 0})


# SkipUpdate.


@pytest.mark.parametrize(
    "p, options",
    [
        (0.5, {}),
        (0.3, {"key": 5, "where": matrices}),
        (falling, {"blocks": "column"}),
        (1.0, {}),
    ],
)
def test_skip_update_drops_and_rescales_blocks(p, options):
    grads = as_dtype(PARAMS, jnp.float32)
    updates = by_path(run_magma(skip_update(p, **options), grads)[0])
    layout = {name: value for name, value in options.items() if name != "key"}
    for t, coins in enumerate(coins_of_problem(p, **options)):
        expected = reference.skip_update(by_path(grads), coins, reference.at(p, t), **layout)
        for path, update in updates.items():
            # Two float32 roundings: 1 / p, and the product.
            np.testing.assert_allclose(update[t], expected[path], rtol=3 * 6e-8, err_msg=path)


def run_magma(tx: Any, tree: Any) -> tuple[Any, Any]:
    """Updates of every step and the last state, where gradients and updates are always the same."""

    def step(state, _):
        updates, state = tx.update(tree, state, tree, grad=tree)
        return state, updates

    state, updates = quick_jit(lambda: jax.lax.scan(step, tx.init(tree), None, STEPS))()
    return updates, state


@pytest.mark.parametrize("blocks", ["leaf", "row", "element"])
def test_magma_and_skip_update_toss_equal_coins(blocks):
    options = {"survival_prob": 0.3, "blocks": blocks, "key": 11}
    ones = jax.tree.map(jnp.ones_like, as_dtype(PARAMS, jnp.float32))
    expected = surviving(ones, STEPS, 0.3, blocks=blocks, key=11)
    for tx in (magma(**options), with_magma(optax.identity(), **options)):
        updates, _ = run_magma(tx, ones)
        assert_equal(jax.tree.map(lambda u: u != 0, updates), expected)


def test_undamped_rescaled_magma_is_skip_update_bit_for_bit():
    params = as_dtype(PARAMS, jnp.float32)
    skipped, _ = run_magma(skip_update(0.3, key=4), params)
    masked, _ = run_magma(magma(0.3, key=4, damping=False, rescale=True), params)
    assert_equal(skipped, masked)


# Properties of arbitrary trees. Examples are derandomized: every run sees the same ones. They are
# small and each is compiled anew: a failing one is shown as it is, for shrinking takes minutes.

few = functools.partial(
    settings, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)

DTYPES = ("float32", "bfloat16", "float16", "complex64")
leaf_specs = st.builds(
    jax.ShapeDtypeStruct,
    st.sampled_from([(), (3,), (2, 3), (2, 1, 3)]),
    st.sampled_from([jnp.dtype(name) for name in DTYPES]),
)
float32_specs = leaf_specs.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32))


def trees(specs):
    def containers(node):
        named = st.dictionaries(st.sampled_from(["kernel", "b", "a"]), node, min_size=1)
        return st.one_of(named, st.lists(node, min_size=1, max_size=3), st.tuples(node, node))

    return st.recursive(specs, containers, max_leaves=4)


layouts = st.sampled_from(["leaf", "row", "column", "element", last_axis])
hyperparameters = st.fixed_dictionaries(
    {
        "survival_prob": st.sampled_from([0.25, 0.6, 1.0]),
        "temperature": st.sampled_from([0.5, 2.0, 7.0]),
        "b1": st.sampled_from([0.0, 0.5, 0.9]),
        "score_decay": st.sampled_from([0.0, 0.9]),
        "initial_score": st.sampled_from([0.0, 0.5, 1.0]),
        "damping": st.booleans(),
        "rescale": st.booleans(),
    }
)
seeds = st.integers(0, 2**31)


def fill(specs: Any, seed: int) -> Any:
    """Random arrays of the given shapes and dtypes."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        values = rng.normal(size=spec.shape)
        if jnp.issubdtype(spec.dtype, jnp.complexfloating):
            values = values + 1j * rng.normal(size=spec.shape)
        return jnp.asarray(values, spec.dtype)

    return jax.tree.map(draw, specs)


def epsilon(leaf: Any) -> float:
    return float(jnp.finfo(leaf.dtype).eps)


@few(max_examples=9)
@given(trees(leaf_specs), layouts, hyperparameters, st.integers(0, 2**32 - 1), seeds)
def test_any_tree_agrees_with_the_reference(specs, blocks, hyper, key, seed):
    grads, delta = two_steps(specs, seed), two_steps(specs, seed + 1)
    tx = magma(blocks=blocks, key=key, **hyper)

    @quick_jit
    def run(grads, delta):
        survived = surviving(first(grads), 2, hyper["survival_prob"], blocks=blocks, key=key)
        return survived, *update_twice(tx, grads, delta)

    survived, updates, scores = map(by_path, run(grads, delta))
    expected = reference.Magma(blocks=blocks, **hyper)
    dtypes = {path: leaf.dtype for path, leaf in by_path(grads, lambda leaf: leaf).items()}
    # The coarsest dtype rounds momentum twice; the slope of sigmoid(c / 0.5) is at most 1/2.
    coarse = max(jnp.finfo(dtype).eps for dtype in dtypes.values())
    for t in range(2):
        g, d = ({path: leaf[t] for path, leaf in by_path(tree).items()} for tree in (grads, delta))
        masked = expected.step(d, g, expected.ema(g), coins_at_step(survived, t, blocks))
        for path, update in masked.items():
            near = {"rtol": 0, "atol": 4 * float(coarse)}
            np.testing.assert_allclose(scores[path][t], expected.s[path], **near, err_msg=path)
            close = 2 * float(jnp.finfo(dtypes[path]).eps) + 16 * float(coarse)
            np.testing.assert_allclose(updates[path][t], update, rtol=close, err_msg=path)


def two_steps(specs: Any, seed: int) -> Any:
    """Random arrays with a leading axis for the step."""
    add_axis = lambda spec: jax.ShapeDtypeStruct((2, *spec.shape), spec.dtype)  # noqa: E731
    return fill(jax.tree.map(add_axis, specs), seed)


def first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def update_twice(tx: Any, grads: Any, delta: Any) -> tuple[Any, Any]:
    """Updates and scores of two steps."""

    def step(state, given):
        g, d = given
        updates, state = tx.update(d, state, grad=g)
        return state, (updates, state.alignment)

    return jax.lax.scan(step, tx.init(first(grads)), (grads, delta))[1]


@few(max_examples=8)
@given(trees(float32_specs), layouts, st.integers(-45, 45), seeds)
def test_scores_do_not_depend_on_the_scale_of_gradients(specs, blocks, exponent, seed):
    """Bit for bit, for powers of two that neither overflow nor underflow when squared."""
    grads, tx = two_steps(specs, seed), magma(blocks=blocks)
    run = quick_jit(lambda scaled: update_twice(tx, scaled, grads)[1])
    assert_equal(run(jax.tree.map(lambda leaf: leaf * 2.0**exponent, grads)), run(grads))


@few(max_examples=5)
@given(st.lists(float32_specs, min_size=2, max_size=4), st.randoms(), layouts, seeds)
def test_order_and_containers_do_not_matter_where_paths_are_equal(specs, random, blocks, seed):
    leaves = fill(specs, seed)
    named = {str(n): leaf for n, leaf in enumerate(leaves)}
    shuffled = dict(random.sample(sorted(named.items()), len(named)))
    tx = magma(blocks=blocks)

    @quick_jit
    def step(tree):
        tree = {"x": tree}
        updates, state = tx.update(tree, tx.init(tree), grad=tree)
        return updates, state.alignment

    expected = [by_path(tree) for tree in step(leaves)]
    for tree in (tuple(leaves), shuffled):
        assert_equal([by_path(tree) for tree in step(tree)], expected)


@few(max_examples=4)
@given(trees(leaf_specs), layouts, st.booleans(), seeds)
def test_certain_survival_without_damping_is_the_base_bit_for_bit(specs, blocks, rescale, seed):
    """Run op by op: a compiler is free to round a fused product and sum in another way."""
    base = optax.adam(0.1)
    tx = with_magma(base, 1.0, damping=False, rescale=rescale, blocks=blocks)
    grads = fill(specs, seed)
    state, base_state = tx.init(grads), base.init(grads)
    for _ in range(2):
        updates, state = tx.update(grads, state)
        expected, base_state = base.update(grads, base_state)
        assert_equal(updates, expected)
        assert_equal(state.inner_state, base_state)


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
