"""One host of a training run, for test_llama_hosts.py: the trainer, which tells what it does.

    python llama_host.py FOLDER DIE_AT [options of the trainer]

The first host writes parameters and optimizer state into FOLDER, as they are in memory after every
step (step-N.npz) and after a restore (restored.npz). The last host kills itself before step DIE_AT,
once there is a complete checkpoint; 0 means never. The model has one layer, to compile sooner.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from examples.kit import checkpoint
from examples.llama import train
from examples.llama.config import PRESETS

FOLDER, DIE_AT, ARGV = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
CHECKPOINTS = Path(ARGV[ARGV.index("--out") + 1]) / "checkpoints"


def tell(name, state):
    """Writes all arrays, wherever they lie."""
    whole = multihost_utils.process_allgather(state, tiled=True)
    if jax.process_index() == 0:
        FOLDER.mkdir(exist_ok=True)
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree.leaves_with_path(whole)
        }
        np.savez(FOLDER / f"{name}.npz", **arrays)


def perhaps_die(step):
    if step == DIE_AT and jax.process_index() == jax.process_count() - 1:
        while not any(path.name.isdigit() for path in CHECKPOINTS.iterdir()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def telling(make_functions):
    def make(*args):
        init, train_step, valid_step = make_functions(*args)

        def step(params, opt_state, batch):
            perhaps_die(int(optax.tree.get(opt_state, "step")) + 1)
            params, opt_state, metrics = train_step(params, opt_state, batch)
            tell(f"step-{int(optax.tree.get(opt_state, 'step'))}", (params, opt_state))
            return params, opt_state, metrics

        return init, step, valid_step

    return make


def telling_restore(restore):
    def restore_and_tell(*args):
        restored = restore(*args)
        if restored:
            tell("restored", restored[1:])
        return restored

    return restore_and_tell


PRESETS["tiny"] = dataclasses.replace(PRESETS["tiny"], num_layers=1)
train.make_functions = telling(train.make_functions)
checkpoint.restore = telling_restore(checkpoint.restore)
with os.fdopen(os.dup(1), "w") as out, contextlib.redirect_stdout(out):
    os.dup2(2, 1)  # Gloo prints in C++, from threads whose lines mix: apart from the trainer's
    sys.exit(train.main(ARGV))
