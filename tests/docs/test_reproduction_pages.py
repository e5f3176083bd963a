"""Numbers on the reproduction's first page, the Llama's, follow from the records."""

import math
import re
import statistics

import pytest
from page_numbers import (
    Page,
    arm_of,
    at_best,
    best_losses,
    check_arm,
    differences,
    median,
    of_medians,
    of_seed_0,
    recorded,
    rounds_to,
    runs,
    same,
    three_seeds,
    verdict,
)

from magma_optax import mean_multiplier

PAGE = Page("reproduction.md")
SUMMARY = PAGE.rows("Reproduction", "where | Magma against its base | the constant", 10)
CONTROLS = PAGE.rows("Rules", "control | written", 3)
VERDICTS = PAGE.rows("Every table and figure", "in the paper | claim or number there", 16)
SETTING = PAGE.rows("The Llama", " | ", 6)
LLAMA = PAGE.rows("The Llama", "arm | best rate | validation loss", 23)
OTHERS = PAGE.rows("The Llama", "baseline | loss, by rate", 3)
QUESTIONS = PAGE.rows("What these runs say", "question | numbers", 7)
DECAYS = PAGE.rows("RMSProp", "decay | RMSProp", 3)
REPEATS = PAGE.rows("RMSProp", "arm, rate | first", 5)

SHORT = three_seeds("llama_40m", steps=1500)
LONG = runs("llama_60m", steps=3000)
PAPER = {"adam": 30.79, "adam+magma": 29.09}  # perplexities of its 60M model, Table 1
PAPERS_TABLE_1 = {  # logarithms of perplexities over the base's, or Adam's
    "Adam+Magma": "-0.057",
    "C-Adam": "-0.036",
    "LaProp": "-0.027",
    "LaProp+Magma": "-0.032",
    "Muon": "-0.062",
    "RMSProp": "-0.050",
    "RMSProp+Magma": "-0.026",
}
CONSTANT = 0.2765  # of every `+constant` up to 28272a3
FOUR = ("adam", "laprop", "muon", "rmsprop")

# Numbers that no record has, each with the reason.
NOT_RECORDED = {
    "Adam 30.79, 24.77, 18.42, 16.35; Adam+Magma 29.09, 22.08, 16.41, 13.71": "the paper's",
    "AdamW 94.46 %, Magma 93.82 %": "the paper's",
    "RMSProp 22.64; attention 21.92": "the paper's, as all of that column",
    "width 512, 8 layers, vocabulary 16,384": "of the preset; records have its parameters",
    "warm-up 10 %, cosine to a tenth": "of the trainer",
    "the plain mean over 0.5 M tokens held out": "of the trainer",
    "93 % of one pass over a larger corpus": "records name the corpus, not its size",
    "whose vocabulary of 32,000 this text does not have": "the paper's",
    "one corpus (48 M tokens, seen twice)": "records name the corpus, not its size",
    "its perplexities are 0.7 to 3.1 % low": "read from another project's code",
}


def test_every_table_is_checked():
    elsewhere = {"Twice as long", "Four times as long again", "The gap against length"}
    assert {section for section, _ in PAGE.unread()} == elsewhere
    assert [words for words in NOT_RECORDED if words not in PAGE.prose] == []


# ---------------------------------------------------------------------------------------------
# What is said first


