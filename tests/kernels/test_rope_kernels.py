"""Every RoPE kernel of plain calls and every knob, interpreted (or on a GPU if there is one), against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from generator.families.rope.texts import rope_specs, row_specs
from generator.rendering.structures import structures
from tests.support import oracle, pairwise
from tests.support.rope_case import RopeCase, assert_close, assert_right
from tests.support.rope_variants import many_bounds, numbers, spec_for, spec_of
from tests.support.run import DEVICE, INTERPRETED, run, to_numpy
from tuned.families.choices import choices
from tuned.families.launch import Launch
from tuned.families.rope.launches import kernel_name
from tuned.families.rope.spec import LAYOUTS, STYLES, RopeSpec
from tuned.families.rope.variant import RopeVariant, default_variant
from tuned.launching.launcher import PROBE_KERNEL

pytestmark = pytest.mark.interpreter

# Two empty sequences, first and in the middle; two tokens before the first bound and two past the last.
PACKED = (2, 2, 7, 7, 12)
PACKED_SEQ = 14
GRID = RopeVariant(block_tokens=4, block_heads=8)
TEXTS = {
    kernel_name(spec, variant): (spec, variant)
    for specs, variant in ((rope_specs(), GRID), (row_specs(), dataclasses.replace(GRID, whole_rows=True)))
    for spec in specs
    if spec.plain
}


def case_of(spec: RopeSpec, **rest: Any) -> RopeCase:
    """A call of a few tokens that fill no tile evenly, packed where the layout is."""
    if spec.packed:
        return RopeCase(spec, **{"seq": PACKED_SEQ, "cu_seqlens": PACKED, **rest})
    return RopeCase(spec, **{"seq": 7, "batch": 2, **rest})


def small(spec: RopeSpec, head_dim: int, **rest: Any) -> RopeSpec:
    """The same text with 5 heads of ``head_dim``, of which 12 features rotate."""
    return dataclasses.replace(spec, heads=5, head_dim=head_dim, rotary_dim=12, **rest)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("name", TEXTS)
def test_every_kernel_rotates_as_the_oracle_does(name: str) -> None:
    spec, variant = TEXTS[name]
    direction = "forward" if spec.inplace else "backward"
    whole = small(spec, 12, dtype="float32")
    partial = small(spec, 20, dtype="float16", angle_entries="feature", direction=direction)
    assert kernel_name(whole, variant) == kernel_name(partial, variant) == name
    assert_right(case_of(whole), variant)
    assert_right(case_of(partial), variant)


def test_every_emitted_rope_kernel_of_plain_calls_is_among_those_tested() -> None:
    emitted = {name for name in structures() if name.startswith("rope_")}
    # Those of complete calls, norms, MLA, caches and gradients of angles have tests of their own.
    others = ("rope_complete_", "rope_norm_", "rope_mla_", "rope_append_", "rope_angle_gradient_")
    assert {*TEXTS, PROBE_KERNEL} == {n for n in emitted if not n.startswith(others)}


@pytest.mark.parametrize("strides", [(12, 1), (40, 3), (1, 5)], ids=str)
def test_the_table_kernel_writes_sine_and_cosine_and_nothing_else(strides: tuple[int, int]) -> None:
    rows, width = 5, 12
    numbers = 1e4 * torch.randn(400, generator=torch.Generator().manual_seed(0))
    freqs = numbers.to(DEVICE).as_strided((rows, width), strides)
    tables = torch.full((4, rows, width), torch.nan, device=DEVICE)
    constants = {"WIDTH": width, "BLOCK": 32, "PDL": False}
    run([Launch(PROBE_KERNEL, 2, (freqs, tables[1], tables[2], rows, *strides), constants, {"num_warps": 4})])
    assert bool(tables[[0, 3]].isnan().all()), "it wrote beside its tables"
    angles = to_numpy(freqs)
    # CUDA's documented bound: 2 units in the last place of a value of at most 1.
    assert_close(to_numpy(tables[1]), np.cos(angles), np.full(angles.shape, 2 * oracle.U32))
    assert_close(to_numpy(tables[2]), np.sin(angles), np.full(angles.shape, 2 * oracle.U32))


# Every number, pairwise ---------------------------------------------------------------------------------------------


NUMBERS = numbers(spec_for)


@pytest.mark.parametrize("knobs", NUMBERS, ids=lambda k: "-".join(f"{v}" or "none" for v in k.values()))
def test_every_choice_of_a_knob_rotates_as_the_oracle_does(knobs: dict[str, Any]) -> None:
    # Two tiles of tokens; the last tile has one token.
    case = RopeCase(spec_for(knobs), seq=knobs["block_tokens"] + 1, batch=2)
    assert_right(case, RopeVariant(**knobs))


def test_every_declared_choice_is_tested() -> None:
    # The second is one of complete calls; resident programs and chunks are of norms, which have tests of their own.
    not_here = {("pdl", True), ("cache", "stream_all")}
    for name, declared in choices(RopeVariant).items():
        found = {knobs[name] for knobs in NUMBERS}
        assert name in {"resident", "chunk_heads"} or found == {
            value for value in declared if (name, value) not in not_here
        }, name


# Arguments, pairwise ------------------------------------------------------------------------------------------------

DIMS = ((80, 20), (96, 24), (96, 48), (256, 64), (128, 128), (512, 512), (6, 2), (5, 4))  # head_dim, rotary_dim
ANGLES = (
    ("freqs", "float32"),
    ("cos_sin", "float32"),
    ("cos_sin", "float16"),
    ("cos_sin", "bfloat16"),
    ("cos_sin", "float64"),
)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "dtype": ("float32", "float16", "bfloat16"),
    "dims": DIMS,
    "heads": (1, 3, 5),
    "seq": (1, 7, 13),
    "batch": (1, 3),
    "style": STYLES,
    "angles": ANGLES,
    "entries": ("pair", "feature"),
    "use": ("forward", "inplace", "backward"),
    "x_view": ("contiguous", "qkv", "swapped", "transposed", "offset", "expanded"),
    "out_view": ("contiguous", "swapped", "offset"),
    "angle_view": ("contiguous", "strided", "transposed"),
    "longer": (0, 5),  # more rows of angles than the sequence has
    "schedule": ("default", "tokens first", "whole rows"),
}


def schedule_of(name: str, spec: RopeSpec) -> RopeVariant:
    """A variant that walks over the tiles in another order."""
    # The interpreter has no kernel before this one.
    default = dataclasses.replace(default_variant(spec), block_tokens=4, block_heads=4, pdl=False)
    return {
        "default": default,
        "tokens first": dataclasses.replace(default, block_heads=2, order="tokens", cache="keep"),
        "whole rows": dataclasses.replace(default, whole_rows=True),
    }[name]


def possible(row: dict[str, Any]) -> bool:
    """Whether a caller can ask for it, and the schedule makes a difference for it."""
    return not (
        (row["use"] == "inplace" and (row["x_view"] == "expanded" or row["out_view"] != "contiguous"))
        or (row["layout"] == "thd" and row["batch"] > 1)
        or (row["schedule"] == "whole rows" and row["style"] == "interleaved")
        or (row["seq"] == 13 and row["dims"][0] > 128)  # the interpreter takes a second for such a tensor
    )


def row_id(row: dict[str, Any]) -> str:
    """The kernel's name, and the values that are not in it."""
    spec = spec_of(row)
    rest = (row["dtype"], *row["dims"], f"h{row['heads']}", f"s{row['seq']}", f"b{row['batch']}", row["entries"])
    return "-".join(
        str(word)
        for word in (kernel_name(spec, schedule_of(row["schedule"], spec)), row["schedule"], *rest, row["x_view"])
    )


