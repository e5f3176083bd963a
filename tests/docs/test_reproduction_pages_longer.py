"""Numbers on the reproduction's first page follow from the records: the longer runs."""

import statistics

from page_numbers import (
    Page,
    arm_of,
    at_best,
    best_losses,
    check_arm,
    differences,
    losses,
    median,
    of_medians,
    runs,
    same,
    three_seeds,
)

from examples.kit import records
from examples.paper import RESULTS, length
from examples.paper.search import best

PAGE = Page("reproduction.md")
RATES = PAGE.rows("Twice as long", "arm | 5e-4 | 1e-3 | 2e-3 | 4e-3 | 8e-3 | 16e-3", 5)
LONGER = PAGE.rows("Twice as long", "arm | best rate", 5)
LONGEST = PAGE.rows(
    "Four times as long again", "arm | rate | step 1200 | 3000 | 6000 | 9000 | 12,000", 8
)
LENGTHS = PAGE.rows("The gap against length", "arm | 49 M tokens", 6)

OF_THE_PAPER = [arm for arm in length.ARMS if "@" not in arm]
SHORT = three_seeds("llama_40m", steps=1500)
LONG = runs("llama_60m", steps=3000)


def test_every_table_is_checked():
    for section in ("Twice as long", "Four times as long again", "The gap against length"):
        assert PAGE.unread(section) == []


def test_how_long_they_are():
    for steps, tokens in ((3000, "3000 steps: 197 M"), (12_000, "12,000 steps: 786 M")):
        settings = [record["settings"] for record in runs("llama_60m", steps=steps)]
        [(rows, length)] = {(s["batch_size"], s["seq_len"]) for s in settings}
        PAGE.says(f"{tokens} tokens")
        assert round(steps * rows * length / 1e6) == int(tokens.split()[2])
    assert {record["results"]["parameters"] for record in LONG} == {
        record["results"]["parameters"] for record in SHORT
    }


def test_twice_as_long_by_rate():
    columns = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    for title, *cells in RATES:
        arm = arm_of(title)
        ran = {
            record["settings"]["learning_rate"]: record["results"]["valid_loss"]
            for record in LONG
            if record["settings"]["arm"] == arm and record["settings"]["seed"] == 0
        }
        shown = {rate: cell for rate, cell in zip(columns, cells, strict=True) if cell}
        assert shown.keys() == ran.keys()
        for rate, cell in shown.items():
            same(cell, [ran[rate]])


def test_twice_as_long():
    medians = {}
    for title, rate, loss, against, half in LONGER:
        arm = arm_of(title)
        medians[arm] = median(check_arm(LONG, title, rate, loss, against))
        if half:
            same(half, differences(SHORT, arm, "adam"))
    assert min(medians, key=medians.get) == "adam+constant"
    assert sum(bool(row[4]) for row in LONGER) == 2


def test_what_is_said_of_twice_as_long():
    magma, constant, masked = "adam+magma", "adam+constant", "adam+constant*mask"
    before, after = (differences(found, magma, "adam") for found in (SHORT, LONG))
    largest = f"{-min(after):.3f}"
    PAGE.says(f"Magma's on Adam from {-max(before):.2f} or more to {largest} or less")
    before, after = (
        -statistics.median(differences(found, constant, "adam")) for found in (SHORT, LONG)
    )
    PAGE.says(f"the constant's from {before:.2f} to {after:.2f}")
    first, second, third = (f"{gap:.3f}" for gap in differences(LONG, magma, constant))
    PAGE.says(f"is below Magma in every seed, by {first}, {second} and {third}.")
    below = differences(LONG, magma, masked)
    assert min(below) > 0 and min(differences(LONG, masked, constant)) > 0
    PAGE.says(f"is between the two, {min(below):.3f} to {max(below):.3f} below Magma")
    assert max(map(abs, differences(LONG, "c_adam", "adam"))) < 0.004  # level
    for arm in ("adam", constant, masked):
        assert at_best(LONG, arm)[0] == 2 * at_best(SHORT, arm)[0]


def courses():
    """Validation losses along the runs of 12,000 steps, by arm and rate, then by step."""
    return {
        (record["settings"]["arm"], record["settings"]["learning_rate"]): dict(
            record["results"]["valid_curve"]
        )
        for record in runs("llama_60m", steps=12000)
    }


def test_four_times_as_long_again():
    found = courses()
    assert len(found) == len(LONGEST)
    for title, rate, *cells in LONGEST:
        course = found[arm_of(title), float(rate)]
        same(", ".join(cells), [course[step] for step in (1200, 3000, 6000, 9000, 12000)])


