"""RoPE's hot path on a real GPU: nothing stale in eager, on streams, in graphs, on another device; large tensors."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.calls.rope.call
import tuned.calls.rope.plan
from tests.support.rope_calls import CHOICES, Case, build, forget
from tests.support.rope_plans import CASES, check, rotated
from tuned.calls.rope import call as rope_call
from tuned.dispatch import rope, rope_qk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuned.launching.plan import DirectLaunch

ROOT = Path(__file__).parents[2]
CHANGES = [(field, value) for field, values in CHOICES.items() for value in values]
# All changes that compile other code would take minutes: these are words of a kernel's text and its constants.
TEXT = ("layout", "head_dim", "kv_heads", "dtype", "source", "entries", "rotary", "rotated", "interleaved", "direction")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Records each launch as "public" or "direct"."""
    plan, seen = tuned.calls.rope.plan, []
    public, direct_launch = plan.run_public, plan.direct_launch

    def heard(*arguments: Any) -> Any:
        seen.append("public")
        return public(*arguments)

    def direct(*arguments: Any) -> DirectLaunch | None:
        made = direct_launch(*arguments)
        if made is None:
            return None

        def run(*given: Any) -> None:
            seen.append("direct")
            made.run(*given)

        return made._replace(run=run)

    monkeypatch.setattr(plan, "run_public", heard)
    monkeypatch.setattr(plan, "direct_launch", direct)
    forget()
    yield seen
    forget()


# Nothing stale ------------------------------------------------------------------------------------------------------------


SAMPLED = ("plain", "pair in place", "training", "tokens")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu_sample if name in SAMPLED else pytest.mark.gpu) for name in CASES]
)
def test_a_call_that_differs_in_one_thing_from_one_seen_before_is_right(launched: list[str], name: str) -> None:
    base = CASES[name]
    for field, value in CHANGES:
        changed = dataclasses.replace(base, **{field: value})
        if field not in TEXT and changed != base:
            for case in (base, changed, changed):
                check(case, "cuda")
    assert launched.count("direct") > launched.count("public")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_nothing_stale_is_launched_whatever_came_before(launched: list[str], seed: int) -> None:
    """Calls on the current stream and on others, in any order; each case is an earlier one with two changes."""
    drawn = random.Random(seed)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(6):
        cases = [CASES[drawn.choice(sorted(CASES))]]
        for _ in range(10):
            cases.append(dataclasses.replace(drawn.choice(cases), **dict(drawn.sample(CHANGES, 2))))
        for case in cases + drawn.choices(cases, k=20):
            with torch.cuda.stream(drawn.choice(streams)):
                check(case, "cuda")
            torch.cuda.synchronize()
    assert "direct" in launched


