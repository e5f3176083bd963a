"""A picture of a run: loss curves, and Magma's scores by layer."""

from pathlib import Path

import numpy as np

from examples.kit import metrics
from examples.kit.console import print_warning, say
from examples.kit.figure import Axes, Figure, colormaps

LOSSES = [("loss", "training", "-"), ("valid_loss", "validation", "o-")]


def draw(folder: Path, unigram_entropy: float, noise_score: float) -> None:
    """Draws the curves and says where; a run does not fail for want of a picture."""
    try:
        say(f"curves: {plot(folder, unigram_entropy, noise_score)}")
    except Exception as error:
        print_warning(f"the curves could not be drawn ({type(error).__name__}: {error})")


def plot(folder: Path, unigram_entropy: float, noise_score: float) -> Path:
    """Draws the metrics of the run in `folder`.

    Args:
        folder: The run's folder.
        unigram_entropy: The loss of a model that knows token frequencies only, nats per token.
        noise_score: The score where gradients are independent from step to step.

    Returns:
        The path of the PNG.

    Raises:
        OSError: If it can't be written.
    """
    records = metrics.read(folder)
    scores = [record for record in records if "alignment" in record]
    figure = Figure(figsize=(11 if scores else 6, 4), layout="constrained")  # Agg's canvas
    axes = figure.subplots(1, 2 if scores else 1, squeeze=False)[0]
    draw_losses(axes[0], records, unigram_entropy)
    if scores:
        draw_alignment(axes[1], scores, noise_score)
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def draw_losses(axes: Axes, records: list[dict], unigram_entropy: float) -> None:
    """Draws training and validation loss against steps."""
    for name, label, style in LOSSES:
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.axhline(unigram_entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()


def draw_alignment(axes: Axes, records: list[dict], noise_score: float) -> None:
    """Draws a line per layer, the mean score of its matrices, and two scores to compare it with."""
    steps = [record["step"] for record in records]
    layers = np.array(
        [np.mean(list(record["alignment"].values()), axis=0) for record in records]
    )  # (times, L)
    colors = colormaps["viridis"](np.linspace(0, 0.9, layers.shape[1]))
    for layer, color in enumerate(colors):
        axes.plot(steps, layers[:, layer], color=color, label=f"layer {layer}")
    axes.axhline(0.5, color="gray", linestyle=":", label="0.5: no agreement")
    axes.axhline(
        noise_score, color="gray", linestyle="--", label=f"{noise_score:.3f}: gradients are noise"
    )
    axes.set(xlabel="step", ylabel="score s, mean of a layer's matrices")
    axes.legend(ncols=1 + len(colors) // 8, fontsize="small")
