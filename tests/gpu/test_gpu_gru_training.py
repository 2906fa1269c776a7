"""Training GRUs on a real GPU: gradients by kernels against float64 and PyTorch's GRU, in all ways that people train."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import tuned.dispatch
import tuned.nn
from generator.families.gru_backward.reference import inputs
from tests.support import pairwise
from tests.support.gru_training import outputs_of
from tests.support.ports import free_port
from tests.support.processes import BACKSTOP_SECONDS
from tuned.calls.gru import factors, plan, training
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.calls.gru.wavefront import Wave
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_backward.launches import launches
from tuned.families.gru_backward.variant import default_variant, fit
from tuned.launching.launcher import run_steps
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]

ROOT = Path(__file__).parents[2]
AS_GOOD = 1.1  # times PyTorch's error
AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("steps", "rows", "packed"),
    "layers": (1, 2),
    "both": (False, True),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "bias": (True, False),
    "hidden": (20, 96, 256, 520),
    "batch": (1, 5, 33, 130),
    "steps": (1, 7, 40),
    "recompute": (False, True),
}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GruCall]]:
    """Kernels serve gradients whatever rows say; yields the layers whose gradients they computed."""
    found: list[GruCall] = []
    by_kernels = training._by_kernels

    def spied(call: GruCall, *args: Any) -> Any:
        found.append(call)
        return by_kernels(call, *args)

    def choice(call: GruCall) -> Choice:
        spec, size = training.run.spec_of(call, 1)
        gpu = training.gpu_of(call.input.device)
        return Choice("winner", "a test asked for it", fit(default_variant(spec, size), spec, gpu.capability))

    monkeypatch.setattr(plan, "_TRAINED", {})  # only these tests choose these variants
    monkeypatch.setattr(training, "_by_kernels", spied)
    monkeypatch.setattr(training, "_choice", choice)
    monkeypatch.setattr(training.slower, "_least_steps", lambda *_, **__: 0)
    # A checkpoint's first forward counts as one of a gradient.
    monkeypatch.setattr(training.run, "CALLED_LAYER_SAVES_US", 0.0)
    monkeypatch.setattr(training.run, "why_not", lambda _call, **_: None)
    monkeypatch.setattr(training.run, "_parts", _always(training.run._parts))
    yield found
    found.clear()


def _always(parts: Any) -> Any:
    """Kernels serve forwards too: calls that a model leaves to PyTorch get the default variant."""
    from tuned.calls.gru.run import GRU, spec_of  # noqa: PLC0415

    def chosen(call: GruCall, **settings: Any) -> Any:
        found = parts(call, **settings)
        if all(choice.variant is not None for _, _, choice in found):
            return found
        spec, size = spec_of(call, 1)
        capability = training.gpu_of(call.input.device).capability
        variant = GRU.fit(GRU.default_variant(spec, size), spec, capability)
        return [(spec, size, Choice("default", "a test asked for it", variant))] * call.num_layers

    return chosen


def pair(hidden: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> tuple[torch.nn.GRU, tuned.nn.GRU]:
    """PyTorch's module and ours, with the same weights."""
    recompute = settings.pop("recompute", False)
    torch.manual_seed(0)
    theirs = torch.nn.GRU(24, hidden, device="cuda", dtype=dtype, **settings)
    ours = tuned.nn.GRU(24, hidden, device="cuda", dtype=dtype, recompute=recompute, **settings)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def gradients(module: torch.nn.Module, x: Any, hx: torch.Tensor, grads: Any) -> list[torch.Tensor]:
    """Gradients of the input, the first states and all weights."""
    data = x.data if isinstance(x, torch.nn.utils.rnn.PackedSequence) else x
    data.requires_grad_()
    hx = hx.detach().requires_grad_()
    out, h_n = module(x, hx)
    out = out.data if isinstance(out, torch.nn.utils.rnn.PackedSequence) else out
    return list(torch.autograd.grad((out, h_n), [data, hx, *module.parameters()], grads))


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    return [
        ((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-12)).item()
        for a, b in zip(found, wanted, strict=True)
    ]


