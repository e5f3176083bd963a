"""The table of losses on the front pages follows from the records."""

import pytest
from page_numbers import Page, best_losses, median, of_seed_0, runs, same, three_seeds

HEAD = "case | base | with Magma | with the constant | advice"
SHORT, LONG = three_seeds("llama_40m", steps=1500), runs("llama_60m", steps=3000)
LONGEST = runs("llama_60m", steps=12_000)
MOE = runs("nano_moe", preset="paper")
ROWS = [  # words of the case, records, base
    ("Adam, 40M Llama, 98M tokens", SHORT, "adam"),
    ("the same, 197M tokens", LONG, "adam"),
    ("the same, 786M tokens, one seed", LONGEST, "adam"),
    ("LaProp", SHORT, "laprop"),
    ("Muon", SHORT, "muon"),
    ("RMSProp", SHORT, "rmsprop"),
    ("mixture of experts", MOE, "adam"),
    ("mixture of experts", MOE, "muon"),
]


@pytest.mark.parametrize("name", ["../README.md", "should_i_use_it.md"])
def test_the_table(name):
    [table] = [table for table in Page(name).tables if table.head == HEAD]
    for (case, *cells, _), (words, found, base) in zip(table.rows, ROWS, strict=True):
        arms = (base, f"{base}+magma", f"{base}+constant")
        assert words in case
        if found is MOE:
            assert base.capitalize() in case
        if found is LONGEST:  # at the best rates of 3000 steps
            rates = (2e-3, 4e-3, 8e-3)
            losses = [of_seed_0(found, *run) for run in zip(arms, rates, strict=True)]
        else:
            losses = [median(best_losses(found, arm)) for arm in arms]
        same(" ".join(cells), losses)
