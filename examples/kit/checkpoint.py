"""Checkpoints: parameters, optimizer state, place in the data, step and configuration.

All of it is needed to go on bit for bit: Magma's coins, for one, depend on the step and the key
in its state. Writing is asynchronous. A checkpoint gets its step number as its name only once it
is complete, so that a killed run goes on from the last complete one. One that was damaged since is
passed over, and the one before it is taken.
"""

import contextlib
import errno
import functools
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from examples.kit import hosts
from examples.kit.console import one_line, print_warning
from examples.kit.paths import by_path, path_string

KEEP = 2  # complete checkpoints that stay on disk
UNDAMAGED = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # can't be read


class ConfigurationError(ValueError):
    """The checkpoint was written by a run with other settings; the message names them."""


class DamagedError(ValueError):
    """A checkpoint is incomplete or not what was written; the message says what is wrong."""


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
    with hosts.together():
        folder.mkdir(parents=True, exist_ok=True)
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
    except Exception as error:
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
        sums=ocp.args.JsonSave(sums(params, opt_state)),
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
    """Restores the latest whole checkpoint, on any number of processes and any mesh.

    Damaged ones after it are moved to the folder `damaged-checkpoints` beside, so that the run can
    save those steps anew.

    Args:
        manager: From `open_manager`.
        params: `jax.ShapeDtypeStruct` with shardings, one for each parameter.
        opt_state: The same for the optimizer's state.
        data: The training iterator; moved to the checkpoint's place.
        shares: Into how many shares the hosts divide each batch now.
        config: This run's configuration. Names that a checkpoint of an earlier version lacks are
            not compared.

    Returns:
        The number of steps done, parameters and optimizer state; None if there is no checkpoint.

    Raises:
        ConfigurationError: If the checkpoint's configuration is another, or if its data is a
            stream that another number of hosts read.
        DamagedError: If there are checkpoints and none of them is whole.
        OSError: If a file can't be read for a reason that is not the checkpoint's.
    """
    ignore_given_up_reads()
    folder = Path(manager.directory)
    damaged: dict[int, str] = {}
    for step in steps(folder):
        checkpoint, found = folder / str(step), ""
        with hosts.together():  # what one host refuses, all refuse
            try:
                compare(checkpoint, config)
                move(data, checkpoint, step, shares)
                state = read_arrays(checkpoint, params, opt_state)
                expected = read_sums(checkpoint)
            except DamagedError as error:
                found = str(error)
        # Each host has read its own part; what one found damaged, all pass over.
        found = next(filter(None, hosts.gather(found)), "")
        if found := found or changed(state, expected):
            damaged[step] = found
            continue
        if damaged:
            put_aside(folder, damaged, step)
            manager.reload()
        return step, *state
    if damaged:
        step, found = next(iter(damaged.items()))
        raise DamagedError(
            f"no checkpoint in {folder} is whole; {step}, the last, is damaged ({found}); bring it "
            "back from a copy, or start a new run with another --out"
        )
    return None


def steps(folder: Path) -> list[int]:
    """Returns the checkpoints' steps, latest first, the same on all hosts."""
    with hosts.together():
        found = complete(folder)
    return json.loads(hosts.gather(json.dumps(found))[0])


