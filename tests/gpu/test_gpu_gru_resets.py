"""States reset in mid-sequence on a real GPU: kernels serve by default, as near to float64 as cuDNN over pieces."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.nn
from tests.fuzz import forced
from tests.support import pairwise
from tuned.calls.gru import eager, training
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.dispatch import gru

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]

WORSE, FLOOR = (
    1.15,
    0.3,
)  # than cuDNN over pieces, whose sums are of other lengths; units, as cuDNN multiplies single steps without TF32
MOST = 1024 * 33  # units of all rows, in float32; with more no gradient has room
AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("steps", "rows", "packed", "thd"),
    "layers": (1, 2),
    "both": (False, True),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "bias": (True, False),
    "hidden": (20, 96, 256, 520, 1024),
    "batch": (1, 5, 33, 130),
    "steps": (1, 7, 60),
    "odds": (0.0, 0.02, 0.4, 1.0),
    "strided": (False, True),
}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GruCall]]:
    """The layers whose gradients kernels computed."""
    found: list[GruCall] = []
    by_kernels = training._by_kernels

    def spied(call: GruCall, *args: Any) -> Any:
        found.append(call)
        return by_kernels(call, *args)

    monkeypatch.setattr(training, "_by_kernels", spied)
    yield found
    found.clear()


def lengths_of(knobs: dict[str, Any]) -> list[int]:
    rows, steps = knobs["batch"], knobs["steps"]
    return [max(1, steps - row * steps // (2 * rows)) for row in range(rows)]


def call_of(knobs: dict[str, Any]) -> GruCall:
    torch.manual_seed(0)
    lengths, packing = lengths_of(knobs), knobs["layout"] in {"packed", "thd"}
    shape: tuple[int, ...] = (knobs["steps"], knobs["batch"])
    named: dict[str, Any] = {"bias": knobs["bias"], "num_layers": knobs["layers"], "bidirectional": knobs["both"]}
    if knobs["layout"] == "rows":
        shape, named["batch_first"] = shape[::-1], True
    elif knobs["layout"] == "packed":
        named["batch_sizes"] = torch.tensor([sum(n > t for n in lengths) for t in range(lengths[0])])
    elif knobs["layout"] == "thd":
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        named |= {"cu_seqlens": ends.to(torch.int32), "max_seqlen": lengths[0]}
    if packing:
        shape = (sum(lengths),)
    hidden, ways = knobs["hidden"], 2 if knobs["both"] else 1
    made = torch.nn.GRU(24, hidden, knobs["layers"], knobs["bias"], bidirectional=knobs["both"], device="cuda")
    weights = [p.detach().to(knobs["dtype"]) for p in made.parameters()]
    marks = torch.rand((*shape, 3 if knobs["strided"] else 1), device="cuda") < knobs["odds"]
    hx = torch.randn(knobs["layers"] * ways, knobs["batch"], hidden, device="cuda", dtype=knobs["dtype"])
    x = torch.randn(*shape, 24, device="cuda", dtype=knobs["dtype"])
    return gru_call(x, hx, weights, resets=marks[..., 0], **named)


def with_gradients(call: GruCall, run: Any, given: Any = None) -> list[torch.Tensor]:
    """The output, h_n, and the gradients of all tensors."""
    leaves = [t.detach().requires_grad_() for t in call.tensors]
    results = run(dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:])))
    if given is None:
        given = [torch.ones_like(t) for t in results]
    return [*results, *torch.autograd.grad(results, leaves, given)]


def public(call: GruCall) -> Any:
    settings = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    named = {name: settings[name] for name in ("num_layers", "bidirectional", "batch_first", "resets")}
    lengths = {name: settings[name] for name in ("batch_sizes", "cu_seqlens", "max_seqlen")}
    return gru(call.input, call.hx, call.weights, bias=call.has_biases, **named, **lengths)


def exact_of(call: GruCall) -> GruCall:
    """The same call in float64 on the CPU."""
    cast = [t.detach().cpu().double() for t in call.tensors]
    moved = {n: None if (t := getattr(call, n)) is None else t.cpu() for n in ("cu_seqlens", "resets")}
    return dataclasses.replace(call, input=cast[0], hx=cast[1], weights=tuple(cast[2:]), **moved)


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    return [
        ((a.cpu().double() - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-12)).item()
        for a, b in zip(found, wanted, strict=True)
    ]


COMBINATIONS = pairwise.covering(pairwise.sample(AXES, lambda _: True, pairwise.on_a_gpu(1500)))


@pytest.mark.parametrize("knobs", COMBINATIONS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_results_and_gradients_are_as_good_as_cudnns_over_pieces(
    served: list[GruCall], knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(knobs)
    torch.manual_seed(1)
    plain = with_gradients(call, eager.gru)
    given = [torch.randn_like(t) for t in plain[:2]]
    wanted = with_gradients(exact_of(call), eager.gru, [g.cpu().double() for g in given])
    theirs = error(with_gradients(call, eager.gru, given), wanted)
    assert not served
    fits = training._choice(call).variant is not None
    assert fits or (call.input.dtype == torch.float32 and knobs["hidden"] * knobs["batch"] > MOST)
    if fits:
        monkeypatch.setattr(eager, "gru", lambda _call: pytest.fail("sequences were cut"))
    found = with_gradients(call, public, given)
    assert len(served) == (call.num_layers if fits else 0)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-11}[knobs["dtype"]]
    for index, (ours, other) in enumerate(zip(error(found, wanted), theirs, strict=True)):
        assert ours <= WORSE * other + FLOOR * unit, (index, ours, other)
    if fits:  # else PyTorch runs the forward only where a gradient is needed
        with torch.no_grad():
            for ours, kept in zip(public(call), found, strict=False):
                assert torch.equal(ours, kept.detach())


def test_a_replayed_graph_reads_new_marks() -> None:
    module = tuned.nn.GRU(64, 256, device="cuda", dtype=torch.bfloat16).requires_grad_(requires_grad=False)
    x, marks = torch.randn(50, 16, 64, device="cuda", dtype=torch.bfloat16), torch.zeros(50, 16, device="cuda").bool()
    module(x, resets=marks)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, h_n = module(x, resets=marks)
    for seed in range(5):
        torch.manual_seed(seed)
        marks.copy_(torch.rand(50, 16, device="cuda") < 0.1)
        graph.replay()
        for ours, wanted in zip((output, h_n), module(x, resets=marks), strict=True):
            assert torch.equal(ours, wanted)


def test_nan_does_not_pass_a_reset() -> None:
    for both in (False, True):
        module = tuned.nn.GRU(8, 96, bidirectional=both, device="cuda")
        x, marks = torch.randn(9, 40, 8, device="cuda"), torch.zeros(9, 40, device="cuda").bool()
        x[4, 7], marks[4, 7], marks[5, 7] = torch.nan, True, True
        x.requires_grad_()
        output, _ = module(x, resets=marks)
        bad = output.detach().isnan().any(-1)
        assert bad.nonzero().tolist() == [[4, 7]]
        (grad,) = torch.autograd.grad(output[:, :7].sum() + output[:, 8:].sum() + output[5:, 7].sum(), x)
        assert not grad[5:].isnan().any()
        assert not grad[:, :7].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_every_time(dtype: torch.dtype) -> None:
    knobs = {"layout": "steps", "layers": 1, "both": True, "dtype": dtype, "bias": True, "hidden": 512, "batch": 32}
    call = call_of({**knobs, "steps": 200, "odds": 0.01, "strided": False})
    first = with_gradients(call, public)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, with_gradients(call, public), strict=True))


def test_packed_rows_that_end_beside_longer_ones_are_waited_for() -> None:
    """By every variant that spins: the last row of the longer ones lies beside a shorter one, in the same thread."""
    spinning = [i for i, row in enumerate(forced.rows("gru_backward")) if row.variant.exchange == "spin"]
    assert spinning
    module = torch.nn.GRU(48, 600, device="cuda")
    sizes, marks = torch.tensor([17, 10]), torch.zeros(27, device="cuda").bool()
    marks[8] = marks[22] = True
    for index in spinning:
        for _ in range(20):
            x = torch.randn(27, 48, device="cuda")
            hx = torch.randn(1, 17, 600, device="cuda", requires_grad=True)
            with forced.forced("gru_backward", index):
                output, h_n = gru(x, hx, list(module.parameters()), batch_sizes=sizes, resets=marks)
                (grad,) = torch.autograd.grad(output.sum() + h_n.sum(), hx)
            assert grad.isfinite().all(), index
