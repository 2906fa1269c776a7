"""A fused RMSNorm, a Triton kernel of one's own: python tune.py --family examples/own_kernel/rmsnorm.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import triton

from tuned import own

TEXT = ()  # the template reads no field: there is one kernel
MOST = 128  # elements a thread


@dataclasses.dataclass(frozen=True)
class Spec:  # what a caller asks for
    dtype: str
    columns: int
    eps: float


@dataclasses.dataclass(frozen=True)
class Size(own.Size):  # what varies from call to call
    rows: int


@dataclasses.dataclass(frozen=True)
class Variant(own.Variant):  # the ways to do it
    block_rows: int = own.one_of(1, 2, 4, 8, 16, 32, default=1)
    cache: str = own.one_of("keep", "stream", default="keep", older=True)  # "stream": x and out need not stay in the L2
    num_warps: int = own.one_of(1, 2, 4, 8, 16, 32, default=4)


@dataclasses.dataclass(frozen=True)
class Call:  # the tensors of a call
    x: torch.Tensor  # [rows, columns], last stride 1
    weight: torch.Tensor  # [columns], contiguous
    out: torch.Tensor  # contiguous, of any shape with as many rows of as many columns


def call(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> tuple[Spec, Size, Call]:
    """What ``rmsnorm(x, weight, eps)`` asks for, over the last dimension."""
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} {list(x.shape[-1:])}, got {weight.dtype} {list(weight.shape)}")
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    spec = Spec(str(x.dtype).removeprefix("torch."), x.shape[-1], eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return spec, Size(rows.shape[0]), Call(rows, weight.contiguous(), out)


def rejection(spec: Spec, _size: Size | None, variant: Variant, _capability: int) -> str | None:
    """Why a variant is not tried, or None."""
    elements = triton.next_power_of_2(spec.columns) * variant.block_rows / (32 * variant.num_warps)
    return None if 1 <= elements <= 128 else f"{elements:g} elements a thread: 1 to 128 are tried"  # noqa: PLR2004


def launches(spec: Spec, variant: Variant, call: Call) -> tuple[own.Launch, ...]:
    """One launch, a program for each block of rows."""
    rows, columns = call.x.shape[0], triton.next_power_of_2(spec.columns)
    arguments = (call.x, call.weight, call.out, rows, call.x.stride(0), spec.eps)
    constants = {"COLUMNS": spec.columns, "BLOCK_ROWS": variant.block_rows, "BLOCK_COLUMNS": columns}
    read, write = ("evict_first", ".cs") if variant.cache == "stream" else ("", "")
    constants |= {"READ": read, "WRITE": write}
    return (own.launch(triton.cdiv(rows, variant.block_rows), arguments, constants, num_warps=variant.num_warps),)


def inputs(spec: Spec, size: Size, device: str, seed: int) -> Call:
    """Random rows, weights about 1."""
    dtype = getattr(torch, spec.dtype)
    x, weight = (torch.empty(shape, dtype=dtype, device=device) for shape in ((size.rows, spec.columns), spec.columns))
    if device != "meta":
        generator = torch.Generator(device).manual_seed(seed)
        x.normal_(0, 2, generator=generator)
        weight.normal_(1, 0.1, generator=generator)
    return call(x, weight, spec.eps)[2]


def reference(spec: Spec, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the allowed error: one rounding to the type, and that of a float32 sum of squares."""
    wanted = torch.nn.functional.rms_norm(call.x.double(), (spec.columns,), call.weight.double(), spec.eps)
    wanted = wanted.view(call.out.shape)
    return wanted, own.rounding(spec.dtype, wanted) + wanted.abs() * 2.0**-19


def eager(spec: Spec, call: Call) -> Callable[[], torch.Tensor]:
    """PyTorch's operator, for calls that no kernel serves: on a CPU, and where a gradient is needed."""
    return lambda: torch.nn.functional.rms_norm(call.x, (spec.columns,), call.weight, spec.eps).view(call.out.shape)


def bytes_moved(spec: Spec, size: Size) -> int:
    """Each element is read once and written once, and the weight is read."""
    return (2 * size.rows + 1) * spec.columns * torch.finfo(getattr(torch, spec.dtype)).bits // 8


def problems() -> Iterator[own.Problem]:
    """Decode steps and prefills of models, and the norm of each head."""
    shapes = [(rows, columns) for rows in (1, 64, 4096) for columns in (2048, 4096, 8192)]
    for dtype, more in (
        ("bfloat16", [*shapes, (131_072, 128)]),
        ("float32", [(4096, 1152)]),
        ("float16", [(16_384, 5120)]),
    ):
        for rows, columns in more:
            spec = Spec(dtype, columns, 1e-6)
            yield own.Problem(f"rmsnorm_{dtype}_{rows}x{columns}", "rmsnorm", spec, Size(rows))


rmsnorm = own.family(__name__)
