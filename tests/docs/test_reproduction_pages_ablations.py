"""Numbers on the page of ablations follow from the records."""

import statistics

import pytest
from page_numbers import (
    Page,
    arm_of,
    at_best,
    best_losses,
    gaps,
    losses,
    median,
    numbers,
    recorded,
    runs,
    same,
    spread,
    verdict,
)

PAGE = Page("reproduction_ablations.md")
SETTING = PAGE.rows("Ablations", " | ", 6)
ANSWERS = PAGE.rows("Ablations", "question | answer here", 6)  # in words
RATES = PAGE.rows(
    "Learning rates to 0.064", " | 1e-3 | 2e-3 | 4e-3 | 8e-3 | 16e-3 | 32e-3 | 64e-3", 6
)
FLAT = PAGE.rows("Learning rates to 0.064", "arm | rates of the 7 within 0.1 of its best", 2)
OTHERS = PAGE.rows("Other optimizers", " | best rate | loss: median", 14)
COMPONENTS = PAGE.rows("What is masked", " | rate | loss", 6)
COMPARED = PAGE.rows("What is masked", "comparison | difference", 5)
SAMPLING = PAGE.rows("p and temperature", " | tau = 0.5 | 1 | 2 | 4", 3)
GRANULARITY = PAGE.rows("Granularity and sampling", " | element | row | column | leaf", 5)
BETTER = PAGE.rows("Granularity and sampling", "rule | what is better", 4)
MOMENTUM = PAGE.rows("Dense and sparse momentum", " | dense | sparse", 2)

FOUND = recorded("ablations_nano")
ADAM, MAGMA, CONSTANT = (best_losses(FOUND, arm) for arm in ("adam", "adam+magma", "adam+constant"))
GRAINS = ("element", "row", "column", "leaf")
RULES = {  # on the page, and in the records
    "uniform sampling (SkipUpdate)": "uniform",
    "damping": "damping",
    "uniform sampling and damping (Magma)": "uniform+damping",
    "sampling by alignment": "alignment",
    "sampling by alignment and damping": "alignment+damping",
}

# The paper's own numbers, which no record has: perplexities of RMSProp, and in Table 1 at 60M the
# logarithm of a perplexity over Adam's.
PAPERS_COMPONENTS = [22.64, 21.92, 21.65, 21.94]
PAPERS_GRANULARITY = [
    [21.73, 21.76, 21.78, 21.81],
    [21.97, 21.95, 21.91, 21.92],
    [21.58, 21.62, 21.61, 21.65],
    [21.77, 21.78, 21.75, 21.78],
    [21.63, 21.60, 21.61, 21.65],
]
PAPERS_TABLE_1 = {
    "Muon": "-0.062",
    "C-Adam": "-0.036",
    "APOLLO+SGG": "-0.020",
    "APOLLO": "+0.024",
    "Adam+Magma": "-0.057",
    "LaProp": "-0.027",
    "Adam+SGG": "-0.016",
    "Stable-SPAM": "-0.065",
    "Adafactor": "+0.056",
    "RMSProp": "-0.050",
}

# Other numbers that no record has, each with the reason.
NOT_RECORDED = {
    "The paper has Adam+Magma flat up to 0.05": "the paper's",
    "The paper's perplexity of RMSProp in brackets, 22.64 without any": "the paper's",
    "In the paper it takes 22.64 to 21.8": "the paper's",
    "takes a GPU an hour or two": "an estimate",
    "clusters every 500 steps": "a setting of SGG, as is the hundredth of the way",
}


def grained(rule, grain):
    """Losses of a rule at a size of blocks, by seed."""
    return best_losses(FOUND, f"adam/{grain}/{rule}")


def sampled(p, tau):
    """Losses by survival probability and temperature, by seed."""
    return best_losses(FOUND, f"adam/p={p}/tau={tau}")


def test_every_table_is_checked():
    assert PAGE.unread() == []
    assert [words for words in NOT_RECORDED if words not in PAGE.prose] == []


def test_the_setting():
    setting = dict(SETTING)
    assert {record["results"]["parameters"] for record in FOUND} == {132_032}
    assert "132,032 parameters" in setting["model"]
    [shape] = {(s["steps"], s["batch_size"], s["seq_len"]) for s in (r["settings"] for r in FOUND)}
    assert "{} steps of {} x {} tokens".format(*shape) in setting["data"]
    for made in (record["provenance"] for record in FOUND):
        device = f"Python {made['python']}, jax {made['versions']['jax']}"
        assert setting["device"].endswith(device)


