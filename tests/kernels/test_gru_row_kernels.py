"""The recurrence with one row a program, its weights in registers, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import pairwise
from tests.support.gru_sequences import NUMBERS, Sequences, assert_right, lengths_of, spec_of
from tuned.families.gru.spec import LAYOUTS
from tuned.families.gru.variant import GruVariant, row_variant

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
    "seq": (1, 2, 3, 6),  # two steps at a time: an odd number and an even one
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


def test_none_holds_more_units_than_registers() -> None:
    assert row_variant(129) is None
    assert [variant_of(hidden).block_hidden for hidden in (1, 32, 33, 64, 65, 128)] == [32, 32, 64, 64, 128, 128]
