"""The pmap example: replicas stay identical, on one device and on several."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def assert_identical(printed, devices):
    replicas, loss = re.search(r"(\d+) replicas, identical; loss (\S+)", printed).groups()
    assert int(replicas) == devices and float(loss) < 0.2


def test_replicas_are_identical_after_200_steps(capsys):
    runpy.run_path(str(ROOT / "examples/pmap_linen.py"), run_name="__main__")
    assert_identical(capsys.readouterr().out, 8)


def test_one_device_is_a_replica_too():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.pmap_linen"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert_identical(result.stdout, 1)


def test_without_the_mean_they_drift():
    """The example's assertion can fail: the mean is taken of the loss alone."""
    text = (ROOT / "examples" / "pmap_linen.py").read_text()
    wrong = text.replace(
        'value, grads = jax.lax.pmean((value, grads), "batch")',
        'value = jax.lax.pmean(value, "batch")',
    ).replace("train()", "train(3)")
    assert wrong.count("pmean(value,") == 1
    with pytest.raises(AssertionError):
        exec(wrong, {"__name__": "__main__"})
