"""The hot path of RoPE: no call is served by a launch that was made for another, and nothing of a caller's is kept."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rope_calls import CHOICES, Case, Watch, build, forget, mode, watch
from tuned.overwrite import refuse_overwrite
from tuned.rope import call as rope_call
from tuned.rope.arguments import prepare

if TYPE_CHECKING:
    from tuned.rope.arguments import Given, Settings

__all__ = ["watch"]

Outcome = tuple[list[torch.Tensor], list[bool], list[Any]]  # results, whether they require a gradient, gradients


def present(results: Any) -> list[torch.Tensor]:
    return [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]


def gradients(results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[Any]:
    wanting = [t for t in results if t.requires_grad]
    if not wanting or not leaves:
        return []
    weights = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in wanting]
    return list(torch.autograd.grad(wanting, leaves, weights, allow_unused=True))


def in_eager(given: Given, asked: Settings, leaves: list[torch.Tensor]) -> Outcome:
    """What PyTorch's operators give, out of place, after the refusals that in place has."""
    prepare(given, asked, make_out=lambda t: t)
    if asked.inplace:
        for t in (given.x, given.key):
            if t is not None:
                refuse_overwrite(t)
    results = present(rope_call.run_eager(given, asked._replace(inplace=False)))
    return [t.detach().clone() for t in results], [t.requires_grad for t in results], gradients(results, leaves)


def by_dispatch(given: Given, asked: Settings, leaves: list[torch.Tensor]) -> Outcome:
    """What the call gives, after looking at what it did to its tensors."""
    tensors = [t for t in (given.x, given.key) if t is not None]
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


def outcome(run: Any, case: Case) -> Any:
    with mode(case.mode):
        made = build(case)
        try:
            return run(*made)
        except (ValueError, TypeError, RuntimeError) as error:
            return error.with_traceback(None)


@functools.cache
def wanted_of(case: Case) -> Any:
    return outcome(in_eager, case)


def check(case: Case) -> None:
    found, wanted = outcome(by_dispatch, case), wanted_of(case)
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        assert type(found) is type(wanted), f"{case}: {found}"
        return
    torch.testing.assert_close(found, wanted, equal_nan=True, msg=lambda text: f"{case}\n{text}")


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
    "device offset": Case(source="inv_freq", place="offset", index_dtype=torch.int32),
    "parallel": Case("thd", cp_size=2, rows=2 * 40),
    "qkv": Case(key_heads=None, kv_heads=1),
    "qkv in place": Case(key_heads=None, kv_heads=0, inplace=True),
    "batched": Case(source="cos_sin", batched=True),
    "last": Case(rotary=8, rotated="last", inplace=True, conjugate=True, entries="feature"),
    "proportional": Case(rotary=8, rotated="proportional", scaling=1.5),
}


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_differs_in_one_thing_from_one_seen_before_is_right(name: str) -> None:
    base = CASES[name]
    for field, values in CHOICES.items():
        for value in values:
            changed = dataclasses.replace(base, **{field: value})
            for case in (base, changed, changed):
                check(case)


def test_calls_seen_before_are_launched_bare(watch: Watch) -> None:
    for case in CASES.values():
        for _ in range(3):
            check(case)
    assert watch.bare >= 2 * len(CASES)


CHANGES = [(field, value) for field, values in CHOICES.items() for value in values]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(CASES)), changes=st.lists(st.sampled_from(CHANGES), min_size=4, max_size=16), data=st.data()
)
def test_nothing_stale_is_launched_whatever_came_before(
    watch: Watch, name: str, changes: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """Changes add up; then calls come again in any order."""
    assert watch.public >= 0
    forget()
    cases = [CASES[name]]
    for field, value in changes:
        cases.append(dataclasses.replace(cases[-1], **{field: value}))
    again = data.draw(st.lists(st.sampled_from(range(len(cases))), max_size=12))
    for case in (*cases, *(cases[i] for i in again)):
        check(case)
