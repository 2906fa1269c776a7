"""The recurrence with one row a program and its weights in registers, against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from generator.measuring.mended import mended_interpreter
from generator.rendering.structures import structures
from tests.support import pairwise
from tests.support.gru_sequences import (
    NUMBERS,
    Sequences,
    assert_right,
    assert_steps_right,
    build,
    lengths_of,
    spec_of,
)
from tests.support.run import run
from tuned.families.gru.launches import launches
from tuned.families.gru.spec import LAYOUTS, GruSpec
from tuned.families.gru.variant import GruVariant, row_variant
from tuned.families.launch import Launch

pytestmark = pytest.mark.interpreter

AXES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "shape": ("layer", "both"),
    "numbers": tuple(NUMBERS),
    "bias": (True, False),
    "resets": (False, True),
    "view": ("steps", "rows", "apart"),
    "hidden": (1, 20, 33, 64, 100, 128),
    "rows": (1, 2, 4),
    "seq": (1, 2, 3, 6),  # two steps at a time, with an odd and an even number of steps
}


def variant_of(hidden: int) -> GruVariant:
    found = row_variant(hidden)
    assert found is not None
    return found


COMBINATIONS = pairwise.covering(
    pairwise.sample(AXES, lambda knobs: knobs["layout"] == "dense" or not knobs["resets"], 400)
)


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("knobs", COMBINATIONS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_every_choice_computes_what_the_oracle_does(knobs: dict[str, Any]) -> None:
    spec = spec_of(
        knobs["numbers"],
        knobs["hidden"],
        knobs["shape"],
        knobs["layout"],
        bias=knobs["bias"],
        resets=knobs["resets"],
    )
    lengths = lengths_of(knobs["layout"], knobs["rows"], knobs["seq"])
    assert_right(Sequences(spec, lengths, knobs["view"]), variant_of(spec.hidden))


def test_every_choice_is_tested() -> None:
    for name, values in AXES.items():
        assert {knobs[name] for knobs in COMBINATIONS} == set(values), name


WEIGHTS = [  # dtype, hidden, elements before the weights, elements between those of two directions; weights a load
    ("float32", 64, 0, 0, 2),
    ("bfloat16", 64, 0, 0, 4),
    ("float32", 66, 0, 4, 2),  # rows of 264 bytes
    ("bfloat16", 66, 0, 8, 1),  # rows of 132 bytes
    ("float32", 33, 0, 0, 1),
    ("float32", 64, 1, 0, 1),
    ("float32", 64, 2, 0, 1),  # 8 divides the address, but a launch is known only by whether 4 does
    ("bfloat16", 64, 4, 0, 1),
    ("float32", 64, 0, 2, 1),
]


@pytest.mark.parametrize(("dtype", "hidden", "before", "between", "together"), WEIGHTS)
def test_weights_are_loaded_by_words_where_they_are_aligned(
    dtype: str, hidden: int, before: int, between: int, together: int
) -> None:
    spec = GruSpec(dtype, hidden, directions=2, precision="ieee")
    built = build(Sequences(spec, (3, 3)))
    given = built.call.weight_hh
    apart = 3 * hidden * hidden + between
    memory = torch.zeros(before + 2 * apart + 8, dtype=given.dtype, device=given.device)
    weights = memory[before:].as_strided(given.shape, (apart, hidden, 1)).copy_(given)
    call = dataclasses.replace(built.call, weight_hh=weights)
    variant = variant_of(hidden)
    (launch,) = launches(spec, variant, call)
    assert isinstance(launch, Launch)
    assert launch.constants["PACK"] == together
    with mended_interpreter():
        run([launch])
    assert_steps_right(dataclasses.replace(built, call=call), keeps_state=True)


def test_the_compiler_does_not_know_how_far_apart_columns_are() -> None:
    """What a thread loads is laid out by what rows are said to be, and they are no neighbours."""
    spec = spec_of("half", 64)
    (launch,) = launches(spec, variant_of(64), build(Sequences(spec, (3,))).call)
    assert isinstance(launch, Launch)
    source = structures()[launch.kernel].source
    assert '"weight_hh_stride_k"])' in source, "as 1 it would be a constant"
    assert "i_k * stride_k" in source


def test_none_holds_more_units_than_registers() -> None:
    assert row_variant(129) is None
    assert [variant_of(hidden).block_hidden for hidden in (1, 32, 33, 64, 65, 128)] == [32, 32, 64, 64, 128, 128]