def test_how_large_a_difference_is():
    ranges = []
    for arm in dict.fromkeys(record["settings"]["arm"] for record in FOUND):
        if "/dense/" in arm or "/sparse/" in arm:  # at one rate
            by_seed = losses(FOUND, arm, 1e-3)
        else:
            by_seed = best_losses(FOUND, arm)
        assert [*by_seed] == [0, 1, 2]
        ranges.append(max(by_seed.values()) - min(by_seed.values()))
    lowest, highest = min(ranges), max(ranges)
    PAGE.says(f"lie {lowest:.3f} to {highest:.2f} apart, most 0.02 to 0.04")
    assert sum(0.015 <= gap < 0.045 for gap in ranges) > len(ranges) / 2


# ---------------------------------------------------------------------------------------------
# Learning rates


def test_learning_rates():
    grid = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3]
    flat = {}
    for title, *cells in RATES:
        found = [losses(FOUND, arm_of(title), rate) for rate in grid]
        assert {len(by_seed) for by_seed in found} == {3}
        medians = [median(by_seed) for by_seed in found]
        same(", ".join(cells), medians)
        flat[title] = sum(loss < min(medians) + 0.1 for loss in medians)
        if title == "Adam+Magma":
            PAGE.says(f"up to 64e-3, where Magma has lost {medians[-1] - min(medians):.2f}")
        if title == "Adam+constant":
            assert all(loss < min(medians) + 0.1 for loss in medians[-4:])
    printed = dict(FLAT)
    few, many = ["Adam", "C-Adam", "Adam+damping"], ["Adam+Magma", "Adam+constant"]
    assert {flat[title] for title in few} == {int(printed["Adam, C-Adam, damping"])}
    assert {flat[title] for title in [*many, "Adam+constant*mask"]} == {
        int(printed["Magma, both constants"])
    }
    words = verdict("appendix: learning rates").partition("]")[0].partition("its best ")[2]
    assert words.startswith(
        f"Magma at {flat['Adam+Magma']} rates of 7, Adam and C-Adam at {flat['Adam']}, "
        f"the constant at {flat['Adam+constant']}"
    )


def test_the_lowest_of_each_row_is_bold():
    lines = [line for line in PAGE.text.splitlines() if line.count("|") == 9][2:]
    assert len(lines) == len(RATES)
    for line in lines:
        cells = line.strip("| ").split(" | ")[1:]
        values = [float(cell.strip("*")) for cell in cells]
        bold = [value for value, cell in zip(values, cells, strict=True) if "**" in cell]
        assert bold == [min(values)]


# ---------------------------------------------------------------------------------------------
# Other optimizers


def test_other_optimizers():
    medians = []
    for title, rate, loss, against, _ in OTHERS:
        best, by_seed = at_best(FOUND, arm_of(title))
        assert float(rate) == best
        same(loss, spread(by_seed))
        same(against, [] if title == "Adam" else gaps(by_seed, ADAM))
        medians.append(median(by_seed))
    assert medians == sorted(medians)
    first = [gaps(best_losses(FOUND, arm), MAGMA) for arm in ("muon", "soap", "c_adam")]
    first += [gaps(best_losses(FOUND, arm), CONSTANT) for arm in ("muon", "soap", "c_adam")]
    ahead = [-gap for each in first for gap in each]
    assert min(ahead) > 0
    PAGE.says(f"of the constant in every seed, by {min(ahead):.2f} to {max(ahead):.2f}")
    masked = [arm_of(row[0]) for row in OTHERS if row[0] not in ("Adam+Magma", "Adam+constant")]
    assert {"apollo", "mgup"} < {*masked}


def test_two_optimizers_are_level_with_magma_and_its_constant():
    for arm in ("apollo", "mgup"):
        for other in (MAGMA, CONSTANT):
            away = gaps(best_losses(FOUND, arm), other)
            assert min(away) < 0 < max(away) or max(map(abs, away)) < 0.04


def test_the_papers_differences_are_those_of_the_first_page():
    llama = Page("reproduction.md").rows("The Llama", "arm | best rate | validation loss", 23)
    first = {row[0]: row[4] for row in llama if row[4]}
    here = {row[0]: row[4] for row in OTHERS if row[4]}
    both = first.keys() & here.keys()
    assert both == {"Adam+Magma", "C-Adam", "LaProp", "Muon", "RMSProp"}
    assert all(first[title] == here[title] for title in both)
    assert here == PAPERS_TABLE_1


def test_the_papers_perplexities_are_those_of_the_first_page():
    assert [float(row[3]) for row in COMPONENTS if row[3]] == PAPERS_COMPONENTS
    shown = [[float(cell.partition(" (")[2].strip(")")) for cell in row[1:]] for row in GRANULARITY]
    assert shown == PAPERS_GRANULARITY
    every = [number for row in shown for number in row]
    verdicts = Page("reproduction.md")
    masked = "RMSProp {}; attention {}, attention and MLP {}, all {}"
    verdicts.says(
        masked.format(*PAPERS_COMPONENTS),
        f"{len(every)} numbers from {min(every)} to {max(every)}",
    )


