"""Pages as the tests of their numbers read them, and the records that the numbers come from.

A number is right if what the records give rounds to it, at the precision that is printed. Results
are checked, and the settings that a record has. Options in commands are not: a record has its own
command.
"""

import functools
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from examples.kit import records
from examples.paper import RESULTS, search

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")


# ---------------------------------------------------------------------------------------------
# Pages


class Table(NamedTuple):
    """A table: the heading above it, its heads and the cells of its rows, without emphasis."""

    section: str
    heads: list[str]
    rows: list[list[str]]

    @property
    def head(self):
        return " | ".join(self.heads)


class Page:
    """A page of `docs/`; it remembers which of its tables were asked for."""

    def __init__(self, name):
        self.text = (DOCS / name).read_text()
        self.prose = plain(" ".join(self.text.split()))
        self.tables = list(read_tables(self.text))
        self.read = []

    def rows(self, section, head, count):
        """The `count` rows of the one table below a heading whose line of heads begins so."""
        [table] = [t for t in self.tables if t.section == section and t.head.startswith(head)]
        assert len(table.rows) == count, f"{section}: {len(table.rows)} rows, not {count}"
        self.read.append(table)
        return table.rows

    def unread(self, section=""):
        """Section and heads of the tables that nobody asked for, of one section or of all."""
        mine = [table for table in self.tables if table.section.startswith(section)]
        return [(table.section, table.head) for table in mine if table not in self.read]

    def says(self, *phrases):
        """Fails unless the page has each of the phrases, whatever its emphasis and line breaks."""
        absent = [phrase for phrase in phrases if phrase not in self.prose]
        assert not absent, f"not on the page: {absent}"


def plain(text):
    """Text without bold face, and with the asterisks that are not emphasis."""
    return text.replace(r"\*", "\0").replace("**", "").replace("\0", "*")


def read_tables(text):
    """The tables of a page, also those in the items of a list."""
    section, block, code = "", [], False
    for line in [*text.splitlines(), ""]:
        code ^= line.startswith("```")
        if heading := re.match(r"#+ (.*)", line) if not code else None:
            section = heading[1]
        if re.match(r" *\|.*\|$", line):
            block.append([plain(cell.strip()) for cell in line.strip().strip("|").split("|")])
        elif block:
            heads, _, *rows = block
            assert all(len(row) == len(heads) for row in rows), heads
            yield Table(section, heads, rows)
            block = []


def numbers(text):
    """The numbers of a text as they are printed."""
    return NUMBER.findall(text)


def rounds_to(value, printed):
    """Whether `value` is the `printed` number at its precision.

    Of a number with a comma the zeros at the end are no precision, but three digits are meant:
    35,400 and 20,700 are known to hundreds, and so is 20,000.
    """
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2])
    if "," in printed:
        digits = max(3, len(mantissa.rstrip("0"))) - len(mantissa)
    unit = 10.0 ** (int(exponent or 0) - digits)
    gap = abs(float(printed.replace(",", "")) - value)
    signed = printed[0] not in "+-" or value == 0 or (printed[0] == "-") == (value < 0)
    return signed and gap <= 0.5 * unit * (1 + 1e-6)


def same(text, values):
    """Fails unless the numbers in a text are the values, each in its place."""
    printed, values = numbers(text), list(values)
    assert len(printed) == len(values), f"{text!r} has {len(printed)} numbers, not {len(values)}"
    wrong = [pair for pair in zip(printed, values, strict=True) if not rounds_to(pair[1], pair[0])]
    assert not wrong, f"{text!r}: printed and recorded {wrong}"


# ---------------------------------------------------------------------------------------------
# Records


@functools.cache
def recorded(name):
    """All records of a file, read once."""
    found = records.read(RESULTS / f"{name}.jsonl")
    assert found, name
    return found


def runs(name, **settings):
    """The records of a file that have these settings."""
    found = search.select(recorded(name), settings)
    assert found, settings
    return found


def three_seeds(name, **settings):
    """The same from the seeds of the tables; a fourth serves the search beyond Magma alone."""
    return [run for run in runs(name, **settings) if run["settings"]["seed"] < 3]


def losses(found, arm, rate):
    """Validation losses of an arm at a rate, by seed; each seed ran once."""
    made = search.select(found, {"arm": arm, "learning_rate": rate})
    by_seed = {record["settings"]["seed"]: search.valid_loss(record) for record in made}
    assert len(by_seed) == len(made) > 0, (arm, rate)
    return dict(sorted(by_seed.items()))


def at_best(found, arm):
    """The rate that seed 0 chose, between two worse ones, and the losses there by seed."""
    rate = search.best(found, arm).learning_rate
    return rate, losses(found, arm, rate)


def best_losses(found, arm):
    """Losses at the best rate, by seed."""
    return at_best(found, arm)[1]


def median(by_seed):
    """Median over the seeds."""
    return statistics.median(by_seed.values())


def spread(by_seed):
    """Median, smallest and largest."""
    return [median(by_seed), min(by_seed.values()), max(by_seed.values())]


def gaps(these, those):
    """Differences seed by seed."""
    assert these.keys() == those.keys()
    return [these[seed] - those[seed] for seed in these]


def differences(found, arm, other):
    """Differences seed by seed, each arm at its best rate."""
    return gaps(best_losses(found, arm), best_losses(found, other))


def of_medians(found, arm, other):
    """Difference of the medians at each one's best rate."""
    return median(best_losses(found, arm)) - median(best_losses(found, other))


def of_seed_0(found, arm, rate):
    """Loss of seed 0 at a rate."""
    return losses(found, arm, rate)[0]


def arm_of(title):
    """How the records name an arm that a page calls ``Adam+SkipUpdate`` or ``C-Adam``."""
    name = title.partition(" (")[0].lower().replace("-", "_")
    return name.replace("skipupdate", "skip").replace(" by experts", "/expert")


def compared_with(arm):
    """The arm that another is compared with: its base, or Adam if it is one; None for Adam."""
    base = arm.partition("+")[0]
    return None if arm == "adam" else "adam" if base == arm else base


def check_arm(found, title, rate, cell, against):
    """Checks rate, median and range of an arm, and its differences seed by seed.

    Returns:
        The losses at the arm's best rate, by seed.
    """
    arm = arm_of(title)
    best, by_seed = at_best(found, arm)
    assert len(by_seed) == 3
    assert float(rate) == best
    same(cell.partition(" (")[0], spread(by_seed))
    other = compared_with(arm)
    same(against, gaps(by_seed, best_losses(found, other)) if other else [])
    return by_seed


# ---------------------------------------------------------------------------------------------
# The table of verdicts, which every page has a part of


def verdict(beginning):
    """What was found here, by the row of a figure or table, without the addresses of links."""
    [table] = [t for t in read_tables((DOCS / "reproduction.md").read_text()) if len(t.rows) == 16]
    [cell] = [row[3] for row in table.rows if row[0].startswith(beginning)]
    return re.sub(r"\]\([^)]*\)", "", cell)
