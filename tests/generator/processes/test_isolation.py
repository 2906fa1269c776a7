"""Whatever a variant does to the process that measures it is recorded as a failure, and nothing else is lost."""

from __future__ import annotations

import collections
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.measuring.bench import Timing
from generator.measuring.check import fingerprint, guard, guarded, intact
from generator.measuring.stage import Compared
from generator.places import cache_folder
from generator.processes import compiler, forkserver
from generator.processes.channel import HEAD, MARK, Channel, ClosedError, GarbledError
from generator.processes.compiler import CompilerPool, compile_variant, compiled
from generator.processes.forkserver import Child, ForkServer, LostError, fork_server
from generator.processes.worker import TrialFailedError, Worker, WorkerGoneError, WorkerLostError
from generator.rendering.structures import structures
from tests.broken.server import COPY, DEEDS, INPLACE, WARM, cost, ranked
from tests.support.processes import (
    BACKSTOP_SECONDS,
    HUNG,
    alive,
    end_all,
    forked,
    hang,
    only_the_hung_are_out_of_time,
    wait_for,
)
from tests.support.reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.processes

SERVER = "tests.broken.server:"
LATER = forkserver.LATER


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Child, "now", only_the_hung_are_out_of_time)
    monkeypatch.setattr(forkserver, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(forkserver, "PRELOAD", WARM)
    monkeypatch.setattr(forkserver, "LATER", ())  # these imports would take each server a second
    yield tmp_path / "cache"
    end_all()


@pytest.fixture
def broken() -> Iterator[Worker]:
    worker = Worker(0, SERVER + "BrokenServer")
    worker.start()
    yield worker
    worker.stop()


CHECKED = (
    "wrong result",
    "not a number",
    "past the end",
    "before the start",
    "far outside",
    "changed input",
    "changed input while timed",
    "wrong result while timed",
)
CASES = [(COPY, deed) for deed in DEEDS] + [(INPLACE, deed) for deed in CHECKED]


@pytest.mark.thinned_on_gpu(every=2)
@pytest.mark.parametrize(("problem", "deed"), CASES, ids=lambda v: v if isinstance(v, str) else v.name)
def test_a_broken_variant_has_its_reason_and_the_next_one_is_measured(
    broken: Worker, deed: str, problem: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    reason, lost = REASONS[deed]
    variants = ranked(problem)
    bad, good = variants[DEEDS.index(deed)], variants[-1]
    broken.stage(problem)
    with pytest.raises(WorkerLostError if lost else TrialFailedError) as raised:
        broken.measure(bad)
    assert re.search(reason, str(raised.value)), str(raised.value)
    if lost:
        with pytest.raises(WorkerLostError):
            broken.measure(good)
        broken.start()
        broken.stage(problem)
    assert broken.measure(good).timing.median_us == cost(good)
    compared = broken.compare([good, variants[-2]])
    assert [c.timing.median_us for c in compared] == [cost(good), cost(variants[-2])]
    assert broken.starts == 1 + lost
    assert capfd.readouterr() == ("", ""), "nothing that a worker prints reaches the terminal"


def test_a_worker_that_never_starts_is_given_up_with_its_reason() -> None:
    worker = Worker(0, SERVER + "NeverStarts", pause_seconds=0.0)
    for _ in range(3):
        worker.start()
        with pytest.raises(WorkerLostError, match=r"exit code 1.*RuntimeError: No CUDA GPUs are available"):
            worker.environment()
    with pytest.raises(WorkerGoneError, match=r"3 workers in a row ended before they answered: .*No CUDA GPUs"):
        worker.start()


def test_what_a_worker_prints_before_its_tuner_looks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ForkServer._ask

    def slow(server: ForkServer, request: Any, *rest: Any) -> Any:
        answer = ask(server, request, *rest)
        if request[0] == "fork":
            wait_for(lambda: not alive(answer))
        return answer

    monkeypatch.setattr(ForkServer, "_ask", slow)
    worker = Worker(0, SERVER + "NeverStarts")
    worker.start()
    with pytest.raises(WorkerLostError, match="No CUDA GPUs are available"):
        worker.environment()


def test_a_problem_that_kills_every_worker_ends_and_the_next_one_is_staged() -> None:
    worker = Worker(0, SERVER + "DiesStaging", pause_seconds=0.0)
    for _ in range(2):
        worker.start()
        with pytest.raises(WorkerLostError, match="killed by SIGSEGV"):
            worker.stage(COPY)
    worker.start()
    assert worker.stage(INPLACE).copy_us == 9.0
    for _ in range(3):  # one staged problem, and lost workers are counted from 0 again
        worker.start()
    worker.stop()


def test_a_worker_killed_from_outside_is_lost_and_comes_back() -> None:
    worker = Worker(0, SERVER + "CpuServer")
    worker.start()
    worker.stage(COPY)
    good = ranked(COPY)[-1]
    for _ in range(3):
        assert worker._child is not None
        threading.Timer(0.05, os.kill, (worker._child.pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerLostError, match="killed by SIGKILL"):
            collections.deque((worker.measure(good) for _ in range(10_000)), 0)
        worker.start()
        worker.stage(COPY)
    assert worker.measure(good).timing.median_us == cost(good)
    worker.stop()


def test_a_killed_fork_server_takes_its_children_with_it_and_is_replaced() -> None:
    worker = Worker(0, SERVER + "CpuServer", pause_seconds=0.0)
    worker.start()
    worker.stage(COPY)
    with CompilerPool(1) as pool:
        pool.submit(pow, 1, 1).result()
        children = [worker._child.pid, *pool._children] if worker._child else []
        os.kill(fork_server()._process.pid, signal.SIGKILL)
        wait_for(lambda: len(children) == 2 and not any(map(alive, children)))
        with pytest.raises(WorkerLostError, match="killed by SIGKILL"):
            worker.stage(COPY)
        assert "the compiler was lost" in compiled(pool.submit(pow, 2, 2))
        assert pool.submit(pow, 2, 3).result() == 8
    worker.start()
    assert worker.stage(COPY).copy_us == 9.0
    worker.stop()


CALLER = ("generator.processes.serve",)  # the only import that ``sleeping`` needs


def sleeping(server: ForkServer) -> Child:
    log = tempfile.TemporaryFile(dir=cache_folder("logs"))  # noqa: SIM115 - its child closes it
    child = server.fork("generator.processes.serve:Caller", (), log)
    assert child.ask((0, "call", (pow, (2, 5), {})), BACKSTOP_SECONDS) == (0, "done", 32)
    return child


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has addresses that are in no folder")
def test_tuners_of_a_host_share_what_forks_and_each_ends_with_its_own() -> None:
    own = ForkServer.started(CALLER)
    assert own.address is not None
    first, second = ForkServer.joined(own.address), ForkServer.joined(own.address)
    assert first is not None
    assert second is not None
    children = [sleeping(server) for server in (own, first, second)]
    parents = {Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1] for child in children}
    assert parents == {str(own._process.pid)} if own._process else False
    first.close()
    for _ in range(2):  # by the second fork the server has noticed that the client is gone
        sleeping(own).stop()
    assert not alive(children[1].pid)
    assert not first.alive
    assert all(child.ask((1, "call", (pow, (3, 2), {})), BACKSTOP_SECONDS) == (1, "done", 9) for child in children[::2])
    children[2].stop()
    third = sleeping(second)
    own.close()
    wait_for(lambda: not any(alive(child.pid) for child in (children[0], third)))
    with pytest.raises(LostError, match="the process that starts others died"):
        sleeping(second)
    assert not second.alive
    assert ForkServer.joined(own.address) is None, "it is gone: a tuner then starts one of its own"
    for child in (children[0], children[1], third):
        child.stop()
    second.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has addresses that are in no folder")
def test_nothing_is_forked_for_another_user_nor_asked_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer.started(())
    assert server.address is not None
    ends = socket.socketpair()
    assert all(map(forkserver._of_this_user, ends))
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert not any(map(forkserver._of_this_user, ends))
    assert ForkServer.joined(server.address) is None
    for end in ends:
        end.close()
    server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has addresses that are in no folder")
def test_what_one_tuner_does_is_no_others_trouble() -> None:
    """One tuner waits for a child twice; another leaves in the middle of a request, with its answers unread."""
    own = ForkServer.started(CALLER)
    assert own.address is not None
    children = [sleeping(own), sleeping(own)]
    children[0].end()
    assert own.reap(children[0].pid, 0.0) == signal.SIGKILL
    children[0].log.close()
    gone = ForkServer.joined(own.address)
    assert gone is not None
    gone._channel.send((1, ("prepare",), 0), BACKSTOP_SECONDS)
    gone._channel.send((2, ("fork", "generator.processes.serve:Caller", (), {}, "/"), 2), BACKSTOP_SECONDS)
    gone.close()
    assert children[1].ask((1, "call", (pow, (3, 2), {})), BACKSTOP_SECONDS) == (1, "done", 9)
    sleeping(own).stop()
    children[1].stop()
    own.close()


def test_a_log_that_another_has_emptied_has_no_tail() -> None:
    server = ForkServer.started(CALLER)
    child = sleeping(server)
    child.log_start = 10**6
    assert child.tail() == ""
    child.stop()
    server.close()


def test_a_process_that_cannot_be_started_is_said_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example where too many processes run: the server answers with the error."""
    server = ForkServer.started(CALLER)
    child = sleeping(server)
    ask = server._ask
    monkeypatch.setattr(
        server, "_ask", lambda request, *rest: "Too many" if request[0] == "fork" else ask(request, *rest)
    )
    with pytest.raises(LostError, match="no process could be started: Too many"):
        sleeping(server)
    assert child.ask((1, "call", (pow, (3, 2), {})), BACKSTOP_SECONDS) == (1, "done", 9)
    child.stop()
    server.close()


def test_what_forks_prepares_when_it_is_told_to(cache: Path) -> None:
    server = ForkServer.started((), ("tests.broken.server:leave_a_mark",))
    server.prepare()
    wait_for((cache / "marks" / "mark").exists)
    server.close()


def test_a_server_that_still_imports_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a command that is refused at once also ends at once. A server that serves already ends its children first."""
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    server, serving = ForkServer.started(("endless",)), ForkServer.started(CALLER)
    child = sleeping(serving)
    server.close()
    assert server._process is not None
    assert server._process.returncode == -signal.SIGTERM
    serving.close()
    assert serving._process is not None
    assert serving._process.returncode == 0
    wait_for(lambda: not alive(child.pid))
    child.stop()


def test_a_stopped_worker_takes_what_it_started_with_it(cache: Path) -> None:
    worker = Worker(0, SERVER + "HasChildren")
    worker.start()
    worker.stage(COPY)
    with pytest.raises(WorkerLostError, match=r"it hung, and was killed; it printed last: started \d+ from \d+ hung"):
        worker.measure(ranked(COPY)[0])
    assert not any(alive(pid) for pid in started(cache))


def test_a_killed_tuner_leaves_no_process_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "now", lambda _: 0.0)  # time stands still, so nothing runs out of time

    def tuner() -> None:
        worker = Worker(0, SERVER + "HasChildren")
        pool = CompilerPool(2)
        worker.start()
        worker.stage(COPY)
        for _ in range(3):
            pool.submit(sleep_in_two_processes)
        worker.measure(ranked(COPY)[0])

    pid = forked(tuner)
    pids: list[int] = []
    wait_for(lambda: len(pids := started(cache)) == 6 and all(map(alive, pids)))
    pids = started(cache)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not any(map(alive, pids)))


