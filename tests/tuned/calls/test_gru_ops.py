"""The operators tuned::gru, tuned::gru_cell and tuned::linear_cat, and the modules under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import tuned.calls.recurrent.ops
import tuned.nn
from tests.support.gru_calls import FEATURES, B, H, T, kernels, weights_of
from tuned.dispatch import gru, gru_cell, linear_cat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuned.calls.gru.arguments import GruCall

pytestmark = pytest.mark.interpreter

__all__ = ["kernels"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def gru_arguments(kind: str) -> tuple[Any, ...]:
    """Arguments of tuned::gru; every tensor requires a gradient."""
    layers, directions, bias, first = {"plain": (1, 1, False, False), "deep": (2, 2, True, True)}.get(
        kind, (2, 2, True, False)
    )
    shape = {"plain": (T, B, FEATURES), "deep": (B, T, FEATURES)}.get(kind, (6, FEATURES))
    x = torch.randn(shape, requires_grad=True)
    hx = torch.randn(layers * directions, B, H, requires_grad=True)
    weights = [w.requires_grad_() for w in weights_of(layers, directions, bias)]
    lengths = {
        "packed": (torch.tensor([3, 2, 1]), None, None),
        "bounds": (None, torch.tensor([0, 1, 1, 6], dtype=torch.int32), 5),
    }.get(kind, (None, None, None))
    return (x, hx, weights, bias, layers, directions == 2, first, *lengths, None)


@pytest.mark.parametrize("kind", ["plain", "deep", "packed", "bounds"])
def test_the_sequence_operator_keeps_the_rules_of_operators(kind: str) -> None:
    arguments = gru_arguments(kind)
    torch.library.opcheck(torch.ops.tuned.gru.default, arguments)
    output, h_n = torch.ops.tuned.gru(*arguments)
    weights = [w.detach() for w in arguments[2]]
    fixed = (arguments[0].detach(), arguments[1].detach(), weights, *arguments[3:])
    wanted = [True, False, *[True] * len(weights)]
    grads = (torch.ones_like(output), torch.ones_like(h_n), wanted, output.detach())
    torch.library.opcheck(torch.ops.tuned.gru_backward.default, (*grads, *fixed))
    # The operator is traced as above whatever is left out; what is left out changes what it computes and its shapes.
    of_none = ("test_schema", "test_faketensor")
    for given in ((None, *grads[1:]), (grads[0], None, *grads[2:]), (*grads[:3], None)):
        torch.library.opcheck(torch.ops.tuned.gru_backward.default, (*given, *fixed), test_utils=of_none)


def test_the_step_and_linear_operators_keep_the_rules_of_operators() -> None:
    x, h = torch.randn(B, FEATURES, requires_grad=True), torch.randn(B, H, requires_grad=True)
    weights = [w.requires_grad_() for w in weights_of(1, 1)]
    for segments, rest in (
        ([x], weights),
        ([s.detach().requires_grad_() for s in x.split((2, 4), 1)], [*weights[:2], None, None]),
    ):
        torch.library.opcheck(torch.ops.tuned.gru_cell.default, (segments, h, *rest))
        fixed = [None if t is None else t.detach() for t in (h, *rest)]
        wanted = [True] * (len(segments) + 1 + sum(t is not None for t in rest))
        apart = [s.detach().clone() for s in segments]
        torch.library.opcheck(torch.ops.tuned.gru_cell_backward.default, (torch.ones(B, H), wanted, apart, *fixed))
        torch.library.opcheck(torch.ops.tuned.linear_cat.default, (segments, weights[0], rest[2]))


@pytest.mark.parametrize("kind", ["plain", "deep", "packed", "bounds"])
def test_the_gradients_of_the_operator_are_pytorchs(kind: str) -> None:
    x, hx, weights, bias, layers, both, first, sizes, bounds, longest, _ = arguments = gru_arguments(kind)
    named = {"bias": bias, "num_layers": layers, "bidirectional": both, "batch_first": first}
    leaves = [x, hx, *weights]

    def grads(results: Any) -> Any:
        return torch.autograd.grad(results[0].square().sum() + results[1].sin().sum(), leaves, retain_graph=True)

    wanted = gru(x, hx, weights, **named, batch_sizes=sizes, cu_seqlens=bounds, max_seqlen=longest)
    torch.testing.assert_close(grads(torch.ops.tuned.gru(*arguments)), grads(wanted))
    alone = torch.ops.tuned.gru(x, hx.detach(), [w.detach() for w in weights], *arguments[3:])
    found, (expected, *_) = torch.autograd.grad(alone[0].sum(), x), torch.autograd.grad(wanted[0].sum(), leaves)
    torch.testing.assert_close(found[0], expected)


def test_sequences_without_a_row_have_gradients_too() -> None:
    hx, weights = torch.randn(1, 2, H, requires_grad=True), weights_of(1, 1)
    bounds = torch.zeros(3, dtype=torch.int32)
    _, h_n = torch.ops.tuned.gru(torch.randn(0, FEATURES), hx, weights, True, 1, False, False, None, bounds, 0, None)
    (found,) = torch.autograd.grad(h_n.sum(), hx)
    assert torch.equal(found, torch.ones_like(hx))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_be_all_that_is_used(used: int, layers: int) -> None:
    module, x = tuned.nn.GRU(FEATURES, H, layers), torch.randn(T, B, FEATURES)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found, wanted = (
        torch.autograd.grad(by(x)[used].square().sum(), list(module.parameters())) for by in (compiled, module)
    )
    torch.testing.assert_close(found, wanted)
    weights = [w.detach().requires_grad_() for w in module.parameters()]
    again = torch.ops.tuned.gru(
        x, torch.zeros(layers, B, H), weights, True, layers, False, False, None, None, None, None
    )
    torch.testing.assert_close(torch.autograd.grad(again[used].square().sum(), weights), wanted)


def test_gradients_that_share_memory_are_copied() -> None:
    """Gradients may share memory: those of both biases, all gradients of cuDNN, and one that is passed on unchanged."""
    given, buffer, tensor = torch.ones(4), torch.arange(8.0), torch.zeros(4)
    found = [buffer[:4], buffer[4:], buffer[:4], given, torch.zeros(()).expand(4), None, None]
    wanted = [True] * 6 + [False]
    grads = tuned.calls.recurrent.ops._apart(found, [tensor] * 7, wanted, [given])
    assert len({t.untyped_storage().data_ptr() for t in (*grads, given, tensor)}) == 9
    assert all(t.is_contiguous() and not t.storage_offset() for t in grads)
    assert [t.tolist() for t in grads[:4]] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [1, 1, 1, 1]]
    assert [t.tolist() for t in grads[4:]] == [[0.0] * 4, [0.0] * 4, []]


def test_a_gradient_of_gradients_is_refused_in_words() -> None:
    arguments = gru_arguments("plain")
    x, weights = arguments[0], arguments[2]
    (grad,) = torch.autograd.grad(torch.ops.tuned.gru(*arguments)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"backward through tuned\.gru_backward\.default"):
        grad.square().sum().backward()
    compiled = torch.compile(lambda a, b: gru(a, b, weights, bias=False)[0], backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(*arguments[:2]).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.square().sum().backward()


def counted(graph: torch.fx.GraphModule) -> list[int]:
    """The number of GRU operators in a graph, and of operators of its gradient."""
    targets = [str(node.target) for node in graph.graph.nodes]
    return [targets.count(f"tuned.{name}.default") for name in ("gru", "gru_backward")]


@pytest.mark.parametrize(("needed", "operators"), [("both", 3), ("a tensor", 1), ("mode", 1)])
def test_with_a_gradient_each_layer_is_an_operator(needed: str, operators: int) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(counted(graph))
        return graph

    module = tuned.nn.GRU(FEATURES, H, 3).requires_grad_(needed != "mode")
    with torch.set_grad_enabled(needed != "a tensor"):
        torch.compile(module, backend=backend, fullgraph=True)(torch.randn(T, B, FEATURES))
    assert graphs == [[operators, 0]]


def test_the_backward_of_a_compiled_model_has_no_second_forward() -> None:
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415 - seconds of every process that collects
    from torch._functorch.aot_autograd import make_boxed_func  # noqa: PLC0415
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: PLC0415

    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(counted(graph))
        return make_boxed_func(graph.forward)

    module = tuned.nn.GRU(FEATURES, H, 2)
    by_compiler = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x = torch.randn(T, B, FEATURES)
    torch.compile(module, backend=by_compiler, fullgraph=True)(x)[0].sum().backward()
    assert graphs == [[2, 0], [0, 2]]


def test_make_fx_sees_an_operator_and_the_operator_of_its_gradient() -> None:
    arguments = gru_arguments("plain")

    def step(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        output, _ = torch.ops.tuned.gru(x, arguments[1], list(weights), *arguments[3:])
        return torch.autograd.grad(output.square().sum(), [x, *weights])

    graph = make_fx(step)(arguments[0], *arguments[2])
    assert counted(graph) == [1, 1]
    (backward,) = graph.graph.find_nodes(op="call_function", target=torch.ops.tuned.gru_backward.default)
    assert backward.args[0] is not None
    assert backward.args[1] is None, "no zeros are made for a result that is not used"
    torch.testing.assert_close(graph(arguments[0], *arguments[2]), list(step(arguments[0], *arguments[2])))


@pytest.mark.parametrize("kind", ["plain", "deep"])
def test_a_gradient_is_counted_as_the_products_three_times(kind: str) -> None:
    arguments = gru_arguments(kind)
    with FlopCounterMode(display=False) as counter:
        torch.ops.tuned.gru(*arguments)[0].sum().backward()
    products = 2 * T * B * sum(w.numel() for w in arguments[2] if w.ndim == 2)
    assert dict(counter.get_flop_counts()["Global"]) == {
        torch.ops.tuned.gru: products,
        torch.ops.tuned.gru_backward: 3 * products,
    }


class Decoder(torch.nn.Module):
    """A model with everything that torch.compile has an operator for."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.gru, self.cell = (
            tuned.nn.GRU(FEATURES, H, 2, bidirectional=True, **kwargs),
            tuned.nn.GRUCell(FEATURES + 2 * H, H),
        )
        self.out = torch.nn.Linear(H + FEATURES, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, h_n = self.gru(x * 2)
        state = self.cell((x[-1], output[-1]), h_n[0])
        return linear_cat((state, x[0]), self.out.weight, self.out.bias)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_torch_compile_takes_a_model_whole(backend: str, grad: bool) -> None:
    model, x = Decoder(), torch.randn(T, B, FEATURES)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(grad):
        found, wanted = compiled(x), model(x)
    torch.testing.assert_close(found, wanted)
    if grad:
        first, second = (torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (found, wanted))
        torch.testing.assert_close(first, second)


def test_a_traced_model_calls_operators_which_call_kernels(kernels: list[GruCall]) -> None:
    model, x = Decoder(), torch.randn(T, B, FEATURES)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.code))
        return graph

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    (code,) = graphs
    assert [code.count(f"torch.ops.tuned.{name}.default(") for name in ("gru", "gru_cell", "linear_cat")] == [
        1,
        1,
        1,
    ], code
    assert len(kernels) == 1