CASES = pairwise.covering(pairwise.sample(AXES, lambda _knobs: True, 400))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_as_near_to_float64_as_pytorchs(case: dict[str, Any], served: list[GruCall]) -> None:
    rows = case["layout"] == "rows"
    settings = {"num_layers": case["layers"], "bidirectional": case["both"], "bias": case["bias"], "batch_first": rows}
    theirs, ours = pair(case["hidden"], case["dtype"], recompute=case["recompute"], **settings)
    exact = copy.deepcopy(theirs).double()
    steps, batch = case["steps"], case["batch"]
    shape = (batch, steps, 24) if rows else (steps, batch, 24)
    x: Any = torch.randn(shape, device="cuda", dtype=case["dtype"])
    directions = 2 if case["both"] else 1
    hx = torch.randn(case["layers"] * directions, batch, case["hidden"], device="cuda", dtype=case["dtype"])
    double: Any = x.double()
    if case["layout"] == "packed":
        lengths = torch.linspace(steps, max(1, steps // 3), batch).long()
        x, double = pack_padded_sequence(x, lengths), pack_padded_sequence(double, lengths)
        shape = tuple(x.data.shape)
    grads = (
        torch.randn(*shape[:-1], directions * case["hidden"], device="cuda", dtype=case["dtype"]),
        torch.randn_like(hx),
    )
    wanted = gradients(exact, double, hx.double(), tuple(g.double() for g in grads))
    reference = error(gradients(theirs, x, hx, grads), wanted)
    found = gradients(ours, x, hx, grads)
    assert len(served) == case["layers"]
    floor = {torch.float32: 2e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}[case["dtype"]]
    for index, (our, their) in enumerate(zip(error(found, wanted), reference, strict=True)):
        assert our <= max(AS_GOOD * their, floor), (index, our, their)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("both", [False, True])
def test_gradients_of_widened_layers_are_as_near_to_float64_as_pytorchs(
    monkeypatch: pytest.MonkeyPatch, served: list[GruCall], dtype: torch.dtype, *, both: bool
) -> None:
    monkeypatch.setattr(training.run, "narrow_us", lambda *_: 1e9)
    theirs, ours = pair(101, dtype, num_layers=2, bidirectional=both)
    directions = 2 if both else 1
    x = torch.randn(60, 9, 24, device="cuda", dtype=dtype)
    hx = torch.randn(2 * directions, 9, 101, device="cuda", dtype=dtype)
    grads = torch.randn(60, 9, directions * 101, device="cuda", dtype=dtype), torch.randn_like(hx)
    exact = copy.deepcopy(theirs).double()
    wanted = gradients(exact, x.double(), hx.double(), tuple(g.double() for g in grads))
    reference = error(gradients(theirs, x, hx, grads), wanted)
    for _ in range(3):
        found = gradients(ours, x, hx, grads)
        assert all(a.shape == b.shape for a, b in zip(found, wanted, strict=True))
        floor = 2e-3 if dtype == torch.float32 else 5e-3
        for index, (our, their) in enumerate(zip(error(found, wanted), reference, strict=True)):
            assert our <= max(AS_GOOD * their, floor), (index, our, their)
    assert {call.hx.shape[2] for call in served} == {104}


STACKS = [
    # layers, layers at once, hidden, batch, steps, steps of a chunk, dtype, how programs wait, turns
    (2, 2, 96, 5, 40, 16, torch.bfloat16, "spin", 1),
    (3, 3, 256, 16, 37, 8, torch.float16, "spin", 1),  # the last chunk is shorter
    (4, 2, 256, 10, 64, 32, torch.float32, "spin", 1),
    (5, 3, 128, 130, 21, 4, torch.bfloat16, "counter", 4),  # groups of three and of two layers
    (2, 2, 520, 40, 24, 6, torch.bfloat16, "spin", 4),
    (6, 6, 64, 1, 9, 1, torch.float32, "spin", 1),
]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_layers_that_run_at_once_are_as_near_to_float64_as_pytorchs(
    monkeypatch: pytest.MonkeyPatch, stack: Any, *, first: bool
) -> None:
    layers, at_once, hidden, batch, steps, chunk, dtype, exchange, turns = stack
    theirs, _ = pair(hidden, dtype, num_layers=layers, batch_first=first)
    exact = copy.deepcopy(theirs).double()
    shape = (batch, steps, 24) if first else (steps, batch, 24)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    hx = torch.randn(layers, batch, hidden, device="cuda", dtype=dtype)
    grads = torch.randn(*shape[:-1], hidden, device="cuda", dtype=dtype), torch.randn_like(hx)
    wanted = gradients(exact, x.double(), hx.double(), tuple(g.double() for g in grads))
    reference = error(gradients(theirs, x, hx, grads), wanted)

    tile = GruVariant("persistent", "split", 16 if turns == 1 else 32, 8, exchange, num_warps=4, turns=turns)
    monkeypatch.setattr(training, "_planned", lambda *_: Wave(tile, at_once, chunk, 0.0))
    weights = [w.detach() for w in theirs.parameters()]
    call = gru_call(x.detach(), hx, weights, num_layers=layers, batch_first=first)
    with torch.no_grad():
        outputs, gates = outputs_of(call)
    asked = [True] * len(call.tensors)

    def found() -> list[torch.Tensor]:
        return training._stack(call, outputs, gates, asked, grads)  # type: ignore[return-value]

    one_by_one = []
    monkeypatch.setattr(training, "gradients", lambda *a: one_by_one.append(a))
    ours = found()
    assert not one_by_one
    floor = {torch.float32: 2e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    for index, (our, their) in enumerate(zip(error(ours, wanted), reference, strict=True)):
        assert our <= max(AS_GOOD * their, floor), (index, our, their)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = found()
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(ours, captured, strict=True)), "other bits"


def test_the_same_bits_come_from_run_to_run() -> None:
    _, ours = pair(256, num_layers=2)
    x, hx = torch.randn(60, 32, 24, device="cuda").bfloat16(), torch.zeros(2, 32, 256, device="cuda").bfloat16()
    grads = torch.randn(60, 32, 256, device="cuda").bfloat16(), torch.randn_like(hx)
    first = gradients(ours, x, hx, grads)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(ours, x, hx, grads), strict=True))


