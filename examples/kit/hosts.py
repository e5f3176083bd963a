"""Several hosts: they join, compare what they were given, and start and stop together.

Nothing here does anything on a single host.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from examples.kit.console import print_error
from examples.kit.options import SettingsError

PATIENCE = 24 * 3600  # seconds for the slowest host to read its data
FAILED = 3  # exit status of a host that failed or lost another
_exchanges = itertools.count()


class RefusedError(ValueError):
    """A host cannot start; the message says which and why, in the same words on every host."""


def join(address: tuple[str, int, int] | tuple[()], timeout: int) -> None:
    """Connects the processes, one per host.

    Args:
        address: The first host's address, the number of hosts and this host's number; empty to
            take all three from the cluster's environment.
        timeout: Seconds without a sign of life after which a host is lost.

    Raises:
        SettingsError: If the hosts are not known, or if they don't answer.
    """
    try:
        jax.distributed.initialize(*address, heartbeat_timeout_seconds=timeout)
    except (ValueError, RuntimeError) as error:
        raise SettingsError(f"--distributed: {error}") from None


def several() -> bool:
    """Says whether there are several hosts; starts no device to find out."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def gather(text: str) -> list[str]:
    """Returns every host's text on every host; all have to call this together."""
    if not several():
        return [text]
    # Wait here: a collective of the devices would give up on a slow host within seconds.
    wait = ocp.multihost.get_barrier_sync_fn()
    wait(key=f"examples.kit.hosts:{next(_exchanges)}", timeout_ms=1000 * PATIENCE)
    encoded = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
    with jax.transfer_guard("allow"):  # it is meant, and not left to us
        lengths = multihost_utils.process_allgather(np.array(len(encoded), np.int32))
        width = 1 << int(lengths.max()).bit_length()  # few widths, so few programs to compile
        padded = np.zeros(width, np.uint8)
        padded[: len(encoded)] = encoded
        rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Holds what one host may refuse: if any does, all stop with its sentence.

    Raises:
        RefusedError: If a host raised an error; on a single host that error itself.
    """
    if not several():
        yield
        return
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        refusal = error
    said = gather("" if refusal is None else str(refusal) or repr(refusal))
    if any(said):
        raise RefusedError(in_one(said)) from refusal


def in_one(said: list[str]) -> str:
    """Joins what the hosts said; one sentence if all said the same."""
    if len(set(said)) == 1:
        return said[0]
    count = len(said)
    return "; ".join(f"host {host} of {count}: {text}" for host, text in enumerate(said) if text)


def require_same(values: Mapping[str, Any]) -> None:
    """Compares what the hosts were given.

    Args:
        values: By name, ready for JSON.

    Raises:
        RefusedError: If two hosts differ, on all of them.
    """
    first, *others = map(json.loads, gather(json.dumps(values)))
    for host, other in enumerate(others, 1):
        if found := differences(first, other, "on host 0", f"on host {host}"):
            raise RefusedError(
                f"the hosts differ: {found}; start all with the same options and data"
            )


def differences(one: Mapping[str, Any], two: Mapping[str, Any], here: str, there: str) -> str:
    """Lists what differs, with both values; empty if nothing does."""
    return ", ".join(
        f"{name} {one.get(name)!r} {here}, {two.get(name)!r} {there}"
        for name in sorted(one.keys() | two.keys())
        if one.get(name) != two.get(name)
    )


def agree_to_stop(stop: bool, step: int) -> bool:
    """Says whether to stop after `step`, on all hosts alike; on a single one that is `stop`."""
    if several():
        return multihost_utils.reached_preemption_sync_point(step)
    return stop


@contextlib.contextmanager
def one_for_all() -> Iterator[None]:
    """With several hosts, ends this process at once if what it holds fails.

    An orderly end would wait for the other hosts: for their part of a checkpoint, and for all to
    leave together. But they are gone, or wait for this one. A host that waits inside the runtime
    is ended by it after the timeout that `join` was given.
    """
    try:
        yield
    except Exception as error:
        if not several() or isinstance(error, RefusedError):
            raise  # there is no other, or all see the same error
        print_error(
            f"host {jax.process_index()} of {jax.process_count()} can't go on, as it failed or "
            "lost another; start all hosts again with --resume, which goes on from the last "
            f"complete checkpoint ({type(error).__name__}: {error})"
        )
        os._exit(FAILED)
