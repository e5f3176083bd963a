"""One measured result, as one line of JSON with all that is needed to measure it again."""

import errno
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy")


def commit() -> str | None:
    """The commit that runs, with ``+`` when files beside the results differ; None without git.

    The environment variable ``COMMIT`` names it for a copy of the files without their history.
    """
    if named := os.environ.get("COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], stderr=-3, text=True)
        results = ":(top,exclude)examples/*/results*"
        changes = [*git, "status", "--porcelain", "-uno", "--", ":/", results]
        changed = subprocess.check_output(changes, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changed else "")


def provenance(device: str | None = None) -> dict[str, Any]:
    """Command, commit, date, device and versions of the running process.

    Args:
      device: the device's name, if another process computed; JAX then starts none here.
    """
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name}" if module else shlex.join(["python", sys.argv[0]])
    return {
        "command": " ".join([program, shlex.join(sys.argv[1:])]).strip(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device or jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def data_name(folder: str | None) -> str:
    """How settings name the data: a folder by its last part, None by the Python it comes with."""
    if folder is None:
        return f"Python {platform.python_version()} standard library"
    return Path(folder).resolve().name


def append(
    path: Path, settings: dict[str, Any], results: dict[str, Any], device: str | None = None
) -> dict[str, Any]:
    """Adds one record to the JSON-lines file `path` and returns it.

    Args:
      path: the file, created with its folders if it is not there; never overwritten.
      settings: what identifies the run (experiment, arm, learning rate, seed, sizes).
      results: what was measured. Non-finite numbers are written as strings.
      device: the device that another process computed on; else this process's own.

    Raises:
      OSError: it can't be written; the file is then as before.
    """
    record = {"settings": settings, "results": _finite(results), "provenance": provenance(device)}
    line = json.dumps(record, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = line.encode()
    # One write in append mode: lines of several writers don't mix.
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)  # half a line would make the file unreadable
            raise
    return record


def read(path: Path) -> list[dict[str, Any]]:
    """The records of the JSON-lines file `path`; none if there is no such file.

    Raises:
      ValueError: a line is not a record, as when a writer was killed.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no record: {error}") from None
    return found


def _finite(value: Any) -> Any:
    """`value` with numbers that JSON does not know (nan, inf) as strings."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return str(value)
    return value
