"""Check a result against the float64 reference, on the inputs that will be timed; canaries show a write past an end."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from tuned.launching.launcher import as_integers


class WrongResultError(Exception):
    """A variant's result is wrong; the message says how."""


def worst_error(out: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> float:
    """Largest error as a multiple of its bound: at most 1 is right; a NaN or an unwritten element gives infinity."""
    error = (out.double() - wanted).abs()
    # Features that are only copied have the bound 0: any difference gives infinity.
    ratio = torch.where(error == 0, 0.0, error / bound)
    return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if ratio.numel() else 0.0


def check(
    out: Any,
    wanted: torch.Tensor,
    bound: torch.Tensor,
    inputs: dict[str, tuple[Any, Any]],
    known: float | None = None,
) -> float:
    """The worst error over its bound, if everything else about the result is right too.

    Args:
        out: the guarded output; out of place, poisoned with NaN before the run.
        wanted: the float64 reference.
        bound: the largest error allowed, per element.
        inputs: name -> (tensor after the run, clone from before it), for tensors that must not change.
        known: the worst error, if the same bits were compared with the reference before.

    Raises:
        WrongResultError: an error past its bound, a write past an end of the output, a changed input.
    """
    worst = worst_error(out, wanted, bound) if known is None else known
    if not worst <= 1:
        raise WrongResultError(f"the worst error is {worst:.3g} times what rounding allows")
    if not bool(intact(out)):
        raise WrongResultError("it wrote past an end of its output")
    for name, (after, before) in inputs.items():
        if not torch.equal(after, before):
            raise WrongResultError(f"it changed its input {name}")
    return worst


GUARD_ELEMENTS = 4096  # on each side; a multiple of 16 bytes in every type, and more than one program's row
CANARY = -12345.0  # a value, also in 16 bits, that no rotation of normal numbers gives


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A contiguous tensor of NaN between two canary strips of GUARD_ELEMENTS."""
    count = math.prod(shape)
    flat = torch.full((count + 2 * GUARD_ELEMENTS,), canary(dtype), dtype=dtype, device=device)
    inner: torch.Tensor = flat[GUARD_ELEMENTS : GUARD_ELEMENTS + count]
    return inner.fill_(poison(dtype)).view(shape)


def canary(dtype: torch.dtype) -> float:
    """CANARY, or the least value of a dtype that cannot hold it; True for bool."""
    if dtype == torch.bool:
        return True
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return max(CANARY, limits.min)


def poison(dtype: torch.dtype) -> float:
    """NaN, or the greatest value of a dtype without NaN; False for bool."""
    if dtype == torch.bool:
        return False
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def intact(tensor: Any) -> torch.Tensor:
    """A 0-d bool tensor: both canary strips of a guarded tensor are as they were made."""
    wanted = torch.tensor(canary(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    return torch.cat(_strips(tensor)).eq(wanted).all()


def guard(tensor: Any) -> None:
    """Restore both canary strips of a guarded tensor, whatever was written there."""
    for strip in _strips(tensor):
        strip.fill_(canary(tensor.dtype))


def _strips(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    flat = tensor.as_strided((tensor.numel() + 2 * GUARD_ELEMENTS,), (1,), tensor.storage_offset() - GUARD_ELEMENTS)
    return flat[:GUARD_ELEMENTS], flat[-GUARD_ELEMENTS:]


def fingerprint(tensors: list[torch.Tensor]) -> list[int]:
    """One number for each tensor, which changes when a single value does: the sum of its bits, as integers."""
    sums = [as_integers(tensor).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).tolist() if sums else []


def inputs_of(call: Any) -> dict[str, torch.Tensor]:
    """The tensors of a call, a dataclass, that must not change: all but ``out`` and what its class names as SCRATCH."""
    named = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    written = getattr(call, "SCRATCH", ())
    return {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and t is not call.out and n not in written}


def probe(call: Any) -> Any:
    """The same call, a dataclass of tensors, with a guarded output; in place, this output is a copy of the call's."""
    out = guarded(call.out.shape, call.out.dtype, call.out.device)
    names = [f.name for f in dataclasses.fields(call) if getattr(call, f.name) is call.out]
    if len(names) > 1:  # in place: an input is the output
        out.copy_(call.out)
    return dataclasses.replace(call, **dict.fromkeys(names, out))
