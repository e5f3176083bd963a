"""Records as the experiments write them, and small texts to train on."""

import random
from pathlib import Path

WORDS = "the a mask of update moment gradient block keeps drops moves layer each every some".split()


def write_words(folder: Path, count: int) -> str:
    """Writes a text of `count` words of a small vocabulary and returns its path."""
    words = random.Random(0).choices(WORDS, k=count)
    path = folder / "text.txt"
    path.write_text("\n\n".join(" ".join(words[i : i + 50]) for i in range(0, count, 50)))
    return str(path)


def record(arm, rate, loss, seed=0, **results):
    return {
        "settings": {"arm": arm, "learning_rate": rate, "seed": seed},
        "results": {"valid_loss": loss} | results,
    }
