"""The driver of many GPUs, with a small stand-in for Ray: which GPU gets which problem, which is left out, what is kept."""

from __future__ import annotations

import collections
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from generator import commands
from generator.evaluation.portfolio import candidates
from generator.failures import TuningError
from generator.places import ROOT
from generator.processes.forkserver import fork_server
from generator.processes.worker import WorkerGoneError
from generator.searching.run import LEAST_SHARE_S, NO_TIME, Display, Keeper, Run, Work
from generator.storage.journal import Held
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.many_gpus import PROBLEMS, Place, cost, everything, one_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("ray")

from ray.exceptions import RayError

from generator.searching import cluster as cluster_module
from generator.searching import connection
from generator.searching.cluster import MOST_DEATHS, Driver
from generator.searching.remote import RemoteTuner
from generator.searching.tuner import Tuner

NAMES = [p.name for p in PROBLEMS]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://host:10001", "--ray takes auto or the HOST:PORT"),
        ("host", "--ray takes auto or the HOST:PORT"),
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1"),
    ],
)
def test_an_address_that_is_none_is_said_at_once(address: str, said: str) -> None:
    with pytest.raises(TuningError, match=said), connection.connected(address, []):
        pass


def test_a_cluster_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(connection.ray, "init", init)
    said = "no Ray at auto can be used: Could not find any running Ray instance.. Start one with ray start --head"
    with pytest.raises(TuningError, match=said), connection.connected("auto", []):
        pass


def test_what_measures_does_not_give_way_to_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_enable_worker_prestart", "RAY_prestart_worker_first_driver", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores the variable afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen: list[str] = []
    monkeypatch.setattr(connection.ray, "init", lambda *_, **__: seen.append(os.environ[name]))
    monkeypatch.setattr(connection.ray, "shutdown", lambda: None)
    with connection.connected(None, [0, 1]):
        assert seen == ["0"], "Ray's own choice is 15"


@dataclasses.dataclass
class Gpu:
    """How a GPU behaves in a test."""

    environment: dict[str, Any] = dataclasses.field(default_factory=lambda: ENVIRONMENT)
    cannot_start: str = ""  # the reason, if it cannot
    dies_before_it_starts: bool = False
    dies_at: tuple[str, ...] = ()  # names of problems
    is_lost_at: tuple[str, ...] = ()
    workers: list[FakeWorker] = dataclasses.field(default_factory=list)  # one a start: a dead one's thread may go on

    @property
    def worker(self) -> FakeWorker:
        return self.workers[-1]

    @property
    def measured(self) -> int:
        return sum(len(worker.measured) for worker in self.workers)


class Actor:
    """A tuner on a GPU, in this process."""

    def __init__(self, index: int, gpu: Gpu, works: list[Any]) -> None:
        self.index, self.gpu, self.works = index, gpu, works

    def __getattr__(self, name: str) -> Any:
        run = object.__getattribute__(self, f"_{name}")
        remote = type("Method", (), {"remote": staticmethod(run)})
        return type("Options", (), {"options": staticmethod(lambda **_: remote)})

    def _start(self, _: Any) -> Iterator[Any]:
        if self.gpu.dies_before_it_starts:
            raise RayError("it died")
        if self.gpu.cannot_start:
            yield "failed", self.gpu.cannot_start
        else:
            self.gpu.workers.append(FakeWorker(cost))
            self.gpu.worker.start()
            yield "ready", "another host", str(self.index), self.gpu.environment, 3

    def _tune(self, work: Any, held: Any) -> Iterator[Any]:
        self.works.append(work)  # recorded at once, whenever the generator is started
        return self._letters(work, held)

    def _letters(self, work: Any, held: Any) -> Iterator[Any]:
        tuner = Tuner()
        tuner.worker, tuner.compiler, tuner.environment = self.gpu.worker, FakeCompiler(), self.gpu.environment  # type: ignore[assignment]
        told = tuner.tune(work, held)
        if work.problem.name in self.gpu.is_lost_at:
            self.gpu.worker.stop()
            self.gpu.worker.start = self._gone  # type: ignore[method-assign]
        for letter in told:
            if letter[0] == "trial" and work.problem.name in self.gpu.dies_at:
                raise RayError("The actor died.\n\tpid: 7\nits node died\n")
            yield letter

    def _gone(self) -> None:
        raise WorkerGoneError("it has fallen off the bus")


