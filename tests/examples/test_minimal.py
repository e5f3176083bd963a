"""The minimal example runs, three ways."""

import re
import runpy


def test_every_way_learns(capsys):
    runpy.run_module("examples.minimal", run_name="__main__")
    losses = dict(re.findall(r"^(\w+): +(\S+)$", capsys.readouterr().out, re.M))
    assert losses.keys() == {"optax", "nnx", "linen"}
    assert all(float(loss) < 1e-3 for loss in losses.values())
