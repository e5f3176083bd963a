"""Cosines of momentum and gradient where gradients are a mean plus white noise, in closed form.

With mu_t = b1 mu_{t-1} + (1 - b1) g_t, the part of mu that is perpendicular to g_t shrinks by b1,
and nothing else happens to it. Where the norm of mu is steady, therefore,

    now^2 = 1 - b1^2 + b1^2 before^2,    now = cos(mu_t, g_t), before = cos(mu_{t-1}, g_t)

With g_t = G + n_t, n independent from step to step, and r = |G|^2 / E |n|^2, in a large block

    before = r / sqrt((r + q) (r + 1)),  q = (1 - b1) / (1 + b1)

All functions take numbers or arrays and return float64.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def noise_cosine(b1: float, steps: ArrayLike = math.inf) -> Floats:
    """Returns cos(mu_t, g_t) of white noise, after so many steps of a mu that began at zero."""
    return np.sqrt((1 - b1**2) / (1 - b1 ** (2 * np.asarray(steps, np.float64))))


def cosine_now(before: ArrayLike, b1: float) -> Floats:
    """Returns cos(mu_t, g_t) from cos(mu_{t-1}, g_t), where the norm of mu is steady."""
    return np.sqrt(1 - b1**2 + (b1 * np.asarray(before, np.float64)) ** 2)


def cosine_before(signal_to_noise: ArrayLike, b1: float) -> Floats:
    """Returns cos(mu_{t-1}, g_t) of a mean gradient in noise, r = |G|^2 / E |n|^2.

    An estimate of r may be below zero; from -q on it counts as -q, and the cosine is -1.
    """
    r, q = np.asarray(signal_to_noise, np.float64), (1 - b1) / (1 + b1)
    root = np.sqrt(np.maximum((r + q) * (r + 1), 1e-300))
    return np.clip(np.where(r <= -q, -1.0, r / root), -1.0, 1.0)


def signal_to_noise(before: ArrayLike, b1: float) -> Floats:
    """Returns r from cos(mu_{t-1}, g_t); 0 from a cosine of 0 or less, infinite from 1."""
    square, q = np.clip(np.asarray(before, np.float64), 0, 1) ** 2, (1 - b1) / (1 + b1)
    # (1 - c^2) r^2 - c^2 (1 + q) r - c^2 q = 0
    half = square * (1 + q) / 2
    root = half + np.sqrt(half**2 + (1 - square) * square * q)
    rest = 1 - square
    return np.where(rest > 0, root / np.where(rest > 0, rest, 1), math.inf)


def score(cosine: ArrayLike, temperature: float = 2.0) -> Floats:
    """Returns Magma's raw score of a cosine: its sigmoid over the temperature."""
    return 1 / (1 + np.exp(-np.asarray(cosine, np.float64) / temperature))


def score_of_elements(b1: float, temperature: float = 2.0) -> float:
    """Returns the mean score of white noise where each element is a block of its own.

    A cosine of numbers is 1 or -1. Two Gaussians of correlation c share their sign with the
    probability 1/2 + arcsin(c) / pi.
    """
    agree = 0.5 + math.asin(noise_cosine(b1)) / math.pi
    return float(agree * score(1.0, temperature) + (1 - agree) * score(-1.0, temperature))
