"""A Llama in Flax NNX and its trainer.

What other programs use too is in `examples.kit`. ``from examples.llama import data`` and the other
names of 0.1 lead there, for one release.
"""

import importlib
from types import ModuleType

_DATA = ("codec", "digest", "error", "files", "hub", "kind", "rows", "shards", "spelling", "stream")
_MOVED = {
    "data": "examples.kit.data.load",
    **{f"data_{name}": f"examples.kit.data.{name}" for name in (*_DATA, "text", "tokens")},
    **{
        name: f"examples.kit.{name}"
        for name in ("checkpoint", "console", "figure", "folder", "hosts", "interrupts")
    },
    **{
        name: f"examples.kit.{name}"
        for name in ("metrics", "optimizers", "paths", "plot", "scores")
    },
}


def __getattr__(name: str) -> ModuleType:
    """Returns a module that has moved."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(_MOVED[name])
