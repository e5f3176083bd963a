"""Results on the page of arms beyond the paper follow from the records."""

import statistics

import pytest
from page_numbers import Page, gaps, of_seed_0, runs

from examples.paper import search

PAGE = Page("beyond.md")
ADVICE = Page("should_i_use_it.md")
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


LLAMA = runs("llama_40m", steps=1500)


def chosen(found, arm):
    """What seed 0 chose, be it on the edge of what was tried."""
    return search.best(found, arm, allow_edge=True)


def fresh(found, arm):
    """Losses of seeds 1 to 3 at the rate that seed 0 chose, by seed; of fewer where fewer ran."""
    by_seed = search.losses_by_seed(found, arm, chosen(found, arm).learning_rate)
    return {seed: loss for seed, loss in by_seed.items() if seed > 0}


def arms_of(found):
    return list(dict.fromkeys(record["settings"]["arm"] for record in found))


def beyond(base):
    """The arms of a base that are spelled out."""
    return [arm for arm in arms_of(LLAMA) if "@" in arm and (base == "muon") == ("muon" in arm)]


def rate(value):
    """Writes a rate as the pages do: 8e-3, 19.2e-3, 5e-4."""
    exponent = -3 if value >= 1e-3 else -4
    return f"{value * 10**-exponent:.4g}e{exponent}"


def listed(values, form):
    return ", ".join(f"{value:{form}}" for value in values)


def has_table(lines):
    """Whether the page has these rows as one whole table."""
    return "\n".join(["---|", *lines, "", ""]) in PAGE.text


def row(found, arm, *last):
    best = chosen(found, arm)
    cells = [f"`{arm}`", rate(best.learning_rate), "yes" if best.interior else "no"]
    return f"| {' | '.join([*cells, f'{best.loss:.4f}', *last])} |"


@pytest.mark.parametrize("base", GROUPS)
def test_the_tables_of_seed_0(base):
    others, against = GROUPS[base]
    lines = []
    for arm in sorted([*others, *beyond(base)], key=lambda arm: chosen(LLAMA, arm).loss):
        gap = chosen(LLAMA, arm).loss - chosen(LLAMA, against).loss
        lines.append(row(LLAMA, arm, "" if arm == against else f"{gap:+.3f}"))
    assert has_table(lines), "\n".join(lines)


@pytest.mark.parametrize("base", GROUPS)
def test_the_constant_is_the_lowest_of_its_base(base):
    constants = [
        arm for arm in arms_of(LLAMA) if arm.startswith(f"{base}+constant") and "*" not in arm
    ]
    assert min(constants, key=lambda arm: chosen(LLAMA, arm).loss) == GROUPS[base][1]


@pytest.mark.parametrize("base", GROUPS)
def test_the_tables_of_fresh_seeds(base):
    against, lines = GROUPS[base][1], []
    for arm in FRESH[base]:
        mine, theirs = (fresh(LLAMA, each) for each in (arm, against))
        told = "" if arm == against else f" {listed(gaps(mine, theirs), '+.3f')}"
        best = rate(chosen(LLAMA, arm).learning_rate)
        lines.append(f"| `{arm}` | {best} | {listed(mine.values(), '.4f')} |{told} |")
    assert has_table(lines), "\n".join(lines)
    ran = {arm for arm in arms_of(LLAMA) if base in arm and len(fresh(LLAMA, arm)) == 3}
    assert ran == set(FRESH[base])


def over(arm, rate, against, other, seeds):
    """How much lower `against` is than `arm`, at one rate each, seed by seed."""
    mine, theirs = (search.losses_by_seed(LLAMA, *run) for run in ((arm, rate), (against, other)))
    return [mine[seed] - theirs[seed] for seed in seeds]


