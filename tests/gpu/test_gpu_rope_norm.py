"""A rotation with a norm before it on a GPU: right, the same in each run, in graphs, on streams, compiled, large."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.families.rope.texts import norm_specs
from generator.measuring.check import check, inputs_of, probe
from generator.workload import WORKLOADS
from tests.gpu.norms import Made, Norm, judge, make, own, with_gradients
from tests.support.run import run
from tuned.dispatch import qk_norm_rope, qkv_norm_rope_
from tuned.families.rope import variant as rope_variant
from tuned.families.rope.launches import launches
from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.families.rope.variant import default_variant

if TYPE_CHECKING:
    from collections.abc import Callable

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Widths, heads, dtypes, layouts and strides: each occurs a few times, in as few kernels as possible.
CASES = [
    Norm(),
    Norm(32, 8),
    Norm(1, 1, 64, 64, dtype=F32, layout="sbhd", lies="swapped"),
    Norm(3, 2, 72, 72, dtype=F16, layout="bhsd", lies="gaps"),
    Norm(3, 1, 80, 40, dtype=F32, layout="thd", place="packed", inplace=True),
    Norm(40, 8, 96, 96, layout="thd", place="ids", lies="qkv"),
    Norm(8, 4, 256, 256, zero_centered=True, lies="qkv", inplace=True),
    Norm(2, 1, 512, 128, rotated="last", dtype=F16, place="ids", inplace=True),
    Norm(3, 1, 512, 256, dtype=F32, interleaved=True),
    Norm(64, 4, lies="gaps", inplace=True, layout="sbhd"),
    Norm(40, 8, norm="all"),
    Norm(1, 1, 80, 80, norm="all", dtype=F32, layout="bhsd", lies="swapped"),
    Norm(3, 2, 96, 64, norm="all", dtype=F16, layout="thd", place="packed", interleaved=True),
    Norm(128, 128, norm="all", layout="thd", place="ids", inplace=True),
]
IN_CHUNKS = [
    Norm(24, 8, norm="all"),
    Norm(20, 4, 96, 96, norm="all", dtype=F16, layout="thd", place="packed", interleaved=True),
    Norm(12, 12, 128, 64, norm="all", lies="gaps", inplace=True, rotated="last"),
]
SMALL = Norm(3, 2, 64, 64, dtype=F32)
BOTH = [SMALL, dataclasses.replace(SMALL, norm="all")]
REPLAYS = 1000


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_gradients_are_as_good_as_float32s(case: Norm) -> None:
    judge(case, "cuda")


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", IN_CHUNKS, ids=lambda case: case.name)
def test_few_tokens_in_chunks_are_as_good(case: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_variant, "CHUNKED_TOKENS", 1)
    spec = RopeSpec(
        "bshd", "bfloat16", case.heads, case.dim, case.rotary, angles="cos_sin", key_heads=case.key_heads, norm="all"
    )
    assert default_variant(spec, RopeSize(1, 64)).chunk_heads
    judge(case, "cuda")


@pytest.mark.gpu_sample
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("norm", ["head", "all"])
def test_nothing_is_read_or_written_around_the_tensors(norm: str, inplace: bool) -> None:
    """Results lie between canaries and are NaN before the call, as in each measurement of a variant."""
    work, size = WORKLOADS["rope"], RopeSize(2, 37)
    for plain in norm_specs():
        if plain.inplace != inplace or plain.angles != "cos_sin":
            continue
        for head_dim, rotary in ((80, 80), (72, 40)):
            spec = dataclasses.replace(
                plain, heads=5, key_heads=3, head_dim=head_dim, rotary_dim=rotary, norm=norm, dtype="float16"
            )
            call = probe(work.inputs(spec, size, "cuda", 0))
            wanted, bound = work.reference(spec, call)
            before = {name: tensor.clone() for name, tensor in inputs_of(call).items()}
            run(launches(spec, default_variant(spec, size), call))
            check(call.out, wanted, bound, {n: (t, before[n]) for n, t in inputs_of(call).items()})


def same(a: tuple[Any, ...] | list[Any], b: tuple[Any, ...] | list[Any]) -> torch.Tensor:
    """Whether all have the same bits, computed on the device; NaN equals NaN."""
    return torch.stack([((x == y) | (x.isnan() & y.isnan())).all() for x, y in zip(a, b, strict=True)]).all()


def grads_of(made: Made, seed: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator(made.tensors[0].device).manual_seed(seed)
    return [torch.randn(t.shape, generator=draw, device=t.device).to(t.dtype) for t in made.tensors]


@pytest.mark.gpu_sample
@pytest.mark.parametrize("norm", ["head", "all"])
def test_each_run_has_the_same_bits(norm: str) -> None:
    """There are more tiles than programs, so each program sums several; the memory was filled with NaN before."""
    case = Norm(32, 8, norm=norm)
    made = make(case, "cuda")
    made.tensors = [t.repeat(1, 60, 1, 1) for t in made.tensors]  # 2,220 tokens
    table = torch.rand(made.tensors[0].shape[1], 64, device="cuda")
    made.named |= {"cos": table.cos(), "sin": table.sin()}
    grads = grads_of(made)
    first = with_gradients(case, made, grads, None)
    for _ in range(20):
        poisoned = [torch.full_like(t, torch.nan) for t in first]
        del poisoned  # the next results get this memory
        assert bool(same(with_gradients(case, made, grads, None), first))


# In graphs, on streams, compiled ------------------------------------------------------------------------------------------


def forward(made: Made, grads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    del grads
    with torch.no_grad():
        return made.call()


def training(made: Made, grads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [
            *(t.detach().requires_grad_() for t in made.tensors),
            *(t.detach().requires_grad_() for t in made.weights),
        ]
        outs = dataclasses.replace(made, weights=leaves[2:]).call(*leaves[:2])
        return (*(t.detach() for t in outs), *torch.autograd.grad(outs, leaves, grads))


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", BOTH, ids=["head", "all"])
@pytest.mark.parametrize("step", [forward, training])
def test_a_graph_is_replayed_a_thousand_times_with_new_values(step: Callable[..., Any], case: Norm) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        made = make(case, "cuda")
        grads = grads_of(made)
        for _ in range(3):
            step(made, grads)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = step(made, grads)
    right = torch.ones((), dtype=torch.bool, device="cuda")
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS):
            for t in (*made.tensors, *made.weights, *grads):
                t.normal_()
            graph.replay()
            right &= same(outs, step(made, grads))
    torch.cuda.synchronize()
    assert bool(right)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", BOTH, ids=["head", "all"])
@pytest.mark.parametrize("beside", ["itself", "a product"])
def test_what_runs_on_another_stream_changes_nothing(beside: str, case: Norm) -> None:
    """Calls of two streams in turn; and a call beside a product of matrices that fills the GPU."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    many = [make(case, "cuda", seed) for seed in range(2)]
    grads = [grads_of(made, 5 + seed) for seed, made in enumerate(many)]
    wanted = [training(made, own_grads) for made, own_grads in zip(many, grads, strict=True)]
    torch.cuda.synchronize()
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    right = torch.ones((), dtype=torch.bool, device="cuda")
    checked = []
    for _ in range(60):
        if beside == "a product":
            with torch.cuda.stream(streams[1]):
                left @ left
        for at in range(1 if beside == "a product" else 2):
            with torch.cuda.stream(streams[at]):
                found = training(many[at], grads[at])
                checked.append(same(found, wanted[at]))
    torch.cuda.synchronize()
    right &= torch.stack(checked).all()
    assert bool(right)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("inplace", [False, True])
