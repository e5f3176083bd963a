"""A process that trains on one device: reads a run as a line of JSON, writes its results as one.

The process that started it decides which device it sees. Its end of the pipe closes when that
process ends, however it ends, and the worker goes with it.
"""

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any

import jax

from examples.kit.data.error import DataError
from examples.paper.ablations import ABLATIONS
from examples.paper.arms import ARMS
from examples.paper.llama_run import Task, Trainer


def main() -> None:
    """Answers until the pipe closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr, not between the replies
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read, args=(lines,), daemon=True).start()
    trainers: dict[Task, Trainer] = {}
    while True:
        request = json.loads(lines.get())
        task = Task(**request["task"])
        try:
            reply = answer(trainers.setdefault(task, Trainer(task)), request["run"])
        except DataError as error:
            reply = {"error": str(error)}
        except Exception:  # told to the process that asked; other arms may well work
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def read(lines: queue.Queue[str]) -> None:
    """Passes requests on and ends the process, in the middle of a run, when they end."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def answer(trainer: Trainer, run: dict[str, Any]) -> dict[str, Any]:
    """Trains and returns the results and the device's name."""
    arm = (ARMS | ABLATIONS)[run["arm"]]
    results = trainer.run(run["arm"], arm, run["learning_rate"], run["seed"])
    return {"results": results, "device": jax.devices()[0].device_kind}


if __name__ == "__main__":
    main()
