"""The gradient of a recurrence, every structure, against the formula; programs run in turn, since none can wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from generator.rendering.structures import load
from tests.support import pairwise
from tests.support.gru_gradients import Sequences, assert_right, build, run_windows
from tests.support.run import INTERPRETED
from tuned.families.choices import choices
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import TILE_WARPS, GruVariant, programs
from tuned.families.gru_backward.launches import launches
from tuned.families.gru_backward.variant import alone, pieces, rejection
from tuned.families.launch import Fill, Launch, ceil_div
from tuned.families.products import DTYPES

pytestmark = pytest.mark.interpreter

NUMBERS = {  # dtype, precision
    "half": ("float16", "tf32"),
    "brain": ("bfloat16", "tf32"),
    "ieee": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
}
SMALL = GruVariant("persistent", "split", 16, 16, "poll", num_warps=2)
WORK = 8  # programs over all steps in one of many cases: each takes the interpreter about 10 ms


def spec_of(
    numbers: str, hidden: int, layout: str = "dense", directions: int = 1, *, bias: bool = True, resets: bool = False
) -> GruSpec:
    dtype, precision = NUMBERS[numbers]
    return GruSpec(dtype, hidden, layout, directions, bias=bias, precision=precision, resets=resets)


def lengths_of(layout: str, rows: int, seq: int) -> tuple[int, ...]:
    """All lengths alike, or falling to 1; for cu_seqlens in any order, and every third sequence is empty."""
    if layout == "dense":
        return (seq,) * rows
    falling = [max(1, seq - row) for row in range(rows)]
    if layout == "packed":
        return tuple(falling)
    return tuple(0 if row % 3 == 1 else length for row, length in enumerate([seq, *falling[:0:-1]]))


# Every two choices together -----------------------------------------------------------------------------------------

AXES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "directions": (1, 2),
    "numbers": tuple(NUMBERS),
    "bias": (True, False),
    "resets": (False, True),
    "view": ("steps", "rows", "apart"),
    "hidden": (1, 20, 65),
    "rows": (1, 3, 7, 17),
    "seq": (1, 2, 6),
    "prefetch": choices(GruVariant)["prefetch"],
    "num_warps": TILE_WARPS,
    "block_batch": (8, 16, 32),
    "block_hidden": (8, 16, 32, 64, 128),
    "exchange": ("poll", "counter"),
    "turns": (1, 2, 3),  # every number has the same text
}


def parts(knobs: dict[str, Any]) -> tuple[GruSpec, GruVariant, tuple[int, ...]]:
    spec = spec_of(
        knobs["numbers"],
        knobs["hidden"],
        knobs["layout"],
        knobs["directions"],
        bias=knobs["bias"],
        resets=knobs["resets"],
    )
    variant = GruVariant("persistent", **{name: knobs[name] for name in choices(GruVariant) if name in knobs})
    return spec, variant, lengths_of(knobs["layout"], knobs["rows"], knobs["seq"])


def possible(knobs: dict[str, Any]) -> bool:
    """Whether the variant is legal and quick to interpret."""
    spec, variant, lengths = parts(knobs)
    small = programs(spec, GruSize(len(lengths), 1), variant) * (1 + max(lengths)) <= WORK
    # The interpreter has two ways to wait; one of them is not tried where the text would be PTX.
    legal = rejection(spec, None, dataclasses.replace(variant, exchange="counter")) is None
    return small and legal and not (spec.thd and variant.exchange != "counter")


COMBINATIONS = pairwise.covering(pairwise.sample(AXES, possible, 1500))


@pytest.mark.thinned_on_gpu(every=8)
@pytest.mark.parametrize("knobs", COMBINATIONS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_every_choice_computes_what_the_formula_does(knobs: dict[str, Any]) -> None:
    spec, variant, lengths = parts(knobs)
    assert_right(Sequences(spec, lengths, knobs["view"]), variant)


def test_every_declared_choice_is_tested() -> None:
    for name, values in AXES.items():
        assert {knobs[name] for knobs in COMBINATIONS} == set(values), name
    # These are PTX, which the interpreter does not run: see the compile tests.
    assert set(choices(GruVariant)["exchange"]) - set(AXES["exchange"]) == {"spin", "probe"}
    assert {NUMBERS[numbers][0] for numbers in AXES["numbers"]} == set(DTYPES)


# Widths and windows -------------------------------------------------------------------------------------------------


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize(("hidden", "count"), [(10, 1), (20, 2), (44, 3)])
def test_pieces_of_a_message_meet_without_a_gap(hidden: int, count: int) -> None:
    spec, variant = spec_of("ieee", hidden), dataclasses.replace(SMALL, block_hidden=16)
    assert sum(width > 0 for width in pieces(spec, variant.splits)) == count
    assert_right(Sequences(spec, (1, 1)), variant)


@pytest.mark.thinned_on_gpu(every=2)
@pytest.mark.parametrize(
    ("layout", "exchange", "prefetch"),
    [
        ("dense", "poll", "early"),
        ("packed", "poll", "late"),
        ("packed", "counter", "early"),
        ("thd", "counter", "late"),
    ],
)
def test_a_launch_goes_on_where_the_last_one_ended(layout: str, exchange: str, prefetch: str) -> None:
    # One program has all units, so it waits only for its own writes, and can run several steps.
    spec = spec_of("ieee", 20, layout, 2)
    variant = dataclasses.replace(SMALL, block_hidden=32, exchange=exchange, prefetch=prefetch)
    assert alone(spec, variant)
    case = Sequences(spec, lengths_of(layout, 3, 4), "apart")
    whole, resumed = (assert_right(case, variant, windows) for windows in ([(0, 5)], [(0, 2), (2, 3), (3, 5)]))
    for name, tensor in whole.written().items():
        torch.testing.assert_close(resumed.written()[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_marks_are_of_their_turn_in_a_launch_of_several(layout: str, directions: int, turns: int) -> None:
    """Marks are loaded one turn ahead; those of a launch's first turn are loaded before it."""
    spec, lengths = spec_of("ieee", 20, layout, directions, resets=True), lengths_of(layout, 20, 4)
    variant = GruVariant("persistent", "split", 32, 8, "counter", num_warps=2, turns=turns)
    for windows in ([(0, 5)], [(0, 2), (2, 5)]):
        assert_right(Sequences(spec, lengths), variant, windows)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize(
    ("layout", "numbers", "exchange", "turns"),
    [
        ("dense", "half", "poll", 2),
        ("packed", "tf32", "counter", 3),
        ("packed", "brain", "poll", 2),
        ("thd", "half", "counter", 2),
    ],
)
def test_a_program_takes_tiles_in_turn_over_all_steps(layout: str, numbers: str, exchange: str, turns: int) -> None:
    """Five tiles of rows in two or three turns, in windows of steps: tests what is kept between turns and launches."""
    spec, lengths = spec_of(numbers, 20, layout), lengths_of(layout, 33, 3)
    variant = GruVariant("persistent", "split", 32, 8, exchange, num_warps=2, turns=turns)
    assert programs(spec, GruSize(33, 3), variant) == ceil_div(5, turns)
    assert_right(Sequences(spec, lengths), variant, [(0, 2), (2, 4)])


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
        run_windows(built, dataclasses.replace(SMALL, exchange=exchange), [(0, 4)])
    written = ~built.call.out.isnan()
    last = written[0, -1].view(2, 4, 20)
    assert bool(last[..., :16].all()), "its own units of the last token"
    assert int(written.sum()) == last[..., :16].numel(), "and nothing else"
    assert bool(built.call.grad_h_0.isnan().all())


