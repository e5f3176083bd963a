"""Compiles a program ahead of time and says what it needs."""

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.experimental.compilation_cache import compilation_cache

from examples.kit.aot.hlo import Collective, collectives
from examples.kit.aot.traffic import hbm_bytes, hbm_range
from examples.kit.options import SettingsError

HEADER = (
    "| program | memory per device | of it arguments | collectives in a run | sent per device "
    "| compiler's CPU time |\n| --- | --- | --- | --- | --- | --- |"
)
_GIVEN = re.compile(r"(?:may|must)-alias")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, as one device runs it.

    Attributes:
      text: its HLO.
      seconds: processor time that lowering and compiling took, over all cores.
      arguments: bytes of its arguments.
      memory: bytes of arguments, results that don't reuse an argument's buffer, and temporaries.
      flops: floating-point operations as the compiler counts them, the body of a loop once.
      bytes_accessed: bytes moved, likewise, also between kinds of memory.
      collectives: what the devices send each other.
      reused: number of results that are written into an argument's buffer.
    """

    text: str
    seconds: float
    arguments: int
    memory: int
    flops: float
    bytes_accessed: float
    collectives: tuple[Collective, ...]
    reused: int

    @property
    def runs(self) -> dict[str, int]:
        """How many collectives of each kind one run of the program makes."""
        runs: dict[str, int] = {}
        for op in self.collectives:
            runs[op.kind] = runs.get(op.kind, 0) + op.times
        return runs

    @functools.cached_property
    def hbm_bytes(self) -> int:
        """Bytes moved to and from memory, of a program without loops; see `traffic.hbm_bytes`."""
        return hbm_bytes(self.text)

    @functools.cached_property
    def hbm_range(self) -> tuple[int, int]:
        """The least and the most that branches leave of these bytes; see `traffic.hbm_range`."""
        return hbm_range(self.text)

    @property
    def sent(self) -> int:
        """Bytes of the results of all these collectives on one device."""
        return sum(op.bytes * op.times for op in self.collectives)


def compiled(lower: Callable[[], jax.stages.Lowered]) -> Program:
    """Lower and compile a program.

    Args:
      lower: returns what ``jax.jit(...).lower`` does. Its arguments are trees of
        `jax.ShapeDtypeStruct` with shardings, whose devices need not be there.

    Raises:
      SettingsError: if the program doesn't fit into a device's memory.
    """
    start = time.process_time()
    try:
        with _no_cache():
            compiled = lower().compile()
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise SettingsError(_too_large(str(error))) from None
    seconds = time.process_time() - start
    text, memory, cost = compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis()
    return Program(
        text=text,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        memory=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        collectives=tuple(collectives(text)),
        reused=len(_GIVEN.findall(text.split("\n", 1)[0])),
    )


def row(name: str, program: Program) -> str:
    """Return a program's line of the table under `HEADER`."""
    cells = [
        name,
        f"{program.memory / 2**30:.3f} GiB",
        f"{program.arguments / 2**30:.3f} GiB",
        by_kind(program.runs),
        f"{program.sent:,} B",
        f"{program.seconds:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def by_kind(counts: Mapping[str, int]) -> str:
    """Say how many collectives of each kind, such as "2 all-gather, 1 all-reduce"."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def added(program: Program, base: Program) -> str:
    """Say which collectives a run of `program` has beyond those of `base`, or has less."""
    kinds = program.runs.keys() | base.runs.keys()
    more = {kind: program.runs.get(kind, 0) - base.runs.get(kind, 0) for kind in kinds}
    return by_kind({kind: count for kind, count in more.items() if count})


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Turn off JAX's cache of compiled programs: only a device can take one out again."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _too_large(message: str) -> str:
    used = re.search(r"Used (?P<used>\S+) of (?P<there>\S+) hbm", message)
    used = used or re.search(r"\((?P<used>\S+)\) exceeds available HBM \((?P<there>\S+)\)", message)
    needs = f"{used['used']} of {used['there']}B" if used else message.splitlines()[0]
    return (
        f"the program does not fit into a device's memory: it needs {needs}; use a larger slice, "
        "more fsdp, --remat, --scan-layers or --accumulate"
    )
