"""What somebody else measured on their GPU, as one archive that can be judged without that GPU.

It holds the record, and for readers the environments and kernels that it was measured with, which follow from the
record. Whoever makes an archive and whoever receives it call the same function, ``verdict``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from tuned.families.choices import choices
from tuned.lookup.record import MEASURED, METHOD, RecordError, Winner, changed_sources, device_slug, shown, winners_of

from ..estimating.least import card_of, least_possible_us, memory_us
from ..estimating.targets import Target
from ..evaluation.cards import no_room, rooms
from ..measuring.stage import dependent
from ..places import PROGRAM, TUNE
from ..problem import Problem
from ..processes.compiler import compiled
from ..rendering.structures import digests
from ..searching.pool import same_problem
from ..storage.record import QUICK, record_text
from ..workload import WORKLOADS, default_problems
from .archive import MANIFEST, MOST_BYTES, ArchiveError, packed, read_json, signed, unpacked

WITH = "measured_with.json"
KERNELS = 24  # rows of a contribution whose kernels are compiled: half a minute on one core
MOST_ROWS = 4096
MOST_NUMBER = 2**20  # of a size or a width
MOST_TOKENS = 2**24  # of all sizes together
LEAST_CAPABILITY = 70  # the instructions by which kernels wait need sm_70
MOST_MULTIPROCESSORS = 1024
MOST_SPREAD = 0.5  # of a time
MOST_OVER_DEFAULT = 1.1  # the default variant is measured beside the winner
# Both times are measured behind a kernel like their own, where a default with dependent launch may gain this much; a
# winner is chosen behind a foreign kernel too.
BEGUN_EARLY_US = 1.0
SLOWEST = 100, 50.0  # a copy takes at most so many times the least time of the fastest such card, plus microseconds
AGAIN = f"measure it again with {TUNE} --gpu auto --problems {{name}}, or take the row out"


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A record that somebody submits, and the digest that identifies it."""

    winners: tuple[Winner, ...]
    digest: str

    @property
    def environment(self) -> dict[str, Any]:
        """The environment of the first row: all rows must agree in the fields that are used."""
        return self.winners[0].environment

    @property
    def device(self) -> str:
        """The file name of the device."""
        return str(self.environment["device"])

    @property
    def name(self) -> str:
        """The file name of the archive, without its ending."""
        return f"{self.device}-{self.digest[:12]}"

    @property
    def card(self) -> Target:
        """The card, by its capability and multiprocessors."""
        return card_of(self.device, self.environment["capability"], self.environment["multiprocessors"])


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why a contribution is not accepted, as sentences (none if it is); and the rows whose kernels were compiled."""

    contribution: Contribution | None
    reasons: tuple[str, ...]
    compiled: tuple[Winner, ...] = ()
    kernels: int = 0  # different kernels among the rows


# Making ---------------------------------------------------------------------------------------------------------------


def made(winners: list[Winner]) -> tuple[bytes, Contribution]:
    """The archive of a record, and its Contribution; the same rows, the same bytes. Nothing is judged yet.

    Raises:
        RecordError: there are no rows.
    """
    if not winners:
        raise RecordError(f"a contribution must have a row, and the record has none: run {TUNE} --gpu auto first")
    device = winners[0].environment["device"]
    record = record_text(device, winners)
    # Read the record back as a reader will: a row older than a knob then has the knob's default.
    winners = winners_of(record, f"{device}.json")
    files = signed({f"{device}.json": record.encode(), WITH: _measured_with(winners)})
    return packed(files), Contribution(tuple(winners), _digest(files))


def _digest(files: dict[str, bytes]) -> str:
    return str(json.loads(files[MANIFEST])["digest"])


def _measured_with(winners: list[Winner]) -> bytes:
    """Each environment with its number of rows, and the digest of each kernel, as JSON."""
    names = sorted({name for w in winners for name in w.environment})
    counted = Counter(json.dumps([(n, w.environment[n]) for n in names if n in w.environment]) for w in winners)
    content = {
        "environments": [{**dict(json.loads(e)), "rows": count} for e, count in sorted(counted.items())],
        "kernels": dict(sorted({k: d for w in winners for k, d in w.digests.items()}.items())),
    }
    return (json.dumps(content, indent=1) + "\n").encode()


# Judging --------------------------------------------------------------------------------------------------------------


def read_archive(path: Path) -> bytes:
    """The bytes of an archive, at most one more than an archive may have.

    Raises:
        ArchiveError: the path is not a file.
    """
    if not path.is_file():
        raise ArchiveError(f"an archive is a file that {PROGRAM} submit wrote, and {path} is none")
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def verdict(data: bytes, compiler: concurrent.futures.Executor, most: int = KERNELS) -> Verdict:
    """Whether an archive would be accepted; kernels of at most so many rows are compiled."""
    try:
        contribution = _read(data)
    except (ArchiveError, RecordError) as error:
        return Verdict(None, (str(error),))
    reasons = tuple(_whole(contribution)) or tuple(
        f"{row.name}: {reason}: {AGAIN.format(name=row.name)}"
        for row in contribution.winners
        if (reason := why_not(row, contribution.card)) is not None
    )
    if reasons:
        return Verdict(contribution, reasons)
    every = kernels_of(contribution.winners)
    sample = sample_of(every, most)
    card = contribution.card
    waiting = [compiler.submit(rooms, _problem(row), row.variant, card.architecture) for row in sample]
    found = [(row, no_room(compiled(future), card)) for row, future in zip(sample, waiting, strict=True)]  # type: ignore[arg-type]
    reasons = tuple(
        f"{row.name}: its kernels must run on {card.architecture}, and the variant {reason} (Triton {triton.__version__} here, "
        f"{row.environment['triton']} where it was measured): {AGAIN.format(name=row.name)}"
        for row, reason in found
        if reason is not None
    )
    return Verdict(contribution, reasons, tuple(sample), len(every))


def _read(data: bytes) -> Contribution:
    """The contribution in an archive.

    Raises:
        ArchiveError: this project did not make the archive.
        RecordError: the record is not valid, or measured_with.json does not follow from it.
    """
    files = unpacked(data)
    names = sorted(set(files) - {WITH})
    if len(names) != 1 or WITH not in files:
        raise ArchiveError(
            f"an archive must have {WITH} and one record, got {', '.join(sorted(files)) or 'nothing'}: make it again with "
            f"{PROGRAM} submit"
        )
    record = files[names[0]]
    read_json(record, names[0])  # UTF-8
    winners = winners_of(record.decode("utf-8"), names[0])
    if not 0 < len(winners) <= MOST_ROWS:
        raise RecordError(f"a record must have 1 to {MOST_ROWS} rows to be accepted, got {len(winners)}")
    if names[0] != f"{winners[0].environment['device']}.json":
        raise RecordError(f"the record of {winners[0].environment['device']} must be called so, got {names[0]}")
    if files[WITH] != _measured_with(winners):
        raise RecordError(f"{WITH} must be what the record says, and is not: make it again with {PROGRAM} submit")
    return Contribution(tuple(winners), _digest(signed(files)))


def _whole(contribution: Contribution) -> Iterator[str]:
    """The reasons against the record as a whole."""
    first = contribution.environment
    if first["device"] != device_slug_or_none(first["device_name"]):
        yield (
            f"the device must be called as its file, and {shown(first['device_name'])} is not {first['device']}: "
            f"run {TUNE} --gpu auto on it"
        )
    for name in ("device_name", "capability", "multiprocessors"):
        found = list(dict.fromkeys(row.environment[name] for row in contribution.winners))
        if len(found) > 1:
            yield f"all rows must be of one card, and {name} is {' and '.join(map(shown, found[:3]))}: tune the others again"
    if not first["capability"] >= LEAST_CAPABILITY:
        yield (
            f"the compute capability must be {LEAST_CAPABILITY / 10} or later, got {first['capability'] / 10}: GPUs that are "
            "no NVIDIA's, or older, cannot be measured yet"
        )
    if first["multiprocessors"] > MOST_MULTIPROCESSORS:
        yield f"a card has at most {MOST_MULTIPROCESSORS} multiprocessors, got {first['multiprocessors']}"
    for what, of in (("name", lambda w: w.name), ("problem", lambda w: (w.family, w.spec, w.size))):
        twice = [key for key, count in Counter(map(of, contribution.winners)).items() if count > 1]
        if twice:
            yield f"each {what} must have one row, and {len(twice)} have more, such as {shown(twice[0])}: take one out"
    default = {problem.name: problem for problem in default_problems()}
    for row in contribution.winners:
        if row.name in default and not same_problem(row, default[row.name]):
            yield f"{row.name} must be the problem of this name, which has other sizes here: call the row otherwise"
            return


def device_slug_or_none(name: str) -> str | None:
    """The file name of a device; None if the device's name has no letter or digit."""
    try:
        return device_slug(name)
    except ValueError:
        return None


