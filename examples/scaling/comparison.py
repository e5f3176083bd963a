"""What the commands that compile for TPUs share: a table of programs beside the bare base's."""

from collections.abc import Callable, Mapping, Sequence

from examples.kit.aot.program import Program
from examples.kit.console import print_error
from examples.kit.data.error import DataError
from examples.kit.options import SettingsError

Cells = Callable[[Program, Program], Sequence[str]]


def print_table(
    titles: Sequence[str], programs: Mapping[str, Callable[[], Program]], cells: Cells
) -> None:
    """Compile programs one after the other and print a line of Markdown for each.

    Args:
      titles: of the columns, the programs' names first.
      programs: by name, what compiles each; the bare base comes first.
      cells: of a program, and the base's, to the columns behind its name.
    """
    print(f"\n{_line(titles)}\n{_line(['---'] * len(titles))}")
    base = None
    for name, build in programs.items():
        program = build()
        base = base or program
        print(_line([name, *cells(program, base)]), flush=True)


def status(run: Callable[[], None]) -> int:
    """Run a command; what can't be used is one line, and status 2."""
    try:
        run()
    except (SettingsError, DataError) as error:
        print_error(str(error))
        return 2
    return 0


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
