"""Collectives of a compiled program: which, how large their results are, how often they run."""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[^ ]+) \(.*\{$")
_CALL = re.compile(r"(?P<role>body|calls|to_apply)=%(?P<name>[\w.-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{(?P<names>[^}]*)\}")
_CONDITION = re.compile(r"condition=%(?P<name>[\w.-]+)")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(?P<trips>\d+)"\}')
_BOUND = re.compile(r" constant\((?P<bound>\d+)\)")
_OP = re.compile(
    r"= (?P<result>.*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_CHANNEL = re.compile(r"channel_id=\d+")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+)[a-z0-9]*\[(?P<shape>[\d,]*)\]")


class Collective(NamedTuple):
    """One collective.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ...
      bytes: size of its results on one device.
      largest: size of the largest array among them.
      times: how often it runs in one run of the program; more than once inside a loop.
    """

    kind: str
    bytes: int
    largest: int
    times: int = 1


def computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation of an HLO module by name; the entry comes last."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = found[header["name"]] = []
        elif line.startswith("}"):
            lines = []
        else:
            lines.append(line)
    return found


def collectives(text: str) -> list[Collective]:
    """Return the collectives of an HLO module, ``compiled.as_text()``.

    TPU's compiler spreads an asynchronous collective over several fused computations, which share
    its channel: it is one. Several of one channel within one computation are those of an unrolled
    loop.
    """
    parts = computations(text) or {"": text.splitlines()}
    runs = _runs(parts)
    found: list[Collective] = []
    homes: dict[str, str] = {}  # of channels
    for name, lines in parts.items():
        for line in lines:
            op = _OP.search(line)
            if not op:
                continue
            channel = _CHANNEL.search(line)
            if channel and homes.setdefault(channel[0], name) != name:
                continue
            sizes = [array_bytes(array) for array in _ARRAY.finditer(op["result"])]
            if op["start"] and op["kind"] != "all-reduce" and len(sizes) > 1:
                sizes = sizes[1:2]  # (operand, result, and what the hardware keeps)
            found.append(Collective(op["kind"], sum(sizes), max(sizes), runs[name]))
    return found


def counts(ops: list[Collective]) -> dict[str, int]:
    """Count collectives by kind."""
    return dict(collections.Counter(op.kind for op in ops))


def arrays(text: str) -> Iterator[re.Match[str]]:
    """Find the types of arrays in a line of HLO, such as ``f32[8,4]``."""
    return _ARRAY.finditer(text)


def array_bytes(array: re.Match[str]) -> int:
    """Return the size of one of them."""
    bits = int(re.sub(r"\D", "", array["dtype"]) or 8)
    return math.prod(int(n) for n in array["shape"].split(",") if n) * bits // 8


def _runs(parts: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in one run of the entry.

    A callee stands before its callers. A loop whose length can't be read counts once.
    """
    runs = dict.fromkeys(parts, 0)
    runs[next(reversed(parts))] = 1
    for name in reversed(parts):
        for line in parts[name]:
            condition = _CONDITION.search(line)
            trips = _trips(line, parts.get(condition["name"], [])) if condition else 1
            callees = [call["name"] for call in _CALL.finditer(line)]
            for branches in _BRANCHES.finditer(line):
                callees += re.findall(r"%([\w.-]+)", branches["names"])
            for callee in callees:
                if callee in runs:
                    runs[callee] += runs[name] * trips
    return runs


def _trips(loop: str, condition: list[str]) -> int:
    """How often a loop's body runs: as the compiler says, or up to the bound of its condition."""
    known = _KNOWN.search(loop)
    if known:
        return int(known["trips"])
    bounds = [bound for line in condition for bound in _BOUND.finditer(line)]
    counts_up = any("direction=LT" in line for line in condition)
    return int(bounds[0]["bound"]) if counts_up and len(bounds) == 1 else 1
