"""Check the arguments of a linear over segments. No tensor is written here."""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.products import autocast_dtype


def check_linear_cat(inputs: Any, weight: Any, bias: Any) -> None:
    """Check that segments ``[..., k_i]``, weight ``[n, sum of k_i]`` and bias ``[n]`` fit each other.

    Raises:
        TypeError: inputs is not a tuple or list of tensors, or dtypes differ.
        ValueError: a shape or device does not fit.
    """
    if not isinstance(inputs, (tuple, list)) or not inputs:
        one = (
            "pass (x,), or call torch.nn.functional.linear"
            if isinstance(inputs, torch.Tensor)
            else "pass the segments, as (a, b)"
        )
        what = f"an empty {type(inputs).__name__}" if isinstance(inputs, (tuple, list)) else type(inputs).__name__
        raise TypeError(f"inputs must be a tuple of at least one tensor, got {what}: {one}")
    named = [(f"inputs[{index}]", t) for index, t in enumerate(inputs)]
    named += [("weight", weight)] + ([] if bias is None else [("bias", bias)])
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(tensor).__name__}: the order is (inputs, weight, bias)"
            )
        if tensor.is_nested and tensor.layout is torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor, got a nested one, which has no sizes: make it with layout=torch.jagged, or pass "
                ".to_padded_tensor(0)"
            )
    first = inputs[0]
    casts = autocast_dtype(first.device.type) is not None
    for name, tensor in named:
        if tensor.device != first.device:
            raise ValueError(
                f"all tensors must be on the device of inputs[0], {first.device}; {name}: {tensor.device}: move it with .to()"
            )
        if not tensor.dtype.is_floating_point or (tensor.dtype != first.dtype and not casts):
            raise TypeError(
                f"all tensors must have the floating point dtype of inputs[0], {first.dtype}; {name} is {tensor.dtype}: convert one with "
                ".to(), or use torch.autocast"
            )
    for name, tensor in named[: len(inputs)]:
        if tensor.ndim < 1 or tensor.shape[:-1] != first.shape[:-1]:
            raise ValueError(
                f"all inputs must be {[*first.shape[:-1], 'k']}, equal except in the last axis; {name} is {list(tensor.shape)}: "
                "expand what the others share"
            )
    features = sum(t.shape[-1] for t in inputs)
    if weight.ndim != 2 or weight.shape[1] != features:  # noqa: PLR2004
        turned = weight.ndim == 2 and weight.shape[0] == features  # noqa: PLR2004
        raise ValueError(
            f"weight must be [n, {features}], the segments' features together, got {list(weight.shape)}: "
            + ("pass weight.t()" if turned else f"it takes all of {[t.shape[-1] for t in inputs]} in one axis")
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be [{weight.shape[0]}], got {list(bias.shape)}: one entry for each row of weight, or None"
        )
