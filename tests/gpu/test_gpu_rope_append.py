"""A rotation that writes key and value to a cache, on a GPU: right, in graphs with new slots, compiled, in bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tuned
from generator.families.rope.texts import append_specs
from generator.measuring.check import check, inputs_of, probe
from generator.workload import WORKLOADS
from tests.support.append import FLOAT8, PAGE_SIZE, PAGES, Made, by_hand, make
from tests.support.run import run
from tuned.calls.rope import append
from tuned.dispatch import rope_append_, rope_qk
from tuned.families.rope.launches import launches
from tuned.families.rope.spec import RopeSize
from tuned.families.rope.variant import default_variant

BF16, F16 = torch.bfloat16, torch.float16
# Widths, heads, dtypes, layouts and strides: each occurs a few times, in as few kernels as possible.
CASES: dict[str, dict[str, Any]] = {
    "usual": {"heads": 32, "key_heads": 8, "dim": 128, "rotary": 128, "dtype": BF16},
    "HND": {"heads": 8, "key_heads": 1, "dim": 128, "rotary": 128, "dtype": BF16, "layout": "HND"},
    "both caches in one tensor": {
        "heads": 4,
        "key_heads": 2,
        "dim": 64,
        "rotary": 64,
        "dtype": F16,
        "lies": "together",
    },
    "features side by side": {"heads": 3, "key_heads": 3, "dim": 96, "rotary": 96, "lies": "beside", "layout": "HND"},
    "a part that rotates": {"heads": 5, "key_heads": 2, "dim": 80, "rotary": 32, "dtype": BF16},
    "the last features": {"dim": 192, "rotary": 64, "rotated": "last", "interleaved": True, "dtype": BF16},
    "odd rows": {"heads": 3, "key_heads": 1, "dim": 72, "rotary": 36, "key_inplace": True},
    "slots past the end": {"dim": 64, "rotary": 64, "slots": (20, 1, 2**40, -5, 19, 2**31, 21), "dtype": BF16},
    "fewer slots than tokens": {"dim": 64, "rotary": 64, "tokens": 11, "dtype": BF16, "key_inplace": True},
    "a norm": {"heads": 32, "key_heads": 8, "dim": 128, "rotary": 128, "dtype": BF16, "norm": True},
    "a norm of a part": {"dim": 80, "rotary": 40, "norm": True, "layout": "HND", "dtype": F16},
    "float8": {"heads": 32, "key_heads": 8, "dim": 128, "rotary": 128, "dtype": BF16, "cache": FLOAT8},
    "float8 with a norm": {"dim": 64, "rotary": 32, "dtype": F16, "cache": FLOAT8, "norm": True, "lies": "together"},
}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def on_cpu(made: Made) -> Made:
    """The same tensors in separate memory of the CPU."""
    tensors = {n: t.cpu() for n, t in made.tensors.items()}
    named = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in made.named.items()}
    return Made(tensors, named, [])


@pytest.mark.gpu_sample
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cache_holds_what_the_tokens_are(case: dict[str, Any], indices: torch.dtype) -> None:
    made = make(**case, device="cuda")
    if indices == torch.int32 and case.get("slots"):
        made.tensors["slot_mapping"] = made.tensors["slot_mapping"].clamp(max=2**31 - 1)
    made.tensors["slot_mapping"] = made.tensors["slot_mapping"].to(indices)
    if case.get("cache"):
        made.named |= {"key_scale": torch.tensor(0.5, device="cuda"), "value_scale": torch.rand(1, device="cuda") + 0.5}
    assert tuned.explain(rope_append_, **made.tensors, **made.named).kernels
    wanted = by_hand(on_cpu(made))
    before = [t.clone() for t in made.storages]
    for _ in range(3):  # first the plan is made, then it is used
        for t, was in zip(made.storages, before, strict=True):
            t.copy_(was)
        assert made.call() is made.tensors["q"]
        for name, want in wanted.items():
            found = made.tensors[name].cpu()
            if found.dtype == FLOAT8:
                apart = (found.double() - want.clamp(-448, 448)).abs()
                assert bool((apart <= torch.maximum(want.abs() * 2.0**-4, torch.tensor(2.0**-10)) * 1.0001).all()), name
            else:
                unit = torch.finfo(found.dtype).eps
                torch.testing.assert_close(
                    found.double(), want, rtol=unit, atol=4e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
    for name in wanted:  # the call changes nothing but what it may write
        t = made.tensors[name]
        home = next(
            i for i, s in enumerate(made.storages) if s.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        )
        before[home].as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)
    for t, was in zip(made.storages, before, strict=True):
        assert torch.equal(bits(t), bits(was)), "memory around was changed"


@pytest.mark.gpu_sample
@pytest.mark.parametrize("cache", ["same", "float8"])
@pytest.mark.parametrize("norm", ["", "head"])
def test_nothing_is_written_around_the_pages(norm: str, cache: str) -> None:
    """Results lie between canaries, as in each measurement of a variant."""
    work, size = WORKLOADS["rope"], RopeSize(1, 37)
    for plain in append_specs():
        if plain.norm != norm or plain.angles != "cos_sin":
            continue
        for head_dim, rotary in ((80, 80), (72, 40)):
            spec = dataclasses.replace(
                plain, heads=5, key_heads=3, head_dim=head_dim, rotary_dim=rotary, cache=cache, dtype="float16"
            )
            call = probe(work.inputs(spec, size, "cuda", 0))
            wanted, bound = work.reference(spec, call)
            before = {name: tensor.clone() for name, tensor in inputs_of(call).items()}
            run(launches(spec, default_variant(spec, size), call))
            check(call.out, wanted, bound, {n: (t, before[n]) for n, t in inputs_of(call).items()})


@pytest.mark.gpu_sample
def test_float8_numbers_are_those_of_pytorch() -> None:
    """Bit by bit where nothing rotates; some values are NaN, infinite or too large."""
    made = make(heads=2, key_heads=8, dim=128, rotary=128, dtype=BF16, cache=FLOAT8, device="cuda")
    v = made.tensors["v"]
    v.mul_(torch.logspace(-6, 5, v.numel(), device="cuda").view(v.shape))
    v[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    named = {"key_scale": torch.rand(8, device="cuda") + 0.1, "value_scale": torch.rand(8, device="cuda") + 0.1}
    wanted = made.tensors["value_cache"].clone()
    for token, slot in enumerate(made.tensors["slot_mapping"].tolist()):
        if slot >= 0:
            stored = (v[token].float() / named["value_scale"].view(-1, 1)).clamp(-448, 448).to(FLOAT8)
            wanted[slot // PAGE_SIZE, slot % PAGE_SIZE] = stored
    made.call(**named)
    found = made.tensors["value_cache"]
    assert torch.equal(torch.nan_to_num(found.float(), 999.0), torch.nan_to_num(wanted.float(), 999.0))


@pytest.mark.gpu_sample
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("cache", [None, FLOAT8])
def test_the_short_way_of_known_calls_is_right(cache: Any, mode: Any) -> None:
    """Calls as servers make them, with a table of cosines and sines, give the results of checked calls."""
    with mode():
        made, other = (
            make(dim=64, rotary=64, dtype=BF16, cache=cache, lies="together", device="cuda") for _ in range(2)
        )
        named = dict(made.named)
        named["cos_sin_cache"] = torch.cat((named.pop("cos"), named.pop("sin")), -1)
        if cache is not None:
            named |= {
                "key_scale": torch.full((), 0.5, device="cuda"),
                "value_scale": torch.full((), 0.25, device="cuda"),
            }
        before = [t.clone() for t in made.storages]
        rope_append_(**other.tensors, **named)  # a public launch
        for again in range(5):
            for t, was in zip(made.storages, before, strict=True):
                t.copy_(was)
            rope_append_(**made.tensors, **named)
            for t, want in zip(made.storages, other.storages, strict=True):
                assert torch.equal(bits(t), bits(want)), again
    known = [kept for kept in append._PLANS.values() if isinstance(kept, list | tuple)]
    assert any(known), "torch has no guards that compare tensors: known calls go the long way"


# In graphs, on streams, compiled ------------------------------------------------------------------------------------------

REPLAYS = 500


@pytest.mark.gpu_sample
@pytest.mark.parametrize("cache", [None, FLOAT8])
def test_a_graph_is_replayed_with_new_slots(cache: Any) -> None:
    """Slots, values and positions are drawn anew; some slots are negative, some are past the end."""
    stream, other = torch.cuda.Stream(), make(dim=64, rotary=64, dtype=BF16, cache=cache, device="cuda")
    made = make(dim=64, rotary=64, dtype=BF16, cache=cache, device="cuda")
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            made.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        made.call()
    right = torch.ones((), dtype=torch.bool, device="cuda")
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(REPLAYS):
            drawn = torch.randperm(PAGES * PAGE_SIZE + 6, device="cuda")[:7] - 3
            made.tensors["slot_mapping"].copy_(drawn)
            made.named["positions"].random_(0, 40)
            made.storages[0].normal_()
            for ours, theirs in zip(made.storages, other.storages, strict=True):
                bits(theirs).copy_(bits(ours))
            for n in ("slot_mapping",):
                other.tensors[n].copy_(made.tensors[n])
            other.named["positions"].copy_(made.named["positions"])
            graph.replay()
            other.call(cos=made.named["cos"], sin=made.named["sin"])
            for ours, theirs in zip(made.storages, other.storages, strict=True):
                right &= (bits(ours) == bits(theirs)).all()
    torch.cuda.synchronize()
    assert bool(right)


@pytest.mark.gpu_sample
def test_what_runs_on_another_stream_changes_nothing() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    many = [make(dim=128, rotary=128, dtype=BF16, device="cuda", seed=seed) for seed in range(2)]
    before = [[t.clone() for t in made.storages] for made in many]
    wanted = []
    for made in many:
        made.call()
        wanted.append([t.clone() for t in made.storages])
    torch.cuda.synchronize()
    right = torch.ones((), dtype=torch.bool, device="cuda")
    checked = []
    for _ in range(60):
        for made, stream, was, want in zip(many, streams, before, wanted, strict=True):
            with torch.cuda.stream(stream):
                for t, old in zip(made.storages, was, strict=True):
                    t.copy_(old)
                made.call()
                checked += [(bits(t) == bits(w)).all() for t, w in zip(made.storages, want, strict=True)]
    torch.cuda.synchronize()
    assert bool(right & torch.stack(checked).all())


@pytest.mark.gpu_sample
@pytest.mark.parametrize("cache", [None, FLOAT8])
def test_inductor_compiles_it_whole(cache: Any) -> None:
    def step(qkv: torch.Tensor, both: torch.Tensor, slots: torch.Tensor, named: Any) -> torch.Tensor:
        q, k, v = qkv.split((3, 2, 2), 1)
        return rope_append_(q, k, v, both[:, 0], both[:, 1], slots, **named) * 2.0

    found = []
    for function in (step, torch.compile(step, fullgraph=True)):
        made = make(dim=64, rotary=64, dtype=BF16, cache=cache, lies="together", device="cuda")
        with torch.no_grad():
            # Pages from the first on: torch 2.11 gives custom operators other slices of tensors that start in mid-memory.
            out = function(*made.storages, made.tensors["slot_mapping"], made.named)
        found.append([out, *made.storages])
    for one, other in zip(*found, strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.gpu_sample
def test_pytorchs_own_does_the_same_without_waiting() -> None:
    """PyTorch's operators serve what no kernel takes: a graph, which refuses what waits, captures them."""
    made = make(dim=64, rotary=64, device="cuda", slots=(3, 17, -1, 8, 0, 25, 12))
    made.tensors["v"] = made.tensors["v"].repeat_interleave(2, -1)[..., ::2]  # features with another stride
    assert tuned.explain(rope_append_, **made.tensors, **made.named).rule == "eager"
    wanted = by_hand(on_cpu(made))
    stream, before = torch.cuda.Stream(), [t.clone() for t in made.storages]
    with torch.cuda.stream(stream):
        made.call()
    torch.cuda.synchronize()
    for t, was in zip(made.storages, before, strict=True):
        t.copy_(was)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made.call()
    graph.replay()
    torch.cuda.synchronize()
    for name in ("q", "key_cache", "value_cache"):
        torch.testing.assert_close(made.tensors[name].cpu().double(), wanted[name], rtol=1e-6, atol=4e-6)


