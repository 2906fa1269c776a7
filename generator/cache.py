"""Where what can be made again is kept: rendered candidates, compiler reports, journals."""

from __future__ import annotations

import os
from pathlib import Path

from .places import CACHE


def cache_path(*parts: str) -> Path:
    """A place under TUNED_CACHE, or else .cache in the checkout, or the user's cache; nothing is made."""
    return Path(os.environ.get("TUNED_CACHE") or CACHE).joinpath(*parts)


def cache_folder(*parts: str) -> Path:
    """The same as a folder, made if it is not there."""
    folder = cache_path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
