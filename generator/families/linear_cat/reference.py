"""The linear over segments as tuning checks and times it: inputs, the float64 reference, the baseline, bytes."""

from __future__ import annotations

from typing import Any

import torch

from tuned.families.linear_cat.launches import LinearCatCall
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.products import ITEM_SIZE

from ..rounding import SMALLEST, UNIT_ROUNDOFF, product_error


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
    return LinearCatCall.of(segments, weight, out, *((drawn(spec.outputs, scale=scale),) if spec.bias else ()))


def reference(spec: LinearCatSpec, call: LinearCatCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that may be left: half a unit in the last place, and the sums'."""
    x = torch.cat([segment.double() for segment in call.segments], -1)
    weight = call.weight.double()
    out, sizes = x @ weight.T, x.abs() @ weight.abs().T
    if spec.bias:
        out, sizes = out + call.bias.double(), sizes + call.bias.double().abs()
    return out, product_error(spec, sizes) + out.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype]


def eager(_spec: LinearCatSpec, call: LinearCatCall) -> Any:
    """The baseline: the segments put together, then torch's linear."""
    return lambda: torch.nn.functional.linear(torch.cat(call.segments, -1), call.weight, call.bias)


def bytes_moved(spec: LinearCatSpec, size: LinearCatSize) -> int:
    """Bytes that must move: the weight and the inputs read, the result written."""
    weight = spec.outputs * (spec.input_size + int(spec.bias))
    return (weight + size.batch * (spec.input_size + spec.outputs)) * ITEM_SIZE[spec.dtype]
