"""The coins: fair, independent, and a function of (key, step, path, block index) alone."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from magma_optax import magma, skip_update, stacked

pytestmark = pytest.mark.usefixtures("keys_are_used_once")

# Statistics are compared at SIGMAS standard errors. A normally distributed number is farther off
# once in 1.7 million; all tests here together compare fewer than 10,000 numbers, so that a fair and
# independent stream fails with a probability below 0.6 %. Seeds are fixed: what passes once, passes
# always.
SIGMAS = 5.0
N = 2**17
PROBABILITIES = [0.05, 0.3, 0.5, 0.9]

TREE = {"wk": (), "wq": (), "layers": [{"w": ()}, {"w": ()}], "layers_0": {"w": ()}}


def ones(shapes: Any, dtype: Any = jnp.float32) -> Any:
    is_shape = lambda node: type(node) is tuple  # noqa: E731
    return jax.tree.map(lambda shape: jnp.ones(shape, dtype), shapes, is_leaf=is_shape)


def survivors(updates: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf != 0, updates)


def toss(tree: Any, steps: Any, p: Any = 0.5, key: Any = 0, **layout) -> Any:
    """Which elements survive in each of the given steps: bools, steps leading."""
    state = skip_update(p, key=key, **layout).init(tree)
    coins = compiled_toss(**layout)(p, tree, state, jnp.asarray(steps, jnp.int32))
    return jax.tree.map(np.asarray, coins)


@functools.cache
def compiled_toss(**layout) -> Any:
    """One compilation for all keys and probabilities; these arrive traced."""

    @jax.jit
    def run(p, tree, state, steps):
        tx = skip_update(p, **layout)
        return jax.vmap(lambda t: survivors(tx.update(tree, state._replace(step=t))[0]))(steps)

    return run


def by_path(tree: Any) -> dict[str, np.ndarray]:
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name(path).removesuffix("/value"): np.asarray(leaf) for path, leaf in leaves}


def columns(tree: Any) -> np.ndarray:
    """(draws, blocks) from leaves of shape (draws, *blocks)."""
    flat = [np.reshape(leaf, (len(leaf), -1)) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(flat, axis=1)


def per_block(elements: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Coins of the blocks that axes of the leaf index, from (draws, *shape of the leaf)."""
    within = tuple(a + 1 for a in range(elements.ndim - 1) if a not in axes)
    coins = elements.all(axis=within)
    np.testing.assert_array_equal(coins, elements.any(axis=within), "a block is masked in part")
    return coins


def assert_frequency(coins: np.ndarray, p: float) -> None:
    """Mean over the first axis is p. For N draws at p = 1/2 this sees an error of 0.007."""
    error = np.abs(coins.mean(axis=0) - p)
    assert error.max() < SIGMAS * math.sqrt(p * (1 - p) / len(coins)), error.max()


def assert_uncorrelated(x: np.ndarray, y: np.ndarray) -> None:
    """Every column of x with every column of y: 0 within 1/sqrt(draws), here 0.014 for N draws."""
    scale = lambda z: (z - z.mean(axis=0)) / z.std(axis=0)  # noqa: E731
    correlation = scale(x).T @ scale(y) / len(x)
    assert np.abs(correlation).max() < SIGMAS / math.sqrt(len(x)), np.abs(correlation).max()


def assert_unlike_later(coins: np.ndarray, lags: Any) -> None:
    """No column, shifted by a lag, is correlated with any column."""
    z = ((coins - coins.mean(axis=0)) / coins.std(axis=0)).astype(np.float32)
    for lag in lags:
        correlation = z[lag:].T @ z[:-lag] / (len(z) - lag)
        assert np.abs(correlation).max() < SIGMAS / math.sqrt(len(z) - lag), (lag, correlation)


def assert_independent(coins: np.ndarray) -> None:
    """No two columns are correlated."""
    first, second = np.triu_indices(coins.shape[1], k=1)
    assert_pairs_uncorrelated(coins[:, first], coins[:, second])


