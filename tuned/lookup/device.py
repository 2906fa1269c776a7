"""One home for what a GPU is called in file names."""

from __future__ import annotations

import re


def device_slug(name: str) -> str:
    """The file name of a device: "NVIDIA H200" -> "nvidia_h200".

    Raises:
        ValueError: if nothing of the name is left.
    """
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not slug:
        raise ValueError(f"a device name must have a letter or a digit, got {name!r}")
    return slug