@pytest.mark.parametrize(("layers", "both"), [(1, False), (1, True), (2, False)])
def test_products_of_parts_are_as_near_to_float64_as_pytorchs_and_the_same_in_a_graph(
    monkeypatch: pytest.MonkeyPatch, served: list[GruCall], layers: int, *, both: bool
) -> None:
    made: list[int] = []
    product = factors._product
    monkeypatch.setattr(factors, "CALLED_PRODUCT", 0)  # as calls too
    monkeypatch.setattr(factors, "_product", lambda *given: made.append(1) or product(*given))
    torch.manual_seed(0)
    settings = {"num_layers": layers, "bidirectional": both, "device": "cuda"}
    theirs, ours = torch.nn.GRU(384, 384, **settings), tuned.nn.GRU(384, 384, **settings)
    ours.load_state_dict(theirs.state_dict())
    x, width = torch.randn(64, 40, 384, device="cuda"), 384 * (1 + both)
    hx = torch.randn(layers * (1 + both), 40, 384, device="cuda")
    grads = torch.randn(64, 40, width, device="cuda"), torch.randn_like(hx)
    wanted = gradients(copy.deepcopy(theirs).double(), x.double(), hx.double(), tuple(g.double() for g in grads))
    reference = error(gradients(theirs, x, hx, grads), wanted)
    found = gradients(ours, x, hx, grads)
    assert served
    assert made
    for index, (our, their) in enumerate(zip(error(found, wanted), reference, strict=True)):
        assert our <= AS_GOOD * their, (index, our, their)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(ours, x, hx, grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(ours, x, hx, grads)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, found, strict=True))


def test_a_captured_step_replays_with_new_inputs(served: list[GruCall]) -> None:
    _, ours = pair(128)
    x, hx = torch.randn(30, 16, 24, device="cuda").bfloat16(), torch.zeros(1, 16, 128, device="cuda").bfloat16()
    grads = torch.randn(30, 16, 128, device="cuda").bfloat16(), torch.randn_like(hx)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(ours, x, hx, grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    served.clear()
    with torch.cuda.graph(graph):
        captured = gradients(ours, x, hx, grads)
    assert served
    for _ in range(1000):
        graph.replay()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, gradients(ours, x, hx, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout_gives_the_gradients_of_none(*, reentrant: bool) -> None:
    _, ours = pair(64, torch.float32, num_layers=2, dropout=0.4)
    x = torch.randn(20, 8, 24, device="cuda", requires_grad=True)

    def trained(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(run(x).square().sum(), [x, *ours.parameters()]))

    plain = trained(lambda x: ours(x)[0])
    if reentrant:  # it needs backward()

        def run(x: torch.Tensor) -> list[torch.Tensor]:
            ours.zero_grad()
            x.grad = None
            torch.manual_seed(3)
            checkpoint(lambda x: ours(x)[0], x, use_reentrant=True).square().sum().backward()  # type: ignore[union-attr]
            return [t.grad for t in (x, *ours.parameters())]  # type: ignore[misc]

        again = run(x)
    else:
        again = trained(lambda x: checkpoint(lambda x: ours(x)[0], x, use_reentrant=False))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_autocast_and_a_scaler_train_as_pytorchs(served: list[GruCall]) -> None:
    theirs, ours = pair(128, torch.float32)
    x = torch.randn(40, 16, 24, device="cuda")
    found = []
    for module in (theirs, ours):
        optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        for _ in range(3):
            with torch.autocast("cuda", torch.float16):
                loss = module(x)[0].float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in module.parameters()])
    assert served
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_parts_of_a_module_may_be_frozen_and_gradients_accumulate(served: list[GruCall]) -> None:
    theirs, ours = pair(64, torch.float32, num_layers=2)
    x = torch.randn(15, 4, 24, device="cuda")
    for module in (theirs, ours):
        module.weight_ih_l0.requires_grad_(requires_grad=False)
        module.bias_hh_l1.requires_grad_(requires_grad=False)
        for _ in range(2):
            module(x)[1].square().sum().backward()
    assert served
    for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert b.grad is not None
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-2 * a.grad.abs().max().item())


