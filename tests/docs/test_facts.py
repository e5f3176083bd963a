"""What the front pages say follows from the records' pages, the package and its picture."""

import functools
import json
import re
import runpy

import numpy as np
import pytest
from test_readme import ROOT

import magma_optax


def text(page):
    return (ROOT / page).read_text()


MEASURED = {
    f"{float(number):.3f}"
    for page in ROOT.glob("docs/reproduction*.md")
    for number in re.findall(r"\b\d\.\d{3,4}\b", page.read_text())
}


@pytest.mark.parametrize("page", ["README.md", "docs/should_i_use_it.md"])
def test_losses_are_measured(page):
    [table] = re.findall(r"^\| case \|.*?\n\n", text(page), re.M | re.S)
    losses = re.findall(r"\b[34]\.\d{3}\b", table)
    assert len(losses) == 24
    assert set(losses) <= MEASURED


def test_the_two_tables_agree():
    rows = [
        re.findall(r"\b\d\.\d{3}\b", text(page).partition("| case |")[2].partition("\n\n")[0])
        for page in ("README.md", "docs/should_i_use_it.md")
    ]
    assert rows[0] == rows[1]


@functools.cache
def timings():
    return [*map(json.loads, text("examples/benchmark/results.jsonl").splitlines())]


def timed(form, option="", **settings):
    """Results of the last record of these settings whose command has the option, or lacks any p."""
    wanted, found = {"form": form, **settings}.items(), None
    for record in timings():
        command = record["provenance"]["command"]
        right = option in command if option else "--survival-probs" not in command
        if right and wanted <= record["settings"].items():
            found = record["results"]
    return found


def test_what_lazy_steps_cost_is_recorded():
    trees = pytest.importorskip("examples.benchmark.trees")
    page, forms = text("docs/performance.md"), ("bare", "with_magma", "lazy with_magma")
    [table] = re.findall(r"^\| tree \| layers \| survived.*?\n\n", page, re.M | re.S)
    ratios = []
    for line in table.strip().splitlines()[2:]:
        tree, layers, survived, *cells = (cell.strip(" *`") for cell in line.split("|")[1:-1])
        settings = {"part": "step", "base": "muon", "tree": tree}
        settings["leaves"] = {"separate": "219 separate", "stacked": "12 stacked"}[layers]
        bare, dense, lazy = (timed(form, **settings) for form in forms)
        skip = timed("lazy skip_update", **settings) if layers == "stacked" else None
        assert cells[0] == f"{bare['ms']:.0f} ms"
        assert cells[1:3] == [f"{dense['ratio']:.2f}", f"{lazy['ratio']:.2f}"]
        assert cells[3] == (f"{skip['ratio']:.2f}" if skip else "")
        shapes = trees.tree(tree, layers == "stacked")
        share = trees.survived(shapes, 0.5, trees.masking(layers, "attention+mlp"), 4)
        assert survived == f"{share:.2f}"
        ratios.append([f"{dense['ratio']:.2f}", f"{lazy['ratio']:.2f}"])
    assert len(ratios) == 4
    for dense, lazy in zip(ratios[1], ratios[0], strict=True):
        assert f"{dense} and {lazy} |" in text("README.md")
    small = {"part": "train", "base": "muon", "tree": "130m", "layers": "stacked"}
    bare, _, lazy = (timed(form, **small) for form in forms)
    assert f"went from {bare['optimizer_ms']:.1f} ms to {lazy['optimizer_ms']:.1f} ms" in page
    assert f"tokens) went from {bare['ms']:.1f} ms to {lazy['ms']:.1f} ms" in page
    soap = {"part": "step", "base": "soap", "tree": "60m", "leaves": "12 stacked"}
    _, dense, lazy = (timed(form, **soap) for form in forms)
    assert f"{lazy['ratio']:.2f}, plain `with_magma` {dense['ratio']:.2f}" in page


def test_compile_times_of_lazy_steps_are_recorded():
    page, forms = text("docs/performance.md"), ("bare", "with_magma", "lazy with_magma")

    def alone(tree, layout):
        settings = {"part": "alone", "base": "muon", "tree": tree, "layout": layout}
        return [timed(form, **settings) for form in forms]

    [table] = re.findall(r"^\| compile time on one H200.*?\n\n", page, re.M | re.S)
    for line in table.strip().splitlines()[2:]:
        layout, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        found = alone("1b-5504", layout.split()[0])
        seconds = [results["compile_s"] for results in found]
        assert cells == [f"{x:.0f}" if x > 10 else f"{x:.1f}" for x in seconds]
        assert seconds[2] < seconds[1]  # no longer than without lazy
        traced = [f"{results['trace_s']:.1f} s" for results in found]
        assert f"{traced[2]} for {traced[1]} with {layout.split()[0]}" in page
    _, plain, lazy = (results["compile_s"] for results in alone("60m", "stacked"))
    assert f"takes {lazy:.1f} s there, plain {plain:.1f} s" in page