def test_new_lengths_and_batches_do_not_compile_again_and_again() -> None:
    from torch._dynamo.testing import CompileCounter  # noqa: PLC0415 - 2 s of every process that collects

    model, counter = Decoder(), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for seq, batch in ((5, 3), (6, 4), (7, 5), (9, 2), (2, 9)):
            x = torch.randn(seq, batch, FEATURES)
            torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count <= 2, "one of fixed sizes, one for all others"


def test_packed_sequences_by_their_bounds_are_compiled() -> None:
    weights, bounds = weights_of(1, 1), torch.tensor([0, 1, 1, 6], dtype=torch.int32)

    def run(x: torch.Tensor, hx: torch.Tensor) -> Any:
        return gru(x, hx, weights, cu_seqlens=bounds, max_seqlen=5)

    x, hx = torch.randn(6, FEATURES), torch.randn(1, B, H)
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x, hx), run(x, hx))
    bounds.copy_(torch.tensor([0, 6, 6, 6]))
    with pytest.raises(ValueError, match="max_seqlen=5 is less than the longest length, 6"):
        torch.compile(run, backend="eager", fullgraph=True)(x, hx)


def test_a_packed_sequence_goes_through_torch_compile() -> None:
    module = tuned.nn.GRU(FEATURES, H)
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, FEATURES) for n in (2, 4)], enforce_sorted=False)
    found, wanted = torch.compile(module, backend="eager")(packed), module(packed)
    torch.testing.assert_close((found[0].data, found[1]), (wanted[0].data, wanted[1]))