# What is kept -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2])
def test_the_gradient_of_a_program_is_not_rounded_between_its_steps(turns: int) -> None:
    # z hardly makes this gradient smaller: if it were rounded to float16 after each step, it would not change.
    spec = spec_of("half", 8, bias=False)
    variant = GruVariant("persistent", "split", 8, 8, num_warps=2, turns=turns)
    built = build(Sequences(spec, (60,) * (1 if turns == 1 else 9)))
    for name in ("weight_hh", "grad_out", "gates", "hidden", "before"):
        getattr(built.call, name).zero_()
    built.call.grad_h_n.fill_(1.0)
    built.call.gates[..., 8:16] = 9.0  # 1 - z is 2^-13: a quarter of what changes 1.0 - 2^-11
    run_windows(built, variant, [(0, 61)])
    want = torch.sigmoid(torch.tensor(9.0, dtype=torch.float64)) ** 60
    assert want < 0.995
    assert (built.call.grad_h_0.double() - want).abs().max() < 2.0**-11


def test_sequences_may_be_empty_and_shorter_than_the_call_says() -> None:
    spec = spec_of("half", 20, "thd", 2)
    variant = dataclasses.replace(SMALL, exchange="counter")
    for lengths in ((0, 0, 2), (2, 0)):
        built = assert_right(Sequences(spec, lengths, slack=1), variant)
        for row, length in enumerate(lengths):
            assert torch.equal(built.call.grad_h_0[:, row], built.call.grad_h_n[:, row]) == (length == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_computed_alike_whatever_stands_beside_it(layout: str) -> None:
    spec = spec_of("ieee", 20, layout)
    variant = dataclasses.replace(SMALL, exchange="counter")
    few, many = (build(Sequences(spec, (2,) * rows)) for rows in (2, 18))
    tokens = {"dense": (..., slice(2), slice(None)), "thd": (..., range(4), slice(None))}
    first = tokens.get(layout, (..., [0, 1, 18, 19], slice(None)))
    few.call.grad_h_n.copy_(many.call.grad_h_n[:, :2])
    for name in ("weight_hh", "bias_ih", "bias_hh"):
        getattr(few.call, name).copy_(getattr(many.call, name))
    for name in ("gates", "hidden", "before", "grad_out"):
        getattr(few.call, name).copy_(getattr(many.call, name)[first])
    for built in (few, many):
        run_windows(built, variant)
    assert torch.equal(few.call.grad_h_0, many.call.grad_h_0[:, :2])
    assert torch.equal(few.call.out, many.call.out[first])


# NaN ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("bits", [0x7FC00000, -1, 0x7FFFFFFF], ids=lambda b: f"{b & 0xFFFFFFFF:x}")
def test_nan_of_any_bits_ends_in_nan_and_never_in_what_readers_wait_for(bits: int, numbers: str) -> None:
    spec = spec_of(numbers, 20, bias=False)
    variant = dataclasses.replace(SMALL, block_hidden=32)
    integers, shift = (torch.int16, 16) if spec.item == 2 else (torch.int32, 0)
    for name in ("gates", "hidden", "grad_out", "grad_h_n"):
        built = build(Sequences(spec, (2, 2)))
        tensor = getattr(built.call, name)
        place = (-1, 0, 0) if name == "grad_out" else (0, 0, 0) if name == "grad_h_n" else (0, -1, 0, 0)
        tensor.view(integers)[place] = bits >> shift
        run_windows(built, variant)  # in one launch of all steps, readers would wait for ever
        out, first = built.call.out, built.call.grad_h_0
        messages = out[..., :60].view(integers)
        assert not bool((messages == -1).any())
        assert bool(out[0, 0, 0].isnan().any())
        assert bool(first[0, 0].isnan().any())
        assert not bool(out[0, :, 1].isnan().any() | first[0, 1].isnan().any()), "NaN went to another row"


# Precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="tensor cores cut the low bits off themselves")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_operands_of_tf32_are_rounded_to_nearest(precision: str) -> None:
    # 1 + 2^-11 + 2^-23 lies above the middle of two TF32 numbers. The interpreter multiplies all bits, so its result
    # shows that half a unit was added; tensor cores then cut the low bits off.
    spec = GruSpec("float32", 16, bias=False, precision=precision)
    built = build(Sequences(spec, (1,)))
    for name in ("gates", "hidden", "before", "grad_out", "weight_hh"):
        getattr(built.call, name).zero_()
    value = 1 + 2.0**-11 + 2.0**-23
    built.call.gates[..., 16:32] = -30.0  # z is 0, r a half, n is 0: d_h is half of d
    built.call.grad_h_n.zero_()[..., 0] = 2 * value
    built.call.weight_hh[0, 32, 1] = value
    run_windows(built, SMALL)
    bits = torch.tensor([value]).view(torch.int32)
    rounded = (bits + (0x1000 if precision == "tf32" else 0)).view(torch.float32).double()
    torch.testing.assert_close(built.call.grad_h_0[0, 0, 1:2].double(), rounded * rounded, rtol=0, atol=2.0**-22)


# Before a launch ----------------------------------------------------------------------------------------------------


def test_packed_rows_which_end_at_different_steps_are_polled_for_where_others_spin() -> None:
    """A thread that spins waits for all rows that it reads, or for none."""
    found = {}
    for layout in ("dense", "packed"):
        built = build(Sequences(spec_of("half", 128, layout=layout), (3, 2)))
        _, launch = launches(built.case.spec, dataclasses.replace(SMALL, exchange="spin"), built.call)
        found[layout] = launch.constants["EXCHANGE"]
    assert found == {"dense": "spin", "packed": "poll"}


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("exchange", ["counter", "poll", "spin"])
def test_what_programs_wait_to_see_go_away_is_put_there_before_one_launch_of_all_steps(
    exchange: str, turns: int
) -> None:
    variant = dataclasses.replace(SMALL, exchange=exchange, turns=turns)
    built = build(Sequences(spec_of("half", 128), (3, 3)))
    fill, launch = launches(built.case.spec, variant, built.call)
    assert isinstance(fill, Fill)
    assert isinstance(launch, Launch)
    filled = (built.call.counters, 0) if exchange == "counter" else (built.call.out, -1)
    assert (fill.tensor.data_ptr(), fill.tensor.shape, fill.bits) == (filled[0].data_ptr(), filled[0].shape, filled[1])
    assert launch.constants["EXCHANGE"] == exchange
    assert launch.options["launch_cooperative_grid"]
    kernel = load(launch.kernel)
    names = [parameter.name for parameter in kernel.params] if hasattr(kernel, "params") else kernel.arg_names
    given = dict(zip(names, launch.arguments, strict=False))
    assert (given["t_begin"], given["t_end"], given["seq"]) == (0, 4, 3)
    assert (given["states"] is built.call.states) == variant.in_turn
    assert (given["counters"] is built.call.counters) == (exchange == "counter")


@pytest.mark.parametrize("name", ["gates", "hidden", "before"])
def test_tensors_of_tokens_that_lie_otherwise_are_refused(name: str) -> None:
    built = build(Sequences(spec_of("half", 20), (3, 3)))
    tensor = getattr(built.call, name)
    for other in (tensor.transpose(1, 2).contiguous().transpose(1, 2), tensor.expand(2, *tensor.shape[1:])):
        call = dataclasses.replace(built.call, **{name: other})
        with pytest.raises(ValueError, match=f"{name} must lie as out does"):
            launches(built.case.spec, SMALL, call)
