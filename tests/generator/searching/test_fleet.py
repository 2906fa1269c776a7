"""Several GPUs of one host: a tuner process each, one parent that shows what they do and survives them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import pickle
import signal
from typing import TYPE_CHECKING, Any

import pytest

from generator import commands
from generator.gpu import NoSuchGpuError, choose_gpus
from generator.processes.worker import WorkerLostError
from generator.searching import fleet as fleet_module
from generator.searching import run as run_module
from generator.searching.claims import Claims
from generator.searching.fleet import Fleet, FleetError, Seat, seats
from generator.searching.queues import owner_name
from generator.searching.run import Orders, Run, Tools
from generator.storage.backends import StorageError
from generator.storage.record import read_record
from tests.support import sharing
from tests.support.processes import BACKSTOP_SECONDS, alive, wait_for
from tests.support.sharing import PROBLEMS, Place, everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes


@dataclasses.dataclass
class Host:
    """A host with GPUs whose stopwatch is fake, and what its person sees."""

    place: Place
    workers: dict[int, dict[str, Any]]  # GPU -> options of its worker
    said: list[str] = dataclasses.field(default_factory=list)
    started: list[int] = dataclasses.field(default_factory=list)
    reported: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # GPU, problem
    done: list[str] = dataclasses.field(default_factory=list)
    on_report: Callable[[int], None] = lambda _: None
    fleet: Any = None
    waits: bool = False

    def tune(self, run: Run | None = None) -> Run:
        run = run or Run(PROBLEMS)
        orders = Orders(PROBLEMS, trials=200, folder=self.place.folder / "out")
        self.fleet = Fleet(
            run,
            orders,
            started=lambda seat, _: self.started.append(seat.gpu),
            report=self._report,
            done=lambda problem, _: self.done.append(problem.name),
            say=self.said.append,
        )
        self.fleet.tune([Seat(gpu, 1, owner=owner_name(gpu)) for gpu in self.workers], self.tools)
        return run

    def _report(self, index: int, progress: Any, gpu: int) -> None:
        del index
        self.reported.append((gpu, progress.problem))
        self.on_report(len(self.reported))

    @contextlib.contextmanager
    def tools(self, seat: Seat, waiting: Callable[[str], None]) -> Iterator[Tools]:
        if self.waits:
            waiting("another tuner measures there")
        with sharing.tools(self.place, str(seat.gpu), **self.workers[seat.gpu]) as made:
            yield made

    def winners(self) -> set[str]:
        return {w.name for w in read_record("test_gpu", self.place.folder / "out")}

    def processes(self) -> list[Any]:
        return [tuner.process for tuner in self.fleet._tuners]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path))
    monkeypatch.setattr(fleet_module, "START", "fork")  # torch is imported once, here
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", 0.05)
    monkeypatch.setattr("generator.searching.queues.POLL_SECONDS", 0.05)
    # By a clock that stands still nobody is ever late: a tuner is dead when its parent sees that it is.
    monkeypatch.setattr(run_module, "Claims", functools.partial(Claims, clock=lambda: 0.0))
    monkeypatch.setattr(fleet_module, "STOP_SECONDS", BACKSTOP_SECONDS)
    sharing.warm()
    return lambda *gpus: Host(Place(tmp_path), dict(enumerate(gpus)))


def stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP."""
    return "\nState:\tT" in pathlib.Path(f"/proc/{pid}/status").read_text()


