"""The command line that all suites share: rows are measured one after another, each saved before the next begins."""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import record
from benchmarks.arguments import minutes

R = TypeVar("R", bound=record.Row[Any])
# Between two right results, of the largest value: thousands of measured ones were at most 0.016 apart.
MOST_APART = 0.05
DEFAULT_MINUTES = 9.0
RESULTS = Path(__file__).parent / "results"


class WrongResultError(Exception):
    """A call that is to be timed gives a wrong result."""


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest absolute value in some tensors; NaN if any value is NaN, which Python's max may skip."""
    return float(torch.stack([t.detach().abs().max().double().cpu() for t in tensors]).max())


def apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], scale: float = 1.0) -> float:
    """The largest difference between two results that are to be timed, over ``scale``.

    Raises:
        WrongResultError: the results are further apart than roundings make them, or a value is NaN.
    """
    found = largest(a.float() - b.float() for a, b in zip(ours, theirs, strict=True)) / scale
    if not found <= MOST_APART:
        raise WrongResultError(f"results are {found:.3g} apart, which is more than {MOST_APART} of the largest value")
    return found


def reason(error: Exception) -> str:
    """An exception as one line of a record."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def run(rows: Sequence[R], results: record.Results, measure: Callable[[R], dict[str, Any]], *, minutes: float) -> None:
    """Measure rows until the time is up, saving after each. A row that is left out, or fails, is recorded with its reason."""
    deadline = time.monotonic() + 60 * minutes
    for i, row in enumerate(rows):
        if time.monotonic() >= deadline:
            if row.key not in results.rows:  # one that was measured before, in this environment, stays
                results.skip(row, f"left out: {minutes} minutes were up")
            continue
        started = time.monotonic()
        try:
            measured = measure(row)
        except Exception as error:  # noqa: BLE001 (one row that fails must not cost the others)
            results.skip(row, reason(error))
            print(f"[{i + 1}/{len(rows)}] {row.key}: {traceback.format_exc(limit=-2)}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        results.add(row, measured)
        seconds = time.monotonic() - started
        print(f"[{i + 1}/{len(rows)}] {row.key}: {record.verdict(measured)}  ({seconds:.1f} s)", flush=True)


def command(  # noqa: PLR0913 (what a benchmark is)
    arguments: Sequence[str] | None,
    *,
    prog: str,
    about: str | None,
    rows: Sequence[R],
    measure: Callable[[R], dict[str, Any]],
    packages: Mapping[str, str],
    folder: Path,
    quick: Callable[[Sequence[R]], Sequence[R]] | None = None,
) -> int:
    """The command line of a benchmark: 0; or 1 without a GPU, if no row has the given text, or if --whole skipped a row.

    Each suite runs in its own process, so that a peer that breaks its process costs one suite and not those after it.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=about)
    parser.add_argument("--out", type=Path, default=folder, help="folder of the results")
    parser.add_argument("--minutes", type=minutes, default=DEFAULT_MINUTES, help="begin no row after this many")
    parser.add_argument("--rows", metavar="TEXT", help="only the rows with this text in their key; the others stay")
    names = list(dict.fromkeys(row.suite for row in rows))
    parser.add_argument(
        "--suite", "--only", action="append", choices=names, help="only this one, or these; the rows of others stay"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the rows and what judges them; needs no GPU")
    parser.add_argument("--whole", action="store_true", help="however long it takes; exit 1 if a row is skipped")
    parser.add_argument("--missing", action="store_true", help="only the rows that the results lack; the others stay")
    parser.add_argument("--replace", action="store_true", help="drop rows of another environment from the results")
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick.__doc__)
    options = parser.parse_args(arguments)
    if quick is not None and options.quick:
        rows = quick(rows)
    suites = options.suite or names
    chosen = [row for row in rows if row.suite in suites and (options.rows is None or options.rows in row.key)]
    if not chosen:
        print(f"no row's key has the text {options.rows!r}; --dry-run lists the keys")
        return 1
    if options.dry_run:
        print(*(f"{row.key}  [{row.bar or 'no bar of its own'}]" for row in chosen), f"{len(chosen)} rows", sep="\n")
        return 0
    if not torch.cuda.is_available():
        print(f"{prog} measures on a GPU, and PyTorch sees none here; --dry-run lists the rows")
        return 1
    if options.rows is None and len(suites) > 1:
        given = [f"--{name}" for name in ("quick", "whole", "missing", "replace") if getattr(options, name, False)]
        partly = options.missing or getattr(options, "quick", False)
        if set(suites) == set(names) and not partly:  # every row is measured again
            given = [*dict.fromkeys((*given, "--replace"))]
        return _apart([prog, *given], suites, options)
    again = suites if options.rows is None and not options.missing else ()
    results = record.Results.open(options.out, again, packages)
    if results.others and not options.replace:
        print(
            f"{results.path} has rows of another environment, which would be lost: {'; '.join(results.others)}. Give --out another "
            "folder, or --replace"
        )
        return 1
    if options.missing:
        chosen = [row for row in chosen if row.key not in results.rows]
    run(chosen, results, measure, minutes=math.inf if options.whole else options.minutes)
    print(f"{len(results.rows)} rows in {results.path}, {len(results.skipped)} skipped")
    for key, why in results.skipped.items():
        print(f"  skipped {key}: {why}")
    return 1 if options.whole and any(row.key in results.skipped for row in chosen) else 0


def _apart(command: Sequence[str], suites: Sequence[str], options: argparse.Namespace) -> int:
    """Run each suite in its own process, one after the other; all share the minutes. Returns the worst exit code."""
    deadline = time.monotonic() + 60 * options.minutes
    worst = 0
    for suite in suites:
        left = max(0.0, deadline - time.monotonic()) / 60
        arguments = ["--suite", suite, "--out", str(options.out), "--minutes", f"{left:.2f}"]
        worst = max(worst, subprocess.run([sys.executable, "-m", *command, *arguments], check=False).returncode)  # noqa: S603 - our own words
    return worst
