"""The kernels of GRUs and linears where rows lie gigabytes apart: offsets of rows, tokens and cells are 64-bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from generator.measuring.mended import mended_interpreter
from tests.support import gru_gradients, gru_sequences, linear_cat_forms
from tests.support.far import FAR, far
from tests.support.gru_case import GruCase, build
from tests.support.gru_cell_forms import FORMS, LIBRARY
from tests.support.run import INTERPRETED, run
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_cell.launches import fused_launch, gates_launch
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.linear_cat.launches import launches as linear_launches
from tuned.families.linear_cat.spec import LinearCatSpec

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="a GPU has no memory without pages: there tests of many rows need it"),
]

ROWS = 4  # rows that lie FAR apart


def ran(launch: Any) -> None:
    with mended_interpreter():
        run([launch])


CELL = GruCellSpec("float16", 8, (16, 8), precision="")


@pytest.mark.parametrize("what", ["x0", "x1", "h", "out"])
@pytest.mark.parametrize("form", ["split", "tile", "vector", "outer"])
def test_a_step_finds_rows_that_lie_gigabytes_apart(form: str, what: str) -> None:
    call, _ = build(GruCase(CELL, ROWS))
    apart = dataclasses.replace(call, **{what: far(getattr(call, what))})
    for one in (call, apart):
        ran(fused_launch(CELL, FORMS[form], one))
    assert torch.equal(apart.out, call.out)


@pytest.mark.parametrize(
    ("what", "axis"), [("gates_x", 0), ("gates_h", 0), ("h", 0), ("out", 0), ("h", 1), ("out", 1), ("both", 1)]
)
def test_the_gates_find_what_lies_gigabytes_apart(what: str, axis: int) -> None:
    """In place a state has its caller's strides; ``both`` is the state that is read and overwritten."""
    call, _ = build(GruCase(CELL, ROWS))
    draw = torch.Generator().manual_seed(1)
    gates = {name: torch.randn(ROWS, 24, generator=draw).half() for name in ("gates_x", "gates_h")}
    ran(gates_launch(CELL, LIBRARY, call, (gates["gates_x"], gates["gates_h"])))
    if what == "both":
        h = far(call.h, axis)
        apart = dataclasses.replace(call, h=h, out=h)
    else:
        apart = call if what in gates else dataclasses.replace(call, **{what: far(getattr(call, what), axis)})
    if what in gates:
        gates[what] = far(gates[what])
        apart = dataclasses.replace(call, out=torch.zeros_like(call.out))
    ran(gates_launch(CELL, LIBRARY, apart, (gates["gates_x"], gates["gates_h"])))
    assert torch.equal(apart.out, call.out)


@pytest.mark.parametrize("what", ["x0", "x1", "out"])
@pytest.mark.parametrize("form", linear_cat_forms.FORMS)
def test_a_linear_finds_rows_that_lie_gigabytes_apart(form: str, what: str) -> None:
    spec = LinearCatSpec("float16", (16, 8), 8, precision="")
    call, _ = linear_cat_forms.build(spec, ROWS, "contiguous")
    apart = dataclasses.replace(call, **{what: far(getattr(call, what))})
    for one in (call, apart):
        (launch,) = linear_launches(spec, linear_cat_forms.FORMS[form], one)
        ran(launch)
    assert torch.equal(apart.out, call.out)


SEQUENCES = {
    "split": GruVariant("persistent", "split", 16, 8, "counter", num_warps=2),
    "tile": GruVariant("persistent", "tile", 16, 32, "counter", num_warps=2),
}
LONG, WIDE, FLAT = (ROWS,), (1,) * ROWS, (1, 1)  # steps of each row


@pytest.mark.parametrize(
    ("what", "axis", "lengths"),
    [("gates", 1, LONG), ("out", 0, LONG), ("gates", 2, WIDE), *((name, 1, WIDE) for name in ("out", "h_0", "h_n"))],
)
@pytest.mark.parametrize("form", SEQUENCES)
def test_a_sequence_finds_tokens_that_lie_gigabytes_apart(
    form: str, what: str, axis: int, lengths: tuple[int, ...]
) -> None:
    assert_found(GruSpec("float16", 16), SEQUENCES[form], what, axis, lengths)


