"""Numbers on the page of the negative control and of Nano MoE follow from the records."""

import math
import statistics

import pytest
from page_numbers import (
    Page,
    arm_of,
    best_losses,
    check_arm,
    gaps,
    losses,
    median,
    numbers,
    recorded,
    rounds_to,
    runs,
    same,
)

from examples.paper import search

PAGE = Page("reproduction_control.md")
RESNET = "ResNet: the paper's negative control"
FIRST = PAGE.rows(RESNET, " | AdamW | AdamW+Magma", 2)
COMPARED = PAGE.rows(RESNET, "comparison | Magma against AdamW", 3)
ACCURACIES = PAGE.rows(RESNET, "AdamW | skip | damping", 1)
DIFFERS = PAGE.rows(RESNET, " | here | in the paper", 7)
BY_SEED_0 = PAGE.rows(RESNET, "arm | best rate | interior", 6)
BY_FIVE = PAGE.rows(RESNET, "arm | 0.002 | 0.004 | 0.008 | 0.016 | 0.032 | 0.064 | 0.128", 6)
SETTING = PAGE.rows("The paper's model", " | ", 4)
MODEL = PAGE.rows("The paper's model", "arm | best rate", 12)
ON_TWO_BASES = PAGE.rows("The paper's model", "comparison | on Adam | on Muon", 3)
SMALL = PAGE.rows("A small model", "arm | best rate", 12)

DIGITS = recorded("negative_control")
# Arms with an @ are on the page `beyond`.
PAPERS, NANO = (
    [run for run in runs("nano_moe", preset=preset) if "@" not in run["settings"]["arm"]]
    for preset in ("paper", "nano")
)
ARMS = [row[0] for row in BY_FIVE]
GRID = [0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128]
IMAGES = 599  # in each third of the digits

# Numbers that no record has, each with the reason.
NOT_RECORDED = {
    "94.46 % | 93.82 %": "the paper's, whose difference is checked",
    "scikit-learn's 1,797 digits of 8x8 pixels": "of the data set",
    "basic blocks of width 16, 32 and 64": "of the model; records have the number of parameters",
    "ResNet-50 (23,520,842 parameters)": "has run two steps, which are not recorded",
    "At a guess of 15 ms per step": "a guess, from which the hours are computed below",
    "50,000 steps of 491,520 tokens": "the paper's",
    "6e-5 from nanoMoE's 6e-4, where the paper says 5e-6": "nanoMoE's and the paper's",
    "the vocabulary is kept at 50,304; the data's tokenizer has 16,384": "of the model's setting",
    "a root mean square of 0.2": "a setting of Muon",
}


def digits(arm, rate, name):
    """A result of every seed of the ResNet."""
    made = search.select(DIGITS, {"arm": arm, "learning_rate": rate})
    by_seed = {record["settings"]["seed"]: record["results"][name] for record in made}
    assert len(by_seed) == len(made) > 0
    return [by_seed[seed] for seed in sorted(by_seed)]


def accuracies(arm, rate):
    """Test accuracies in per cent, by seed."""
    return [100 * share for share in digits(arm, rate, "test_accuracy")]


def middle_and_ends(found):
    """Median, smallest and largest."""
    return [statistics.median(found), min(found), max(found)]


def test_every_table_is_checked():
    assert PAGE.unread() == []
    assert [words for words in NOT_RECORDED if words not in PAGE.prose] == []


# ---------------------------------------------------------------------------------------------
# ResNet


def medians_of_five(arm):
    """Median validation loss at every rate that five seeds ran, by rate."""
    tried = {r["settings"]["learning_rate"] for r in search.select(DIGITS, {"arm": arm})}
    grid = {rate: losses(DIGITS, arm, rate) for rate in sorted(tried)}
    return {rate: median(by_seed) for rate, by_seed in grid.items() if len(by_seed) == 5}


def best_of_five(arm):
    """The rate of the lowest of these medians."""
    medians = medians_of_five(arm)
    return min(medians, key=medians.get)


