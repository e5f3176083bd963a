"""Results on the page of arms beyond the paper follow from the records."""

import pytest
from test_readme import ROOT

pytest.importorskip("examples.paper.table1_llama")

from examples.kit import records
from examples.paper import RESULTS

PAGE = (ROOT / "docs/beyond.md").read_text()
GROUPS = {  # by base: arms that stand beside the new ones, and the lowest constant
    "adam": (("adam", "adam+magma", "adam+constant", "c_adam"), "adam+constant@0.0693"),
    "muon": (("muon", "muon+magma", "muon+constant", "muon+damping"), "muon+constant@0.1347"),
}
SCORED, SMOOTH = "c_adam+aligned/mean@0.1386", "c_adam+constant@0.1386"


def losses(seed=0, name="llama_40m", steps=1500):
    """Validation losses by arm and rate, of the 40M Llama; of repeats the first."""
    found = {}
    for record in records.read(RESULTS / f"{name}.jsonl"):
        settings = record["settings"]
        if settings["seed"] == seed and settings["steps"] == steps:
            rates = found.setdefault(settings["arm"], {})
            rates.setdefault(settings["learning_rate"], record["results"]["valid_loss"])
    return found


def rate(value):
    """Writes a rate as the pages do: 8e-3, 16e-3, 5e-4."""
    exponent = -3 if value >= 1e-3 else -4
    return f"{round(value * 10**-exponent)}e{exponent}"


def at_best(found, arm):
    return min(found[arm].values())


def rows(found, base):
    """The table's rows from the lowest loss, and the differences from the constant."""
    others, against = GROUPS[base]
    arms = [*others, *(arm for arm in found if "@" in arm and (base == "muon") == ("muon" in arm))]
    best = {arm: min(found[arm], key=found[arm].get) for arm in arms}
    lines, gaps = [], {}
    for arm in sorted(arms, key=lambda arm: found[arm][best[arm]]):
        interior = "yes" if {best[arm] / 2, best[arm] * 2} <= found[arm].keys() else "no"
        gaps[arm] = found[arm][best[arm]] - found[against][best[against]]
        gap = "" if arm == against else f"{gaps[arm]:+.3f}"
        loss = found[arm][best[arm]]
        lines.append(f"| `{arm}` | {rate(best[arm])} | {interior} | {loss:.4f} | {gap} |")
    return lines, gaps


@pytest.mark.parametrize("base", GROUPS)
def test_the_tables(base):
    lines, _ = rows(losses(), base)
    assert "\n".join(["", "|---|---|---|---|---|", *lines, "", ""]) in PAGE


@pytest.mark.parametrize("base", GROUPS)
def test_the_constant_is_the_lowest_of_its_base(base):
    found, against = losses(), GROUPS[base][1]
    constants = [arm for arm in found if arm.startswith(f"{base}+constant") and "*" not in arm]
    assert min(constants, key=lambda arm: at_best(found, arm)) == against


def test_the_table_of_fresh_seeds():
    against, lines = GROUPS["adam"][1], []
    for arm in (SMOOTH, SCORED, against):
        [chosen] = {16e-3} & {min(losses()[arm], key=losses()[arm].get)}
        fresh = [losses(seed)[arm][chosen] for seed in (1, 2, 3)]
        gaps = [mine - losses(n)[against][chosen] for n, mine in enumerate(fresh, 1)]
        told = "" if arm == against else f" {', '.join(f'{gap:+.3f}' for gap in gaps)}"
        values = ", ".join(f"{x:.4f}" for x in fresh)
        lines.append(f"| `{arm}` | {rate(chosen)} | {values} |{told} |")
    assert "\n".join(lines) in PAGE
    beyond = {arm for seed in (1, 2, 3) for arm in losses(seed) if "@" in arm}
    assert beyond == {SMOOTH, SCORED, against}


