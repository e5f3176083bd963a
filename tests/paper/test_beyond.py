"""Arms beyond the paper: their names, their scores, and what they do to updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.kit.options import SettingsError
from examples.paper import command, table1_llama
from examples.paper.arms import ARMS, BASES
from examples.paper.baselines.aligned import aligned, noise_cosine, previous
from examples.paper.beyond import KINDS, Beyond, read
from examples.paper.figure2_nano_moe import EXPERIMENT as NANO_MOE
from examples.paper.search import Search
from magma_optax import mean_multiplier, with_magma

ARMS_BEYOND = Beyond(ARMS, BASES)
BODY, HEAD = ("layers", "0", "mlp", "up_proj", "kernel"), ("lm_head", "kernel")
NAMES = [
    "adam+constant@0.25",
    "adam+aligned@0.25",
    "adam+aligned^4/mean@0.25",
    "adam+previous/mean*mask@0.25",
    "c_adam+aligned@0.25",
    "muon+aligned*mask@0.25",
    "laprop+previous@0.25",
]


def tree(body, head):
    """Parameters of which the first is masked and the second isn't."""
    return {"layers": {"0": {"mlp": {"up_proj": {"kernel": body}}}}, "lm_head": {"kernel": head}}


def body_of(tree):
    return tree["layers"]["0"]["mlp"]["up_proj"]["kernel"]


def noise(steps, shape=(64, 48)):
    """Gradients that are independent from step to step, for the body and the head."""
    keys = jax.random.split(jax.random.key(0))
    return tree(*(jax.random.normal(key, (steps, *shape)) for key in keys))


def follow(tx, grads):
    """The updates of every step, and the state after it."""
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads)

    def step(state, grad):
        updates, state = tx.update(grad, state, params)
        return state, (updates, state)

    return jax.jit(lambda: jax.lax.scan(step, tx.init(params), grads)[1])()


def scores(tx, grads):
    return np.array(body_of(follow(tx, grads)[1].magma.alignment))


# ---------------------------------------------------------------------------------------------
# Scores


@pytest.mark.parametrize("score", [aligned, previous])
@pytest.mark.parametrize("b1", [0.9, 0.95])
def test_scores_are_1_on_white_noise(score, b1):
    tx = with_magma(
        optax.scale_by_adam(b1), 1.0, score=score(b1), initial_score=1.0, score_decay=0.0
    )
    found = scores(tx, noise(400))[80:]  # mu has its steady norm by then
    # A cosine of 3072 entries has a standard deviation of 0.018; mu links neighbouring steps.
    np.testing.assert_allclose(found.mean(), 1, atol=0.02)
    assert 0.01 < found.std() < 0.15


@pytest.mark.parametrize("power", [2.0, 4.0])
def test_gradients_that_dont_change_score_highest(power):
    grads = jax.tree.map(lambda g: jnp.broadcast_to(g[:1], (60, *g.shape[1:])), noise(1))
    tx = with_magma(
        optax.scale_by_adam(), 1.0, score=aligned(0.9, power), initial_score=1.0, score_decay=0.0
    )
    np.testing.assert_allclose(scores(tx, grads), noise_cosine(0.9) ** -power, rtol=1e-4)


def test_the_two_scores_agree_to_first_order():
    b1, epsilon, power = 0.9, 1e-2, 2.0
    g, other = jnp.array([1.0, 0.0]), jnp.array([epsilon, np.sqrt(1 - epsilon**2)])
    before = np.sqrt((1 - b1) / (1 + b1)) * other  # of white noise's norm, at cosine epsilon
    now = b1 * before + (1 - b1) * g

    def raw(score):
        products = score.products(now, g, before)
        return score.of_sums(tuple(map(jnp.sum, products)), jnp.float32(2))

    rise = raw(aligned(b1, power)) - 1
    assert rise > 0.02
    np.testing.assert_allclose(raw(previous(b1, power)) - 1, rise, rtol=0.02)


@pytest.mark.parametrize("score", [aligned, previous])
def test_a_block_without_a_gradient_keeps_its_score(score):
    grads = jax.tree.map(jnp.zeros_like, noise(3))
    tx = with_magma(optax.scale_by_adam(), 1.0, score=score(), initial_score=1.0)
    np.testing.assert_array_equal(scores(tx, grads), 1)


