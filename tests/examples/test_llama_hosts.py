"""The Llama trainer on several hosts: real processes that talk over loopback."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from trainers import refusal

from examples.kit.data.load import load
from examples.llama import train
from magma_optax import attention_and_mlp

ROOT = Path(__file__).parents[2]
STEPS = 8
LIMIT = 1200  # seconds for a run, on a machine that does other things too


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = "the a mask of update moment gradient block keeps drops moves layer each every".split()
    order = np.random.default_rng(0).integers(len(words), size=4000)
    path.write_text(" ".join(words[i] for i in order))
    return path


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(folder, corpus, hosts, devices, *more, die_at=0):
    """Starts a run on `hosts` processes with `devices` each; it tells about itself in `folder`."""
    argv = f"--preset tiny --batch-size 8 --seq-len 16 --steps {STEPS} --magma --optimizer rmsprop"
    argv += " --learning-rate 0.001 --checkpoint-every 4 --log-every 4 --host-timeout 20"
    argv += f" --out {folder}/run"
    address = f"127.0.0.1:{free_port()}"
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        # Only the first host writes the cache. With a hit it waits while the others compile, and
        # Gloo gives up after 30 s.
        "JAX_ENABLE_COMPILATION_CACHE": str(hosts == 1),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_TRANSFER_GUARD": "disallow",
        "PYTHONWARNINGS": "error",
    }

    def host(number):
        script = [
            sys.executable,
            str(ROOT / "tests" / "support" / "llama_host.py"),
            str(folder),
            str(die_at),
        ]
        join = ["--distributed", f"{address},{hosts},{number}"] if hosts > 1 else []
        command = [*script, *argv.split(), "--data", str(corpus), *join, *more]
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return [host(number) for number in range(hosts)]


def finish(processes):
    """Waits for all hosts; returns their statuses and what each printed, errors last."""
    try:
        printed = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed


def run(folder, corpus, hosts, devices, *more):
    statuses, printed = finish(start(folder, corpus, hosts, devices, *more))
    assert statuses == [0] * hosts, printed
    return printed


def state(folder, name):
    with np.load(folder / f"{name}.npz") as arrays:
        return dict(arrays)


def moved(folder, step):
    """Which attention and MLP blocks `step` moved: its coins."""
    before, after = state(folder, f"step-{step - 1}"), state(folder, f"step-{step}")
    return {
        path: not np.array_equal(before[path], leaf)
        for path, leaf in after.items()
        if path.startswith("0/") and attention_and_mlp(path, leaf)
    }


def assert_same_run(folder, expected, step):
    """Compares parameters, optimizer state and scores, up to rounding, and coins exactly."""
    actual, wanted = state(folder, f"step-{step}"), state(expected, f"step-{step}")
    assert actual.keys() == wanted.keys()
    assert sum("alignment" in path for path in wanted) == 7
    for path, leaf in wanted.items():
        if np.issubdtype(leaf.dtype, np.integer):  # steps and the coins' key
            np.testing.assert_array_equal(actual[path], leaf, err_msg=path)
        else:
            np.testing.assert_allclose(actual[path], leaf, rtol=1e-4, atol=2e-5, err_msg=path)


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """A run of one process with four devices."""
    folder = tmp_path_factory.mktemp("alone")
    run(folder, corpus, 1, 4, "--mesh", "data=2,fsdp=2")
    return folder


def test_several_hosts_train_as_one(alone, corpus, tmp_path):
    """Four, of a device each; two, of two each, are below."""
    printed = run(tmp_path, corpus, 4, 1, "--mesh", "data=2,fsdp=2")
    assert "4 device(s) on 4 hosts: data 2, fsdp 2" in printed[0][0]
    for out, _ in printed[1:]:  # the first host speaks for all
        assert not out
    for step in range(2, STEPS + 1):
        coins = moved(tmp_path, step)
        assert len(coins) == 7
        assert coins == moved(alone, step)
    assert any(moved(alone, STEPS).values()) and not all(moved(alone, STEPS).values())
    for step in (1, STEPS):
        assert_same_run(tmp_path, alone, step)


def test_a_killed_host_ends_the_others_and_other_hosts_go_on(alone, corpus, tmp_path):
    processes = start(tmp_path, corpus, 2, 2, "--mesh", "fsdp=4", die_at=7)
    processes[1].wait(LIMIT)
    died = time.monotonic()
    statuses, [(out, error), (silent, _)] = finish(processes)
    assert time.monotonic() - died < 60
    assert statuses == [3, -signal.SIGKILL]
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: host 0 of 2 can't go on")
    assert "start all hosts again with --resume" in line
    # Until then the two trained as one.
    assert "4 device(s) on 2 hosts: fsdp 4" in out and not silent
    for step in range(2, 7):
        assert moved(tmp_path, step) == moved(alone, step)
    for step in (1, 6):
        assert_same_run(tmp_path, alone, step)

    # Other hosts, another mesh: the same bits, then the same run.
    printed = run(tmp_path, corpus, 4, 1, "--mesh", "data=4", "--resume")
    [step] = re.findall(r"from step (\d+) to", printed[0][0])
    assert step == "4"
    saved, restored = state(tmp_path, "step-4"), state(tmp_path, "restored")
    assert saved.keys() == restored.keys()
    for path, leaf in saved.items():
        np.testing.assert_array_equal(restored[path], leaf, err_msg=path)
    for step in (5, STEPS):
        assert moved(tmp_path, step) == moved(alone, step)
        assert_same_run(tmp_path, alone, step)


def test_a_batch_has_the_same_rows_on_any_number_of_hosts(corpus):
    def batches(hosts):
        shares = [
            load(
                str(corpus),
                seq_len=16,
                batch_size=8 // hosts,
                process_index=host,
                process_count=hosts,
            ).train
            for host in range(hosts)
        ]
        for parts in zip(*shares, strict=False):
            rows = np.concatenate([part["targets"] for part in parts])
            yield rows[np.lexsort(rows.T)]

    several = zip(range(500), batches(1), batches(2), batches(4), strict=False)  # some epochs
    for _, one, two, four in several:
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, four)


def test_a_wrong_address_is_one_line(capsys, tmp_path):
    argv = ["--out", str(tmp_path / "run"), "--distributed", "127.0.0.1:1,2,2"]
    said = refusal(capsys, train.main, argv)
    assert said == "error: argument --distributed: host 2 of 2: numbers start at 0"
    assert not (tmp_path / "run").exists()


def test_where_one_host_refuses_all_stop_with_its_sentence(corpus, tmp_path):
    address = f"127.0.0.1:{free_port()},2"
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "JAX_ENABLE_COMPILATION_CACHE": "False",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }

    def host(number):
        script = [sys.executable, str(ROOT / "tests" / "support" / "llama_refusals.py")]
        return subprocess.Popen(
            [*script, f"{address},{number}", str(number), str(tmp_path), str(corpus)],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    statuses, printed = finish([host(number) for number in range(2)])
    assert statuses == [0, 0], printed
    told = [
        {name: (status, lines) for name, status, lines in map(json.loads, replies(out))}
        for out, _ in printed
    ]
    run = tmp_path / "run"
    refusals = {
        "option": "host 1 of 2: argument --steps: 'many' is not a whole number",
        "settings": "the hosts differ: learning_rate None on host 0, 0.5 on host 1; start all "
        "with the same options and data",
        "data": "host 1 of 2: nowhere.txt: no such file or folder",
        "digest": "the hosts differ: data digest '",
        "folder": f"host 1 of 2: --out {tmp_path}/own-1 is not the folder that host 0 sees",
        "resume": f"{run} holds no run to go on with",
        "unread": "host 1 of 2: [Errno 13] Permission denied",
        "records": "host 0 of 2: [Errno 13] Permission denied",
        "shorter": f"--steps 3 is less than the 4 that the run in {run} has done",
    }
    for name, message in refusals.items():
        (status, [line]), other = told[0][name], told[1][name]
        assert (status, [line]) == (2, [line]) == other
        assert line.startswith(f"error: {message}"), line
    assert told[0]["whole"] == told[1]["whole"] == (0, [])
    assert told[0]["damaged"] == told[1]["damaged"] == (0, [])  # both went on from step 2
    assert (tmp_path / "damaged-checkpoints").exists() is False
    assert (run / "damaged-checkpoints" / "4").is_dir()
    assert told[0]["ctrl-c"] == (128 + signal.SIGTERM, [])  # host 0 was told by host 1
    assert told[1]["ctrl-c"] == (128 + signal.SIGINT, [])


def replies(out):
    return [line for line in out.splitlines() if line.startswith('["')]