def test_a_step_in_place_is_compiled() -> None:
    weights, x, h = weights_of(1, 1), torch.randn(B, FEATURES), torch.randn(B, H)
    wanted = gru_cell(x, h, *weights)
    found = torch.compile(lambda a, b: gru_cell(a, b, *weights, inplace=True), backend="aot_eager", fullgraph=True)(
        x, h
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(h, wanted)


def test_dropout_is_compiled_and_its_gradients_know_what_was_dropped() -> None:
    module = tuned.nn.GRU(FEATURES, H, 3, dropout=0.5, bidirectional=True)
    x = torch.randn(T, B, FEATURES)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for function in (compiled, module):
        torch.manual_seed(3)
        output, h_n = function(x)
        results.append(
            (output, h_n, *torch.autograd.grad(output.square().sum() + h_n.sum(), list(module.parameters())))
        )
    torch.testing.assert_close(*results)
    assert not torch.equal(compiled(x)[0], compiled(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_compiled(dtype: torch.dtype) -> None:
    model, x = Decoder(), torch.randn(T, B, FEATURES).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, wanted = torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x)
        states = torch.compile(model.gru, backend="aot_eager", fullgraph=True)(x), model.gru(x)
    assert [t.dtype for t in states[0]] == [t.dtype for t in states[1]]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


def test_a_cell_of_an_existing_model_is_compiled_while_patched() -> None:
    cell, x, h = torch.nn.GRUCell(FEATURES, H), torch.randn(B, FEATURES), torch.randn(B, H)
    with tuned.nn.patched(), torch.no_grad():
        found = torch.compile(cell, backend="eager", fullgraph=True)(x, h)
    torch.testing.assert_close(found, cell(x, h).detach())
