"""What tuning needs to know of the linear over segments besides its kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from generator.families.gru_cell import product_error
from generator.families.rope import SMALLEST, UNIT_ROUNDOFF
from generator.problem import Problem
from tuned.families.linear_cat.launches import LinearCatCall, call_of
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant

if TYPE_CHECKING:
    from collections.abc import Iterator


def inputs(spec: LinearCatSpec, size: LinearCatSize, device: str, seed: int) -> LinearCatCall:
    """One set of random inputs, the weight as torch.nn.Linear draws it; out not filled."""
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int, scale: float) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor if generator is None else tensor.uniform_(-scale, scale, generator=generator)

    scale = spec.input_size**-0.5
    segments = tuple(drawn(size.batch, width, scale=1.7) for width in spec.inputs)  # of variance 1
    weight = drawn(spec.outputs, spec.input_size, scale=scale)
    out = torch.empty((size.batch, spec.outputs), dtype=dtype, device=device)
    return call_of(segments, weight, out, *((drawn(spec.outputs, scale=scale),) if spec.bias else ()))


def reference(spec: LinearCatSpec, call: LinearCatCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that may be left: half a unit in the last place, and the sums'."""
    x = torch.cat([segment.double() for segment in call.segments], -1)
    weight = call.weight.double()
    out, sizes = x @ weight.T, x.abs() @ weight.abs().T
    if spec.bias:
        out, sizes = out + call.bias.double(), sizes + call.bias.double().abs()
    error = product_error(spec, sizes)
    return out, error + out.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype]


def eager(spec: LinearCatSpec, call: LinearCatCall) -> Any:
    """The baseline: the segments put together, then torch's linear."""
    del spec
    return lambda: torch.nn.functional.linear(torch.cat(call.segments, -1), call.weight, call.bias)


def bytes_moved(spec: LinearCatSpec, size: LinearCatSize) -> int:
    """Bytes that must move: the weight and the inputs read, the result written."""
    return spec.weight_bytes() + size.batch * spec.bytes_per_row()


def tensor_bytes(spec: LinearCatSpec, size: LinearCatSize) -> int:
    """Bytes of one set of inputs and outputs, weights too: so that in turn each set's are cold."""
    return bytes_moved(spec, size)


def features(variant: LinearCatVariant) -> tuple[int, ...]:
    """What a model of the time should see beside the knobs, in octaves: elements of a tile, and of a warp."""
    elements = variant.block_rows * variant.block_columns
    return round(math.log2(elements)), round(math.log2(elements / variant.num_warps))


def tile(spec: LinearCatSpec, variant: LinearCatVariant) -> tuple[int, int]:
    """Rows, and columns of each, that a program takes at a time."""
    del spec
    return variant.block_rows, variant.block_columns


def problems() -> Iterator[Problem]:
    """The default problems: a seq2seq decoder's output layer, over hidden state, context and embedding; a GRU's projection.

    The latter is float32 where torch's settings allow a GRU TF32 and GEMMs not, as they do by default.
    """
    spec = LinearCatSpec("bfloat16", (512, 512, 256), 10_000)
    for rows in (1, 128):
        yield Problem(f"linear_cat_decoder_{rows}", "linear_cat", spec, LinearCatSize(rows))
    projection = LinearCatSpec("float32", (512,), 1536, bias=False, precision="tf32")
    yield Problem("gru_projection_tf32_8192", "linear_cat", projection, LinearCatSize(8192))