# ---------------------------------------------------------------------------------------------
# What is masked


def test_what_is_masked():
    arms = {
        "nothing: Adam": "adam",
        "attention": "adam/attention",
        "attention and MLP": "adam/attention+mlp",
        "all": "adam/all",
        "control: attention and MLP times 0.2765": "adam+constant",
        "control: the same with coins": "adam+constant*mask",
    }
    for title, rate, loss, _ in COMPONENTS:
        best, by_seed = at_best(FOUND, arms.pop(title))
        assert float(rate) == best
        same(loss, spread(by_seed))
    assert not arms
    again = best_losses(FOUND, "adam/attention+mlp")  # the same arm by another name
    assert again == pytest.approx(MAGMA, abs=1e-5)
    words = verdict("appendix: what is masked").partition("Adam 1.")[2]
    same(
        f"1.{words}",
        [median(best_losses(FOUND, f"adam{part}")) for part in ("", "/attention")]
        + [median(best_losses(FOUND, f"adam/{part}")) for part in ("attention+mlp", "all")],
    )


def test_comparisons_of_what_is_masked():
    coins = "adam+constant*mask"
    compared = {
        "all masked, against Adam": gaps(best_losses(FOUND, "adam/all"), ADAM),
        "the constant, against Magma": gaps(CONSTANT, MAGMA),
        "the constant with coins, against Magma": gaps(best_losses(FOUND, coins), MAGMA),
        "the same, both at 16e-3": gaps(
            losses(FOUND, coins, 16e-3), losses(FOUND, "adam+magma", 16e-3)
        ),
    }
    for title, cell, _ in COMPARED[:4]:
        same(cell, compared.pop(title))
    title, cell, _ = COMPARED[4]
    assert title == "the same, both at 8e-3" and cell.startswith("equal to")
    at_8e_3 = gaps(losses(FOUND, coins, 8e-3), losses(FOUND, "adam+magma", 8e-3))
    same(cell, [max(map(abs, at_8e_3))])


# ---------------------------------------------------------------------------------------------
# p and temperature


def test_p_and_temperature():
    for title, *cells in SAMPLING:
        p = title.removeprefix("p = ")
        for tau, cell in zip(("0.5", "1", "2", "4"), cells, strict=True):
            rate, by_seed = at_best(FOUND, f"adam/p={p}/tau={tau}")
            assert float(numbers(cell)[1]) == rate
            same(cell.partition(" (")[0], [median(by_seed)])


def test_what_is_said_of_p():
    taus = ("0.5", "1", "2", "4")
    lower = {tau: gaps(sampled("0.25", tau), sampled("0.5", tau)) for tau in taus}
    behind = [(tau, gap) for tau in taus for gap in lower[tau]]
    assert [tau for tau, gap in behind if gap <= 0] == ["1"]
    PAGE.says("p = 0.25 is behind 0.5 at equal temperature")
    PAGE.says(f"in every seed but one (at tau = 1), by up to {max(g for _, g in behind):.2f}")
    higher = {tau: gaps(sampled("0.75", tau), sampled("0.5", tau)) for tau in taus}
    first, last = min(higher["2"]), max(higher["2"])
    PAGE.says(f"p = 0.75 is behind 0.5 in every seed at tau = 2, by {first:.3f} to {last:.3f}.")
    assert first > 0 and all(min(higher[tau]) < 0 < max(higher[tau]) for tau in ("0.5", "1", "4"))


def test_what_is_said_of_temperature():
    medians = {
        p: [median(sampled(p, tau)) for tau in ("0.5", "1", "2", "4")]
        for p in ("0.25", "0.5", "0.75")
    }
    widest = max(max(found) - min(found) for found in medians.values())
    PAGE.says(f"the medians differ by no more than {widest:.3f}.")
    assert widest < 0.03 and "tau within 0.03" in verdict("appendix: p and temperature")
    cold = {
        p: [g for tau in ("2", "4") for g in gaps(sampled(p, "0.5"), sampled(p, tau))]
        for p in medians
    }
    both = cold["0.25"] + cold["0.5"]
    assert min(both) > 0 > min(cold["0.75"])
    PAGE.says("tau = 0.5 is behind 2 and 4 in every seed", "but not for p = 0.75.")
    PAGE.says(f"in every seed for p = 0.25 and 0.5, by {min(both):.3f} to {max(both):.2f}")


# ---------------------------------------------------------------------------------------------
# Granularity and sampling


def test_granularity():
    rules = dict(RULES)
    for title, *cells in GRANULARITY:
        rule = rules.pop(title)
        shown = " ".join(cell.partition(" (")[0] for cell in cells)
        same(shown, [median(grained(rule, grain)) for grain in GRAINS])
    assert not rules
    PAGE.says(f"Adam itself ends at {median(ADAM):.3f}")
    words = verdict("appendix: granularity").partition("Magma ")[2]
    same(
        words,
        [median(grained("uniform+damping", grain)) for grain in ("leaf", "element")]
        + [median(grained("damping", "leaf"))],
    )


