"""GRUs under transforms of torch.func, compiled or not, torch.export and torch.fx: as torch.nn's modules do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence

import tuned.nn
from tests.support.gru_calls import FEATURES, B, H, T
from tuned.dispatch import gru, gru_cell, linear_cat
from tuned.launching import left

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.randn(T, B, FEATURES, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(H, 2 * FEATURES, generator=torch.Generator().manual_seed(1))
MARKS = torch.zeros(T, B, dtype=torch.bool)
MARKS[2, 0] = MARKS[0, 1] = True
BOUNDS = torch.tensor([0, 3, 3, T * B], dtype=torch.int32)


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(2)
    GRU, CELL = tuned.nn.GRU(FEATURES, H), tuned.nn.GRUCell(FEATURES, H)


def packed(x: torch.Tensor) -> torch.Tensor:
    weights = list(GRU.parameters())
    return gru(x.flatten(0, 1), x.new_zeros(1, 3, H), weights, cu_seqlens=BOUNDS, max_seqlen=T * B)[0]


CALLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "gru": (lambda x: GRU(x)[0], X),
    "gru_cell": (CELL, X[0]),
    "linear_cat": (lambda x: linear_cat((x, x), WEIGHT), X[0]),
}
READ: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "resets": (lambda x: GRU(x, resets=MARKS)[0], X),
    "cu_seqlens": (packed, X),
}


def jvp(call: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.jvp(call, (x,), (x.flip(0),))[1]
    return found


def grad(call: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: call(x).square().sum())(x)


def vmap(call: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.vmap(call)(torch.stack((x, x.flip(0))))
    return found


@pytest.mark.filterwarnings("ignore")  # warnings of PyTorch's vmap of torch.gru_cell, and of Dynamo's look at .grad
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transform", [jvp, grad, vmap])
def test_a_transform_is_compiled_as_it_runs(transform: Any, name: str) -> None:
    """Our operators have no rule for transforms: the derivative in a tangent would come out as 0."""
    if (transform, name) == (vmap, "gru"):
        pytest.skip("PyTorch has no vmap of torch.gru")
    call, x = CALLS[name]
    torch._dynamo.reset()
    found = torch.compile(lambda x: transform(call, x), backend="aot_eager")(x)
    assert found.abs().max() > 0
    torch.testing.assert_close(found, transform(call, x))


@pytest.mark.parametrize("name", READ)
def test_what_is_read_on_a_cpu_has_transforms(name: str) -> None:
    """Transforms do not follow torch.gru of packed sequences, which serves these calls everywhere else."""
    call, x = READ[name]
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(call(leaf).square().sum(), leaf)
    torch.testing.assert_close(grad(call, x), wanted)
    step = 1e-4 * x.flip(0).double()
    GRU.double()
    try:
        with torch.no_grad():
            wanted = (call(x + step) - call(x - step)) / 2e-4
        torch.testing.assert_close(jvp(call, x.double()), wanted, rtol=1e-4, atol=1e-6)
    finally:
        GRU.float()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_export_is_pytorchs_own_and_runs_without_these_operators(name: str, *, dynamic: bool, strict: bool) -> None:
    call, x = CALLS[name]

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x)

    model: torch.nn.Module = {"gru": GRU, "gru_cell": CELL}.get(name, Model())  # type: ignore[call-overload]
    shapes = ({x.dim() - 2: torch.export.Dim("batch")},) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict)
    assert "ops.tuned" not in program.graph_module.code
    more = torch.cat((x, x), -2) if dynamic else x
    torch.testing.assert_close(program.module()(more), model(more))


def test_sizes_that_a_tracer_has_not_decided_are_not_remembered() -> None:
    before = sum(map(len, left.LEFT.values()))
    weights = [p.detach() for p in CELL.parameters()]

    def call(
        x: Any, h: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any
    ) -> torch.Tensor:  # make_fx counts the arguments
        return gru_cell(x, h, w_ih, w_hh, b_ih, b_hh)

    graph = make_fx(call, tracing_mode="symbolic")(X[0], torch.zeros(B, H), *weights)
    assert sum(map(len, left.LEFT.values())) == before
    torch.testing.assert_close(graph(X[:, 0], torch.zeros(T, H), *weights), CELL(X[:, 0]).detach())


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of values that become constants
def test_a_traced_pack_may_have_another_number_of_sequences() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = GRU

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            h_n: torch.Tensor = self.gru(pack_padded_sequence(x, lengths))[1]
            return h_n

    model = Model()
    traced = torch.jit.trace(model, (X[:, :2], torch.tensor([T, 2])))
    given = X[:, :1].repeat(1, 4, 1), torch.tensor([T, 4, 2, 1])
    torch.testing.assert_close(traced(*given), model(*given))


class Both(torch.nn.Module):
    """A module of a sequence with a state, and of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.cell = GRU, CELL

    def forward(self, x: torch.Tensor, h: torch.Tensor, marks: Any = None) -> Any:
        output, h_n = self.gru(x, h) if marks is None else self.gru(x, h, resets=marks)
        return self.cell(x[0], output[-1]), h_n


