"""Numbers on the reproduction's first page follow from the records: the longer runs."""

import statistics

from page_numbers import (
    Page,
    arm_of,
    at_best,
    best_losses,
    check_arm,
    differences,
    median,
    runs,
    same,
)

from examples.kit import records
from examples.paper import RESULTS, length

PAGE = Page("reproduction.md")
RATES = PAGE.rows("Twice as long", "arm | 5e-4 | 1e-3 | 2e-3 | 4e-3 | 8e-3 | 16e-3", 5)
LONGER = PAGE.rows("Twice as long", "arm | best rate", 5)
LONGEST = PAGE.rows(
    "Four times as long again", "arm | rate | step 1200 | 3000 | 6000 | 9000 | 12,000", 6
)

SHORT = runs("llama_40m", steps=1500)
LONG = runs("llama_60m", steps=3000)


def test_every_table_is_checked():
    for section in ("Twice as long", "Four times as long again"):
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
    PAGE.says("The constant stays lowest at every one of the 20 validations")
    for step in adam:
        assert min(found, key=lambda run: found[run][step]) == ("adam+constant", 8e-3)
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
    assert {*tuned.items(), ("adam+constant", 4e-3)} == {*found}


def test_the_figure_of_lengths_has_these_runs():
    """Gaps that it draws are those of the page's tables."""
    found = [r for name in length.FILES for r in records.read(RESULTS / name)]
    made = {(point.arm, point.tokens // 1_000_000): point for point in length.points(found)}
    shown = {row[0]: row for row in LONGER}
    for arm, name in (("adam+magma", "Adam+Magma"), ("adam+constant", "Adam+constant")):
        same(shown[name][3], made[arm, 196].gaps)
        same(shown[name][4], made[arm, 98].gaps)
        assert made[arm, 196].interior and made[arm, 98].interior
        assert not made[arm, 786].interior and len(made[arm, 786].gaps) == 1
