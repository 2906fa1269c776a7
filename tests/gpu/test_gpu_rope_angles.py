"""Angles that need a gradient on a GPU: as exact as float32, equal in each run, in graphs, compiled, with canaries."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned
from generator.families.rope.texts import angle_gradient_specs
from generator.measuring.check import check, guarded, inputs_of, intact, probe
from generator.workload import WORKLOADS
from tests.support.run import run
from tuned.dispatch import rope, rope_qk
from tuned.families.rope.launches import launches
from tuned.families.rope.spec import RopeSize
from tuned.families.rope.variant import default_variant

if TYPE_CHECKING:
    from collections.abc import Callable

F32, BF16 = torch.float32, torch.bfloat16
B, S, ROWS = 2, 37, 160  # no tile divides S; ROWS differs from the number of heads, which the call would warn of
WORSE = 1.1  # times the error (root mean square) of PyTorch's operators in float32
REPLAYS = 200


@dataclasses.dataclass(frozen=True)
class Learned:
    """One call: its heads and features, the source of its angles, and its positions."""

    source: str = "freqs"  # "cos_sin", "inv_freq"
    heads: int = 32
    key_heads: int = 8
    dim: int = 128
    rotary: int = 128
    dtype: torch.dtype = BF16
    place: str = "order"  # "ids", of which many are equal; "axes"
    interleaved: bool = False
    inplace: bool = False

    @property
    def name(self) -> str:
        fields = dataclasses.fields(self)
        return "-".join(str(getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default) or "usual"


CASES = [
    Learned(),
    Learned("cos_sin", place="ids"),
    Learned("inv_freq", 16, 16, 64, 64, place="axes", interleaved=True),
    Learned("freqs", 5, 3, 80, 40, dtype=F32, place="ids", inplace=True),
    Learned("cos_sin", 64, 4, 256, 256, dtype=torch.float16, interleaved=True),
]
SMALL = Learned("cos_sin", 3, 2, 64, 64, dtype=F32, place="ids")


def drawn(case: Learned, seq: int = S) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """The query and the key, the angles, and the other arguments."""
    draw = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(B, seq, n, case.dim, device="cuda", generator=draw) for n in (case.heads, case.key_heads))
    table = torch.rand(ROWS + seq, case.rotary // 2, device="cuda", generator=draw) * 6
    angles = {
        "freqs": {"freqs": table},
        "cos_sin": {"cos": table.cos(), "sin": table.sin()},
        "inv_freq": {"inv_freq": table[0] / 6},
    }[case.source]
    words: dict[str, Any] = {"interleaved": case.interleaved, "inplace": case.inplace, "angle_entries": "pair"}
    if case.place != "order":
        shape = (B, seq) if case.place == "ids" else (2, B, seq)
        words["positions"] = torch.randint(0, 40, shape, device="cuda", generator=draw)
    if case.place == "axes":
        words["sections"] = (case.rotary // 4, case.rotary // 4)
    return [t.to(case.dtype) for t in (q, k)], angles, words


def gradients(
    tensors: list[torch.Tensor], angles: dict[str, torch.Tensor], words: dict[str, Any]
) -> list[torch.Tensor]:
    """Gradients of the query, the key and the angles, for fixed gradients of the results."""
    leaves = [t.detach().requires_grad_() for t in (*tensors, *angles.values())]
    own = dict(zip(angles, leaves[2:], strict=True))
    with torch.enable_grad():
        outs = rope_qk(leaves[0] * 1, leaves[1] * 1, **own, **words)
        # All dtypes can represent these numbers, so the float64 reference gets the same.
        over = [((torch.arange(t.numel(), device=t.device) % 61 - 30) / 32).view(t.shape).to(t.dtype) for t in outs]
        return list(torch.autograd.grad(outs, leaves, over))


def by_pytorch(tensors: list[torch.Tensor], angles: dict[str, torch.Tensor], words: dict[str, Any], dtype: torch.dtype) -> list[Any]:  # fmt: skip
    """The same by PyTorch's operators on a CPU."""
    own = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in words.items()}
    wide = {n: t.cpu() if n in ("freqs", "inv_freq") else t.cpu().to(dtype) for n, t in angles.items()}
    return [t.double() for t in gradients([t.cpu().to(dtype) for t in tensors], wide, own)]


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_as_good_as_float32s(case: Learned) -> None:
    made = drawn(case)
    found = [t.double().cpu() for t in gradients(*made)]
    wanted, rounded = by_pytorch(*made, torch.float64), by_pytorch(*made, F32)
    for ours, theirs, right, like in zip(found, rounded, wanted, (*made[0], *made[1].values()), strict=True):
        unit = torch.finfo(like.dtype).eps
        allowed = WORSE * (theirs - right).square().mean().sqrt() + unit * right.square().mean().sqrt()
        assert (ours - right).square().mean().sqrt() <= allowed