@pytest.mark.parametrize("what", ["weight_hh", "weight_ih", "bias_ih", "bias_hh", "h_0", "h_n", "between"])
def test_a_stack_finds_layers_that_lie_gigabytes_apart(what: str) -> None:
    assert_found(GruSpec("float16", 16, layers=4), SEQUENCES["split"], what, 0, FLAT)


@pytest.mark.parametrize(("axis", "lengths"), [(1, LONG), (2, WIDE)])
def test_a_stack_finds_what_lies_gigabytes_apart_between_its_layers(axis: int, lengths: tuple[int, ...]) -> None:
    assert_found(GruSpec("float16", 16, layers=2), SEQUENCES["split"], "between", axis, lengths)


@pytest.mark.parametrize(("what", "axis"), [("gates", 1), ("out", 0)])
@pytest.mark.parametrize("layout", ["packed", "thd"])
def test_packed_tokens_that_lie_gigabytes_apart_are_found(layout: str, what: str, axis: int) -> None:
    assert_found(GruSpec("float16", 16, layout), SEQUENCES["split"], what, axis, WIDE)


def assert_found(spec: GruSpec, variant: GruVariant, what: str, axis: int, lengths: tuple[int, ...]) -> None:
    """The results equal those of the same numbers side by side."""
    near, apart = (gru_sequences.build(gru_sequences.Sequences(spec, lengths)) for _ in range(2))
    apart.call = dataclasses.replace(apart.call, **{what: far(getattr(apart.call, what), axis)})
    for built in (near, apart):
        gru_sequences.run_windows(built, variant)
    for name, tensor in near.written().items():
        assert bool(tensor.isfinite().all())
        assert torch.equal(apart.written()[name], tensor), name


# Gradients


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize(
    ("what", "axis", "lengths"),
    [("grad_out", 0, LONG), *((name, 1, WIDE) for name in ("grad_out", "grad_h_n", "grad_h_0"))],
)
def test_a_gradient_finds_rows_that_lie_gigabytes_apart(
    what: str, axis: int, lengths: tuple[int, ...], turns: int
) -> None:
    assert_gradients_found({what: axis}, lengths, turns=turns)


TOKENS = {"gates": 3, "hidden": 3, "before": 1, "out": 4}  # elements of a token, in hidden sizes: all tokens lie alike


# With cu_seqlens a token's offset is its number, so the tokens of such a call have no gaps.
@pytest.mark.parametrize(("layout", "axis", "lengths"), [("dense", 1, LONG), ("dense", 2, WIDE), ("packed", 1, WIDE)])
def test_a_gradient_finds_tokens_that_lie_gigabytes_apart(layout: str, axis: int, lengths: tuple[int, ...]) -> None:
    assert_gradients_found(dict.fromkeys(TOKENS, axis), lengths, layout)


@pytest.mark.parametrize("what", ["weight_hh", "bias_ih", "bias_hh", "grad_h_n", "grad_h_0"])
def test_a_gradient_finds_directions_that_lie_gigabytes_apart(what: str) -> None:
    assert_gradients_found({what: 0}, FLAT, directions=2)


def assert_gradients_found(
    apart: dict[str, int], lengths: tuple[int, ...], layout: str = "dense", directions: int = 1, turns: int = 1
) -> None:
    """The results equal those of the same numbers side by side; ``apart``: names of tensors, and an axis."""
    spec, variant = GruSpec("float16", 16, layout, directions), dataclasses.replace(SEQUENCES["split"], turns=turns)
    near, away = (gru_gradients.build(gru_gradients.Sequences(spec, lengths)) for _ in range(2))
    moved = {name: far(getattr(away.call, name), axis, FAR * TOKENS.get(name, 1)) for name, axis in apart.items()}
    away.call = dataclasses.replace(away.call, **moved)
    for built in (near, away):
        gru_gradients.run_windows(built, variant)
    for name, tensor in near.written().items():
        assert bool(tensor.isfinite().all())
        assert torch.equal(away.written()[name], tensor), name
