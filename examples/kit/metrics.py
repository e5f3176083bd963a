"""Metrics of a run: one JSON line a step in ``metrics.jsonl``, and the same for TensorBoard."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from examples.kit.paths import by_path

FILE = "metrics.jsonl"


def read(folder: Path) -> list[dict[str, Any]]:
    """Reads the records of a run; lines that a kill or a power cut has torn are left out."""
    found = []
    for line in (folder / FILE).read_bytes().split(b"\n")[:-1]:  # after the last one it is torn
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            found.append(record)
    return found


def how_to_watch(folder: Path) -> str:
    """Says in one line how to look at a run while it goes on."""
    return f"watch it with: tail -f {folder / FILE}, or tensorboard --logdir {folder}"


def valid_loss(folder: Path, step: int) -> float | None:
    """Returns the validation loss on record after `step`, if there is one."""
    losses = [record.get("valid_loss") for record in read(folder) if record["step"] == step]
    return losses[-1] if losses else None


def diverged(step: int, record: dict[str, Any]) -> str:
    """Says so where loss or gradient norm is no longer a number; else nothing."""
    loss, norm = record["loss"], record["grad_norm"]
    if np.isfinite([loss, norm]).all():
        return ""
    return (
        f"after step {step}: loss {loss:g}, gradient norm {norm:g}; stopped. "
        "A lower --learning-rate or --clip may help"
    )


class Metrics:
    """Appends records to a run's metrics.

    Everything is written from the caller's thread, so that a full disk raises OSError there;
    tensorboardX's `SummaryWriter` writes from a thread of its own and then waits for ever.
    """

    def __init__(self, folder: Path, step: int):
        """Opens the metrics of a run that has done `step` steps; drops records beyond."""
        path = folder / FILE
        if path.exists():
            kept = [record for record in read(folder) if record["step"] <= step]
            short = path.with_suffix(".tmp")
            short.write_text("".join(json.dumps(record) + "\n" for record in kept))
            os.replace(short, path)
        self._lines = path.open("a")
        (folder / "tensorboard").mkdir(exist_ok=True)
        # The suffix keeps a run resumed within the second from writing over the file before.
        self._events = EventsWriter(str(folder / "tensorboard" / "events"), f".{step}")
        purge = SessionLog(status=SessionLog.START)  # hides what TensorBoard has of later steps
        self._events.write_event(Event(step=step + 1, session_log=purge, wall_time=time.time()))

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Writes what is known about a step; TensorBoard gets its numbers.

        Raises:
            OSError: If the disk is full.
        """
        self._lines.write(json.dumps({"step": step, **record}) + "\n")
        self._lines.flush()
        for name, value in record.items():
            if isinstance(value, int | float):
                event = Event(step=step, summary=scalar(name, value), wall_time=time.time())
                self._events.write_event(event)
        self._events.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._lines.close()
        finally:
            self._events.close()


def by_layer(alignment: Any) -> dict[str, list[float]]:
    """Arranges scores by matrix and layer, alike for separate and for stacked layers.

    Args:
        alignment: Scores at paths such as ``layers/3/mlp/up_proj/kernel`` with one score, or
            ``layers/mlp/up_proj/kernel`` with one for each layer; nested or in a flat dictionary.

    Returns:
        For ``mlp/up_proj/kernel`` and so on, the scores of layers 0 to L - 1, to four digits.
    """
    scores: dict[str, dict[int, float]] = {}
    for path, score in by_path(alignment).items():
        index, matrix = path.removeprefix("layers/").split("/", 1)
        if index.isdigit():
            scores.setdefault(matrix, {})[int(index)] = round(float(score), 4)
        else:
            scores[f"{index}/{matrix}"] = dict(enumerate(np.round(score, 4).tolist()))
    return {matrix: [layers[i] for i in sorted(layers)] for matrix, layers in scores.items()}
