"""The gate kernels of the GRU cell against the oracle, and against torch.nn.GRUCell."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from generator.rendering.structures import gru_cell_specs, structures
from tests import pairwise
from tests.gru_case import GruCase, assert_right
from tests.rope_case import assert_close
from tests.run import DEVICE, run, to_numpy
from tuned.choices import choices
from tuned.gru_cell.launches import GruCellCall, kernel_name, launches
from tuned.gru_cell.spec import DTYPES, GruCellSpec
from tuned.gru_cell.variant import GruCellVariant, default_variant, rejection

SPECS = list(gru_cell_specs())
IDS = [kernel_name(spec, GruCellVariant()) for spec in SPECS]
TILE = GruCellVariant(block_batch=2, block_hidden=64, num_warps=1)


@pytest.mark.parametrize("view", ["contiguous", "wide", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_every_gate_kernel_computes_what_the_oracle_does(spec: GruCellSpec, dtype: str, view: str) -> None:
    # Two ragged tiles each way: 3 rows of 2, 70 columns of 64.
    assert_right(GruCase(dataclasses.replace(spec, hidden=70, dtype=dtype), batch=3, view=view), TILE)


def test_every_emitted_gate_kernel_is_among_those_tested() -> None:
    assert set(IDS) == {name for name in structures() if name.startswith("gru_cell_")}


@pytest.mark.parametrize("hidden", [1, 3, 64, 65])
@pytest.mark.parametrize("batch", [1, 5])
def test_the_default_variant_serves_any_size(hidden: int, batch: int) -> None:
    spec = GruCellSpec("float32", hidden)
    assert_right(GruCase(spec, batch=batch), default_variant(spec))


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e30], ids=str)
def test_gates_far_out_saturate_and_never_give_nan(scale: float) -> None:
    out = assert_right(GruCase(GruCellSpec("float32", 70), batch=3, scale=scale), TILE)
    assert not bool(out.isnan().any())


# Every number, pairwise ---------------------------------------------------------------------------------------------


def spec_for(knobs: dict[str, Any]) -> GruCellSpec:
    """Two tiles of columns, the last of three."""
    return GruCellSpec("float32", knobs["block_hidden"] + 3)


NUMBERS = pairwise.covering(
    pairwise.product(
        choices(GruCellVariant), lambda knobs: rejection(spec_for(knobs), None, GruCellVariant(**knobs)) is None
    )
)


@pytest.mark.parametrize("knobs", NUMBERS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_every_choice_of_a_knob_computes_what_the_oracle_does(knobs: dict[str, Any]) -> None:
    assert_right(GruCase(spec_for(knobs), batch=knobs["block_batch"] + 1), GruCellVariant(**knobs))


def test_every_declared_choice_is_tested() -> None:
    for name, declared in choices(GruCellVariant).items():
        assert {knobs[name] for knobs in NUMBERS} == set(declared), name


# PyTorch's own cell -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_two_products_and_the_gates_are_a_gru_cell_of_pytorch(spec: GruCellSpec) -> None:
    torch.manual_seed(0)
    hidden, batch, inputs = 24, 5, 16
    cell = torch.nn.GRUCell(inputs, hidden, bias=spec.bias, dtype=torch.float64)
    x, h = torch.randn(batch, inputs, dtype=torch.float64), torch.randn(batch, hidden, dtype=torch.float64)
    with torch.no_grad():
        want = cell(x, h)
        gates = [x @ cell.weight_ih.T, h @ cell.weight_hh.T]
    tensors = [*gates, h, torch.full_like(h, torch.nan)] + ([cell.bias_ih, cell.bias_hh] if spec.bias else [])
    gates_x, gates_h, state, out, *bias = (t.detach().to(DEVICE, torch.float32) for t in tensors)
    call = GruCellCall(gates_x, gates_h, state, state if spec.inplace else out, batch, *bias)
    small = dataclasses.replace(spec, hidden=hidden, dtype="float32")
    run(launches(small, TILE, call))
    # Inputs were rounded to float32 on the way, by 2^-24 of values below 8: a few dozen such errors in a chain.
    assert_close(to_numpy(call.out), want.numpy(), np.full(want.shape, 64 * 2.0**-24))
