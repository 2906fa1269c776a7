"""The name of a GPU in file names, defined in one place."""

from __future__ import annotations

import re


def device_slug(name: str) -> str:
    """The name of a device in file names: "NVIDIA H200" -> "nvidia_h200".

    Raises:
        ValueError: the name has no letter or digit.
    """
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not slug:
        raise ValueError(f"a device name must have a letter or a digit, got {name!r}")
    return slug
