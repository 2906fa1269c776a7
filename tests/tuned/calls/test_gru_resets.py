"""States that are reset in mid-sequence: by kernels, by PyTorch over pieces of sequences; and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import tuned.nn
from tests.support.gru_running import VARIANTS, H, call_of, interpreted
from tests.support.gru_training import ONE, TURNS, assert_alike, backward, choose
from tests.support.run import DEVICE, INTERPRETED
from tuned.calls.gru import eager, plan, run, training
from tuned.calls.recurrent import ops
from tuned.dispatch import gru, gru_cell
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.lookup.lookup import Choice, Gpu
from tuned.lookup.table import tables

if TYPE_CHECKING:
    from tuned.calls.gru.arguments import GruCall

__all__ = ["backward", "interpreted"]

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru_resets.py has these on a GPU")

LAYOUTS = ("dense", "packed", "thd")
H200 = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")


def marked(call: GruCall, seed: int = 0) -> GruCall:
    """The call with about a third of its steps marked, the first and the last of sequences among them."""
    marks = torch.rand(call.input.shape[:-1], generator=torch.Generator().manual_seed(seed)) < 0.35
    marks.view(-1)[[0, 1, 2, -1]] = True
    return dataclasses.replace(call, resets=marks.to(call.input.device))


def places(call: GruCall) -> list[list[tuple[int, ...]]]:
    """For each sequence, the indices of its tokens in order."""
    if call.batch_sizes is not None:
        starts = call.batch_sizes.cumsum(0) - call.batch_sizes
        steps = range(len(starts))
        return [
            [(int(starts[t]) + b,) for t in steps if b < call.batch_sizes[t]] for b in range(int(call.batch_sizes[0]))
        ]
    if call.cu_seqlens is not None:
        bounds = call.cu_seqlens.tolist()
        return [[(row,) for row in range(begin, end)] for begin, end in itertools.pairwise(bounds)]
    first, second = call.input.shape[:2]
    if call.batch_first:
        return [[(b, t) for t in range(second)] for b in range(first)]
    return [[(t, b) for t in range(first)] for b in range(second)]


def oracle(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, step by step, one sequence at a time: a mark cuts between its token and the token before it."""
    each, directions = 4 if call.has_biases else 2, 2 if call.bidirectional else 1
    x, states = call.input, list(call.hx)
    for layer in range(call.num_layers):
        columns: dict[Any, Any] = {}
        for direction in range(directions):
            cell = layer * directions + direction
            weights = call.weights[cell * each : (cell + 1) * each]
            last = []
            for row, tokens in enumerate(places(call)):
                h = call.hx[cell][row : row + 1]
                order = tokens[::-1] if direction else tokens
                for step, token in enumerate(order):
                    cut = bool(call.resets[token]) if not direction else step > 0 and bool(call.resets[order[step - 1]])
                    h = torch.gru_cell(x[token][None], torch.zeros_like(h) if cut else h, *weights)
                    columns.setdefault(token, []).append(h)
                last.append(h)
            states[cell] = torch.cat(last)
        rows = {token: torch.cat(found, -1)[0] for token, found in columns.items()}
        shape = call.input.shape[:-1]
        wide = [
            rows[tuple(index)]
            for index in torch.cartesian_prod(*map(torch.arange, shape)).view(-1, len(shape)).tolist()
        ]
        x = torch.stack(wide).view(*shape, -1)
    return x, torch.stack(states)


def serve_by(monkeypatch: pytest.MonkeyPatch, variant: GruVariant) -> None:
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("winner", "a test asked for it", variant))
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)


def in_float64(call: GruCall) -> GruCall:
    cast = [t.double().requires_grad_() for t in call.tensors]
    return dataclasses.replace(call, input=cast[0], hx=cast[1], weights=tuple(cast[2:]))