def test_what_is_said_about_adam():
    against = GROUPS["adam"][1]
    scored, smooth, constant = (fresh(LLAMA, arm) for arm in (SCORED, SMOOTH, against))
    behind, ahead = gaps(scored, smooth), gaps(constant, smooth)
    ratio = over("adam+constant", 4e-3, against, 16e-3, (0, 1, 2))

    def above(arm, other):
        return f"{chosen(LLAMA, arm).loss - chosen(LLAMA, other).loss:.3f}"

    PAGE.says(
        f"was {above(SMOOTH, SCORED)} below C-Adam with the constant on seed 0",
        f"seemed to be by {above(SMOOTH, SCORED)} on the seed",
        "it is {:.3f}, {:.3f} and {:.3f} above it".format(*behind),
        f"it was {min(behind):.3f} to {max(behind):.3f} worse",
        f"{min(ahead):.3f} to {max(ahead):.3f} below Adam with its own best constant",
        f"it is {above('adam+aligned@0.1386', 'adam+constant@0.1386')} above the constant of the "
        f"same ratio on Adam, {above('c_adam+aligned@0.1386', SMOOTH)} on C-Adam",
        f"Over its mean it is {above('adam+aligned/mean@0.1386', 'adam+constant@0.1386')} above it",
        f"gains {min(ratio):.3f} to {max(ratio):.3f} on Adam",
        f"At half that ratio, 0.0347, the loss is {above('adam+constant@0.0347', against)} higher",
        f"where it is {above('adam+previous@0.1386', 'adam+constant@0.1386')} above the constant",
    )
    assert min(behind) > -5e-5 and max(ahead) < 0.05
    ADVICE.says(f"[gained another {min(ratio):.3f} to {max(ratio):.3f}](beyond.md#on-adam)")
    assert 16e-3 * 0.0693 == pytest.approx(4e-3 * 0.2765, rel=0.005)


def test_what_is_said_about_muon():
    against, quarter = GROUPS["muon"][1], FRESH["muon"][1]
    scored, half, small = (fresh(LLAMA, arm) for arm in (LOWEST, against, quarter))
    gains, others = gaps(half, scored), gaps(scored, small)
    assert min(gains) < statistics.median(gains) < 0.01 < max(gains)
    assert min(others) < 0 < max(others)
    ratio = over("muon", 4e-3, against, 32e-3, (0, 1, 2))
    narrow, wide = "muon+aligned/mean@0.1347", "muon+aligned/mean@0.5391"
    twice = of_seed_0(LLAMA, against, 64e-3) - of_seed_0(LLAMA, against, 32e-3)
    PAGE.says(
        f"{min(gains):.3f} to {max(gains):.3f} below the constant that seed 0 chose",
        "by {:.3f}, {:.3f} and {:.3f}. The bar is 0.01".format(*gains),
        "it differs by {:+.3f}, {:+.3f} and {:+.3f}".format(*others),
        f"gains {min(ratio):.3f} to {max(ratio):.3f} over Muon",
        f"ends at {of_seed_0(LLAMA, LOWEST, 64e-3):.2f}, and {of_seed_0(LLAMA, wide, 32e-3):.2f} "
        "at twice the ratio",
        f"costs the constant {twice:.2f}",
    )
    for arm in (narrow, wide):
        assert chosen(LLAMA, arm).loss > chosen(LLAMA, LOWEST).loss
    ADVICE.says(f"[gained {min(ratio):.3f} to {max(ratio):.3f} over Muon](beyond.md#on-muon)")


# ---------------------------------------------------------------------------------------------
# Longer runs


LONG, LONGEST = (runs("llama_60m", steps=steps) for steps in (3000, 12000))
LASTING = ("adam", "adam+constant", GROUPS["adam"][1], "c_adam", SMOOTH, "muon",
           GROUPS["muon"][1], LOWEST)  # fmt: skip


def test_the_table_of_longer_runs():
    lines = []
    for arm in LASTING:
        short, long = chosen(LLAMA, arm), chosen(LONG, arm)
        last = search.losses(LONGEST, arm).get(long.learning_rate)
        cells = [f"`{arm}`", rate(short.learning_rate), f"{short.loss:.4f}"]
        cells += [rate(long.learning_rate), "yes" if long.interior else "no", f"{long.loss:.4f}"]
        lines.append(
            f"| {' | '.join([*cells, f'{last:.4f}' if last else ''])} |".replace("|  |", "| |")
        )
    assert has_table(lines), "\n".join(lines)
    assert {arm for arm in arms_of(LONG) if "@" in arm or "muon" in arm} <= set(LASTING)