def assert_pairs_uncorrelated(x: np.ndarray, y: np.ndarray) -> None:
    """As above, column by column."""
    product = (x - x.mean(axis=0)) * (y - y.mean(axis=0))
    correlation = product.mean(axis=0) / (x.std(axis=0) * y.std(axis=0))
    assert np.abs(correlation).max() < SIGMAS / math.sqrt(len(x)), np.abs(correlation).max()


# Statistics.


@pytest.mark.parametrize("p", PROBABILITIES)
def test_coins_of_leaves_are_fair_and_independent_between_leaves_and_steps(p):
    coins = columns(toss(ones(TREE), np.arange(N), p))
    assert_frequency(coins, p)
    assert_independent(coins)
    assert_unlike_later(coins, (1, 2, 3, 7, 64))


def test_all_patterns_of_leaves_are_equally_likely():
    """Also what pairwise correlation does not see, such as the parity of three coins."""
    coins = columns(toss(ones(TREE), np.arange(N)))
    counts = np.bincount(coins @ 2 ** np.arange(coins.shape[1]), minlength=32)
    expected = N / 32
    # Chi-square with 31 degrees of freedom: above 80 with probability 4e-6.
    assert ((counts - expected) ** 2 / expected).sum() < 80


@functools.cache
def coins_of_keys(p: Any = 0.5) -> np.ndarray:
    """(keys, steps, leaves), for consecutive seeds."""
    tree = ones({"a": (), "b": ()})

    def start(seed):
        tx = skip_update(p, key=seed)

        def step(state, _):
            updates, state = tx.update(tree, state)
            return state, jnp.stack(jax.tree.leaves(survivors(updates)))

        return jax.lax.scan(step, tx.init(tree), None, 4)[1]

    return np.asarray(jax.jit(jax.vmap(start))(jnp.arange(N, dtype=jnp.uint32)))


def test_coins_are_independent_between_keys():
    coins = coins_of_keys()
    every = coins.reshape(N, -1)
    assert_frequency(every, 0.5)
    assert_independent(every)
    # The next key is no shift of this one by a step.
    assert_uncorrelated(every[1:], every[:-1])


