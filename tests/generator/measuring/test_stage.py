"""What a stage times, on which memory, and which results it rejects: tensors and checks are real, the clock is made up."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.measuring import check
from generator.measuring import compile as compiling
from generator.measuring import stage as module
from generator.measuring.bench import Emptied, Timing
from generator.measuring.compile import AT_LAUNCH
from generator.measuring.stage import (
    ALLOCATIONS,
    EAGER_US,
    EMPTIED_SETS,
    FINAL_ROUNDS,
    IDLE_S,
    MAX_SETS,
    REFERENCE,
    WARM_US,
    Compared,
    DamagedError,
    WrongResultError,
    dependent,
    middle,
    rotation,
)
from generator.selection import problem_named
from generator.workload import WORKLOADS, default_problems
from tests.broken.server import COPY, FOREIGN_US, INPLACE, CpuServer, CpuStage, cost, ranked
from tuned.families.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from generator.problem import Problem

L2 = 60 * 2**20  # of an H200
FREE = 140 * 2**30
DEPENDENT = next(v for v in ranked(COPY) if v.pdl)
PLAIN = next(v for v in ranked(COPY) if not v.pdl)


class Staged(CpuStage):
    """Remembers how the clock was called; ``spoil`` may change a call after it ran; times depend on the memory."""

    def __init__(self, problem: Problem) -> None:
        self.asked: list[dict[str, Any]] = []
        self.spoil: Callable[[Any, Any], None] = lambda _variant, _call: None
        super().__init__(problem, CpuServer(0))
        self.memories = [self.place_of()]

    def place_of(self) -> int:
        return int(self.calls[0].out.data_ptr())

    def run(self, variant: Any, call: Any) -> None:
        super().run(variant, call)
        self.spoil(variant, call)

    def stopwatch(self, thunks: Sequence[Any], **how: Any) -> Timing:
        self.asked.append(how)
        if self.place_of() not in self.memories:
            self.memories.append(self.place_of())
        timing = super().stopwatch(thunks, **how)
        slower = 1 + 0.12 * (thunks != [self.foreign] and self.memories.index(self.place_of()) == 1)
        return Timing(timing.median_us * slower, timing.spread_us)


# --- sets of inputs ---------------------------------------------------------------------------------------------------


def touched(problem: Problem) -> int:
    """The bytes that a launch reads or writes, each counted once."""
    work = WORKLOADS[problem.family]
    moved = work.bytes_moved(problem.spec, problem.size)
    return moved // 2 if getattr(problem.spec, "inplace", False) else moved


@pytest.mark.parametrize("family", sorted(WORKLOADS))
def test_what_is_touched_fills_the_l2_twice_or_the_l2_is_emptied(family: str) -> None:
    for problem in default_problems(family):
        count, empties = rotation(problem, L2, FREE)
        assert empties or count * touched(problem) >= 2 * L2, problem.name
        assert count <= (EMPTIED_SETS if empties else MAX_SETS)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama3_8b_2x4096", (2, False)),
        ("llama3_8b_decode_64x1", (120, False)),
        ("llama3_8b_inplace_decode_64x1", (240, False)),
        ("llama3_8b_served_1x1", (EMPTIED_SETS, True)),
    ],
)
def test_of_a_table_that_is_read_in_part_only_that_part_counts(name: str, wanted: tuple[int, bool]) -> None:
    count, empties = rotation(problem_named(name), L2, FREE)
    assert (count, empties) == (pytest.approx(wanted[0], rel=0.02), wanted[1])


def test_where_memory_does_not_allow_the_l2_is_emptied() -> None:
    decode = problem_named("llama3_8b_decode_64x1")
    held = WORKLOADS["rope"].tensor_bytes(decode.spec, decode.size)
    assert rotation(decode, L2, (REFERENCE + 2) * held) == (2, True)
    assert rotation(decode, L2, (REFERENCE + 4 * 40) * held) == (40, True)
    large = problem_named("llama3_8b_2x4096")
    assert rotation(large, L2, 0) == (2, False), "two fill it, and there must be two"


def test_the_l2_is_emptied_for_what_is_timed_and_the_record_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Staged(COPY)
    emptied = Emptied(lambda: None, 30.0)
    asked = []

    def clock(launches: Any, **how: Any) -> Timing:
        del launches
        asked.append(how["emptied"])
        return Timing(5.0, 0.1)

    monkeypatch.setattr(module, "device_time", clock)
    stage.__dict__["emptied"] = emptied
    for empties in (False, True):
        stage.empties = empties
        asked.clear()
        stage.asked.clear()
        stage.measure(PLAIN)
        assert stage.baselines().emptied == empties
        assert {how["emptied"] for how in stage.asked} == {*asked} == {emptied if empties else None}


@pytest.mark.parametrize(
    ("us", "emptied_for", "sets"), [(EAGER_US / 9, [True, False], [4, 9]), (EAGER_US, [True], [4])]
)
def test_eager_is_timed_on_all_sets_unless_that_takes_long_each_result_in_memory_of_its_own(
    us: float, emptied_for: list[bool], sets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Staged(COPY)
    stage.__dict__["emptied"] = emptied = Emptied(lambda: None, 30.0)
    stage.calls, stage.empties = stage._inputs(9), False
    asked: list[Any] = []
    results: list[int] = []

    def clock(launches: Any, **how: Any) -> Timing:
        asked.append((how["emptied"] is emptied, len(launches)))
        if "replays" in how:  # PyTorch's eager operators are timed
            for launch in launches:
                launch()
            results[:] = [out.data_ptr() for out in launches[0].args[0]]
        return Timing(us, 0.1)

    monkeypatch.setattr(module, "device_time", clock)
    assert stage.baselines().eager_us == us
    assert asked[-len(sets) :] == list(zip(emptied_for, sets, strict=True))
    assert len(set(results)) == sets[-1]


# --- a GPU that waited ------------------------------------------------------------------------------------------------


def test_a_gpu_that_waited_is_warmed_and_one_that_did_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
    stage = Staged(COPY)
    for waited_s in (0.0, IDLE_S / 2, 2 * IDLE_S, IDLE_S / 2, 60.0):
        now += waited_s
        stage.measure(PLAIN)
    assert [how["warm_us"] for how in stage.asked] == [WARM_US, 0, WARM_US, 0, WARM_US]
    assert WARM_US <= IDLE_S * 1e6, "no longer than the wait"
    stage.asked.clear()
    now += 60.0
    stage.compare([PLAIN, ranked(COPY)[-1]])
    assert [how["warm_us"] for how in stage.asked].count(WARM_US) == 1, "and not each of the finalists"


# --- what was timed is checked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [COPY, INPLACE], ids=lambda p: p.name)
def test_what_was_right_before_and_wrong_while_timed_is_no_result(problem: Problem) -> None:
    stage = Staged(problem)
    variant = ranked(problem)[-1]
    assert stage.measure(variant).error <= 1

    def spoil(_: Any, call: Any) -> None:
        if call is not stage.probe:
            call.out.view(-1)[-1] += 1

    stage.spoil = spoil
    with pytest.raises(WrongResultError, match="after it was timed"):
        stage.measure(variant)
    stage.spoil = lambda _variant, _call: None
    assert stage.measure(variant).error <= 1, "nothing is left of it"


def test_what_the_timed_launches_did_not_write_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Staged(COPY)
    stage.measure(PLAIN)  # leaves right results where those of the next measurement go

    def idle(thunks: Any, restore: Any = None, poison: Any = None, **_: Any) -> Timing:
        del restore
        thunks[0]()
        poison()
        return Timing(1.0, 0.1)

    monkeypatch.setattr(stage, "clock", idle)
    with pytest.raises(WrongResultError, match="the worst error is inf times"):
        stage.measure(PLAIN)


def test_a_result_of_integers_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a family from outside may have: where there is no NaN, what is not written is the greatest value."""
    stage = Staged(COPY)
    out = check.guarded(stage.probe.out.shape, torch.int32, "cpu")
    stage.probe = dataclasses.replace(stage.probe, out=out)
    stage.wanted = stage.bound = torch.zeros(out.shape, dtype=torch.float64)
    monkeypatch.setattr(stage, "launches", lambda _: [out.zero_])
    assert stage.check(PLAIN)[0] == 0
    monkeypatch.setattr(stage, "launches", lambda _: [lambda: None])
    with pytest.raises(WrongResultError, match="the worst error is inf times"):
        stage.check(PLAIN)