def why_not(row: Winner, card: Target) -> str | None:
    """Why a row is not accepted, by the rules that need no compiler; or None."""
    family = WORKLOADS[row.family].family
    return (
        _too_large(row)
        or family.rejection(row.spec, row.size, row.variant, card.capability, card.processors)
        or next(iter(changed_sources(row.digests, digests())), None)
        or _other_method(row)
        or next(_implausible(row, card), None)
    )


def _too_large(row: Winner) -> str | None:
    """Why the sizes are too large, or None: nobody measures such sizes, and judging them would take minutes."""
    numbers = [n for part in (row.spec, row.size) for n in _numbers(dataclasses.asdict(part))]
    if max(numbers, default=0) > MOST_NUMBER:
        return f"sizes and widths are at most {MOST_NUMBER}, got {max(numbers)}"
    if (tokens := math.prod(_numbers(dataclasses.asdict(row.size)))) > MOST_TOKENS:
        return f"the sizes together are at most {MOST_TOKENS}, got {tokens}"
    memory, needed = row.environment.get("memory_bytes"), WORKLOADS[row.family].tensor_bytes(row.spec, row.size)
    if type(memory) is int and needed > memory:
        return f"the tensors must fit the memory of {memory} bytes, and are {needed}"
    return None


def _numbers(values: dict[str, Any]) -> list[int]:
    every = [n for value in values.values() for n in (value if isinstance(value, list | tuple) else [value])]
    return [n for n in every if type(n) is int]


