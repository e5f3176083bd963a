"""with_magma takes the base's first moment where it is an EMA of the raw gradient, else its own."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from magma_optax import attention_and_mlp, magma, with_magma
from magma_optax._moments.base import FirstMoments, leaves_by_place

PARAMS = {"b": jnp.linspace(-1.0, 1.0, 6), "w": jnp.linspace(-1.0, 1.0, 24).reshape(4, 6)}

# What each alias of optax that keeps an EMA of the raw gradient calls it; the rest keep none.
REUSED = {
    **dict.fromkeys(
        "adabelief adam adamax adamaxw adamw amsgrad lamb lion nadam nadamw optimistic_adam "
        "optimistic_adam_v2 radam yogi acprop muon".split(),
        "mu",
    ),
    **dict.fromkeys(["adan", "simplified_ademamix"], "m"),
    "ademamix": "m1",
    "signum": "ema",
    "sgd": "trace",  # with momentum: the EMA over 1 - momentum, of the same direction
}
ARGUMENTS = {"sgd": {"momentum": 0.9}, "noisy_sgd": {"key": 0}}


def aliases():
    """Every optimizer of optax and optax.contrib that needs no more than a learning rate."""
    found = {}
    for module in (optax, optax.contrib):
        for name, factory in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(factory).parameters
            if name.startswith(("scale_by", "_")) or "learning_rate" not in parameters:
                continue
            found[name] = factory
    assert len(found) > 35
    return found


ALIASES = aliases()


def find_emas(base, state):
    return FirstMoments(optax.with_extra_args_support(base).update).find(PARAMS, state)


def build(name):
    kwargs = ARGUMENTS.get(name, {})
    if ALIASES[name] is optax.optimistic_adam:
        with pytest.warns(DeprecationWarning):
            return ALIASES[name](1e-2, **kwargs)
    return ALIASES[name](1e-2, **kwargs)


@functools.cache
def gradients(steps):
    # A drift that every average must follow, and noise; each leaf its own.
    return {
        name: jnp.stack(
            [
                np.sin(0.3 * n) + 0.7 * jax.random.normal(jax.random.key(37 * n + 5), leaf.shape)
                for n in range(steps)
            ]
        )
        for name, leaf in PARAMS.items()
    }


def ema_scores(decays, steps=25):
    """Scores of Algorithm 1 in float64 NumPy, with an EMA of the raw gradients of these decays."""
    scores = {}
    for name, grads in gradients(steps).items():
        mu, score = 0.0, 0.5
        for g in np.asarray(grads, np.float64):
            mu = decays[name] * mu + g
            cosine = np.sum(mu * g) / np.sqrt(np.sum(mu * mu) * np.sum(g * g))
            score = 0.9 * score + 0.1 / (1 + np.exp(-cosine / 2))
        scores[name] = score
    return scores


def magma_scores(tx, steps=25):
    # optax.contrib optimizers that watch the loss get one.
    extra = {"value": jnp.float32(1.0)}

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    (_, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), gradients(steps))
    return state.magma.alignment


# A line search, a loss value, an objective function, per-example gradients, a base of its own.
NEED_MORE = {"lbfgs", "polyak_sgd", "sophia", "dpsgd", "schedule_free"}


@pytest.mark.parametrize("name", sorted(ALIASES.keys() - NEED_MORE))
def test_every_alias_scores_as_an_ema_of_the_raw_gradient(name):
    base = build(name)
    state = base.init(PARAMS)
    found = find_emas(base, state)
    own = with_magma(base).init(PARAMS).magma.momentum
    if name in REUSED:
        assert found.keys() == PARAMS.keys()
        assert all(f".{REUSED[name]}[" in ema.place for ema in found.values())
        assert not jax.tree.leaves(own), "no buffer beside the base's"
    elif name == "galore":  # vectors go to a plain Adam within it; matrices to a projected one
        assert found.keys() == {"b"} and jax.tree.leaves(own)[0].shape == PARAMS["w"].shape
    else:
        assert not found
        chex.assert_trees_all_equal_shapes_and_dtypes(own, PARAMS)
    decays = decays_of(base, state, found)
    # Float32 sums against float64 over 25 steps.
    chex.assert_trees_all_close(magma_scores(with_magma(base)), ema_scores(decays), atol=2e-6)


def decays_of(base, state, found):
    """From one update with zero gradients; Magma's own default where the base has no EMA."""
    decays = dict.fromkeys(PARAMS, 0.9)
    if found:
        ones = jax.tree.map(lambda x: jnp.ones_like(x) if x.ndim else x, state)
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        _, after = jax.jit(optax.with_extra_args_support(base).update)(zeros, ones, PARAMS)
        after = leaves_by_place(after)
        decays |= {path: float(np.ravel(after[ema.place])[0]) for path, ema in found.items()}
    return decays