@pytest.mark.gpu_sample
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", ["plain packed in place", "pair in place", "decode", "qkv in place"])
def test_a_launch_is_on_the_stream_of_the_call(name: str) -> None:
    """The tensors are filled late on another stream: a launch on the wrong stream would rotate the old values."""
    case, stream = CASES[name], torch.cuda.Stream()
    given, settings, _ = build(case, "cuda")
    values = [t.clone() for t in rotated(given)]
    for _ in range(3):
        rope_call.call(*given, tuple(settings))
    wanted = rope_call.run_eager(
        given._replace(x=values[0], key=values[1] if len(values) > 1 else None), settings._replace(inplace=False)
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles: some hundredths of a second
        for t, value in zip(rotated(given), values, strict=True):
            t.copy_(value)
        rope_call.call(*given, tuple(settings))
    stream.synchronize()
    torch.testing.assert_close(
        tuple(rotated(given)), wanted if isinstance(wanted, tuple) else (wanted,), rtol=1e-5, atol=2e-5
    )


REPLAYED = {
    "offset": Case(seq=1, place="offset", source="inv_freq", inplace=True),
    "offset of a table": Case(seq=1, place="offset", source="cache", index_dtype=torch.int32),
    "ids": Case("thd", seq=1, batch=8, place="ids", source="cache", inplace=True, view="packed", key_view="packed"),
    "starts": Case(seq=3, place="starts", source="freqs"),
    "packed": Case("thd", sequences=3, source="cos_sin"),
    "qkv": Case(key_heads=None, kv_heads=1, place="ids", source="cache", inplace=True),
    "training": Case(x_grad="made", key_grad="made"),
}


@pytest.mark.gpu_sample
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", REPLAYED)
def test_a_graph_replays_with_new_values_and_new_positions(launched: list[str], name: str, known: bool) -> None:
    # A backward runs on the streams of its forward. If a node is made on the legacy stream, as x would be here, PyTorch's
    # operators cannot be captured either.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given, settings, made = build(REPLAYED[name], "cuda")
    state = [t for t in (given.positions, given.offset) if isinstance(t, torch.Tensor)]

    def run() -> tuple[torch.Tensor, ...]:
        out = rope_call.call(*given, tuple(settings))
        outs = out if isinstance(out, tuple) else (out,)
        return (*outs, *(torch.autograd.grad([t.pow(2).sum() for t in outs], made, retain_graph=True) if made else ()))

    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    if not known:  # compiled, but without a plan: as a first call under capture finds it
        tuned.calls.rope.call._PLANS.clear()
        tuned.calls.rope.plan._COMPILED.clear()
        tuned.calls.rope.lengths._CLASSES.clear()
    launched.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = run()
    assert set(launched) == {"direct" if known else "public"}
    for turn in range(4):
        for t in state:
            t.random_(0, 9)
        sources = made or rotated(given)
        with torch.no_grad():
            for t in sources:
                t.normal_()
            if made:  # the graph starts after the leaves
                for t, leaf in zip(rotated(given), made, strict=True):
                    t.copy_(leaf)
        fresh = given._replace(
            x=given.x.detach().clone().requires_grad_(bool(made)),
            key=None if given.key is None else given.key.detach().clone().requires_grad_(bool(made)),
        )
        wanted = rope_call.run_eager(fresh, settings._replace(inplace=False))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        if made:
            wanted = (*wanted, *torch.autograd.grad([t.pow(2).sum() for t in wanted], rotated(fresh)))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(outs, wanted, rtol=1e-5, atol=5e-5, msg=lambda text, n=turn: f"replay {n}: {text}")


@pytest.mark.gpu_sample
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_training_step_is_captured_whole(launched: list[str], inplace: bool, known: bool) -> None:
    """As in PyTorch's notes on CUDA graphs: parameters are made before, on the legacy stream; all else in the capture."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, device="cuda"))
    x, freqs = torch.randn(2, 4, 6, 16, device="cuda"), torch.rand(8, 8, device="cuda")

    def step(rotate: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
        q, k = (x * weight).split([4, 2], 2)
        out = rotate(q * 1, k * 1)
        loss = sum((t.pow(2).sum() for t in out if t is not None), torch.zeros((), device="cuda"))
        loss.backward()
        return loss.detach()

    def ours(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return rope_qk(q, k, freqs, angle_entries="pair", inplace=inplace)

    def own(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = freqs[:4].cos()[:, None], freqs[:4].sin()[:, None]
        (a, b), (c, d) = q.chunk(2, -1), k.chunk(2, -1)
        return (
            torch.cat((a * cos - b * sin, b * cos + a * sin), -1),
            torch.cat((c * cos - d * sin, d * cos + c * sin), -1),
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(ours)
    torch.cuda.current_stream().wait_stream(side)
    if not known:
        forget()
    weight.grad = None
    launched.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(ours)
    assert set(launched) == {"direct" if known else "public"}
    assert weight.grad is not None
    grad = weight.grad
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        weight.grad = None
        wanted = step(own)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(grad, weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_features_that_lie_gigabytes_apart_are_found(interleaved: bool, inplace: bool) -> None:
    far = 2**30  # elements: the offsets of the third and later features do not fit into 32 bits
    if torch.cuda.mem_get_info()[0] < 9 * far:
        pytest.skip("needs 9 GiB of free memory")
    x = torch.empty(3 * far + 1, dtype=torch.float16, device="cuda").as_strided((1, 1, 1, 4), (4, 4, 4, far))
    key = torch.empty(0, dtype=torch.float16, device="cuda").new_empty((1, 1, 1, 4))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16, device="cuda")
    for freqs in (torch.rand(1, 2, device="cuda"), torch.rand(1, 4, device="cuda")[:, ::2]):
        x.copy_(values.view(1, 1, 1, 4))
        key.copy_(x)
        wanted = rope(key, freqs, angle_entries="pair", interleaved=interleaved)
        found = rope(x, freqs, angle_entries="pair", interleaved=interleaved, inplace=inplace)
        torch.testing.assert_close(found.contiguous(), wanted)


@pytest.mark.gpu_sample
@pytest.mark.usefixtures("launched")
def test_tensors_of_another_device_are_rotated_there() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name in ("plain", "pair in place", "decode", "training"):
        for _ in range(2):
            for current in (0, 1):
                with torch.cuda.device(current):
                    for device in ("cuda:0", "cuda:1"):
                        for _ in range(2):
                            check(CASES[name], device)
                    assert torch.cuda.current_device() == current


@pytest.mark.gpu_sample
def test_a_profiler_that_listens_hears_every_launch(launched: list[str]) -> None:
    from triton import knobs  # noqa: PLC0415 - needs a GPU

    heard: list[str] = []

    def listen(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        for case in (CASES["plain"], CASES["pair in place"], CASES["training"]):
            for _ in range(2):
                check(case, "cuda")
            launched.clear()
            heard.clear()
            chain.add(listen)
            try:
                check(case, "cuda")
            finally:
                chain.remove(listen)
            assert set(launched) == {"public"}
            assert len(heard) == len(launched)
            assert all(name.startswith("rope_") for name in heard)
            launched.clear()
            heard.clear()
            check(case, "cuda")
            assert set(launched) == {"direct"}
            assert heard == []


SAFE = """
import torch, tuned.launching.launcher, tuned.calls.rope.plan
from tests.support.rope_plans import CASES, check
for name in ("plain", "pair in place", "training", "tokens"):
    for _ in range(3):
        check(CASES[name], "cuda")
assert tuned.launching.launcher._PROBED == {0: False}, tuned.launching.launcher._PROBED
print("safe")
"""


@pytest.mark.gpu_sample
def test_safe_launches_publicly_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAFE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TUNED_DISPATCH": "safe", "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "safe"


WARMED_BY_A_KERNEL = """
import torch, tuned.dispatch

def drawn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.float16)