def test_the_summary():
    moe = runs("nano_moe", preset="paper")
    cells = {where: (ours, control) for where, ours, control, _ in SUMMARY}
    for where, found, base in (
        ("40M Llama on Adam, 98M tokens", SHORT, "adam"),
        ("40M Llama on LaProp", SHORT, "laprop"),
        ("40M Llama on Muon", SHORT, "muon"),
        ("40M Llama on RMSProp", SHORT, "rmsprop"),
        ("Nano MoE on Muon", moe, "muon"),
    ):
        ours, control = cells.pop(where)
        same(ours, [of_medians(found, f"{base}+magma", base)])
        same(control, [of_medians(found, f"{base}+constant", base)])

    ours, control = cells.pop("the same, 197M tokens")
    assert ours == "-0.01 or less"
    assert all(-0.0105 < gap < 0 for gap in differences(LONG, "adam+magma", "adam"))
    same(control, [of_medians(LONG, "adam+constant", "adam")])

    for where, steps in (("393M", 6000), ("786M", 12000)):
        ours, control = cells.pop(f"the same, {where} tokens, one seed")
        found = runs("llama_60m", steps=steps)
        arms = (("adam", 2e-3), ("adam+magma", 4e-3), ("adam+constant", 8e-3))
        adam, magma, constant = (of_seed_0(found, *arm) for arm in arms)
        same(ours, [magma - adam])
        same(control, [constant - adam])

    ours, control = cells.pop("Nano MoE on Adam")
    assert ours == "level"
    level = differences(moe, "adam+magma", "adam")
    assert min(level) < 0 < max(level) and max(map(abs, level)) < 0.012
    same(control, [of_medians(moe, "adam+constant", "adam")])

    assert [*cells] == ["linear transformer, heavy tails"]  # with the other toys


def test_what_helps_and_what_costs():
    PAGE.says(f"learn {1 / CONSTANT:.1f} times as fast as the matrices")
    coins = {base: of_medians(SHORT, f"{base}+constant*mask", f"{base}+constant") for base in FOUR}
    half, moe = runs("llama_40m", steps=750), runs("nano_moe", preset="paper")
    shortest = sorted(differences(half, "adam+constant*mask", "adam+constant"))
    PAGE.says(
        f"cost a little: {coins['adam']:.2f} on Adam, {coins['rmsprop']:.1f} on RMSProp",
        "{:.2f} and {:.2f} in runs half as long".format(*shortest),
        f"about {of_medians(moe, 'adam+constant*mask', 'adam+constant'):.1f}",
    )
    for steps in (6000, 12000):
        found = runs("llama_60m", steps=steps)
        masked, constant = (of_seed_0(found, f"adam+constant{x}", 8e-3) for x in ("*mask", ""))
        assert f"{masked - constant:.2f}" == "0.01"
    away = {
        base: max(map(abs, differences(SHORT, f"{base}+magma", f"{base}+constant*mask")))
        for base in FOUR
    }
    rest = max(gap for base, gap in away.items() if base != "rmsprop")
    PAGE.says(
        f"the constant equals Magma to {rest:.2f} in the 40M Llama at 98M tokens "
        f"({away['rmsprop']:.2f} on RMSProp"
    )
    tiny = runs("ablations_nano", size="nano", steps=600)
    apart = [
        differences(found, f"{base}+magma", f"{base}+constant*mask")
        for found, base in ((moe, "adam"), (moe, "muon"), (tiny, "adam"))
    ]
    assert max(max(map(abs, gaps)) for gaps in apart) < 0.055
    assert min(map(min, apart)) < -0.045 and max(map(max, apart)) > 0.035
    magma = best_losses(SHORT, "rmsprop+constant*mask").values()
    assert max(magma) - min(magma) > away["rmsprop"]
    constant = SUMMARY[0][3]
    same(constant.partition("at 60M;")[2], [of_medians(SHORT, "adam+magma", "adam+constant")])


def test_the_constants_of_the_controls():
    PAGE.says(
        f"multiplies attention and MLP updates by {CONSTANT}",
        f"updates of attention and MLP by about {CONSTANT} in the mean",
        f"have {CONSTANT} on every base",
        "the Llama's runs of 49 M and 393 M tokens have it, and seed 3 of its Muon+constant",
    )
    for decay, bases, beyond in ((0.9, "Adam, LaProp and RMSProp", 1), (0.95, "Muon", -1)):
        constant = mean_multiplier(decay)
        share = f"{100 * beyond * (constant / CONSTANT - 1):.1f} %"
        PAGE.says(f"{constant:.4f} on {bases}, which is {share} {'more' if beyond > 0 else 'less'}")
    assert [written for _, written, _ in CONTROLS] == [
        "`+constant`",
        "`+constant*mask`",
        "`+damping`",
    ]
    muon = [r["results"]["alignment"] for r in SHORT if r["settings"]["arm"] == "muon+magma"]
    score = statistics.mean(muon)
    more = 100 * (CONSTANT / mean_multiplier(0.95) - 1)
    PAGE.says(f"{score:.3f} in the mean, so its own constant would be {mean_multiplier(0.95):.4f}")
    PAGE.says(f"took the {CONSTANT} of Adam, {more:.1f} % more")