# 6,000 draws hold practically every pair of values that can meet: the rarest pair is drawn about a hundred times.
ROWS = pairwise.covering(pairwise.sample(ARGUMENTS, possible, 6000))


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_every_kind_of_argument_rotates_as_the_oracle_does(row: dict[str, Any]) -> None:
    spec = spec_of(row)
    case = RopeCase(
        spec,
        seq=row["seq"],
        batch=row["batch"],
        angle_rows=row["seq"] + row["longer"],
        x_view=row["x_view"],
        out_view=row["out_view"],
        angle_view=row["angle_view"],
        cu_seqlens=(0, row["seq"] // 2, row["seq"]) if spec.packed else None,
    )
    assert_right(case, schedule_of(row["schedule"], spec))


def test_every_value_of_an_argument_is_tested() -> None:
    for name, values in ARGUMENTS.items():
        assert {row[name] for row in ROWS} == set(values), name


# Packed calls -------------------------------------------------------------------------------------------------------

PACKINGS = {
    "one-sequence": (0, 11),
    "a-sequence-a-token": tuple(range(12)),
    "empty-sequences-first-last-and-between": (0, 0, 0, 4, 4, 4, 11, 11, 11),
    "all-empty": (0, 0, 0),
    "tokens-past-the-last-bound": (0, 3, 8),
    "tokens-before-the-first-bound": (3, 5, 11),
    "tokens-on-both-sides": (2, 2, 6, 9, 9),
    "bounds-past-the-tensor": (0, 5, 30),
}
THD_SPECS = [RopeSpec("thd", "float16", 3, 12, 8, inplace=inplace) for inplace in (False, True)]


PACKED_CALLS = pairwise.covering(
    pairwise.product(
        {"packing": tuple(PACKINGS), "style": STYLES, "inplace": (False, True), "padding": ("inf", "nan")},
        lambda _: True,
    )
)


@pytest.mark.parametrize(("packing", "style", "inplace", "padding"), [tuple(row.values()) for row in PACKED_CALLS])
def test_packed_tokens_take_positions_from_cu_seqlens_and_padding_stays(
    packing: str, style: str, padding: str, *, inplace: bool
) -> None:
    spec = RopeSpec("thd", "float16", 3, 12, 8, style=style, inplace=inplace)
    case = RopeCase(spec, seq=11, cu_seqlens=PACKINGS[packing], padding=float(padding), angle_rows=11)
    assert_right(case, RopeVariant(block_tokens=4, block_heads=4))


# Sizes around the powers of each fan that a search may use, and of two; copied and in place in turn.
FANS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 257, 1023, 1024, 1025, 4095, 4097)


