"""Results on the page of arms beyond the paper follow from the records."""

import statistics

import pytest
from test_readme import ROOT

pytest.importorskip("examples.paper.table1_llama")

from examples.kit import records
from examples.paper import RESULTS

PAGE = (ROOT / "docs/beyond.md").read_text()
WORDS = " ".join(PAGE.split())
GROUPS = {  # by base: arms that stand beside the new ones, and the lowest constant
    "adam": (("adam", "adam+magma", "adam+constant", "c_adam"), "adam+constant@0.0693"),
    "muon": (("muon", "muon+magma", "muon+constant", "muon+damping"), "muon+constant@0.1347"),
}
SCORED, SMOOTH = "c_adam+aligned/mean@0.1386", "c_adam+constant@0.1386"
LOWEST = "muon+aligned/mean@0.2695"  # on Muon
FRESH = {  # by base: the arms that ran from seeds 1 to 3
    "adam": (SMOOTH, SCORED, "adam+constant@0.0693"),
    "muon": (LOWEST, "muon+constant@0.0674", "muon+constant@0.1347", "muon+constant"),
}
MIXTURES = {400: ("adam", "adam+magma", "adam+constant", "c_adam")}  # by steps: arms beside
MIXTURES[1500] = (*MIXTURES[400], "muon", "muon+magma", "muon+constant")


def losses(seed=0, name="llama_40m", steps=1500):
    """Validation losses by arm and rate, of the 40M Llama; of repeats the first."""
    found = {}
    for record in records.read(RESULTS / f"{name}.jsonl"):
        settings = record["settings"]
        if settings["seed"] == seed and settings["steps"] == steps:
            rates = found.setdefault(settings["arm"], {})
            rates.setdefault(settings["learning_rate"], record["results"]["valid_loss"])
    return found


@pytest.fixture(scope="module")
def llama():
    """Losses of the 40M Llama by seed."""
    return {seed: losses(seed) for seed in range(4)}


def chosen(found, arm):
    """The rate with the lowest loss, and whether it lies between two that were tried."""
    best = min(found[arm], key=found[arm].get)
    return best, {best / 2, best * 2} <= found[arm].keys()


def at_best(found, arm):
    return min(found[arm].values())


def on_fresh_seeds(found, arm):
    """Losses of seeds 1 to 3 at the rate that seed 0 chose; of fewer where fewer ran."""
    best, _ = chosen(found[0], arm)
    return [found[n][arm][best] for n in (1, 2, 3) if best in found[n].get(arm, {})]


def less(these, those):
    return [this - that for this, that in zip(these, those, strict=True)]


def beyond(found, base):
    """The arms of a base that are spelled out."""
    return [arm for arm in found if "@" in arm and (base == "muon") == ("muon" in arm)]


def rate(value):
    """Writes a rate as the pages do: 8e-3, 19.2e-3, 5e-4."""
    exponent = -3 if value >= 1e-3 else -4
    return f"{value * 10**-exponent:.4g}e{exponent}"


def listed(values, form):
    return ", ".join(f"{value:{form}}" for value in values)


def says(*phrases):
    assert [phrase for phrase in phrases if phrase not in WORDS] == []


def has_table(lines):
    """Whether the page has these rows as one whole table."""
    return "\n".join(["---|", *lines, "", ""]) in PAGE


