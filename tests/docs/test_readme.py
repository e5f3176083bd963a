"""The code on the pages runs as printed; the files that they name exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]


def blocks(page, language):
    fences = re.findall(r"^```(\S*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    return [text for name, text in fences if name == language]


IN_ORDER = [p for p in PAGES if blocks(p, "python") and p != "docs/recipes.md"]  # each by itself


@pytest.mark.parametrize("page", IN_ORDER)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{page} (block {number})", "exec"), namespace)


def test_readme_has_two_commands():
    train, test = blocks("README.md", "sh")
    assert train.count("\n") == test.count("\n") == 1
    assert "examples.llama.train --magma" in train and "pytest" in test


def test_file_tree_is_true():
    (tree,) = [b for b in blocks("CONTRIBUTING.md", "") if "magma_optax/" in b]
    library, rest = tree.split("\nexamples/\n")
    named = re.findall(r"\b\w+\.py", library)
    files = [f.name for f in (ROOT / "magma_optax").glob("_*/*.py") if f.name != "__init__.py"]
    assert sorted(named) == sorted([*files, "fused.py"])
    parents, seen = [], 0
    for line in ("examples/\n" + rest).splitlines():
        indent, names = re.match(r"( *)((?:[\w.]+/?(?:, )?)+)  ?", line + "  ").groups()
        if len(indent) > 4:  # a description that goes on
            continue
        parents = parents[: len(indent) // 2]
        for name in names.split(", "):
            assert ROOT.joinpath(*parents, name).exists(), [*parents, name]
            seen += 1
        parents.append(name)
    assert seen > 25


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
