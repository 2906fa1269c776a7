"""The recurrence of a GRU, every structure, against the oracle; programs run in turn, since none can wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.support import pairwise
from tests.support.gru_sequences import (
    NUMBERS,
    SHAPES,
    Sequences,
    assert_right,
    build,
    lengths_of,
    run_windows,
    spec_of,
)
from tests.support.run import INTERPRETED
from tuned.families.choices import choices
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import TILE_BATCHES, TILE_WARPS, GruVariant, alone, pieces, programs, rejection
from tuned.families.launch import ceil_div
from tuned.families.products import DTYPES

pytestmark = pytest.mark.interpreter

SPLIT = GruVariant("persistent", "split", 16, 16, "poll")
TILE = GruVariant("persistent", "tile", 32, 32, "poll")
WORK = 16  # programs over all steps in one of many cases: each takes the interpreter about 10 ms


# Every two choices together -----------------------------------------------------------------------------------------

AXES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "shape": tuple(SHAPES),
    "numbers": tuple(NUMBERS),
    "bias": (True, False),
    "resets": (False, True),
    "view": ("steps", "rows", "apart"),
    "hidden": (1, 20, 100, 192, 257),
    "rows": (1, 3, 7, 17),
    "seq": (1, 2, 7),
    # With 256 units no rows fit in 228 KiB as well: that is tested below, where nothing has to fit.
    "form": ("split", "tile"),  # test_gru_row_kernels.py has "row", test_gru_staged_kernels.py has "staged"
    "block_batch": TILE_BATCHES,
    "prefetch": choices(GruVariant)["prefetch"],
    "num_warps": TILE_WARPS,
    "block_hidden": (8, 16, 32, 64, 128),
    "exchange": ("poll", "counter"),
    "turns": (1, 2, 3),  # every number has the same text
}


def parts(knobs: dict[str, Any]) -> tuple[GruSpec, GruVariant, tuple[int, ...]]:
    resets = knobs["resets"] and SHAPES[knobs["shape"]][1] == 1  # a stack has no resets
    spec = spec_of(
        knobs["numbers"], knobs["hidden"], knobs["shape"], knobs["layout"], bias=knobs["bias"], resets=resets
    )
    variant = GruVariant("persistent", **{name: knobs[name] for name in choices(GruVariant) if name in knobs})
    return spec, variant, lengths_of(knobs["layout"], knobs["rows"], knobs["seq"])


def possible(knobs: dict[str, Any]) -> bool:
    """Whether the variant is legal, its structure exists, and it is quick to interpret."""
    spec, variant, lengths = parts(knobs)
    small = programs(spec, GruSize(len(lengths), 1), variant) * max(lengths) <= WORK
    # The interpreter has two ways to wait; one of them is not tried where the text would be PTX.
    legal = rejection(spec, None, dataclasses.replace(variant, exchange="counter")) is None
    return small and legal and not (alone(spec, variant) and variant.exchange != GruVariant.exchange)


COMBINATIONS = pairwise.covering(pairwise.sample(AXES, possible, 2500))


@pytest.mark.thinned_on_gpu(every=8)
@pytest.mark.parametrize("knobs", COMBINATIONS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_every_choice_computes_what_the_oracle_does(knobs: dict[str, Any]) -> None:
    spec, variant, lengths = parts(knobs)
    assert_right(Sequences(spec, lengths, knobs["view"]), variant)


def test_every_declared_choice_is_tested() -> None:
    for name, values in AXES.items():
        assert {knobs[name] for knobs in COMBINATIONS} == set(values), name
    # These are PTX, which the interpreter does not run: see the compile tests.
    assert set(choices(GruVariant)["exchange"]) - set(AXES["exchange"]) == {"spin", "probe"}
    assert {NUMBERS[numbers][0] for numbers in AXES["numbers"]} == set(DTYPES)


# Widths -------------------------------------------------------------------------------------------------------------

WIDE = [  # hidden, tile: each size in one, two and three pieces
    (384, dataclasses.replace(SPLIT, block_hidden=64)),
    (384, dataclasses.replace(TILE, block_hidden=128)),
    (600, dataclasses.replace(SPLIT, block_hidden=128)),
    (896, dataclasses.replace(SPLIT, block_hidden=256, num_warps=8)),
    (1536, dataclasses.replace(SPLIT, block_hidden=256, num_warps=8)),
]


@pytest.mark.skipif(not INTERPRETED, reason="the tiles are larger than a GPU has room for")
@pytest.mark.parametrize(("hidden", "variant"), WIDE, ids=lambda v: v.form if isinstance(v, GruVariant) else str(v))
def test_every_hidden_size_is_taken_in_pieces(hidden: int, variant: GruVariant) -> None:
    # These tiles are larger than a program can hold on a GPU, so that few programs suffice: the text is the same.
    steps = 2 if hidden < 600 else 1
    assert_right(Sequences(spec_of("half", hidden), (steps,)), variant, watch=False)


@pytest.mark.thinned_on_gpu(every=5)
@pytest.mark.parametrize("shape", ["layer", "stack"])
@pytest.mark.parametrize("hidden", [48, 80, 112, 144])
def test_pieces_meet_without_a_gap(hidden: int, shape: str) -> None:
    variant = dataclasses.replace(SPLIT, num_warps=2, block_hidden=64)
    widths = [width for width in pieces(hidden, variant.splits) if width]
    assert len(widths) == {48: 1, 80: 2, 112: 1, 144: 2}[hidden]
    assert_right(Sequences(spec_of("ieee", hidden, shape), (2, 2)), variant)


# Windows of steps ---------------------------------------------------------------------------------------------------


@pytest.mark.thinned_on_gpu(every=5)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_launch_goes_on_where_the_last_one_ended(layout: str, shape: str) -> None:
    # One program has all units, so it waits only for its own writes, and can run several steps.
    spec = spec_of("ieee", 20, shape, layout)
    variant = dataclasses.replace(SPLIT, block_hidden=32, exchange="counter")
    assert ceil_div(spec.hidden, variant.block_hidden) == 1
    assert not alone(spec, variant)
    case = Sequences(spec, lengths_of(layout, 4, 5), "apart")
    windows = [(0, 2), (2, 3), (3, 5)]
    whole, resumed = assert_right(case, variant, [(0, 5)]), assert_right(case, variant, windows)
    torch.testing.assert_close(resumed.call.out, whole.call.out, rtol=0, atol=1e-6)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize(("prefetch", "turns"), [("early", 1), ("late", 1), ("early", 2)])
@pytest.mark.parametrize("shape", ["layer", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_marks_are_of_their_step_in_a_launch_of_several(layout: str, shape: str, prefetch: str, turns: int) -> None:
    """Marks are loaded a step ahead, a launch's first ones before it. Rows end before others, and at a mark too."""
    variant = dataclasses.replace(SPLIT, block_hidden=32, exchange="counter", prefetch=prefetch, turns=turns)
    spec, lengths = spec_of("ieee", 20, shape, layout, resets=True), lengths_of(layout, 20, 5)
    for windows in ([(0, 5)], [(0, 2), (2, 5)]):
        assert_right(Sequences(spec, lengths), variant, windows)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("exchange", ["poll", "counter"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_program_waits_for_its_own_results_and_the_layer_below(shape: str, exchange: str) -> None:
    variant = dataclasses.replace(SPLIT, block_hidden=32, exchange=exchange)
    for layout in LAYOUTS:
        assert_right(Sequences(spec_of("half", 20, shape, layout), lengths_of(layout, 17, 3)), variant, [(0, 3)])


TURNS = pairwise.covering(
    pairwise.product(
        {
            "numbers": ("half", "tf32"), "layout": LAYOUTS, "shape": ("layer", "both"), "exchange": ("poll", "counter"),
            "turns": (2, 3),
        },
        lambda _: True,
    )
)  # fmt: skip


@pytest.mark.parametrize(("numbers", "layout", "shape", "exchange", "turns"), [tuple(row.values()) for row in TURNS])
def test_a_program_takes_tiles_in_turn_over_all_steps(
    numbers: str, layout: str, shape: str, exchange: str, turns: int
) -> None:
    """Five tiles of rows in two or three turns, in windows of steps: states are kept between turns and launches."""
    variant = GruVariant("persistent", "split", 32, 8, exchange, turns=turns)
    spec, lengths = spec_of(numbers, 20, shape, layout), lengths_of(layout, 33, 5)
    assert programs(spec, GruSize(33, 5), variant) == spec.directions * ceil_div(5, turns)
    assert_right(Sequences(spec, lengths), variant, [(0, 2), (2, 5)])


class StillWaitingError(Exception):
    """A program has looked so often that it must be waiting."""


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the other program runs too")
@pytest.mark.parametrize("exchange", ["poll", "counter"])
def test_a_program_waits_for_another_that_never_writes(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs in turn: the first of two never sees what the second writes."""
    from triton.runtime import interpreter  # noqa: PLC0415 - only where kernels are interpreted

    looks = 0

    def counted(function: Any) -> Any:
        def look(*arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            if looks > 300:  # all steps of both programs need some dozens
                raise StillWaitingError
            return function(*arguments)

        return look

    for name in ("create_masked_load", "create_atomic_rmw"):
        monkeypatch.setattr(
            interpreter.interpreter_builder, name, counted(getattr(interpreter.interpreter_builder, name))
        )
    built = build(Sequences(spec_of("half", 20), (3, 3)))
    with pytest.raises(interpreter.InterpreterError, match="StillWaitingError"):
        run_windows(built, dataclasses.replace(SPLIT, exchange=exchange), [(0, 3)])
    written = ~built.call.out.isnan()
    assert bool(written[0, :, :16].all()), "its own units of the first step"
    assert int(written.sum()) == written[0, :, :16].numel(), "and nothing else"


ALONE = pairwise.covering(
    pairwise.product({"numbers": tuple(NUMBERS), "layout": LAYOUTS, "form": ("split", "tile")}, lambda _: True)
)


@pytest.mark.thinned_on_gpu(every=2)
@pytest.mark.parametrize(("numbers", "layout", "form"), [tuple(row.values()) for row in ALONE])
def test_a_program_with_all_units_keeps_its_state_to_itself(numbers: str, layout: str, form: str) -> None:
    spec = spec_of(numbers, 60, "both", layout)
    variant = GruVariant("persistent", form, block_hidden=64, block_batch=16)
    assert alone(spec, variant)
    assert_right(Sequences(spec, lengths_of(layout, 18, 4)), variant, [(0, 4)])


def test_the_state_of_a_program_is_not_rounded_between_its_steps() -> None:
    # z hardly moves this state: if it were rounded to float16 after each step, it would not change.
    spec = spec_of("half", 8, bias=False)
    variant = GruVariant("persistent", "split", 64, 16)
    built = build(Sequences(spec, (120,)))
    built.call.weight_hh.zero_()
    built.call.h_0.fill_(1.0)
    gates = built.call.gates.zero_()
    gates[..., 8:16] = 9.0  # 1 - z is 2^-13: a quarter of what changes 1.0 - 2^-11
    run_windows(built, variant, [(0, 120)])
    want = torch.sigmoid(torch.tensor(9.0, dtype=torch.float64)) ** 120
    assert want < 0.99
    assert (built.call.h_n.double() - want).abs().max() < 2.0**-11


# Rows ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_may_be_empty_and_shorter_than_the_call_says(shape: str) -> None:
    spec = spec_of("half", 20, shape, "thd")
    for lengths in ((0, 0, 2), (2, 0)):
        built = assert_right(Sequences(spec, lengths, slack=1), SPLIT)
        for row, length in enumerate(lengths):
            kept = torch.equal(built.call.h_n[:, row], built.call.h_0[:, row])
            assert kept == (length == 0)


@pytest.mark.parametrize("form", ["split", "tile"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_computed_alike_whatever_stands_beside_it(layout: str, form: str) -> None:
    spec = spec_of("ieee", 40, "both", layout)
    variant = {"split": SPLIT, "tile": TILE}[form]
    few, many = (build(Sequences(spec, (2,) * rows)) for rows in (2, 18))
    few.call.h_0.copy_(many.call.h_0[:, :2])
    few.call.weight_hh.copy_(many.call.weight_hh)
    few.call.bias_ih.copy_(many.call.bias_ih)
    few.call.bias_hh.copy_(many.call.bias_hh)
    few.call.gates.copy_(many.call.gates[:, :, :2] if layout == "dense" else many.call.gates[:, first_rows(layout)])
    for built in (few, many):
        run_windows(built, variant)
    assert torch.equal(few.call.h_n, many.call.h_n[:, :2])


def first_rows(layout: str) -> list[int]:
    """The places of the tokens of the first two of 18 sequences of two steps."""
    return list(range(4)) if layout == "thd" else [0, 1, 18, 19]


# NaN ----------------------------------------------------------------------------------------------------------------


NANS = pairwise.covering(
    pairwise.product(
        {
            "numbers": tuple(NUMBERS), "bits": (0x7FC00000, 0x7F800001, -1, -(2**22), 0x7FFFFFFF),
            "name": ("gates", "h_0", "weight_hh"),
        },
        lambda _: True,
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "bits", "name"),
    [tuple(row.values()) for row in NANS],
    ids=lambda value: value if isinstance(value, str) else f"{value & 0xFFFFFFFF:x}",
)
def test_nan_of_any_bits_ends_in_nan_and_never_in_what_readers_wait_for(bits: int, numbers: str, name: str) -> None:
    spec = spec_of(numbers, 20, bias=False)
    variant = dataclasses.replace(SPLIT, block_hidden=32)
    integers, shift = (torch.int16, 16) if spec.item == 2 else (torch.int32, 0)
    pattern = bits >> shift
    built = build(Sequences(spec, (3, 3)))
    tensor = getattr(built.call, name)
    tensor.view(integers)[(0,) * tensor.dim()] = pattern if pattern != 0x7F80 else 0x7F81  # not the infinity
    run_windows(built, variant)  # in one launch of all steps, readers would wait for ever
    out = built.call.out
    assert not bool((out.view(integers) == -1).any())
    if name == "weight_hh" and numbers == "tf32" and not INTERPRETED and not pattern & 0x7FE000:
        return  # no bit of this NaN's payload is one of TF32: tensor cores take it for an infinity, PyTorch's too
    hit = out[1:, 0].isnan().any(-1) if name != "weight_hh" else out[:, 0].isnan().any(-1)
    assert bool(hit.all())
    if name != "weight_hh":
        assert not bool(out[:, 1].isnan().any()), "NaN went to another row"


@pytest.mark.parametrize("form", ["split", "tile"])
def test_gates_far_out_saturate(form: str) -> None:
    spec = spec_of("ieee", 20)
    built = build(Sequences(spec, (2, 2, 2)))
    built.call.gates.mul_(1e30)
    built.call.h_0.mul_(1e3)
    run_windows(built, {"split": SPLIT, "tile": TILE}[form])
    assert not bool(built.call.out.isnan().any())
    built.call.gates.fill_(torch.inf)
    run_windows(built, {"split": SPLIT, "tile": TILE}[form])
    assert not bool(built.call.out.isnan().any())


# Precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="tensor cores cut the low bits off themselves")
@pytest.mark.parametrize("form", ["split", "tile"])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_operands_of_tf32_are_rounded_to_nearest(precision: str, form: str) -> None:
    # 1 + 2^-11 + 2^-23 lies above the middle of two TF32 numbers. The interpreter multiplies all bits, so its result
    # shows that half a unit was added; tensor cores then cut the low bits off.
    spec = GruSpec("float32", 16, bias=False, precision=precision)
    built = build(Sequences(spec, (1,)))
    value = 1 + 2.0**-11 + 2.0**-23
    built.call.gates.zero_()
    built.call.h_0.zero_()[..., 0] = value
    built.call.weight_hh.zero_()[0, :, 0] = 0.5
    run_windows(built, {"split": SPLIT, "tile": TILE}[form])
    bits = torch.tensor([value, 0.5]).view(torch.int32)
    h, w = (bits + (0x1000 if precision == "tf32" else 0)).view(torch.float32).double()
    product = h * w
    own = torch.zeros(16, dtype=torch.float64)
    own[0] = value
    gate = torch.sigmoid(product)
    n = torch.tanh(gate * product)
    torch.testing.assert_close(built.call.out[0, 0].double(), n + gate * (own - n), rtol=0, atol=2.0**-22)