def test_by_seed_0():
    for arm, rate, interior, valid, test, accuracy, seeds, score in BY_SEED_0:
        best = search.best(DIGITS, arm)  # an error where it is not interior
        assert float(rate) == best.learning_rate and interior == "yes"
        same(valid, middle_and_ends(digits(arm, best.learning_rate, "valid_loss")))
        same(test, middle_and_ends(digits(arm, best.learning_rate, "test_loss")))
        same(accuracy, middle_and_ends(accuracies(arm, best.learning_rate)))
        assert int(seeds) == len(digits(arm, best.learning_rate, "valid_loss")) == 5
        scores = digits(arm, best.learning_rate, "alignment_over_training")
        same(score, [statistics.mean(scores)] if scores[0] is not None else [])
    scored = [row[0] for row in BY_SEED_0 if row[-1]]
    assert scored == ["adamw+magma", "adamw+damping"]


def test_by_five_seeds():
    assert ARMS == [row[0] for row in BY_SEED_0]
    for arm, *cells, lowest, accuracy in BY_FIVE:
        tried = {r["settings"]["learning_rate"] for r in search.select(DIGITS, {"arm": arm})}
        for rate, cell in zip(GRID, cells, strict=True):
            assert bool(cell) == (rate in tried)
            if cell:
                by_seed = losses(DIGITS, arm, rate)
                same(cell, [median(by_seed), len(by_seed)])
        assert tried <= {*GRID}
        best = best_of_five(arm)
        assert float(numbers(lowest)[0]) == best
        assert ("(edge)" in lowest) == (best == max(medians_of_five(arm)))
        same(accuracy, middle_and_ends(accuracies(arm, best)))


def test_the_verdict_on_the_resnet():
    _, adamw, magma = FIRST[1]
    assert FIRST[1][0].endswith("median of 5 seeds (min to max)")
    same(adamw, middle_and_ends(accuracies("adamw", best_of_five("adamw"))))
    same(magma, middle_and_ends(accuracies("adamw+magma", best_of_five("adamw+magma"))))
    by_arm = {arm: statistics.median(accuracies(arm, best_of_five(arm))) for arm in ARMS}
    assert max(by_arm, key=by_arm.get) == "adamw"  # no arm's median is above
    same(COMPARED[2][1], [float(FIRST[0][1][:5]) - float(FIRST[0][2][:5])])


def test_magma_against_adamw():
    compared = {title: cell for title, cell, *_ in COMPARED}
    pairs = [
        ours - theirs
        for ours, theirs in zip(
            *(accuracies(arm, best_of_five(arm)) for arm in ("adamw+magma", "adamw")), strict=True
        )
    ]
    cell = compared["at each one's best rate by five seeds"]
    same(cell, [-statistics.mean(pairs)])
    assert len(pairs) == 5 and max(pairs) < 0 and cell.endswith("below in all five pairs")
    ours, theirs = (
        statistics.median(accuracies(arm, search.best(DIGITS, arm).learning_rate))
        for arm in ("adamw+magma", "adamw")
    )
    same(compared["at the best rates by seed 0, medians"], [theirs - ours, ours, theirs])


def test_none_of_it_is_a_test():
    flat = GRID[3:]
    medians = [medians_of_five(arm)[rate] for arm in ARMS for rate in flat]
    PAGE.says(
        f"from {flat[0]} to {flat[-1]} the median validation losses of all arms lie between "
        f"{min(medians):.3f} and {max(medians):.3f} without order"
    )
    at_the_end = [arm for arm in ARMS if best_of_five(arm) == flat[-1]]
    assert len(at_the_end) == 2  # "two of the controls are lowest at the last rate"
    assert all("constant" in arm for arm in at_the_end)
    titles = ["adamw", "adamw+skip", "adamw+damping", "adamw+constant*mask", "adamw+magma"]
    pooled = {
        arm: [x for rate in flat for x in accuracies(arm, rate)]
        for arm in [*titles, "adamw+constant"]
    }
    PAGE.says("Over all 20 runs from these four rates")
    assert {len(found) for found in pooled.values()} == {20}
    same(" ".join(ACCURACIES[0]), [statistics.mean(found) for found in pooled.values()])
    deviations = [statistics.stdev(found) for found in pooled.values()]
    PAGE.says(f"with a standard deviation of {min(deviations):.1f} to {max(deviations):.1f} each")


def test_one_image():
    error = 100 * math.sqrt(0.98 * 0.02 / IMAGES)
    PAGE.says(
        f"One test image is {100 / IMAGES:.2f} points. At 98 % the binomial standard error of one "
        f"accuracy is {error:.1f} points"
    )
    for record in DIGITS:
        right = IMAGES * record["results"]["test_accuracy"]
        assert right == pytest.approx(round(right), abs=1e-3)