# ---------------------------------------------------------------------------------------------
# Arms


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name):
    grads = noise(2)
    base = name.partition("+")[0]
    ours, state = follow(ARMS_BEYOND[name].build(1e-2, 3), grads)
    theirs, _ = follow(ARMS[base].build(1e-2, 3), grads)
    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(ours))
    np.testing.assert_allclose(ours["lm_head"]["kernel"], theirs["lm_head"]["kernel"], rtol=1e-6)
    ratios = body_of(ours) / jnp.where(body_of(theirs) == 0, jnp.nan, body_of(theirs))
    ratios = np.nanmean(ratios, axis=(1, 2))  # C-Adam has zeros
    if "aligned" not in name and "previous" not in name:
        np.testing.assert_allclose(ratios, 0.25, rtol=1e-5)
    elif "/mean" in name:  # of one block
        np.testing.assert_allclose(ratios * (ratios - (0.5 if "*mask" in name else 0.25)), 0,
                                   atol=1e-5)  # fmt: skip
    # Adam, C-Adam and Muon have the moment already; LaProp's is not of raw gradients.
    own = optax.tree.get(state, "momentum")
    assert bool(jax.tree.leaves(own)) == (base == "laprop")


def test_c_adam_is_scored_by_adams_moment():
    grads, score = noise(5), aligned()
    ours, theirs = (
        scores(with_magma(BASES[base](), 1.0, score=score, initial_score=1.0), grads)
        for base in ("c_adam", "adam")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "muon", "laprop", "rmsprop"])
def test_the_constant_is_the_closed_form(name):
    grads = noise(1)
    b1 = {"muon": 0.95}.get(name, 0.9)
    ours, _ = follow(ARMS[f"{name}+constant"].build(1e-2, 0), grads)
    theirs, _ = follow(ARMS[name].build(1e-2, 0), grads)
    expected = mean_multiplier(b1) * body_of(theirs)
    np.testing.assert_allclose(body_of(ours), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_coins_leave_the_mean_as_it_is(kind):
    """What survives is divided by p, so an update is 0 or twice what it is without coins."""
    grads = noise(12)
    bare, _ = follow(ARMS_BEYOND[f"adam+{kind}@0.1"].build(1e-2, 0), grads)
    masked, _ = follow(ARMS_BEYOND[f"adam+{kind}*mask@0.1"].build(1e-2, 0), grads)
    kept = np.array(jnp.any(body_of(masked) != 0, axis=(1, 2)))
    assert 0 < kept.sum() < 12
    np.testing.assert_allclose(body_of(masked)[kept], 2 * body_of(bare)[kept], rtol=1e-5)


def test_nano_moe_has_them_too():
    arm = NANO_MOE.arms["c_adam+aligned@0.1386"]
    assert arm.centre == 2 * NANO_MOE.arms["c_adam"].centre
    updates, _ = follow(arm.build(1e-2, 0), noise(2))
    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates))


# ---------------------------------------------------------------------------------------------
# Names


def test_a_name_says_all():
    assert read("adam+constant@0.1386", BASES) == ("adam", "constant", 2, False, False, 0.1386)
    assert read("c_adam+aligned^4/mean*mask@0.5", BASES) == (
        "c_adam", "aligned", 4, True, True, 0.5,
    )  # fmt: skip


def test_iteration_yields_arms_with_names_of_their_own():
    assert list(ARMS_BEYOND) == list(ARMS)
    assert "adam+aligned" not in ARMS_BEYOND
    assert ARMS_BEYOND["adam+aligned@0.1"].centre == ARMS["adam+constant"].centre


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adam+constant@x", "the ratio 'x' is not a number"),
        ("adam+constant@0", "the ratio must be more than 0.0"),
        ("adam+constant@", "the ratio '' is not a number"),
        ("adam+constant@nan", "the ratio must be more than 0.0"),
        ("adam+constant@0.10", "write the ratio as 0.1, not 0.10"),
        ("adam+aligned^2@0.1", "2 is the power without being told; leave it out"),
        ("adam+aligned^x@0.1", "the power 'x' is not a number"),
        ("adam+constant^4@0.1", "a constant has neither power nor mean; leave it out"),
        ("adam+alined@0.1", "no kind 'alined'; there are constant, aligned, previous"),
        ("adm+aligned@0.1", "no base 'adm'; there are adam, c_adam, "),
        ("adam@0.1", "is not of the form BASE+KIND@RATIO"),
    ],
)
def test_a_wrong_name_is_one_line(name, message):
    with pytest.raises(SettingsError, match=r"^arm "):
        ARMS_BEYOND[name]
    with pytest.raises(SystemExit) as stop:
        table1_llama.main(["--arms", name])
    error = str(stop.value.code)
    assert error.startswith("error: arm '") and message in error and "\n" not in error


def test_a_search_may_begin_elsewhere():
    parser = command.make_parser("")
    command.add_search_options(parser, "records")
    args = parser.parse_args(["--centre", "adam+aligned@0.1386=8e-3"])
    found = command.searches_of(args, ARMS_BEYOND, ["adam+aligned@0.1386"])
    assert found == [Search("adam+aligned@0.1386", 8e-3)]
