"""The record of a device, which holds its measured winners: read it, and write it whole or not at all."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tuned.lookup.record import SCHEMA, Winner, load_record, winners_of

from ..disk import folder_lock, write_if_different
from ..places import HOME, OWN

WINNERS = HOME / "winners"
QUICK = "quick"  # environment["search"] of a row for which only a portfolio was measured


def record_path(device: str, folder: Path | None = None) -> Path:
    """The path of a device's record."""
    return (folder or OWN or WINNERS) / f"{device}.json"


def read_record(device: str, folder: Path | None = None) -> list[Winner]:
    """The winners of a device, none if it has no record yet; shipped winners are added to a user's own record."""
    path = record_path(device, folder)
    found = load(path) if path.exists() else []
    if folder is None and OWN:
        measured = {(w.family, w.spec, w.size) for w in found}
        found += [w for w in read_record(device, WINNERS) if (w.family, w.spec, w.size) not in measured]
    return found


def load(path: Path) -> list[Winner]:
    """As ``load_record``, in less time for a text that was read before: a command reads the same record several times."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return load_record(path)  # it says what is wrong
    return list(_winners(text, path.name))


@functools.lru_cache(maxsize=16)
def _winners(text: str, name: str) -> tuple[Winner, ...]:
    return tuple(winners_of(text, name))


def recorded_devices(folder: Path | None = None) -> list[str]:
    """The devices that have a record, sorted."""
    return sorted(
        {path.stem for one in ((folder,) if folder else (OWN or WINNERS, WINNERS)) for path in one.glob("*.json")}
    )


def named(device: str, devices: list[str]) -> list[str]:
    """The devices that a name means: the one of exactly this name, or all whose names contain it ("h200", "NVIDIA H200")."""
    part = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return [part] if part in devices else [name for name in devices if part and part in name]


def save_winner(winner: Winner, folder: Path | None = None) -> Path:
    """Put a winner into its device's record, in place of an older one of the same problem."""
    return save_winners([winner], folder)


def save_winners(winners: Sequence[Winner], folder: Path | None = None) -> Path:
    """Put winners of one device into its record, in place of older ones of the same problems; the other rows stay."""
    device = winners[0].environment["device"]
    path = record_path(device, folder)
    new = {(w.family, w.spec, w.size) for w in winners}
    with folder_lock(path.parent):  # two tuners on one record: each reads, adds and writes while the other waits
        for half in path.parent.glob(f".{path.name}.*"):  # left by a tuner that was killed while it wrote
            half.unlink()
        others = [w for w in read_record(device, path.parent) if (w.family, w.spec, w.size) not in new]
        write_record(path, device, [*others, *winners])
    return path


def write_record(path: Path, device: str, winners: list[Winner]) -> None:
    """Write the record of a device, whole, if it differs from the present file."""
    write_if_different(path, record_text(device, winners))


def record_text(device: str, winners: list[Winner]) -> str:
    """The record as JSON, one winner a line, sorted."""
    ordered = sorted(winners, key=lambda w: (w.family, w.name))
    rows = ",\n".join("    " + json.dumps(dataclasses.asdict(w), sort_keys=True) for w in ordered)
    head = (
        f'{{\n  "format": "tuned-winners",\n  "schema": {SCHEMA},\n  "device": {json.dumps(device)},\n  "winners": [\n'
    )
    return f"{head}{rows}\n  ]\n}}\n"
