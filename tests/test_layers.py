"""Rules that import-linter cannot check: modules in strings, families named outside their folders, tests importing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from generator.processes.forkserver import PRELOAD

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "generator"
MODULE = re.compile(r"generator((?:\.\w+)+)(?::\w+)?")
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "families").glob("*/__init__.py"))
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def layers() -> dict[str, int]:
    """Package or module -> the number of its layer, the highest layer first, from import-linter's settings."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r'type = "layers".*?layers = \[.*?\n(.*?)\n\]', text, re.DOTALL)
    assert listed is not None
    found = re.findall(r'"(.*?)"', listed[1])
    return {name.strip(): number for number, entry in enumerate(found) for name in entry.split(":")}


def words(path: Path) -> Iterator[str]:
    """The strings of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def modules_named(path: Path) -> Iterator[str]:
    """The modules that f-strings name as "{GENERATOR}.room.module", by their names in a checkout."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            word = ast.unparse(node)[2:-1].replace("{GENERATOR}", "generator", 1)
            if MODULE.fullmatch(word):
                yield word


def test_every_module_is_in_a_layer() -> None:
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} == set(layers())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_that_is_named_in_a_string_is_not_of_a_higher_layer(path: Path) -> None:
    number = layers()
    own = number[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
    for word in modules_named(path):
        parts = word.partition(":")[0].split(".")[1:]
        assert (PACKAGE.joinpath(*parts)).with_suffix(".py").exists(), f"{word} is no module"
        assert number[parts[0]] >= own, f"{word} is above"


def test_modules_are_named_in_strings() -> None:
    found = {word for path in MODULES for word in modules_named(path)}
    assert {"generator.processes.serve:GpuServer", "generator.processes.forkserver", *PRELOAD} <= found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_says_what_the_generator_is_called_or_counts_folders(path: Path) -> None:
    assert not [word for word in words(path) if re.fullmatch(r"generator(\.[\w.:]*)?", word)], "places.GENERATOR"
    text = path.read_text()
    assert not re.search(r"^\s*(from|import) generator\b", text, re.MULTILINE), "in a wheel it is tuned._generator"
    if path.name != "places.py":
        assert not re.search(r"__file__\)(\.\w+\(\))?\.parent(\.parent|s)|parents\[", text), "generator/places.py does"


# Only these may name families: what users call, what is generated, and the families' folders.
NAMING = {"families", "calls", "compat", "kernels", "tables", "dispatch", "nn", "explanation"}
COMMON = [
    path
    for package in (PACKAGE, ROOT / "tuned")
    for path in sorted(package.rglob("*.py"))
    if path.relative_to(package).parts[0].removesuffix(".py") not in NAMING
]


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_names_a_family_outside_of_its_folder(path: Path) -> None:
    assert FAMILIES
    assert not set(words(path)) & set(FAMILIES)
    imported = re.findall(r"^\s*(?:from|import) (?:[\w.]*\.)?(?:families|calls)\.(\w+)", path.read_text(), re.MULTILINE)
    assert not set(imported) & set(FAMILIES)


def test_no_file_of_tests_imports_another_one_with_tests() -> None:
    importing = re.compile(r"^\s*(?:from|import) tests\.(?:[\w.]+\.)?test_", re.MULTILINE)
    assert [path for path in (ROOT / "tests").rglob("*.py") if importing.search(path.read_text())] == []
