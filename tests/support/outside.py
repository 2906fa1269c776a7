"""Families from outside the tree, and processes that tune and call them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.pythons import python

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
EXAMPLES = ROOT / "examples" / "own_kernel"


def copied(name: str, folder: Path) -> Path:
    """Copy the files of an example's family into a folder, as a user would have them; returns the Python file."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (EXAMPLES / f"{name}.py", EXAMPLES / f"{name}.py.jinja"):
        shutil.copy(path, folder)
    return folder / f"{name}.py"


def changed(file: Path, *pairs: tuple[str, str]) -> Path:
    """Replace texts in a file, each of which must be there; returns the file."""
    text = file.read_text()
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    return file


def run(
    folder: Path,
    *command: str,
    family: Path | None = None,
    cache: Path | None = None,
    new: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a Python process in a folder outside the tree; it can import this project by PYTHONPATH only.

    ``new``: as tests.support.pythons says.
    """
    environment = {**os.environ, "PYTHONPATH": PATHS, "TUNED_CACHE": str(cache or folder / "cache"), **variables}
    if family is not None:
        environment["TUNED_FAMILY"] = str(family)
    return python(*command, cwd=folder, environment=environment, new=new)


def tune(folder: Path, *arguments: str, new: bool = False) -> subprocess.CompletedProcess[str]:
    """Run tune.py from a folder outside the tree."""
    return run(folder, str(ROOT / "tune.py"), *arguments, new=new)