@pytest.mark.parametrize("marked", [False, True])
def test_fx_takes_a_module_as_one_call_as_those_of_torch_nn(*, marked: bool) -> None:
    model, given = Both(), (X, torch.randn(1, B, H), *([MARKS] if marked else []))
    traced = torch.fx.symbolic_trace(model, None if marked else {"marks": None})
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_module"] == ["gru", "cell"]
    torch.testing.assert_close(traced(*given), model(*given))


class Tupled(torch.nn.Module):
    """A module of a step that gets segments, and of a sequence that is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.cell = GRU, CELL

    def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Any:
        output, h_n = self.gru(torch.nn.utils.rnn.PackedSequence(x, torch.tensor([2, 1])))
        return output.data, h_n, self.cell((first, second))


def test_fx_takes_a_module_that_gets_a_tuple_as_one_call() -> None:
    model, given = Tupled(), (X[0, :3], X[0, :, :1], X[0, :, 1:])
    traced = torch.fx.symbolic_trace(model)
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_module"] == ["gru", "cell"]
    torch.testing.assert_close(traced(*given), model(*given))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ["resets", "cu_seqlens"])
def test_what_make_fx_traces_reads_lengths_and_resets_anew(name: str, mode: str) -> None:
    """PyTorch's operators need the values: a graph used to keep those of the call that was traced."""
    weights = [p.detach() for p in GRU.parameters()]

    def run(x: torch.Tensor, given: torch.Tensor, weights: Any) -> torch.Tensor:
        if name == "resets":
            return gru(x, x.new_zeros(1, B, H), weights, resets=given)[0]
        return gru(x.flatten(0, 1), x.new_zeros(1, 3, H), weights, cu_seqlens=given, max_seqlen=T * B)[0]

    first, second = (MARKS, ~MARKS) if name == "resets" else (BOUNDS, torch.tensor([0, 1, 4, T * B]).int())
    traced = make_fx(run, tracing_mode=mode)(X, first, weights)
    for given in (first, second):
        torch.testing.assert_close(traced(X, given, weights), run(X, given, weights))
    assert not torch.equal(run(X, first, weights), run(X, second, weights))


def test_a_compiled_step_in_place_that_needs_a_gradient_says_why() -> None:
    def run(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return gru_cell(x, h, *CELL.parameters(), inplace=True)

    with pytest.raises(
        Exception, match="h is overwritten, and its old value is needed for a gradient; use inplace=False"
    ):
        torch.compile(run, backend="eager", fullgraph=True)(X[0], torch.zeros(B, H, requires_grad=True))


def test_a_compiled_call_that_is_refused_says_why() -> None:
    with pytest.raises(Exception, match=f"input must have input_size={FEATURES} features, got 7"):
        torch.compile(GRU, backend="eager", fullgraph=True)(torch.randn(T, B, 7))


def test_a_step_under_autocast_takes_segments_of_two_dtypes() -> None:
    cell = CELL
    parts = X[0, :, :1].bfloat16(), X[0, :, 1:]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(cell(parts), cell(torch.cat(parts, -1)))
    with pytest.raises(TypeError, match="all segments of x must have one dtype and device"):
        cell(parts)
