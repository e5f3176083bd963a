"""The control that a test of Magma needs: its mean effect as a constant."""

import math

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from magma_optax._blocks.choosing import Where
from magma_optax._blocks.paths import NamedTree
from magma_optax._step.numbers import widen
from magma_optax._step.options import Options, check_number


def mean_multiplier(b1: float = 0.9, survival_prob: float = 0.5, temperature: float = 2.0) -> float:
    r"""Return what Magma multiplies updates by in the mean, where gradients are noise.

    .. math::
        \mathbb{E}[s_t m_t] = p \, \sigma\!\left(\frac{\sqrt{1 - \beta_1^2}}{\tau}\right)

    mu_t contains g_t itself. If gradients are independent from step to step, a large block
    therefore has cos(mu_t, g_t) = sqrt(1 - b1^2), whatever the model: 0.436 for b1 = 0.9. On
    language models the scores that were measured differ from this by less than 0.001.

    Args:
      b1: decay of mu: the base's (0.95 for `optax.contrib.muon`).
      survival_prob: p; 1 for damping without coins.
      temperature: tau.

    Returns:
      The multiplier: 0.277 for the defaults.

    Raises:
      ValueError: a number out of its range.
      TypeError: an argument that is no number.
    """
    check_number("b1", b1, lambda b: 0 <= b < 1, "in [0, 1)", schedule=False)
    check_number("survival_prob", survival_prob, lambda p: 0 < p <= 1, "in (0, 1]", schedule=False)
    check_number("temperature", temperature, lambda t: t > 0, "greater than 0", schedule=False)
    cosine = math.sqrt(1 - float(b1) ** 2)
    return float(survival_prob) / (1 + math.exp(-cosine / float(temperature)))


def control(
    multiplier: ArrayLike | None = None,
    *,
    where: Where | None = None,
    b1: float = 0.9,
    survival_prob: float = 0.5,
    temperature: float = 2.0,
) -> optax.GradientTransformation:
    """Multiply updates by a constant: what Magma does in the mean, without coins and scores.

    Whatever Magma gains over its base has to be compared with this control, its learning rate
    tuned alike. Magma shrinks the updates of the leaves that it masks to about 0.28, so all others
    (embeddings, head, norms) move faster beside them; the control does the same and no more.

    Example:
      >>> import optax
      >>> from magma_optax import attention_and_mlp, control
      >>> tx = optax.chain(optax.adam(3e-3), control(where=attention_and_mlp))

    Args:
      multiplier: the constant, 0 or more; may be traced. None for `mean_multiplier` of the
        arguments below, which do nothing beside a given multiplier.
      where: which leaves are multiplied: None for all, ``(path, leaf) -> bool`` with the path as in
        ``"layers/0/mlp/up_proj/kernel"``, or a tree of bools. Give it what you give Magma, such as
        `attention_and_mlp`. Other leaves pass as they are.
      b1: decay of the base's first moment.
      survival_prob: Magma's p.
      temperature: Magma's tau.

    Returns:
      A link without state, to stand after the base. An update has the dtype that it had.

    Raises:
      ValueError: a number out of its range, here; a ``where`` that selects nothing, in ``init``
        and ``update``.
      TypeError: an argument of the wrong kind.
    """
    given = multiplier is not None
    constant = multiplier if given else mean_multiplier(b1, survival_prob, temperature)
    check_number("multiplier", constant, lambda c: 0 <= c < math.inf, "0 or more", schedule=False)
    options = Options(where=where)

    def init_fn(params):
        options.find_cuts(NamedTree(params))  # Refuses a `where` that selects nothing.
        return optax.EmptyState()

    def update_fn(updates, state, params=None):
        delta = NamedTree(updates)
        chosen = options.find_cuts(delta, NamedTree(params))

        def scale(path, leaf):
            if path not in chosen:
                return leaf
            wide = widen(jnp.asarray(leaf))
            return (wide * jnp.asarray(constant, wide.dtype)).astype(jnp.asarray(leaf).dtype)

        return delta.map(scale), state

    return optax.GradientTransformation(init_fn, update_fn)
