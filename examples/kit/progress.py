"""The progress bar of a training run."""

from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from examples.kit import console
from examples.kit.console import say

# By their labels beside the bar, fields of a record and how they are written.
FIELDS = {
    "loss": ("loss", ".3f"),
    "ppl": ("perplexity", ".2f"),
    "tok/s": ("tokens_per_second", ",.0f"),
    "lr": ("learning_rate", ".1e"),
    "busiest": ("busiest", ".2f"),  # of a mixture's experts
    "dropped": ("dropped", ".3f"),
    "align": ("alignment_mean", ".3f"),
}


def open_bar(steps: int, done: int = 0, hidden: bool = False) -> tqdm:
    """Returns a bar of `steps` steps, `done` of which are."""
    return tqdm(total=steps, initial=done, unit="step", disable=hidden, file=console.stderr)


def show(bar: tqdm, step: int, record: Mapping[str, Any], labels: Sequence[str]) -> None:
    """Shows a record beside the bar, the fields with these labels that it has.

    A validation stays as a line above the bar.
    """
    fields = {label: FIELDS[label] for label in labels}
    shown = {
        label: format(record[name], form)
        for label, (name, form) in fields.items()
        if name in record
    }
    bar.set_postfix(shown, refresh=False)
    if "valid_loss" in record:
        bar.clear()
        say(f"step {step}: loss {record['loss']:.4f}, validation {record['valid_loss']:.4f}")
        bar.refresh()
