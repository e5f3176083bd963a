"""The loss of language models.

Shapes: B sequences, T positions, V tokens.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Sums the negative log-likelihood over the tokens that count.

    Args:
        logits: (B, T, V), any float dtype.
        targets: int32 (B, T); -1 marks positions without a loss.

    Returns:
        The sum in nats and the number of targets, float32 ().
    """
    counted = targets >= 0
    logits = logits.astype(jnp.float32)
    # A sum with one term: the derivative of a lookup would scatter into an array like the logits.
    chosen = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)  # (B, T, V)
    chosen = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)  # (B, T)
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(counted, nll, 0.0)), jnp.sum(counted, dtype=jnp.float32)


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity for a run that diverged."""
    return math.inf if loss > 700 else math.exp(loss)
