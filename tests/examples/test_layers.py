"""Sharing goes one way: paper -> llama, nanomoe -> kit, and nobody takes another's options."""

import ast
import importlib
from pathlib import Path

import pytest

from examples.kit.data.load import load
from examples.llama import _MOVED

EXAMPLES = Path(__file__).parents[2] / "examples"
# A door to the laboratory, which nobody imports: its name is that of the example it compares.
DOORS = ("compare.py", "verdict.py")
MAY_IMPORT = {
    "kit": set(),
    "llama": {"kit"},
    "nanomoe": {"kit"},
    "benchmark": {"kit", "llama"},
    "scaling": {"kit", "llama"},
    "paper": {"kit", "llama", "nanomoe"},
}


def imported(file):
    """The modules of the examples that a file imports, such as ``("llama", "config")``."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {tuple(name.split(".")[1:3]) for name in names if name.startswith("examples.")}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_sharing_goes_one_way(folder):
    files = sorted((EXAMPLES / folder).rglob("*.py"))
    assert files
    for file in files:
        others = {(where, what) for where, what in imported(file) if where != folder}
        if folder == "llama" and file.name in DOORS:
            others = {(where, what) for where, what in others if where != "paper"}
        assert {where for where, _ in others} <= MAY_IMPORT[folder], file
        # They measure the trainer that the same options would start.
        if file.parent.name != "scaling" or file.name not in ("train_step.py", "tpu_step.py"):
            assert not {where for where, what in others if what == "options"} - {"kit"}, file


def test_nobody_imports_a_door():
    doors = {("llama", name.removesuffix(".py")) for name in DOORS}
    for file in EXAMPLES.rglob("*.py"):
        if file.name not in DOORS:
            assert not imported(file) & doors, file


def test_the_kit_names_no_program():
    for file in (EXAMPLES / "kit").rglob("*.py"):
        for program in MAY_IMPORT.keys() - {"kit"}:
            assert f"examples.{program}" not in file.read_text(), file


@pytest.mark.parametrize("name", sorted(_MOVED))
def test_what_the_llama_lent_is_still_found_there(name):
    moved = importlib.import_module(_MOVED[name])
    assert getattr(importlib.import_module("examples.llama"), name) is moved


def test_the_texts_old_name_is_a_module_too():
    assert importlib.import_module("examples.llama.data").load is load