def test_inductor_compiles_it_whole(inplace: bool) -> None:
    made = make(Norm(8, 2, 128, 128, zero_centered=True), "cuda")
    grads = grads_of(made)

    def step(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> Any:
        named = made.named | {"inplace": inplace}
        a, b = qk_norm_rope(q * 1.0, k * 1.0, q_weight, k_weight, **named)
        assert b is not None
        return a * 2.0, b * 2.0

    found = []
    for function in (step, torch.compile(step, fullgraph=True)):
        leaves = [t.detach().clone().requires_grad_() for t in (*made.tensors, *made.weights)]
        outs = function(*leaves)
        with torch.no_grad():
            alone = function(*leaves)
        found.append([*(t.detach() for t in outs), *alone, *torch.autograd.grad(outs, leaves, grads)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("axis_of_3", [False, True])
def test_a_packed_qkv_keeps_its_values(axis_of_3: bool) -> None:
    shape = (2, 37, 3, 4, 128) if axis_of_3 else (2, 37, 4 + 2 * 2, 128)
    table = torch.rand(64, 64, device="cuda")
    weights = [torch.rand(128, device="cuda") + 0.5 for _ in range(2)]
    named: dict[str, Any] = {"cos": table.cos(), "sin": table.sin()}
    for _ in range(3):
        qkv = torch.randn(shape, device="cuda").bfloat16()
        whole = qkv.flatten(2, 3).clone() if axis_of_3 else qkv.clone()
        keys = 4 if axis_of_3 else 2
        q, k = whole[:, :, :4].contiguous(), whole[:, :, 4 : 4 + keys].contiguous()
        wanted = torch.cat((*qk_norm_rope(q, k, *weights, **named), whole[:, :, 4 + keys :]), 2)  # type: ignore[arg-type]
        assert qkv_norm_rope_(qkv, *weights, **named, kv_heads=None if axis_of_3 else 2) is qkv
        assert torch.equal(qkv.flatten(2, 3) if axis_of_3 else qkv, wanted)


# What is not finite, and what is large ------------------------------------------------------------------------------------


def stays(device: str, norm: str, value: float) -> None:
    """One feature of one head of a query is not finite: tests which results it may reach."""
    case = dataclasses.replace(SMALL, norm=norm)
    made = make(case, device)
    grads = grads_of(made)
    clean = with_gradients(case, made, grads, None)
    made.tensors[0][1, 7, 2, 5] = value
    found = with_gradients(case, made, grads, None)
    reached = torch.zeros_like(found[0], dtype=torch.bool)
    reached[1, 7, slice(None) if norm == "all" else 2] = True
    for index in (0, 2):  # the result, and its gradient
        assert bool(same([found[index][~reached]], [clean[index][~reached]])), index
        assert not bool(found[index][reached].isfinite().all()), index
    for index in (1, 3, 5):  # the result and the gradient of the key
        assert bool(same([found[index]], [clean[index]])), index
    theirs = with_gradients(case, made, grads, torch.float32)  # its gradients are sums over tokens too
    assert torch.equal(found[4].isfinite(), theirs[4].isfinite())
    assert not bool(found[4].isfinite().all())


@pytest.mark.gpu_sample
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("norm", ["head", "all"])
def test_what_is_not_finite_stays_in_its_token(norm: str, value: float) -> None:
    stays("cuda", norm, value)


HEADS, DIM = 64, 128
TOKENS = 2**31 // (HEADS * DIM) + 3  # elements pass 2^31 before the last tokens


def far(device: str, tokens: int, *, inplace: bool) -> None:
    """The first, the middle and the last tokens of a long sequence against float64."""
    looked_at = torch.tensor([0, 1, tokens // 2, tokens // 2 + 1, *range(tokens - 6, tokens)], device=device)
    q = torch.empty(1, tokens, HEADS, DIM, dtype=torch.bfloat16, device=device)
    draw = torch.Generator(device).manual_seed(0)
    for part in q[0].split(2**14):
        part.normal_(generator=draw)
    k = torch.randn(1, tokens, 1, DIM, device=device, generator=draw).bfloat16()
    weights = [1.0 + 0.3 * torch.randn(DIM, device=device, generator=draw) for _ in range(2)]
    rates = 10000.0 ** -(torch.arange(DIM // 2, device=device) / (DIM // 2))
    before = [q[:, looked_at].clone(), k[:, looked_at].clone()]
    with torch.no_grad():
        found = qk_norm_rope(q, k, *weights, inv_freq=rates, inplace=inplace)
    radians = looked_at[:, None].float() * rates
    named = {"cos": radians.double().cos(), "sin": radians.double().sin()}
    case = Norm(HEADS, 1)
    for out, wanted in zip(found, own(case, before, weights, named, torch.float64), strict=True):
        assert out is not None
        torch.testing.assert_close(out[:, looked_at].double(), wanted, rtol=4e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_two_to_the_31_elements(inplace: bool) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < (6 if inplace else 11) * 2**30:
        pytest.skip("needs 11 GiB of free memory, in place 6")
    far("cuda", TOKENS, inplace=inplace)
