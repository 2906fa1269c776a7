"""A bounded share of the fuzz without a GPU, by PyTorch's operators and in the interpreter; and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fuzz import case as cases
from tests.fuzz.draw import CPU, World, case
from tests.fuzz.interpreted import interpreted_families
from tests.rope_calls import Watch, watch
from tests.run import INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["watch"]
SEED = 11
KERNELS = World(
    truncates=True, sees_values=False, most=1000, hidden=16, long=0, modes=("plain", "no_grad", "inference", "grad")
)
ROPE = dataclasses.replace(KERNELS, kinds=("rope", "dropin"))
FAMILIES = dataclasses.replace(KERNELS, kinds=("gru", "gru_cell", "linear_cat"), modes=("no_grad", "inference"))


def assert_right(world: World, indices: range, repeats: int = 2) -> int:
    """Run cases; every failure is told with its script."""
    wrong, calls = [], 0
    for index in indices:
        made, failure = cases.run(case(world, SEED, index, repeats), "cpu")
        calls += made
        wrong += [] if failure is None else [f"{failure.message}\n{failure.script}"]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    return calls


def test_calls_by_pytorchs_operators_are_right() -> None:
    assert assert_right(CPU, range(150)) > 500


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_rope_by_kernels_is_right(watch: Watch) -> None:
    watch.interpreted = True
    assert assert_right(ROPE, range(24), 1) > 40
    assert watch.bare > 10


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_the_gru_families_by_kernels_are_right() -> None:
    with interpreted_families():
        assert assert_right(FAMILIES, range(9), 1) > 15