def test_the_protocol():
    first, *others = digits("adamw", 0.016, "valid_loss")
    PAGE.says(
        f"AdamW at 0.016 gave {first:.3f} from seed 0 and {min(others):.3f} to {max(others):.3f} "
        "from the others"
    )
    PAGE.says("all five seeds then ran at every rate from 0.008 to 0.128.")
    for arm in ARMS:
        assert {*GRID[2:]} <= medians_of_five(arm).keys()
    [constant] = {record["settings"]["mean_multiplier"] for record in DIGITS}
    score = BY_SEED_0[1][-1]
    PAGE.says(f"The controls' constant, {constant}, is Magma's mean multiplier on these images: "
              f"0.5 times its mean score of {score}")  # fmt: skip
    assert rounds_to(0.5 * float(score), str(constant))


def test_what_the_resnet_is():
    here = {title: cell for title, cell, _ in DIFFERS}
    [parameters] = {record["results"]["parameters"] for record in DIGITS}
    assert here["model"].endswith(f"{parameters:,} parameters")
    [shape] = {
        (r["settings"]["batch_size"], r["results"]["steps"], r["settings"]["epochs"])
        for r in DIGITS
    }
    assert here["batch, augmentation, steps"] == f"{shape[0]}, none, {shape[1]}"
    assert f"{shape[2]} epochs" in FIRST[1][0]
    [decay] = {record["settings"]["weight_decay"] for record in DIGITS}
    assert here["decay"].startswith(f"{decay}, decoupled")
    [warmup] = {record["settings"]["warmup"] for record in DIGITS}
    assert here["schedule"].startswith(f"{100 * warmup:.0f} % warm-up")


def test_how_long_the_resnets_took():
    seconds = [record["results"]["seconds"] for record in DIGITS]
    PAGE.says(f"{len(seconds)} runs of {min(seconds):.0f} to {max(seconds):.0f} s, most below 50")
    assert sum(x < 50 for x in seconds) > 0.9 * len(seconds)
    PAGE.says(f"{sum(seconds) / 60:.0f} minutes in all")
    for made in (record["provenance"] for record in DIGITS):
        named = [f"{name} {made['versions'][name]}" for name in ("jax", "flax", "optax")]
        PAGE.says(f"float32, Python {made['python']}, {', '.join(named)}")
    PAGE.says("Six arms are about 50 runs of 35,100 steps.")
    minutes = 35_100 * 0.015 / 60
    PAGE.says(f"{minutes:.0f} minutes per run")
    assert 7 < 50 * minutes / 60 < 8 and "8 GPU hours" in PAGE.prose


# ---------------------------------------------------------------------------------------------
# Nano MoE


@pytest.mark.parametrize("found, rows", [(PAPERS, MODEL), (NANO, SMALL)], ids=["paper", "nano"])
def test_nano_moe(found, rows):
    for title, rate, loss, against in rows:
        check_arm(found, title, rate, loss, against)
    assert {arm_of(row[0]) for row in rows} == {record["settings"]["arm"] for record in found}


def test_the_verdict_on_nano_moe():
    five = ["adam", "adam+magma", "c_adam", "muon", "muon+magma"]
    medians = {arm_of(row[0]): median(best_losses(PAPERS, arm_of(row[0]))) for row in MODEL}
    assert min(five, key=medians.get) == "muon+magma"
    PAGE.says(f"Muon+Magma is indeed below Muon, by {medians['muon'] - medians['muon+magma']:.2f}")
    for base in ("adam", "muon"):
        assert medians[f"{base}+constant"] < medians[f"{base}+magma"]
    for arm in ("adam", "c_adam"):
        assert abs(medians["adam+magma"] - medians[arm]) < 0.012
    PAGE.says(
        f"The constant on Adam is {medians['adam+constant*mask'] - medians['adam+constant']:.2f} "
        "below itself with coins"
    )
    assert abs(medians["adam+damping"] - medians["adam+constant"]) < 0.005
    assert abs(medians["adam+magma/expert"] - medians["adam+magma"]) < 0.012


def test_nano_moe_on_two_bases():
    (_, *constant), (_, *coins), _ = ON_TWO_BASES
    for base, control, coin in zip(("adam", "muon"), constant, coins, strict=True):
        magma = best_losses(PAPERS, f"{base}+magma")
        same(control, gaps(best_losses(PAPERS, f"{base}+constant"), magma))
        same(coin, gaps(magma, best_losses(PAPERS, f"{base}+constant*mask")))
    assert max(gaps(best_losses(PAPERS, "muon+magma"), best_losses(PAPERS, "muon"))) < 0