with torch.no_grad():
    given = drawn(2, 16), drawn(2, 128), drawn(384, 16), drawn(384, 128)
    tuned.dispatch.gru_cell(*given)
    segments = drawn(3, 8), drawn(3, 24)
    weight = drawn(40, 32)
    tuned.dispatch.linear_cat(segments, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tuned.dispatch.gru_cell(*given), tuned.dispatch.linear_cat(segments, weight)
    graph.replay()
    wanted = torch.gru_cell(*given), torch.cat(segments, -1) @ weight.t()
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
print("captured")
"""


@pytest.mark.gpu_sample
def test_what_a_kernel_warmed_up_is_captured_in_a_process_that_has_multiplied_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARMED_BY_A_KERNEL], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "captured"


# What is large ------------------------------------------------------------------------------------------------------------

HEADS, DIM = 64, 128
TOKENS = 2**31 // (HEADS * DIM) + 3  # elements pass 2^31 before the last tokens
LOOKED_AT = [0, 1, TOKENS // 2, TOKENS // 2 + 1, *range(TOKENS - 6, TOKENS)]


def exact(x: torch.Tensor, radians: torch.Tensor) -> torch.Tensor:
    """Rotates rows [n, h, d], style half, by angles [n, d / 2], in float64."""
    first, second = x.double().chunk(2, -1)
    cos, sin = radians.double().cos()[:, None], radians.double().sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("source", ["freqs", "inv_freq", "ids"])
def test_more_than_two_to_the_31_elements_in_place(source: str, layout: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * 2**30:
        pytest.skip("needs 6 GiB of free memory")
    shape = (1, TOKENS, HEADS, DIM) if layout == "bshd" else (TOKENS, HEADS, DIM)
    q = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    flat = q.view(TOKENS, HEADS, DIM)
    generator = torch.Generator("cuda").manual_seed(0)
    for part in flat.split(2**14):
        part.normal_(generator=generator)
    k = torch.randn(*shape[:-2], 1, DIM, device="cuda", generator=generator).bfloat16()
    before, key_before = flat[LOOKED_AT].clone(), k.view(TOKENS, 1, DIM)[LOOKED_AT].clone()
    rates = 10000.0 ** -(torch.arange(DIM // 2, device="cuda") / (DIM // 2))
    ids = torch.arange(TOKENS, device="cuda").flip(0) if source == "ids" else torch.arange(TOKENS, device="cuda")
    radians = ids[:, None].float() * rates  # rounded once
    named: dict[str, Any] = {"freqs": radians, "angle_entries": "pair"}
    if source == "inv_freq":
        named = {"inv_freq": rates}
    if source == "ids":
        whole = torch.arange(TOKENS, device="cuda")[:, None].float() * rates
        named = {"cos": whole.cos(), "sin": whole.sin(), "positions": ids}
    if layout == "thd" and source != "ids":
        named["cu_seqlens"] = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
    rope_qk(q, k, tensor_format=layout, inplace=True, **named)
    wanted = exact(before, radians[LOOKED_AT])
    torch.testing.assert_close(flat[LOOKED_AT].double(), wanted, rtol=4e-3, atol=1e-3)
    key_wanted = exact(key_before, radians[LOOKED_AT])
    torch.testing.assert_close(k.view(TOKENS, 1, DIM)[LOOKED_AT].double(), key_wanted, rtol=4e-3, atol=1e-3)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("first", [100_000, 131_071, 1_000_003, 2**24 - 8])
@pytest.mark.parametrize("source", ["freqs", "inv_freq", "inv_freq on the device"])
def test_far_positions_are_as_good_as_near_ones(source: str, first: int) -> None:
    rates = 10000.0 ** -(torch.arange(DIM // 2, device="cuda") / (DIM // 2))
    positions = first + torch.arange(7, device="cuda")
    radians = positions[:, None].float() * rates
    x = torch.randn(2, 7, 3, DIM, device="cuda")
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "freqs": lambda: rope(x, radians, angle_entries="pair"),
        "inv_freq": lambda: rope(x, inv_freq=rates, offset=first),
        "inv_freq on the device": lambda: rope(x, inv_freq=rates, offset=torch.tensor(first, device="cuda")),
    }
    wanted = torch.stack([exact(row, radians) for row in x])
    for _ in range(3):
        torch.testing.assert_close(calls[source]().double(), wanted, rtol=0, atol=5e-6)
