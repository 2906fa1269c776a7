"""Write the files of a new family from the texts beside this module."""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from ..disk import write_whole
from ..places import INSTALLED, PROGRAM, ROOT, TUNE
from ..problem import SelectionError

FILES = {
    "NAME.py": "family.py",
    "NAME.py.jinja": "family.py.jinja",
    "test_NAME.py": "test_family.py",
    "README.md": "README.md",
}
TEXTS = Path(__file__).parent
# What a test runs Python with to run this program: an installed one has no tune.py.
RUN = json.dumps(
    ["-c", "from tuned._generator.command_line import program; program()"] if INSTALLED else [str(ROOT / "tune.py")]
)
# Names that the files use themselves.
TAKEN = frozenset(
    (
        "call",
        "eager",
        "inputs",
        "launches",
        "own",
        "problems",
        "reference",
        "rejection",
        "tl",
        "torch",
        "triton",
        "tuned",
    )
)


def _is_installed(name: str) -> bool:
    """Whether ``import name`` finds a module outside the current folder, which the family's file would hide."""
    here = {"", os.path.realpath(os.curdir)}
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) not in here]
    return PathFinder.find_spec(name, elsewhere) is not None


def write_family(name: str, folder: Path) -> list[Path]:
    """Write the files of a new family ``name`` into a folder, which is created if it does not exist.

    Raises:
        SelectionError: the name is not allowed for a Python module, or is taken, or one of the files exists already.
    """
    if re.fullmatch("[a-z][a-z0-9_]*", name) is None or keyword.iskeyword(name):
        raise SelectionError(
            f"a family is named with small letters, digits and _, and as a module may be, got {name!r}"
        )
    if name in TAKEN or name in sys.stdlib_module_names or _is_installed(name):
        raise SelectionError(
            f"a family may not be named as what its file uses, or a module of Python's or one that is installed, got {name!r}: "
            "name it otherwise"
        )
    written = {folder / file.replace("NAME", name): TEXTS / f"{text}.txt" for file, text in FILES.items()}
    there = [str(path) for path in written if path.exists()]
    if there:
        raise SelectionError(
            f"{', '.join(there)} {'are' if len(there) > 1 else 'is'} there already, and kept: give another name, or another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in written.items():
        filled = text.read_text(encoding="utf-8")
        for word, value in {
            "NAME": name,
            "TUNE_COMMAND": TUNE,
            "RENDER_COMMAND": PROGRAM,
            "FAMILY_FILE": shlex.quote(str(folder / f"{name}.py")),
            "TUNE_ARGUMENTS": RUN,
        }.items():
            filled = filled.replace(word, value)
        write_whole(path, filled.encode())
    return list(written)
