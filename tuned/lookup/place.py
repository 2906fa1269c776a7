"""Where a user's own records lie, and the command that writes them.

Only the standard library is imported: the generator uses this module too, in processes that have no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CHECKOUT = (PACKAGE.parent / "tune.py").is_file() and (PACKAGE.parent / "templates").is_dir()
PROGRAM = "python tune.py" if CHECKOUT else "tuned"
TUNE = "python tune.py" if CHECKOUT else "tuned tune"


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path, with a leading ~ replaced by the user's home if there is one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def own_records() -> Path | None:
    """The folder of this user's records where there is no checkout: in $XDG_DATA_HOME, or ~/.local/share.

    A relative $XDG_DATA_HOME is ignored, as its standard says: records would be found from one folder only. None for a user
    without a home, as in some containers.
    """
    named = expanded(os.environ.get("XDG_DATA_HOME", ""))
    data = named if named.is_absolute() else expanded("~/.local/share")
    return None if str(data).startswith("~") else data / "tuned-kernels" / "winners"
