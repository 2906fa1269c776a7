"""Calls that no row was measured for: said once a GPU of another model, and kept for tuning where TUNED_RECORD says.

Called where a call is decided for the first time, never where a decision is reused: a model that runs pays nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

from tuned.lookup.lookup import has_rows

if TYPE_CHECKING:
    from tuned.families.family import Family
    from tuned.lookup.lookup import Choice, Gpu

MAX_RECORDED = 4096  # problems a process; lengths that never come twice would fill the disk otherwise
ROOT = __name__.partition(".")[0]
_LOCK = threading.Lock()
_TOLD: set[str] = set()  # devices, and files that could not be written
_RECORDED: set[tuple[str, str]] = set()  # (file, line)


class TunedWarning(RuntimeWarning):
    """No row was measured on this model of GPU: it works, and tuning would make it faster.

    Python's own filters silence it: ``warnings.filterwarnings("ignore", category=tuned.TunedWarning)``, or in the
    environment ``PYTHONWARNINGS="ignore:nothing was tuned on"``.
    """


def note(family: Family, spec: Any, size: Any, choice: Choice) -> None:
    """Take note of a call that a kernel serves; what was measured for it and on this GPU is no news.

    Warns TunedWarning at the first call without a row on a GPU that has none at all. Appends the problem to the file
    that TUNED_RECORD names, each once a process.
    """
    gpu = choice.gpu
    if choice.rule == "winner" or gpu is None:
        return
    if not has_rows(gpu) and _first(gpu.device):
        text = (
            f"nothing was tuned on {gpu.name or gpu.device} ({_size_of(gpu)}). This call gets: {choice.rule}: {choice.why}. "
            "To tune this GPU, in a checkout of this project: python tune.py --gpu auto; with --quick it takes a minute. "
            "This is said once."
        )
        warnings.warn(text, TunedWarning, stacklevel=_outside())
    if path := os.environ.get("TUNED_RECORD"):
        _record(path, family, spec, size)


def _outside() -> int:
    """The stack level, for the function that asks, of the line outside of this package that made the call."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - no public way that makes no list of all frames
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == ROOT:
        level, frame = level + 1, frame.f_back
    return level


def _size_of(gpu: Gpu) -> str:
    architecture = f"sm_{gpu.capability}, " if gpu.capability else ""
    return f"{architecture}{gpu.multiprocessors} multiprocessors"


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
            stacklevel=3,
        )
        return
    try:
        # One write of under 4 KB at the file's end: processes that share the file do not tear each other's lines.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    except OSError as error:  # a model must not stop for it
        if _first(path):
            warnings.warn(f"TUNED_RECORD: {path} cannot be written: {error}", RuntimeWarning, stacklevel=3)
