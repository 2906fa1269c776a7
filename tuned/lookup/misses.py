"""Calls that no row was measured for: a warning once per untuned GPU, and the file of problems that TUNED_RECORD names.

``note`` runs when a call is decided for the first time, never when a decision is reused: a running model pays nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import threading
import warnings
from typing import Any

from tuned.families.family import Family
from tuned.families.registry import FAMILIES
from tuned.lookup.caller import outside
from tuned.lookup.lookup import Choice, Gpu, choose, has_rows
from tuned.lookup.place import TUNE, expanded
from tuned.lookup.record import RecordError, build, parsed, shown

MAX_CHOICES = 4096  # (spec, size, GPU) triples whose choice is remembered, of each family
MAX_RECORDED = 4096  # problems per process; otherwise ever new lengths would fill the disk
_LOCK = threading.Lock()
_TOLD: set[str] = set()  # devices and unwritable files that a warning was given about
_RECORDED: set[tuple[str, str]] = set()  # (file, line)


class TunedWarning(RuntimeWarning):
    """Calls work, and could be faster: no row was measured on this model of GPU, or Triton cannot compile a kernel.

    Python's filters silence it: ``warnings.filterwarnings("ignore", category=tuned.TunedWarning)``, or in the
    environment ``PYTHONWARNINGS="ignore:nothing was tuned on"``.
    """


def note(family: Family, spec: Any, size: Any, choice: Choice) -> None:
    """Note a call, unless the row that was measured for it on this GPU names its kernel.

    Warns TunedWarning at the first call on a GPU that has no row at all. Appends the problem to the file that
    TUNED_RECORD names, each problem once per process.
    """
    gpu = choice.gpu
    if choice.rule == "winner" or gpu is None or gpu.asked:
        return
    if not has_rows(gpu) and _first(gpu.device):
        architecture = f"sm_{gpu.capability}, " if gpu.capability else ""
        text = (
            f"nothing was tuned on {gpu.name or gpu.device} ({architecture}{gpu.multiprocessors} multiprocessors). This call gets: {choice.rule}: {choice.why}. "
            f"To tune this GPU: {TUNE} --gpu auto; with --quick it takes minutes. "
            "This warning is given once."
        )
        warnings.warn(text, TunedWarning, stacklevel=outside())
    if path := os.environ.get("TUNED_RECORD"):
        _record(path, family, spec, size)


def variants(family: Family, *, noting: bool = True) -> Any:
    """A function (spec, size, gpu) -> variant or None, which chooses and notes once for all equal calls of a family."""

    @functools.lru_cache(maxsize=MAX_CHOICES)
    def variant_of(spec: Any, size: Any, gpu: Gpu) -> Any:
        choice = choose(family, spec, size, gpu)
        if noting:
            note(family, spec, size, choice)
        return choice.variant

    return variant_of


class Moments:
    """The choices of a family whose ``doubt`` differs between calls and CUDA graphs."""

    def __init__(self, family: Family, called: Family) -> None:
        self._families = called, family
        self.variants = variants(called), variants(family, noting=False)

    def choice_of(self, spec: Any, size: Any, gpu: Gpu, captured: bool) -> Choice:  # noqa: FBT001
        """The choice in a CUDA graph if ``captured``, else as a call."""
        return choose(self._families[captured], spec, size, gpu)

    def variant_of(self, spec: Any, size: Any, gpu: Gpu, captured: bool) -> tuple[Any, bool]:  # noqa: FBT001
        """(the variant in a CUDA graph if ``captured``, else as a call, or None; whether both get the same)."""
        found = [variant_of(spec, size, gpu) for variant_of in self.variants]
        return found[captured], found[0] == found[1]


def recorded(line: str, where: str) -> tuple[str, Any, Any]:
    """(family, spec, size) of a line of a file that TUNED_RECORD named.

    Raises:
        RecordError: the line is no problem; ``where`` begins the message.
    """
    try:
        values = parsed(line)
    except ValueError as error:
        raise RecordError(f"{where} is not JSON ({error}): delete the line") from error
    return problem_of(values, where)


def problem_of(values: Any, where: str) -> tuple[str, Any, Any]:
    """(family, spec, size) of a problem as TUNED_RECORD writes it.

    Raises:
        RecordError: it is no problem; ``where`` begins the message.
    """
    if not isinstance(values, dict) or set(values) != {"family", "spec", "size"}:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise RecordError(f"{where} must have the fields ['family', 'size', 'spec'], got {found}")
    family = FAMILIES.get(values["family"]) if isinstance(values["family"], str) else None
    if family is None:
        raise RecordError(f"{where}: family must be one of {sorted(FAMILIES)}, got {shown(values['family'])}")
    spec = build(family.spec_type, values["spec"], f"{where}: spec", may_lack=True)
    size = build(family.size_type, values["size"], f"{where}: size")
    for name, value in dataclasses.asdict(size).items():
        if value < 1:
            raise RecordError(f"{where}: size.{name} must be at least 1, got {value}")
    return family.name, spec, size


def _first(what: str) -> bool:
    with _LOCK:
        new = what not in _TOLD
        _TOLD.add(what)
    return new


def _record(path: str, family: Family, spec: Any, size: Any) -> None:
    problem = {"family": family.name, "spec": dataclasses.asdict(spec), "size": dataclasses.asdict(size)}
    line = json.dumps(problem, sort_keys=True) + "\n"
    with _LOCK:
        if (path, line) in _RECORDED or len(_RECORDED) > MAX_RECORDED:
            return
        _RECORDED.add((path, line))
        full = len(_RECORDED) > MAX_RECORDED
    if full:
        warnings.warn(
            f"TUNED_RECORD: {path} has {MAX_RECORDED} problems of this process; no more are recorded",
            RuntimeWarning,
            stacklevel=outside(),
        )
        return
    try:
        # One append of less than 4 KB: processes that share the file do not mix their lines.
        file = os.open(expanded(path), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # A process that ended while it wrote, or a full disk, leaves a line without its end.
            torn = os.fstat(file).st_size > 0 and os.pread(file, 1, os.fstat(file).st_size - 1) != b"\n"
            os.write(file, ("\n" * torn + line).encode())
        finally:
            os.close(file)
    except OSError as error:  # a model must not stop because of it
        if _first(path):
            warnings.warn(
                f"TUNED_RECORD: {path} cannot be written: {error}; name a file in a folder that is there and can be written",
                RuntimeWarning,
                stacklevel=outside(),
            )