# ---------------------------------------------------------------------------------------------
# The table of verdicts


def test_the_verdicts_on_language_models():
    medians = {
        arm: median(best_losses(SHORT, arm))
        for arm in ("rmsprop+skip", "rmsprop", "adam", "muon", "adam+magma", "adam+constant")
    }
    figure = verdict("figure 1: Llama").partition(": ")[2]
    same(figure, [medians[arm] for arm in ("rmsprop+skip", "rmsprop", "adam", "muon")])
    every = {arm_of(row[0]) for row in LLAMA}
    assert max(every, key=lambda arm: median(best_losses(SHORT, arm))) == "rmsprop+skip"
    table = verdict("Table 1: Llama").partition(": ")[2]
    same(table, [math.exp(medians[arm]) for arm in ("adam", "adam+magma", "adam+constant")])
    moe = runs("nano_moe", preset="paper")
    arms = ["adam", "adam+magma", "adam+constant", "c_adam"]
    arms += ["muon", "muon+magma", "muon+constant"]
    figure = verdict("figure 2: Nano MoE").partition(": ")[2]
    same(figure, [median(best_losses(moe, arm)) for arm in arms])


def test_the_verdict_on_higher_rates():
    assert verdict("appendix: learning rates").endswith(
        "at 40M Adam and C-Adam nearly diverge at 4e-3, Magma and the constant do not at 8e-3"
    )
    for arm in ("adam", "c_adam"):
        assert of_seed_0(SHORT, arm, 4e-3) > 0.7 + best_losses(SHORT, arm)[0]
    for arm in ("adam+magma", "adam+constant"):
        assert of_seed_0(SHORT, arm, 8e-3) < 0.1 + best_losses(SHORT, arm)[0]


# ---------------------------------------------------------------------------------------------
# 98 M tokens


def test_the_llama():
    lowest = {}
    for title, rate, loss, against, _ in LLAMA:
        by_seed = check_arm(SHORT, title, rate, loss, against)
        [perplexity] = loss.partition(" (")[2].split(")")[:1]
        same(perplexity, [math.exp(median(by_seed))])
        arm = arm_of(title)
        lowest.setdefault(arm.partition("+")[0], {})[arm] = median(by_seed)
    assert len(lowest) == 5 and {base for base in lowest if len(lowest[base]) > 4} == {*FOUR}
    for base in FOUR:
        assert min(lowest[base], key=lowest[base].get) == f"{base}+constant"
    assert {row[0]: row[4] for row in LLAMA if row[4]} == PAPERS_TABLE_1
    same(LLAMA[1][4], [math.log(PAPER["adam+magma"] / PAPER["adam"])])


def test_the_setting_of_the_llama():
    setting = dict(SETTING)
    assert {record["results"]["parameters"] for record in SHORT} == {42_082_816}
    assert setting["model"].startswith("42,082,816 parameters")
    [shape] = {(s["steps"], s["batch_size"], s["seq_len"]) for s in (r["settings"] for r in SHORT)}
    millions = round(math.prod(shape) / 1e6)
    words = "{} steps of {} x {} tokens ({} M)".format(*shape, millions)
    assert setting["data"].startswith(words) and SUMMARY[0][0].endswith(f"{millions}M tokens")
    for record in SHORT:
        if "@" in record["settings"]["arm"]:
            continue  # of the page of arms beyond the paper
        made = record["provenance"]
        versions = [f"{name} {made['versions'][name]}" for name in ("jax", "flax", "optax")]
        assert f"one {made['device']} per run" in setting["device"]
        assert f"{', '.join(versions)}, Python {made['python']}" in setting["device"]


