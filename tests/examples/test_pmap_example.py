"""The pmap example: replicas stay identical, on one device and on several."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def example(devices, source="-m examples.pmap_linen"):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return subprocess.run(
        [sys.executable, "-W", "error", *source.split(" ", 1)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_replicas_are_identical_after_200_steps(devices):
    result = example(devices)
    assert result.returncode == 0, result.stderr
    replicas, loss = re.search(r"(\d+) replicas, identical; loss (\S+)", result.stdout).groups()
    assert int(replicas) == devices and float(loss) < 0.2


def test_without_the_mean_they_drift():
    """The example's assertion can fail: the mean is taken of the loss alone."""
    text = (ROOT / "examples" / "pmap_linen.py").read_text()
    wrong = text.replace(
        'value, grads = jax.lax.pmean((value, grads), "batch")',
        'value = jax.lax.pmean(value, "batch")',
    ).replace("train()", "train(3)")
    assert wrong.count("pmean(value,") == 1
    result = example(2, f"-c {wrong}")
    assert result.returncode and "AssertionError" in result.stderr
