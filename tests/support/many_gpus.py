"""GPUs of many nodes with a fake stopwatch: before each measurement a GPU writes a line into a file.

`python -m tests.support.many_gpus FOLDER NODES OPTION...` is tune.py on a host with two such GPUs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.problem import Problem
from generator.processes import forkserver
from generator.processes.forkserver import fork_server
from generator.searching.pool import legal_pool
from generator.searching.run import Orders, Run, Tools, tune_all
from generator.selection import problem_named
from generator.storage.backends import journal_path, open_storage
from generator.storage.journal import Journal
from generator.storage.record import read_record
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.processes import wait_for
from tuned.families.gru_cell.spec import GruCellSize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = problem_named("gru_cell_512_64")
PROBLEMS = [
    Problem(f"gru_{i}", "gru_cell", dataclasses.replace(MODEL.spec, hidden=256, inplace=True), GruCellSize(i))
    for i in range(9, 13)  # each has few variants: 28
]


def cost(problem: Problem, variant: Any) -> float:
    """Microseconds, all different and without noise."""
    return 4.0 + variant.num_warps / 8 + variant.block_batch / problem.size.batch + variant.block_hidden / 1e4


def everything() -> set[tuple[str, str]]:
    """All pairs (problem, variant) that there are to measure."""
    return {(p.name, str(v)) for p in PROBLEMS for v in legal_pool(p, 90).variants}


@dataclasses.dataclass(frozen=True)
class Place:
    """The folder where nodes leave what a test checks, and what each node is told to do."""

    folder: Path
    # node -> "waits_at": the number of the measurement that waits until the file "go" is there; "said": what its tuner
    # says at first
    nodes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / "measured.txt"

    def lines(self) -> list[list[str]]:
        """Node, problem and variant of each measurement that has begun."""
        return [line.split(" ", 2) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def measured(self) -> collections.Counter[tuple[str, ...]]:
        """(problem, variant) -> how often any node measured it."""
        return collections.Counter(tuple(line[1:]) for line in self.lines())

    def by(self) -> collections.Counter[str]:
        """Node -> how many measurements it began."""
        return collections.Counter(line[0] for line in self.lines())

    def kept(self) -> int:
        """How many trials the journal has."""
        path = journal_path("test_gpu")
        return path.read_text().count('"op_code":4') if path.exists() else 0

    def tuners(self) -> list[int]:
        """The process ids of all tuners that ever started."""
        return [int(path.name) for path in (self.folder / "tuners").glob("*")]

    def forked_by(self) -> set[str]:
        """The addresses of the fork servers of all tuners that ever started."""
        return {path.read_text() for path in (self.folder / "tuners").glob("*")}

    def go(self) -> None:
        """Let all waiting nodes go on."""
        (self.folder / "go").touch()

    def orders(self, **changes: Any) -> Orders:
        return Orders(**{"problems": PROBLEMS, "trials": 200, "folder": self.folder / "out", **changes})

    def record(self) -> list[Any]:
        return read_record("test_gpu", self.folder / "out")


@dataclasses.dataclass
class LoggingWorker(FakeWorker):
    """Logs each measurement before it starts, and waits at the one where it was told to."""

    log: Path = Path()
    name: str = ""
    waits_at: int = 0
    waits_for: Callable[[], object] = lambda: True

    def measure(self, variant: Any) -> Any:
        with self.log.open("a") as file:
            file.write(f"{self.name} {self.problem.name} {variant}\n")
        if len(self.measured) + 1 == self.waits_at:
            wait_for(self.waits_for)
        return super().measure(variant)


@contextlib.contextmanager
def tools(place: Place, index: int, compilers: int, waiting: Callable[[str], None]) -> Iterator[Any]:
    """Stands for generator.commands.on_gpu, on the node that the environment names."""
    del compilers
    assert index == 0, "Ray shows a tuner one GPU"
    name = os.environ.get("NODE") or f"gpu{os.environ['CUDA_VISIBLE_DEVICES']}"
    told = place.nodes.get(name, {})
    (place.folder / "tuners").mkdir(exist_ok=True)
    (place.folder / "tuners" / str(os.getpid())).write_text(str(fork_server().address))
    if "said" in told:
        waiting(told["said"])
    go = (place.folder / "go").exists
    worker = LoggingWorker(cost, log=place.log, name=name, waits_at=told.get("waits_at", 0), waits_for=go)
    worker.start()
    yield worker, FakeCompiler(), ENVIRONMENT


@functools.cache
def one_machine() -> list[Any]:
    """The record that one GPU alone writes for the same problems."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        worker = FakeWorker(cost)
        worker.start()
        journal = Journal(open_storage(None, "test_gpu", place.folder / "trials.log"))
        tune_all(Run(PROBLEMS), Tools(worker, FakeCompiler(), journal, ENVIRONMENT), place.orders())  # type: ignore[arg-type]
        return place.record()


def main(folder: str, nodes: str, *options: str) -> None:
    from generator import (  # noqa: PLC0415
        command_line,
        commands,
        gpu,
    )

    names = ("Test GPU", "Test GPU")
    gpu.gather = lambda: gpu.Facts("2.11.0", "12.8", names=names)  # type: ignore[assignment]
    commands.select = lambda *_, **__: PROBLEMS  # type: ignore[attr-defined]
    commands.on_gpu = functools.partial(tools, Place(Path(folder), json.loads(nodes)))  # type: ignore[assignment]
    forkserver.PRELOAD = forkserver.LATER = ()  # nothing is compiled
    command_line._started = True
    command_line.app([*options, "--out", str(Path(folder) / "out"), "--trials", "200"])


if __name__ == "__main__":
    main(*sys.argv[1:])
