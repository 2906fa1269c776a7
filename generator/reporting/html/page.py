"""The page: one HTML file that needs no network, the same bytes for the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from tuned.lookup.record import Winner

from ...places import RESULTS
from ...problem import Problem
from ...storage.journal import Journal
from ...storage.record import read_record
from ...workload import WORKLOADS
from ..blocks import Answer, answer
from ..history import History, from_journal, from_landscapes
from ..importance import Knob, knobs_of
from . import block_size, contents
from .charts import Chart, number
from .tiles import read_summary, tiles

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Sources:
    """The data of a page; the page says of each empty part that it is missing."""

    device: str
    winners: Sequence[Winner] = ()
    trials: Sequence[History] = ()  # of the journal
    landscapes: Sequence[History] = ()
    results: Sequence[tuple[str, dict[str, Any]]] = ()  # of benchmarks: (path, content)
    summary: dict[str, Any] | None = None  # name of a call in README -> its measurement


def collect(device: str, folder: Path | None, journal: Journal | None) -> Sources:
    """All data of a device; ``folder`` has its record if the record is not the package's.

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
        results=contents.read_results(RESULTS, device),
        summary=read_summary(RESULTS, device),
    )


@dataclasses.dataclass(frozen=True)
class Study:
    """The section of one family: its knobs and how to choose a block size."""

    family: str
    source: str
    knobs: list[Knob]
    answer: str | None  # how to choose a block size
    charts: list[Chart]


def page(sources: Sources) -> str:
    """The page of a device."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["percent"] = lambda value: f"{value:.1f}%"
    rows = contents.winner_rows(sources.winners)
    names = (str(w.environment.get("device_name", sources.device)) for w in sources.winners)
    where, benchmark = sources.results[0] if sources.results else ("", None)
    found_peers = contents.peers(benchmark)
    tried = sources.trials or sources.landscapes
    return environment.get_template("report.html.jinja").render(
        device=sources.device,
        device_name=next(names, sources.device),
        rows=rows,
        tiles=tiles(rows, found_peers, sources.summary),
        floor=contents.floor_chart(rows),
        sweeps=contents.sweep_charts(sources.results),
        peers=found_peers,
        peers_chart=contents.peers_chart(found_peers),
        studies=[_study(family, sources, rows) for family in WORKLOADS if _histories(family, sources)],
        failures=contents.failures(tried),
        tried=sum(h.tried for h in tried),
        tried_in="the journal" if sources.trials else "the recorded landscapes",
        environments=contents.environments(sources.winners),
        benchmark=benchmark["environment"] if benchmark else None,
        benchmark_source=where,
    )


def _histories(family: str, sources: Sources) -> list[History]:
    """A family's landscapes, which have every legal variant, or else the variants that its searches tried."""
    whole = [h for h in sources.landscapes if h.problem.family == family]
    return whole or [h for h in sources.trials if h.problem.family == family]


def _study(family: str, sources: Sources, rows: Sequence[contents.Row]) -> Study:
    histories = _histories(family, sources)
    whole = all(h.whole for h in histories)
    old = sum(not h.fresh for h in histories)
    source = (
        f"From {len(histories)} recorded landscapes: every legal variant was measured"
        f"{f', in {old} of them with an older text of the kernel' if old else ''}."
        if whole
        else f"From the journal, {len(histories)} problems: a search chose what was measured, so what it seldom tried looks worse than it is."
    )
    found = answer(histories)
    untuned = [r.over_default for r in rows if r.winner.family == family and r.over_default is not None]
    paragraph = block_size.block_answer(found, untuned, _by_size(histories, rows)) if found else None
    charts = block_size.block_charts(found) if found else []
    return Study(family, source, knobs_of([h.times for h in histories]), paragraph, charts)


def _by_size(histories: Sequence[History], rows: Sequence[contents.Row]) -> tuple[Answer | None, Answer | None]:
    """The answers for the calls whose bytes fit in the device's L2, and for the other calls."""
    l2_bytes = max((int(r.winner.environment.get("l2_bytes") or 0) for r in rows), default=0)

    def fits(problem: Problem) -> bool:
        return WORKLOADS[problem.family].bytes_moved(problem.spec, problem.size) <= l2_bytes

    return answer(h for h in histories if fits(h.problem)), answer(h for h in histories if not fits(h.problem))
