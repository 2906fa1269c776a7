"""The GPU that tuned.explain is asked about, in place of the GPU of a call's tensors."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from tuned.lookup.lookup import Gpu
from tuned.lookup.table import Table

_ASKED: ContextVar[Gpu | None] = ContextVar("tuned_asked", default=None)
asked = _ASKED.get  # the GPU that is asked about here, or None


@contextlib.contextmanager
def asking(gpu: Gpu | None) -> Iterator[None]:
    """Inside, every tensor counts as being on this GPU; with None, on its own device, as always."""
    token = _ASKED.set(gpu)
    try:
        yield
    finally:
        _ASKED.reset(token)


def gpu_named(name: Any, known: Mapping[str, Table]) -> Gpu:
    """The GPU that a table was measured on.

    Raises:
        TypeError: the name is no string.
        ValueError: no table has this name.
    """
    there = [device for device, table in known.items() if table.properties.get("multiprocessors")]
    listed = ", ".join(sorted(there)) or "none"
    if not isinstance(name, str):
        raise TypeError(
            f"gpu must be the name of a GPU that has a table ({listed}), got {type(name).__name__} {name!r}"
        )
    if name not in there:
        close = difflib.get_close_matches(name.lower().replace(" ", "_"), there, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"gpu must be the name of a GPU that has a table, got {name!r}.{hint} There are: {listed}; the records in a "
            "folder that TUNED_TABLES names count too"
        )
    facts = known[name].properties
    return Gpu(name, facts.get("capability", 0), facts["multiprocessors"], facts.get("device_name", ""), asked=True)