def sleep_in_two_processes() -> None:
    with (cache_folder("logs") / "worker-compiler.log").open("a") as log:
        log.write(f"started {subprocess.Popen(['sleep', '3600']).pid} from {os.getpid()}\n")
    signal.pause()


def started(cache: Path) -> list[int]:
    """The ids of processes that workers wrote into their logs."""
    text = "".join(path.read_text() for path in sorted((cache / "logs").glob("worker-*.log")))
    return [int(n) for line in re.findall(r"started (\d+) from (\d+)\n", text) for n in line]


# --- what results are judged by -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_a_fingerprint_is_another_when_any_one_value_is(dtype: torch.dtype) -> None:
    tensor = torch.arange(64).to(dtype)
    before = fingerprint([tensor, tensor.clone()])
    assert before == fingerprint([tensor, tensor.clone()])
    for place in range(64):
        kept, tensor[place] = tensor[place].clone(), 77
        changed = fingerprint([tensor])
        tensor[place] = kept
        assert changed != before[:1]
    assert fingerprint([tensor]) == before[:1]
    assert fingerprint([]) == []


def test_canaries_are_laid_again() -> None:
    tensor = guarded((3, 5), torch.bfloat16, "cpu").zero_()
    for place in (-1, 15):
        tensor.as_strided((1,), (1,), tensor.storage_offset() + place).fill_(1)
        assert not intact(tensor)
        guard(tensor)
        assert intact(tensor)
    assert not tensor.any(), "and nothing else is touched"


