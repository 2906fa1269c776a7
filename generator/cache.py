"""Where what can be made again is kept: rendered candidates, compiler reports, journals."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent


def cache_path(*parts: str) -> Path:
    """A place under .cache in the checkout, or under TUNED_CACHE; nothing is made."""
    return Path(os.environ.get("TUNED_CACHE") or ROOT / ".cache").joinpath(*parts)


def cache_folder(*parts: str) -> Path:
    """A folder under .cache in the checkout, or under TUNED_CACHE; made if it is not there."""
    folder = cache_path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
