"""Explain one problem on a device: which variant serves it, and what each choice of that variant is worth."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuned.families.choices import choices
from tuned.lookup.lookup import Choice, Gpu, choose
from tuned.lookup.record import HARD, METHOD, SOFT, RecordError, Winner, changed_sources, differences
from tuned.lookup.table import folder_of_records, tables, tables_or_error

from ..answer import put
from ..estimating.targets import target_named
from ..places import TUNE
from ..problem import Problem
from ..publishing.audit import Here, this_machine
from ..rendering.structures import current
from ..searching.pool import same_problem
from ..storage.journal import Journal
from ..storage.record import read_record
from ..workload import WORKLOADS, default_variant
from .history import History, from_journal, from_landscapes
from .report import describe, percent_of_floor

COLUMNS, LEAST = 80, 24  # width of a terminal, and least width of the last column of a table

NO_BREAK = "\N{NO-BREAK SPACE}"


def explain(problem: Problem, device: str, folder: Path | None, journal: Journal | None) -> Iterator[str]:
    """Lines of text: the rule and the row, the time, the environment that it was measured in, the runner-up, the knobs.

    Raises:
        UnknownTargetError: ``device`` has neither a record nor a data sheet here.
        RecordError: ``folder``, or the path in TUNED_TABLES, is no folder or has a record that cannot be read.
    """
    winners = read_record(device, folder)
    gpu = _gpu(device, winners)
    family = WORKLOADS[problem.family].family
    with _in_front(folder):
        choice = choose(family, problem.spec, problem.size, gpu)
    size = " ".join(f"{name}={value}" for name, value in vars(problem.size).items())
    winner = next((w for w in winners if same_problem(w, problem)), None)
    kernels = () if choice.variant is None else family.kernel_names(problem.spec, choice.variant)
    put(
        problem=problem,
        device=device,
        rule=choice.rule,
        why=choice.why,
        kernels=kernels,
        variant=choice.variant,
        winner=winner,
    )
    yield f"{problem.name}: {problem.family} {describe(problem.spec)} {size}"
    yield f"on {device}, {choice.rule}: {choice.why}"
    if choice.variant is None:
        return
    yield f"kernel     {', '.join(kernels)}"
    if winner is None:
        yield f"time       not measured: {TUNE} --problems {problem.name}"
    else:
        yield from _measured(winner, this_machine())
    history = _history(problem, device, winner, journal)
    if history is None:
        yield "trials     none with the kernels as they are now, in a journal or a landscape on this machine"
    yield ""
    yield from table(problem, choice, history)


@contextlib.contextmanager
def _in_front(folder: Path | None) -> Iterator[None]:
    """Inside the block, the records of a folder come before the shipped tables, as with TUNED_TABLES."""
    before = os.environ.get("TUNED_TABLES")
    if folder is not None:
        try:
            folder_of_records(folder)
        except RecordError as error:  # named before the variable is, which the user did not set
            raise RecordError(f"--out: {error}") from None
        os.environ["TUNED_TABLES"] = str(folder)
    tables.cache_clear()
    try:
        tables_or_error()
        yield
    finally:
        if before is None:
            os.environ.pop("TUNED_TABLES", None)
        else:
            os.environ["TUNED_TABLES"] = before
        tables.cache_clear()


def _gpu(device: str, winners: list[Winner]) -> Gpu:
    if winners:
        facts = winners[-1].environment
        return Gpu(device, facts["capability"], facts["multiprocessors"], facts.get("device_name", ""))
    target = target_named(device)
    return Gpu(target.device, target.capability, target.processors)


def _measured(winner: Winner, here: Here) -> Iterator[str]:
    default = f", {winner.default_us / winner.median_us:.2f} x as fast as the default" if winner.default_us else ""
    yield (
        f"time       {winner.median_us:.2f} us +- {winner.spread_us:.2f}, {percent_of_floor(winner):.1f}% of the floor "
        f"({winner.floor_us:.2f} us){default}, {winner.eager_us / winner.median_us:.1f} x as fast as eager PyTorch; "
        f"{winner.trials} variants measured"
    )
    facts = winner.environment
    yield (
        f"with       {facts.get('device_name', '?')} ({facts.get('multiprocessors', '?')} multiprocessors), driver "
        f"{facts.get('driver', '?')}, torch {facts.get('torch', '?')}, Triton {facts.get('triton', '?')}, {facts.get('method', '?')}"
    )
    hard = [
        *changed_sources(winner.digests, current(winner.digests)),
        *differences(facts, {"method": METHOD, **here.gpus.get(facts["device"], {})}, HARD),
    ]
    soft = differences(facts, here.versions, SOFT)
    if hard:
        yield f"state      stale, it does not count: {'; '.join(hard)}"
    elif soft:
        yield f"state      it counts; worth tuning again: {'; '.join(soft)}"
    else:
        yield "state      it counts: measured with the kernels and versions of here"


def _history(problem: Problem, device: str, winner: Winner | None, journal: Journal | None) -> History | None:
    """The landscape of a problem, which has every legal variant, or else the variants that its searches tried."""
    found = [h for h in from_landscapes(device) if same_problem(h.problem, problem)]
    if not found and journal is not None and winner is not None:
        found = from_journal(journal, [(problem, winner.environment)])
    return next((h for h in found if h.times), None)


def table(problem: Problem, choice: Choice, history: History | None) -> Iterator[str]:
    """The variant's knobs beside the default's, and the cost of every other choice that was tried."""
    variant = choice.variant
    default = default_variant(problem)
    times = {} if history is None else history.times
    reference = times.get(variant)
    if history is not None and reference is not None:
        yield from _runner_up(variant, times)
        tried = "every legal variant" if history.whole else f"{len(times)} variants that a search chose"
        tried += "" if history.fresh else ", with an older text of the kernel"
        yield f"Other choices: changed alone, and with every other knob at its best; of {tried}."
        yield ""
    rows = [("knob", "taken", "default", "other choices" if reference is not None else "")]
    for name, declared in choices(type(variant)).items():
        own = getattr(variant, name)
        others = [c for c in declared if c != own] if reference is not None else []
        costs = [_cost(variant, name, c, times, reference) for c in others]
        mark = str(getattr(default, name)) if getattr(default, name) != own else "same"
        rows.append((name, str(own), mark, "; ".join(c.replace(" ", NO_BREAK) for c in costs if c)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    indent = sum(widths) + 2 * len(widths)
    for row in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        first, *others = textwrap.wrap(row[3], max(COLUMNS - indent, LEAST)) or [""]
        yield f"{cells}  {first}".rstrip().replace(NO_BREAK, " ")
        yield from ((" " * indent + other).replace(NO_BREAK, " ") for other in others)


def _runner_up(variant: Any, times: dict[Any, float]) -> Iterator[str]:
    others = {v: us for v, us in times.items() if v != variant}
    if not others:
        return
    second = min(others, key=others.__getitem__)
    changed = [n for n in choices(type(variant)) if getattr(second, n) != getattr(variant, n)]
    words = ", ".join(f"{n}={getattr(second, n)} instead of {getattr(variant, n)}" for n in changed)
    place = "runner-up" if others[second] >= times[variant] else "faster"
    yield f"{place:9}  {others[second]:.2f} us, {_percent(others[second], times[variant])}: {words}"


def _cost(variant: Any, name: str, choice: Any, times: dict[Any, float], reference: float | None) -> str:
    alone = times.get(dataclasses.replace(variant, **{name: choice}))
    best = min((us for v, us in times.items() if getattr(v, name) == choice), default=None)
    if best is None or reference is None:
        return ""
    first = "-" if alone is None else _percent(alone, reference)
    return f"{choice} {first} / {_percent(best, reference)}"


def _percent(us: float, reference: float) -> str:
    return f"{100 * (us / reference - 1):+.1f}%"
