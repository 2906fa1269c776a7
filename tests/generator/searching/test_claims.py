"""Claims: one tuner and no other, until it is dead; and then one again. By a clock that the tests set."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from generator.searching import queues as queues_module
from generator.searching.claims import BEATS, Claims, Heart, first_says
from generator.searching.queues import MixedDevicesError, Shared, TakenOverError, owner_name, scope_of, share_storage
from generator.searching.run import Orders, Run, Tools, tune_all
from generator.searching.search import Outcome
from generator.storage.backends import opened_storage
from generator.storage.journal import KEY, Journal
from generator.storage.record import read_record, save_winner
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.processes import BACKSTOP_SECONDS, wait_for
from tests.support.records import winner
from tests.support.sharing import PROBLEMS
from tuned.families.gru_cell.variant import default_variant
from tuned.lookup.record import winner_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

FIRST, SECOND = PROBLEMS[:2]
NO_END = math.inf


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["journal file", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    url = None if request.param == "journal file" else f"sqlite:///{tmp_path}/trials.db"
    with opened_storage(url, "test_gpu", tmp_path / "trials.log") as opened:
        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def claims(storage: Any, clock: Clock) -> Any:
    return lambda owner: Claims(storage, "scope", owner, stale_s=60.0, clock=clock)


def test_what_one_has_claimed_no_other_can(claims: Any) -> None:
    ours, theirs = claims("a"), claims("b")
    nothing = ours.look()
    assert nothing == {}
    assert ours.claim("x", nothing.get("x")) is not None
    assert theirs.claim("x", nothing.get("x")) is None, "it looked before"
    attempt = theirs.look()["x"]
    assert (attempt.owner, attempt.live, attempt.complete) == ("a", True, False)


def test_of_many_at_once_one_gets_it(storage: Any) -> None:
    barrier = threading.Barrier(8)

    def ask(owner: str) -> bool:
        barrier.wait(BACKSTOP_SECONDS)
        return Claims(storage, "scope", owner).claim("x", None) is not None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, "abcdefgh")) == 1


def test_a_claim_lives_as_long_as_its_heart_beats(claims: Any, clock: Clock) -> None:
    ours, theirs = claims("a"), claims("b")
    held = ours.claim("x", None)
    for _ in range(5):
        assert theirs.look()["x"].live
        clock.now += 50
        ours.beat(held)
    assert theirs.look()["x"].live
    clock.now += 59
    assert theirs.look()["x"].live
    clock.now += 1
    assert not theirs.look()["x"].live
    assert not ours.lost(held), "nobody has taken it yet"


def test_an_observer_that_has_just_come_waits_as_long_as_any(claims: Any, clock: Clock) -> None:
    claims("a").claim("x", None)
    clock.now = 1e6  # hosts' clocks mean nothing to each other
    theirs = claims("b")
    assert theirs.look()["x"].live
    clock.now += 60
    assert not theirs.look()["x"].live


@pytest.mark.parametrize("late", ["before", "after"])
def test_an_observer_that_stood_still_itself_takes_nothing_from_the_living(
    storage: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    ours, theirs = (Claims(storage, "scope", owner, stale_s=60.0, clock=clock) for owner in "ab")
    held = ours.claim("x", None)
    read = storage.get_all_studies

    def slow() -> Any:
        """A reading in whose middle the observer's machine sleeps, and the owner's does not."""
        found = read() if late == "after" else None
        clock.now += 100
        ours.beat(held)
        return found or read()

    theirs.look()
    monkeypatch.setattr(storage, "get_all_studies", slow)
    assert theirs.look()["x"].live
    monkeypatch.setattr(storage, "get_all_studies", read)
    clock.now += 1
    assert theirs.look()["x"].live


def test_a_dead_claim_is_taken_over_by_one(claims: Any, clock: Clock) -> None:
    ours, theirs, third = claims("a"), claims("b"), claims("c")
    held = ours.claim("x", None)
    seen = theirs.look()["x"], third.look()["x"]
    clock.now += 60
    taken = theirs.claim("x", seen[0])
    assert taken.number == 2
    assert third.claim("x", seen[1]) is None
    assert ours.lost(held)
    assert third.look()["x"].owner == "b"
    # The one that was only asleep ends its work, too late.
    assert not ours.end(held, {"winner": "a's"}, complete=True)
    assert not third.look()["x"].complete
    assert theirs.end(taken, {"winner": "b's"}, complete=True)
    assert third.look()["x"].ended == {"winner": "b's", "complete": True}


def test_who_ends_while_another_takes_over_is_heard(claims: Any, clock: Clock) -> None:
    ours, theirs = claims("a"), claims("b")
    held = ours.claim("x", None)
    seen = theirs.look()["x"]
    clock.now += 60
    assert ours.end(held, {"winner": "a's"}, complete=True), "b has not claimed it yet"
    assert theirs.claim("x", seen) is None
    attempt = claims("c").look()["x"]
    assert (attempt.number, attempt.ended) == (2, {"winner": "a's", "complete": True})


def test_an_end_that_was_read_late_does_not_count(claims: Any, clock: Clock, storage: Any, monkeypatch: Any) -> None:
    ours, theirs, third = claims("a"), claims("b"), claims("c")
    held = ours.claim("x", None)
    seen = theirs.look()["x"]
    clock.now += 60
    names = storage.get_all_studies()  # read by c before b takes over
    assert theirs.claim("x", seen) is not None
    ours.end(held, {"winner": "a's"}, complete=True)
    late = {s.study_name: s for s in storage.get_all_studies()}
    monkeypatch.setattr(
        storage, "get_all_studies", lambda: [late[s.study_name] for s in names]
    )  # and their attributes after
    attempt = third.look()["x"]
    assert (attempt.number, attempt.complete, attempt.live) == (2, False, True)


def test_what_was_given_back_is_free_at_once(claims: Any) -> None:
    ours, theirs = claims("a"), claims("b")
    ours.end(ours.claim("x", None), {"reason": "interrupted"}, complete=False)
    attempt = theirs.look()["x"]
    assert not attempt.live
    assert not attempt.complete
    assert theirs.claim("x", attempt) is not None


def test_the_claims_of_the_dead_are_ended_by_who_knows(claims: Any) -> None:
    dead, parent = claims("dead"), claims("parent")
    done, held = dead.claim("done", None), dead.claim("held", None)
    dead.end(done, {"winner": "w"}, complete=True)
    assert claims("living").claim("other", None)
    parent.abandon("dead")
    attempts = parent.look()
    assert attempts["done"].complete
    assert (attempts["held"].live, attempts["held"].complete) == (False, False)
    assert attempts["other"].live
    assert not dead.lost(held)


def test_another_scope_is_another_set_of_work(storage: Any) -> None:
    assert Claims(storage, "scope", "a").claim("x", None) is not None
    assert Claims(storage, "another", "a").claim("x", None) is not None


def test_a_heart_beats_until_it_is_told_to_stop(storage: Any) -> None:
    claims = Claims(storage, "scope", "a", stale_s=0.06)
    held = claims.claim("x", None)
    assert held is not None
    assert claims.beat_s == 0.06 / BEATS
    heart = Heart(claims)
    with heart:
        heart.hold(held)
        wait_for(lambda: held.beat >= 3)
        Claims(storage, "scope", "b").claim("x", claims.look()["x"])
        wait_for(lambda: heart.lost)
        heart.hold(None)
        beat = held.beat
        time.sleep(0.05)
    assert held.beat == beat


def test_the_first_to_say_something_decides(storage: Any) -> None:
    assert first_says(storage, "device", "a") == "a"
    assert first_says(storage, "device", "b") == "a"
    storage.create_new_study([1], "half said")  # by one that died before it could say what
    assert first_says(storage, "half said", "b", patience_s=0.05) == "b"


def test_only_one_model_of_gpu_shares_a_storage(storage: Any) -> None:
    share_storage(storage, "nvidia_h200")
    share_storage(storage, "nvidia_h200")
    with pytest.raises(
        MixedDevicesError, match=r"this storage is that of nvidia_h200, this GPU is nvidia_a100.*a database of its own"
    ):
        share_storage(storage, "nvidia_a100")


# --- the queue of problems over them --------------------------------------------------------------------------------


def outcome(problem: Any, median_us: float = 4.5) -> Outcome:
    variant = default_variant(problem.spec, problem.size)
    made = winner(
        "gru_cell_1024_inplace_64", spec=problem.spec, size=problem.size, variant=variant, median_us=median_us
    )
    made = dataclasses.replace(made, name=problem.name)
    return Outcome(made, measured=10, failed={}, pool=20, declared=40, remembered=0)


def wait_for_nothing(what: str) -> None:
    pytest.fail(f"waits for {what}")


@pytest.fixture
def queue(claims: Any) -> Any:
    return lambda owner, problems=(FIRST, SECOND): Shared(problems, claims(owner), poll_s=0.01)


def test_two_queues_give_each_problem_once_and_all_winners_to_both(queue: Any) -> None:
    a, b = queue("a"), queue("b")
    assert a.take(NO_END, wait_for_nothing) == FIRST
    assert b.take(NO_END, wait_for_nothing) == SECOND
    assert a.end(outcome(FIRST), complete=True)
    assert b.end(outcome(SECOND), complete=True)
    assert a.take(NO_END, wait_for_nothing) is None
    assert b.take(NO_END, wait_for_nothing) is None
    assert [w.name for w in a.news()] == [SECOND.name], "what others found, not its own"
    assert b.news() == [outcome(FIRST).winner]
    assert a.news() == []
    assert a.left() == {}
    assert a.done == b.done == 2


def test_a_queue_waits_for_what_others_do_and_takes_over_what_they_leave(queue: Any) -> None:
    a, b = queue("a"), queue("b")
    assert a.take(NO_END, wait_for_nothing) == FIRST
    assert b.take(NO_END, wait_for_nothing) == SECOND
    b.end(outcome(SECOND), complete=True)
    waits: list[str] = []

    def waiting(what: str) -> None:
        waits.append(what)
        if len(waits) == 3:
            a.end("the GPU did not measure it", complete=False)

    assert b.take(NO_END, waiting) == FIRST
    assert waits == [f"{FIRST.name} (a)"] * 3
    assert a.take(time.monotonic() + 0.05, waiting) is None, "it has tried its part"
    assert a.left() == {}


def test_a_dead_owner_is_not_waited_for(queue: Any, clock: Clock) -> None:
    a, b = queue("a"), queue("b", [FIRST])
    a.take(NO_END, wait_for_nothing)

    def waiting(what: str) -> None:
        del what
        clock.now += 30

    assert b.take(NO_END, waiting) == FIRST


def test_the_end_of_the_budget_ends_the_wait(queue: Any) -> None:
    a, b = queue("a"), queue("b", [FIRST])
    a.take(NO_END, wait_for_nothing)
    assert b.take(time.monotonic() + 0.05, lambda _: None) is None
    assert b.left() == {FIRST.name: "a was still at it"}
    assert queue("c", [FIRST, SECOND]).left()[SECOND.name] == queues_module.NO_TIME


def test_what_is_held_at_the_end_is_given_back(queue: Any) -> None:
    a, b = queue("a"), queue("b")
    with a:
        a.take(NO_END, wait_for_nothing)
    assert b.take(NO_END, wait_for_nothing) == FIRST


def test_a_winner_that_was_cut_short_does_not_end_the_problem(queue: Any) -> None:
    a, b = queue("a", [FIRST]), queue("b", [FIRST])
    a.take(NO_END, wait_for_nothing)
    assert a.end(outcome(FIRST, 5.0), complete=False)
    assert b.take(NO_END, wait_for_nothing) == FIRST
    b.end(outcome(FIRST, 4.0), complete=True)
    assert a.take(NO_END, wait_for_nothing) is None
    assert [w.median_us for w in a.news()] == [4.0]


def test_who_was_taken_over_notices(storage: Any) -> None:
    a = Shared([FIRST], Claims(storage, "scope", "a", stale_s=0.06))
    b = Claims(storage, "scope", "b")
    with a:
        a.take(NO_END, wait_for_nothing)
        a.check()
        ((key, seen),) = b.look().items()
        assert b.claim(key, seen) is not None
        wait_for(lambda: a._heart.lost)
        with pytest.raises(TakenOverError, match="taken over by another tuner"):
            a.check()
        assert not a.end(outcome(FIRST), complete=True)


def test_a_result_that_comes_after_another_took_over_does_not_count(storage: Any, clock: Clock, tmp_path: Path) -> None:
    a, b = (Claims(storage, "scope", owner, stale_s=60.0, clock=clock) for owner in "ab")
    taken: list[Any] = []

    def cost(*_: Any) -> float:
        if not taken:  # while a measures, b finds it dead
            b.look()
            clock.now += 60
            ((key, seen),) = b.look().items()
            taken.append(b.claim(key, seen))
        return 4.0

    def report(_: int, progress: Any) -> None:
        if progress.note.startswith("waiting"):
            b.end(taken[0], {"winner": winner_to_json(outcome(FIRST, 3.0).winner)}, complete=True)

    worker = FakeWorker(cost)
    worker.start()
    run = Run([FIRST])
    tools = Tools(worker, FakeCompiler(), Journal(storage), ENVIRONMENT)  # type: ignore[arg-type]
    tune_all(
        run, tools, Orders(run.problems, 10, folder=tmp_path), queue=Shared([FIRST], a, poll_s=0.01), report=report
    )
    assert not run.outcomes
    assert [w.median_us for w in run.winners] == [w.median_us for w in read_record("test_gpu", tmp_path)] == [3.0]


def test_what_the_budget_cut_short_is_kept_and_left_to_others(
    queue: Any, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)

    def cost(*_: Any) -> float:
        clock.now += 0.03
        return 4.0

    worker = FakeWorker(cost)
    worker.start()
    run = Run([SECOND])
    tools = Tools(worker, FakeCompiler(), Journal(storage), ENVIRONMENT)  # type: ignore[arg-type]
    tune_all(run, tools, Orders(run.problems, 10, time.monotonic() + 0.1, folder=tmp_path), queue=queue("a", [SECOND]))
    monkeypatch.undo()
    assert [w.name for w in read_record("test_gpu", tmp_path)] == list(run.outcomes) == [SECOND.name]
    assert queue("b", [SECOND]).take(NO_END, wait_for_nothing) == SECOND


def test_the_time_that_is_left_is_divided_among_those_at_work(queue: Any) -> None:
    a, b = queue("a", PROBLEMS), queue("b", PROBLEMS)
    a.take(NO_END, wait_for_nothing)
    assert a.share == 1 / len(PROBLEMS)
    b.take(NO_END, wait_for_nothing)
    assert b.share == 2 / len(PROBLEMS)
    assert b.following() == PROBLEMS[2]


def test_what_others_found_does_not_take_the_place_of_something_better(storage: Any, tmp_path: Path) -> None:
    theirs = {p: outcome(p, us) for p, us in zip(PROBLEMS, (4.0, 5.0, 5.0), strict=False)}
    for problem, found in theirs.items():
        b = Shared([problem], Claims(storage, "scope", "b"))
        b.take(NO_END, wait_for_nothing)
        b.end(found, complete=True)
    first, second, third = (p.name for p in theirs)
    ours = [outcome(p, 4.5).winner for p in theirs]
    stale = dataclasses.replace(ours[2], digests=dict.fromkeys(ours[2].digests, "another"))
    for row in (*ours[:2], stale):
        save_winner(row, tmp_path)
    run = Run(list(theirs))
    tools = Tools(FakeWorker(lambda *_: 1.0), FakeCompiler(), Journal(storage), ENVIRONMENT)  # type: ignore[arg-type]
    tune_all(
        run, tools, Orders(run.problems, 10, folder=tmp_path), queue=Shared(run.problems, Claims(storage, "scope", "a"))
    )
    assert {w.name: w.median_us for w in read_record("test_gpu", tmp_path)} == {first: 4.0, second: 4.5, third: 5.0}
    assert set(run.others) == {first, second, third}


def test_tuners_share_only_what_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = scope_of(ENVIRONMENT, 96)
    assert scope == scope_of(dict(ENVIRONMENT), 96)
    assert scope.startswith("test_gpu/")
    others = [scope_of(ENVIRONMENT, 95), *(scope_of({**ENVIRONMENT, key: "another"}, 96) for key in KEY)]
    monkeypatch.setattr(queues_module, "digests", dict)
    assert len({scope, *others, scope_of(ENVIRONMENT, 96)}) == 3 + len(KEY)


def test_tuners_that_measure_a_short_list_share_with_those_of_the_same_list(storage: Any) -> None:
    def queue(candidates: Any) -> Any:
        return Orders([FIRST], 96, candidates=candidates).queue(storage, ENVIRONMENT, "a")

    lists = [None, lambda *_: ["a"], lambda *_: ["a", "b"]]
    for candidates in lists:
        one = queue(candidates)
        assert one.take(NO_END, wait_for_nothing) == FIRST
        one.end(outcome(FIRST), complete=True)
        assert queue(candidates).take(NO_END, wait_for_nothing) is None


def test_no_two_tuners_have_one_name() -> None:
    assert owner_name(0) != owner_name(0)
    assert "GPU 3" in owner_name(3)


def test_a_winner_comes_through_the_storage_as_it_was(queue: Any) -> None:
    a, b = queue("a", [FIRST]), queue("b", [FIRST])
    a.take(NO_END, wait_for_nothing)
    a.end(outcome(FIRST), complete=True)
    assert b.take(NO_END, wait_for_nothing) is None
    (told,) = b.news()
    assert winner_to_json(told) == winner_to_json(outcome(FIRST).winner)
