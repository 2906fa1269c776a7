"""What pip installs: a distribution with a free name, which tests/test_installed.py unpacks, and pins that suit each Python."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
NAME = "tuned-kernels"


def test_the_distribution_is_named_after_no_other_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^\[project\]\nname = "(.*?)"', text, re.MULTILINE) == [NAME]
    wanted = re.compile(r"install\s[^\n]*?\btuned(?!-kernels)\b(?=['\"\[ ]|$)")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    # A file may be deleted and still be in git's index.
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split("\0")):
        if Path(name).suffix in {".md", ".py", ".toml", ".txt", ".html", ".jinja"} or name == "Makefile":
            for line in (ROOT / name).read_text().splitlines():
                assert name == Path(__file__).name or not wanted.search(line), f"{name}: {line}"


def test_every_pin_holds_on_each_python_where_it_applies() -> None:
    """If a pinned version does not exist for a declared Python, pip has no solution and tries all others for minutes."""
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert len(declared) > 1
    wrong, known = [], 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        try:
            installed = importlib.metadata.metadata(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not pin.specifier.contains(installed["Version"], prereleases=True):
            continue
        known += 1
        takes = SpecifierSet(installed["Requires-Python"] or "")
        wrong += [
            f"{line} on {python}: it needs {takes}"
            for python in declared
            # Check with the first release of each Python: a pin for Debian 12, whose Python is 3.11.2, needed 3.11.5.
            if (pin.marker is None or pin.marker.evaluate({"python_version": python}))
            and not takes.contains(f"{python}.0")
        ]
    assert known > 1
    assert not wrong