# --- compilers ------------------------------------------------------------------------------------------------------


def test_a_compiler_that_hangs_or_crashes_is_replaced_and_the_others_answer() -> None:
    with CompilerPool(2) as pool:
        tasks = [pool.submit(hang), pool.submit(os.abort), pool.submit(sys.exit, 3), pool.submit(int, "x")]
        good = [pool.submit(pow, 2, n) for n in range(20)]
        assert [task.result() for task in good] == [2**n for n in range(20)]
        assert (
            compiled(tasks[0])
            == f"the compiler was lost: no answer in 20 s: it hung, and was killed; it printed last: {HUNG}"
        )
        assert "the process died (killed by SIGABRT)" in compiled(tasks[1])
        assert "the process died (exit code 1)" in compiled(tasks[2])
        assert compiled(tasks[3]).startswith("ValueError: invalid literal")


def first_kernel(variant: Any) -> tuple[Any, list[bool], set[str]]:
    """What a kernel needs; whether two caches were filled before it was compiled; and the packages that compiling imported."""
    import triton.runtime.cache  # noqa: PLC0415 - as the compiler does

    read = [bool(f.cache_info().currsize) for f in (structures, triton.runtime.cache.triton_key)]
    before = set(sys.modules)
    needs = compile_variant(COPY, variant, "sm_90")
    return needs, read, {name.partition(".")[0] for name in set(sys.modules) - before}


