"""Another score is one argument: what is summed over a block, and what follows from the sums."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from sharded import P, make_mesh

from magma_optax import Score, magma, stacked, with_magma

PARAMS = {"a": jnp.ones((4, 6)), "b": jnp.ones((3, 2, 5))}
GRADS = [
    jax.tree.map(lambda x, n=n: jax.random.normal(jax.random.key(n), x.shape) + 0.3, PARAMS)
    for n in range(4)
]
# How much of g lies along the moment before, as a share of g: needs all three arguments' parts.
SHARE = Score(
    products=lambda mu, g, previous_mu: (previous_mu * g, previous_mu**2, g**2, jnp.abs(mu)),
    of_sums=lambda sums, tau: (
        jnp.where(sums[1] > 0, sums[0] ** 2 / (sums[1] * sums[2]) + 0 * sums[3], 0.0) / tau
    ),
)
FORMS = {
    "magma": lambda score=SHARE, **kw: optax.chain(optax.adam(0.1), magma(score=score, **kw)),
    "with_magma(adam)": lambda score=SHARE, **kw: with_magma(optax.adam(0.1), score=score, **kw),
    "with_magma(own)": lambda score=SHARE, **kw: with_magma(
        optax.adam(0.1), score=score, first_moment="own", **kw
    ),
    "with_magma(rmsprop)": lambda score=SHARE, **kw: with_magma(
        optax.rmsprop(0.1), score=score, **kw
    ),
    "with_magma(function)": lambda score=SHARE, **kw: with_magma(
        optax.adam(0.1), score=score, first_moment=lambda state: state[0].mu, **kw
    ),
}


def scores_of(state):
    return optax.tree.get(state, "alignment")


def run(tx, grads=GRADS, place=lambda tree: tree):
    params = place(PARAMS)
    state = tx.init(params)
    update = jax.jit(lambda g, s: tx.update(g, s, params, grad=g))
    for g in map(place, grads):
        _, state = update(g, state)
    return scores_of(state)


def by_hand(tau=2.0, axes=()):
    """The scores after `GRADS`, in float64."""
    scores = {}
    for name, leaf in PARAMS.items():
        cut = axes if leaf.ndim > 2 else ()
        summed = tuple(a for a in range(leaf.ndim) if a not in cut)
        mu, s = np.zeros(leaf.shape), 0.5
        for grads in GRADS:
            g = np.asarray(grads[name], np.float64)
            along, squares = (mu * g).sum(summed), (mu**2).sum(summed) * (g**2).sum(summed)
            raw = np.divide(along**2, squares, out=np.zeros_like(squares), where=squares > 0) / tau
            s, mu = 0.9 * s + 0.1 * raw, 0.9 * mu + 0.1 * g
        scores[name] = s
    return scores


@pytest.mark.parametrize("form", FORMS)
def test_a_score_of_mu_g_and_the_moment_before(form):
    chex.assert_trees_all_close(run(FORMS[form]()), by_hand(), rtol=1e-5)
    cut = run(FORMS[form](blocks=lambda path, leaf: 0 if leaf.ndim > 2 else (), temperature=1.5))
    chex.assert_trees_all_close(cut, by_hand(1.5, axes=(0,)), rtol=1e-5)


@pytest.mark.parametrize("gradients", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_it_sees_float32_whatever_the_parameters_are(form, gradients):
    seen = set()

    def products(mu, g, previous_mu):
        seen.update(x.dtype.name for x in (mu, g, previous_mu))
        return (g,)

    tx = FORMS[form](score=Score(products, lambda sums, tau: sums[0] / tau))
    params = optax.tree.cast(PARAMS, jnp.bfloat16)
    grads = optax.tree.cast(GRADS[0], gradients)
    jax.eval_shape(lambda: tx.update(grads, tx.init(params), params, grad=grads))
    assert seen == {"float32"}


@pytest.mark.parametrize("form", ["magma", "with_magma(adam)"])
def test_its_sums_cross_a_mesh(form):
    mesh = make_mesh()
    place = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "fsdp"))), tree
    )
    chex.assert_trees_all_close(run(FORMS[form](), place=place), by_hand(), rtol=1e-5)

    tx, specs = FORMS[form](axis_name="fsdp"), jax.tree.map(lambda _: P(None, "fsdp"), PARAMS)

    def steps(params, grads):
        state = tx.init(params)
        for g in grads:
            _, state = tx.update(g, state, params, grad=g)
        return scores_of(state)

    sharded = jax.shard_map(steps, mesh=mesh, in_specs=(specs, [specs] * 4), out_specs=P())
    chex.assert_trees_all_close(jax.jit(sharded)(PARAMS, GRADS), by_hand(), rtol=1e-5)


def test_a_block_whose_raw_score_is_nan_keeps_its_score():
    never = Score(lambda mu, g, previous_mu: (g,), lambda sums, tau: jnp.nan * sums[0])
    tx = magma(score=never, initial_score=0.25, blocks=stacked(0))
    _, state = tx.update(GRADS[0], tx.init(PARAMS), grad=GRADS[0])
    chex.assert_trees_all_equal(state.alignment, {"a": jnp.full(4, 0.25), "b": jnp.full(3, 0.25)})


def test_it_may_be_of_another_dtype():
    """The state stays float32, so that no step is compiled anew."""
    tx = magma(score=Score(lambda mu, g, old: (g,), lambda sums, tau: jax.nn.sigmoid(sums[0])))
    with jax.enable_x64(True):
        params = {"w": jnp.ones((2, 3), jnp.float64)}
        _, state = tx.update(params, tx.init(params), grad=params)
        assert state.alignment["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("products", "of_sums", "said"),
    [
        (
            lambda mu, g, old: mu * g,
            lambda sums, tau: sums[0],
            r"it returned shapes \(4, 2\)",
        ),
        (lambda mu, g, old: (jnp.sum(g),), lambda sums, tau: sums[0], r"shapes \(\(\),\)"),
        (lambda mu, g, old: (g,), lambda sums, tau: jnp.float32(0.5), r"it returned shape \(\)"),
    ],
)
def test_a_score_of_the_wrong_shape_is_named(products, of_sums, said):
    tx = with_magma(optax.adam(0.1), score=Score(products, of_sums), blocks=stacked(0))
    params = {"a": jnp.ones((4, 2))}
    with pytest.raises(ValueError, match=f"^score: .* for 'a', .*{said}$"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("score", [lambda mu, g, previous_mu: 0.5, "cosine", 0.5])
def test_what_is_no_score_is_named(score):
    with pytest.raises(TypeError, match=r"score must be a magma_optax.Score\(products, of_sums\)"):
        magma(score=score)
    with pytest.raises(TypeError, match="score must be"):
        with_magma(optax.adam(0.1), score=score)