def _other_method(row: Winner) -> str | None:
    method = row.environment["method"]
    return None if method == METHOD else f"the timing method must be {METHOD!r}, got {shown(method)}"


def _implausible(row: Winner, card: Target) -> Iterator[str]:
    """Numbers that no measurement gives."""
    moved = WORKLOADS[row.family].bytes_moved(row.spec, row.size)
    if row.bytes_moved != moved:
        yield f"bytes_moved must be {moved} for these sizes, got {row.bytes_moved}"
    if row.error > 1:
        yield f"the error must be at most 1 of the tolerance, got {row.error:g}"
    if not row.trials:
        yield "at least one variant must have been measured, got trials=0"
    if row.spread_us > MOST_SPREAD * row.median_us:
        yield f"the spread must be at most {MOST_SPREAD:g} of the time, got {row.spread_us:g} of {row.median_us:g} us"
    least = least_possible_us(_problem(row), row.variant, card)
    if row.median_us < least:
        yield f"it must take at least {least:.4g} us on this card, got median_us={row.median_us:g}"
    least = memory_us(moved, card)
    for name in ("floor_us", "eager_us", "default_us"):
        us = getattr(row, name)
        if (us or name != "default_us") and us < least:
            yield f"{moved} bytes take at least {least:.4g} us on this card, got {name}={us:g}"
    if row.floor_us > (most := SLOWEST[0] * least + SLOWEST[1]):
        yield f"a copy of {moved} bytes takes at most {most:.4g} us on this card, got floor_us={row.floor_us:g}"
    early = 0.0 if dependent(row.variant) else BEGUN_EARLY_US
    if row.default_us and row.median_us > MOST_OVER_DEFAULT * row.default_us + early:
        yield f"a winner is not slower than the default variant, got {row.median_us:g} and {row.default_us:g} us"


def _problem(row: Winner) -> Problem:
    return Problem(row.name, row.family, row.spec, row.size)


def kernels_of(winners: tuple[Winner, ...]) -> list[Winner]:
    """One row for each (family, spec, variant): Triton compiles these separately, apart from specialisations on sizes."""
    found: dict[Any, Winner] = {}
    for row in winners:
        found.setdefault((row.family, row.spec, row.variant), row)
    return list(found.values())


def sample_of(rows: list[Winner], most: int) -> list[Winner]:
    """At most ``most`` rows: up to half are the largest tile of each family, then of each text; the others are evenly spaced."""
    if len(rows) <= most:
        return rows
    ordered = sorted(rows, key=lambda row: (-_tile(row), row.name))
    largest: dict[Any, Winner] = {}
    for row in ordered:
        largest.setdefault(WORKLOADS[row.family].family.kernel_names(row.spec, row.variant), row)
    of_family: dict[str, Winner] = {}
    for row in largest.values():
        of_family.setdefault(row.family, row)
    chosen = sorted(largest.values(), key=lambda row: row is not of_family[row.family])[: most // 2]
    rest = [row for row in ordered if row not in chosen]
    left = most - len(chosen)
    return chosen + [rest[i * len(rest) // left] for i in range(left)]


def _tile(row: Winner) -> float:
    """Elements of a tile for each warp."""
    knobs = (n for n in choices(type(row.variant)) if n.startswith("block_"))
    return math.prod(getattr(row.variant, n) for n in knobs) / getattr(row.variant, "num_warps", 1)


# Telling --------------------------------------------------------------------------------------------------------------


def pull_request(contribution: Contribution, archive: str) -> str:
    """The title and the body of a pull request that brings an archive."""
    rows, first = contribution.winners, contribution.environment
    quick = sum(row.environment.get("search") == QUICK for row in rows)
    families = ", ".join(f"{count} {name}" for name, count in sorted(Counter(row.family for row in rows).items()))
    labels = {
        "device_name": "device", "capability": "compute capability", "multiprocessors": "multiprocessors",
        "driver": "driver", "torch": "torch", "triton": "Triton", "method": "timing method",
    }  # fmt: skip
    assert set(labels) <= set(MEASURED)
    facts = {
        label: ", ".join(sorted({str(row.environment[name]) for row in rows})) for name, label in labels.items()
    } | {
        "rows": f"{len(rows)}: {families}" + (f"; {quick} of a quick search" if quick else ""),
        "digest": contribution.digest,
    }
    lines = [
        f"Rows of {first['device_name']}: {len(rows)} winners",
        "",
        f"`python tune.py --gpu auto` measured these rows. `{archive}` holds them.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {label} | {value.replace('|', ' ')} |" for label, value in facts.items()),
        "",
        "How to check it, without the GPU:",
        "",
        f"    python tune.py check-submission contributions/{archive}",
        "",
        "How to use it before it is merged:",
        "",
        f"    python tune.py check-submission contributions/{archive} --to tables",
        "    TUNED_TABLES=tables python model.py",
    ]
    return "\n".join(lines) + "\n"