# What is large ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
def test_places_past_two_to_the_31_elements() -> None:
    heads, dim, page = 8, 128, 16
    pages = 2**31 // (2 * page * heads * dim) + 5  # of both caches in one tensor
    if torch.cuda.mem_get_info()[0] < 2 * 2 * 2**31:
        pytest.skip("needs 8 GiB of free memory")
    both = torch.zeros(pages, 2, page, heads, dim, dtype=BF16, device="cuda")
    q, k, v = (torch.randn(4, n, dim, device="cuda").to(BF16) for n in (32, heads, heads))
    table = torch.rand(64, dim // 2, device="cuda")
    named: dict[str, Any] = {
        "cos": table.cos(),
        "sin": table.sin(),
        "positions": torch.tensor([3, 9, 27, 5], device="cuda"),
    }
    last = pages * page
    slots = torch.tensor([last - 1, last, 7, last - page], device="cuda")
    wanted = rope_qk(q.clone(), k.clone(), tensor_format="thd", **named)
    rope_append_(q, k, v, both[:, 0], both[:, 1], slots, **named)
    assert torch.equal(q, wanted[0])
    for token, (at, slot) in {0: (-1, -1), 2: (0, 7), 3: (-1, 0)}.items():
        assert torch.equal(both[at, 0, slot], wanted[1][token])  # type: ignore[index]
        assert torch.equal(both[at, 1, slot], v[token])
        both[at, :, slot] = 0
    assert not any(bool(part.any()) for part in both.split(2**12))
