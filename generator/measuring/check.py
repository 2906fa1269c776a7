"""Check a result against the float64 reference, on the very inputs that will be timed."""

from __future__ import annotations

from typing import Any

import torch

from .guard import intact


class WrongResultError(Exception):
    """A variant's result is wrong; the message says how."""


def worst_error(out: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> float:
    """Largest error as a multiple of its bound: at most 1 is right, NaN or an unwritten element is infinite."""
    error = (out.double() - wanted).abs()
    # Features that are only copied have no bound at all: any difference is infinite.
    ratio = torch.where(error == 0, 0.0, error / bound)
    return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if ratio.numel() else 0.0


def check(out: Any, wanted: torch.Tensor, bound: torch.Tensor, inputs: dict[str, tuple[Any, Any]]) -> float:
    """The worst error over its bound, once everything else about the result is right too.

    Args:
        out: the guarded output, poisoned with NaN before the run.
        wanted: the float64 reference.
        bound: the largest error allowed, per element.
        inputs: name -> (tensor after the run, clone from before it), for what must not change.

    Raises:
        WrongResultError: an error past its bound, a write past an end of the output, a changed input.
    """
    worst = worst_error(out, wanted, bound)
    if not worst <= 1:
        raise WrongResultError(f"the worst error is {worst:.3g} times what rounding allows")
    if not bool(intact(out)):
        raise WrongResultError("it wrote past an end of its output")
    for name, (after, before) in inputs.items():
        if not torch.equal(after, before):
            raise WrongResultError(f"it changed its input {name}")
    return worst
