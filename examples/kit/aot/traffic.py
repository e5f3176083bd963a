"""Bytes that a TPU program moves between a chip and its memory (HBM), counted from its HLO.

The compiler's own `cost_analysis` counts what is first copied into the chip's fast memory (VMEM)
twice: the copy, and its use there.
"""

import re
from collections.abc import Callable

from examples.kit.aot.hlo import array_bytes, arrays, computations

_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][a-z-]*)\((?P<rest>.*)$"
)
_OPERAND = re.compile(r"%([\w.-]+)")
# They name buffers, or end what another instruction began.
_FREE = re.compile(
    r"parameter|tuple|get-tuple-element|bitcast|constant|after-all|partition-id|replica-id"
    r"|opt-barrier|[a-z-]+-done"
)
_FREE_CALL = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer)"')
_LOOPS = ("while", "call")
_BRANCHES = re.compile(r"branch_computations=\{[^}]*\}|(?:true|false)_computation=%[\w.-]+")
_COPIES = ("copy-start", "slice-start")
_FAST = re.compile(r"S\([1-9]\d*\)")
_TYPE = re.compile(r"\w+\[[\d,]*\](\{[^}]*\})?")


class LoopError(ValueError):
    """The program has a loop or a branch, whose traffic isn't known from its text."""


def hbm_bytes(text: str) -> int:
    """Count the bytes read from and written to HBM in one run of a program without loops.

    Every operand and every result of an instruction counts once, unless it lies in fast memory
    (``S(1)`` and other spaces of a layout). A copy into fast memory counts what it reads.

    Args:
      text: the module, ``compiled.as_text()``.

    Raises:
      LoopError: if the entry has a loop or a call, or a branch that changes the number.
    """
    least, most = hbm_range(text)
    if least != most:
        raise LoopError(f"the HBM traffic varies from {least} to {most} bytes with its branches")
    return least


def hbm_range(text: str) -> tuple[int, int]:
    """Count as `hbm_bytes` does, each branch once taken where it moves least and once where most.

    Raises:
      LoopError: if the entry or a branch has a loop or a call.
    """
    parts = computations(text)
    return _moved(parts, next(reversed(parts)), min), _moved(parts, next(reversed(parts)), max)


def _moved(parts: dict[str, list[str]], name: str, choose: Callable[[list[int]], int]) -> int:
    total, sizes = 0, dict[str, list[int]]()
    for line in parts[name]:
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        op, results = instruction["op"], _in_hbm(instruction["type"])
        sizes[instruction["name"]] = results
        if op in _LOOPS:
            raise LoopError(
                f"the program has a {op}, {instruction['name']}: its HBM traffic varies"
            )
        if op == "conditional":
            branches = _OPERAND.findall(" ".join(_BRANCHES.findall(line)))
            total += choose([_moved(parts, branch, choose) for branch in branches])
            continue
        if _FREE.fullmatch(op) or _FREE_CALL.search(line):
            continue
        if op in _COPIES:
            total += _copied(op, instruction["type"])
            continue
        operands = _OPERAND.findall(instruction["rest"].split("), ")[0])
        read = [sizes.get(operand, []) for operand in operands]
        total += sum(results) + sum(size[0] for size in read if len(size) == 1)
    return total


def _in_hbm(types: str) -> list[int]:
    """Sizes of an instruction's results, an array in fast memory being 0."""
    return [_size(match[0]) for match in _TYPE.finditer(types)]


def _size(array: str) -> int:
    return 0 if _FAST.search(array) else array_bytes(next(arrays(array)))


def _copied(op: str, types: str) -> int:
    """What a copy, or a copy of a slice, reads from HBM and writes to it."""
    first, second, *_ = [match[0] for match in _TYPE.finditer(types)]
    if op == "copy-start":  # (destination, source, what the hardware keeps)
        return _size(first) + _size(second)
    part = array_bytes(next(arrays(second)))  # ((source), destination, what the hardware keeps)
    return (0 if _FAST.search(first) else part) + _size(second)