def complete(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints that were completed, latest first.

    What is still being written, or was when the run was killed, has another name.
    """
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(n) for n in names if re.fullmatch("0|[1-9][0-9]*", n)), reverse=True)


def last_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of the latest checkpoint that has one; empty without any."""
    found: dict[str, Any] = {}
    with hosts.together():
        for step in complete(folder):
            if found := config(folder, step):
                break
    return json.loads(hosts.gather(json.dumps(found))[0])


def config(folder: Path, step: int) -> dict[str, Any]:
    """Returns the configuration of a checkpoint; empty if there is none."""
    with contextlib.suppress(DamagedError):
        return read_json(folder / str(step) / "config")
    return {}


def compare(checkpoint: Path, config: dict[str, Any]) -> None:
    """Compares a checkpoint's configuration with ours.

    Raises:
        ConfigurationError, DamagedError, OSError: See `restore`.
    """
    saved = read_json(checkpoint / "config")
    names = config.keys() & saved.keys()
    # An option that is off was not there before.
    new = {name for name in config.keys() - names if config[name] not in (None, False)}
    if unknown := ", ".join(sorted(new)):
        print_warning(f"{checkpoint}, of an earlier version, has no {unknown} to compare")
    if config.get("steps") != saved.get("steps"):  # a run may be made longer
        names -= {"steps", "warmup"}
    there, here = ({name: values[name] for name in names} for values in (saved, config))
    if found := hosts.differences(there, here, "there", "here"):
        raise ConfigurationError(
            f"{checkpoint} holds another configuration: {found}; go on with what is there, or "
            "start a new run with another --out"
        )


def move(data: grain.DatasetIterator, checkpoint: Path, step: int, shares: int) -> None:
    """Moves the data to this host's place in it.

    Raises:
        ConfigurationError, DamagedError, OSError: See `restore`.
    """
    if "next_index" in data.get_state():
        # Data in memory: batch k has the same rows on any number of hosts, and a step takes one.
        data.set_state({"next_index": step})
        return
    saved, now = read_json(checkpoint / "readers"), readers(shares)
    if saved != now and not saved["shares"] == shares == 1:  # one share is one place
        [what, *_] = [what for what in ("shares", "processes") if saved[what] != now[what]]
        raise ConfigurationError(
            f"{checkpoint} has places in a stream for {saved[what]} hosts, not for {now[what]}; "
            f"go on with {saved[what]}, or start a new run with another --out"
        )
    host = jax.process_index() if saved == now else 0
    place = read_json(checkpoint / "data", f"process_{host}-of-{saved['processes']}.json")
    if place.keys() - {"data"} != data.get_state().keys() - {"data"}:  # its digest came later
        raise DamagedError(f"data: it holds {place!r}")
    data.set_state(place)


def read_arrays(
    checkpoint: Path, params: optax.Params, opt_state: optax.OptState
) -> tuple[optax.Params, optax.OptState]:
    """Returns this host's part of the arrays.

    Raises:
        DamagedError, OSError: See `restore`.
    """
    return read_tree(checkpoint / "params", params), read_tree(checkpoint / "opt_state", opt_state)


def read_tree(item: Path, target: Any) -> Any:
    """Reads arrays into the places and the structure of `target`, matched by their paths.

    The structure on disk may be another: earlier versions kept the scores in a flat dictionary.
    """
    places = by_path(target)
    # Orbax's manager would wait for the hosts that failed.
    with damage(item), contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        metadata = handler.metadata(item).tree
        if odd := sorted(places.keys() ^ by_path(metadata).keys()):
            raise DamagedError(f"it and this model differ in {odd[0]}")
        on_disk = jax.tree.map_with_path(lambda path, _: places[path_string(path)], metadata)
        read = by_path(handler.restore(item, args=ocp.args.StandardRestore(on_disk)))
    return jax.tree.map_with_path(lambda path, _: read[path_string(path)], target)


def read_json(item: Path, file: str = "metadata") -> dict[str, Any]:
    """Reads a JSON object of a checkpoint.

    Raises:
        DamagedError, OSError: See `restore`.
    """
    with damage(item):
        value = json.loads((item / file).read_bytes().decode())
        if not isinstance(value, dict):
            raise DamagedError(f"it holds {value!r}")
        return value


@contextlib.contextmanager
def damage(item: Path) -> Iterator[None]:
    """Raises DamagedError for what only a damaged item of a checkpoint brings about.

    TensorStore and Orbax raise ValueError, KeyError, bare Exception and more.
    """
    try:
        with disk_errors():
            yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in UNDAMAGED:
            raise
        reason = one_line(str(error).split(" See full ")[0])[:200] or type(error).__name__
        raise DamagedError(f"{item.name}: {reason}") from error


@functools.cache
def ignore_given_up_reads() -> None:
    """Keeps Python from reporting how reads end that Orbax gave up, as another had failed."""
    report = sys.unraisablehook

    def hook(ended: Any) -> None:
        code = getattr(ended.object, "cr_code", None)  # of a coroutine
        given_up = code is not None and "orbax" in code.co_filename
        if not (given_up or "Event loop is closed" in str(ended.exc_value)):
            report(ended)

    sys.unraisablehook = hook


def sums(params: optax.Params, opt_state: optax.OptState) -> dict[str, int]:
    """Returns a number for each array that another content would hardly have.

    It is the sum of all bits, read as whole numbers, modulo 2^32: the same on any mesh.
    """
    totals = by_path(add_bits({"params": params, "opt_state": opt_state}))
    return {path: int(total) for path, total in jax.device_get(totals).items()}


def read_sums(checkpoint: Path) -> dict[str, int] | None:
    """Returns what `sums` was; None for a checkpoint of an earlier version.

    Raises:
        DamagedError, OSError: See `restore`.
    """
    return read_json(checkpoint / "sums") if (checkpoint / "sums").exists() else None


@jax.jit
def add_bits(tree: Any) -> Any:
    """Adds up the bits of every array."""

    def add(x: jax.Array) -> jax.Array:
        width = min(4, x.dtype.itemsize)
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}"))
        return jnp.sum(bits, dtype=jnp.uint32)

    return jax.tree.map(add, tree)


def changed(state: tuple[optax.Params, optax.OptState], expected: dict[str, int] | None) -> str:
    """Names an array that is not what was written; empty if all are, as far as is known."""
    if expected is None:
        return ""
    wrong = [path for path, total in sums(*state).items() if expected.get(path) != total]
    return f"{wrong[0]} is not what was written" if wrong else ""


def put_aside(folder: Path, damaged: dict[int, str], step: int) -> None:
    """Moves damaged checkpoints out of the way and says so."""
    aside = folder.parent / "damaged-checkpoints"
    with hosts.together():
        if jax.process_index() == 0:
            for number, found in damaged.items():
                aside.mkdir(exist_ok=True)
                place = aside / str(number)
                while place.exists():
                    place = place.with_name(f"{place.name}-again")
                (folder / str(number)).rename(place)
                print_warning(
                    f"checkpoint {number} is damaged ({found}) and now in {place}; "
                    f"going on from step {step}"
                )


def readers(shares: int) -> dict[str, int]:
    """Returns what decides whose place in the data is whose."""
    return {"processes": jax.process_count(), "shares": shares}
