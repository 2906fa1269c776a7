"""What tuning needs to know of the GRU cell besides its kernel: inputs, the float64 reference, baselines, problems."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from generator.families.rope import SMALLEST, UNIT_ROUNDOFF
from generator.problem import Problem
from tuned.gru_cell.eager import gates
from tuned.gru_cell.launches import GruCellCall
from tuned.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.gru_cell.variant import GruCellVariant

if TYPE_CHECKING:
    from collections.abc import Iterator


def inputs(spec: GruCellSpec, size: GruCellSize, device: str, seed: int) -> GruCellCall:
    """One set of random gates and hidden states; out not filled."""
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor if generator is None else tensor.normal_(generator=generator)

    h = normal(size.batch, spec.hidden)
    return GruCellCall(
        gates_x=normal(size.batch, 3 * spec.hidden),
        gates_h=normal(size.batch, 3 * spec.hidden),
        h=h,
        out=h if spec.inplace else torch.empty_like(h),
        batch=size.batch,
        bias_ih=normal(3 * spec.hidden) if spec.bias else None,
        bias_hh=normal(3 * spec.hidden) if spec.bias else None,
    )


def reference(spec: GruCellSpec, call: GruCellCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that one rounding and float32 arithmetic may leave, per element.

    The bound: half a unit in the last place of the result, and 32 x 2^-24 of 1 + |h| + |i_n| + |h_n|, for a handful of
    float32 operations and exponentials (2 units in the last place each) in a chain whose slopes are at most 1.
    """
    x, h_gates, h = call.gates_x.double(), call.gates_h.double(), call.h.double()
    if spec.bias:
        x, h_gates = x + call.bias_ih.double(), h_gates + call.bias_hh.double()
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = h_gates.chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    out = n + z * (h - n)
    scale = 1 + h.abs() + x_n.abs() + h_n.abs()
    return out, out.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype] + 32 * 2.0**-24 * scale


def eager(spec: GruCellSpec, call: GruCellCall) -> Any:
    """The eager PyTorch baseline of the same gates."""
    return lambda: gates(spec, call)


def bytes_moved(spec: GruCellSpec, size: GruCellSize) -> int:
    """Bytes that must move: three gates twice and h read, h' written."""
    return size.batch * spec.bytes_per_row()


def tensor_bytes(spec: GruCellSpec, size: GruCellSize) -> int:
    """Bytes of one set of inputs and outputs."""
    return size.batch * spec.bytes_per_row()


def features(variant: GruCellVariant) -> tuple[int, ...]:
    """What a model of the time should see beside the knobs, in octaves: elements of a tile, and elements a warp."""
    elements = variant.block_batch * variant.block_hidden
    return round(math.log2(elements)), round(math.log2(elements / variant.num_warps))


def problems() -> Iterator[Problem]:
    """The default problems: a seq2seq decoder's step and one large batch."""
    for hidden, batch in ((512, 64), (1024, 64), (512, 1024)):
        yield Problem(f"gru_cell_{hidden}_{batch}", "gru_cell", GruCellSpec("bfloat16", hidden), GruCellSize(batch))
    yield Problem("gru_cell_1024_inplace_64", "gru_cell", GruCellSpec("bfloat16", 1024, inplace=True), GruCellSize(64))