def into_the_buffer(learning_rate):
    return optax.chain(optax.scale_by_learning_rate(learning_rate), optax.trace(0.9))


@pytest.mark.parametrize(
    "base",
    [
        optax.adam(1e-2, b1=0.0),  # mu = g: the cosine would be 1 for ever
        optax.chain(optax.scale_by_rms(), optax.ema(0.9)),  # LaProp: preconditioned
        optax.chain(optax.scale_by_rms(), optax.trace(0.9)),
        optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2)),  # of g + 0.1 w
        optax.chain(optax.zero_nans(), optax.adam(1e-2)),
        optax.contrib.schedule_free_adamw(1e-2),
        # The buffer has -g. That of a number set later shows in its sign alone.
        into_the_buffer(1e-2),
        optax.inject_hyperparams(into_the_buffer)(1e-2),
    ],
    ids=[
        *("b1=0", "laprop", "trace", "weight decay", "zero_nans", "schedule_free"),
        *("rate in the buffer", "injected rate in the buffer"),
    ],
)
def test_what_is_no_ema_of_the_raw_gradient_is_not_reused(base):
    assert not find_emas(base, base.init(PARAMS))
    chex.assert_trees_all_equal_shapes(with_magma(base).init(PARAMS).magma.momentum, PARAMS)


def clipped_adam(learning_rate, max_norm):
    return optax.chain(optax.clip_by_global_norm(max_norm), optax.adam(learning_rate))


@pytest.mark.parametrize(
    "base",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        optax.inject_hyperparams(optax.adam)(1e-2),
        optax.inject_hyperparams(clipped_adam)(1e-2, max_norm=1.0),
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 10), b1=0.95),
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.chain(optax.adam(1e-2), optax.add_decayed_weights(0.1)),
        optax.rmsprop(1e-2, centered=True),
        optax.contrib.muon(1e-2),
    ],
    ids=[
        "clip",
        "inject",
        "inject clip",
        "schedule",
        "apply_if_finite",
        "decay",
        "centered",
        "muon",
    ],
)
def test_wrapped_first_moments_are_found(base):
    assert find_emas(base, base.init(PARAMS)).keys() == PARAMS.keys()
    assert not jax.tree.leaves(with_magma(base).init(PARAMS).magma.momentum)


def test_under_vmap_a_number_of_unknown_sign_is_not_trusted():
    """Decays may differ between models of a vmap; a rate in the buffer could have any sign."""

    def momentum(make):
        def init(number):
            return with_magma(make(number)).init(PARAMS).magma.momentum

        return jax.vmap(init)(jnp.array([0.5, 0.9]))

    assert momentum(lambda b1: optax.adam(1e-2, b1=b1)) is None
    assert momentum(lambda decay: optax.trace(decay)) is None
    kept = momentum(lambda rate: optax.chain(optax.scale(-rate), optax.trace(0.9)))
    assert kept["w"].shape == (2, 4, 6)


def test_partition_is_matched_leaf_by_leaf():
    groups = {"adam": optax.adam(1e-2), "rms": optax.rmsprop(1e-2), "frozen": optax.set_to_zero()}
    params = {**PARAMS, "frozen": jnp.ones(3)}
    base = optax.partition(groups, {"b": "rms", "w": "adam", "frozen": "frozen"})
    momentum = with_magma(base).init(params).magma.momentum
    assert {k: isinstance(v, optax.MaskedNode) for k, v in momentum.items()} == {
        "b": False,
        "w": True,
        "frozen": False,
    }
    # Leaves outside `where` keep none.
    momentum = with_magma(base, where=lambda path, _: path != "frozen").init(params).magma.momentum
    assert jax.tree.map(jnp.shape, momentum) == {
        "b": (6,),
        "w": optax.MaskedNode(),
        "frozen": optax.MaskedNode(),
    }


