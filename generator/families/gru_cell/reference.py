"""A step of the GRU as tuning checks and times it: inputs, the float64 reference, the baseline, bytes, work."""

from __future__ import annotations

from typing import Any

import torch

from tuned.families.gru_cell.launches import GruCellCall
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.launch import ceil_div
from tuned.families.products import ITEM_SIZE, joined

from ...problem import Problem
from ..amounts import SMALLEST, UNIT_ROUNDOFF, Work, product_error


def inputs(spec: GruCellSpec, size: GruCellSize, device: str, seed: int) -> GruCellCall:
    """One set of random inputs, weights as torch.nn.GRUCell draws them; out not filled."""
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor if generator is None else tensor.uniform_(-scale, scale, generator=generator)

    wide, scale = 3 * spec.hidden, spec.hidden**-0.5
    segments = tuple(drawn(size.batch, width, scale=1.7) for width in spec.inputs)  # of variance 1
    h = drawn(size.batch, spec.hidden)
    weights = drawn(wide, spec.input_size, scale=scale), drawn(wide, spec.hidden, scale=scale)
    biases = (drawn(wide, scale=scale), drawn(wide, scale=scale)) if spec.bias else ()
    return GruCellCall.of(segments, h, *weights, h if spec.inplace else h.new_empty(h.shape), *biases)


def reference(spec: GruCellSpec, call: GruCellCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that may be left, per element.

    The bound: half a unit in the last place of the result; 32 x 2^-24 of the terms, for the float32 operations of the
    gates; and the errors of the six sums. A sum has the error of ``product_error`` and one rounding to the dtype, since
    form "library" stores its products, as torch.nn.GRUCell does. These errors reach the result through slopes of at
    most 1/4 (sigmoid), 1 (tanh), |g_n| (of r) and |h - n| (of z).
    """
    x = torch.cat([segment.double() for segment in call.segments], -1)
    h, zero = call.h.double(), torch.zeros((), dtype=torch.float64, device=call.h.device)
    w_ih, w_hh = call.weight_ih.double(), call.weight_hh.double()
    b_ih, b_hh = (call.bias_ih.double(), call.bias_hh.double()) if spec.bias else (zero, zero)
    i, g = x @ w_ih.T, h @ w_hh.T
    rounding = UNIT_ROUNDOFF[spec.dtype]
    error_i = product_error(spec, x.abs() @ w_ih.abs().T) + rounding * i.abs()
    error_g = product_error(spec, h.abs() @ w_hh.abs().T) + rounding * g.abs()
    i_r, i_z, i_n = (i + b_ih).chunk(3, -1)
    g_r, g_z, g_n = (g + b_hh).chunk(3, -1)
    r, z = torch.sigmoid(i_r + g_r), torch.sigmoid(i_z + g_z)
    n = torch.tanh(i_n + r * g_n)
    out = n + z * (h - n)
    (error_ir, error_iz, error_in), (error_gr, error_gz, error_gn) = error_i.chunk(3, -1), error_g.chunk(3, -1)
    error_n = error_in + error_gn + 0.25 * (error_ir + error_gr) * g_n.abs()
    products = error_n + 0.25 * (error_iz + error_gz) * (h - n).abs()
    scale = 1 + h.abs() + i_n.abs() + g_n.abs()
    return out, products + out.abs() * rounding + SMALLEST[spec.dtype] + 32 * 2.0**-24 * scale


def eager(spec: GruCellSpec, call: GruCellCall) -> Any:
    """The baseline: torch's own cell."""
    others = (call.h, call.weight_ih, call.weight_hh, call.bias_ih, call.bias_hh)

    def cell() -> torch.Tensor:  # torch.gru_cell, not torch._VF's: that is what tuned.nn.patched replaces
        out = torch.gru_cell(joined(call.segments), *others)
        return call.h.copy_(out) if spec.inplace else out

    return cell


def bytes_moved(spec: GruCellSpec, size: GruCellSize) -> int:
    """Bytes that must move: weights, x and h read, h' written."""
    row = (spec.input_size + 2 * spec.hidden) * ITEM_SIZE[spec.dtype]
    return weight_bytes(spec) + size.batch * row


def weight_bytes(spec: GruCellSpec) -> int:
    """Bytes of the weights and biases, which are read once per call."""
    return 3 * spec.hidden * (spec.input_size + spec.hidden + (2 if spec.bias else 0)) * ITEM_SIZE[spec.dtype]


# The work of a variant: programs, bytes, sines, threads; and the tile of a program.


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The work of a step, as one launch; form "library", two products and a kernel of the gates, counts as one too."""
    spec, size = problem.spec, problem.size
    item, units, rows = ITEM_SIZE[spec.dtype], variant.block_hidden, variant.block_batch
    count = ceil_div(size.batch, rows) * ceil_div(spec.hidden, units)
    width = spec.input_size + spec.hidden
    library = variant.by_library
    # The library's tiles are not known. Its products write six rows of the hidden size in addition, and its gates read them.
    operands = (rows + 3 * units) * width * item if not library else 0
    gates = 12 * size.batch * spec.hidden * item if library else 0
    copied = 2 * (3 * spec.hidden + size.batch) * width * item if variant.pads else 0  # read and written first
    stages = 2 if variant.form in ("vector", "outer") else variant.num_stages
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=bytes_moved(spec, size) + gates + copied,
            again_bytes=max(0.0, count * operands - weight_bytes(spec) - size.batch * width * item),
            in_flight_bytes=min(operands, stages * (rows + 3 * units) * variant.block_k * item)
            or 8 * rows * units * item,
            elements=8 * count * rows * units,
            sines=0.5 * count * rows * units,  # an exponential and a division are about a quarter of a sine
            pairs_per_thread=max(1.0, 4 * rows * units / (32 * variant.num_warps)),
        ),
    )


def tile(_spec: GruCellSpec, variant: GruCellVariant) -> tuple[int, int]:
    """Rows of the batch, and units of each row, that a program takes at a time."""
    return variant.block_batch, variant.block_hidden
