"""The score of every recorded run of a model, beside the score of white noise.

    python -m examples.paper.recorded_scores

prints the table of `docs/white_noise.md` from the records in `examples/paper/results`. The score of
a run is that of its last step, in the mean over its blocks. The toy problems are not in the table:
a block of the quadratics has three elements. Nor are arms with another score than Magma's.
"""

from examples.kit import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # on Ctrl-C, also during the slow imports below

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples.kit import records
from examples.kit.console import say
from examples.kit.optimizers import MOMENTUM_DECAYS
from examples.paper import RESULTS
from examples.paper.report import markdown
from examples.paper.white_noise import noise_cosine, score, score_of_elements

FILES = ("llama_40m", "decay_40m", "llama_60m", "nano_moe", "ablations_nano", "negative_control")
BLOCKS = {
    "row": "rows",
    "column": "columns",
    "element": "elements",
    "all": "every array",
    "expert": "matrices of each expert",
}


class Group(NamedTuple):
    """What runs of one row have in common.

    Attributes:
        model: What is trained, for how long.
        base: The base optimizer.
        blocks: What a block is.
        temperature: tau.
    """

    model: str
    base: str
    blocks: str
    temperature: float

    @property
    def white_noise(self) -> float:
        """The score of white noise in large blocks; of elements, exactly."""
        b1 = MOMENTUM_DECAYS[self.base]
        if self.blocks == "elements":
            return score_of_elements(b1, self.temperature)
        return float(score(noise_cosine(b1), self.temperature))


def group_of(record: dict[str, Any]) -> Group:
    """Returns the row of a record."""
    arm = record["settings"]["arm"]
    base, *parts = re.split("[+/]", arm)
    usual = "kernels" if record["settings"]["experiment"] == "negative_control" else "matrices"
    blocks = next((BLOCKS[part] for part in parts if part in BLOCKS), usual)
    tau = re.search(r"tau=([\d.]+)", arm)
    return Group(model_of(record), base, blocks, float(tau[1]) if tau else 2.0)


def model_of(record: dict[str, Any]) -> str:
    """Says in short what was trained."""
    settings, results = record["settings"], record["results"]
    millions = results["parameters"] / 1e6
    size = f"{millions:.2g}M" if millions < 10 else f"{millions:.0f}M"
    if settings["experiment"] == "negative_control":
        return f"{size} ResNet, {results['steps']} steps"
    tokens = settings["steps"] * settings["batch_size"] * settings["seq_len"] / 1e6
    text = f"{tokens:.1f}M" if tokens < 10 else f"{tokens:.0f}M"
    name = "mixture of experts" if settings["experiment"] == "nano_moe" else "Llama"
    return f"{size} {name}, {text} tokens"


def grouped(folder: Path = RESULTS) -> dict[Group, list[float]]:
    """Returns the scores of all runs that have one, by row."""
    groups: dict[Group, list[float]] = {}
    for name in FILES:
        for record in records.read(folder / f"{name}.jsonl"):
            own = "@" not in record["settings"]["arm"]  # arms beyond the paper score otherwise
            if own and (found := record["results"]["alignment"]) is not None:
                groups.setdefault(group_of(record), []).append(found)
    return groups


def table(folder: Path = RESULTS) -> str:
    """Returns the table as Markdown."""
    heads = ["model", "base", "blocks", r"$\tau$", "runs", "mean score", "lowest to highest"]
    heads += ["white noise", "difference"]
    lines = [
        [
            group.model,
            group.base,
            group.blocks,
            f"{group.temperature:g}",
            str(len(found)),
            f"{statistics.mean(found):.4f}",
            f"{min(found):.4f} to {max(found):.4f}",
            f"{group.white_noise:.4f}",
            f"{round(statistics.mean(found) - group.white_noise, 4) + 0.0:+.4f}",
        ]
        for group, found in grouped(folder).items()
    ]
    return markdown([heads, ["---"] * len(heads), *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    say(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
