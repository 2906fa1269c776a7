"""The pages: their snippets run as written, their links have targets, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import tuned.dispatch
import tuned.nn
from tests.support.pythons import python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Snippets that need a model of Hugging Face, or the reader's files.
OF_THE_READER = ("with use_tuned_rope(", "tuned.warm(model, *example_inputs)")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
SNIPPETS = [
    pytest.param(found[1], id=f"{page.name}:{page.read_text()[: found.start()].count(chr(10)) + 1}")
    for page in PAGES
    for found in SNIPPET.finditer(page.read_text())
    if not any(text in found[1] for text in OF_THE_READER)
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs_as_it_stands(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


def test_every_page_has_been_looked_for_snippets() -> None:
    assert {param.id.partition(":")[0] for param in SNIPPETS} >= {"README.md", "gru.md", "start.md"}
    skipped = [found[1] for page in PAGES for found in SNIPPET.finditer(page.read_text())]
    assert len(skipped) - len(SNIPPETS) == 3


@pytest.mark.parametrize("page", [*PAGES, *sorted((DOCS / "decisions").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), target


def test_readme_is_short_and_has_a_picture() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 130
    assert any(line.startswith("![") for line in lines[:12])


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"^([a-z][\w/-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= listed
    decisions = (DOCS / "decisions" / "README.md").read_text()
    for page in (DOCS / "decisions").glob("0*.md"):
        assert f"]({page.name})" in decisions


def test_every_public_function_and_module_is_in_the_reference() -> None:
    page = (DOCS / "api.md").read_text()
    functions = [
        n for n, f in vars(tuned.dispatch).items() if inspect.isfunction(f) and f.__module__ == "tuned.dispatch"
    ]
    named = [f"tuned.dispatch.{name}" for name in functions if not name.startswith(("_", "explain"))]
    named += [f"tuned.nn.{name}" for name in ("GRU", "GRUCell", "patched", "is_patched", "replace", "restore")]
    named += [f"tuned.compat.{path.stem}" for path in (ROOT / "tuned" / "compat").glob("[a-z]*.py")]
    missing = [name for name in named if not re.search(rf"{re.escape(name)}$", page, re.MULTILINE)]
    # Internal modules that find how a model rotates and normalises: not in the reference.
    inner = ("attention", "fusing", "norm_style", "rotary_style")
    assert sorted(missing) == [f"tuned.compat.{name}" for name in inner]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    # Look for the packages without importing them: a folder that a removed package left would import as a module, which others
    # would then take for the package.
    if any(importlib.util.find_spec(name) is None for name in ("myst_parser", "furo")):
        pytest.skip("the extra docs is not installed")
    command = ("-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees"))
    done = python(*command, str(DOCS), str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "api.html").read_text()
    assert "tuned.dispatch.rope_qk" in reference
    assert "attention_scaling" in reference
    assert (tmp_path / "site" / "decisions" / "0057-resets.html").exists()
