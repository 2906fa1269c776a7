"""Kill the tuner at any moment: at most the trial under way is lost, and the next run ends as an unbroken run would."""

from __future__ import annotations

import collections
import os
import random
import signal
import sys
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from generator.searching.pool import legal_pool
from generator.searching.run import Orders, Run, Tools, tune_all
from generator.searching.search import EXHAUSTIVE
from generator.selection import problem_named
from generator.storage.backends import open_storage
from generator.storage.journal import Journal
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.processes import forked
from tuned.lookup.record import load_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.processes

# Two problems whose pools are measured whole, and between them one that is searched.
NAMES = ("gru_cell_dreamer_200_16", "llama3_8b_2x4096", "gru_cell_1024_inplace_64")
PROBLEMS = [problem_named(name) for name in NAMES]
TRIALS = 12
KILLS = 25


def cost(_: Any, variant: Any) -> float:
    """Microseconds, different for each variant."""
    return 5 + zlib.crc32(repr(variant).encode()) % 100_000 / 10_000


class LoggingWorker(FakeWorker):
    """Logs what it is about to measure, in a file that survives a kill."""

    def __init__(self, path: Path) -> None:
        super().__init__(cost)
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def measure(self, variant: Any) -> Any:
        os.write(self._log, f"{self.problem.name} {variant}\n".encode())
        return super().measure(variant)


def tuner(folder: Path, run: str) -> None:
    """A whole run on a fake GPU, in ``folder``."""
    worker = LoggingWorker(folder / run)
    worker.start()
    journal = Journal(open_storage(None, "test_gpu", folder / "trials.log"))
    done = Run(PROBLEMS)
    tune_all(
        done, Tools(worker, FakeCompiler(), journal, ENVIRONMENT), Orders(done.problems, TRIALS, folder=folder / "out")
    )  # type: ignore[arg-type]
    assert set(done.outcomes) == {p.name for p in PROBLEMS}


def counted(function: Callable[[], object], die_at: int = 0) -> int:
    """Count the calls and returns, of Python and C, that a function takes; kill the process at number ``die_at``."""
    count = 0

    def step(*_: object) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(step)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def ended(pid: int) -> bool:
    """Whether a process ended by itself and not by a kill; it must not have failed."""
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), "a run failed where another had been killed"
    return status == 0


def measured(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def check_files(folder: Path) -> None:
    """Check that nothing is half-written, whenever the tuner was killed."""
    if (folder / "out" / "test_gpu.json").exists():
        assert load_record(folder / "out" / "test_gpu.json")
    if (folder / "trials.log").exists():
        storage = open_storage(None, "test_gpu", folder / "trials.log")
        for study in storage.get_all_studies():
            assert all(trial.state.is_finished() for trial in storage.get_all_trials(study._study_id))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[str], int]:
    """The record of an unbroken run, what it measured, and how many calls and returns it takes."""
    folder = tmp_path_factory.mktemp("unbroken")
    tuner(tmp_path_factory.mktemp("warm"), "run")  # fills the caches of templates and pools, which forks then share
    count = folder / "count"
    assert ended(forked(lambda: count.write_text(str(counted(lambda: tuner(folder, "run"))))))
    return (folder / "out" / "test_gpu.json").read_bytes(), measured(folder / "run"), int(count.read_text())


def test_a_tuner_killed_at_many_moments_ends_as_an_unbroken_one(
    tmp_path: Path, unbroken: tuple[bytes, list[str], int]
) -> None:
    record, whole, calls = unbroken
    assert len(legal_pool(PROBLEMS[1], 90).variants) > EXHAUSTIVE
    assert len(whole) == len(set(whole)) > 2 * TRIALS
    moments = random.Random(0)
    kills = chains = 0
    resumed: collections.Counter[int] = collections.Counter()
    while kills < KILLS:
        folder = tmp_path / str(chains)
        folder.mkdir()
        chains += 1
        before: list[str] = []  # what earlier runs of this chain measured
        under_way: list[str] = []  # trials under way when a run was killed: kept or not
        for run in map(str, range(KILLS + 1)):
            moment = moments.randrange(1, calls) if kills < KILLS else 0
            over = ended(
                forked(lambda f=folder, r=run, m=moment: counted(lambda: tuner(f, r), m) if m else tuner(f, r))
            )
            now = measured(folder / run)
            assert not set(now) & set(before), "measured twice"
            assert len(now) == len(set(now))
            check_files(folder)
            if over:
                before += now
                break
            kills += 1
            resumed[len(now)] += 1
            before += now[:-1]
            under_way += now[-1:]
        assert set(before) | set(under_way) == set(whole)
        assert len(before) <= len(whole)
        assert (folder / "out" / "test_gpu.json").read_bytes() == record
        assert [path.name for path in (folder / "out").iterdir()] == ["test_gpu.json"]
    assert len(resumed) > 5, "kills fell at different moments"
