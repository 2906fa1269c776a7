"""The tensors of one GRU step as the kernels take them, and which variant serves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tuned.calls.products import MAX_ELEMENTS, precision_of, rows_of, used, weight_of
from tuned.families.gru_cell import FAMILY as GRU_CELL
from tuned.families.gru_cell.launches import GruCellCall
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.products import DTYPES
from tuned.lookup import misses
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice, choose


def spec_of(
    widths: tuple[int, ...],
    h: torch.Tensor,
    bias: Any,
    inplace: bool,  # noqa: FBT001
) -> tuple[GruCellSpec, GruCellSize]:
    """Spec and size of a step over segments of these widths."""
    dtype = str(h.dtype).removeprefix("torch.")
    spec = GruCellSpec(dtype, h.shape[1], widths, bias is not None, inplace, precision_of(h.dtype))
    return spec, GruCellSize(h.shape[0])


variant_of = misses.variants(GRU_CELL)


def why_not(segments: Sequence[torch.Tensor], h: torch.Tensor) -> str | None:
    """Why no kernel serves a checked step, or None."""
    reason = why_eager(h, str(h.dtype).removeprefix("torch.") in DTYPES)
    if reason is None and (h.numel() == 0 or not used(segments)):
        return "there is nothing to compute: an axis is empty"
    if reason is None and 3 * h.shape[1] * max(h.shape[1], sum(t.shape[1] for t in segments)) >= MAX_ELEMENTS:
        return f"the kernels take weights of less than {MAX_ELEMENTS} elements"
    return reason


def choice_of(
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    bias: Any,
    inplace: bool,  # noqa: FBT001
) -> tuple[Choice, GruCellSpec | None]:
    """Which variant a checked step gets, or why it runs in eager PyTorch, and its spec; nothing runs."""
    if (reason := why_not(segments, h)) is not None:
        return Choice("eager", reason, None), None
    widths = tuple(t.shape[1] for t in used(segments))
    spec, size = spec_of(widths, h, bias, inplace)
    return choose(GRU_CELL, spec, size, gpu_of(h.device)), spec


def prepared(  # noqa: PLR0913 - the tensors of the public call
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None,
    bias_hh: torch.Tensor | None,
    inplace: bool,  # noqa: FBT001
) -> GruCellCall:
    """The arguments of the kernels: tensors with contiguous rows, copied if needed, and an output that is not filled."""
    biases = () if bias_ih is None or bias_hh is None else (bias_ih.contiguous(), bias_hh.contiguous())
    state = h if inplace else rows_of(h)  # in place, the library's form takes any strides
    out = h if inplace else torch.empty_like(h, memory_format=torch.contiguous_format)
    x = tuple(map(rows_of, used(segments)))
    return GruCellCall.of(x, state, weight_of(weight_ih), weight_of(weight_hh), out, *biases)
