"""Collect what a page is made from: the record, the journal, the landscapes and the benchmark results of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from generator.cache import ROOT
from generator.keeping.record import read_record
from generator.problem import Problem
from generator.telling.history import from_journal, from_landscapes
from generator.telling.html.contents import read_results
from generator.telling.html.page import Sources

if TYPE_CHECKING:
    from pathlib import Path

    from generator.keeping.journal import Journal


def collect(device: str, folder: Path | None, journal: Journal | None) -> Sources:
    """What there is of a device; ``folder`` has its record if it is not the package's.

    Raises:
        tuned.lookup.record.RecordError: the record cannot be read.
    """
    winners = read_record(device, folder)
    asked = [(Problem(w.name, w.family, w.spec, w.size), w.environment) for w in winners]
    return Sources(
        device,
        winners,
        trials=from_journal(journal, asked) if journal is not None else (),
        landscapes=from_landscapes(device),
        results=read_results(ROOT / "benchmarks" / "results", device),
    )
