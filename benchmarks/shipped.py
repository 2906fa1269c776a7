"""The environment in which what ships is verified and measured: this user's own rows and options stay out of it."""

from __future__ import annotations

import os

from generator.places import cache_folder

# Variables that would change what is tuned, tested or measured.
UNSET = (
    "PYTEST_ADDOPTS",
    "PYTEST_PLUGINS",
    "TRITON_INTERPRET",
    "TUNED_DISPATCH",
    "TUNED_FAMILY",
    "TUNED_RECORD",
    "TUNED_TABLES",
)


def environment() -> dict[str, str]:
    """This process's variables without those, and with a folder of a user's data that is empty: rows are looked up there too."""
    found = {name: value for name, value in os.environ.items() if name not in UNSET}
    return found | {"XDG_DATA_HOME": str(cache_folder("no-data-of-a-user"))}