@pytest.mark.parametrize(("sequences", "inplace"), [(count, at % 2 == 1) for at, count in enumerate(FANS)])
def test_a_token_finds_its_sequence_among_any_number(sequences: int, *, inplace: bool) -> None:
    spec = RopeSpec("thd", "float16", 3, 12, 8, inplace=inplace)
    bounds = many_bounds(sequences, 40)
    assert_right(RopeCase(spec, seq=40, cu_seqlens=bounds), RopeVariant(block_tokens=8, block_heads=4))
    # The same, but each of the last tokens is in its own sequence: the end of the search.
    late = tuple(max(0, 40 - sequences + index) for index in range(sequences + 1))
    assert_right(RopeCase(spec, seq=40, cu_seqlens=late), RopeVariant(block_tokens=8, block_heads=4))


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("spec", THD_SPECS, ids=lambda s: kernel_name(s, RopeVariant()))
def test_positions_past_the_angles_give_nan_and_read_nothing(spec: RopeSpec, rows: int) -> None:
    # assert_right checks every address that is loaded: only the rows that exist are read.
    case = RopeCase(spec, seq=11, cu_seqlens=(0, 6, 9), angle_rows=rows)
    assert_right(case, RopeVariant(block_tokens=4, block_heads=4))


# Angles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e5, 1e7, 1e30], ids=str)
def test_large_angles_are_as_right_as_small_ones(scale: float) -> None:
    # A float32 angle is an exact number, however large: compare its sine with float64's sine of the same number.
    case = RopeCase(RopeSpec("bshd", "float32", 3, 32, 32), seq=13, angle_scale=scale)
    assert_right(case, RopeVariant(block_tokens=8, block_heads=4))


@pytest.mark.skipif(not INTERPRETED, reason="the GPU's own rounding is tested with every bfloat16 case")
def test_the_interpreter_truncates_bfloat16() -> None:
    # This is why tests.support.run.truncates allows a whole unit: when this test fails, the allowance can go.
    case = RopeCase(RopeSpec("bshd", "bfloat16", 8, 64, 64), seq=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.rope_case.truncates", lambda _: False)
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_right(case, RopeVariant(block_tokens=8))
