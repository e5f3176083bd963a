"""The minimal example runs, three ways."""

import pathlib
import re
import subprocess
import sys


def test_every_way_learns():
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", "-m", "examples.minimal"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    losses = dict(re.findall(r"^(\w+): +(\S+)$", result.stdout, re.M))
    assert losses.keys() == {"optax", "nnx", "linen"}
    assert all(float(loss) < 1e-3 for loss in losses.values())