@pytest.mark.parametrize("option", AT_LAUNCH)
def test_what_a_launch_needs_says_how_it_is_launched(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "compile_launch", lambda *_: types.SimpleNamespace(hash="one"))
    monkeypatch.setattr(compiling, "_read", lambda *_: compiling.Resources(32, 0, 0, "code"))
    launches = [
        Launch("kernel", 8, (number, torch.empty(1)), {}, {"num_warps": 4, option: on})
        for on, number in ((False, 1), (True, 1), (False, 2), (False, 1))
    ]
    plain, other, numbered, again = (compiling.resources(one, compiling.target_of("sm_90")) for one in launches)
    assert plain == again
    assert plain.machine_code == other.machine_code == numbered.machine_code
    assert len({plain.at_launch, other.at_launch, numbered.at_launch}) == 3
    (kept,) = (tmp_path / "resources").iterdir()
    assert "at_launch" not in json.loads(kept.read_text()), "older revisions read these files too"


def test_what_is_not_the_same_bit_by_bit_is_held_against_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    monkeypatch.setattr(module, "worst_error", lambda *_: held.append(0.9) or held[-1])
    stage = Staged(COPY)
    stage.measure(PLAIN)
    assert not held, "what is the same needs no more"

    def spoil(_: Any, call: Any) -> None:
        call.out.view(-1)[0] += float(call is not stage.probe)

    stage.spoil = spoil
    assert stage.measure(PLAIN).error <= 1
    assert held == [0.9]


