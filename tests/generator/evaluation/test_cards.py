"""What calls get on cards that nobody measured: which shapes are tried, which choices are made, and which choices fail."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

from generator import commands
from generator.estimating.targets import TARGETS, UnknownTargetError
from generator.evaluation import cards
from generator.evaluation.cards import LIBRARY, ONE_LAUNCH, Room, cards_named, drawn, held, look, no_room
from generator.measuring.compile import Resources
from generator.workload import WORKLOADS
from tests.support.command_line import call
from tests.support.fakes import FakeCompiler
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, adapt, fit, rejection
from tuned.lookup.lookup import Choice
from tuned.lookup.record import load_record
from tuned.lookup.table import tables

if TYPE_CHECKING:
    import concurrent.futures

    from generator.problem import Problem

A100, RTX_4090, MI300X = (
    TARGETS[name] for name in ("nvidia_a100_sxm4_80gb", "nvidia_geforce_rtx_4090", "amd_instinct_mi300x")
)
NEED = Resources(registers=64, spill_bytes=0, shared_bytes=40_000, machine_code="", programs=100)
LAYER = ("bfloat16", 512), (16, 64)  # dtype, hidden size; batch, steps: the H200 has a row for it


def fits(problem: Problem, variant: Any) -> tuple[Room, ...]:
    del problem, variant
    return (Room(NEED, 4, waits=True),)


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_shapes_of_all_families_in_turn() -> None:
    first = drawn(40, 3)
    assert first == drawn(40, 3)
    assert first != drawn(40, 4)
    assert first[:8] == drawn(8, 3)
    assert [p.family for p in first] == [*WORKLOADS] * 8


def test_shapes_are_log_uniform_and_of_every_kind() -> None:
    problems = drawn(2000, 0)
    hidden = [p.spec.hidden for p in problems if p.family == "gru"]
    assert abs(sum(h < 181 for h in hidden) / len(hidden) - 0.5) < 0.1, "the middle of 16 and 2048 in octaves"
    seen = {
        name: {getattr(p.spec, name) for p in problems if hasattr(p.spec, name)}
        for name in ("dtype", "layout", "layers", "positions", "inplace", "direction", "precision")
    }
    assert seen["dtype"] == {"float32", "float16", "bfloat16"}
    assert seen["layout"] == {"sbhd", "bshd", "thd", "dense", "packed"}
    assert seen["layers"] == {1, 2, 3}
    assert len(seen["positions"]) == 3
    assert seen["inplace"] == {True, False}


def test_a_family_that_draws_no_shapes_is_asked_for_its_own_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "linear_cat"
    monkeypatch.setitem(WORKLOADS, name, dataclasses.replace(WORKLOADS[name], any_shape=None))
    own = set(WORKLOADS[name].problems())
    assert {p for p in drawn(40, 0) if p.family == name} <= own


# --- choices --------------------------------------------------------------------------------------------------------


def test_cards_without_a_table_are_looked_at_and_others_by_name() -> None:
    assert {"nvidia_h100_80gb_hbm3", "nvidia_h200"} <= tables().keys()
    assert [t.device for t in cards_named(None)] == [name for name in TARGETS if name not in tables()]
    assert cards_named("a100, 4090") == [A100, RTX_4090]
    with pytest.raises(UnknownTargetError, match="no single target 'rtx'"):
        cards_named("rtx")


def test_a_card_is_its_architecture_and_processors_whatever_it_is_called() -> None:
    problem = next(p for p in drawn(20, 0) if p.family == "gru")
    renamed = dataclasses.replace(TARGETS["nvidia_h200"], device="nvidia_a100_sxm4_80gb")
    asked = cards.ask(problem, renamed)
    assert asked.choice == cards.ask(problem, TARGETS["nvidia_h200"]).choice
    assert asked.choice.rule != "winner", "the table of an H200 is not found by its name"


@pytest.mark.parametrize("target", cards_named(None), ids=lambda t: t.device)
def test_every_choice_of_a_gradient_is_legal(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = {"gru_backward": WORKLOADS["gru_backward"]}
    monkeypatch.setattr(cards, "drawn", lambda count, seed: drawn(count, seed, gradients))
    card = look(target, 24, 0, FakeCompiler(fits))
    assert card.wrong == []
    assert {a.problem.family for a in card.asked} == {"gru_backward"}
    assert card.kernels, "PyTorch's own is no answer to all of them"


@pytest.mark.parametrize("target", cards_named(None), ids=lambda t: t.device)
def test_every_choice_is_legal_and_one_launch_is_offered(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = {name: work for name, work in WORKLOADS.items() if name != "gru_backward"}
    monkeypatch.setattr(cards, "drawn", lambda count, seed: drawn(count, seed, forward))
    card = look(target, 24, 0, FakeCompiler(fits))
    assert card.wrong == []
    assert len(card.asked) == 24
    assert len(card.kernels) == card.distinct > 12
    assert {a.way for a in card.asked if a.problem.family == "gru"} <= {ONE_LAUNCH, LIBRARY}


def test_no_more_kernels_are_compiled_than_asked_for_and_each_once() -> None:
    compiler = FakeCompiler(fits)
    card = look(A100, 12, 0, compiler, most=3)
    assert len(compiler.asked) == len(card.kernels) == 3
    assert card.distinct > 3
    compiler = FakeCompiler(fits)
    same = dataclasses.replace(drawn(1, 0)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "drawn", lambda count, _: [same] * count)
        card = look(A100, 5, 0, compiler)
    assert (len(card.asked), card.distinct, len(compiler.asked)) == (5, 1, 1)


def a_layer() -> Problem:
    (dtype, hidden), (batch, steps) = LAYER
    problem = next(p for p in drawn(20, 0) if p.family == "gru")
    return dataclasses.replace(problem, spec=GruSpec(dtype, hidden), size=GruSize(batch, steps))


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        (GruVariant("persistent", exchange="spin"), "needs compute capability 9.0, not 8.0"),
        (GruVariant("persistent", block_hidden=128, exchange="counter"), "shared memory that a program can have"),
        (GruVariant("persistent", block_hidden=12), "block_hidden must be one of"),
        (GruVariant("steps"), "a variant in one launch fits and was not offered"),
        (None, "a variant in one launch fits and was not offered"),
    ],
)
def test_a_choice_that_does_not_hold_is_said(
    monkeypatch: pytest.MonkeyPatch, variant: GruVariant | None, said: str
) -> None:
    monkeypatch.setattr(cards, "choose", lambda *_: Choice("similar GPU", "", variant))
    asked = cards.ask(a_layer(), A100)
    assert asked.wrong is not None
    assert said in asked.wrong


def test_what_is_illegal_is_not_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = a_layer()
    monkeypatch.setattr(cards, "drawn", lambda *_: [layer])
    monkeypatch.setattr(cards, "choose", lambda *_: Choice("model", "", GruVariant("persistent", exchange="spin")))
    compiler = FakeCompiler(fits)
    card = look(A100, 1, 0, compiler)
    assert (len(card.wrong), card.distinct, compiler.asked) == (1, 0, [])


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "warps", "waits", "target", "said"),
    [
        ({}, 4, True, A100, None),
        ({"spill_bytes": 8}, 4, False, A100, "spills 8 bytes a thread"),
        ({"shared_bytes": 163 * 1024}, 4, False, A100, None),
        ({"shared_bytes": 163 * 1024 + 1}, 4, False, A100, "needs 166913 bytes of shared memory"),
        ({"shared_bytes": 99 * 1024}, 4, False, RTX_4090, None),
        ({"shared_bytes": 64 * 1024}, 4, False, MI300X, None),
        ({"registers": 255}, 16, False, A100, "a processor holds no program of 16 warps with 255 registers"),
        ({"programs": 129, "shared_bytes": 60_000}, 4, True, RTX_4090, "129 programs wait for each other, and 128"),
        ({"programs": 129, "shared_bytes": 60_000}, 4, False, RTX_4090, None),
        ({"programs": 129, "shared_bytes": 40_000}, 4, True, RTX_4090, None),
    ],
)
def test_what_was_compiled_must_fit_the_card(
    need: dict[str, int], warps: int, waits: bool, target: Any, said: str | None
) -> None:
    found = no_room((Room(dataclasses.replace(NEED, **need), warps, waits),), target)
    assert found is None if said is None else said in str(found)


def test_a_compilers_complaint_does_not_hold() -> None:
    assert no_room("CompilationError: no", A100) == "does not compile: CompilationError: no"
    card = look(A100, 4, 0, FakeCompiler(lambda *_: "CompilationError: no"))
    assert len(card.wrong) == len(card.kernels) == card.distinct > 1
    assert "does not compile" in card.wrong[0]


def test_how_many_programs_a_processor_holds() -> None:
    assert held(Room(dataclasses.replace(NEED, registers=32, shared_bytes=0), 4, waits=False), A100) == 16
    assert held(Room(dataclasses.replace(NEED, registers=33, shared_bytes=0), 4, waits=False), A100) == 12
    assert held(Room(dataclasses.replace(NEED, registers=0, shared_bytes=0), 1, waits=False), A100) == 32


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler(fits)
    monkeypatch.setattr(commands, "CompilerPool", lambda **_: compiler)
    done = call("cards", "a100,4090", "--shapes", "8", "--kernels", "2")
    assert done.exit_code == 0
    assert "nvidia_a100_sxm4_80gb: sm_80, 108 processors, 163 KiB a program" in done.output
    assert "nvidia_geforce_rtx_4090: sm_89, 128 processors, 99 KiB a program" in done.output
    assert re.search(r"2 of [4-8] kernels compiled", done.output), "PyTorch's own serves the others"
    assert "one launch" in done.output
    assert len(compiler.asked) == 4


def test_the_command_fails_where_a_choice_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    spills = (Room(dataclasses.replace(NEED, spill_bytes=8), 4, waits=False),)
    monkeypatch.setattr(commands, "CompilerPool", lambda **_: FakeCompiler(lambda *_: spills))
    done = call("cards", "a100", "--shapes", "4")
    assert done.exit_code == 1
    assert re.search(r"[2-4] choices do not hold", done.output)
    assert "spills 8 bytes a thread" in done.output
    assert "all but 1" in done.output


@pytest.mark.compiler
def test_a_sample_of_a_card_compiles(compiler: concurrent.futures.Executor) -> None:
    card = look(RTX_4090, 4, 0, compiler)
    assert card.wrong == []
    assert [len(k.rooms) for k in card.kernels] == [1] * card.distinct
    assert card.distinct > 1
    assert all(room.need.registers and room.need.programs for k in card.kernels for room in k.rooms)
    assert any(room.waits for k in card.kernels for room in k.rooms)


# --- rows of the H200 on other cards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 86, 89])
def test_a_float32_row_that_spins_is_legal_on_an_older_card(capability: int) -> None:
    rows = [w for w in load_record(commands.WINNERS / "nvidia_h200.json") if w.family == "gru"]
    spins = [w for w in rows if w.spec.dtype == "float32" and w.variant.exchange == "spin"]
    spins = [w for w in spins if rejection(w.spec, w.size, w.variant, capability) is None]
    assert len(spins) > 5
    for row in spins:
        assert rejection(row.spec, row.size, fit(row.variant, row.spec, capability), capability) is None, row.name


def test_a_16_bit_row_that_polls_keeps_its_tile_for_its_own_spec() -> None:
    spec, row = GruSpec("bfloat16", 512), GruVariant("persistent", block_hidden=16, exchange="poll")
    assert rejection(spec, None, row, 80) is None
    assert fit(adapt(row, spec, spec), spec, 80) == row
