"""Where things lie: in a checkout, and in a wheel, where this package is ``tuned._generator`` and has the templates.

Only this module counts folders, and a module that is named in a string begins with ``GENERATOR``. Nothing but the standard
library is imported: torch takes seconds, and any Python can tell what was verified. docs/decisions/0043.
"""

from __future__ import annotations

import os
from pathlib import Path

GENERATOR = __package__  # what this package is imported as
INSIDE = "_generator"  # its folder in ``tuned`` in a wheel
_HERE = Path(__file__).parent
INSTALLED = (_HERE / "templates").is_dir()

PACKAGE = _HERE.parent if INSTALLED else _HERE.parent / "tuned"  # what models import
ROOT = PACKAGE.parent  # the checkout, or the folder that was installed into
TEMPLATES = (_HERE if INSTALLED else ROOT) / "templates"
LANDSCAPES = _HERE / "landscapes"
RESULTS = ROOT / "benchmarks" / "results"  # of a checkout only
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tuned-kernels"
CACHE = _USER_CACHE if INSTALLED else ROOT / ".cache"  # unless TUNED_CACHE says another