@pytest.mark.parametrize("base", GROUPS)
def test_the_tables_of_seed_0(base, llama):
    others, against = GROUPS[base]
    lines = []
    for arm in sorted([*others, *beyond(llama[0], base)], key=lambda arm: at_best(llama[0], arm)):
        best, interior = chosen(llama[0], arm)
        gap = at_best(llama[0], arm) - at_best(llama[0], against)
        cells = [f"`{arm}`", rate(best), "yes" if interior else "no"]
        cells += [f"{at_best(llama[0], arm):.4f}", "" if arm == against else f"{gap:+.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    assert has_table(lines), "\n".join(lines)


@pytest.mark.parametrize("base", GROUPS)
def test_the_constant_is_the_lowest_of_its_base(base, llama):
    constants = [arm for arm in llama[0] if arm.startswith(f"{base}+constant") and "*" not in arm]
    assert min(constants, key=lambda arm: at_best(llama[0], arm)) == GROUPS[base][1]


@pytest.mark.parametrize("base", GROUPS)
def test_the_tables_of_fresh_seeds(base, llama):
    against, lines = GROUPS[base][1], []
    for arm in FRESH[base]:
        mine, theirs = (on_fresh_seeds(llama, each) for each in (arm, against))
        told = "" if arm == against else f" {listed(less(mine, theirs), '+.3f')}"
        best, _ = chosen(llama[0], arm)
        lines.append(f"| `{arm}` | {rate(best)} | {listed(mine, '.4f')} |{told} |")
    assert has_table(lines), "\n".join(lines)
    ran = {arm for arm in llama[0] if len(on_fresh_seeds(llama, arm)) == 3 and base in arm}
    assert ran == set(FRESH[base])


def test_what_is_said_about_adam(llama):
    against = GROUPS["adam"][1]
    scored, smooth, constant = (on_fresh_seeds(llama, a) for a in (SCORED, SMOOTH, against))
    behind, ahead = less(scored, smooth), less(constant, smooth)
    ratio = [llama[n]["adam+constant"][4e-3] - llama[n][against][16e-3] for n in (0, 1, 2)]

    def above(arm, other):
        return f"{at_best(llama[0], arm) - at_best(llama[0], other):.3f}"

    says(
        f"was {above(SMOOTH, SCORED)} below C-Adam with the constant on seed 0",
        f"seemed to be by {above(SMOOTH, SCORED)} on the seed",
        "it is {:.3f}, {:.3f} and {:.3f} above it".format(*behind),
        f"it was {min(behind):.3f} to {max(behind):.3f} worse",
        f"{min(ahead):.3f} to {max(ahead):.3f} below Adam with its own best constant",
        f"it is {above('adam+aligned@0.1386', 'adam+constant@0.1386')} above the constant of the "
        f"same ratio on Adam, {above('c_adam+aligned@0.1386', SMOOTH)} on C-Adam",
        f"Over its mean it is {above('adam+aligned/mean@0.1386', 'adam+constant@0.1386')} above it",
        f"gains {min(ratio):.3f} to {max(ratio):.3f} on Adam",
        f"where it is {above('adam+previous@0.1386', 'adam+constant@0.1386')} above the constant",
    )
    assert min(behind) > -5e-5 and max(ahead) < 0.05
    advice = (ROOT / "docs/should_i_use_it.md").read_text()
    assert f"[gained another {min(ratio):.3f} to {max(ratio):.3f}](beyond.md#on-adam)" in advice
    assert 16e-3 * 0.0693 == pytest.approx(4e-3 * 0.2765, rel=0.005)


def test_what_is_said_about_muon(llama):
    against, quarter = GROUPS["muon"][1], FRESH["muon"][1]
    scored, half, small = (on_fresh_seeds(llama, arm) for arm in (LOWEST, against, quarter))
    gains, others = less(half, scored), less(scored, small)
    assert min(gains) < statistics.median(gains) < 0.01 < max(gains)
    assert min(others) < 0 < max(others)
    ratio = [llama[n]["muon"][4e-3] - llama[n][against][32e-3] for n in (0, 1, 2)]
    wide = llama[0]["muon+aligned/mean@0.5391"]
    says(
        f"{min(gains):.3f} to {max(gains):.3f} below the constant that seed 0 chose",
        "by {:.3f}, {:.3f} and {:.3f}. The bar is 0.01".format(*gains),
        "it differs by {:+.3f}, {:+.3f} and {:+.3f}".format(*others),
        f"gains {min(ratio):.3f} to {max(ratio):.3f} over Muon",
        f"ends at {llama[0][LOWEST][64e-3]:.2f}, and {wide[32e-3]:.2f} at twice the ratio",
        f"costs the constant {llama[0][against][64e-3] - llama[0][against][32e-3]:.2f}",
    )
    for arm in ("muon+aligned/mean@0.1347", "muon+aligned/mean@0.5391"):
        assert at_best(llama[0], arm) > at_best(llama[0], LOWEST)
    advice = (ROOT / "docs/should_i_use_it.md").read_text()
    assert f"[gained {min(ratio):.3f} to {max(ratio):.3f} over Muon](beyond.md#on-muon)" in advice


@pytest.mark.parametrize("steps", MIXTURES)
def test_the_mixtures_of_experts(steps):
    found, lines = {seed: losses(seed, "nano_moe", steps) for seed in range(4)}, []
    arms = [*MIXTURES[steps], *(arm for arm in found[0] if "@" in arm)]
    for arm in sorted(arms, key=lambda arm: at_best(found[0], arm)):
        best, interior = chosen(found[0], arm)
        cells = [f"`{arm}`", rate(best), "yes" if interior else "no"]
        cells += [f"{at_best(found[0], arm):.4f}", listed(on_fresh_seeds(found, arm), ".4f")]
        lines.append(f"| {' | '.join(cells).rstrip()} |")
    assert has_table(lines), "\n".join(lines)


def test_what_is_said_about_the_small_mixture():
    found = {seed: losses(seed, "nano_moe", 400) for seed in range(4)}
    for base, name in (("c_adam", "C-Adam"), ("adam", "Adam")):
        arms = f"{base}+aligned/mean@0.1386", f"{base}+constant@0.1386"
        assert [chosen(found[0], arm)[0] for arm in arms] == [19.2e-3] * 2
        gaps = less(*(on_fresh_seeds(found, arm) for arm in arms))
        says("on {} {:+.3f}, {:+.3f} and {:+.3f}".format(name, *gaps))
    for seed in (0, 1, 2):
        wide, half = found[seed]["adam+constant"], found[seed]["adam+constant@0.1386"]
        assert min(wide.values()) < min(half.values())


def test_what_is_said_about_the_papers_mixture():
    found = {seed: losses(seed, "nano_moe", 1500) for seed in range(4)}
    scored, smooth = (on_fresh_seeds(found, arm) for arm in (SCORED, SMOOTH))
    gains = less(smooth, scored)
    assert max(gains) == max(smooth) - min(scored)
    says(
        "by {:.3f}, {:.3f} and {:.3f} on seeds 1 to 3".format(*gains),
        f"{min(gains):.3f} to {max(gains):.3f} lower than the constant",
    )
    same = found[0]["muon+constant"][19.2e-3] - found[0][LOWEST][19.2e-3]
    says(f"{same:.3f} below `muon+constant` at the same rate")
