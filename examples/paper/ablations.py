"""The paper's ablations of RMSProp with Magma: what is masked, in which blocks, and how.

    python -m examples.paper.ablations --set granularity --size 130m --data FOLDER

The options are those of `examples.paper.llama_c4`, and so are the search and the records.
"""

import sys
from collections.abc import Sequence
from typing import Any

from examples.llama.optimizers import direction
from examples.paper.arms import ARMS, Arm, magma
from examples.paper.llama_c4 import parser, sweep
from magma_optax import attention, attention_and_mlp

BASE = "rmsprop"
CENTRE = 4e-3

# Uniform sampling alone is SkipUpdate, the paper's 21.81 for blocks in both of its tables; the
# survivors are then divided by p. Sampling by alignment is never divided: the paper found that
# unstable.
METHODS: dict[str, dict[str, Any]] = {
    "uniform": {"damping": False, "rescale": True},
    "damping": {"survival_prob": 1.0},
    "uniform+damping": {},
    "alignment": {"survival_prob": "alignment", "damping": False},
    "alignment+damping": {"survival_prob": "alignment"},
}
BLOCKS = ("element", "row", "column", "leaf")
COMPONENTS = {"attention": attention, "attention+mlp": attention_and_mlp, "all": None}
PROBABILITIES = (0.25, 0.5, 0.75)
TEMPERATURES = (0.5, 1.0, 2.0, 4.0)


def arm(**options: Any) -> Arm:
    """RMSProp with Magma and `options`."""
    return Arm(magma(lambda: direction(BASE), **options), CENTRE)


SETS: dict[str, dict[str, Arm]] = {
    "components": {f"{BASE}/{name}": arm(where=where) for name, where in COMPONENTS.items()},
    "granularity": {
        f"{BASE}/{blocks}/{method}": arm(blocks=blocks, **options)
        for method, options in METHODS.items()
        for blocks in BLOCKS
    },
    "sampling": {
        f"{BASE}/p={p:g}/tau={tau:g}": arm(survival_prob=p, temperature=tau)
        for p in PROBABILITIES
        for tau in TEMPERATURES
    },
    # The paper compares these at one learning rate: --fixed-rate 1e-3.
    "momentum": {
        f"{BASE}/{kind}/{'damping' if damping else 'no damping'}": arm(
            sparse_state=kind == "sparse", damping=damping, rescale=not damping
        )
        for kind in ("dense", "sparse")
        for damping in (True, False)
    },
}
ABLATIONS = {name: arm for arms in SETS.values() for name, arm in arms.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one set of ablations, after the base itself; returns the exit status."""
    options = parser(__doc__)
    options.add_argument("--set", choices=SETS, required=True, help="which ablation")
    args = options.parse_args(argv)
    return sweep(args, {BASE: ARMS[BASE]} | SETS[args.set], [BASE, *SETS[args.set]])


if __name__ == "__main__":
    sys.exit(main())
