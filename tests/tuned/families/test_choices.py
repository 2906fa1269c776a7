"""Choices of knobs: what is declared is what a variant may have."""

from __future__ import annotations

import dataclasses

import pytest

from tuned.families.choices import choices, one_of, undeclared


@dataclasses.dataclass(frozen=True)
class Variant:
    warps: int = one_of(1, 2, 4, default=2)
    early: bool = one_of(False, True, default=False)


def test_choices_are_told_in_the_order_of_their_declaration() -> None:
    assert list(choices(Variant).items()) == [("warps", (1, 2, 4)), ("early", (False, True))]
    assert Variant() == Variant(2, early=False)


def test_what_is_no_choice_is_named() -> None:
    assert undeclared(Variant()) is None
    assert undeclared(Variant(3)) == "warps must be one of (1, 2, 4), got 3"


@pytest.mark.parametrize(
    ("variant", "name"), [(Variant(True), "warps"), (Variant(early=1), "early"), (Variant(2.0), "warps")]
)
def test_a_number_is_no_bool_and_a_bool_no_number(variant: Variant, name: str) -> None:
    assert (undeclared(variant) or "").startswith(f"{name} must be one of")


def test_a_default_is_one_of_the_choices() -> None:
    with pytest.raises(ValueError, match=r"the default must be one of \(1, 2\), got 3"):
        one_of(1, 2, default=3)
