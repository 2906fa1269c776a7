"""The tensors of one GRU step as the kernels take them, and which variant serves them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from tuned.families.gru_cell import FAMILY as GRU_CELL
from tuned.families.gru_cell.launches import GruCellCall, call_of
from tuned.families.gru_cell.spec import DTYPES, MAX_SEGMENTS, GruCellSize, GruCellSpec
from tuned.lookup import misses
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice, Gpu, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ELEMENTS = 2**31  # of a weight: the kernels compute offsets in it in 32 bits
MAX_CHOICES = 4096  # (spec, size, GPU) triples whose variant is remembered


def precision_of(dtype: torch.dtype) -> str:
    """The precision of float32 products now, "tf32" or "ieee": torch's setting for GEMMs on a GPU. "" for other dtypes."""
    if dtype != torch.float32:
        return ""
    # allow_tf32 raises after a program has used the newer setting; fp32_precision follows both.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def rows_of(t: torch.Tensor) -> torch.Tensor:
    """A 2D tensor with last stride 1: itself, or a copy."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def weight_of(t: torch.Tensor) -> torch.Tensor:
    """A weight with last stride 1 and offsets that fit in 32 bits: itself, or a copy."""
    return rows_of(t) if t.stride(0) * t.shape[0] < MAX_ELEMENTS else t.contiguous()


def used(segments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The segments that are not empty; concatenated if there are more than the kernels take."""
    wide = tuple(t for t in segments if t.shape[-1])
    return wide if len(wide) <= MAX_SEGMENTS else (torch.cat(wide, -1),)


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


@functools.lru_cache(maxsize=MAX_CHOICES)
def variant_of(spec: GruCellSpec, size: GruCellSize, gpu: Gpu) -> Any:
    """The variant, chosen once for all equal steps."""
    choice = choose(GRU_CELL, spec, size, gpu)
    misses.note(GRU_CELL, spec, size, choice)
    return choice.variant


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
    return call_of(x, state, weight_of(weight_ih), weight_of(weight_hh), out, *biases)
