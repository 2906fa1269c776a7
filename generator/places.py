"""Where things lie: in a checkout, and in a wheel, where this package is ``tuned._generator`` and has the templates.

In a process that tunes a family from outside, which TUNED_FAMILY names, all that is written lies beside the family.

Only this module counts folders, and a module that is named in a string begins with ``GENERATOR``. Nothing but the standard
library is imported, by what is imported of ``tuned`` too: torch takes seconds, and any Python can tell what was verified. docs/decisions/0043.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
from pathlib import Path

from tuned.lookup import place
from tuned.lookup.place import expanded, own_records

GENERATOR = __package__  # what this package is imported as
INSIDE = "_generator"  # its folder in ``tuned`` in a wheel
_HERE = Path(__file__).parent
INSTALLED = (_HERE / "templates").is_dir()

PACKAGE = _HERE.parent if INSTALLED else _HERE.parent / "tuned"  # what models import
ROOT = PACKAGE.parent  # the checkout, or the folder that was installed into
OUTSIDE = os.environ.get("TUNED_FAMILY")  # a file, a package's folder or a dotted name; tune.py --family sets it
_OF_IT = f" --family {shlex.quote(OUTSIDE)}" if OUTSIDE else ""
PROGRAM, TUNE = place.PROGRAM + _OF_IT, place.TUNE + _OF_IT  # what a user is told to call


def _file_of(name: str) -> Path:
    """The file of a family from outside."""
    path = Path(name)
    if path.suffix == ".py" or path.is_dir():
        return (path / "__init__.py" if path.is_dir() else path).resolve()
    found = importlib.util.find_spec(name)
    return Path(str(found and found.origin)).resolve()


FAMILY = _file_of(OUTSIDE) if OUTSIDE else None
_BESIDE = FAMILY and FAMILY.parent / f"{FAMILY.parent.name if FAMILY.name == '__init__.py' else FAMILY.stem}_tuned"
HOME = _BESIDE or PACKAGE  # has kernels, tables and winners
OWN = (
    own_records() if INSTALLED and not OUTSIDE else None
)  # has records of this user's, where packages are not written to
TEMPLATES = (_HERE if INSTALLED else ROOT) / "templates"
LANDSCAPES = (_BESIDE or _HERE) / "landscapes"
SAMPLES = (_BESIDE or _HERE) / "samples"
RESULTS = (_BESIDE or ROOT / "benchmarks") / "results"  # of a checkout only, or of a family from outside
CONTRIBUTIONS = Path() if INSTALLED else ROOT / "contributions"  # what others measured, until it is merged
_USER_CACHE = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tuned-kernels"
CACHE = _USER_CACHE if INSTALLED else ROOT / ".cache"  # unless TUNED_CACHE says another
# Below the cache, what is kept for problems by their names: families of one name do not meet.
SHELF = ("families", hashlib.sha256(str(FAMILY).encode()).hexdigest()[:12]) if FAMILY else ()


def cache_path(*parts: str) -> Path:
    """A place under TUNED_CACHE, or else .cache in the checkout, or the user's cache; nothing is made."""
    return expanded(os.environ.get("TUNED_CACHE") or CACHE).joinpath(*parts)


def cache_folder(*parts: str) -> Path:
    """The same as a folder, made if it is not there."""
    folder = cache_path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