def test_the_time_of_a_lazy_step_is_linear_in_what_survives():
    page, forms = text("docs/performance.md"), ("lazy skip_update", "lazy with_magma")
    settings = {"part": "step", "base": "muon", "tree": "1b-5504", "leaves": "12 stacked"}
    [table] = re.findall(r"^\| p \| survived \|.*?\n\n", page, re.M | re.S)
    shares, ratios, bare = [], [], []
    for line in table.strip().splitlines()[2:]:
        p, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        found = [timed(f, "--survival-probs", p=float(p), **settings) for f in ("bare", *forms)]
        bare.append(found[0]["ms"])
        shares.append(found[0]["survived"])
        ratios.append([results["ratio"] for results in found[1:]])
        assert cells == [f"{shares[-1]:.3f}", *(f"{ratio:.2f}" for ratio in ratios[-1])]
    assert len(shares) == 4 and f"which took {np.mean(bare):.0f} ms" in page
    slopes, starts = np.polyfit(shares, ratios, 1)
    assert np.abs(np.outer(shares, slopes) + starts - ratios).max() < 0.003
    assert f"it is {starts[1]:.3f} + {slopes[1]:.3f} times the share" in page
    assert f"a step takes {ratios[-1][1]:.2f} of bare Muon's" in page


def test_what_branches_cost_on_adam_is_recorded():
    page = text("docs/performance.md")
    [table] = re.findall(r"^  \| SkipUpdate on Adam,.*?\n\n", page, re.M | re.S)
    forms = ["skip_update", "branched skip_update", "branched skip_update with moments"]
    settings = {"part": "step", "base": "adam", "tree": "1b", "leaves": "219 separate"}
    found = [timed(form, "branched", **settings) for form in (*forms, "fused skip_update")]
    assert re.findall(r"\d\.\d\d", table) == [f"{results['ratio']:.2f}" for results in found]
    assert f"{found[0]['survived']:.0%} survived".replace("%", " %") in table
    assert 0 < 1 - found[2]["ratio"] < 0.01 and "gain 0.01 at most" in page


def test_the_api_has_every_public_name():
    documented = re.findall(r"^\.\. auto\w+:: magma_optax\.(\w+)", text("docs/api.md"), re.M)
    assert set(magma_optax.__all__) <= set(documented)


def test_the_changelog_has_the_version():
    assert f"\n## {magma_optax.__version__}\n" in text("CHANGELOG.md")
    assert f"version: {magma_optax.__version__}\n" in text("CITATION.cff")


def test_the_picture_is_what_the_package_does():
    drawn = runpy.run_path(str(ROOT / "docs/images/updates.py"))
    optax, base = drawn["optax"], drawn["scale_to_one"]()
    masked = np.array([drawn["attention_and_mlp"](leaf) for leaf in drawn["LEAVES"]])
    skip = drawn["multipliers"](
        optax.chain(base, drawn["skip_update"](where=drawn["attention_and_mlp"]))
    )
    magma = drawn["multipliers"](drawn["with_magma"](base, where=drawn["attention_and_mlp"]))
    assert set(skip[masked].ravel()) == {0.0, 2.0} and (skip[~masked] == 1).all()
    assert (magma[~masked] == 1).all() and ((magma == 0) == (skip == 0)).all()
    survivors = magma[masked][magma[masked] != 0]
    assert 0.49 < survivors.min() and survivors.max() < 0.57
    assert abs(drawn["CONSTANT"] - magma_optax.mean_multiplier()) < 5e-4


def test_the_options_of_compare_are_there():
    compare = pytest.importorskip("examples.llama.compare")
    page = text("docs/should_i_use_it.md")
    assert "examples.llama.compare --data FILE_OR_FOLDER --optimizer adam" in page
    assert "examples.llama.compare --data FILE" in text("README.md")
    options = re.findall(r"^\| `(--[a-z-]+)( \w+)?` \|", page, re.M)
    known = compare.make_parser().format_help()
    assert len(options) == 5 and all(option in known for option, _ in options)
