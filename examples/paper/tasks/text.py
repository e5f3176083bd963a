"""What identifies the text of a task."""

from typing import Any

from examples.kit.data.load import Data, load
from examples.kit.records import data_name


def read(data: str | None, **sizes: Any) -> Data:
    """Reads a text as one host: to ask JAX would start the accelerator, which the workers need.

    Args:
        data: What `examples.kit.data.load` reads.
        sizes: Other arguments of `load`.

    Raises:
        DataError: If it can't be used.
    """
    return load(data, **{"seq_len": 1, "batch_size": 1} | sizes, process_index=0, process_count=1)


def digest_of(data: str | None) -> str:
    """Returns the text's `examples.kit.data.load.Data.digest`; "" for Python's own text.

    Raises:
        DataError: If it can't be used.
    """
    return "" if data is None else read(data).digest


def identified(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a task's settings with the text's name instead of its path, and no empty digest."""
    named = settings | {"data": data_name(settings["data"])}
    if not named["digest"]:
        del named["digest"]
    return named
