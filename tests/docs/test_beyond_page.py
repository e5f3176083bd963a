"""Results on the page of arms beyond the paper follow from the records."""

import pytest
from test_readme import ROOT

pytest.importorskip("examples.paper.table1_llama")

from examples.kit import records
from examples.paper import RESULTS

PAGE = (ROOT / "docs/beyond.md").read_text()
OTHERS = ("adam", "adam+magma", "adam+constant", "c_adam")
AGAINST = "adam+constant@0.1386"


def losses():
    """Validation losses of the 40M Llama by arm and rate, of seed 0; of repeats the first."""
    found = {}
    for record in records.read(RESULTS / "llama_40m.jsonl"):
        settings = record["settings"]
        if settings["seed"] == 0 and settings["steps"] == 1500:
            rates = found.setdefault(settings["arm"], {})
            rates.setdefault(settings["learning_rate"], record["results"]["valid_loss"])
    return found


def rate(value):
    """Writes a rate as the pages do: 8e-3, 16e-3, 5e-4."""
    exponent = -3 if value >= 1e-3 else -4
    return f"{round(value * 10**-exponent)}e{exponent}"


def rows(found):
    """The table's rows from the lowest loss, and the differences from the constant."""
    arms = [*OTHERS, *(arm for arm in found if "@" in arm)]
    best = {arm: min(found[arm], key=found[arm].get) for arm in arms}
    base = found[AGAINST][best[AGAINST]]
    lines, gaps = [], {}
    for arm in sorted(arms, key=lambda arm: found[arm][best[arm]]):
        rates, loss = sorted(found[arm]), found[arm][best[arm]]
        interior = "yes" if rates[0] < best[arm] < rates[-1] else "no"
        gaps[arm] = loss - base
        gap = "" if arm == AGAINST else f"{gaps[arm]:+.3f}"
        lines.append(f"| `{arm}` | {rate(best[arm])} | {interior} | {loss:.4f} | {gap} |")
    return lines, gaps


def test_the_table():
    lines, _ = rows(losses())
    assert "\n".join(lines) in PAGE


def test_the_constant_is_adams_best_one():
    found = losses()
    constants = [arm for arm in found if arm.startswith("adam+constant") and "*" not in arm]
    assert min(constants, key=lambda arm: min(found[arm].values())) == AGAINST


def test_what_is_said_about_them():
    found = losses()
    beyond = [arm for arm in found if "@" in arm]
    assert len(beyond) == 4
    assert {tuple(found[arm]) for arm in beyond} == {(8e-3,)}
    seeds = {
        record["settings"]["seed"]
        for record in records.read(RESULTS / "llama_40m.jsonl")
        if "@" in record["settings"]["arm"]
    }
    assert seeds == {0}
    _, gaps = rows(found)
    constant = gaps["c_adam+constant@0.1386"]
    assert min(gaps, key=gaps.get) == "c_adam+constant@0.1386"
    told = [
        f"over its mean is {gaps['c_adam+aligned/mean@0.1386'] - constant:.3f} above it",
        f"*aligned* {gaps['c_adam+aligned@0.1386'] - constant:.3f}.",
        f"0.1386 is {-constant:.3f} below Adam with it",
        f"This gained {gaps['adam+constant']:.3f} on Adam",
    ]
    assert [words for words in told if words not in PAGE] == []
    assert 8e-3 * 0.1386 == pytest.approx(4e-3 * 0.2765, rel=0.005)
