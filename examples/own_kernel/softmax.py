"""A row softmax, a Triton kernel of one's own: python tune.py --family examples/own_kernel/softmax.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import triton

from tuned import own

TEXT = ("strategy",)  # the fields that the template reads: a kernel for each value


@dataclasses.dataclass(frozen=True)
class Spec:  # what a caller asks for
    dtype: str
    columns: int


@dataclasses.dataclass(frozen=True)
class Size(own.Size):  # what varies from call to call
    rows: int


@dataclasses.dataclass(frozen=True)
class Variant(own.Variant):  # the ways to do it
    strategy: str = own.one_of("whole", "split", default="split")  # a row in one program; or in several, in 2 launches
    block_rows: int = own.one_of(1, 2, 4, 8, 16, 32, default=1)  # for "whole"
    block_columns: int = own.one_of(1024, 2048, 4096, 8192, default=1024)  # for "split"
    num_warps: int = own.one_of(1, 2, 4, 8, 16, 32, default=4)


@dataclasses.dataclass(frozen=True)
class Call:  # the tensors of a call
    x: torch.Tensor  # [rows, columns], last stride 1
    out: torch.Tensor  # contiguous, of any shape with as many rows of as many columns
    parts: torch.Tensor  # float32 [rows, parts of a row, 2]
    SCRATCH = ("parts",)  # written by a launch for the next


def call(x: torch.Tensor) -> tuple[Spec, Size, Call]:
    """What ``softmax(x)`` asks for, over the last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    spec = Spec(str(x.dtype).removeprefix("torch."), x.shape[-1])
    parts = torch.empty((rows.shape[0], triton.cdiv(spec.columns, 1024), 2), device=x.device)
    return spec, Size(rows.shape[0]), Call(rows, torch.empty(x.shape, dtype=x.dtype, device=x.device), parts)


def block_columns(spec: Spec, variant: Variant) -> int:
    """Columns that a program takes at a time."""
    return triton.next_power_of_2(spec.columns) if variant.strategy == "whole" else variant.block_columns


def rejection(spec: Spec, _size: Size | None, variant: Variant, _capability: int) -> str | None:
    """Why a variant is not tried, or None."""
    if variant.block_columns > 1024 if variant.strategy == "whole" else variant.block_rows > 1:  # noqa: PLR2004
        return f"strategy={variant.strategy!r} does not use that block: only its default is tried"
    elements = block_columns(spec, variant) * variant.block_rows / (32 * variant.num_warps)
    return None if 1 <= elements <= 128 else f"{elements:g} elements a thread: 1 to 128 are tried"  # noqa: PLR2004


def launches(spec: Spec, variant: Variant, call: Call) -> tuple[own.Launch, ...]:
    """One launch, with a program for each block of rows; or two launches, with a program for each part of a row."""
    rows, columns = call.x.shape[0], block_columns(spec, variant)
    parts = triton.cdiv(spec.columns, columns)
    grid, arguments = triton.cdiv(rows, variant.block_rows) * parts, (*vars(call).values(), rows, call.x.stride(0))
    known = {"COLUMNS": spec.columns, "BLOCK_ROWS": variant.block_rows, "BLOCK_COLUMNS": columns, "PARTS": parts}
    turns = (0,) if variant.strategy == "whole" else (0, triton.next_power_of_2(parts))
    return tuple(own.launch(grid, arguments, {**known, "COMBINE": n}, num_warps=variant.num_warps) for n in turns)


def inputs(spec: Spec, size: Size, device: str, seed: int) -> Call:
    """Random rows."""
    x = torch.empty((size.rows, spec.columns), dtype=getattr(torch, spec.dtype), device=device)
    return call(x if device == "meta" else x.normal_(0, 2, generator=torch.Generator(device).manual_seed(seed)))[2]


def reference(spec: Spec, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the allowed error: one rounding to the type, and that of float32 exponentials and sums."""
    wanted = torch.softmax(call.x.double(), -1).view(call.out.shape)
    return wanted, own.rounding(spec.dtype, wanted) + wanted * 2.0**-18


def eager(_spec: Spec, call: Call) -> Callable[[], torch.Tensor]:
    """PyTorch's operator, for calls that no kernel serves: on a CPU, and where a gradient is needed."""
    return lambda: torch.softmax(call.x, -1).view(call.out.shape)


def bytes_moved(spec: Spec, size: Size) -> int:
    """Each element is read once and written once."""
    return 2 * size.rows * spec.columns * torch.finfo(getattr(torch, spec.dtype)).bits // 8


def problems() -> Iterator[own.Problem]:
    """Attention scores, and logits of a vocabulary: many rows in bfloat16, few in float32."""
    for dtype, elements in (("bfloat16", 2**26), ("float32", 2**20)):
        for columns in (128, 1000, 4096, 16_384, 50_257, 128_256):
            spec, rows = Spec(dtype, columns), elements // columns
            yield own.Problem(f"softmax_{dtype}_{rows}x{columns}", "softmax", spec, Size(rows))


softmax = own.family(__name__)