@pytest.mark.parametrize("p", [0.3, 0.5])
@pytest.mark.parametrize("axes, shape", [((0,), (9, 2)), ((1,), (2, 5)), ((0, 2), (3, 2, 4))])
def test_coins_of_stacked_layers_are_fair_and_independent(axes, shape, p):
    elements = toss(
        ones({"one": shape, "other": shape}), np.arange(N // 4), p, blocks=stacked(axes)
    )
    coins = columns({name: per_block(leaf, axes) for name, leaf in elements.items()})
    assert_frequency(coins, p)
    assert_independent(coins)
    assert_uncorrelated(coins[1:], coins[:-1])


FINE = {"element": (512, 512), "row": (2**18, 2), "column": (2, 2**18)}


@pytest.mark.parametrize("p", [0.05, 0.5])
@pytest.mark.parametrize("blocks", FINE)
def test_coins_of_fine_blocks_are_fair_and_independent(blocks, p):
    """Over the 2^18 blocks of a leaf, in two leaves of the same shape and two steps."""
    axes = {"element": (0, 1), "row": (0,), "column": (1,)}[blocks]
    tossed = toss(ones({"one": FINE[blocks], "other": FINE[blocks]}), [0, 1], p, blocks=blocks)
    streams = np.stack([c.ravel() for leaf in tossed.values() for c in per_block(leaf, axes)], 1)
    assert streams.shape == (2**18, 4)
    assert_frequency(streams, p)
    assert_independent(streams)
    assert_unlike_later(streams, (*(2**k for k in range(18)), 3, 511, 513, 2**16 + 1))


# The probability.


def test_a_schedule_sees_the_step_from_zero():
    p = [0.9, 0.1, 0.5, 0.02]
    table = jnp.array(p)
    coins = coins_of_keys(lambda step: table[step])
    for t in range(4):
        assert_frequency(coins[:, t], p[t])


def test_sampling_by_alignment_lets_blocks_survive_as_often_as_their_score():
    """At the second step, where s~ is 0.15, 0.5 and 0.92."""
    first = {"a": jnp.array([4.0, 2.0]), "b": jnp.array([4.0, -8.0]), "c": jnp.array([1.0, 1.0])}
    second = {"a": jnp.array([-1.0, -1.0]), "b": jnp.array([1.0, 1.0]), "c": jnp.array([1.0, 2.0])}

    def survive(seed):
        tx = magma("alignment", 0.4, b1=0.5, key=seed)
        _, state = tx.update(first, tx.init(first), grad=first)
        updates, _ = tx.update(first, state, grad=second)
        return [leaf[0] for leaf in jax.tree.leaves(survivors(updates))]

    coins = np.stack(jax.jit(jax.vmap(survive))(jnp.arange(N, dtype=jnp.uint32)), axis=1)
    for n, (g, h) in enumerate(zip(first.values(), second.values(), strict=True)):
        mu = np.asarray(g / 4 + h / 2, np.float64)
        cosine = mu @ np.asarray(h) / (np.linalg.norm(mu) * np.linalg.norm(h))
        assert_frequency(coins[:, n], 1 / (1 + np.exp(-cosine / 0.4)))
    assert_independent(coins)


@pytest.mark.parametrize("p", [0.3, 0.71])
def test_a_traced_probability_tosses_the_coins_of_a_number(p):
    tree, tx = ones({"a": (1000,)}), skip_update(p, blocks="element")
    traced = toss(tree, [0], p, blocks="element")["a"][0]
    concrete = survivors(tx.update(tree, tx.init(tree))[0])["a"]
    np.testing.assert_array_equal(concrete, traced)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_dtype_of_the_probability_changes_no_coin(dtype):
    """Its value alone counts: 0.3 itself is rounded to the dtype first."""
    steps, tree = np.arange(N), ones({"a": (), "b": ()})
    p = np.asarray(0.3, dtype)
    with jax.enable_x64(dtype == "float64"):
        tossed = toss(tree, steps, jnp.asarray(p))
    assert_equal(tossed, toss(tree, steps, float(p)))
    assert_frequency(columns(tossed), float(p))


def test_coins_compare_one_draw_with_the_probability():
    """So a block that survives at p survives at every larger p; at 1 all do."""
    tree, steps = ones({"a": (64,)}), np.arange(512)
    tossed = [toss(tree, steps, p, blocks="element")["a"] for p in (0.1, 0.5, 0.9, 1.0)]
    for fewer, more in itertools.pairwise(tossed):
        assert (fewer <= more).all() and fewer.sum() < more.sum()
    assert tossed[-1].all()


def test_draws_are_multiples_of_two_to_the_minus_23_from_zero():
    """Of 2^25 draws, about 4 are 0 and about 4 k are below k units of 2^-23; none lies between."""
    tree = ones({"a": (2**16,)})
    state = skip_update().init(tree)

    # Optimized, as this one runs for longer than it compiles.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
    def draws_below(units):
        def at_step(step):
            def survive(p):
                tx = skip_update(p, blocks="element")
                return jnp.sum(tx.update(tree, state._replace(step=step))[0]["a"] != 0)

            return jax.vmap(survive)(units * 2.0**-23)  # one draw for all of them

        return jax.lax.map(at_step, jnp.arange(512)).sum(axis=0)

    one, eight, between, above, near, nearer = draws_below(
        jnp.array([1, 8, 4.5, 5, 2_516_582, 2_516_582 + 8])
    ).tolist()
    # Poisson counts: zero of 4 by chance in 2 %, each of the other bounds in less than 1e-4.
    assert 1 <= one <= 14
    assert 11 <= eight <= 56
    assert between == above
    # Near 0.3 as well: no narrower type has rounded the draw or p.
    assert 11 <= nearer - near <= 56


# What the coins do not depend on.

STEPS = np.arange(64)


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def expected_coins(dtype: Any = jnp.float32, **options) -> dict[str, np.ndarray]:
    return by_path(toss(ones(TREE, dtype), STEPS, **options))


def assert_same_coins(tree: Any, **options) -> None:
    """The leaves that tree shares with TREE, by path, have the coins they have there."""
    expected = expected_coins()
    actual = by_path(toss(tree, STEPS, **options))
    shared = actual.keys() & expected.keys()
    assert shared, actual.keys()
    assert_equal({p: actual[p] for p in shared}, {p: expected[p] for p in shared})


def test_other_parameters_change_no_coin():
    grown = {"aa": (), "layers": [{"w": (), "a": (3, 2)}, {"w": ()}, {"w": ()}], "zz": {"x": (2,)}}
    assert_same_coins(ones(TREE | grown))
    assert_same_coins(ones({"wq": ()}))
    renamed = {name + "_renamed" if name != "wq" else name: leaf for name, leaf in TREE.items()}
    assert_same_coins(ones(renamed))


def test_the_order_of_leaves_changes_no_coin():
    assert_same_coins(ones(dict(reversed(TREE.items()))))


def test_a_path_decides_the_coins():
    coins = {path: leaf.tolist() for path, leaf in expected_coins().items()}
    assert len({tuple(stream) for stream in coins.values()}) == len(coins)


def test_selection_changes_no_coin():
    masked = toss(ones(TREE), STEPS, where=lambda path, leaf: path != "wk")
    assert masked["wk"].all()
    del masked["wk"]
    expected = expected_coins()
    assert_equal(by_path(masked), {p: c for p, c in expected.items() if p != "wk"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any


class NamedLayer(NamedTuple):
    w: Any


class FrozenMapping(Mapping):
    """A mapping that is no dict, with dict keys, as Flax's FrozenDict."""

    def __init__(self, items):
        self.items_by_name = dict(items)

    def __getitem__(self, name):
        return self.items_by_name[name]

    def __iter__(self):
        return iter(self.items_by_name)

    def __len__(self):
        return len(self.items_by_name)


jax.tree_util.register_pytree_with_keys(
    FrozenMapping,
    lambda m: ([(jax.tree_util.DictKey(k), v) for k, v in m.items()], tuple(m)),
    lambda names, leaves: FrozenMapping(zip(names, leaves, strict=True)),
)


CONTAINERS = {
    "dataclass": lambda tree: tree | {"layers": [Layer(**layer) for layer in tree["layers"]]},
    "named tuple": lambda tree: tree | {"layers": tuple(NamedLayer(**x) for x in tree["layers"])},
    "mapping": lambda tree: FrozenMapping(tree | {"layers_0": FrozenMapping(tree["layers_0"])}),
    "list as dict": lambda tree: tree | {"layers": dict(enumerate(tree["layers"]))},
    "list as named dict": lambda t: t | {"layers": {str(n): x for n, x in enumerate(t["layers"])}},
    "box": lambda tree: jax.tree.map(nnx.Param, tree),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_kind_of_container_changes_no_coin(container):
    actual = by_path(toss(CONTAINERS[container](ones(TREE)), STEPS))
    assert_equal(actual, expected_coins())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "float64"])
def test_the_dtype_of_leaves_and_x64_mode_change_no_coin(dtype):
    with jax.enable_x64(dtype == "float64"):
        wide = expected_coins(dtype)
    assert_equal(wide, expected_coins())


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_the_default_generator_changes_no_coin(implementation):
    expected = expected_coins()
    with jax.default_prng_impl(implementation):
        assert_equal(expected_coins(), expected)  # Compiled anew: JAX keys its cache by this.


@pytest.mark.parametrize("partitionable", [False, True])
def test_the_scheme_of_threefry_changes_no_coin(partitionable):
    expected = expected_coins()
    with jax.threefry_partitionable(partitionable):
        assert_equal(expected_coins(), expected)


def test_compilation_and_vmap_change_no_coin():
    tree, tx = ones(TREE), skip_update()
    step = jax.jit(tx.update)
    eager = compiled = tx.init(tree)
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tree)
    mapped = jax.vmap(tx.init)(batch)
    for _ in range(4):
        expected, eager = tx.update(tree, eager)
        updates, compiled = step(tree, compiled)
        several, mapped = jax.vmap(tx.update)(batch, mapped)
        assert_equal(updates, expected)
        for n in range(3):
            assert_equal(jax.tree.map(lambda leaf, n=n: leaf[n], several), expected)


@pytest.mark.parametrize("blocks", ["element", "row"])
def test_fine_coins_under_vmap_are_those_of_each_alone(blocks):
    tree = ones({"a": (5, 3)})
    keys = jnp.arange(4, dtype=jnp.uint32)

    def once(key):
        tx = skip_update(key=key, blocks=blocks)
        return survivors(tx.update(tree, tx.init(tree))[0])["a"]

    with jax.default_prng_impl("rbg"):
        together = jax.vmap(once)(keys)
    np.testing.assert_array_equal(together, np.stack([once(key) for key in keys]))


@pytest.mark.parametrize("sizes", [(1, 7), (7, 300), (300, 20_000)], ids=str)
def test_more_blocks_leave_the_coins_of_the_first_as_they_were(sizes):
    """A coin knows the index of its block, not how many there are."""
    few, many = (toss(ones({"a": (n,)}), STEPS, blocks="element")["a"] for n in sizes)
    np.testing.assert_array_equal(few, many[:, : sizes[0]])


def test_the_layout_of_blocks_changes_no_coin_of_an_index():
    elements = toss(ones({"a": (6,)}), STEPS, blocks="element")["a"]
    rows = per_block(toss(ones({"a": (6, 2)}), STEPS, blocks="row")["a"], (0,))
    layers = per_block(toss(ones({"a": (2, 6)}), STEPS, blocks=stacked(1))["a"], (1,))
    grid = toss(ones({"a": (3, 2)}), STEPS, blocks="element")["a"].reshape(len(STEPS), 6)
    for coins in (rows, layers, grid):
        np.testing.assert_array_equal(coins, elements)


# Keys.


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_a_seed_and_its_threefry_keys_toss_equal_coins(seed):
    expected = expected_coins(key=seed)
    keys = {
        "typed": jax.random.key(seed, impl="threefry2x32"),
        "legacy": jax.random.PRNGKey(seed, impl="threefry2x32"),
        "NumPy": np.array([0, seed], np.uint32),
        "NumPy integer": np.uint32(seed),
        "NumPy number": np.array(seed, np.int64),
        "JAX number": jnp.uint32(seed),
    }
    for key in keys.values():
        assert_equal(expected_coins(key=key), expected)
    with jax.default_prng_impl("rbg"):
        assert_equal(expected_coins(key=seed), expected)


def test_a_traced_seed_is_the_key_of_the_number():
    start = jax.jit(lambda seed: skip_update(key=seed).init(ones(TREE)).key)
    for seed in (0, 7, 2**31 - 1, -1, -(2**31)):
        np.testing.assert_array_equal(start(seed), skip_update(key=seed).init(ones(TREE)).key)
    for narrow in (np.int8(5), np.int8(-5), np.int16(300), np.uint8(200)):
        expected = skip_update(key=int(narrow)).init(ones(TREE)).key
        np.testing.assert_array_equal(skip_update(key=narrow).init(ones(TREE)).key, expected)
        np.testing.assert_array_equal(start(narrow), expected)
    with jax.enable_x64(True):
        for seed in (2**40 + 5, -(2**40)):
            np.testing.assert_array_equal(start(seed), skip_update(key=seed).init(ones(TREE)).key)


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_keys_of_four_words_are_taken_and_told_apart(implementation):
    """Such a key repeats its two words, so their exclusive or would be zero for all seeds."""
    streams = set()
    for seed in range(6):
        typed = jax.random.key(seed, impl=implementation)
        raw = jax.random.key_data(jax.random.key(seed, impl=implementation))
        coins = columns(toss(ones(TREE), STEPS, key=typed))
        np.testing.assert_array_equal(columns(toss(ones(TREE), STEPS, key=raw)), coins)
        streams.add(coins.tobytes())
    assert len(streams) == 6
    for word in range(4):
        raw = np.zeros(4, np.uint32)
        raw[word] = 1
        streams.add(columns(toss(ones(TREE), STEPS, key=raw)).tobytes())
    assert len(streams) == 10, "a word of the key is ignored"


def test_the_state_holds_a_raw_threefry_key():
    for key in (3, jax.random.key(3), jax.random.key(3, impl="rbg")):
        state = skip_update(key=key).init(ones(TREE))
        assert state.key.dtype == jnp.uint32 and state.key.shape == (2,)
        assert state.step.dtype == jnp.int32 and state.step.shape == ()


def test_groups_of_a_partition_with_one_key_toss_the_coins_of_their_paths():
    tree = ones({"decay": (), "rest": ()})
    tx = optax.partition(
        {"x": skip_update(key=5), "y": optax.chain(optax.identity(), skip_update(key=5))},
        {"decay": "x", "rest": "y"},
    )

    @jax.jit
    def run(tree):
        def step(state, _):
            updates, state = tx.update(tree, state)
            return state, survivors(updates)

        return jax.lax.scan(step, tx.init(tree), None, len(STEPS))[1]

    coins = run(tree)
    assert_equal(coins, toss(tree, STEPS, key=5))
    assert not np.array_equal(coins["decay"], coins["rest"])


# Steps.


@pytest.mark.parametrize("make", [skip_update, magma], ids=["skip_update", "magma"])
def test_a_restored_state_continues_the_stream(make):
    tree, tx = ones(TREE), make(0.5, blocks="element")

    @jax.jit
    def run(state):
        def step(state, _):
            updates, state = tx.update(tree, state, **({"grad": tree} if make is magma else {}))
            return state, survivors(updates)

        return jax.lax.scan(step, state, None, 8)

    middle, first = run(tx.init(tree))
    saved = jax.tree.map(np.asarray, middle)
    _, second = run(jax.tree.map(jnp.asarray, saved))
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), first, second)
    assert_equal(joined, toss(tree, np.arange(16), blocks="element"))


