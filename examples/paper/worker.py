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
from examples.paper import experiment
from examples.paper.trainer import Trainer


def main() -> None:
    """Answers until the pipe closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr, not between the replies
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read, args=(lines,), daemon=True).start()
    trainers: dict[str, Trainer] = {}
    while True:
        request = json.loads(lines.get())
        try:
            reply = answer(trainers, **request)
        except DataError as error:
            reply = {"refusal": str(error)}
        except Exception:  # told to the process that asked; other arms may well work
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def read(lines: queue.Queue[str]) -> None:
    """Passes requests on and ends the process, in the middle of a run, when they end."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def answer(
    trainers: dict[str, Trainer], module: str, task: dict[str, Any], run: dict[str, Any]
) -> dict[str, Any]:
    """Trains and returns the results and the device's name.

    Args:
        trainers: Those that there are by their tasks; a new one is added.
        module: Where the experiment stands.
        task: The fields of its task.
        run: Those of the run.

    Raises:
        DataError: If the task's data can't be used.
    """
    found = experiment.find(module)
    name = json.dumps([module, task])
    if name not in trainers:
        trainers[name] = Trainer(found.task(**task))
    arm = found.arms[run["arm"]]
    results = trainers[name].run(run["arm"], arm, run["learning_rate"], run["seed"])
    return {"results": results, "device": jax.devices()[0].device_kind}


if __name__ == "__main__":
    main()
