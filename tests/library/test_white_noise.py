"""The score of white noise: what independent gradients give, and what else gives it or does not.

A cosine of N numbers is off by about 1 / sqrt(N), and the slope of the sigmoid at tau = 2 is at
most 1/8. The score is a mean over ten steps or so, which narrows it further.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from magma_optax import Score, magma, mean_multiplier, summarize, with_magma

PARAMS = {"block": jnp.zeros((256, 128))}
STEPS = 100
TOLERANCE = 4 / math.sqrt(256 * 128) / 8  # four standard errors

ADAM = with_magma(optax.adam(1.0))
# By name, with the decay of the moment that Magma scores.
NOISY = {
    "adam": (0.9, ADAM),
    "adam, b1 = 0.8": (0.8, with_magma(optax.adam(1.0, b1=0.8))),
    "muon": (0.95, with_magma(optax.contrib.muon(1.0, ns_steps=1))),
    "ema": (0.95, with_magma(optax.ema(0.95))),
    "trace": (0.95, with_magma(optax.trace(0.95))),
    "a moment of its own": (0.95, with_magma(optax.rmsprop(1.0), first_moment="own", b1=0.95)),
    "a link": (0.9, optax.chain(optax.adam(1.0), magma())),
    "without coins": (0.9, with_magma(optax.adam(1.0), survival_prob=1.0)),
}
ONES = np.ones(STEPS, np.float32)
NOISE = np.random.default_rng(0).normal(size=(STEPS, 256, 128)).astype(np.float32)


def final_score(tx, scales=ONES, means=0 * ONES):
    """The score after gradients of ``mean + scale * noise``, a scale and a mean for each step."""
    return float(run(tx, NOISE, scales.astype(np.float32), means.astype(np.float32)))


@functools.partial(jax.jit, static_argnums=0)
def run(tx, noise, scales, means):
    update = optax.with_extra_args_support(tx).update

    def step(state, numbers):
        noise, scale, mean = numbers
        grads = {"block": mean + scale * noise}
        return update(grads, state, PARAMS, grad=grads)[1], None

    state, _ = jax.lax.scan(step, tx.init(PARAMS), (noise, scales, means))
    return summarize(state)["alignment_mean"]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("name", NOISY)
def test_independent_gradients_give_the_closed_form(name):
    b1, tx = NOISY[name]
    score = final_score(tx)
    expected = sigmoid(math.sqrt(1 - b1**2) / 2)
    assert abs(score - expected) < TOLERANCE
    assert abs(0.5 * score - mean_multiplier(b1)) < TOLERANCE
    # The tolerance tells this decay from its neighbours.
    assert abs(sigmoid(math.sqrt(1 - (b1 - 0.02) ** 2) / 2) - expected) > TOLERANCE


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_at_another_temperature(tau):
    score = final_score(with_magma(optax.adam(1.0), temperature=tau))
    assert abs(score - mean_multiplier(0.9, 1.0, tau)) < TOLERANCE * 2 / tau


def test_the_scale_of_steady_noise_does_not_matter():
    assert final_score(ADAM, 2.0**-20 * ONES) == final_score(ADAM)


def test_a_constant_gradient_has_the_highest_score():
    score = final_score(ADAM, 0 * ONES, ONES)
    np.testing.assert_allclose(score, sigmoid(0.5), rtol=1e-5)


def test_so_has_one_that_only_changes_its_sign():
    """mu_t is then (1 - b1) / (1 + b1) g_t: the score cannot tell oscillation from agreement."""
    alternating = (-1.0) ** np.arange(STEPS)
    score = final_score(ADAM, 0 * ONES, alternating)
    np.testing.assert_allclose(score, sigmoid(0.5), rtol=1e-5)
    # The moment of the step before can: it points against the gradient.
    before = Score(
        products=lambda mu, g, previous_mu: (previous_mu * g, previous_mu**2, g**2),
        of_sums=lambda sums, tau: jax.nn.sigmoid(
            sums[0] / jnp.maximum(jnp.sqrt(sums[1] * sums[2]), 1e-30) / tau
        ),
    )
    tx = with_magma(optax.adam(1.0), score=before)
    score = final_score(tx, 0 * ONES, alternating)
    np.testing.assert_allclose(score, sigmoid(-0.5), rtol=1e-4)


@pytest.mark.parametrize("cosine", [0.1, 0.3])
def test_a_mean_gradient_raises_the_score_to_second_order(cosine):
    """cos(mu_t, g_t)^2 = 1 - b1^2 + b1^2 c^2 with c = cos(mu_{t-1}, g_t)."""
    b1, q = 0.9, 0.1 / 1.9
    # c = r / sqrt((r + q) (r + 1)), where r is the square of mean over noise.
    ratios = np.linspace(0, 1, 100_001)
    c = ratios / np.sqrt((ratios + q) * (ratios + 1))
    ratio = float(np.interp(cosine, c, ratios))
    score = final_score(ADAM, means=math.sqrt(ratio) * ONES)
    expected = sigmoid(math.sqrt(1 - b1**2 + (b1 * cosine) ** 2) / 2)
    assert abs(score - expected) < TOLERANCE
    assert (abs(expected - mean_multiplier(b1, 1.0)) > TOLERANCE) == (cosine == 0.3)


@pytest.mark.parametrize("growth", [0.95, 1.05])
def test_norms_that_fall_take_the_score_below_white_noise_and_norms_that_rise_above(growth):
    """The gradient of k steps ago counts b1^k growth^-k: sqrt(1 - (b1 / growth)^2)."""
    score = final_score(ADAM, growth ** np.arange(STEPS))
    assert abs(score - sigmoid(math.sqrt(1 - (0.9 / growth) ** 2) / 2)) < TOLERANCE
    assert (score - mean_multiplier(0.9, 1.0)) * (growth - 1) > 0


def test_norms_that_jump_take_the_score_below_white_noise():
    """For most steps mu is what the last large gradient left."""
    score = final_score(ADAM, np.where(np.arange(STEPS) % 10 == 0, 10.0, 1.0))
    assert score < mean_multiplier(0.9, 1.0) - 4 * TOLERANCE
