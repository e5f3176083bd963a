"""The folder of a run: claimed once, found again to go on, with the run's settings in it."""

import contextlib
import fcntl
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import magma_optax
from examples.kit import hosts, metrics
from examples.kit.console import print_warning
from examples.kit.options import SettingsError

RUNS = Path("runs")  # where fresh folders come
SETTINGS = "settings.json"
LOCK = "lock"
PACKAGES = ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "grain", "numpy")


def claim(out: Path | None, resume: bool, name: str) -> Path:
    """Creates a run's folder, or finds it again to go on.

    Args:
        out: The folder; None for a fresh one under ``runs``.
        resume: Go on with the run in it.
        name: Of a fresh folder.

    Raises:
        SettingsError: If it isn't empty and `resume` is not set, or the other way round.
        OSError: If it can't be created.
    """
    with hosts.together():  # every host looks before one writes
        require_plain(RUNS if out is None else out)
        if resume and not (out / metrics.FILE).exists():
            raise SettingsError(f"{out} holds no run to go on with; see --out")
        if not resume and out is not None and out.is_dir() and any(out.iterdir()):
            raise SettingsError(
                f"{out} is not empty; --resume goes on with the run in it, "
                "another --out starts a new one"
            )
    if resume:
        return out
    with hosts.together():
        if jax.process_index() == 0:
            out = create(out, name)
            (out / metrics.FILE).touch()  # from here on there is a run to go on with
    with hosts.together():
        if not (out / metrics.FILE).exists():
            raise SettingsError(f"--out {out} is not the folder that host 0 sees; share one")
    return out


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps a run's folder to this run; a lock that the system drops however the process ends.

    Raises:
        SettingsError: If another process runs there.
    """
    with contextlib.ExitStack() as stack:
        with hosts.together():
            if jax.process_index() == 0:
                file = stack.enter_context((folder / LOCK).open("a"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise SettingsError(
                        f"a run still goes on in {folder}; wait for its end, or give another --out"
                    ) from None
                except OSError:  # a file system without locks
                    pass
        yield


def create(out: Path | None, name: str) -> Path:
    """Creates `out`, or a fresh folder of this name under ``runs``.

    Raises:
        OSError: If it can't be created.
    """
    if out is None:
        return fresh_folder(RUNS, name)
    out.mkdir(parents=True, exist_ok=True)
    return out


def require_plain(folder: Path) -> None:
    """Refuses a path in which Orbax would write checkpoints that it can't find again.

    Raises:
        SettingsError: If the path has characters with a meaning in patterns, or isn't UTF-8.
    """
    path = str(folder.absolute())
    odd = [c for c in path if c in "[*?\\" or "\ud800" <= c <= "\udfff"]
    if odd:
        raise SettingsError(
            f"--out {path!r}: checkpoints can't be read back from a path with {odd[0]!r} in it; "
            "give another folder"
        )


def fresh_folder(parent: Path, name: str) -> Path:
    """Creates the first of ``name-1``, ``name-2``, ... that isn't there."""
    for number in itertools.count(1):
        folder = parent / f"{name}-{number}"
        if not folder.exists():
            folder.mkdir(parents=True)  # fails if another run was faster
            return folder
    raise AssertionError("counted to the end")


def resume_command(program: str, argv: Sequence[str], folder: Path) -> str:
    """Returns the command that goes on with a run of the module `program`, started with `argv`."""
    command = ["python", "-m", program, *argv]
    if not any(option.split("=")[0] == "--out" for option in argv):
        command += ["--out", str(folder)]
    if "--resume" not in argv:
        command += ["--resume"]
    return shlex.join(command)


def write_settings(
    folder: Path, program: str, argv: Sequence[str], step: int, **facts: Any
) -> None:
    """Writes ``settings.json`` at a run's start, and adds to it whenever the run goes on.

    Args:
        folder: The run's folder.
        program: The module that runs.
        argv: Its options as typed.
        step: The number of steps done.
        facts: What else is known, ready for JSON.

    Raises:
        OSError: If it can't be written.
    """
    path = folder / SETTINGS
    now = {
        "command": shlex.join(["python", "-m", program, *argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": step,
        **facts,
        "devices": {
            "platform": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
            "hosts": jax.process_count(),
        },
        "versions": versions(),
    }
    whole = now
    if path.exists():
        try:
            whole = json.loads(path.read_bytes())
            whole.setdefault("resumed", []).append(now)
        except (ValueError, AttributeError):
            aside = path.with_name(f"damaged-{SETTINGS}")
            os.replace(path, aside)
            print_warning(f"{path} is damaged and now {aside}; its place takes a new one")
            whole = now
    short = path.with_suffix(".tmp")
    short.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    os.replace(short, path)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of what decides a run."""
    found = {"python": platform.python_version(), "magma_optax": magma_optax.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