def test_nano_moe_on_the_way():
    curves = {
        arm: [
            [loss for _, loss in record["results"]["curve"]]
            for record in sorted(made, key=lambda record: record["settings"]["seed"])
        ]
        for arm, rate in (("adam", 2.4e-3), ("adam+magma", 4.8e-3))
        if (made := search.select(PAPERS, {"arm": arm, "learning_rate": rate}))
    }
    assert {len(curve) for found in curves.values() for curve in found} == {30}
    below = [
        sum(ours < theirs for ours, theirs in zip(*pair, strict=True))
        for pair in zip(curves["adam+magma"], curves["adam"], strict=True)
    ]
    first, second, third = below
    PAGE.says(f"below Adam's at {first}, {second} and {third} of the 30 recorded steps, by seed")


def test_choices_that_were_dropped():
    shares = [
        [
            100 * record["results"]["dropped"]
            for record in search.select(PAPERS, {"arm": arm_of(title), "learning_rate": rate})
        ]
        for title, rate in ((row[0], float(row[1])) for row in MODEL)
    ]
    assert {len(found) for found in shares} == {3}
    medians = [statistics.median(found) for found in shares]
    assert round(max(medians)) == 1
    PAGE.says(
        f"At the best rates {min(medians):.2f} to 1 % of the experts' choices",
        f"in the median, {max(map(max, shares)):.1f} % at most",
    )


@pytest.mark.parametrize("found, preset", [(PAPERS, "paper"), (NANO, "nano")])
def test_the_settings_of_nano_moe(found, preset):
    [counts] = {(r["results"]["parameters"], r["results"]["active_parameters"]) for r in found}
    [shape] = {
        (s["steps"], s["batch_size"], s["seq_len"], s["warmup"])
        for s in (record["settings"] for record in found)
    }
    seconds = [record["results"]["seconds"] for record in found]
    ends = [min(seconds), max(seconds)]
    [made] = {(r["provenance"]["python"], r["provenance"]["versions"]["jax"]) for r in found}
    if preset == "paper":
        setting = dict(SETTING)
        assert setting["model"].startswith(
            f"{counts[0]:,} parameters, of which a token uses {counts[1]:,}"
        )
        assert setting["data"].startswith("{} steps of {} x {} tokens".format(*shape))
        assert setting["schedule"].startswith(f"warm-up {shape[3]} steps")
        [(decay, clip)] = {(r["settings"]["weight_decay"], r["settings"]["clip"]) for r in found}
        assert f"decay {decay}, clipping at {clip:g}, bfloat16" in setting["schedule"]
        device, _, took = setting["device"].rpartition(", ")
        assert device.endswith(f"Python {made[0]}") and f"jax {made[1]}" in device
        same(took, ends)
        assert rounds_to(math.prod(shape[:3]) / 1e6, "49") and "in 49 M tokens" in PAGE.prose
    else:
        PAGE.says(
            f"{counts[0]:,} parameters, of which a token uses {counts[1]:,}",
            "{} steps of {} x {} on the text".format(*shape),
            f"Warm-up is {shape[3]} steps",
        )
        took = PAGE.prose.partition(f"CPU core per run, Python {made[0]}, jax {made[1]}, ")[2]
        same(took.partition(" s each")[0], ends)


def test_the_small_model():
    for base in ("adam", "muon"):
        against = gaps(best_losses(NANO, f"{base}+constant"), best_losses(NANO, f"{base}+magma"))
        first, second, third = (f"{gap:+.3f}" for gap in against)
        PAGE.says(f"{first}, {second} and {third} on {base.capitalize()}")
    below = gaps(best_losses(NANO, "c_adam"), best_losses(NANO, "adam"))
    assert max(below) < -0.06
    assert max(map(abs, gaps(best_losses(PAPERS, "c_adam"), best_losses(PAPERS, "adam")))) < 0.011


def test_the_papers_own_length():
    tokens = 50_000 * 491_520
    [speed] = [
        record["results"]["tokens_per_second"]
        for record in search.select(PAPERS, {"arm": "adam", "learning_rate": 6e-4})
    ]
    PAGE.says(
        f"{tokens / 1e9:.1f} billion tokens per run",
        f"at the {round(speed, -3):,} tokens per second measured",
    )
    assert round(tokens / speed / 3600) == 9  # "that is nine hours each"
