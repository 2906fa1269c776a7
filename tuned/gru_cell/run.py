"""Run one GRU step: the library's GEMMs, then the kernel that the tables name for the gates."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from tuned import misses
from tuned.family import FAMILIES
from tuned.gpu import gpu_of, why_eager
from tuned.gru_cell.eager import gates
from tuned.gru_cell.launches import GruCellCall
from tuned.gru_cell.spec import DTYPES, GruCellSize, GruCellSpec
from tuned.launcher import kernel, launch_public
from tuned.lookup import Choice, Gpu, choose

if TYPE_CHECKING:
    from tuned.launch import Launch

GRU_CELL = FAMILIES["gru_cell"]
MAX_CHOICES = 4096  # batch sizes remembered


def cell_spec(h: torch.Tensor, bias: Any, inplace: bool) -> tuple[GruCellSpec, GruCellSize]:  # noqa: FBT001
    """Spec and size of a step."""
    dtype = str(h.dtype).removeprefix("torch.")
    spec = GruCellSpec(dtype if dtype in DTYPES else "float32", max(h.shape[1], 1), bias is not None, inplace)
    return spec, GruCellSize(max(h.shape[0], 1))


def _why_eager(h: torch.Tensor) -> str | None:
    return why_eager(h, str(h.dtype).removeprefix("torch.") in DTYPES)


def choice_of_cell(spec: GruCellSpec, size: GruCellSize, h: torch.Tensor) -> Choice:
    """Which variant a step gets, or why it runs in eager PyTorch."""
    reason = _why_eager(h)
    return Choice("eager", reason, None) if reason else choose(GRU_CELL, spec, size, gpu_of(h.device))


@functools.lru_cache(maxsize=MAX_CHOICES)
def _variant_of(spec: GruCellSpec, size: GruCellSize, gpu: Gpu) -> Any:
    """Decided once for all steps that are alike."""
    choice = choose(GRU_CELL, spec, size, gpu)
    misses.note(GRU_CELL, spec, size, choice)
    return choice.variant


def cell_call(  # noqa: PLR0913
    x: torch.Tensor,
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None,
    bias_hh: torch.Tensor | None,
    inplace: bool,  # noqa: FBT001
) -> tuple[GruCellSpec, GruCellSize, GruCellCall]:
    """The products, and the call of the gate kernel on them."""
    spec, size = cell_spec(h, bias_ih, inplace)
    call = GruCellCall(
        gates_x=torch.nn.functional.linear(x, weight_ih),
        gates_h=torch.nn.functional.linear(h, weight_hh),
        h=h,
        out=h if inplace else torch.empty_like(h),
        batch=h.shape[0],
        bias_ih=None if bias_ih is None else bias_ih.contiguous(),
        bias_hh=None if bias_hh is None else bias_hh.contiguous(),
    )
    return spec, size, call


def run_cell(spec: GruCellSpec, size: GruCellSize, call: GruCellCall) -> torch.Tensor:
    """The gates; returns the output tensor."""
    if call.h.numel() == 0:
        return call.out  # type: ignore[no-any-return]
    if _why_eager(call.h) is not None:
        out = gates(spec, call)
        return call.h.copy_(out) if spec.inplace else out  # type: ignore[no-any-return]
    with torch.cuda.device(call.h.device):
        variant = _variant_of(spec, size, gpu_of(call.h.device))
        parts: tuple[Launch, ...] = GRU_CELL.launches(spec, variant, call)
        for part in parts:
            launch_public(kernel(part.kernel), part)
    return call.out  # type: ignore[no-any-return]