def test_late_steps_still_toss():
    """Up to the last step that an int32 can count."""
    steps = 2**31 - 1 - np.arange(2**14)
    coins = columns(toss(ones(TREE), steps))
    assert_frequency(coins, 0.5)
    assert_independent(coins)
    assert_uncorrelated(coins, columns(toss(ones(TREE), np.arange(2**14))))


# The stream itself, which no version may change: runs would not resume as they began. Each digit
# holds the first four bits of one draw, for steps 0 to 31 of a block.

PINNED = {
    "layers/0/mlp/kernel key=0": "fcda7bcf8fd61fe78d73d51d61ecbf0f",
    "layers/0/mlp/kernel key=1234": "fdef82f63729a33af720faf9ff497d8b",
    "w key=0": "cb6ec03814df88e0619dbaf9efa10233",
    "w key=1234": "3b0563ffe32228054e93d760ece8e5ad",
    "stack, layer 2": "e66ecf719d408c004d1d2a1d32f9137b",
    "fine, last element": "d6b3be6aa4353088f6603ef57213fc31",
}


def leading_bits(tree: Any, **options) -> dict[str, np.ndarray]:
    """Number of the p in (1/16, ..., 15/16) at which each element is dropped; steps leading."""
    survived = [by_path(toss(tree, np.arange(32), k / 16, **options)) for k in range(1, 16)]
    return {path: 15 - sum(leaf[path].astype(int) for leaf in survived) for path in survived[0]}


def digits(draws: np.ndarray) -> str:
    return "".join(f"{draw:x}" for draw in draws)


def streams() -> dict[str, str]:
    named = {"w": (), "layers": [{"mlp": {"kernel": ()}}]}
    pinned = {}
    for key in (0, 1234):
        for path, draws in leading_bits(ones(named), key=key).items():
            pinned[f"{path} key={key}"] = digits(draws)
    stack = leading_bits(ones({"stack": (3, 2)}), blocks=stacked(0))["stack"]
    pinned["stack, layer 2"] = digits(stack[:, 2, 0])
    fine = leading_bits(ones({"fine": (40, 50)}), blocks="element")["fine"]
    pinned["fine, last element"] = digits(fine[:, -1, -1])
    return pinned


def test_the_stream_is_the_one_of_the_first_version():
    assert streams() == PINNED