@pytest.mark.gpu_sample
def test_nothing_is_read_or_written_around_the_tensors() -> None:
    """Results lie between canaries and are NaN before the call; so are the sums."""
    work, size = WORKLOADS["rope"], RopeSize(2, 37)
    for plain in angle_gradient_specs():
        for head_dim, rotary, entries in ((80, 80, "pair"), (72, 40, "feature")):
            spec = dataclasses.replace(
                plain,
                heads=5,
                key_heads=3,
                head_dim=head_dim,
                rotary_dim=rotary,
                angle_entries=entries,
                dtype="float16",
            )
            call = probe(work.inputs(spec, size, "cuda", 0))
            sums = guarded(tuple(call.angle_grad.shape), F32, "cuda")
            call = dataclasses.replace(call, angle_grad=sums)
            wanted, bound = work.reference(spec, call)
            before = {name: tensor.clone() for name, tensor in inputs_of(call).items()}
            run(launches(spec, default_variant(spec, size), call))
            check(call.out, wanted, bound, {n: (t, before[n]) for n, t in inputs_of(call).items()})
            assert bool(intact(sums))
            assert bool(sums.isfinite().all())


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", [SMALL, *CASES[:3]], ids=lambda case: case.name)
def test_each_run_has_the_same_bits(case: Learned) -> None:
    """Also for tokens that share an angle, in many programs; the memory was filled with NaN before."""
    made = drawn(case, 2220)
    first = gradients(*made)
    for _ in range(20):
        poisoned = [torch.full_like(t, torch.nan) for t in first]
        del poisoned  # the next results get this memory
        assert all(torch.equal(a, b) for a, b in zip(gradients(*made), first, strict=True))


def captured(step: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", [SMALL, CASES[0], CASES[2]], ids=lambda case: case.name)
def test_a_graph_of_training_replays_with_new_positions(case: Learned) -> None:
    tensors, angles, words = drawn(case)
    graph, out = captured(lambda: gradients(tensors, angles, words))
    for turn in range(REPLAYS):
        if "positions" in words and turn == REPLAYS - 1:
            words["positions"].copy_(words["positions"].flip(-1))
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(out, gradients(tensors, angles, words), strict=True))


@pytest.mark.gpu_sample
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_it_is_the_same(inplace: bool) -> None:
    tensors, angles, words = drawn(dataclasses.replace(SMALL, inplace=inplace))

    def step(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return rope_qk(q * 1, k * 1, cos=cos, sin=sin, **words)

    found = []
    for function in (step, torch.compile(step, fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in (*tensors, *angles.values())]
        outs = function(*leaves)
        found.append(torch.autograd.grad([t.square().sum() for t in outs], leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu_sample
def test_the_backward_keeps_no_float32_of_x() -> None:
    """The peak of a step is the input, the result and their gradients in 16 bits, and tensors without a heads axis."""
    x = torch.randn(4, 2048, 32, 128, device="cuda", dtype=BF16)
    freqs = (torch.rand(2048, 64, device="cuda") * 6).requires_grad_()
    assert tuned.explain(rope, x, freqs, angle_entries="pair").rule != "eager"
    grad = torch.ones_like(x)

    def step() -> None:
        leaf = x.detach().requires_grad_()
        rope(leaf, freqs, angle_entries="pair").backward(grad)
        freqs.grad = None

    step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert torch.cuda.max_memory_allocated() - held < 2.5 * x.numel() * x.element_size()
