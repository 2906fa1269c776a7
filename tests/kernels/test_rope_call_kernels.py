"""Every kernel of complete RoPE calls, interpreted (or on the GPU where there is one), against the oracle."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from generator.families.rope.reference import inputs, reference
from generator.families.rope.texts import rope_specs, row_specs
from generator.measuring.check import intact, probe
from generator.rendering.structures import structures
from tests.support import oracle, pairwise
from tests.support.rope_case import RopeCase, assert_close, assert_right, build, canonical, wanted
from tests.support.rope_rows import AXES, PACKED, PACKED_SEQ, ROWS, case_of, row_id, spec_of
from tests.support.rope_variants import many_bounds, numbers
from tests.support.run import DEVICE, run, to_numpy, truncates
from tuned.families.choices import choices
from tuned.families.rope.launches import kernel_name, launches
from tuned.families.rope.spec import STYLES, RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, has_whole_rows

pytestmark = pytest.mark.interpreter

GRID = RopeVariant(block_tokens=4, block_heads=4)
WHOLE_ROWS = dataclasses.replace(GRID, whole_rows=True)
TEXTS = {
    kernel_name(spec, variant): (spec, variant)
    for specs, variant in ((rope_specs(), GRID), (row_specs(), WHOLE_ROWS))
    for spec in specs
    if not spec.plain
}
NARROW = RopeVariant(block_tokens=4, block_heads=2)
TOKENS_FIRST = RopeVariant(block_tokens=4, block_heads=2, order="tokens", cache="keep")


@pytest.mark.parametrize("name", TEXTS)
def test_every_kernel_rotates_query_and_key_as_the_oracle_does(name: str) -> None:
    # Tiles contain rows of both tensors: 5 heads and 2 heads, 4 rows at a time.
    spec, variant = TEXTS[name]
    whole = dataclasses.replace(spec, dtype="float32", heads=5, key_heads=2, head_dim=12, rotary_dim=12)
    partial = dataclasses.replace(
        whole,
        layout="thd",
        dtype="float16",
        heads=3,
        key_heads=1,
        head_dim=20,
        angle_entries="feature",
        direction="forward" if spec.inplace else "backward",
        rotated="last",
    )
    assert kernel_name(whole, variant) == kernel_name(partial, variant) == name
    assert_right(RopeCase(whole, seq=7, batch=2), variant)
    assert_right(RopeCase(partial, seq=PACKED_SEQ, cu_seqlens=PACKED, key_view="packed"), variant)


def test_every_emitted_kernel_of_complete_calls_is_among_those_tested() -> None:
    # test_rope_mla has the kernels that put pairs apart.
    emitted = {name for name in structures() if name.startswith("rope_complete_")}
    assert set(TEXTS) == {name for name in emitted if "_deinterleave_" not in name}


def spec_for(knobs: dict[str, Any]) -> RopeSpec:
    """A spec that a variant fits: two tiles of rows, the last with one head of the key, and a tail to copy."""
    # Tiles of whole rows are not tried if halves are aligned or rows are wide.
    dims = (30, 22) if knobs["whole_rows"] else (48, 32)
    return RopeSpec("bshd", "float32", knobs["block_heads"], *dims, key_heads=1, angles="cos_sin", positions="starts")


NUMBERS = numbers(spec_for)


@pytest.mark.parametrize("knobs", NUMBERS, ids=lambda k: "-".join(f"{v}" or "none" for v in k.values()))
def test_every_choice_of_a_knob_rotates_as_the_oracle_does(knobs: dict[str, Any]) -> None:
    # Two tiles of tokens; the last tile has one token.
    case = RopeCase(spec_for(knobs), seq=knobs["block_tokens"] + 1, batch=2, angle_rows=20, starts=(3, 0))
    assert_right(case, RopeVariant(**knobs))


def test_every_declared_choice_is_tested() -> None:
    for name, declared in choices(RopeVariant).items():
        if name in {"resident", "chunk_heads"}:  # knobs of norms, which have their own tests
            continue
        assert {knobs[name] for knobs in NUMBERS} == set(declared) - ({True} if name == "pdl" else set()), name


# Arguments, pairwise ------------------------------------------------------------------------------------------------


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda index: f"{index}-{row_id(ROWS[index])}")
def test_every_kind_of_argument_rotates_as_the_oracle_does(index: int) -> None:
    assert_right(case_of(ROWS[index]), (GRID, NARROW, TOKENS_FIRST)[index % 3])


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("index", [i for i, row in enumerate(ROWS) if has_whole_rows(spec_of(row))])
def test_every_kind_of_argument_rotates_whole_rows_as_the_oracle_does(index: int) -> None:
    assert_right(case_of(ROWS[index]), WHOLE_ROWS)


def test_every_value_of_an_argument_is_tested() -> None:
    for name, values in AXES.items():
        assert {row[name] for row in ROWS} == set(values), name


# Positions ----------------------------------------------------------------------------------------------------------

SMALL = RopeSpec("thd", "float32", 2, 8, 8, key_heads=1)
WILD = (2**31, 2**31 + 3, 2**32 + 1, 2**62, -1, -5, -(2**31), -(2**32) + 1, -(2**62))  # two of them are 1 in 32 bits


@pytest.mark.parametrize("angles", ["freqs", "cos_sin"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_ids_outside_of_the_angles_give_nan_and_read_nothing(angles: str, *, inplace: bool) -> None:
    spec = dataclasses.replace(SMALL, positions="ids", angles=angles, inplace=inplace)
    ids = (0, *WILD, 4, 5, 3)
    case = RopeCase(spec, seq=len(ids), angle_rows=5, ids=tuple((i,) for i in ids), index_dtype="int64")
    assert_right(case, GRID)
    built = build(case)
    built.run(GRID)
    rotated = to_numpy(canonical(built.call.out, "thd"))
    assert np.flatnonzero(~np.isnan(rotated).any((1, 2, 3))).tolist() == [0, len(WILD) + 1, len(WILD) + 3]
    narrow = (0, 2**31 - 1, -1, -(2**31), 4, 5)
    assert_right(dataclasses.replace(case, seq=6, ids=tuple((i,) for i in narrow), index_dtype="int32"), NARROW)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("start", [*WILD, 2**31 - 1], ids=str)
@pytest.mark.parametrize("positions", ["offset", "starts"])
def test_offsets_outside_of_the_angles_give_nan_and_read_nothing(positions: str, start: int) -> None:
    fits = -(2**31) <= start < 2**31
    spec = dataclasses.replace(SMALL, layout="bshd", positions=positions)
    starts = start if positions == "offset" else (2, start)
    for dtype in ("int32", "int64")[0 if fits else 1 :]:
        case = RopeCase(spec, seq=5, batch=2, angle_rows=9, starts=starts, index_dtype=dtype)
        assert_right(case, GRID)


@pytest.mark.parametrize("places", ["shifted", "offset", "starts", "ids"])
@pytest.mark.parametrize("position", [100_001, 2**24 + 1, 2**31 - 9], ids=str)
def test_large_positions_are_as_right_as_small_ones(places: str, position: int) -> None:
    # The position is rounded to float32, also past 2^24, and so is its product with the rate.
    spec = dataclasses.replace(SMALL, layout="bshd", positions=places, angles="inv_freq")
    case = RopeCase(spec, seq=5, batch=2, starts=position, index_dtype="int64")
    if places == "starts":
        case = dataclasses.replace(case, starts=(position, 3))
    if places == "ids":
        case = dataclasses.replace(case, starts=0, ids=tuple((position + i, 7 * i) for i in range(5)))
    assert_right(case, GRID)


def test_rows_far_down_a_table_are_found() -> None:
    rows = 140_000
    spec = dataclasses.replace(SMALL, layout="bshd", positions="ids", head_dim=2, rotary_dim=2)
    ids = ((rows - 1, 131_071), (70_000, rows), (1, 100_001))
    assert_right(RopeCase(spec, seq=3, batch=2, angle_rows=rows, ids=ids), GRID)


def test_positions_before_the_first_turn_back_with_inv_freq() -> None:
    # Left padding gives such positions.
    spec = dataclasses.replace(SMALL, layout="sbhd", angles="inv_freq", positions="starts", scaled=True)
    assert_right(RopeCase(spec, seq=7, batch=2, starts=(-3, 2), scaling=1.3), GRID)


@pytest.mark.parametrize("scale", [1e5, 1e7, 1e30], ids=str)
@pytest.mark.parametrize("angles", ["freqs", "inv_freq"])
def test_large_angles_are_as_right_as_small_ones(angles: str, scale: float) -> None:
    spec = RopeSpec("bshd", "float32", 3, 32, 32, angles=angles, key_heads=1, positions="shifted")
    assert_right(RopeCase(spec, seq=13, angle_scale=scale, starts=11, angle_rows=24), GRID)


# Packed sequences ---------------------------------------------------------------------------------------------------

PACKINGS = {
    "empty-sequences-first-last-and-between": (0, 0, 0, 4, 4, 4, 10, 10, 10),
    "all-empty": (0, 0, 0),
    "no-sequence": (0,),
    "tokens-past-the-last-bound": (0, 2, 8),
    "tokens-on-both-sides": (2, 2, 6, 8, 8),
    "bounds-past-the-tensor": (0, 4, 30),
}


PACKED_CALLS = pairwise.covering(
    pairwise.product(
        {"packing": tuple(PACKINGS), "inplace": (False, True), "cp_size": (1, 2), "starts": (False, True)},
        lambda _: True,
    )
)


@pytest.mark.parametrize(("packing", "inplace", "cp_size", "starts"), [tuple(row.values()) for row in PACKED_CALLS])
def test_packed_tokens_find_their_positions_and_padding_stays(
    packing: str, cp_size: int, *, inplace: bool, starts: bool
) -> None:
    bounds = PACKINGS[packing]
    spec = dataclasses.replace(
        SMALL, inplace=inplace, positions="starts" if starts else "order", context_parallel=cp_size > 1
    )
    own = tuple(range(3, len(bounds) + 2)) if starts else 0
    globally = tuple(cp_size * bound for bound in bounds)
    for padding, cp_rank in zip((float("nan"), float("inf")), range(cp_size), strict=False):
        case = RopeCase(
            spec,
            seq=11,
            cu_seqlens=globally,
            padding=padding,
            angle_rows=99,
            starts=own,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
        assert_right(case, GRID)


# Sizes around the powers of the search's fan.
@pytest.mark.parametrize("sequences", [1, 63, 64, 65, 4095, 4097])
def test_a_token_finds_its_sequence_among_any_number(sequences: int) -> None:
    draw = torch.Generator().manual_seed(sequences)
    starts = tuple(torch.randint(0, 50, (sequences,), generator=draw).tolist())
    spec = dataclasses.replace(SMALL, positions="starts")
    bounds = many_bounds(sequences, 40)
    assert_right(
        RopeCase(spec, seq=40, cu_seqlens=bounds, angle_rows=99, starts=starts),
        RopeVariant(block_tokens=8, block_heads=4),
    )
    # Each sequence has two tokens on each of two ranks.
    spec = dataclasses.replace(SMALL, context_parallel=True)
    late = tuple(4 * max(0, 20 - sequences + index) for index in range(sequences + 1))
    case = RopeCase(spec, seq=40, cu_seqlens=late, angle_rows=99, cp_size=2, cp_rank=1)
    assert_right(case, RopeVariant(block_tokens=8, block_heads=4))


@pytest.mark.parametrize(("cp_size", "seq"), [(2, 2), (2, 10), (4, 6), (8, 4)])
def test_the_ranks_together_rotate_the_whole_sequence(cp_size: int, seq: int) -> None:
    spec = RopeSpec("bshd", "float32", 2, 8, 8, context_parallel=True)
    places = [oracle.own_chunks(cp_size * seq, cp_size, rank) for rank in range(cp_size)]
    assert sorted(itertools.chain(*places)) == list(range(cp_size * seq))
    for rank in range(cp_size):
        assert_right(RopeCase(spec, seq=seq, cp_size=cp_size, cp_rank=rank), GRID)


# What does not rotate -----------------------------------------------------------------------------------------------


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("variant", [GRID, TOKENS_FIRST], ids=["heads", "tokens"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("rotated", "copied"), [("last", 0), ("proportional", 0), ("first", 2), ("last", 3)])
def test_what_does_not_rotate_is_copied_bit_by_bit(rotated: str, copied: int, style: str, variant: RopeVariant) -> None:
    if rotated == "proportional" and style == "interleaved":
        pytest.skip("proportional pairs are halves of a head")
    spec = RopeSpec("bshd", "bfloat16", 5, 24, 8, style=style, rotated=rotated, copied_heads=copied, positions="offset")
    case = RopeCase(
        spec, seq=5, batch=2, starts=1, angle_rows=4
    )  # positions past the angles give NaN, and nowhere else
    built = build(case)
    x, still = built.call.x, [f for f in range(24) if f not in {f for pair in case.turned() for f in pair}]
    odd = (
        torch.tensor([float("inf"), -0.0, 2.0**-126, -3.0])
        .bfloat16()
        .repeat(2 * 5 * 5 * 24 // 4)
        .view(x.shape)
        .to(DEVICE)
    )
    x[..., still] = odd[..., still]
    x[:, :, 5 - copied :] = odd[:, :, 5 - copied :]
    built.run(variant)
    want, got = (t.view(torch.int16) for t in (x, built.call.out))
    assert torch.equal(got[..., still], want[..., still])
    assert torch.equal(got[:, :, 5 - copied :], want[:, :, 5 - copied :])
    turned = built.call.out[:, :, : 5 - copied].isnan().any(2).any(-1)  # [batch, seq]
    assert turned.tolist() == [[False, False, False, True, True]] * 2


@pytest.mark.parametrize("style", STYLES)
def test_the_conjugate_of_a_call_gives_back_what_it_rotated(style: str) -> None:
    spec = RopeSpec("bshd", "float32", 3, 16, 12, style=style, key_heads=2, rotated="last", positions="offset")
    forward = RopeCase(spec, seq=7, batch=2, angle_rows=12, starts=4)
    built = build(forward)
    built.run(GRID)
    back = build(dataclasses.replace(forward, spec=dataclasses.replace(spec, conjugate=True)))
    back.call.x.copy_(built.call.out)
    back.call.key.copy_(built.call.key_out)
    back.run(GRID)
    for got, before in ((back.call.out, built.x_before), (back.call.key_out, built.key_before)):
        _, bound = wanted(built, before)
        # Two roundings, the first of them then rotated: at most twice the bound of a pair, in each feature.
        assert_close(to_numpy(canonical(got, "bshd")), before, 4 * bound)


# What tuning times --------------------------------------------------------------------------------------------------


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("row", ROWS[::3], ids=row_id)
def test_tuning_holds_any_call_against_a_reference_that_the_kernels_meet(row: dict[str, Any]) -> None:
    spec = spec_of(row)
    call = probe(inputs(spec, RopeSize(2, 6), DEVICE, 0))
    want, bound = reference(spec, call)  # before the call, because a call in place overwrites its input
    before = call.x.clone()
    run(launches(spec, GRID, call))
    bound = 2 * bound if truncates(spec.dtype) else bound
    assert_close(to_numpy(call.out), to_numpy(want), to_numpy(bound))
    assert bool(intact(call.out))
    assert not torch.equal(call.out, before)
    assert spec.inplace or torch.equal(call.x, before)