def test_own_and_given_first_moments_agree_with_the_reused_one():
    def given(inner_state):
        return inner_state[0].mu

    scores = [
        magma_scores(with_magma(optax.adam(1e-2), first_moment=how))
        for how in ("auto", "own", given)
    ]
    # Adam's update of mu and Magma's round alike up to the order of float32 products.
    chex.assert_trees_all_close(scores[0], scores[1], rtol=1e-6)
    chex.assert_trees_all_close(scores[0], scores[2], rtol=1e-6)
    assert with_magma(optax.adam(1e-2), first_moment=given).init(PARAMS).magma.momentum is None


def test_no_parameter_sized_buffer_on_adam_and_one_on_rmsprop():
    params = {"layers": {"mlp": {"up": jnp.ones((8, 32))}}, "head": jnp.ones((8, 100))}

    def added(base, **kwargs):
        sizes = [
            sum(x.nbytes for x in jax.tree.leaves(tx.init(params)))
            for tx in (base, with_magma(base, **kwargs))
        ]
        return sizes[1] - sizes[0]

    assert added(optax.adam(1e-2)) == 4 + 8 + 2 * 4  # step, key, two scores
    assert added(optax.rmsprop(1e-2)) == 4 + 8 + 2 * 4 + 4 * (8 * 32 + 8 * 100)
    assert added(optax.rmsprop(1e-2), where=attention_and_mlp) == 4 + 8 + 4 + 4 * 8 * 32


def test_reads_through_calls_and_recomputation():
    adam = optax.adam(1e-2)

    def update(grads, state, params=None):
        return jax.checkpoint(jax.jit(adam.update))(grads, state, params)

    base = optax.GradientTransformation(adam.init, update)
    assert find_emas(base, base.init(PARAMS)).keys() == PARAMS.keys()


def test_constants_that_are_no_numbers_do_not_disturb_the_search():
    key, scale = jax.random.key(0), jax.new_ref(jnp.float32(0.5))

    def noise(updates, state, params=None):
        added = scale[...] * jax.random.normal(key)
        return jax.tree.map(lambda u: u + added, updates), state

    base = optax.chain(optax.adam(1e-2), optax.GradientTransformation(lambda _: (), noise))
    assert with_magma(base).init(PARAMS).magma.momentum is None

    frozen = {"w": "adam", "b": "adam", "ids": "frozen"}
    base = optax.partition({"adam": optax.adam(1e-2), "frozen": optax.set_to_zero()}, frozen)
    params = {**PARAMS, "ids": jnp.arange(3)}
    grads = {**PARAMS, "ids": np.zeros(3, jax.dtypes.float0)}  # as of jax.grad(allow_int=True)
    tx = with_magma(base)
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["ids"].dtype == jax.dtypes.float0
    assert not jax.tree.leaves(state.magma.momentum)


def test_a_parameter_may_be_called_hyperparams():
    params = {"hyperparams": PARAMS}
    assert with_magma(optax.adam(1e-2)).init(params).magma.momentum is None


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
@pytest.mark.parametrize(
    ("tx", "arrays"),
    [
        (with_magma(optax.adam(1e-2)), 2),  # the gradient and the moment of each leaf
        (with_magma(optax.rmsprop(1e-2)), 2),
        (optax.chain(optax.adam(1e-2), magma()), 2),
        (optax.with_extra_args_support(optax.adam(1e-2)), 0),
    ],
    ids=["with_magma(adam)", "with_magma(rmsprop)", "magma", "adam"],
)
def test_what_is_summed_is_computed_apart_from_what_is_stored(tx, arrays, platform):
    """Else XLA writes the stored moment from the reducing kernel and copies it into place."""
    step = jax.jit(lambda state: tx.update(PARAMS, state, PARAMS, grad=PARAMS))
    lowered = step.trace(tx.init(PARAMS)).lower(lowering_platforms=(platform,))
    barriers = lowered.as_text().count("optimization_barrier")
    assert barriers == (0 if platform == "cpu" else arrays * len(PARAMS))