def test_what_is_said_about_longer_runs():
    def differences(arm, against):
        """How much lower the first is, at 98, 197 and 786 M tokens."""
        at = chosen(LONG, arm).learning_rate, chosen(LONG, against).learning_rate
        pairs = [(chosen(found, arm).loss, chosen(found, against).loss) for found in (LLAMA, LONG)]
        if (last := search.losses(LONGEST, arm)) and (other := search.losses(LONGEST, against)):
            pairs.append((last[at[0]], other[at[1]]))
        return [against - mine for mine, against in pairs]

    smooth = differences(SMOOTH, "adam")
    ratio = differences(GROUPS["adam"][1], "adam+constant")
    scored = differences(LOWEST, GROUPS["muon"][1])
    muon = differences(GROUPS["muon"][1], "muon")
    PAGE.says(
        "below Adam by {:.3f} at 98 M tokens and {:.3f} at 197 M".format(*smooth),
        f"ends {-smooth[2]:.3f} above it at 786 M",
        "ratio by {:.3f} at 98 M tokens and {:.3f} at 197 M".format(*ratio),
        f"{-ratio[2]:.3f} above it at 786 M",
        f"{scored[0]:.3f} below the constant at 98 M tokens and {-scored[1]:.3f} above it at 197 M",
        "below Muon by {:.3f} at 98 M tokens and {:.3f} at 197 M".format(*muon),
        "below Adam up to step 2400 and above from step 3000 on",
    )
    courses = [
        dict(search.select(LONGEST, {"arm": arm})[0]["results"]["valid_curve"])
        for arm in (SMOOTH, "adam")
    ]
    for step, loss in courses[0].items():
        assert (loss < courses[1][step]) == (step <= 2400)


@pytest.mark.parametrize("steps", MIXTURES)
def test_the_mixtures_of_experts(steps):
    found, lines = runs("nano_moe", steps=steps), []
    arms = [*MIXTURES[steps], *(arm for arm in arms_of(found) if "@" in arm)]
    for arm in sorted(arms, key=lambda arm: chosen(found, arm).loss):
        line = row(found, arm, listed(fresh(found, arm).values(), ".4f"))
        lines.append(line.replace("|  |", "| |"))
    assert has_table(lines), "\n".join(lines)


def test_what_is_said_about_the_small_mixture():
    found = runs("nano_moe", steps=400)
    for base, name in (("c_adam", "C-Adam"), ("adam", "Adam")):
        arms = f"{base}+aligned/mean@0.1386", f"{base}+constant@0.1386"
        assert [chosen(found, arm).learning_rate for arm in arms] == [19.2e-3] * 2
        differ = gaps(*(fresh(found, arm) for arm in arms))
        PAGE.says("on {} {:+.3f}, {:+.3f} and {:+.3f}".format(name, *differ))
        if base == "c_adam":
            PAGE.says(f"In a small mixture it was {min(differ):.3f} to {max(differ):.3f} higher")
    for seed in (0, 1, 2):
        wide, half = (
            search.losses(found, arm, seed) for arm in ("adam+constant", "adam+constant@0.1386")
        )
        assert min(wide.values()) < min(half.values())


def test_what_is_said_about_the_papers_mixture():
    found = runs("nano_moe", steps=1500)
    scored, smooth = (fresh(found, arm) for arm in (SCORED, SMOOTH))
    gains = gaps(smooth, scored)
    assert max(gains) == max(smooth.values()) - min(scored.values())
    PAGE.says(
        "by {:.3f}, {:.3f} and {:.3f} on seeds 1 to 3".format(*gains),
        f"{min(gains):.3f} to {max(gains):.3f} lower than the constant",
    )
    below, above = (
        of_seed_0(found, "muon+constant", rate) - of_seed_0(found, LOWEST, rate)
        for rate in (19.2e-3, 38.4e-3)
    )
    PAGE.says(f"{below:.3f} below `muon+constant` at the one, {-above:.3f} above it at the other")
