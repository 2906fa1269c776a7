"""What was verified on a GPU: one digest over all that ships, and whether a device's suites passed with that digest.

Only the standard library is imported, so that any Python can compute the digest of a checkout.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from ..places import INSIDE, PACKAGE, RESULTS

FOLDER = RESULTS / "verified"
SUITES = ("plain", "gpu", "fuzz", "sanitizers")
AGAIN = "make verify on that GPU"


class VerifiedError(ValueError):
    """A file is not a valid record; the message names the file and says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """How one suite ended. Skipped tests are those that the machine could not run."""

    name: str  # of SUITES
    passed: int
    failed: int  # at least one if the suite did not come to its end
    skipped: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Verified:
    """The record of a device: which suites were run, on which sources, in which environment."""

    environment: dict[str, Any]
    kernels: str  # the digest
    suites: tuple[Suite, ...]


# The digest -----------------------------------------------------------------------------------------------------------


def digest(package: Path = PACKAGE) -> str:
    """Twelve hexadecimal digits over the kernels, tables, records and source of the runtime, and the names of the files.

    The digest is over syntax trees without docstrings, and over the records' values: it does not depend on comments,
    layout or the version of Python.
    """
    found = hashlib.sha256()
    for name, path in shipped(package):
        text = path.read_text(encoding="utf-8")
        record = path.suffix == ".json"
        meaning = json.dumps(json.loads(text), sort_keys=True) if record else _meaning(text)
        found.update(f"{name}\0{meaning}\0".encode())
    return found.hexdigest()[:12]


def shipped(package: Path = PACKAGE) -> list[tuple[str, Path]]:
    """(name below the package, path) of every file that the digest covers, in its order; the generator is not covered."""
    paths = [*package.rglob("*.py"), *(package / "winners").glob("*.json")]
    named = sorted((path.relative_to(package).as_posix(), path) for path in paths)
    return [(name, path) for name, path in named if not name.startswith(f"{INSIDE}/")]


@functools.lru_cache(maxsize=1024)
def _meaning(source: str) -> str:
    """The syntax tree of a source as text; cached, since a process may take the digest again when few files have changed."""
    parts: list[str] = []
    _tree(ast.parse(source), parts)
    return "".join(parts)


def _tree(node: Any, parts: list[str]) -> None:
    """Append a syntax tree as text that is the same for every Python from 3.10 on.

    ast.dump and ast.unparse are not the same: Python 3.12 adds a field for type parameters and changes quotes in
    f-strings, and 3.13 leaves out empty fields. Here empty fields are always left out, so that fields of later Pythons
    change nothing.
    """
    if isinstance(node, ast.Constant):
        parts.append(f"{type(node.value).__name__} {node.value!a}")
    elif isinstance(node, list):
        parts.append("[")
        for item in node:
            _tree(item, parts)
            parts.append(",")
        parts.append("]")
    elif isinstance(node, ast.AST):
        parts.append(f"{type(node).__name__}(")
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list):
                value = _without_docstring(node, value)
            if name == "values" and isinstance(node, ast.JoinedStr):
                value = _joined(node.values)
            if value is None or value == []:
                continue
            parts.append(f"{name}=")
            _tree(value, parts)
            parts.append(";")
        parts.append(")")
    else:
        parts.append(ascii(node))


def _without_docstring(node: ast.AST, body: list[Any]) -> list[Any]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return body[1:] if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None else body


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, with the text between expressions in one piece: 3.12 leaves empty pieces in formats."""
    found: list[ast.expr] = []
    for value in values:
        last = found[-1] if found else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            found[-1] = ast.Constant(str(last.value) + str(value.value))
        elif not isinstance(value, ast.Constant) or value.value:
            found.append(value)
    return found


# The record -----------------------------------------------------------------------------------------------------------


def verified_path(device: str, folder: Path = FOLDER) -> Path:
    """Where the record of a device lies."""
    return folder / f"{device}.json"


def read_verified(path: Path) -> Verified:
    """The record in a file.

    Raises:
        VerifiedError: the file is not a valid record.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        suites = tuple(_suite(**suite) for suite in content["suites"])
        return Verified(dict(content["environment"]), str(content["kernels"]), suites)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VerifiedError(f"{path.name} is no record of what was verified ({error!r}): {AGAIN}") from error


def _suite(*, name: str, passed: int, failed: int, skipped: int, seconds: float) -> Suite:
    for count in (passed, failed, skipped):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"a count of suite {name!r} is {count!r}")
    return Suite(name, passed, failed, skipped, float(seconds))


def verified_text(verified: Verified) -> str:
    """The record as JSON, suites in the order of SUITES."""
    ordered = sorted(verified.suites, key=lambda suite: SUITES.index(suite.name))
    content = {
        "environment": verified.environment,
        "kernels": verified.kernels,
        "suites": [dataclasses.asdict(suite) for suite in ordered],
    }
    return json.dumps(content, indent=1) + "\n"


def not_verified(device: str, folder: Path = FOLDER, package: Path = PACKAGE) -> str | None:
    """Why the sources here are not verified on a device, as a sentence with the way out; None if they are."""
    path = verified_path(device, folder)
    if not path.exists():
        return f"{device}: not verified, there is no {path.name} in benchmarks/results/verified: {AGAIN}"
    try:
        record = read_verified(path)
    except VerifiedError as error:
        return f"{device}: not verified, {error}"
    here = digest(package)
    if record.kernels != here:
        others = ", ".join(_verified_on(here, folder))
        elsewhere = f"; those here were on {others}" if others else ""
        return f"{device}: not verified, the sources here are {here}, and {record.kernels} were verified{elsewhere}: {AGAIN}"
    reasons = _reasons(record)
    return f"{device}: not verified, {'; '.join(reasons)}: {AGAIN}" if reasons else None


def _verified_on(kernels: str, folder: Path) -> list[str]:
    """The devices on which all suites passed with these sources."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(VerifiedError):
            record = read_verified(path)
            if record.kernels == kernels and not _reasons(record):
                found.append(path.stem)
    return found


def _reasons(record: Verified) -> list[str]:
    return [reason for name in SUITES if (reason := _reason(name, record)) is not None]


def _reason(name: str, record: Verified) -> str | None:
    suite = next((s for s in record.suites if s.name == name), None)
    if suite is None:
        return f"suite {name} was not run"
    if suite.failed:
        return f"{suite.failed} of suite {name} failed"
    return None if suite.passed else f"nothing of suite {name} was run"
