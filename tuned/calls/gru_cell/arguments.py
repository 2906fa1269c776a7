"""Check the arguments of one GRU step. No tensor is written here."""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.overlap import check_strides
from tuned.calls.products import autocast_dtype
from tuned.calls.refusal import check_dense, refuses

NO_STATE = "pass torch.zeros(batch, hidden) for a state that is none"


def _check_cell(  # noqa: PLR0913 - the arguments of the public call
    x: Any,
    h: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias_ih: Any,
    bias_hh: Any,
) -> None:
    """Check that the tensors of a step fit each other.

    Raises:
        TypeError: an argument is not a tensor, or dtypes differ.
        ValueError: a shape or device does not fit.
    """
    if (bias_ih is None) != (bias_hh is None):
        alone = "bias_ih" if bias_hh is None else "bias_hh"
        raise ValueError(f"give both bias_ih and bias_hh, or neither, got {alone} alone: pass zeros for the other")
    named = {"x": x, "h": h, "weight_ih": weight_ih, "weight_hh": weight_hh}
    if bias_ih is not None:
        named |= {"bias_ih": bias_ih, "bias_hh": bias_hh}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            hint = {"x": "segments are a tuple of tensors", "h": NO_STATE}.get(
                name, "the order is x, h, weight_ih, weight_hh, bias_ih, bias_hh, as in cell.parameters()"
            )
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}: {hint}")
    check_dense(named)
    if x.ndim != 2 or h.ndim != 2:  # noqa: PLR2004
        raise ValueError(
            f"x must be [batch, input_size] and h [batch, hidden], got {list(x.shape)} and {list(h.shape)}: without a batch pass x[None] "
            "and h[None], and for whole sequences call gru"
        )
    batch, hidden = h.shape
    wanted = {
        "x": (batch, x.shape[1]),
        "weight_ih": (3 * hidden, x.shape[1]),
        "weight_hh": (3 * hidden, hidden),
        "bias_ih": (3 * hidden,),
        "bias_hh": (3 * hidden,),
    }
    for name, tensor in named.items():
        if name in wanted and tuple(tensor.shape) != wanted[name]:
            _check_beside_weights(x, h, weight_ih, weight_hh)
            raise ValueError(
                f"{name} must be {list(wanted[name])} for h of {list(h.shape)}, got {list(tensor.shape)}: {_shape_hint(name)}"
            )
        if tensor.dtype != h.dtype or not tensor.dtype.is_floating_point:
            raise TypeError(
                f"all tensors must have the floating point dtype of h, {h.dtype}; {name} is {tensor.dtype}: convert one with .to(), or "
                "use torch.autocast"
            )
        if tensor.element_size() < 2:  # noqa: PLR2004 - PyTorch has no arithmetic in 8 bits
            raise TypeError(
                f"{name} must be floating point of at least 16 bits, got {tensor.dtype}: convert all with .to(torch.bfloat16)"
            )
        if tensor.device != h.device:
            raise ValueError(
                f"all tensors must be on the device of h, {h.device}; {name} is on {tensor.device}: move it with .to()"
            )


def _check_beside_weights(x: torch.Tensor, h: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor) -> None:
    """Raise ValueError for x or h where the weights fit each other, and not these."""
    gates, hidden = weight_hh.shape if weight_hh.ndim == 2 else (0, 0)  # noqa: PLR2004
    if weight_ih.ndim != 2 or gates != 3 * hidden or weight_ih.shape[0] != gates or not gates:  # noqa: PLR2004
        return
    if h.shape[1] != hidden:
        raise ValueError(
            f"h must be [batch, {hidden}] for weight_hh of {list(weight_hh.shape)}, got {list(h.shape)}: give the state of these weights"
        )
    if x.shape[1] != weight_ih.shape[1]:
        raise ValueError(
            f"x must be [batch, {weight_ih.shape[1]}] for weight_ih of {list(weight_ih.shape)}, got {list(x.shape)}: give the features "
            "that the weights take; several segments as a tuple count together"
        )


def _shape_hint(name: str) -> str:
    if name == "x":
        return "x and h are of one batch"
    return "weights are those of torch.nn.GRUCell, gates r, z, n in the first axis"


@refuses
def reset_rows(h: Any, resets: Any) -> torch.Tensor:
    """Marks of the rows of a state [batch, hidden] that are reset, [batch, 1].

    Raises:
        TypeError, ValueError: resets do not mark the rows of h.
    """
    check_dense({"h": h, "resets": resets})
    for name, tensor, axes in (("h", h, 2), ("resets", resets, 1)):
        if not isinstance(tensor, torch.Tensor):
            hint = NO_STATE if name == "h" else "convert it with torch.as_tensor(...)"
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}: {hint}")
        if tensor.ndim != axes:
            of = "[batch, hidden]" if name == "h" else "[batch], one mark for each row of h"
            raise ValueError(f"{name} must have {axes} axes, got {list(tensor.shape)}: give {of}")
    if resets.dtype != torch.bool:
        raise TypeError(f"resets must be a bool tensor, got {resets.dtype}: convert with .bool()")
    if resets.shape[0] != h.shape[0] or resets.device != h.device:
        raise ValueError(
            f"resets must have a mark for each of {h.shape[0]} rows of h, on {h.device}, got {list(resets.shape)} on {resets.device}: expand it, or move it with .to()"
        )
    return resets[:, None]


@refuses
def checked_cell(  # noqa: PLR0913 - the arguments of the public call
    x: Any,
    h: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias_ih: Any,
    bias_hh: Any,
    inplace: bool,  # noqa: FBT001
) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Check the arguments of tuned.dispatch.gru_cell; returns (segments of x, the other tensors).

    Raises:
        TypeError: an argument is not a tensor, or dtypes differ.
        ValueError: a shape or device does not fit.
    """
    segments = x if isinstance(x, tuple) else (x,)
    if len(segments) != 1:
        check_dense({f"x[{index}]": t for index, t in enumerate(segments)})
        for index, t in enumerate(segments):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"x[{index}] must be a tensor, got {type(t).__name__}: every segment is one")
            if t.ndim != 2 or t.shape[0] != segments[0].shape[0]:  # noqa: PLR2004
                raise ValueError(
                    f"every segment of x must be [batch, k] with one batch, got {[list(s.shape) for s in segments]}: expand what the "
                    "batch shares"
                )
            casts = autocast_dtype(t.device.type) is not None
            if t.device != segments[0].device or (t.dtype != segments[0].dtype and not casts):
                raise TypeError(
                    f"all segments of x must have one dtype and device; x[{index}] is {t.dtype} on {t.device}, "
                    f"x[0] {segments[0].dtype} on {segments[0].device}: convert one with .to()"
                )
        if not segments:
            raise ValueError(
                "x must have at least one segment, got an empty tuple: pass a tensor, or a tuple of tensors"
            )
    given = (h, weight_ih, weight_hh, bias_ih, bias_hh)
    # Only the shape, dtype and device of ``whole`` are checked, so the segments are not copied into it.
    whole = (
        segments[0]
        if len(segments) == 1
        else segments[0].new_empty((len(segments[0]), sum(t.shape[1] for t in segments)))
    )
    together: tuple[Any, ...] = (whole, *given)
    dtype = autocast_dtype(h.device.type) if isinstance(h, torch.Tensor) else None
    if dtype is not None:  # dtypes may differ, since all floating point ones will be cast
        together = tuple(
            t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t for t in together
        )
    _check_cell(*together)
    if inplace:  # of h as it is given, before any cast
        check_strides("h", h)
    return segments, given