@pytest.mark.parametrize("title, cell, _", OTHERS)
def test_the_other_baselines(title, cell, _):
    grid = {
        record["settings"]["learning_rate"]: record["results"]["valid_loss"]
        for record in SHORT
        if record["settings"]["arm"] == arm_of(title)
    }
    same(cell, [x for rate in sorted(grid) for x in (grid[rate], rate)])


def test_what_these_runs_say():
    answers = {question: cell for question, cell, _ in QUESTIONS}
    constant = {base: differences(SHORT, f"{base}+magma", f"{base}+constant") for base in FOUR}
    masked = {base: differences(SHORT, f"{base}+magma", f"{base}+constant*mask") for base in FOUR}

    gap = of_medians(SHORT, "adam+magma", "adam")
    paper = math.log(PAPER["adam"] / PAPER["adam+magma"])
    assert answers.pop("Is Adam's gap the paper's?") == (
        f"Adam+Magma is {-gap:.3f} below Adam in the median; the paper's 60M has "
        f"log(30.79 / 29.09) = {paper:.3f}"
    )
    gap = of_medians(SHORT, "adam+magma", "adam+constant")
    same(answers.pop("Is the explanation?"), [gap, *constant["adam"]])
    bases = answers.pop("Is the constant below Magma on other bases?")
    laprop, muon, rmsprop = re.split(r"on \w+ by ", bases)[1:]
    same(laprop, constant["laprop"])
    same(muon, constant["muon"])
    assert all(rounds_to(gap, *rmsprop.split()) for gap in constant["rmsprop"])
    assert min(gap for of_base in constant.values() for gap in of_base) > 0  # in every seed

    helps = answers.pop("What helps?")
    assert f"moves attention and MLP at {4 * CONSTANT:.1f}e-3, Adam's own best rate" in helps
    assert at_best(SHORT, "adam")[0] == 1e-3 and at_best(SHORT, "adam+constant")[0] == 4e-3
    coins = [of_medians(SHORT, f"{base}+constant*mask", f"{base}+constant") for base in FOUR]
    same(answers.pop("What do the coins cost?"), coins)

    adds = answers.pop("Do the scores add anything to a constant?")
    adam, laprop, muon, rmsprop = adds.partition("differ by ")[2].split(" on ")[:4]
    same(adam, masked["adam"])
    same(laprop.partition("by ")[2], [max(map(abs, masked["laprop"]))])
    same(muon, [max(map(abs, masked["muon"]))])
    same(rmsprop, masked["rmsprop"])

    higher = answers.pop("Does Magma stand higher rates?").partition("at 4e-3 ")[2]
    same(higher, [of_seed_0(SHORT, arm, 4e-3) for arm in ("adam", "adam+magma", "adam+constant")])
    assert not answers


def test_damping_alone():
    scores = [
        record["results"]["alignment"]
        for record in SHORT
        if record["settings"]["arm"].endswith("+damping")
        and record["settings"]["learning_rate"] == at_best(SHORT, record["settings"]["arm"])[0]
    ]
    assert len(scores) == 12
    PAGE.says(f"multiplies by {min(scores):.2f} to {max(scores):.2f}")
    better = {base: differences(SHORT, f"{base}+damping", f"{base}+magma") for base in FOUR}
    away = max(abs(gap) for base in FOUR[:3] for gap in better[base])
    PAGE.says(f"it is as good as Magma within {math.ceil(1000 * away) / 1000}")
    [below] = {f"{-gap:.1f}" for gap in better["rmsprop"]}
    PAGE.says(f"where coins cost so much, it is better by {below}.")
    for base in FOUR:
        assert min(differences(SHORT, f"{base}+damping", f"{base}+constant")) > 0


