"""The arms of the Llama's comparisons: they build, and do what their names say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.kit.loss import cross_entropy
from examples.llama.config import LlamaConfig
from examples.llama.model import Llama
from examples.paper.appendix_ablations import ABLATIONS, SETS
from examples.paper.arms import ARMS
from examples.paper.baselines.matrices import select as matrices
from magma_optax import attention_and_mlp, mean_multiplier


@pytest.fixture(scope="module")
def tiny():
    """Parameters of a very small Llama and two steps' gradients, one leaf of each kind."""
    config = LlamaConfig(20, 8, 12, 2, 1)
    graphdef, state = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(24).reshape(2, 12) % 20

    @jax.jit
    @jax.grad
    def gradient(params, tokens):
        nll, count = cross_entropy(nnx.merge(graphdef, params)(tokens), tokens)
        return nll / count

    params = nnx.to_pure_dict(state)
    trees = params, gradient(params, tokens), gradient(params, 19 - tokens)
    return tuple(map(one_of_each, trees))


def one_of_each(tree):
    """The embedding, the head, a norm, and a matrix each of 8 x 8, 8 x 12 and 12 x 8."""
    layer = tree["layers"][0]
    few = {"self_attn": ["q_proj"], "mlp": ["up_proj", "down_proj"]}
    kept = {part: {name: layer[part][name] for name in names} for part, names in few.items()}
    return tree | {"layers": {0: kept}}


def updates_of(arm, tiny, rate, key):
    """Both steps' updates, stacked, and the last state; rate and key are traced."""
    params, *gradients = tiny
    stacked = jax.tree.map(lambda *steps: jnp.stack(steps), *gradients)

    @jax.jit
    def run(rate, key):
        tx = optax.with_extra_args_support(arm.build(lambda step: rate / (step + 1), key))

        def step(state, grads):
            updates, state = tx.update(grads, state, params)
            return state, updates

        state, updates = jax.lax.scan(step, tx.init(params), stacked)
        return updates, state

    return run(rate, key)


@pytest.mark.parametrize("name", ARMS)
def test_two_steps_of_every_arm(tiny, name):
    updates, _ = updates_of(ARMS[name], tiny, jnp.float32(0.01), jnp.uint32(3))
    for update, masked in zip(jax.tree.leaves(updates), inside(tiny), strict=True):
        assert jnp.all(jnp.isfinite(update))
        # Embeddings, head and norms move whatever the coins (SOAP skips its first step).
        assert masked or jnp.any(update[1] != 0)


def inside(tiny):
    """Which leaves are attention and MLP matrices."""
    return jax.tree.leaves(matrices(tiny[0], attention_and_mlp))


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_builds(tiny, name):
    updates, _ = jax.eval_shape(lambda: updates_of(ABLATIONS[name], tiny, 0.01, 0))
    assert jax.tree.all(jax.tree.map(lambda u, p: u.shape == (2, *p.shape), updates, tiny[0]))


def test_ablations_cover_the_papers_tables():
    sizes = {"components": 3, "granularity": 20, "sampling": 12, "momentum": 4, "decay": 6}
    for sets in SETS.values():
        assert {name: len(arms) for name, arms in sets.items()} == sizes
    assert len(ABLATIONS) == 2 * sum(sizes.values())
    assert not ABLATIONS.keys() & ARMS.keys()


@pytest.mark.parametrize(("base", "usual"), [("rmsprop", "0.99"), ("adam", "0.999")])
def test_decays_of_the_second_moment(tiny, base, usual):
    def updates(arm):
        return jax.tree.leaves(updates_of(arm, tiny, jnp.float32(0.01), jnp.uint32(0))[0])

    own = updates(ARMS[base])
    for b2 in ("0.95", "0.99", "0.999"):
        other = updates(ABLATIONS[f"{base}/b2={b2}"])
        same = all(map(np.array_equal, own, other))
        assert same == (b2 == usual)


@pytest.mark.parametrize("name", ["adam", "adam+magma", "adam+skip", "muon+constant"])
def test_a_traced_rate_and_seed_are_as_good_as_numbers(tiny, name):
    updates, _ = updates_of(ARMS[name], tiny, jnp.float32(0.01), jnp.uint32(3))
    params, *gradients = tiny
    tx = optax.with_extra_args_support(ARMS[name].build(lambda step: 0.01 / (step + 1), 3))
    update = jax.jit(tx.update)
    first, state = update(gradients[0], tx.init(params), params)
    second, _ = update(gradients[1], state, params)
    jax.tree.map(
        lambda ours, *theirs: np.testing.assert_allclose(
            ours, np.stack(theirs), rtol=2e-5, atol=1e-7
        ),
        updates,
        first,
        second,
    )


def test_magma_reuses_adams_moment_under_a_traced_rate(tiny):
    *_, state = updates_of(ARMS["adam+magma"], tiny, jnp.float32(0.01), jnp.uint32(0))
    assert optax.tree.get(state, "momentum") is None


def test_controls_scale_attention_and_mlp_alone(tiny):
    def norms(name, key=1):
        updates, _ = updates_of(ARMS[name], tiny, jnp.float32(0.01), jnp.uint32(key))
        return np.array([jnp.linalg.norm(u[0]) for u in jax.tree.leaves(updates)])

    masked, base = np.array(inside(tiny)), norms("adam")
    names = ["adam+constant", "adam+constant*mask", "adam+damping", "adam+damping/2"]
    constant, coins, damping, half = (norms(name) / base for name in names)
    for ratios in (constant, coins, damping, half):
        np.testing.assert_allclose(ratios[~masked], 1, rtol=1e-5)
    np.testing.assert_allclose(constant[masked], mean_multiplier(), rtol=1e-5)
    np.testing.assert_allclose(
        coins[masked] * (coins[masked] - 2 * mean_multiplier()), 0, atol=1e-5
    )
    assert 0 < np.count_nonzero(coins[masked]) < masked.sum()
    assert ((damping[masked] > 0.4) & (damping[masked] < 0.7)).all()
    np.testing.assert_allclose(half[masked], damping[masked] / 2, rtol=1e-5)
