"""Find what is out of date: rows that do not count any more, problems without a row, generated files that differ.

Hard: the source of a kernel changed; the GPU model or its number of multiprocessors differs from the device here; or
the way of timing or the schema is another. Such a row does not count. Soft: Triton, torch or the driver differs from
the one here; the way of timing was improved since; or a quick run found the row. The row counts, but tuning again may
find a better one. Unverified: the sources are not those that passed on the device. Verifying is worth doing, and
required for a release.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from tuned.lookup.record import (
    HARD,
    METHOD,
    SOFT,
    RecordError,
    Winner,
    changed_sources,
    device_slug,
    differences,
    shown,
)

from ..measuring.bench import TIMING
from ..measuring.environment import driver_version
from ..places import HOME, INSTALLED, OUTSIDE, PROGRAM, tune_into
from ..problem import Problem
from ..rendering.structures import digests
from ..searching.pool import same_problem
from ..storage.landscape import load_landscapes
from ..storage.record import QUICK, read_record, recorded_devices
from ..workload import default_problems
from .files import belonging_to_nothing, generated_files
from .verified import not_verified

NAMES_SHOWN = 3
# To be done; to be done before a release, else worth doing; worth doing; a note on what could not be compared.
KINDS = ("hard", "unverified", "soft", "note")


@dataclasses.dataclass(frozen=True)
class Here:
    """The versions and GPUs of this machine."""

    versions: dict[str, Any]  # Triton, torch, and the driver, which is "unknown" without a GPU
    gpus: dict[str, dict[str, Any]]  # file name of a device -> its name and multiprocessors


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is out of date, as a sentence with the command that mends it."""

    kind: str  # of KINDS
    text: str


def this_machine() -> Here:
    """The GPUs and versions here; a GPU is only asked for its properties."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = map(torch.cuda.get_device_properties, range(count))
    gpus = {
        device_slug(gpu.name): {"device_name": gpu.name, "multiprocessors": gpu.multi_processor_count} for gpu in found
    }
    versions = {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}
    return Here(versions | {"driver": driver_version() if gpus else "unknown"}, gpus)


def findings(
    problems: list[Problem], device: str | None, folder: Path | None, here: Here | None = None
) -> Iterator[Finding]:
    """What is to be done, what is worth doing and what could not be compared, for ``device`` or for each with a record.

    Rows of other problems than the default ones are checked when all default problems are. The package's generated
    files are checked too, and whether the sources were verified, unless ``folder`` says that the record is elsewhere.
    """
    here = here or this_machine()
    devices = [device] if device is not None else recorded_devices(folder)
    if not devices:
        yield Finding(
            "hard",
            f"no record in {folder or HOME.name + '/winners'}: run {tune_into('--gpu auto', folder)} on a machine with a GPU",
        )
    unreadable = False
    for name in devices:
        try:
            yield from _device(problems, name, folder, here)
        except RecordError as error:  # noqa: PERF203 - a folder has a handful of records
            unreadable = True
            yield Finding("hard", str(error))
    if folder is None and not unreadable:
        yield from (Finding("hard", text) for text in _files())
    if folder is None and not INSTALLED and not OUTSIDE:  # an installed package has neither suites nor their records
        yield from (Finding("unverified", text) for name in devices if (text := not_verified(name)) is not None)


def _device(problems: list[Problem], device: str, folder: Path | None, here: Here) -> Iterator[Finding]:
    if device not in recorded_devices(folder):
        yield Finding("hard", f"{device}: no record: run {tune_into('--gpu auto', folder)} on it")
        return
    winners = read_record(device, folder)
    rows = []
    for problem in problems:
        row = next((w for w in winners if same_problem(w, problem)), None)
        if row is None:
            again = tune_into(f"--problems {problem.name}", folder)
            yield Finding("hard", f"{device}: {problem.name} has no row: {again}")
        else:
            rows.append(row)
    default = default_problems()
    if len(problems) == len(default):
        rows += [w for w in winners if not any(same_problem(w, p) for p in default)]
    yield from _hard(device, rows, here, folder)
    yield from _soft(device, rows, here, folder)
    yield from _landscapes(device)
    if device not in here.gpus:
        yield Finding(
            "note",
            f"{device} is not in this machine: its name, multiprocessors and driver were not compared; kernels, "
            "timing method, Triton and torch were",
        )


def _landscapes(device: str) -> Iterator[Finding]:
    """Landscapes of kernels whose text has changed: they still rank variants, but evidence from them is of another kernel."""
    stale = [one.problem.name for one in load_landscapes(device) if not one.fresh]
    if stale:
        yield Finding(
            "soft",
            f"{device}: worth recording again, {len(stale)} landscapes are of kernels whose source changed since: "
            f"{PROGRAM} landscape {','.join(stale)}",
        )


def _hard(device: str, rows: list[Winner], here: Here, folder: Path | None) -> Iterator[Finding]:
    now = {"method": METHOD, **here.gpus.get(device, {})}
    for row in rows:
        measured = row.environment
        found = [*changed_sources(row.digests, digests()), *differences(measured, now, HARD)]
        if device_slug(measured["device_name"]) != device:
            found.append(f"the device was {measured['device_name']}, the record is of {device}")
        if found:
            yield Finding("hard", f"{device}: {row.name} does not count: {'; '.join(found)}: {_again([row], folder)}")


def _soft(device: str, rows: list[Winner], here: Here, folder: Path | None) -> Iterator[Finding]:
    """One finding for each difference, with all rows that have it: one for each row would fill pages after a new Triton."""
    grouped: dict[str, list[Winner]] = {}
    for row in rows:
        for difference in differences(row.environment, here.versions, SOFT):
            grouped.setdefault(difference, []).append(row)
        if (before := row.environment.get("timing", row.environment["method"])) != TIMING:
            grouped.setdefault(f"it was timed by {shown(before)}, here by {TIMING!r}", []).append(row)
        if row.environment.get("search") == QUICK:
            grouped.setdefault("only the portfolio was measured (--quick)", []).append(row)
    for difference, found in grouped.items():
        which = "every row" if len(found) == len(rows) > NAMES_SHOWN else _names(found)
        again = tune_into("--gpu auto", folder) if len(found) > NAMES_SHOWN else _again(found, folder)
        yield Finding("soft", f"{device}: worth tuning again, {difference}: {which}: {again}")


def _names(rows: list[Winner]) -> str:
    names = ", ".join(row.name for row in rows[:NAMES_SHOWN])
    return names if len(rows) <= NAMES_SHOWN else f"{names} and {len(rows) - NAMES_SHOWN} more"


def _again(rows: list[Winner], folder: Path | None) -> str:
    return tune_into(f"--problems {','.join(row.name for row in rows)}", folder)


def _files() -> Iterator[str]:
    wanted = generated_files()
    mend = "install this package again" if INSTALLED and not OUTSIDE else f"{PROGRAM} --render"
    for name, text in wanted.items():
        path = HOME / name
        if not path.exists():
            yield f"{HOME.name}/{name} is missing: {mend}"
        elif path.read_text(encoding="utf-8") != text:
            yield f"{HOME.name}/{name} is not what the templates and records give: {mend}"
    for name in belonging_to_nothing(wanted):
        yield f"{HOME.name}/{name} belongs to nothing: {mend}"
