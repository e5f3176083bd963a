"""The paper's ablations of Magma: what is masked, in which blocks, and how.

    python -m examples.paper.appendix_ablations --set granularity --size 130m --data FOLDER

The paper ablates RMSProp; `--base adam` does the same to Adam. The other options are those of
`examples.paper.table1_llama`, and so are the search and the records.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import sys
from collections.abc import Sequence
from typing import Any

import optax

from examples.kit.optimizers import direction, rms
from examples.paper import RESULTS
from examples.paper.arms import ARMS, Arm, magma, plain
from examples.paper.command import add_search_options, conduct, make_parser
from examples.paper.experiment import Experiment
from examples.paper.table1_llama import add_task_options, make_task
from examples.paper.tasks.llama import Task
from magma_optax import attention, attention_and_mlp

BASES = ("rmsprop", "adam")
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
DECAYS = (0.95, 0.99, 0.999)


def make_sets(base: str) -> dict[str, dict[str, Arm]]:
    """Returns the arms of every set of ablations, by name, for a base."""

    def arm(**options: Any) -> Arm:
        return Arm(magma(lambda: direction(base), **options), CENTRE)

    return {
        "components": {f"{base}/{name}": arm(where=where) for name, where in COMPONENTS.items()},
        "granularity": {
            f"{base}/{blocks}/{method}": arm(blocks=blocks, **options)
            for method, options in METHODS.items()
            for blocks in BLOCKS
        },
        "sampling": {
            f"{base}/p={p:g}/tau={tau:g}": arm(survival_prob=p, temperature=tau)
            for p in PROBABILITIES
            for tau in TEMPERATURES
        },
        # The paper compares these at one learning rate: --fixed-rate 1e-3.
        "momentum": {
            f"{base}/{kind}/{'damping' if damping else 'no damping'}": arm(
                sparse_state=kind == "sparse", damping=damping, rescale=not damping
            )
            for kind in ("dense", "sparse")
            for damping in (True, False)
        },
        # Not in the paper, which doesn't say its decay of the second moment.
        "decay": {
            f"{base}/b2={b2:g}{name}": Arm(build(lambda b2=b2: with_decay(base, b2)), CENTRE / 2)
            for b2 in DECAYS
            for name, build in {"": plain, "+magma": magma}.items()
        },
    }


def with_decay(base: str, b2: float) -> optax.GradientTransformation:
    """The direction of a base whose second moment decays by `b2` a step."""
    return rms(b2) if base == "rmsprop" else direction(base, b2)


SETS = {base: make_sets(base) for base in BASES}
ABLATIONS = {
    name: arm for sets in SETS.values() for arms in sets.values() for name, arm in arms.items()
}


EXPERIMENT = Experiment("examples.paper.appendix_ablations", Task, ARMS | ABLATIONS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one set of ablations, after the base itself; returns the exit status."""
    parser = make_parser(__doc__)
    add_task_options(parser)
    add_search_options(parser, "examples/paper/results/llama_SIZE.jsonl")
    parser.add_argument("--set", choices=SETS[BASES[0]], required=True, help="which ablation")
    parser.add_argument("--base", choices=BASES, default=BASES[0], help="of what (%(default)s)")
    args = parser.parse_args(argv)
    names = [args.base, *SETS[args.base][args.set]]
    out = RESULTS / f"llama_{args.size}.jsonl"
    return conduct(EXPERIMENT, parser, args, names, make_task, out)


if __name__ == "__main__":
    sys.exit(main())
