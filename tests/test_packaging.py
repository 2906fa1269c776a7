"""What is installed: a distribution whose name is free, which tests/test_installed.py unpacks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

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
    # A file may be deleted, and the index not know yet.
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split("\0")):
        if Path(name).suffix in {".md", ".py", ".toml", ".txt", ".html", ".jinja"} or name == "Makefile":
            for line in (ROOT / name).read_text().splitlines():
                assert name == Path(__file__).name or not wanted.search(line), f"{name}: {line}"
