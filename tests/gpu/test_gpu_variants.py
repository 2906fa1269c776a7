"""Variants on a real GPU: every choice of every knob, what the interpreter cannot run among them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests import pairwise
from tests.rope_case import RopeCase, assert_right
from tests.test_rope_kernels import spec_for
from tuned.choices import choices
from tuned.rope.variant import RopeVariant, rejection


def numbers() -> list[dict[str, Any]]:
    """Variants that hold every legal pair of choices on sm_90."""
    rows = pairwise.product(
        choices(RopeVariant), lambda knobs: rejection(spec_for(knobs), None, RopeVariant(**knobs), 90) is None
    )
    return pairwise.covering(rows)


def knobs_id(knobs: dict[str, Any]) -> str:
    """Every value, in the order of declaration."""
    return "-".join(f"{value}" or "none" for value in knobs.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("knobs", numbers(), ids=knobs_id)
def test_every_choice_of_a_knob_is_right_on_the_gpu(knobs: dict[str, Any], dtype: str) -> None:
    major, minor = torch.cuda.get_device_capability()
    spec, variant = dataclasses.replace(spec_for(knobs), dtype=dtype), RopeVariant(**knobs)
    if reason := rejection(spec, None, variant, 10 * major + minor):
        pytest.skip(reason)
    assert_right(RopeCase(spec, seq=4 * knobs["block_tokens"] + 1, batch=2), variant)
