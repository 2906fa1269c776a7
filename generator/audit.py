"""Find what is out of date: rows measured with other kernels, problems without a row, generated files that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from generator.committed import KERNELS, generated_files
from generator.record import PACKAGE, TABLES, WINNERS, read_record, record_path
from generator.seeds import is_fresh, same_problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from generator.problem import Problem


def findings(problems: list[Problem], device: str | None, folder: Path | None) -> Iterator[str]:
    """A sentence for each thing to do, for one device or for every one with a record.

    The package's generated files are looked at too, unless ``folder`` says that the record is elsewhere.

    Raises:
        tuned.record.RecordError: a record that cannot be read.
    """
    devices = [device] if device is not None else sorted(p.stem for p in (folder or WINNERS).glob("*.json"))
    if not devices:
        yield f"no record in {folder or 'tuned/winners'}: run python tune.py --gpu auto on a machine with a GPU"
    for name in devices:
        yield from _rows(problems, name, folder)
    if folder is None:
        yield from _files()


def _rows(problems: list[Problem], device: str, folder: Path | None) -> Iterator[str]:
    if not record_path(device, folder).exists():
        yield f"{device}: no record: run python tune.py --gpu auto on it"
        return
    winners = read_record(device, folder)
    for problem in problems:
        row = next((w for w in winners if same_problem(w, problem)), None)
        if row is None:
            yield f"{device}: {problem.name} has no row: python tune.py --problems {problem.name}"
        elif not is_fresh(row):
            yield f"{device}: {problem.name} was measured with another text of its kernel: python tune.py --problems {problem.name}"


def _files() -> Iterator[str]:
    wanted = generated_files()
    for name, text in wanted.items():
        path = PACKAGE / name
        if not path.exists():
            yield f"tuned/{name} is missing: python tune.py --render"
        elif path.read_text() != text:
            yield f"tuned/{name} is not what the templates and records give: python tune.py --render"
    found = {f"kernels/{p.name}" for p in KERNELS.glob("*.py")}
    found |= {f"tables/{p.name}" for p in TABLES.glob("*.py") if p.name != "__init__.py"}
    for name in sorted(found - set(wanted)):
        yield f"tuned/{name} belongs to nothing: python tune.py --render"
