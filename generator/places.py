"""Where things lie: in a checkout, and in a wheel, where this package is ``tuned._generator`` and has the templates.

In a process that tunes a family from outside, which TUNED_FAMILY names, all written files lie beside that family.

Only this module may count parent folders, and a module name in a string must begin with ``GENERATOR``. This module and
its imports from ``tuned`` need only the standard library: torch takes seconds to import, and any Python can tell what
was verified. docs/decisions/0043.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
from pathlib import Path

from tuned.lookup import place
from tuned.lookup.place import expanded, own_records

GENERATOR = __package__  # the name that this package is imported by
INSIDE = "_generator"  # its folder in ``tuned`` in a wheel
_HERE = Path(__file__).parent
INSTALLED = (_HERE / "templates").is_dir()

PACKAGE = _HERE.parent if INSTALLED else _HERE.parent / "tuned"  # the package that models import
ROOT = PACKAGE.parent  # the checkout, or the folder that the package is installed in
OUTSIDE = os.environ.get("TUNED_FAMILY")  # a file, a package's folder or a dotted name; tune.py --family sets it
_OF_IT = f" --family {shlex.quote(OUTSIDE)}" if OUTSIDE else ""
PROGRAM, TUNE = place.PROGRAM + _OF_IT, place.TUNE + _OF_IT  # the commands that messages tell a user to run


def tune_into(options: str, folder: Path | None) -> str:
    """The command that tunes into the record in ``folder``, of --out; without that option it would write another."""
    return f"{TUNE} {options}" + ("" if folder is None else f" --out {shlex.quote(str(folder))}")


def _file_of(name: str) -> Path:
    """The file of a family from outside."""
    path = Path(name)
    if path.suffix == ".py" or path.is_dir():
        return (path / "__init__.py" if path.is_dir() else path).resolve()
    found = importlib.util.find_spec(name)
    return Path(str(found and found.origin)).resolve()


FAMILY = _file_of(OUTSIDE) if OUTSIDE else None
_BESIDE = FAMILY and FAMILY.parent / f"{FAMILY.parent.name if FAMILY.name == '__init__.py' else FAMILY.stem}_tuned"
HOME = _BESIDE or PACKAGE  # the folder of kernels, tables and winners
OWN = (
    own_records() if INSTALLED and not OUTSIDE else None
)  # the folder of this user's records, since an installed package is not written to
TEMPLATES = (_HERE if INSTALLED else ROOT) / "templates"
LANDSCAPES = (_BESIDE or _HERE) / "landscapes"
SAMPLES = (_BESIDE or _HERE) / "samples"
RESULTS = (_BESIDE or ROOT / "benchmarks") / "results"  # of a checkout only, or of a family from outside
CONTRIBUTIONS = Path() if INSTALLED else ROOT / "contributions"  # archives that others measured, until they are merged
_USER_CACHE = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tuned-kernels"
CACHE = _USER_CACHE if INSTALLED else ROOT / ".cache"  # unless TUNED_CACHE names another folder
# Folder below the cache for files named after problems: two families of the same name do not share it.
SHELF = ("families", hashlib.sha256(str(FAMILY).encode()).hexdigest()[:12]) if FAMILY else ()


def cache_path(*parts: str) -> Path:
    """A path under TUNED_CACHE, or else .cache in the checkout, or the user's cache; nothing is created."""
    return expanded(os.environ.get("TUNED_CACHE") or CACHE).joinpath(*parts)


def cache_folder(*parts: str) -> Path:
    """The same path as a folder, created if it does not exist."""
    folder = cache_path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