def test_what_is_said_about_adam():
    found, words = losses(), " ".join(PAGE.split())
    _, gaps = rows(found, "adam")
    against = GROUPS["adam"][1]
    behind = [losses(n)[SCORED][16e-3] - losses(n)[SMOOTH][16e-3] for n in (1, 2, 3)]
    ahead = [losses(n)[against][16e-3] - losses(n)[SMOOTH][16e-3] for n in (1, 2, 3)]
    ratio = [losses(n)["adam+constant"][4e-3] - losses(n)[against][16e-3] for n in (0, 1, 2)]

    def above(arm, other):
        return f"{gaps[arm] - gaps[other]:.3f}"

    told = [
        f"was {gaps[SMOOTH] - gaps[SCORED]:.3f} below C-Adam with the constant on seed 0",
        f"seemed to be by {gaps[SMOOTH] - gaps[SCORED]:.3f} on the seed",
        "it is {:.3f}, {:.3f} and {:.3f} above it".format(*behind),
        f"it was {min(behind):.3f} to {max(behind):.3f} worse",
        f"{min(ahead):.3f} to {max(ahead):.3f} below Adam with its own best constant",
        f"it is {above('adam+aligned@0.1386', 'adam+constant@0.1386')} above the constant of the "
        f"same ratio on Adam, {above('c_adam+aligned@0.1386', SMOOTH)} on C-Adam",
        f"Over its mean it is {above('adam+aligned/mean@0.1386', 'adam+constant@0.1386')} above it",
        f"gains {min(ratio):.3f} to {max(ratio):.3f} on Adam",
        f"where it is {above('adam+previous@0.1386', 'adam+constant@0.1386')} above the constant",
    ]
    assert [text for text in told if text not in words] == []
    assert min(behind) > -5e-5 and max(ahead) < 0.05
    advice = (ROOT / "docs/should_i_use_it.md").read_text()
    assert f"[gained another {min(ratio):.3f} to {max(ratio):.3f}](beyond.md#on-adam)" in advice
    assert 16e-3 * 0.0693 == pytest.approx(4e-3 * 0.2765, rel=0.005)


def test_what_is_said_about_muon():
    found, words = losses(), " ".join(PAGE.split())
    _, gaps = rows(found, "muon")
    aligned = [arm for arm in gaps if "@0.2695" in arm]
    gains = sorted(gaps["muon+constant"] - gaps[arm] for arm in aligned)
    told = [
        "scores gain** {:.3f} and {:.3f} over `muon+constant`".format(*gains),
        f"more than {-min(gaps.values()):.3f} better",
    ]
    assert [text for text in told if text not in words] == []
    beyond = {arm: rates for arm, rates in found.items() if "muon" in arm and "@" in arm}
    assert len(beyond) == 4 and {len(rates) for rates in beyond.values()} == {1, 2, 3}


def small_rows(found):
    """Rows of the small mixture: losses of seed 0, and of the others at the rate it chose."""
    arms = [
        "adam",
        "adam+magma",
        "adam+constant",
        "c_adam",
        *(arm for arm in found[0] if "@" in arm),
    ]
    for arm in sorted(arms, key=lambda arm: at_best(found[0], arm)):
        best = min(found[0][arm], key=found[0][arm].get)
        interior = "yes" if {best / 2, best * 2} <= found[0][arm].keys() else "no"
        fresh = ", ".join(f"{found[n][arm][best]:.4f}" for n in (1, 2, 3) if arm in found[n])
        shown = f"{best * 1e3:g}e-3"
        yield f"| `{arm}` | {shown} | {interior} | {found[0][arm][best]:.4f} | {fresh} |"


def test_the_small_mixture_of_experts():
    found = {seed: losses(seed, "nano_moe", 400) for seed in range(4)}
    assert "\n".join(["", "|---|---|---|---|---|", *small_rows(found), "", ""]) in PAGE
    words = " ".join(PAGE.split())
    for base in ("c_adam", "adam"):
        arms = f"{base}+aligned/mean@0.1386", f"{base}+constant@0.1386"
        assert [min(found[0][arm], key=found[0][arm].get) for arm in arms] == [19.2e-3] * 2
        scored, constant = ([found[n][arm][19.2e-3] for n in (1, 2, 3)] for arm in arms)
        gaps = [f"{x - y:+.3f}" for x, y in zip(scored, constant, strict=True)]
        name = {"c_adam": "C-Adam", "adam": "Adam"}[base]
        assert f"on {name} {gaps[0]}, {gaps[1]} and {gaps[2]}" in words
    for seed in (0, 1, 2):
        wide, half = found[seed]["adam+constant"], found[seed]["adam+constant@0.1386"]
        assert min(wide.values()) < min(half.values())