class FakeRay:
    """The part of Ray that the driver uses."""

    def __init__(self, *gpus: Gpu) -> None:
        self.free = list(enumerate(gpus))
        self.count = len(gpus)
        self.works: list[Any] = []
        self.killed: list[int] = []

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0} | ({"GPU": float(self.count)} if self.count else {})

    def remote(self, cls: type) -> Any:
        assert cls is RemoteTuner
        return self

    def options(self, *, num_gpus: int) -> Any:
        assert num_gpus == 1
        return type("Class", (), {"remote": self.actor})

    def actor(self, begin: Any) -> Actor:
        assert begin is fork_server
        index, gpu = self.free.pop(0)
        if gpu.dies_before_it_starts or gpu.dies_at:  # its GPU is free again at once
            self.free.append((index, gpu))
        return Actor(index, gpu, self.works)

    def wait(self, streams: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout >= 0
        return streams[:num_returns], streams[num_returns:]

    def get(self, letter: Any) -> Any:
        return letter

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.index)


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that tunes on given GPUs and returns the run, what it said, and the fake Ray."""
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))

    def tune(*gpus: Gpu, report: Callable[..., None] = lambda *_: None, **changes: Any) -> Any:
        ray, said = FakeRay(*gpus), []
        monkeypatch.setattr(cluster_module, "ray", ray)
        monkeypatch.setattr(connection, "ray", ray)
        run = Run(PROBLEMS)
        Driver(
            run,
            Place(tmp_path).orders(**changes),
            None,
            None,
            Display(report=report, say=said.append),
            connection.Tuners(),
        ).tune()  # type: ignore[arg-type]
        return run, said, ray

    return tune


def measured(*gpus: Gpu) -> int:
    return sum(gpu.measured for gpu in gpus)


def test_gpus_share_the_problems_and_the_record_is_one_machines(tune: Any, tmp_path: Path) -> None:
    two, lanes = (Gpu(), Gpu()), set()
    rendered: list[int] = []
    tables: list[str] = []
    run, said, ray = tune(
        *two,
        report=lambda done, progress, lane: lanes.add((done, progress.problem, lane)),
        render=lambda: rendered.append(len(run_record(tmp_path))),
        write_table=tables.append,
    )
    assert [w.name for w in run.winners] == NAMES
    assert not said
    assert run.gpus == 2
    assert run_record(tmp_path) == one_machine()
    assert all(set(gpu.worker.staged) for gpu in two)
    assert measured(*two) == len(everything())
    assert sorted(two[0].worker.staged + two[1].worker.staged) == sorted(NAMES), "all variants of a problem on one GPU"
    assert {lane for *_, lane in lanes} == {"another host GPU 0", "another host GPU 1"}
    assert {done for done, *_ in lanes} >= {0, len(PROBLEMS) - 2}, "in steps of two"
    assert tables == ["test_gpu"] * len(PROBLEMS)
    assert rendered[-1] == len(PROBLEMS)
    assert sorted(ray.killed) == [0, 1], "their GPUs are given back"
    tune(*two)
    assert measured(*two) == len(everything()), "nothing is measured again"


def run_record(folder: Path) -> list[Any]:
    return Place(folder).record()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_is_lost_in_ray_ends_the_run_all_the_same(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    get, came = FakeRay.get, []

    class Released:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def interrupted(self: FakeRay, letter: Any) -> Any:
        if letter[0] == "trial" and not came:
            came.append(signal.getsignal(signal.SIGINT))
            released = Released()
            del released
        return get(self, letter)

    monkeypatch.setattr(FakeRay, "get", interrupted)
    before, one = signal.getsignal(signal.SIGINT), Gpu()
    run, _, ray = tune(one)
    assert run.interrupted
    assert not run.winners
    assert ray.killed == [0]
    assert came != [before]
    assert signal.getsignal(signal.SIGINT) is before


def test_what_killed_three_tuners_is_skipped(tune: Any) -> None:
    bad = NAMES[2]
    two = Gpu(dies_at=(bad,)), Gpu(dies_at=(bad,))
    run, said, ray = tune(*two)
    assert run.skipped == {bad: f"{MOST_DEATHS} tuners died at it: its node died"}
    assert [w.name for w in run.winners] == [n for n in NAMES if n != bad]
    assert [work.problem.name for work in ray.works].count(bad) == MOST_DEATHS
    assert [s.endswith(f" died at {bad}, which is tried again: its node died") for s in said] == [True] * MOST_DEATHS


def test_a_gpu_that_cannot_start_is_left_out_and_said(tune: Any) -> None:
    run, said, _ = tune(Gpu(cannot_start="it does not answer"), Gpu())
    assert [w.name for w in run.winners] == NAMES
    assert said == ["a GPU is left out: it does not answer"]


def test_a_gpu_that_is_lost_leaves_its_problem_to_another(tune: Any) -> None:
    two = Gpu(is_lost_at=(NAMES[0],)), Gpu()
    run, said, _ = tune(*two)
    assert [w.name for w in run.winners] == NAMES
    assert said == ["another host GPU 0 is left out: the GPU is lost: it has fallen off the bus"]


def test_when_every_gpu_is_lost_what_is_left_is_skipped(tune: Any) -> None:
    run, _, _ = tune(Gpu(is_lost_at=(NAMES[2],)))
    assert [w.name for w in run.winners] == NAMES[:2]
    assert run.skipped == dict.fromkeys(NAMES[2:], "the GPU is lost: it has fallen off the bus")


def test_why_no_gpu_can_be_tuned_on_is_said_once(tune: Any) -> None:
    with pytest.raises(TuningError, match=r"^it does not answer$"):
        tune(Gpu(cannot_start="it does not answer"), Gpu(cannot_start="it does not answer"))
    with pytest.raises(TuningError, match="the Ray cluster has no GPU"):
        tune()
    with pytest.raises(TuningError, match=f"{MOST_DEATHS} tuners in a row died before they could start: it died"):
        tune(Gpu(dies_before_it_starts=True))


@pytest.mark.parametrize("different", ["device_name", "driver", "torch", "triton"])
def test_a_gpu_unlike_the_first_is_left_out(tune: Any, different: str) -> None:
    other = Gpu(ENVIRONMENT | {different: "another"})
    run, said, _ = tune(Gpu(), other)
    assert [w.name for w in run.winners] == NAMES
    assert not other.measured
    (refused,) = said
    assert refused.startswith("another host GPU 1 is left out: the GPUs of a run must be of one model")
    assert "the first is Test GPU, driver 1.2.3, torch 2.11.0, Triton 3.6.0, this one " in refused
    assert "another" in refused.partition("this one")[2]


def test_the_budget_is_divided_among_the_gpus(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    _, _, ray = tune(Gpu(), Gpu(), end=1000.0 + 90.0)
    assert [work.seconds for work in ray.works[:2]] == [45.0, 45.0], "two GPUs for four problems: half of the time each"
    assert [work.following for work in ray.works[:2]] == [PROBLEMS[1], PROBLEMS[3]]
    _, _, ray = tune(Gpu(), end=1000.0 + 30.0)
    assert ray.works[0].seconds == LEAST_SHARE_S, "a quarter would not see the compilers started"


def test_what_the_budget_does_not_reach_is_said(tune: Any) -> None:
    run, _, ray = tune(Gpu(), end=time.monotonic())
    assert run.skipped == dict.fromkeys(NAMES, NO_TIME)
    assert not ray.works


def test_what_a_tuner_is_told_can_be_sent_to_another_process() -> None:
    work = Work(PROBLEMS[0], PROBLEMS[1], 96, candidates, 9.0, [])
    held = Held({"variant": 4.0}, collections.Counter(["another"]), {"finished": {}})  # type: ignore[dict-item]
    told = (work, held, commands.on_gpu, Tuner)
    assert pickle.loads(pickle.dumps(told)) == told


def test_a_gpu_has_its_next_problem_before_the_last_one_is_kept(tune: Any) -> None:
    given: list[int] = []
    _, _, ray = tune(Gpu(), write_table=lambda _: given.append(len(cluster_module.ray.works)))
    assert [work.problem.name for work in ray.works] == NAMES
    assert given == [2, 3, 4, 4]


def test_gpus_get_problems_of_different_kernels_at_one_time(tune: Any) -> None:
    a, b, c, _ = PROBLEMS
    d = dataclasses.replace(c, name="another", spec=dataclasses.replace(c.spec, hidden=128))
    run, _, ray = tune(Gpu(), Gpu(), problems=[a, b, c, d])
    assert [work.problem for work in ray.works[:2]] == [a, d], "b and c run the kernels of a"
    assert set(run.outcomes) == {a.name, b.name, c.name, "another"}


def test_a_gpu_gets_what_it_compiled_ahead_and_stays_with_its_kernels(tune: Any) -> None:
    _, b, c, d = PROBLEMS
    other = [
        dataclasses.replace(p, name=f"other_{p.name}", spec=dataclasses.replace(p.spec, hidden=128)) for p in (b, c, d)
    ]
    two = Gpu(), Gpu()
    _, _, ray = tune(*two, problems=[b, other[0], c, other[1], d, other[2]])
    assert [gpu.worker.staged for gpu in two] == [[p.name for p in (b, c, d)], [p.name for p in other]]
    following = {work.problem.name: work.following and work.following.name for work in ray.works}
    for gpu in two:
        names = gpu.worker.staged
        assert [following[name] for name in names] == [*names[1:], None]


def test_a_gpu_with_nothing_to_do_takes_what_another_was_to_get(tune: Any) -> None:
    a, b, c, _ = PROBLEMS
    _, _, ray = tune(Gpu(), Gpu(), problems=[a, b, c])
    assert [(work.problem, work.following) for work in ray.works] == [(a, b), (c, None), (b, None)]
    two = Gpu(dies_at=(a.name,)), Gpu()
    run, _, _ = tune(*two, problems=[a, b, c])
    assert set(run.outcomes) >= {b.name, c.name}, "what was kept for the dead is not lost"


@pytest.mark.parametrize("when", ["given", "kept"])
def test_ctrl_c_between_two_problems_keeps_the_one_that_ended(
    tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    owner, name = (Driver, "_give") if when == "given" else (Keeper, "keep")
    noted, done = Keeper.note, getattr(owner, name)
    ended: list[Any] = []

    def note(self: Keeper, *given: Any) -> None:
        noted(self, *given)
        ended.append(given)

    def once(*given: Any) -> None:
        if len(ended) == 1:
            ended.append("interrupted")
            raise KeyboardInterrupt
        done(*given)

    monkeypatch.setattr(Keeper, "note", note)
    monkeypatch.setattr(owner, name, once)
    run, _, _ = tune(Gpu())
    assert run.interrupted
    assert [w.name for w in run.winners] == NAMES[:1]
    assert [w.name for w in run_record(tmp_path)] == NAMES[:1]


def test_what_forks_is_started_before_the_search_is_imported() -> None:
    script = """
