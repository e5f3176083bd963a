"""Draw updates.png: what each rule multiplies an update by, per block and step.

python docs/images/updates.py
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.colors import PowerNorm

from magma_optax import attention_and_mlp, skip_update, with_magma

STEPS = 24
LEAVES = [
    "embed",
    "attn/query",
    "attn/key",
    "attn/value",
    "attn/out",
    "mlp/up",
    "mlp/down",
    "norm",
]
CONSTANT = 0.277  # Magma's mean multiplier on Adam.


def scale_to_one() -> optax.GradientTransformation:
    """A base whose update is 1 everywhere, and which keeps Adam's average of gradients."""
    return optax.chain(
        optax.scale_by_adam(),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.ones_like, updates)),
    )


def multipliers(tx: optax.GradientTransformation) -> np.ndarray:
    """Return what ``tx`` multiplies each leaf's update by: (leaves, steps), on random gradients."""
    params = {leaf: jnp.zeros((64, 64)) for leaf in LEAVES}
    state, columns = tx.init(params), []
    for step in range(STEPS):
        keys = jax.random.split(jax.random.key(step), len(LEAVES))
        grads = {
            leaf: jax.random.normal(key, (64, 64)) for leaf, key in zip(LEAVES, keys, strict=True)
        }
        updates, state = tx.update(grads, state, params)
        columns.append([float(updates[leaf][0, 0]) for leaf in LEAVES])
    return np.array(columns).T


def main() -> None:
    """Draw the four rules side by side and write the picture beside this file."""
    base, where = scale_to_one(), attention_and_mlp
    masked = np.array([[where(leaf)] for leaf in LEAVES])
    plain = multipliers(base)
    panels = {
        "base optimizer": plain,
        "SkipUpdate: 0 or 2": multipliers(optax.chain(base, skip_update(where=where))),
        "Magma: 0 or the score": multipliers(with_magma(base, where=where)),
        f"control: the constant {CONSTANT}": np.where(masked, CONSTANT, plain),
    }
    figure, axes = plt.subplots(
        2, 2, figsize=(8, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (title, values) in zip(axes.flat, panels.items(), strict=True):
        image = axis.imshow(values, cmap="Blues", norm=PowerNorm(0.6, 0, 2), aspect="auto")
        axis.set_title(title, fontsize=11)
        axis.set_yticks(range(len(LEAVES)), LEAVES, fontsize=8)
        axis.set_yticks(np.arange(len(LEAVES)) - 0.5, minor=True)
        axis.set_xticks(np.arange(STEPS) - 0.5, minor=True)
        axis.grid(which="minor", color="white", linewidth=1)
        axis.tick_params(which="both", length=0)
    for axis in axes[1]:
        axis.set_xticks([0, STEPS - 1], ["first step", f"step {STEPS}"], fontsize=8)
    figure.colorbar(image, ax=axes, label="the update is multiplied by", ticks=[0, 0.5, 1, 2])
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