def test_compilers_are_forked_with_what_compiling_would_do_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All children but the first: that is a worker, which wakes its GPU while the server prepares the others."""
    monkeypatch.setattr(forkserver, "LATER", LATER)
    monkeypatch.setattr(forkserver, "_SERVERS", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    variant = ranked(COPY)[0]
    found = []
    for _ in range(2):
        with CompilerPool(1) as pool:
            found.append(pool.submit(first_kernel, variant).result())
    fork_server().close()
    (first, *_), (second, *_) = found
    assert first == second
    assert not isinstance(first, str), first
    assert [read for _, read, _ in found] == [[False, False], [True, True]]
    assert not {"torch", "sympy"} & (found[0][2] | found[1][2]), "arithmetic on the device meta imports them, for 2 s"


def test_what_forks_compilers_asks_a_family_from_outside_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(compiler, "WORKLOADS", collections.defaultdict(lambda: asked.append("a family")))
    monkeypatch.setattr(compiler, "structures", lambda: asked.append("its texts"))
    for outside, wanted in (("family.py", []), (None, ["its texts"])):
        monkeypatch.setattr(compiler, "OUTSIDE", outside)
        compiler.prepare()
        assert asked == wanted


def test_a_pool_that_is_shut_down_waits_for_nothing() -> None:
    pool = CompilerPool(2)
    tasks = [pool.submit(signal.pause) for _ in range(4)]  # for ever, by the clock of these tests
    wait_for(lambda: all(task.running() for task in tasks[:2]))
    pool.shutdown(wait=False, cancel_futures=True)
    assert "killed by SIGKILL" in compiled(tasks[0]) or "shut down" in compiled(tasks[0])
    assert all(task.cancelled() for task in tasks[2:])


# --- the wire -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"Traceback (most recent call last):\n",
        HEAD.pack(MARK[::-1], len(pickle.dumps(1))) + pickle.dumps(1),
        HEAD.pack(MARK, 2**40),
        HEAD.pack(MARK, 3) + b"\x80\x05?",
        HEAD.pack(MARK, len(pickle.dumps(os.system))) + pickle.dumps(os.system),
        HEAD.pack(MARK, len(pickle.dumps(ranked))) + pickle.dumps(ranked),
    ],
    ids=["text", "mark", "length", "torn", "function", "ours"],
)
def test_what_is_no_answer_is_garbled(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.send(sent)
    with pytest.raises(GarbledError):
        Channel(ours).receive(BACKSTOP_SECONDS)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [Timing(1.0, 0.1)],
        [Compared(())],
        [Compared(((),))],
        [Compared(((1.0, math.nan),))],
        [Compared(((1.0,),), ((-1.0,),))],
        [Compared(1.0)],  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_what_is_no_comparison_of_each_finalist_is_nonsense(answer: Any) -> None:
    worker = Worker(0)
    for value, right in (([Compared(((1.0, 2.0),), ((3.0,),))], True), (answer, False)):
        asked = types.SimpleNamespace(ask=lambda message, _, v=value: (message[0], "done", v), lost=LostError)
        worker._child = asked  # type: ignore[assignment]
        if right:
            assert worker.compare([None]) == value
        else:
            with pytest.raises(WorkerLostError, match="nonsense to compare"):
                worker.compare([None])


@pytest.mark.parametrize("answer", [(0, "done", 7), (1, "done", "7"), (1, "failed", 7), 7])
def test_an_answer_to_another_question_is_no_answer(answer: Any) -> None:
    """For example an answer that was on its way when Ctrl-C came."""
    worker = Worker(0)
    worker._child = types.SimpleNamespace(ask=lambda _message, _seconds: answer, lost=LostError)
    with pytest.raises(WorkerLostError, match="it answered nonsense to free_bytes, and was killed"):
        worker.free_bytes()
    worker._asked = 0
    worker._child = types.SimpleNamespace(ask=lambda _message, _seconds: (1, "done", 7))
    assert worker.free_bytes() == 7
    worker._child = None


def test_a_message_of_any_size_comes_whole_and_the_end_is_seen() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    for message in (None, {"a": [1.5, "b"]}, b"x" * 5_000_000):
        thread = threading.Thread(target=theirs.send, args=(message,))
        thread.start()
        assert ours.receive(BACKSTOP_SECONDS) == message
        thread.join()
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    theirs.close()
    with pytest.raises(ClosedError):
        ours.receive(BACKSTOP_SECONDS)
    with pytest.raises(ClosedError):
        ours.send("anybody?", BACKSTOP_SECONDS)
    ours.close()
