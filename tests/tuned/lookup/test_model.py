"""Calls without a row get the model's pick, or PyTorch's operator if it is faster; and rows that PyTorch beats."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

import tuned.lookup.lookup
import tuned.tables
from tuned.calls.gru import run
from tuned.families.gru import FAMILY as GRU
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, rejection
from tuned.families.rope import FAMILY as ROPE
from tuned.lookup import lookup, model
from tuned.lookup.lookup import Choice, Gpu, choose
from tuned.lookup.table import Row, Table, tables

if TYPE_CHECKING:
    from pathlib import Path

H200 = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
BF16 = GruSpec("bfloat16", 512)


def chosen(dtype: str, hidden: int, batch: int, seq: int = 512, gpu: Gpu = H200, **spec: Any) -> Choice:
    return choose(GRU, GruSpec(dtype, hidden, **spec), GruSize(batch, seq), gpu)


def only(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> None:
    """One table, of an H200, with these rows."""
    table = Table("nvidia_h200", {"capability": 90, "multiprocessors": 132}, {"gru": rows})
    monkeypatch.setattr(tuned.lookup.lookup, "tables", lambda: {"nvidia_h200": table})


def test_shapes_that_no_row_knows_get_a_kernel_that_keeps_its_weights_on_chip() -> None:
    for batch, hidden in ((26, 656), (90, 760), (17, 1200)):
        choice = chosen("bfloat16", hidden, batch)
        assert choice.rule == "model", choice.why
        assert choice.variant.strategy == "persistent"


def test_a_row_that_launches_each_step_is_for_graphs_and_a_call_gets_the_best_in_one_launch() -> None:
    spec, size = GruSpec("bfloat16", 768), GruSize(100, 64)
    row = choose(GRU, spec, size, H200)
    assert (row.rule, row.variant.strategy) == ("winner", "library")
    assert run.timely(row, spec, size, captured=True) == row
    call = run.timely(row, spec, size, captured=False)
    assert (call.rule, call.variant.strategy, call.gpu) == ("model", "persistent", H200)
    alone = dataclasses.replace(row, gpu=None)
    assert run.timely(alone, spec, size, captured=False).variant is None


@pytest.mark.parametrize(
    ("hidden", "us", "kept"),
    [
        (
            2048,
            3_000.0,
            True,
        ),  # 64 steps of 1024 rows: 47 us each, where nn.GRU takes 84, and no launch of all steps has room
        (2048, 6_000.0, False),
        (2041, 3_000.0, False),  # steps are several kernels, so each takes the host three times as long
        (512, 600.0, False),  # nn.GRU takes 16.5 us a step; a slow host takes 24 us for nn.GRU and 37 for ours
    ],
)
def test_steps_of_many_rows_serve_a_call_too_where_they_take_less_than_all_else(
    hidden: int, us: float, *, kept: bool
) -> None:
    spec, size = GruSpec("bfloat16", hidden), GruSize(1024, 64)
    row = Choice("winner", "measured", GruVariant(), gpu=H200, us=us)
    assert (run.timely(row, spec, size, captured=False) == row) is kept
    assert run.timely(row, spec, size, captured=True) == row
    each = dataclasses.replace(row, variant=GruVariant("steps"))
    assert run.timely(each, spec, size, captured=False) != each, "a launch reads all weights again, and has no plan"


def test_steps_before_a_gradient_may_take_a_slow_host_longer_than_pytorchs_own() -> None:
    """nn.GRU's 16.5 us a forward step are not all: its gradient launches each step again, and ours is one launch."""
    spec, size = GruSpec("bfloat16", 512), GruSize(1024, 64)
    row = Choice("winner", "measured", GruVariant(), gpu=H200, us=600.0)
    assert run.timely(row, spec, size, captured=False).variant != GruVariant()
    assert run.timely(row, spec, size, captured=False, trained=True) == row


def test_steps_of_few_rows_are_the_host_s_time_as_a_call() -> None:
    """The model gives one launch of all steps, for 100 rows of 768 units, less than ten microseconds a step."""
    spec, size = GruSpec("bfloat16", 768), GruSize(100, 64)
    row = Choice("winner", "measured", GruVariant(), gpu=H200, us=64 * 5.0)
    assert run.timely(row, spec, size, captured=False) != row


