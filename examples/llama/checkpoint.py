"""Checkpoints: parameters, optimizer state, place in the data, step and configuration.

All of it is needed to go on bit for bit: Magma's coins, for one, depend on the step and the key
in its state. Writing is asynchronous. A checkpoint gets its step number as its name only once it
is complete, so that a killed run goes on from the last complete one.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import optax
import orbax.checkpoint as ocp

KEEP = 2  # complete checkpoints that stay on disk


class ConfigurationError(ValueError):
    """The checkpoint was written by a run with other settings; the message names them."""


@contextlib.contextmanager
def open_manager(folder: Path) -> Iterator[ocp.CheckpointManager]:
    """Opens the checkpoints in `folder`, creating it where needed; its end waits for the last save.

    Raises:
        OSError: If the folder can't be written.
    """
    for name in ("absl", "asyncio"):  # they log a failed save from every thread; we report it
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(KEEP),
        cleanup_tmp_directories=True,
    )
    manager = ocp.CheckpointManager(folder.absolute(), options=options)
    try:
        yield manager
    finally:
        with disk_errors():
            manager.close()


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Raises OSError for a full disk and the like, which TensorStore reports as ValueError."""
    try:
        yield
    except ValueError as error:
        if found := re.search(r"os_error_code='(\d+)'", str(error)):
            code = int(found[1])
            raise OSError(code, os.strerror(code), "checkpoint") from error
        raise


def save(
    manager: ocp.CheckpointManager,
    step: int,
    params: optax.Params,
    opt_state: optax.OptState,
    data: grain.DatasetIterator,
    shares: int,
    config: dict[str, Any],
) -> None:
    """Starts to write a checkpoint; when it returns, the arrays may be donated.

    Args:
        manager: From `open_manager`.
        step: The number of steps done.
        params: The parameters.
        opt_state: The optimizer's state.
        data: The training iterator; every process writes its own place.
        shares: Into how many shares the hosts divide each batch.
        config: This run's configuration.

    Raises:
        OSError: If the disk has no room for it, or the checkpoint before could not be completed.
    """
    size = sum(x.nbytes for x in jax.tree.leaves((params, opt_state)))
    if size > shutil.disk_usage(manager.directory).free:  # before Orbax fails in many threads
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(manager.directory))
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        opt_state=ocp.args.StandardSave(opt_state),
        data=grain.checkpoint.CheckpointSave(data),
        config=ocp.args.JsonSave(config),
        readers=ocp.args.JsonSave(readers(shares)),
    )
    with disk_errors():
        manager.save(step, args=items, force=True)


def restore(
    manager: ocp.CheckpointManager,
    params: optax.Params,
    opt_state: optax.OptState,
    data: grain.DatasetIterator,
    shares: int,
    config: dict[str, Any],
) -> tuple[int, optax.Params, optax.OptState] | None:
    """Restores the latest complete checkpoint, on any number of processes and any mesh.

    Args:
        manager: From `open_manager`.
        params: `jax.ShapeDtypeStruct` with shardings, one for each parameter.
        opt_state: The same for the optimizer's state.
        data: The training iterator; moved to the checkpoint's place.
        shares: Into how many shares the hosts divide each batch now.
        config: This run's configuration.

    Returns:
        The number of steps done, parameters and optimizer state; None if there is no checkpoint.

    Raises:
        ConfigurationError: If the checkpoint's configuration is another, or if its data is a
            stream that another number of hosts read.
    """
    step = manager.latest_step()
    if step is None:
        return None
    json = {"config": ocp.args.JsonRestore(), "readers": ocp.args.JsonRestore()}
    saved = manager.restore(step, args=ocp.args.Composite(**json))
    if found := differences(saved["config"], config):
        raise ConfigurationError(f"{manager.directory} holds another configuration: {found}")
    items = {
        "params": ocp.args.StandardRestore(params),
        "opt_state": ocp.args.StandardRestore(opt_state),
    }
    if saved["readers"] == readers(shares):
        items["data"] = grain.checkpoint.CheckpointRestore(data)
    elif "next_index" in data.get_state():
        # Data in memory: batch k has the same rows on any number of hosts, and a step takes one.
        data.set_state({"next_index": step})
    else:
        was, now = saved["readers"]["shares"], shares
        raise ConfigurationError(
            f"{manager.directory} has places in a stream for {was} hosts, not for {now}; "
            f"go on with {was}, or start a new run with another --out"
        )
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    return step, restored["params"], restored["opt_state"]


def readers(shares: int) -> dict[str, int]:
    """Returns what decides whose place in the data is whose."""
    return {"processes": jax.process_count(), "shares": shares}


def differences(saved: dict[str, Any], ours: dict[str, Any]) -> str:
    """Lists the settings that differ, with both values; empty if none does."""
    return ", ".join(
        f"{name} {saved.get(name)!r} there, {ours.get(name)!r} here"
        for name in sorted(saved.keys() | ours.keys())
        if saved.get(name) != ours.get(name)
    )
