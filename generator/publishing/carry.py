"""Keep rows whose kernels changed in text only: a row measures machine code, and if that is the same, so is its time.

The kernels of a row are compiled twice for its GPU, with the Triton that it was measured with: from the revision that
it was measured at, and from today's sources. If a call takes the same steps, and every launch has the same machine
code, grid, numbers and options, the row gets the digests of today's texts. No GPU is needed.
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

# Name of a row -> {"digests": kernel -> digest, "code": its steps and machine code}, or {"error": why there is none}.
Codes = dict[str, Any]


class CarryError(SelectionError):
    """No row can be carried; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Carried:
    """The result of carrying a record."""

    winners: list[Winner]  # all rows of the record; kept rows have today's digests
    kept: list[str]  # names
    changed: dict[str, str]  # name of a row that must be measured again -> why


def codes_of(tree: Path, winners: list[Winner]) -> Codes:
    """The digests and machine code of rows in a tree of this repository, from a process that imports only that tree.

    Raises:
        CarryError: that process gave no answer.
    """
    asked = json.dumps(
        [
            # Without fields at their defaults: they may be newer than the tree.
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
    """The knobs of a variant, without those that are newer than some records and at their defaults."""
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
        # Python has extraction filters from 3.10.12 and 3.11.4 on; from 3.14 on "data" is the default.
        if hasattr(tarfile, "data_filter"):
            tree.extractall(folder, filter="data")
        else:
            tree.extractall(folder)  # noqa: S202 - git wrote the archive from this repository


def carry(winners: list[Winner], revision: str, ask: Callable[[Path, list[Winner]], Codes] = codes_of) -> Carried:
    """The record, with all rows kept whose machine code is the same as at a revision of this repository.

    Raises:
        CarryError: the revision is unknown, or the codes of a tree cannot be computed.
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