@pytest.mark.parametrize(
    ("hidden", "rows", "dtype", "kept"),
    [(488, 10, "float32", (True, True)), (477, 10, "float32", (True, False)), (330, 300, "float32", (False, False))],
)
def test_where_the_devices_time_counts_a_model_must_see_a_greater_lead(
    hidden: int, rows: int, dtype: str, kept: tuple[bool, bool]
) -> None:
    """Rows of no multiple of 16 bytes took up to 2.3 times the model's time; calls of few rows take the host's time."""
    spec, size = GruSpec(dtype, hidden), GruSize(rows, 100)
    choice = choose(GRU, spec, size, H200)
    assert choice.rule == "model"
    found = [run.timely(choice, spec, size, captured) for captured in (False, True)]
    assert tuple(now.variant is not None for now in found) == kept
    for now in found:
        assert now == choice or (now.rule == "eager" and "the model errs" in now.why)


@pytest.mark.parametrize(
    ("spec", "batch", "captured", "steps"),
    [
        (BF16, 24, True, False),  # one launch for all steps takes less
        (GruSpec("bfloat16", 1200), 400, True, True),
        (GruSpec("bfloat16", 1200), 400, False, False),  # a slow host takes 37 us a step, nn.GRU 24
        (GruSpec("bfloat16", 1600), 900, False, True),
        (GruSpec("float16", 1200, directions=2), 400, True, True),
        (GruSpec("bfloat16", 1201), 400, False, False),  # each step is several launches
        (GruSpec("bfloat16", 1900), 2, False, False),  # with few rows the host's time counts, which nn.GRU takes too
        (GruSpec("float32", 1200), 400, True, False),  # products follow a setting of the program
        (GruSpec("bfloat16", 1200, layout="packed"), 400, True, False),
    ],
)
def test_large_layers_that_no_row_knows_get_a_launch_for_each_step(
    spec: GruSpec, batch: int, *, captured: bool, steps: bool
) -> None:
    size = GruSize(batch, 50)
    for gpu in (H200, dataclasses.replace(H200, capability=80)):
        found = run.timely(choose(GRU, spec, size, gpu), spec, size, captured)
        by_step = found.variant is not None and found.variant.strategy == "library"
        assert by_step == (steps and gpu is H200), found
        assert not by_step or (found.rule == "model" and found.us > 0)


@pytest.mark.parametrize(
    ("hidden", "rows", "us"), [(171, 433, 42.6), (182, 467, 65.7), (164, 194, 17.3), (176, 403, 35.7)]
)
def test_cudnns_launch_that_spills_is_known(hidden: int, rows: int, us: float) -> None:
    """Measured microseconds a step; 154 units with 257 rows took 6, and 197 units with 445 rows took 9."""
    spec, size = GruSpec("float32", hidden), GruSize(rows, 100)
    assert 0.4 * us < model.library_us(GRU, spec, size) / 100 < 1.1 * us
    assert model.library_us(GRU, dataclasses.replace(spec, hidden=198), size) < 0.6 * model.library_us(GRU, spec, size)
    assert run.timely(choose(GRU, spec, size, H200), spec, size, captured=True).variant is not None


def test_of_what_was_not_measured_so_the_model_has_no_steps() -> None:
    size = GruSize(400, 50)
    assert lookup.by_steps(GRU, GruSpec("bfloat16", 1200), size, H200) is not None
    for others in ({"layout": "packed"}, {"layout": "thd"}, {"layers": 2}, {"resets": True}):
        assert lookup.by_steps(GRU, GruSpec("bfloat16", 1200, **others), size, H200) is None  # type: ignore[arg-type]
    assert lookup.by_steps(GRU, GruSpec("float32", 1200), size, H200) is None, "its products follow a setting"


def test_padded_steps_are_held_against_pytorchs_own_of_narrow_rows() -> None:
    """A step takes PyTorch 9 us on the device, and our host 10: padding is what pays, and ``pays`` decides that."""
    spec, size = GruSpec("bfloat16", 1512), GruSize(70, 152)
    choice = choose(GRU, spec, size, dataclasses.replace(H200, device="another"))
    assert run.timely(choice, spec, size, captured=False).variant is None
    found = run.timely(choice, spec, size, captured=False, padded=True)
    assert found.variant == GruVariant()
    assert found.us == pytest.approx(152 * run.CALLED_STEP_US)


