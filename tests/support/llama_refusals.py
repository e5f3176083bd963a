"""One of two hosts of which one refuses, for test_llama_hosts.py.

    python llama_refusals.py ADDRESS NUMBER FOLDER CORPUS

Both join once and then start run after run, and something is wrong on one of them. Each prints, for
every run, the status and the line of error as JSON. In the end both train without end, until host 1
gets Ctrl-C. The model has one layer, to compile sooner.
"""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

from examples.kit import checkpoint, hosts, metrics
from examples.llama import train
from examples.llama.config import PRESETS

PRESETS["tiny"] = dataclasses.replace(PRESETS["tiny"], num_layers=1)
ADDRESS, NUMBER, FOLDER, CORPUS = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
RUN = FOLDER / "run"
COMMON = "--preset tiny --batch-size 4 --seq-len 16 --checkpoint-every 2 --log-every 2 --seed 1"


def run(name, *more, on=None, wrong=(), patch=contextlib.nullcontext, out=RUN):
    """Starts a run; on host `on` with the options `wrong` as well, and inside `patch()`."""
    here = NUMBER == on
    argv = [*COMMON.split(), "--data", CORPUS, "--out", str(out), "--distributed", ADDRESS, *more]
    argv += wrong if here else []
    error = io.StringIO()
    with contextlib.redirect_stderr(error), patch() if here else contextlib.nullcontext():
        status = train.main(argv)
    lines = [line for line in error.getvalue().splitlines() if line.startswith("error: ")]
    print(json.dumps([name, status, lines]), flush=True)


def damaged():
    """Checkpoint 4 can't be read here."""
    read = checkpoint.read_tree

    def read_or_fail(item, target):
        if item.parent.name == "4":
            raise checkpoint.DamagedError(f"{item.name}: cut short")
        return read(item, target)

    return mock.patch.object(checkpoint, "read_tree", read_or_fail)


def no_permission(target, name):
    return mock.patch.object(target, name, side_effect=PermissionError(13, "Permission denied"))


def press_ctrl_c():
    while len(metrics.read(RUN)) < 6:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


hosts.join((ADDRESS.split(",")[0], 2, NUMBER), 60)
with (
    mock.patch.object(hosts, "join"),  # once is enough
    os.fdopen(os.dup(1), "w") as out,
    contextlib.redirect_stdout(out),
):
    os.dup2(2, 1)  # Gloo prints in C++
    run("option", on=1, wrong=["--steps", "many"])
    run("settings", on=1, wrong=["--learning-rate", "0.5"])
    run("data", on=1, wrong=["--data", "nowhere.txt"])
    run("digest", on=0, wrong=["--data", __file__])
    own = FOLDER / f"own-{NUMBER}"
    run("folder", "--steps", "2", out=own)
    run("resume", "--resume", on=0)
    run("whole", "--steps", "4")
    run("damaged", "--steps", "4", "--resume", on=1, patch=damaged)
    run("unread", "--resume", on=1, patch=lambda: no_permission(checkpoint, "read_json"))
    run("records", "--resume", on=0, patch=lambda: no_permission(metrics, "Metrics"))
    run("shorter", "--steps", "3", "--resume")
    if NUMBER == 1:
        threading.Thread(target=press_ctrl_c, daemon=True).start()
    run("ctrl-c", "--steps", "100000", "--resume")
