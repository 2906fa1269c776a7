"""tanh in the GRU's kernels, tested by a step that returns it alone: as exact for small values as for large ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from generator.measuring.mended import mended_interpreter
from tests.support.gru_case import GruCase, build
from tests.support.gru_cell_forms import FORMS, LIBRARY
from tests.support.run import INTERPRETED, run
from tuned.families.gru_cell.launches import fused_launch, gates_launch
from tuned.families.gru_cell.spec import GruCellSpec

pytestmark = [pytest.mark.interpreter, pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has it on a GPU")]

HIDDEN = 16
SPEC = GruCellSpec("float32", HIDDEN, (HIDDEN,), bias=True, precision="ieee")
UNIT = 2.0**-24  # half the distance of neighbours in float32
MOST = 5 * UNIT  # where it is computed from an exponential; PyTorch's tanh has 1.5


def values() -> torch.Tensor:
    """Values of all sizes, near the switch from one method to the other, infinite, and zero."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.rand(4096 - 64, generator=draw) * 45 - 43  # powers of e, down to the smallest of float32
    near = torch.linspace(0.49, 0.51, 48)
    odd = torch.tensor([0.0, -0.0, 1e-45, 0.5, 20.0, 90.0, 1e30, torch.inf])
    x = torch.cat((sizes.exp(), near, odd, odd))
    return (x * torch.where(torch.arange(len(x)) % 2 == 0, 1, -1)).view(-1, HIDDEN)


def alone(x: torch.Tensor) -> Any:
    """A step from a state of 0 whose n is tanh of x, and whose z is 0."""
    call, _ = build(GruCase(SPEC, len(x)))
    rows = torch.zeros(3 * HIDDEN, HIDDEN)
    bias = torch.zeros(3 * HIDDEN)
    bias[HIDDEN : 2 * HIDDEN] = -100
    rows[2 * HIDDEN :] = torch.eye(HIDDEN)
    return dataclasses.replace(
        call, x0=x, h=torch.zeros_like(x), weight_ih=rows, weight_hh=torch.zeros_like(rows), bias_ih=bias, bias_hh=bias * 0
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_tanh_is_as_good_of_what_is_small(form: str) -> None:
    x = values()
    call = alone(x.clamp(-1e30, 1e30))  # infinity times 0 would be NaN
    if FORMS[form].by_library:
        gates = torch.zeros(len(x), 3 * HIDDEN)
        gates[:, 2 * HIDDEN :] = x
        launch = gates_launch(SPEC, LIBRARY, call, (gates, torch.zeros_like(gates)))
    else:
        launch = fused_launch(SPEC, FORMS[form], call)
    with mended_interpreter():
        run([launch])
    wanted = x.double().tanh()
    error = (call.out.double() - wanted).abs()
    assert bool((error <= MOST * wanted.abs()).all()), float((error / wanted.abs()).nan_to_num().max() / UNIT)
    assert torch.equal(call.out.sign(), x.sign())