def test_c_adam():
    [below] = {f"{-gap:.2f}" for gap in differences(SHORT, "c_adam", "adam")}
    PAGE.says(f"It is {below} below Adam in every seed")
    for other, words in (("adam+magma", "Magma it"), ("adam+constant", "the constant it")):
        first, second, third = (f"{gap:+.3f}" for gap in differences(SHORT, "c_adam", other))
        PAGE.says(f"gainst {words} is at {first}, {second} and {third}")


# ---------------------------------------------------------------------------------------------
# RMSProp


def test_rmsprop_against_its_base_and_adam():
    PAGE.says(f"the constant better by {-of_medians(SHORT, 'rmsprop+constant', 'rmsprop'):.2f}")
    [behind] = {f"{of_medians(SHORT, arm, 'adam'):.1f}" for arm in ("rmsprop", "rmsprop+magma")}
    PAGE.says(f"Here they are {behind} behind Adam")


def test_rmsprop_by_decay():
    found = recorded("decay_40m")
    for decay, *cells in DECAYS:
        for suffix, cell in zip(("", "+magma"), cells, strict=True):
            same(cell, [of_seed_0(found, f"rmsprop/b2={decay}{suffix}", 1e-3)])
    behind = differences(SHORT, "rmsprop+magma", "rmsprop")
    for arm in (f"rmsprop/b2={row[0]}" for row in DECAYS):
        behind.append(of_seed_0(found, f"{arm}+magma", 1e-3) - of_seed_0(found, arm, 1e-3))
    assert len(behind) == 6 and min(behind) > 0  # "six pairs of six"


def test_rmsprop_repeated():
    found, lower = recorded("decay_40m"), 0
    repeated = {
        "RMSProp, 1e-3": ["rmsprop", "rmsprop/b2=0.99"],
        "RMSProp, 5e-4": ["rmsprop"],
        "RMSProp, 2e-3": ["rmsprop"],
        "RMSProp, 4e-3": ["rmsprop"],
        "RMSProp+Magma, 1e-3": ["rmsprop/b2=0.99+magma"],
    }
    for title, first, again in REPEATS:
        name, rate = title.split(", ")
        before = of_seed_0(SHORT, arm_of(name), float(rate))
        after = [of_seed_0(found, arm, float(rate)) for arm in repeated.pop(title)]
        same(first, [before])
        same(again.partition(" (")[0], after)
        lower += sum(loss < before for loss in after)
    assert not repeated and lower == 6


def test_two_repeats_part_after_a_hundred_steps():
    PAGE.says("at another commit; these two are alike for 100 steps and then part")
    two = [
        record
        for record in runs("decay_40m", learning_rate=1e-3)
        if record["settings"]["arm"] in ("rmsprop", "rmsprop/b2=0.99")
    ]
    first = [*runs("llama_40m", arm="rmsprop", learning_rate=1e-3, seed=0), *two]
    commits = [record["provenance"]["commit"] for record in first]
    assert len(two) == 2 and commits[0] != commits[1] == commits[2]
    curves = [dict(record["results"]["curve"]) for record in two]
    parted = [step for step in curves[0] if abs(curves[0][step] - curves[1][step]) > 1e-4]
    assert parted[0] == 150


def test_muons_differences():
    muon = [
        abs(gap)
        for arm in ("muon+magma", "muon+constant", "muon+constant*mask", "muon+damping")
        for gap in differences(SHORT, arm, "muon")
    ]
    PAGE.says(f"Muon's differences of {min(muon):.3f} to {max(muon):.3f} rest on three seeds")


def test_the_verdict_on_the_decay():
    assert "0.95 and 0.99 alike, 0.999 worse" in verdict("not there: RMSProp's decay")
    plain = {row[0]: float(row[1]) for row in DECAYS}
    assert abs(plain["0.95"] - plain["0.99"]) < 0.01 < 0.1 < plain["0.999"] - plain["0.95"]