def test_skip_update_is_no_better_than_adam():
    by_grain = {grain: gaps(grained("uniform", grain), ADAM) for grain in GRAINS}
    leaf = by_grain.pop("leaf")
    assert min(leaf) > 0
    PAGE.says(f"By leaves it is worse in every seed, by {min(leaf):.3f} to {max(leaf):.3f}.")
    assert all(min(found) < 0 < max(found) for found in by_grain.values())


def test_damping_and_alignment():
    damped, magma = (median(grained(rule, "leaf")) for rule in ("damping", "uniform+damping"))
    PAGE.says(f"{damped:.3f} against {magma:.3f}. In the paper it is behind.")
    for rule in [*RULES.values()][1:]:
        for grain in GRAINS:
            assert max(gaps(grained(rule, grain), ADAM)) < 0
    worse = {
        grain: median(grained("alignment", grain)) - median(grained("alignment+damping", grain))
        for grain in GRAINS
    }
    assert [grain for grain, gap in worse.items() if gap < 0] == ["column"]
    with_, without = (
        median(grained(rule, "column")) for rule in ("alignment+damping", "alignment")
    )
    PAGE.says(f"but for columns ({without:.3f}, {with_:.3f})")


def over_leaves(rule, grain):
    """How far leaves are behind, seed by seed."""
    return gaps(grained(rule, "leaf"), grained(rule, grain))


def test_elements_or_leaves():
    better = dict(BETTER)
    first = [
        gap
        for rule in ("uniform", "alignment", "alignment+damping")
        for gap in over_leaves(rule, "element")
    ]
    assert min(first) > 0
    cell = better.pop("SkipUpdate, and coins by alignment")
    same(cell, [min(first), max(first)])
    assert better.pop("SkipUpdate, and alignment without damping") == "columns as well"
    for rule in ("uniform", "alignment"):
        assert min(over_leaves(rule, "column")) > 0
    leaves = [-gap for grain in ("element", "row") for gap in over_leaves("damping", grain)]
    same(better.pop("damping alone"), [min(leaves), max(leaves)])
    cell, _, paper = better.pop("Magma").partition(", as on rows and columns;")
    same(cell, [-gap for gap in over_leaves("uniform+damping", "element")])
    for grain in ("row", "column"):
        found = over_leaves("uniform+damping", grain)
        assert min(found) < 0 < max(found)
    same(paper, [max(PAPERS_GRANULARITY[2]) - min(PAPERS_GRANULARITY[2])])
    assert not better


def test_granularity_against_the_control():
    PAGE.says(f"the constant without coins at {median(CONSTANT):.3f}, Magma by elements is level")
    below = []
    for rule in RULES.values():
        for grain in GRAINS:
            found = gaps(grained(rule, grain), CONSTANT)
            below += [(rule, grain)] if max(found) < 0 else []
            if grain == "element" and rule in ("uniform+damping", "alignment+damping"):
                shown = ", ".join(f"{gap:+.3f}" for gap in found)
                level = "level" if rule == "uniform+damping" else "below it in every seed"
                PAGE.says(f"{level} ({shown})")
    assert below == [("alignment+damping", "element")]  # "the only one of these 20 arms"


# ---------------------------------------------------------------------------------------------
# Momentum


def momentum(kind, damping):
    """Losses at the one rate, by seed."""
    return losses(FOUND, f"adam/{kind}/{damping}", 1e-3)


@pytest.mark.parametrize("row, damping", [*zip(MOMENTUM, ("damping", "no damping"), strict=True)])
def test_momentum(row, damping):
    for kind, cell in zip(("dense", "sparse"), row[1:], strict=True):
        same(cell, spread(momentum(kind, damping)))


def test_what_is_said_of_momentum():
    without, with_ = (
        gaps(momentum("sparse", damping), momentum("dense", damping))
        for damping in ("no damping", "damping")
    )
    assert min(without + with_) > 0
    PAGE.says(
        f"in every seed, by {min(without):.2f} to {max(without):.2f} without damping and "
        f"{min(with_):.3f} to {max(with_):.3f} with it"
    )
    words = verdict("appendix: dense and sparse").partition("by ")[2]
    same(words, [min(without), max(without), max(with_)])
    for record in runs("ablations_nano", arm="adam/sparse/no damping"):
        curve = [loss for _, loss in record["results"]["curve"]]
        tenths = [statistics.mean(curve[i : i + 6]) for i in range(0, 30, 6)]
        assert tenths == sorted(tenths, reverse=True)  # the loss falls to the end
