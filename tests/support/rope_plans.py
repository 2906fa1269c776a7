"""RoPE calls, and a check of the hot path's results."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from tests.support.rope_calls import Case, build, mode
from tuned.calls.rope import call as rope_call
from tuned.calls.rope.arguments import prepare
from tuned.launching.overwrite import refuse_overwrite

if TYPE_CHECKING:
    from tuned.calls.rope.arguments import Given, Settings

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.float64: {"rtol": 1e-7, "atol": 1e-7},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}

Outcome = tuple[list[torch.Tensor], list[bool], list[Any]]  # results, whether they require a gradient, gradients


def present(results: Any) -> list[torch.Tensor]:
    return [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]


def rotated(given: Given) -> list[torch.Tensor]:
    return [t for t in (given.x, given.key) if t is not None]


def gradients(results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[Any]:
    wanting = [t for t in results if t.requires_grad]
    if not wanting or not leaves or not torch.is_grad_enabled():
        return []
    weights = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t) for t in wanting]
    return list(torch.autograd.grad(wanting, leaves, weights, allow_unused=True))


def in_eager(given: Given, asked: Settings, leaves: list[torch.Tensor]) -> Outcome:
    """What PyTorch's operators give, computed out of place, after the refusals of calls in place."""
    prepare(given, asked, make_out=lambda t: t)
    if asked.inplace:
        for t in rotated(given):
            refuse_overwrite(t)
    results = present(rope_call.run_eager(given, asked._replace(inplace=False)))
    needs = [
        t.requires_grad or (asked.inplace and x.requires_grad) for t, x in zip(results, rotated(given), strict=True)
    ]
    return [t.detach().clone() for t in results], needs, gradients(results, leaves)


def by_dispatch(given: Given, asked: Settings, leaves: list[torch.Tensor]) -> Outcome:
    """What the call gives, after checking what it did to its tensors."""
    tensors = rotated(given)
    before = [(t.detach().clone(), None if t.is_inference() else t._version) for t in tensors]
    try:
        results = present(rope_call.call(*given, tuple(asked)))
    except (ValueError, TypeError, RuntimeError):
        assert all(torch.equal(t.detach(), value) for t, (value, _) in zip(tensors, before, strict=True))
        raise
    assert len(results) == len(tensors)
    for t, result, (value, version) in zip(tensors, results, before, strict=True):
        assert (result is t) == asked.inplace
        assert (result.shape, result.dtype) == (t.shape, t.dtype)
        if not asked.inplace:
            assert torch.equal(t.detach(), value)
            assert result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() or not t.numel()
        assert version is None or not t.numel() or (t._version > version) == asked.inplace
    return [t.detach().clone() for t in results], [t.requires_grad for t in results], gradients(results, leaves)


def outcome(run: Any, case: Case, device: str) -> Any:
    with mode(case.mode):
        made = build(case, device)
        try:
            return run(*made)
        except (ValueError, TypeError, RuntimeError) as error:
            return error.with_traceback(None)


@functools.cache
def wanted_of(case: Case, device: str = "cpu") -> Any:
    return outcome(in_eager, case, device)


def _parts(made: Outcome) -> list[Any]:
    results, needs, found = made
    return [*results, needs, *found]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other


def check(case: Case, device: str = "cpu") -> None:
    """Compare a call with PyTorch's operators: results, gradients, which results require one, writes, or the refusal."""
    found, wanted = outcome(by_dispatch, case, device), wanted_of(case, device)
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        refused = isinstance(wanted, Exception) and isinstance(found, Exception)
        # If x and key are the same leaf, either of two refusals is right.
        assert type(found) is type(wanted) or (refused and case.shares), f"{case}: {found}"
        return
    if all(map(_equal, _parts(found), _parts(wanted))) and len(_parts(found)) == len(_parts(wanted)):
        return  # assert_close takes ten times as long
    # On a GPU the kernels' sines and cosines differ from PyTorch's in the last bits, and then so do rounded results.
    close = {} if device == "cpu" else TOLERANCE[case.dtype]
    torch.testing.assert_close(found, wanted, equal_nan=True, msg=lambda text: f"{case}\n{text}", **close)


CASES = {
    "plain": Case(key_heads=None),
    "plain packed in place": Case("thd", key_heads=None, inplace=True),
    "pair": Case(),
    "pair in place": Case(inplace=True, source="cos_sin"),
    "training": Case(x_grad="made", key_grad="made", source="cos_sin", entries="feature"),
    "in place training": Case(x_grad="made", key_grad="made", inplace=True),
    "one in place in training": Case(x_grad="made", key_heads=None, inplace=True),
    "packed": Case("thd", source="cos_sin", place="starts"),
    "tokens": Case("thd", source="cache", place="ids", inplace=True),
    "decode": Case(seq=1, source="cache", place="ids", key_view="packed", view="packed", inplace=True),
    "shifted": Case(place="shifted"),
    "started": Case("sbhd", source="inv_freq", place="starts"),
    "as many started": Case(batch=4, source="cache", place="starts"),
    "device offset": Case(source="inv_freq", place="offset", index_dtype=torch.int32),
    "parallel": Case("thd", cp_size=2, rows=2 * 40),
    "qkv": Case(key_heads=None, kv_heads=1),
    "qkv in place": Case(key_heads=None, kv_heads=0, inplace=True),
    "batched": Case(source="cos_sin", batched=True),
    "last": Case(rotary=8, rotated="last", inplace=True, conjugate=True, entries="feature"),
    "proportional": Case(rotary=8, rotated="proportional", scaling=1.5),
}
