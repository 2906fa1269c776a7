"""A rotation that writes key and value to a cache: by PyTorch's operators and by kernels, against a loop over rows."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch

import tuned.calls.rope.append
import tuned.calls.rope.call
import tuned.dispatch
from tests.fuzz.interpreted import SILENT
from tests.support.append import FLOAT8, GPU, SAVED, Made, by_hand, interpreted, make
from tests.support.run import INTERPRETED
from tuned.calls.rope import append
from tuned.calls.rope import ops as rope_ops
from tuned.calls.rope.arguments import Given, Settings
from tuned.dispatch import rope_append_
from tuned.launching.plan import DirectLaunch

WAYS = ("eager", "kernel")

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_rope_append.py has these on a GPU"),
]


def assert_right(made: Made, way: str, times: int = 1, **changes: Any) -> None:
    """The call leaves the tensors as a loop over rows leaves them, and does not change other memory."""
    wanted = by_hand(made, **changes)
    before = [t.clone() for t in made.storages]
    if way == "eager":
        assert made.call(**changes) is made.tensors["q"]
    else:
        with interpreted() as seen:
            for _ in range(times):
                for t, was in zip(made.storages, before, strict=True):
                    t.copy_(was)
                assert made.call(**changes) is made.tensors["q"]
        # An empty tensor has no address.
        assert (seen.public, seen.direct) == ((1, times - 1) if made.tensors["slot_mapping"].numel() else (0, 0))
    for name, want in wanted.items():
        found = made.tensors[name]
        if found.dtype == FLOAT8:
            apart = (found.double() - want).abs()
            spacing = torch.maximum(want.abs() * 2.0**-4, torch.full_like(want, 2.0**-10))
            assert bool((apart <= spacing * 1.0001).all()), name
        else:
            unit = torch.finfo(found.dtype).eps * (2 if way == "kernel" and found.dtype == torch.bfloat16 else 1)
            torch.testing.assert_close(found.double(), want, rtol=unit, atol=4e-6, msg=lambda m, n=name: f"{n}: {m}")
    written = {made.tensors[n].data_ptr() for n in wanted}
    assert len(written) == len(wanted)
    for name in wanted:  # the call changes nothing but what it may write
        t = made.tensors[name]
        home = next(
            i for i, s in enumerate(made.storages) if s.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        )
        before[home].as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)
    for t, was in zip(made.storages, before, strict=True):
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
        assert torch.equal(t.view(kind), was.view(kind)), "memory around was changed"


CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16 HND": {"dtype": torch.float16, "layout": "HND"},
    "both caches in one tensor": {"lies": "together"},
    "both caches in one tensor, HND": {"lies": "together", "layout": "HND", "key_heads": 3},
    "features of both side by side": {"lies": "beside"},
    "the first 4 features": {"rotary": 4},
    "the last 4 features": {"rotary": 4, "rotated": "last", "interleaved": True},
    "interleaved": {"interleaved": True, "dtype": torch.bfloat16},
    "the key too": {"key_inplace": True, "rotary": 4},
    "fewer slots than tokens": {"tokens": 11},
    "no slots": {"slots": ()},
    "slots past the end": {"slots": (20, 1, 2**40, -5, 19, 2**31, 21)},
    "none has a place": {"slots": (-1, 20, -2)},
    "a norm": {"norm": True, "dtype": torch.float16},
    "a norm of what does not rotate": {"norm": True, "rotary": 4, "key_inplace": True, "eps": 0.1},
    "float8": {"cache": FLOAT8, "dtype": torch.bfloat16},
    "float8 with a norm": {"cache": FLOAT8, "norm": True, "rotary": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cache_holds_what_the_tokens_are(case: dict[str, Any], way: str) -> None:
    assert_right(make(**case), way, times=3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [1, 2])
def test_float8_is_divided_by_a_scale_and_saturated(heads: int, way: str) -> None:
    made = make(cache=FLOAT8, key_heads=2)
    scales = [torch.tensor([0.5, 3.0][:heads]), torch.tensor([2.0, 0.25][:heads])]
    named = {"key_scale": scales[0], "value_scale": scales[1] if heads > 1 else scales[1][0]}
    assert_right(made, way, times=2, **named)
    made = make(cache=FLOAT8, key_heads=2)
    made.tensors["v"].mul_(1e4)
    made.tensors["v"][0, 0, 0], made.tensors["v"][0, 0, 1] = torch.nan, torch.inf
    if way == "eager":
        made.call(**named)
    else:
        with interpreted():
            made.call(**named)
    page, slot = divmod(SAVED[0], 4)
    found = made.tensors["value_cache"][page, slot].float()
    assert bool(found[0, 0].isnan())
    assert found[0, 1] == 448
    assert bool((found.nan_to_num(0).abs() <= 448).all())
    assert bool((found.abs() == 448).sum() > 3)


def test_both_ways_store_the_same_float8_numbers() -> None:
    """Except numbers in the middle between two float8 numbers, which earlier float32 roundings may move either way."""
    found = []
    for way in WAYS:
        made = make(heads=1, key_heads=8, dim=64, rotary=64, cache=FLOAT8)
        named = {"key_scale": torch.tensor(0.03), "value_scale": torch.tensor(0.7)}
        if way == "eager":
            made.call(**named)
        else:
            with interpreted() as seen:
                made.call(**named)
            assert seen.public == 1
        found.append([made.tensors[n].view(torch.uint8) for n in ("key_cache", "value_cache")])
    assert float((found[0][0] != found[1][0]).double().mean()) < 1e-3
    assert torch.equal(found[0][1], found[1][1])


def test_the_rotated_key_is_rounded_once() -> None:
    """It goes straight to float8: rounded to bfloat16 first, some numbers would fall on the middle of two."""
    for way in WAYS:
        made = make(heads=1, key_heads=16, dim=64, rotary=64, dtype=torch.bfloat16, cache=FLOAT8)
        named = {"key_scale": torch.tensor(1.0), "value_scale": torch.tensor(1.0)}
        wanted = by_hand(made, **named)["key_cache"]
        once, twice = (t.clamp(-448, 448).to(FLOAT8).view(torch.uint8) for t in (wanted.float(), wanted.bfloat16()))
        if way == "eager":
            made.call(**named)
        else:
            with interpreted():
                made.call(**named)
        found = made.tensors["key_cache"].view(torch.uint8)
        assert int((once != twice).sum()) > 20 * int((found != once).sum()), way


# Modes --------------------------------------------------------------------------------------------------------------------


def test_all_angles_and_positions_are_those_of_a_rotation() -> None:
    """rope_append_ of q, and of a cache whose pages hold the tokens in order, gives what rope_qk gives."""
    tokens = torch.arange(7)
    table = torch.rand(12, 4)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    sources: list[dict[str, Any]] = [
        {"freqs": table, "angle_entries": "pair"},
        {"freqs": torch.cat((table, table), -1)},
        {"cos_sin_cache": torch.cat((table.cos(), table.sin()), -1)},
        {"inv_freq": table[1]},
        {"freqs_cis": torch.polar(torch.ones_like(table), table)},
        {"cos": table.cos(), "sin": table.sin().t().contiguous().t()},
    ]
    places: list[dict[str, Any]] = [
        {"positions": tokens},
        {"positions": tokens.int().flip(0)},
        {"cu_seqlens": bounds},
        {"cu_seqlens": bounds, "offset": 2, "max_seqlen": 5},
        {"cu_seqlens": bounds, "offset": torch.tensor([4, 0])},
        {"positions": torch.stack((tokens, tokens.flip(0))), "sections": [1, 3]},
    ]
    for way in WAYS:
        for at in range(len(sources) + len(places)):
            named = sources[at % len(sources)] | places[(at + at // len(sources)) % len(places)]
            named |= {"conjugate": bool(at % 2), "interleaved": bool(at % 3)}
            made = make(slots=tuple(range(7)))
            wanted = tuned.dispatch.rope_qk(*(made.tensors[n].clone() for n in "qk"), tensor_format="thd", **named)
            call = {n: t for n, t in made.named.items() if n == "cache_layout"} | made.tensors | named
            if way == "eager":
                rope_append_(**call)
            else:
                with interpreted() as seen:
                    rope_append_(**call)
                assert seen.public == 1
            kept = made.tensors["key_cache"].reshape(-1, 2, 8)[:7]
            for found, want in zip((made.tensors["q"], kept), wanted, strict=True):
                torch.testing.assert_close(found, want, rtol=1e-6, atol=4e-6)


def test_tokens_of_no_sequence_go_nowhere() -> None:
    for way in WAYS:
        made = make(slots=tuple(range(7)))
        del made.named["positions"]
        made.named["cu_seqlens"] = torch.tensor([1, 3, 5], dtype=torch.int32)
        before = {n: t.clone() for n, t in made.tensors.items()}
        if way == "eager":
            made.call()
        else:
            with interpreted() as seen:
                made.call()
            assert seen.public == 1
        for name, token in (
            ("q", made.tensors["q"]),
            *((n, made.tensors[n].reshape(-1, 2, 8)) for n in ("key_cache", "value_cache")),
        ):
            was = before[name].reshape(token.shape) if name == "q" else before[name].reshape(-1, 2, 8)
            same = [torch.equal(a, b) for a, b in zip(token[:7], was[:7], strict=True)]
            assert same == [True, False, False, False, False, True, True] or (
                name == "q" and same[0] and same[5] and same[6]
            )


def test_a_gradient_is_refused_and_nothing_is_written() -> None:
    for name in ("q", "k", "v", "key_cache"):
        made = make()
        made.tensors[name] = made.tensors[name].clone().requires_grad_()
        before = {n: t.detach().clone() for n, t in made.tensors.items()}
        with pytest.raises(RuntimeError, match=f"no gradient, got {name} that requires one.*no_grad"):
            made.call()
        assert all(torch.equal(t.detach(), before[n]) for n, t in made.tensors.items())
        with torch.no_grad():
            made.call()


def test_autograd_knows_what_was_overwritten() -> None:
    for way in WAYS:
        made = make()
        with interpreted() if way == "kernel" else contextlib.nullcontext():
            for time in range(2):  # first the plan is made, then it is used
                versions = {n: t._version for n, t in made.tensors.items()}
                made.call()
                changed = {n for n, t in made.tensors.items() if t._version != versions[n]}
                assert {"q", "key_cache", "value_cache"} <= changed, time
                assert "slot_mapping" not in changed


def test_inference_tensors_are_written() -> None:
    with torch.inference_mode():
        made = make()
        assert_right(made, "eager")
        assert_right(make(), "kernel", times=2)


def test_what_cannot_be_written_is_found_before_anything_is() -> None:
    made = make()
    with torch.inference_mode():
        made.tensors["value_cache"] = made.tensors["value_cache"].clone()
    for _ in range(3):
        before = {n: t.clone() for n, t in made.tensors.items() if t is not None}
        with pytest.raises(RuntimeError, match=r"made in inference mode cannot be overwritten.*or pass a clone"):
            made.call()
        assert all(torch.equal(t, before[n]) for n, t in made.tensors.items() if t is not None)


# Traced -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_inplace", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_compiled_whole_it_does_the_same(key_inplace: bool, norm: bool) -> None:
    def run(qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, named: Any) -> Any:
        q, k, v = qkv.split((3, 2, 2), 1)
        out = rope_append_(q, k, v, cache[0], cache[1], slots, **named, key_inplace=key_inplace)
        return out * 1.0, qkv * 1.0

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for slots in (SAVED, (1, 2, -1, 4, 5, 6, 7)):
        found = []
        for function in (run, compiled):
            made = make(slots=slots, norm=norm)
            cache = torch.stack([made.tensors[n] for n in ("key_cache", "value_cache")])
            with torch.no_grad():
                found.append((*function(made.storages[0], cache, made.tensors["slot_mapping"], made.named), cache))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("key_inplace", [False, True])
def test_the_operators_are_as_they_say(key_inplace: bool) -> None:
    made = make()
    settings = Settings(tensor_format="thd")._asdict()
    settings.pop("inplace")
    tensors = [t.contiguous() for t in made.tensors.values()]
    rest = (None, made.named["cos"], made.named["sin"], None, None, None, None, made.named["positions"], None, 0)
    operator = rope_ops.rope_append_key_ if key_inplace else rope_ops.rope_append_
    torch.library.opcheck(operator, (*tensors, None, None, None, None, *rest, *settings.values(), "NHD"))


def test_tensors_without_memory_are_taken() -> None:
    made = make()
    with torch.device("meta"):
        named = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in made.named.items()}
        out = rope_append_(**{n: t.to("meta") for n, t in made.tensors.items()}, **named)
    assert out.is_meta


# What explain tells ---------------------------------------------------------------------------------------------------------


def test_explain_tells_which_kernel_or_why_none() -> None:
    made = make(heads=32, key_heads=8, dim=128, rotary=128, dtype=torch.bfloat16)
    call = made.tensors | made.named
    assert tuned.explain(rope_append_, **call).rule == "eager"
    told = tuned.explain(rope_append_, **call, gpu="nvidia_h200")
    assert told.kernels == ("rope_append_half_cos_sin",)
    float8 = {n: call[n].to(FLOAT8) for n in ("key_cache", "value_cache")}
    assert tuned.explain(rope_append_, **call | float8, gpu="nvidia_h200").kernels == told.kernels
    with interpreted(dataclasses.replace(GPU, capability=80)):
        told = tuned.explain(rope_append_, **call | float8)
        assert (told.rule, "8.9, not 8.0" in told.why) == ("eager", True)
    apart = call | {"v": torch.zeros(7, 8, 256, dtype=torch.bfloat16)[..., ::2]}
    told = tuned.explain(rope_append_, **apart, gpu="nvidia_h200")
    assert (told.rule, "strides of head_dim" in told.why) == ("eager", True)


def test_what_a_known_call_may_not_do_is_refused_too() -> None:
    """A known call checks its tensors for overlap too."""
    made = make(lies="packed")
    big = torch.randn(4, 7, 8, 8)
    named = {**made.tensors, **made.named}
    apart = {"q": big[0][:, :3], "k": big[1][:, :2], "v": big[2][:, :2]}
    with interpreted() as seen:
        for _ in range(3):
            rope_append_(**{**named, **apart})
        assert seen.direct == 2
        for name in "kv":
            with pytest.raises(ValueError, match=f"q is overwritten, and must not share memory with {name}"):
                rope_append_(**{**named, **apart, name: big[0][:, 2:4]})
        assert seen.direct == 2


def test_a_sequence_that_is_longer_than_the_table_is_refused_before_a_write() -> None:
    q, k, v, cos = torch.randn(8, 3, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8), torch.rand(4, 4)
    caches = torch.zeros(2, 3, 4, 2, 8)
    before = q.clone()
    for bounds, offset in (([0, 8], 0), ([0, 4, 8], 1), ([0, 4, 8], torch.tensor([0, 1]))):
        named = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "offset": offset, "cos": cos, "sin": cos}
        with pytest.raises(ValueError, match="the angles are too short: 4 positions for a sequence of"):
            rope_append_(q, k, v, *caches, torch.arange(8), **named)
        assert torch.equal(q, before)
        assert not caches.any()
    named = {"cu_seqlens": torch.tensor([0, 4, 8], dtype=torch.int32), "cos": cos, "sin": cos}
    rope_append_(q, k, v, *caches, torch.arange(8), **named)
    named["cu_seqlens"] = torch.tensor([0, 3, 8], dtype=torch.int32)  # as in a known call
    kept = q.clone(), caches.clone()
    with pytest.raises(ValueError, match="a sequence of 5, cu_seqlens 3 to 8"):
        rope_append_(q, k, v, *caches, torch.arange(8), **named)
    assert torch.equal(q, kept[0])
    assert torch.equal(caches, kept[1])


@pytest.mark.parametrize("scaled", [False, True])
def test_the_short_way_is_for_calls_like_those_before_alone(scaled: bool) -> None:
    """Each of these differs from a call of the same sizes in one thing that the single C function must compare."""
    made = make(heads=4, key_heads=4, dim=16, rotary=16, cache=FLOAT8 if scaled else None)
    named = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in {**made.tensors, **made.named}.items()}
    named["cos_sin_cache"] = torch.cat((named.pop("cos"), named.pop("sin")), -1)
    if scaled:
        named |= {"key_scale": torch.tensor(0.5), "value_scale": torch.tensor(0.25)}
    assert not any(t.data_ptr() % 16 for t in named.values() if isinstance(t, torch.Tensor))
    caches = ("key_cache", "value_cache")
    others: dict[str, dict[str, Any]] = {
        "slots of 32 bits": {"slot_mapping": named["slot_mapping"].int()},
        "fewer slots": {"slot_mapping": named["slot_mapping"][:5]},
        "slots apart": {"slot_mapping": named["slot_mapping"].repeat_interleave(2)[::2]},
        "slots further apart": {"slot_mapping": named["slot_mapping"].repeat_interleave(3)[::3]},
        "other pages": {n: torch.cat((named[n].view(torch.uint8),) * 2).view(named[n].dtype) for n in caches},
        "other strides": {n: named[n].transpose(1, 2).contiguous().transpose(1, 2) for n in caches},
        "the key lies otherwise": {"k": named["k"].transpose(0, 1).contiguous().transpose(0, 1)},
        "positions of 32 bits": {"positions": named["positions"].int()},
        "a table in another dtype": {"cos_sin_cache": named["cos_sin_cache"].bfloat16()},
        "a misaligned query": {"q": torch.zeros(7 * 64 + 1)[1:].view(7, 4, 16)},
        "other words": {"interleaved": True},
        "an offset": {
            "positions": None,
            "offset": torch.tensor(3),
            "cu_seqlens": torch.tensor([0, 7], dtype=torch.int32),
        },
    }
    if scaled:
        others["scales of heads"] = {n: torch.rand(4) + 0.5 for n in ("key_scale", "value_scale")}
        others["a negated scale"] = {"key_scale": torch._neg_view(torch.tensor(-2.0))}
    with torch.no_grad(), interpreted() as seen:
        plans = tuned.calls.rope.append._PLANS
        for _ in range(3):
            rope_append_(**named)
        assert [type(kept) is tuple for kept in plans.values()] == [False, True]
        assert (seen.public, seen.direct) == (1, 2)
        for name, other in others.items():
            for _ in range(3):  # a public launch, a direct launch, the short way
                found = {
                    n: t.clone() if isinstance(t, torch.Tensor) and n in (*caches, "q") else t for n, t in named.items()
                }
                found |= {
                    n: t.clone(memory_format=torch.preserve_format) if n in (*caches, "q") else t
                    for n, t in other.items()
                }
                right = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in found.items()}
                asked = Given(right["q"], right["k"], cos_sin_cache=right["cos_sin_cache"])._replace(
                    **{n: right[n] for n in ("positions", "offset", "cu_seqlens") if right.get(n) is not None}
                )
                cached = append.Cached(
                    *(right.get(n) for n in ("v", *caches, "slot_mapping", "key_scale", "value_scale"))
                )
                settings = Settings(tensor_format="thd", interleaved=right.get("interleaved", False))
                append.run_eager(asked, cached, append.Asked(settings))
                rope_append_(**found)
                for n in ("q", *caches):
                    torch.testing.assert_close(found[n].float(), right[n].float(), rtol=0.07, atol=2e-3, msg=name)
        wrong = {"value_scale": None} if scaled else {"value_scale": torch.tensor(1.0)}
        with pytest.raises(ValueError, match="must come together"):
            rope_append_(**named | wrong)
        with torch.enable_grad(), pytest.raises(RuntimeError, match="no gradient, got v"):
            rope_append_(**named | {"v": named["v"].clone().requires_grad_()})
        direct = seen.direct
        rope_append_(**named)
        assert seen.direct == direct + 1


def test_the_short_way_keeps_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def direct(launch: Any, *_: Any) -> DirectLaunch:
        numbers = [v for v in launch.arguments if not isinstance(v, torch.Tensor)]
        rest = (*numbers, *launch.constants.values())
        return DirectLaunch(lambda *_: None, "", (), launch.programs, rest, lambda _: 7, SILENT, SILENT)

    with torch.no_grad(), interpreted():
        monkeypatch.setattr(tuned.calls.rope.append, "direct_launch", direct)
        made = make(heads=4, key_heads=4, dim=16, rotary=16)
        named = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in {**made.tensors, **made.named}.items()}
        named["cos_sin_cache"] = torch.cat((named.pop("cos"), named.pop("sin")), -1)
        for _ in range(3):
            rope_append_(**named)
        assert any(type(kept) is tuple for kept in tuned.calls.rope.append._PLANS.values())
        kept = [weakref.ref(t) for t in named.values() if isinstance(t, torch.Tensor)]
        named.clear()
        gc.collect()
        assert not any(ref() is not None for ref in kept)


def test_a_call_finds_its_angles_as_a_rotation_does() -> None:
    """Both write the same lines out, for speed."""
    found = []
    for module in (append, tuned.calls.rope.call):
        text = inspect.getsource(module)
        begin = text.index("    if cos is None and sin is None:\n        angles, source = freqs, 0\n")
        found.append(text[begin : text.index("angles, source = cos, 3 if alone else -1", begin)].splitlines())
    assert found[0] == found[1]
    assert len(found[0]) > 10
