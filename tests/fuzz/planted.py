"""Defects that the fuzz must find. ``python -m tests.fuzz.planted FOLDER`` runs the scripts of these defects."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tuned.calls.recurrent.serve
import tuned.calls.rope.arguments
import tuned.calls.rope.call
import tuned.launching.left

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Rotate = Any  # (spec, call) -> (x, key)


def a_sign(rotate: Rotate) -> Rotate:
    """The second of each pair has the wrong sign where features are two apart."""

    def planted(spec: Any, call: Any) -> Any:
        out, key = rotate(spec, call)
        return (
            (out * torch.tensor([1.0, -1.0]).to(out).repeat(-(-out.shape[-1] // 2))[: out.shape[-1]], key)
            if (call.x.stride(-1) == 2)
            else (out, key)
        )

    return planted


def unwritten(rotate: Rotate) -> Rotate:
    """The last head of several is left as it was allocated."""

    def planted(spec: Any, call: Any) -> Any:
        out, key = rotate(spec, call)
        if out.shape[-2] > 2:
            out = torch.cat((out[..., :-1, :], torch.full_like(out[..., -1:, :], torch.nan)), -2)
        return out, key

    return planted


def overwritten(rotate: Rotate) -> Rotate:
    """The first feature of x is cleared after it was read."""

    def planted(spec: Any, call: Any) -> Any:
        out = rotate(spec, call)
        with torch.no_grad():
            call.x.detach()[..., :1] = 0
        return out

    return planted


def beyond(rotate: Rotate) -> Rotate:
    """One element after the last of x is written."""

    def planted(spec: Any, call: Any) -> Any:
        out, x = rotate(spec, call), call.x.detach()
        last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        if x.numel() and x.untyped_storage().nbytes() // x.element_size() > last + 1:
            x.as_strided((1,), (1,), last + 1).zero_()
        return out

    return planted


def stale(rotate: Rotate) -> Rotate:
    """The second call of a class gets the angles of the first."""
    kept: dict[Any, Any] = {}

    def planted(spec: Any, call: Any) -> Any:
        cos = kept.setdefault((spec, call.cos.shape, call.cos.stride(), call.seq), call.cos.detach().clone())
        return rotate(spec, dataclasses.replace(call, cos=cos))

    return planted


def coarse(rotate: Rotate) -> Rotate:
    """float32 is rounded as bfloat16 is."""

    def planted(spec: Any, call: Any) -> Any:
        return tuple(t if t is None or t.dtype != torch.float32 else t.bfloat16().float() for t in rotate(spec, call))

    return planted


def other_error(prepare: Any) -> Any:
    """Wrong arguments raise an error of another kind."""

    def planted(*args: Any, **kwargs: Any) -> Any:
        try:
            return prepare(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise KeyError(str(error)) from error

    return planted


def no_error(rotate: Rotate) -> Rotate:
    """A call with a first axis of 1 fails."""

    def planted(spec: Any, call: Any) -> Any:
        if call.x.shape[0] == 1:
            raise RuntimeError("an axis of length 1")
        return rotate(spec, call)

    return planted


def half_state(gru: Any) -> Any:
    """h_n is that of another step if there are several rows."""

    def planted(call: Any) -> Any:
        out, h_n = gru(call)
        return out, (h_n * 0.5 if h_n.shape[1] > 1 else h_n)

    return planted


class _Larger(torch.autograd.Function):
    """Returns its input; the gradient is a fifth larger."""

    @staticmethod
    def forward(_ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 1.2


def larger_gradient(operator: Any) -> Any:
    """Gradients of 16 bits are a fifth larger."""

    def planted(*call: Any) -> Any:
        return tuple(
            _Larger.apply(t) if t is not None and t.requires_grad and t.element_size() == 2 else t
            for t in operator(*call)
        )

    return planted


ROTATE, PREPARE, GRU = (
    (tuned.calls.rope.call, "rotate"),
    (tuned.calls.rope.call, "prepare"),
    (tuned.calls.recurrent.serve.eager, "gru"),
)
PLANTS: dict[str, tuple[tuple[Any, str], Callable[[Any], Any]]] = {
    **{f.__name__: (ROTATE, f) for f in (a_sign, unwritten, overwritten, beyond, stale, coarse, no_error)},
    "other_error": (PREPARE, other_error),
    "half_state": (GRU, half_state),
    "larger_gradient": (GRU, larger_gradient),
    "larger_gradient_of_norm": (ROTATE, larger_gradient),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, the defect is in place."""
    (module, attribute), plant = PLANTS[name]
    genuine = getattr(module, attribute)
    _forget()
    setattr(module, attribute, plant(genuine))
    try:
        yield
    finally:
        setattr(module, attribute, genuine)
        _forget()


def _forget() -> None:
    """Forget earlier calls: a known call would go round the defect, or would keep it."""
    tuned.calls.rope.call._PLANS.clear()
    tuned.launching.left.LEFT.clear()  # its keys are ids of weights, which a later weight may get


def fails(script: str) -> bool:
    """Whether a script raises."""
    try:
        exec(compile(script, "script", "exec"), {"__name__": "script"})
    except Exception:  # noqa: BLE001 - any does
        return True
    return False


def main(folder: Path) -> None:
    """Runs each FOLDER/NAME.py with its defect planted, and without it; prints as JSON what failed."""
    told = {}
    for path in sorted(folder.glob("*.py")):
        script = path.read_text(encoding="utf-8")
        with planted(path.stem.split(".")[0]):
            with_it = fails(script)
        told[path.stem] = [with_it, fails(script)]
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