import sys
from generator.processes.forkserver import fork_server
from generator.searching import remote
before = [name for name in ("torch", "triton", "optuna") if name in sys.modules]
started = []
remote.RemoteTuner(lambda: started.append("torch" in sys.modules))
print(before, started)
"""
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["[]", "[False]"]


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(tune: Any, tmp_path: Path) -> None:
    two = Gpu(), Gpu()

    def press(done: int, progress: Any, _: str) -> None:
        if done == 2 and progress.note == "comparing the best":
            raise KeyboardInterrupt

    run, _, ray = tune(*two, report=press)
    assert run.interrupted
    assert sorted(ray.killed) == [0, 1]
    before = Place(tmp_path).kept()
    assert len(run.winners) == 2
    assert before > 2 * len(everything()) / len(PROBLEMS), "of a third problem, whose search has not ended, too"
    again = Gpu(), Gpu()
    run, _, _ = tune(*again)
    assert [w.name for w in run.winners] == NAMES
    assert measured(*again) == len(everything()) - before
    assert run_record(tmp_path) == one_machine()


def test_hosts_are_sent_the_checkout_or_the_package_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection.sent() == {"working_dir": str(ROOT), "excludes": list(connection.LEFT_OUT)}
    monkeypatch.setattr(connection, "INSTALLED", True)
    assert connection.sent() == {"py_modules": [str(ROOT / "tuned")]}, "not all that lies beside it"