@pytest.mark.parametrize("problem", [COPY, INPLACE], ids=lambda p: p.name)
def test_the_same_bits_are_held_against_the_reference_once(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[float] = []  # the errors that the check will return, one for each new result
    monkeypatch.setattr(check, "worst_error", lambda *_: errors.pop(0))
    stage = Staged(problem)
    one, other, *_ = ranked(problem)
    errors[:] = [0.5]
    assert [stage.measure(variant).error for variant in (one, other, one)] == [0.5] * 3

    def spoil(by: float) -> None:
        def spoiled(_: Any, call: Any) -> None:
            call.out.view(-1)[0] += by * (call is stage.probe)

        stage.spoil = spoiled

    spoil(1.0)
    errors[:] = [0.9]
    assert [stage.check(variant)[0] for variant in (one, other)] == [0.9] * 2, "others may be right too"
    spoil(2.0)
    errors[:] = [3.0]
    with pytest.raises(WrongResultError, match="the worst error is 3 times"):
        stage.check(one)
    spoil(1.0)
    assert stage.check(one)[0] == 0.9, "what is wrong is nothing that others are compared with"
    spoil(0.0)
    errors[:] = [0.5]
    assert stage.measure(one).error == 0.5
    assert not errors


def test_what_was_right_is_judged_by_and_must_stay_as_it_is() -> None:
    stage = Staged(COPY)
    stage.measure(PLAIN)
    assert stage.right is not None
    stage.right[0].view(-1)[3] += 1
    with pytest.raises(DamagedError, match="over a result that is right"):
        stage.verify()


@pytest.mark.parametrize("problem", [COPY, INPLACE], ids=lambda p: p.name)
def test_a_finalist_that_is_wrong_on_other_memory_is_found(problem: Problem) -> None:
    stage = Staged(problem)
    first, good, bad = stage.place_of(), *ranked(problem)[-2:]
    assert len(stage.compare([good, bad])) == 2

    def spoil(variant: Any, call: Any) -> None:
        if variant is bad and stage.place_of() != first:
            call.out.view(-1)[-1] += 1

    stage.spoil = spoil
    with pytest.raises(WrongResultError, match="after it was timed"):
        stage.compare([good, bad])
    assert stage.place_of() == first, "what is measured next is not left on other memory"
    assert stage.measure(good).error <= 1


# --- finalists --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [COPY, INPLACE], ids=lambda p: p.name)
def test_finalists_are_timed_on_other_memory_and_the_median_over_memories_counts(problem: Problem) -> None:
    stage = Staged(problem)
    calls, fresh, variants = stage.calls, stage.fresh, [v for v in ranked(problem) if not v.pdl][:3]
    compared = stage.compare(variants)
    assert len(set(stage.memories)) == ALLOCATIONS
    assert (stage.calls, stage.fresh) == (calls, fresh)
    for variant, one in zip(variants, compared, strict=True):
        us = cost(variant)
        assert one.rounds == ((us,) * FINAL_ROUNDS, (us * 1.12,) * FINAL_ROUNDS, (us,) * FINAL_ROUNDS)
        assert one.timing.median_us == us
        assert one.timing.spread_us == pytest.approx(0.06 * us, rel=0.01), "that it depends on the memory is said"
        assert not one.behind


def test_where_no_other_memory_is_left_it_is_said_on_how_many_it_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Staged(COPY)
    inputs, made = stage._inputs, 0

    def scarce(count: int) -> list[Any]:
        nonlocal made
        made += 1
        if made == ALLOCATIONS - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs(count)

    monkeypatch.setattr(stage, "_inputs", scarce)
    (one,) = stage.compare([PLAIN])
    assert len(one.rounds) == ALLOCATIONS - 1


def test_other_memory_has_the_same_numbers() -> None:
    stage = Staged(COPY)
    again = stage._inputs(2)
    for call, other in zip(stage.calls, again, strict=True):
        for name, tensor in vars(call).items():
            if isinstance(tensor, torch.Tensor) and tensor is not call.out:
                assert torch.equal(tensor, getattr(other, name)), name
                assert tensor.data_ptr() != getattr(other, name).data_ptr()


def test_where_one_launches_dependently_all_are_timed_behind_a_foreign_kernel_too() -> None:
    stage = Staged(COPY)
    for one, variant in zip(stage.compare([PLAIN, DEPENDENT]), (PLAIN, DEPENDENT), strict=True):
        behind = ((cost(variant),), ((cost(variant) + FOREIGN_US) * 1.12 - FOREIGN_US,), (cost(variant),))
        assert [us for (us,) in one.behind] == pytest.approx([us for (us,) in behind])
        assert one.timing.median_us == cost(variant), "the row keeps what is comparable with a copy"
    assert not stage.compare([PLAIN])[0].behind, "and where none does, nothing is spent on it"


@pytest.mark.parametrize("family", sorted(WORKLOADS))
def test_what_launches_dependently_is_known_by_its_knob(family: str) -> None:
    """The knob agrees with the options of the launches. A family from outside names it after the option, ``launch_pdl``."""
    work = WORKLOADS[family]
    if not hasattr(work.family.variant_type, "pdl"):
        assert family in {"gru", "gru_backward"}
        return
    problem = next(iter(default_problems(family)))
    default = work.family.default_variant(problem.spec, problem.size)
    call = work.inputs(problem.spec, problem.size, "meta", 0)
    for pdl in (False, True):
        variant = dataclasses.replace(default, pdl=pdl)
        options = [getattr(step, "options", {}) for step in work.family.launches(problem.spec, variant, call)]
        assert dependent(variant) == any(o.get("launch_pdl", False) for o in options)
    assert dependent(types.SimpleNamespace(launch_pdl=True))


def test_the_median_over_memories_is_of_their_medians() -> None:
    assert middle(((1.0, 3.0), (9.0, 9.0), (4.0, 5.0))) == 4.5
    assert Compared(((1.0,),)).timing == Timing(1.0, 0.0)