def gradients_of(call: GruCall, results: Any, given: Any) -> list[torch.Tensor]:
    pairs = [(out, grad) for out, grad in zip(results, given, strict=True) if grad is not None]
    outputs, grads = [o for o, _ in pairs], [g.double() for _, g in pairs]
    return list(torch.autograd.grad(outputs, call.tensors, grads, materialize_grads=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("layers", "directions", "first"), [(1, 1, False), (1, 2, True), (2, 2, False), (2, 1, True)])
def test_pieces_are_what_steps_are(layout: str, layers: int, directions: int, *, first: bool) -> None:
    call = in_float64(marked(call_of(layout, layers, directions, first=first and layout == "dense")))
    found, wanted = eager.gru(call), oracle(call)
    given = [torch.randn_like(t) for t in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(gradients_of(call, found, given), gradients_of(call, wanted, given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_pieces_under_autocast_may_be_of_several_dtypes() -> None:
    call = marked(call_of(directions=2))
    mixed = dataclasses.replace(
        call, hx=call.hx.half(), weights=tuple(w.half() if i % 2 else w for i, w in enumerate(call.weights))
    )
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = eager.gru(mixed)
    for ours, theirs in zip(found, eager.gru(call), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.1)


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("of_input", "of_state"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("resets", [False, True], ids=["no resets", "resets"])
def test_no_token_has_the_dtypes_and_the_gradients_of_a_call_with_tokens(
    cast: torch.dtype | None, of_input: torch.dtype, of_state: torch.dtype, directions: int, *, resets: bool
) -> None:
    if cast is None:
        of_state = of_input
    found = {}
    for rows in (0, 3):
        state = torch.randn(directions, 1, H, dtype=of_state, device=DEVICE).requires_grad_()
        weights = [
            torch.randn(shape, dtype=of_input, device=DEVICE).requires_grad_()
            for shape in directions * ((3 * H, 5), (3 * H, H))
        ]
        with torch.autocast(DEVICE, dtype=cast, enabled=cast is not None):
            output, h_n = gru(
                torch.randn(rows, 5, dtype=of_input, device=DEVICE),
                state,
                weights,
                bias=False,
                bidirectional=directions == 2,
                cu_seqlens=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
                max_seqlen=rows,
                resets=torch.zeros(rows, dtype=torch.bool, device=DEVICE) if resets else None,
            )
        (output.sum() + h_n.sum()).backward()
        assert output.shape == (rows, directions * H)
        if not rows:
            assert torch.equal(h_n, state.to(h_n.dtype))
            assert h_n.data_ptr() != state.data_ptr()
            assert torch.equal(state.grad, torch.ones_like(state))
        found[rows] = [t.dtype for t in (output, h_n)], [t.grad is None for t in (state, *weights)]
    assert found[0] == found[3]


def test_no_mark_is_no_reset_and_all_marks_are_sequences_of_one_step() -> None:
    call = call_of(directions=2)
    none = dataclasses.replace(call, resets=torch.zeros(call.input.shape[:-1], dtype=torch.bool, device=DEVICE))
    for ours, theirs in zip(eager.gru(none), eager.gru(call), strict=True):
        torch.testing.assert_close(ours, theirs)
    alone = dataclasses.replace(call, resets=torch.ones_like(none.resets))  # type: ignore[arg-type]
    output, _ = eager.gru(alone)
    one = dataclasses.replace(call, input=call.input[1:2], hx=torch.zeros_like(call.hx), resets=None)
    torch.testing.assert_close(output[1:2, :, :H], eager.gru(one)[0][..., :H])


# Kernels are the same for one launch of all steps and a launch for each: of the latter half of the cases run.
RESET = [
    (how, *form, layout)
    for how in ("persistent", "steps")
    for i, form in enumerate([(1, 1, True), (1, 2, False), (2, 1, False), (2, 2, True)])
    for j, layout in enumerate(LAYOUTS)
    if how == "persistent" or (i + j) % 2
]


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("how", "layers", "directions", "first", "layout"), RESET)
def test_kernels_reset_as_pieces_do(
    monkeypatch: pytest.MonkeyPatch, how: str, layout: str, layers: int, directions: int, *, first: bool
) -> None:
    call = marked(call_of(layout, layers, directions, first=first and layout == "dense"))
    serve_by(monkeypatch, VARIANTS[how])
    for ours, theirs in zip(run.forward(call), eager.gru(call), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)  # the products are in TF32


@pytest.mark.interpreter
@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(("variant", "first"), [(ONE, False), (TURNS, True)])
def test_kernels_have_the_gradients_of_pieces(
    monkeypatch: pytest.MonkeyPatch, layout: str, directions: int, variant: GruVariant, *, first: bool
) -> None:
    variant = dataclasses.replace(variant, exchange="counter") if layout == "thd" else variant
    call = marked(call_of(layout, 1, directions, first=first and layout == "dense"))
    choose(monkeypatch, variant)
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    found = training.gradients(call, output, [True] * len(call.tensors), given)
    double = in_float64(call)
    assert_alike(found, gradients_of(double, eager.gru(double), given))


@pytest.mark.interpreter
@pytest.mark.usefixtures("backward", "interpreted")
def test_a_trained_stack_resets_all_layers_and_refuses_marks_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = marked(call_of(layers=2))
    choose(monkeypatch, ONE)
    serve_by(monkeypatch, VARIANTS["persistent"])
    leaves = [t.detach().requires_grad_() for t in call.tensors]
    call = dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:]))
    given = [torch.randn_like(t) for t in eager.gru(call)]
    found = torch.autograd.grad(training.forward(call), leaves, given)
    double = in_float64(call)
    assert_alike(found, gradients_of(double, eager.gru(double), given))

    results = training.forward(call)
    assert call.resets is not None
    call.resets.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(results, leaves, given)


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted", "backward")
def test_nan_passes_no_reset_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(directions=2)
    marks = torch.zeros(call.input.shape[:-1], dtype=torch.bool)
    marks[1, 2] = marks[2, 2] = True
    x = call.input.clone()
    x[1, 2] = torch.nan
    call = dataclasses.replace(call, input=x, resets=marks)
    serve_by(monkeypatch, VARIANTS["persistent"])
    output, _ = run.forward(call)
    assert output.isnan().any(-1).nonzero().tolist() == [[1, 2]]
    choose(monkeypatch, ONE)
    given = torch.ones_like(output)
    given[1, 2] = 0
    grad, grad_hx, *_ = training.gradients(call, output, [True] * len(call.tensors), (given, None))
    assert grad.isnan().any(-1).nonzero().tolist() == [[1, 2]]
    assert not grad_hx.isnan().any()


def test_gradients_of_gradients_pass_a_reset() -> None:
    call = in_float64(marked(call_of(directions=2)))
    rows = torch.arange(3) * H + 1  # one of each gate
    few = [call.input, call.hx, call.weights[0][rows].detach().requires_grad_()]

    def function(x: Any, hx: Any, few_rows: Any) -> Any:
        weight = call.weights[0].detach().index_copy(0, rows, few_rows)
        return eager.gru(dataclasses.replace(call, input=x, hx=hx, weights=(weight, *call.weights[1:])))

    assert torch.autograd.gradcheck(function, few)
    assert torch.autograd.gradgradcheck(function, few)


# Which kernel ---------------------------------------------------------------------------------------------------------


def test_a_reset_changes_nothing_of_what_is_chosen() -> None:
    rows = [row for row in tables()["nvidia_h200"].rows["gru"] if not row.spec.stacked]
    kept = 0
    for row in rows:
        plain = run._choose(row.spec, row.size, H200)
        choice = run._choose(dataclasses.replace(row.spec, resets=True), row.size, H200)
        if plain.variant is not None and plain.variant.strategy == "persistent":
            assert choice.variant == plain.variant
            kept += 1
        else:
            assert choice.variant is None or choice.variant.strategy != "library"
    assert kept > len(rows) // 2


@pytest.mark.parametrize("gpu", [H200, Gpu("some_gpu", 80, 108, "Some GPU")])
@pytest.mark.parametrize("hidden", [7, 100, 512, 1000])
def test_a_kernel_serves_what_cudnn_cannot(gpu: Gpu, hidden: int) -> None:
    for layout, dtype in (("dense", "float32"), ("thd", "bfloat16")):
        spec, size = GruSpec(dtype, hidden, layout, resets=True), GruSize(3, 5)
        choice = run._choose(spec, size, gpu)
        assert choice.variant is not None, (spec, choice.why)
        assert run.GRU.rejection(spec, size, choice.variant, gpu.capability, gpu.multiprocessors) is None


def test_where_no_kernel_fits_sequences_are_cut_and_explain_says_so() -> None:
    choice = run._choose(GruSpec("float32", 5000, resets=True), GruSize(3, 5), H200)
    assert choice.variant is None
    assert choice.why == "PyTorch's own has no resets, and no kernel fits: sequences are cut at them"


def test_explain_takes_resets() -> None:
    module, cell = tuned.nn.GRU(6, 20).to(DEVICE), tuned.nn.GRUCell(6, 20).to(DEVICE)
    x, marks = torch.randn(4, 3, 6, device=DEVICE), torch.zeros(4, 3, dtype=torch.bool, device=DEVICE)
    assert tuned.explain(module, x, resets=marks).rule
    assert tuned.explain(cell, x[0], resets=marks[0]).rule == tuned.explain(cell, x[0]).rule
    h, weights = torch.zeros(3, 20, device=DEVICE), list(cell.parameters())
    assert tuned.explain(gru_cell, x[0], h, *weights, resets=marks[0]).rule
    with pytest.raises(ValueError, match="a mark for each of 3 rows"):
        tuned.explain(gru_cell, x[0], h, *weights, resets=marks[0, :2])


def test_a_gradient_with_resets_has_a_kernel_where_no_row_is() -> None:
    far = GruSpec("float32", 96, resets=True)
    assert training._choose(dataclasses.replace(far, resets=False), GruSize(7, 64), Gpu("x", 80, 108)).variant is None
    choice = training._choose(far, GruSize(7, 64), Gpu("x", 80, 108))
    assert choice.variant is not None
    assert "PyTorch's own has no resets" in choice.why


def test_calls_with_resets_leave_no_trace_for_calls_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that PyTorch serves is known by sizes, which do not show resets; a plan is known by the marks too."""
    monkeypatch.setattr(plan.left, "leave", lambda *_args, **_named: pytest.fail("was remembered"))
    kept: list[Any] = []
    monkeypatch.setattr(plan, "keep", lambda _, key, *_others: kept.append(key))
    for call in (call_of(), marked(call_of())):
        if call.resets is not None:
            plan.leave(call, captured=False)
        spec = GruSpec("float32", H, resets=call.resets is not None)
        tensors = SimpleNamespace(h_0=call.hx, seq=4)
        launched = plan.Launched(call, spec, VARIANTS["persistent"], tensors, "compiled")  # type: ignore[arg-type]
        plan.learn(call, [launched], captured=False, gradient=False)
    assert kept[0] != kept[1]
    assert None not in kept


# Operators, modules and steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operator_takes_resets(layout: str) -> None:
    call = marked(call_of(layout, directions=2))
    tensors = [t.detach().requires_grad_() for t in call.tensors]
    settings = (True, 1, True, False, call.batch_sizes, call.cu_seqlens, call.max_seqlen, call.resets)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.gru, (*tensors[:2], tensors[2:], *settings), test_utils=checks)
    output, h_n = ops.gru(*tensors[:2], tensors[2:], *settings)
    given = torch.randn_like(output), torch.randn_like(h_n)
    double = in_float64(call)
    found = torch.autograd.grad((output, h_n), tensors, given)
    assert_alike(found, gradients_of(double, eager.gru(double), given))


def test_compiled_calls_take_resets() -> None:
    module = tuned.nn.GRU(6, 20, 2, bidirectional=True).to(DEVICE)
    x, marks = torch.randn(5, 3, 6, device=DEVICE), torch.rand(5, 3, device=DEVICE) < 0.4
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(x, resets=marks), module(x, resets=marks), strict=True):
        torch.testing.assert_close(ours, theirs)
    compiled(x, resets=marks)[0].square().sum().backward()
    found = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x, resets=marks)[0].square().sum().backward()
    for ours, parameter in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_module_takes_marks_of_every_kind_of_input() -> None:
    module = tuned.nn.GRU(6, 20, batch_first=True, bidirectional=True).to(DEVICE)
    sequences = [torch.randn(n, 6, device=DEVICE) for n in (3, 5, 2)]
    marks = [
        torch.tensor(m, device=DEVICE) for m in ([False, True, False], [True, False, False, True, True], [False] * 2)
    ]
    wanted = [module(x, resets=m)[0] for x, m in zip(sequences, marks, strict=True)]  # [T, I]
    for x, m, want in zip(sequences, marks, wanted, strict=True):
        torch.testing.assert_close(module(x[None], resets=m[None])[0][0], want)
    packed = pack_sequence(sequences, enforce_sorted=False)
    output, h_n = module(packed, resets=pack_sequence(marks, enforce_sorted=False))
    padded, lengths = pad_packed_sequence(output, batch_first=True)
    for row, (want, length) in enumerate(zip(wanted, lengths.tolist(), strict=True)):
        torch.testing.assert_close(padded[row, :length], want)
        torch.testing.assert_close(h_n[0, row], want[-1, :20])
        torch.testing.assert_close(h_n[1, row], want[0, 20:])


def test_steps_drop_the_state_of_marked_rows() -> None:
    cell = tuned.nn.GRUCell(6, 20).to(DEVICE)
    x, h = torch.randn(4, 6, device=DEVICE), torch.randn(4, 20, device=DEVICE)
    marks = torch.tensor([True, False, True, False], device=DEVICE)
    wanted = torch.nn.GRUCell.forward(cell, x, h * ~marks[:, None])
    torch.testing.assert_close(cell(x, h, resets=marks), wanted)
    torch.testing.assert_close(cell(x[0], h[0], resets=marks[0]), wanted[0])
    grad = torch.autograd.grad(cell(x, h.requires_grad_(), resets=marks).sum(), h)[0]
    assert torch.equal(grad.any(-1), ~marks)
    with torch.no_grad():
        weights = [p.detach() for p in cell.parameters()]
        state = h.detach().clone()
        found = gru_cell(x, state, *weights, inplace=True, resets=marks)
    assert found is state
    torch.testing.assert_close(state, wanted)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resets", "error", "said"),
    [
        (torch.zeros(4, 3), TypeError, "resets must be a bool tensor, got torch.float32: convert with .bool()"),
        ([[True]], TypeError, "resets must be a bool tensor, got list"),
        (torch.zeros(3, 4, dtype=torch.bool), ValueError, r"a mark for each step of input, \[4, 3\], got \[3, 4\]"),
        (torch.zeros(4, 3, dtype=torch.bool, device="meta"), ValueError, "resets must be on the device of input"),
    ],
)
def test_resets_that_are_no_marks_are_refused(resets: Any, error: type[Exception], said: str) -> None:
    call = call_of()
    given = resets.to(DEVICE) if isinstance(resets, torch.Tensor) and resets.device.type == "cpu" else resets
    with pytest.raises(error, match=said):
        gru(call.input, call.hx, call.weights, resets=given)
    module = tuned.nn.GRU(6, 20).to(DEVICE)
    with pytest.raises(error, match=said):
        module(call.input, resets=given)


def test_resets_of_packed_sequences_are_packed_alike() -> None:
    module = tuned.nn.GRU(6, 20).to(DEVICE)
    packed = pack_sequence([torch.randn(n, 6, device=DEVICE) for n in (3, 2)])
    with pytest.raises(TypeError, match="resets of a PackedSequence must be one too"):
        module(packed, resets=torch.zeros(5, dtype=torch.bool, device=DEVICE))
    other = pack_sequence([torch.zeros(n, dtype=torch.bool, device=DEVICE) for n in (4, 1)])
    with pytest.raises(ValueError, match="packed with the lengths, and in the order, of input"):
        module(packed, resets=other)


@pytest.mark.parametrize(
    ("resets", "error", "said"),
    [
        (torch.zeros(4), TypeError, "resets must be a bool tensor"),
        (torch.zeros(3, dtype=torch.bool), ValueError, "a mark for each of 4 rows"),
        (torch.zeros(4, 1, dtype=torch.bool), ValueError, "resets must have 1 axes"),
        (True, TypeError, "resets must be a tensor, got bool"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_marks_of_a_step_that_do_not_fit_are_refused_and_nothing_is_written(
    resets: Any, error: type[Exception], said: str, *, inplace: bool
) -> None:
    cell = torch.nn.GRUCell(6, 20).to(DEVICE)
    weights = [p.detach() for p in cell.parameters()]
    h = torch.ones(4, 20, device=DEVICE)
    given = resets.to(DEVICE) if isinstance(resets, torch.Tensor) else resets
    with pytest.raises(error, match=said):
        gru_cell(torch.randn(4, 6, device=DEVICE), h, *weights, resets=given, inplace=inplace)
    assert bool((h == 1).all())


def test_a_stack_of_one_launch_has_no_resets() -> None:
    with pytest.raises(ValueError, match="a stack has no resets"):
        GruSpec("float32", 20, layers=2, resets=True)