def test_a_weight_that_is_computed_gets_its_gradient(served: list[GruCall]) -> None:
    theirs, ours = pair(64, torch.float32)
    x = torch.randn(15, 4, 24, device="cuda")
    grads = []
    for module in (theirs, ours):
        torch.nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
        grads.append(torch.autograd.grad(module(x)[0].sum(), list(module.parameters())))
    assert served
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * a.abs().max().item())


def test_a_penalty_on_a_gradient_has_one() -> None:
    theirs, ours = pair(32, torch.float32)
    x = torch.randn(6, 3, 24, device="cuda", requires_grad=True)
    found = []
    for module in (theirs, ours):
        with torch.backends.cudnn.flags(enabled=False):
            (grad,) = torch.autograd.grad(module(x)[0].square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), list(module.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * a.abs().max().item())


def test_nan_in_a_gradient_reaches_its_sequence_alone_and_nothing_hangs() -> None:
    _, ours = pair(256)
    x = torch.randn(25, 40, 24, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(25, 40, 256, device="cuda").bfloat16()
    grad[20, 7, 3] = torch.nan
    (found,) = torch.autograd.grad(ours(x)[0], x, grad)
    assert found[:21, 7].isnan().all()
    assert not found[21:].isnan().any()
    assert not torch.cat((found[:, :7], found[:, 8:]), 1).isnan().any()


def test_twenty_thousand_steps() -> None:
    theirs, ours = pair(64, torch.float32)
    x = torch.randn(20_000, 2, 24, device="cuda")
    grads = torch.randn(20_000, 2, 64, device="cuda"), torch.zeros(1, 2, 64, device="cuda")
    hx = torch.zeros(1, 2, 64, device="cuda")
    for a, b in zip(gradients(theirs, x, hx, grads), gradients(ours, x, hx, grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * a.abs().max().item())


def test_launches_on_two_streams_beside_gemms_give_the_bits_of_one() -> None:
    """The kernel alone, as cuBLAS promises no bits with several streams: programs that wait must not race."""
    spec, size = GruSpec("bfloat16", 256), GruSize(32, 50)
    variant = fit(default_variant(spec, size), spec, training.gpu_of(torch.device("cuda:0")).capability)
    calls = [inputs(spec, size, "cuda", 0) for _ in range(3)]
    streams, large = [torch.cuda.Stream() for _ in range(3)], torch.randn(8192, 8192, device="cuda").bfloat16()
    run_steps(launches(spec, variant, calls[2]))
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(streams[2]):
            torch.mm(large, large)
        for stream, call in zip(streams, calls[:2], strict=False):
            with torch.cuda.stream(stream):
                run_steps(launches(spec, variant, call))
        torch.cuda.synchronize()
        for call in calls[:2]:
            assert torch.equal(call.out.view(torch.int16), calls[2].out.view(torch.int16))
            assert torch.equal(call.grad_h_0, calls[2].grad_h_0)


def test_two_streams_train_beside_gemms_that_fill_the_gpu() -> None:
    _, ours = pair(256)
    x, hx = torch.randn(50, 32, 24, device="cuda").bfloat16(), torch.zeros(1, 32, 256, device="cuda").bfloat16()
    grads = torch.randn(50, 32, 256, device="cuda").bfloat16(), torch.randn_like(hx)
    wanted = gradients(ours, x, hx, grads)
    streams, large = [torch.cuda.Stream() for _ in range(3)], torch.randn(8192, 8192, device="cuda").bfloat16()
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        with torch.cuda.stream(streams[2]):
            torch.mm(large, large)
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                found.append(gradients(ours, x, hx, grads))
    torch.cuda.synchronize()
    for one in found:  # with several streams at once cuBLAS promises no bits
        for a, b in zip(one, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


def test_sequences_by_their_bounds_some_of_them_empty(served: list[GruCall]) -> None:
    theirs, _ = pair(96, torch.float32)
    weights = [w.detach().requires_grad_() for w in theirs.parameters()]
    bounds = torch.tensor([0, 5, 5, 12, 31], dtype=torch.int32, device="cuda")
    x = torch.randn(31, 24, device="cuda", requires_grad=True)
    hx = torch.randn(1, 4, 96, device="cuda", requires_grad=True)
    grad = torch.randn(31, 96, device="cuda")
    out, h_n = tuned.dispatch.gru(x, hx, weights, cu_seqlens=bounds, max_seqlen=19)
    found = torch.autograd.grad((out, h_n), (x, hx, *weights), (grad, torch.ones_like(h_n)))
    assert served
    wanted: list[torch.Tensor] = [torch.zeros_like(t) for t in (x, hx, *weights)]
    for row, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if begin == end:
            wanted[1][:, row] = 1
            continue
        part, state = x[begin:end, None].detach().requires_grad_(), hx[:, row : row + 1].detach().requires_grad_()
        o, h = torch.nn.GRU.forward(theirs, part, state)
        grads = torch.autograd.grad(
            (o, h), (part, state, *theirs.parameters()), (grad[begin:end, None], torch.ones_like(h))
        )
        wanted[0][begin:end] = grads[0][:, 0]
        wanted[1][:, row] = grads[1][:, 0]
        wanted[2:] = [total + more for total, more in zip(wanted[2:], grads[2:], strict=True)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())


def test_recomputing_takes_no_more_memory_than_pytorchs() -> None:
    theirs, ours = pair(512, recompute=True)
    x = torch.randn(128, 64, 24, device="cuda").bfloat16()
    peaks = []
    for module in (theirs, ours):
        for _ in range(2):
            module(x)[0].sum().backward()
        module.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x)[0].sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0]


def test_ranks_of_distributed_data_parallel_have_the_gradients_of_the_whole_batch() -> None:
    """On two GPUs by NCCL; on one by Gloo, where the ranks share the GPU."""
    port, ranks = free_port(), 2
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.distributed", str(rank), str(ranks), str(port)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    told = [one.communicate(timeout=BACKSTOP_SECONDS)[0] for one in started]
    assert [one.returncode for one in started] == [0] * ranks, told


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_known_call_trains_as_a_new_one_does(
    monkeypatch: pytest.MonkeyPatch, served: list[GruCall], layers: int, both: bool, marked: bool
) -> None:
    def in_one_launch(call: GruCall, **_: Any) -> Any:  # for one layer; forms with a launch for each step have no plan
        spec, size = training.run.spec_of(call, 1)
        variant = GruVariant("persistent", "split", 16, 8, "counter", num_warps=4)
        return [(spec, size, Choice("winner", "a test asked for it", variant))] * call.num_layers

    monkeypatch.setattr(training.run, "_parts", in_one_launch)
    torch.manual_seed(3)
    model = tuned.nn.GRU(48, 64, layers, bidirectional=both, device="cuda")
    x, weights = torch.randn(19, 5, 48, device="cuda"), list(model.parameters())
    resets = torch.rand(19, 5, device="cuda") < 0.3 if marked else None
    found = []
    for _ in range(3):  # first a new call, then a known one
        out, h_n = model(x, resets=resets)
        found.append([out, h_n, *torch.autograd.grad(out.square().mean() + h_n.sum(), weights)])
    assert plan._TRAINED
    assert len(served) == 3 * layers
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
    with torch.no_grad():
        weights[0].mul_(0.5)  # the plan keeps no values of weights
    changed = model(x, resets=resets)[0]
    assert torch.equal(changed, model(x, resets=resets)[0])
    assert not torch.equal(changed, found[0][0])
    if resets is not None:  # nor values of marks
        resets.logical_not_()
        other = model(x, resets=resets)[0]
        assert not torch.equal(other, changed)
        monkeypatch.setattr(plan, "_TRAINED", {})
        assert torch.equal(model(x, resets=resets)[0], other), "as a new call"