def children(pid: int | None) -> list[int]:
    """The processes that one has started."""
    return [int(n) for n in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def all_is_done(run: Run, host: Host) -> None:
    names = [p.name for p in PROBLEMS]
    assert [w.name for w in run.winners] == names
    assert not run.skipped
    assert host.winners() == set(names)
    assert run.record == host.place.folder / "out" / "test_gpu.json"
    assert set(host.place.measured()) == everything()


def test_gpus_share_the_problems_and_each_stays_on_one(host: Any) -> None:
    together = {"together": sharing.FORK.Barrier(2)}
    two = host(together, together)
    run = two.tune()
    all_is_done(run, two)
    assert set(two.place.measured().values()) == {1}
    assert sorted(two.started) == [0, 1]
    assert sorted(two.done) == sorted(p.name for p in PROBLEMS)
    where = {(problem, gpu) for gpu, problem in two.reported if problem}
    assert len(where) == len(PROBLEMS), "all candidates of a problem are on one GPU"
    assert {gpu for _, gpu in where} == {0, 1}
    two.workers = {0: {}, 1: {}}
    again = two.tune()
    assert [w.name for w in again.winners] == [p.name for p in PROBLEMS]
    assert set(two.place.measured().values()) == {1}, "nothing is measured again"


def test_a_tuner_that_dies_is_noticed_and_its_problem_taken_over_at_once(host: Any) -> None:
    two = host({"waits_at": 2, "waits_for": lambda: two.place.by()["1"] == 12}, {"dies_at": 12})
    run = two.tune()  # by a clock that stands still: whoever waited for its heartbeat would wait for ever
    all_is_done(run, two)
    assert sum(two.place.measured().values()) <= len(everything()) + 1
    (said,) = two.said
    assert said.startswith("the tuner of GPU 1 died (exit code -9) at gru_")
    assert said.endswith(": another takes over")


def test_ctrl_c_that_a_tuner_dropped_is_passed_on_again(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "AGAIN_SECONDS", 0.5)
    two = host({"waits_at": 5, "drops": 1}, {})
    pressed: list[int] = []

    def press(reports: int) -> None:
        if two.place.by()["0"] == 5 and not pressed:  # once: the second time, nobody waits for the tuners
            pressed.append(reports)
            raise KeyboardInterrupt

    two.on_report = press
    two.place.log.touch()
    assert two.tune().interrupted
    assert [p.exitcode for p in two.processes()] == [0, 0], "they ended by themselves"


def test_ctrl_c_ends_all_and_the_same_command_goes_on(host: Any) -> None:
    two = host({"waits_at": 20}, {"waits_at": 20})  # for the key to be pressed

    def press(reports: int) -> None:
        if reports == 15:
            raise KeyboardInterrupt

    two.on_report = press
    run = two.tune()
    assert run.interrupted
    assert 0 < len(two.place.measured()) < len(everything())
    assert not any(p.is_alive() for p in two.processes())
    assert [p.exitcode for p in two.processes()] == [0, 0], "they ended by themselves"
    before = sum(two.place.measured().values())
    two.on_report = lambda _: None
    two.workers = {0: {}, 1: {}}
    again = two.tune()
    all_is_done(again, two)
    assert sum(two.place.measured().values()) <= len(everything()) + 2, "but for the two trials under way"
    assert before < sum(two.place.measured().values())


def test_a_tuner_that_does_not_listen_is_killed(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "STOP_SECONDS", 0.3)
    one = host({"hangs_at": 12}, {"waits_at": 12, "waits_for": lambda: one.place.by()["0"] == 12})

    def press(reports: int) -> None:
        del reports
        if stopped(one.processes()[0].pid):
            raise KeyboardInterrupt

    one.on_report = press
    assert one.tune().interrupted
    assert not any(p.is_alive() for p in one.processes())
    assert one.processes()[0].exitcode == -signal.SIGKILL


def test_when_no_tuner_is_left_it_says_what_each_died_of(host: Any) -> None:
    with pytest.raises(FleetError, match=r"GPU 0 died \(exit code -9\); the tuner of GPU 1 died \(exit code -9\)"):
        host({"dies_at": 1}, {"dies_at": 1}).tune()


def test_what_a_tuner_waits_for_is_said(host: Any) -> None:
    one = host({})
    one.waits = True
    one.tune()
    assert one.said == ["GPU 0: another tuner measures there"]


def test_what_keeps_all_tuners_from_starting_is_said_once(host: Any) -> None:
    two = host({}, {})

    @contextlib.contextmanager
    def refuse(*_: Any) -> Iterator[Tools]:
        raise StorageError("the storage cannot be used")
        yield

    two.tools = refuse
    with pytest.raises(FleetError, match=r"^the storage cannot be used$"):
        two.tune()


def test_a_gpu_that_cannot_start_is_left_out_and_said(host: Any) -> None:
    two = host({}, {})
    whole = two.tools

    def refuse(seat: Seat, waiting: Any) -> Any:
        if seat.gpu == 1:
            raise WorkerLostError("it does not answer")
        return whole(seat, waiting)

    two.tools = refuse
    all_is_done(two.tune(), two)
    assert two.said == ["GPU 1 is left out: it does not answer"]


def test_tuners_end_when_their_parent_is_killed(host: Any, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    two = host(*({"waits_at": 3, "waits_for": killed.exists} for _ in range(2)))
    parent = sharing.FORK.Process(target=two.tune)
    parent.start()
    wait_for(lambda: two.place.log.exists() and two.place.by() == {"0": 3, "1": 3})
    tuners = children(parent.pid)
    os.kill(parent.pid or 0, signal.SIGKILL)
    parent.join()
    killed.touch()
    assert len(tuners) == 2
    wait_for(lambda: not any(map(alive, tuners)))
    assert set(two.place.measured()) != everything(), "they measured on"


def test_what_a_tuner_is_told_can_be_sent_to_a_new_process() -> None:
    told = (seats([0, 1], 8, "grpc://db1:13000"), Orders(PROBLEMS, 96), commands.measuring)
    assert pickle.loads(pickle.dumps(told)) == told


# --- which GPUs -----------------------------------------------------------------------------------------------------

ALIKE = ("NVIDIA H200", "NVIDIA H200", "NVIDIA H200")
MIXED = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H200")


@pytest.mark.parametrize(
    ("names", "wanted", "indices"),
    [
        (ALIKE, "all", [0, 1, 2]),
        (ALIKE, "0,2", [0, 2]),
        (ALIKE, "2, 0,2", [0, 2]),
        (MIXED, "0,2", [0, 2]),
        (MIXED, "1", [1]),
    ],
)
def test_gpus_are_named_by_index_or_all(names: tuple[str, ...], wanted: str, indices: list[int]) -> None:
    assert choose_gpus(names, wanted) == indices


def test_gpus_of_different_models_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        NoSuchGpuError, match=r"of one model.*0: NVIDIA H200, 1: NVIDIA A100-SXM4-80GB, 2: .*--gpus 0,2"
    ):
        choose_gpus(MIXED, "all")


@pytest.mark.parametrize("wanted", ["3", "0,3", "h200", "", "0,", "auto"])
def test_gpus_that_are_not_there_are_refused(wanted: str) -> None:
    with pytest.raises(NoSuchGpuError, match=r"--gpus must be all or indices of GPUs here \(0: NVIDIA H200"):
        choose_gpus(ALIKE, wanted)


def test_the_cores_are_divided_among_the_gpus() -> None:
    assert [(s.gpu, s.compilers) for s in seats([0, 2, 3], 16, None)] == [(0, 16), (2, 16), (3, 16)]
    assert [s.compilers for s in seats([0, 1], 1, None)] == [1, 1]
    assert [s.compilers for s in seats([0, 1], 128, None)] == [64, 64]
    assert [s.compilers for s in seats(list(range(8)), 64, None)] == [24] * 8
    assert len({s.owner for s in seats([0, 1], 2, None)}) == 2