def test_what_is_said_of_four_times_as_long_again():
    found = courses()
    adam, magma = found["adam", 2e-3], found["adam+magma", 4e-3]
    constant = found["adam+constant", 8e-3]
    assert len(adam) == 20
    lowest = {step: min(found, key=lambda run: found[run][step]) for step in adam}
    quarter, cautious = ("adam+constant@0.0693", 32e-3), ("c_adam+constant@0.1386", 16e-3)
    PAGE.says(
        f"is lowest at {[*lowest.values()].count(('adam+constant', 8e-3))} of the 20 validations",
        "from step 3000 on",
        f"is lowest before, and ends {found[quarter][12000] - constant[12000]:.3f} above it",
        f"Here it ends {found[cautious][12000] - adam[12000]:.3f} above Adam",
    )
    for step, run in lowest.items():
        assert run == (quarter if step < 3000 else ("adam+constant", 8e-3))
    later = {step: adam[step] - magma[step] for step in adam if step >= 2400}
    assert max(later.values()) <= 0.001 < adam[1800] - magma[1800]
    PAGE.says(
        f"it ends {magma[12000] - adam[12000]:.3f} above Adam",
        "from step 2400 on is never below it by more than 0.001",
        f"ends {adam[12000] - constant[12000]:.3f} below Adam",
        f"C-Adam ends {found['c_adam', 2e-3][12000] - adam[12000]:.3f} above Adam",
    )
    ranges = [
        max(by_seed) - min(by_seed)
        for by_seed in ([*best_losses(LONG, arm_of(row[0])).values()] for row in LONGER)
    ]
    PAGE.says(f"differed by up to {max(ranges):.3f} at 3000 steps")
    gains = differences(LONG, "adam", "adam+constant")
    PAGE.says(f"as at 3000 steps ({min(gains):.3f} to {max(gains):.3f})")
    assert min(gains) < adam[12000] - constant[12000] < max(gains)
    tuned = {arm_of(row[0]): float(row[1]) for row in LONGER}
    beyond = {(arm, best(LONG, arm).learning_rate) for arm, _ in found if "@" in arm}
    assert {*tuned.items(), ("adam+constant", 4e-3)} | beyond == {*found}


def lengths():
    """What the figure shows, by arm and millions of tokens."""
    found = [record for name in length.FILES for record in records.read(RESULTS / name)]
    return {(point.arm, point.tokens // 1_000_000): point for point in length.points(found)}


def test_the_gaps_by_length():
    made = lengths()
    for title, *cells in LENGTHS:
        for tokens, cell in zip((49, 98, 196, 393, 786), cells, strict=True):
            point = made.pop((arm_of(title), tokens)) if cell else None
            if point:
                same(cell, point.gaps)
                assert point.interior == (tokens < 393)
    assert not made


def test_what_is_said_of_the_gaps_by_length():
    made, found = lengths(), runs("llama_40m", steps=750)
    shortest = [losses(found, arm, made[arm, 49].rates[0]) for arm in OF_THE_PAPER]
    shortest.append(best_losses(found, "adam"))
    away = max(max(by_seed.values()) - min(by_seed.values()) for by_seed in shortest)
    constant = [-made["adam+constant", tokens].gaps[0] for tokens in (393, 786)]
    assert min(made["c_adam", 786].gaps[0], made["c_adam", 393].gaps[0]) > 0
    PAGE.says(
        f"ends {made['adam+magma', 393].gaps[0]:.3f} above Adam",
        "{:.3f} at 393 M tokens, {:.3f} at 786 M, on one seed each".format(*constant),
        f"gains {-max(made['c_adam', 49].gaps):.3f} or more in the shortest runs",
        f"seeds of one arm differ by up to {away:.3f}",
    )
    magma, constant = (of_medians(SHORT, f"adam+{arm}", "adam") for arm in ("magma", "constant"))
    Page("should_i_use_it.md").says(
        f"Magma's from {-magma:.2f} at 98M tokens to nothing at 393M and 786M",
        f"the constant's from {-constant:.2f} to {-made['adam+constant', 393].gaps[0]:.2f}",
    )
    assert min(made["adam+magma", tokens].gaps[0] for tokens in (393, 786)) > 0
    for arm in OF_THE_PAPER:  # not searched again
        assert made[arm, 393].rates == made[arm, 786].rates == made[arm, 196].rates


def test_which_runs_have_the_closed_form_of_the_constant():
    """They are those of the commits after the one that the page names."""
    later = {"80892100133b8802ceb1b53596d4b17a24a4529c"}
    plain = [
        record["settings"]
        for name in ("llama_40m.jsonl", "llama_60m.jsonl", "nano_moe.jsonl")
        for record in records.read(RESULTS / name)
        if record["provenance"]["commit"] in later
        and "+constant" in record["settings"]["arm"]
        and "@" not in record["settings"]["arm"]
    ]
    others = [s for s in plain if s.get("steps") not in (750, 6000)]
    assert {(s["arm"], s["seed"]) for s in others if s["learning_rate"] == 16e-3} == {
        ("muon+constant", 3)
    }
    assert len(others) == 2  # and one of seed 0 at a rate that no table shows