def test_most_shapes_are_served_by_kernels_and_no_choice_is_illegal() -> None:
    draw = random.Random(5)
    served = 0
    for _ in range(100):
        hidden, batch = round(32 * 64 ** draw.random()), round(512 ** draw.random())
        spec = GruSpec(draw.choice(("bfloat16", "float32")), hidden, directions=draw.choice((1, 2)))
        choice = choose(GRU, spec, GruSize(batch, 99), H200)
        if choice.variant is not None:
            assert rejection(spec, GruSize(batch, 99), choice.variant, 90, 132) is None
            served += choice.variant.strategy == "persistent"
    assert served > 60, "PyTorch everywhere is no answer"


def test_what_fits_on_no_chip_is_left_to_pytorch() -> None:
    choice = chosen("float32", 96, 3, 100)
    assert choice.rule == "eager"
    assert "PyTorch's own" in choice.why
    assert choice.gpu == H200, "so that TUNED_RECORD has it"


@pytest.mark.parametrize(("eager_us", "rule"), [(0.0, "winner"), (150.0, "winner"), (101.0, "eager")])
def test_a_row_that_pytorch_beats_does_not_serve(monkeypatch: pytest.MonkeyPatch, eager_us: float, rule: str) -> None:
    """A row's time is that of the kernels alone; PyTorch's time includes the projection of the input."""
    size, variant = GruSize(16, 64), chosen("bfloat16", 512, 16).variant
    only(monkeypatch, Row(BF16, size, variant, None, 100.0, "t", {}, eager_us))
    monkeypatch.setattr(lookup, "_elsewhere", lambda *_: [])
    lookup._here.cache_clear()
    choice = choose(GRU, BF16, size, H200)
    assert choice.rule == rule
    assert (choice.variant is None) == (rule == "eager")
    longer = choose(GRU, BF16, GruSize(16, 100), H200)
    assert longer.rule == {"winner": "nearest size", "eager": "eager"}[rule], "of another length, whose steps are alike"
    assert longer.us == pytest.approx(choice.us * 100 / 64)
    lookup._here.cache_clear()


def test_a_row_far_away_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's variant, adapted, would have tiles for 8 rows; 512 rows need other tiles."""
    few = chosen("bfloat16", 512, 8).variant
    only(monkeypatch, Row(BF16, GruSize(8, 64), few, None, 100.0, "t", {}, 900.0))
    choice = choose(GRU, BF16, GruSize(512, 64), H200)
    assert choice.rule == "model"
    assert choice.variant != few


def test_a_new_length_costs_no_new_look_at_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    pick = model.pick

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return pick(*arguments)

    monkeypatch.setattr(model, "pick", counted)
    lookup._pick.cache_clear()
    found = {chosen("bfloat16", 500, 30, seq).variant for seq in range(513, 1024, 37)}
    assert (len(found), looks) == (1, 1)


def test_a_part_of_a_gpu_gets_what_fits_it() -> None:
    small = chosen("bfloat16", 512, 64, gpu=dataclasses.replace(H200, multiprocessors=20))
    assert small.variant is None or small.variant != chosen("bfloat16", 512, 64).variant


def test_a_gpu_that_is_no_nvidia_has_no_model() -> None:
    amd = Gpu("amd_instinct_mi300x", 0, 304, "MI300X")
    assert lookup.modelled(GRU, BF16, GruSize(16, 64), amd) is None
    assert chosen("bfloat16", 512, 16, gpu=amd).rule != "model"


def test_families_without_a_model_are_as_they_were() -> None:
    assert model.weights_of(ROPE) is None
    assert model.weights_of(dataclasses.replace(GRU, home="elsewhere")) is None


def test_models_that_cannot_be_used_are_skipped_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_models.py").write_text("MODELS = {")
    monkeypatch.setattr(tuned.tables, "__path__", [str(tmp_path), *tuned.tables.__path__])
    monkeypatch.delitem(sys.modules, "tuned.tables._models", raising=False)
    model._known.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"_models.py cannot be used \(SyntaxError"):
            assert model.weights_of(GRU) is None
        assert chosen("bfloat16", 512, 16).rule in {"winner", "nearest size", "closest spec"}
    finally:
        model._known.cache_clear()
        sys.modules.pop("tuned.tables._models", None)


def test_tables_give_what_pytorch_took() -> None:
    rows = tables()["nvidia_h200"].rows["gru"]
    assert all(row.eager_us > 0 for row in rows)
