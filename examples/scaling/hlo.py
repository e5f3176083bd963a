"""Collectives of a compiled program: how many, and how large their results are."""

import collections
import math
import re
from typing import NamedTuple

_OP = re.compile(
    r"= (?P<result>.*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+)[a-z0-9]*\[(?P<shape>[\d,]*)\]")


class Collective(NamedTuple):
    """One collective.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ...
      bytes: size of its results on one device.
      largest: size of the largest array among them.
    """

    kind: str
    bytes: int
    largest: int


def collectives(text: str) -> list[Collective]:
    """Return the collectives of an HLO module, ``compiled.as_text()``."""
    found = []
    for op in _OP.finditer(text):
        sizes = [_bytes(array) for array in _ARRAY.finditer(op["result"])]
        found.append(Collective(op["kind"], sum(sizes), max(sizes)))
    return found


def counts(ops: list[Collective]) -> dict[str, int]:
    """Count collectives by kind."""
    return dict(collections.Counter(op.kind for op in ops))


def _bytes(array: re.Match[str]) -> int:
    bits = int(re.sub(r"\D", "", array["dtype"]) or 8)
    return math.prod(int(n) for n in array["shape"].split(",") if n) * bits // 8
