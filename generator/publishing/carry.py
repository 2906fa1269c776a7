"""Keep rows whose kernels changed in text only: what was measured is machine code, and if that is the same, so is its time.

The kernels of a row are compiled twice for its GPU, from the revision that it was measured with and from what is here now,
with the Triton that it was measured with. If a call takes the same steps, and every launch comes to the same bytes, on the same
grid and with the same numbers, the row gets the digests of today's texts. No GPU is needed.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

from tuned.lookup.record import Winner

from ..places import GENERATOR, ROOT
from ..problem import SelectionError
from ..rendering.structures import fresh
from . import codes
from .files import fields_of

# Name of a row -> {"digests": kernel -> digest, "code": what its steps come to}, or {"error": why not}.
Codes = dict[str, Any]


class CarryError(SelectionError):
    """Rows cannot be carried at all; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Carried:
    """What became of a record."""

    winners: list[Winner]  # all of it, the rows that were kept with today's digests
    kept: list[str]  # names
    changed: dict[str, str]  # name of a row that must be measured again -> why


def codes_of(tree: Path, winners: list[Winner]) -> Codes:
    """What rows come to in a tree of this repository, computed by a process that imports that tree alone.

    Raises:
        CarryError: the tree cannot be asked.
    """
    asked = json.dumps(
        [
            # Without fields that may be newer than the tree, at their defaults.
            dataclasses.asdict(winner) | {"spec": fields_of(winner.spec), "variant": _knobs_of(winner.variant)}
            for winner in winners
        ]
    )
    environment = {name: value for name, value in os.environ.items() if name not in {"TRITON_INTERPRET", "PYTHONPATH"}}
    done = subprocess.run(  # noqa: S603 - a file of this package
        [sys.executable, str(Path(codes.__file__)), str(tree), GENERATOR],
        input=asked,
        capture_output=True,
        text=True,
        cwd=tree,
        env=environment,
        check=False,
    )
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CarryError(f"the kernels of {tree} could not be compiled: {last}") from error


def _knobs_of(variant: Any) -> dict[str, Any]:
    """The knobs of a variant, without those at their defaults that are newer than some records."""
    fields = dataclasses.fields(variant)
    return {
        f.name: getattr(variant, f.name)
        for f in fields
        if not (f.metadata["older"] and getattr(variant, f.name) == f.default)
    }


GIT = ("git", "-C", str(ROOT))


def commit_of(revision: str) -> str:
    """The commit that a revision of this repository names.

    Raises:
        CarryError: git does not know it.
    """
    named = subprocess.run([*GIT, "rev-parse", "--verify", f"{revision}^{{commit}}"], capture_output=True, check=False)  # noqa: S603
    if named.returncode:
        why = named.stderr.decode().strip().splitlines()
        raise CarryError(
            f"git has no revision {revision!r} here ({why[-1] if why else 'it said nothing'}): name a commit or a tag"
        )
    return named.stdout.decode().strip()


def checked_out(commit: str, folder: Path) -> None:
    """Put a commit of this repository into a folder."""
    data = subprocess.run([*GIT, "archive", commit], capture_output=True, check=True).stdout  # noqa: S603
    with tarfile.open(fileobj=io.BytesIO(data)) as tree:
        # Python has filters from 3.10.12 and 3.11.4 on, and from 3.14 on this one if none is named.
        if hasattr(tarfile, "data_filter"):
            tree.extractall(folder, filter="data")
        else:
            tree.extractall(folder)  # noqa: S202 - git wrote it, of this repository


def carry(winners: list[Winner], revision: str, ask: Callable[[Path, list[Winner]], Codes] = codes_of) -> Carried:
    """The record, with all rows kept whose machine code is what it was at a revision of this repository.

    Raises:
        CarryError: the revision is unknown, or a tree cannot be asked.
    """
    commit = commit_of(revision)
    changed = {w.name: "" for w in winners if not fresh(w.digests)}
    here = triton.__version__
    for winner in winners:
        measured = winner.environment.get("triton")
        if winner.name in changed and measured != here:
            changed[winner.name] = (
                f"it was measured with Triton {measured}, and this is {here}: carry it in an environment with that one"
            )
    asked = [w for w in winners if changed.get(w.name) == ""]
    if not asked:
        return Carried(winners, [], changed)
    with tempfile.TemporaryDirectory() as folder:
        checked_out(commit, Path(folder))
        before = ask(Path(folder), asked)
    now = ask(ROOT, asked)
    kept = {}
    for winner in asked:
        old, new = before.get(winner.name, {}), now.get(winner.name, {})
        if reason := old.get("error") or new.get("error"):
            changed[winner.name] = f"its kernels do not compile: {reason}"
        elif old.get("digests") != winner.digests:
            changed[winner.name] = f"it was not measured with the kernels of {revision}"
        elif old["code"] != new["code"]:
            changed[winner.name] = "its machine code is another"
        else:
            del changed[winner.name]
            environment = {**winner.environment, "carried": commit[:12]}
            kept[winner.name] = dataclasses.replace(winner, digests=new["digests"], environment=environment)
    return Carried([kept.get(w.name, w) for w in winners], list(kept), changed)
