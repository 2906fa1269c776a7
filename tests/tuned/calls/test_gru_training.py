"""tuned.calls.gru.training without a GPU: gradients of every layout, compared with autograd of PyTorch's operators."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tuned.launching.plan
from tests.support.gru_machine import Machine, machine
from tests.support.gru_running import VARIANTS, B, H, T, call_of, interpreted
from tests.support.gru_training import ONE, TURNS, assert_alike, backward, choose, wanted_of
from tests.support.plans import Always
from tests.support.run import INTERPRETED
from tuned.calls.gru import eager, plan, run, slower, training
from tuned.calls.gru import gradient as gradient_run
from tuned.calls.gru.wavefront import Wave
from tuned.calls.recurrent import ops, serve
from tuned.dispatch import gru
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.launching.rehearsal import Heard, listen
from tuned.launching.uncompiled import UncompiledError
from tuned.lookup.lookup import Choice
from tuned.lookup.table import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuned.calls.gru.arguments import GruCall
    from tuned.families.launch import Launch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru_training.py has these on a GPU"),
]

__all__ = ["backward", "interpreted", "machine"]

CHECKS = ("test_schema", "test_faketensor")  # for an operator without a gradient
COUNTED = dataclasses.replace(ONE, exchange="counter")
POLL = GruVariant("persistent", block_hidden=8, block_batch=8, exchange="poll")


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("layout", ["dense", "packed", "thd"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(
    ("variant", "bias", "first"), [(ONE, True, False), (TURNS, False, True), (COUNTED, True, True)]
)
def test_gradients_of_every_tensor_are_autograds(
    monkeypatch: pytest.MonkeyPatch, layout: str, directions: int, variant: GruVariant, *, bias: bool, first: bool
) -> None:
    if layout == "thd":
        variant = dataclasses.replace(variant, exchange="counter")
    call = call_of(layout, 1, directions, bias=bias, first=first and layout == "dense")
    choose(monkeypatch, variant)
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    found = training.gradients(call, output, [True] * len(call.tensors), given)
    assert_alike(found, wanted_of(call, given))


@pytest.mark.parametrize("layout", ["dense", "packed", "thd"])
def test_gradients_are_right_where_their_kernel_does_not_compile(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The forward's kernel compiled, or was remembered: only the gradient meets a kernel that does not compile."""
    call, tried = call_of(layout, directions=2), []

    def refuse(_device: Any, launch: Launch) -> None:
        tried.append(launch.kernel)
        raise UncompiledError("it does not compile")

    monkeypatch.setattr(gradient_run, "launch_known", refuse)
    choose(monkeypatch, dataclasses.replace(COUNTED, block_hidden=8) if layout == "thd" else ONE)
    output, h_n = eager.gru(call)
    for given in ((torch.randn_like(output), torch.randn_like(h_n)), (None, torch.randn_like(h_n))):
        assert_alike(training.gradients(call, output, [True] * len(call.tensors), given), wanted_of(call, given))
        some = training.gradients(call, output, [False, True, *[False] * len(call.weights)], given)
        assert [found is not None for found in some] == [False, True, *[False] * len(call.weights)]
    assert len(tried) == 4


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("alone", [0, 1])
def test_one_of_both_results_may_be_all_that_has_a_gradient(monkeypatch: pytest.MonkeyPatch, alone: int) -> None:
    call = call_of(directions=2)
    choose(monkeypatch, ONE)
    results = eager.gru(call)
    given: Any = [None, None]
    given[alone] = torch.randn_like(results[alone])
    found = training.gradients(call, results[0], [True] * len(call.tensors), tuple(given))
    assert_alike(found, wanted_of(call, tuple(given)))


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("strides", ["expanded", "transposed", "sliced", "misaligned", "negative"])
def test_the_gradient_of_the_output_may_have_any_strides(monkeypatch: pytest.MonkeyPatch, strides: str) -> None:
    call = call_of()
    choose(monkeypatch, ONE)
    output, _ = eager.gru(call)
    steps, batch, width = output.shape
    grad = {
        "expanded": torch.randn(1, 1, 1).expand(output.shape),
        "transposed": torch.randn(width, batch, steps).permute(2, 1, 0),
        "sliced": torch.randn(steps, batch, 2 * width)[..., ::2],
        "misaligned": torch.randn(output.numel() + 1)[1:].view(output.shape),
        "negative": torch._neg_view(torch.randn(output.shape)),  # as the imaginary part of a conjugate is
    }[strides]
    assert grad.is_neg() == (strides == "negative")
    found = training.gradients(call, output, [True] * len(call.tensors), (grad, None))
    assert_alike(found, wanted_of(call, (grad, None)))


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("batch", [1, 3])
def test_inputs_states_and_weights_may_have_any_strides(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Views as left by a convolution, a transpose, a slice and an expand; and batches of one, of any strides."""
    call = call_of(directions=2)
    choose(monkeypatch, ONE)

    def apart(t: torch.Tensor, index: int) -> torch.Tensor:
        if t.dim() == 1:
            return torch.stack((t, t), 1)[:, 0]
        ways = (
            lambda: t.t().contiguous().t(),
            lambda: torch.cat((t, t), 1)[:, : t.shape[1]],
            lambda: torch.cat((t[:1], t))[1:],
        )
        return ways[index % 3]()

    steps, _, features = call.input.shape
    x = torch.randn(batch, features + 1, steps).permute(2, 0, 1)[..., 1:]
    hx = torch.randn(call.hx.shape[0], 1, call.hx.shape[2]).expand(-1, batch, -1)
    weights = tuple(apart(w, index) for index, w in enumerate(call.weights))
    call = dataclasses.replace(call, input=x, hx=hx, weights=weights)
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    assert_alike(training.gradients(call, output, [True] * len(call.tensors), given), wanted_of(call, given))


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("directions", [1, 2])
def test_rows_that_no_sequence_has_are_in_no_gradient(monkeypatch: pytest.MonkeyPatch, directions: int) -> None:
    """A GPU's cu_seqlens are not read, so they may end early. Memory that is not filled holds NaN here."""
    call = call_of("thd", directions=directions)
    more = dataclasses.replace(call, input=torch.cat((call.input, torch.randn(2, call.input.shape[1]))))
    choose(monkeypatch, COUNTED)
    output, h_n = eager.gru(call)
    output = torch.cat((output, torch.full((2, output.shape[1]), torch.nan)))
    given = torch.randn_like(output), torch.randn_like(h_n)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        found = training.gradients(more, output, [True] * len(call.tensors), given)
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = wanted_of(call, (given[0][: len(call.input)], given[1]))
    assert_alike([found[0][: len(call.input)], *found[1:]], wanted)
    assert not found[0][len(call.input) :].any()


def test_what_is_not_wanted_is_not_computed(monkeypatch: pytest.MonkeyPatch, backward: list[Launch]) -> None:
    call = call_of()
    choose(monkeypatch, ONE)
    output, _ = eager.gru(call)
    given = torch.ones_like(output), None
    products: list[Any] = []
    monkeypatch.setattr(torch, "mm", lambda *a, mm=torch.mm, **k: products.append(a) or mm(*a, **k))
    found = training.gradients(call, output, [False, False, False, False, True, False], given)
    assert [g is None for g in found] == [True, True, True, True, False, True]
    assert len(products) == 2, "of the sums of gates alone"
    assert len(backward) == 1


@pytest.mark.usefixtures("interpreted", "backward")
def test_a_forward_is_chosen_as_that_of_a_gradient_wherever_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each step may serve it although it serves no call without a gradient: all callers must agree."""
    call = call_of()
    choose(monkeypatch, ONE)
    asked: list[bool] = []

    def parts(call: GruCall, *, trained: bool = False, **_: Any) -> Any:
        asked.append(trained)
        return [(*run.spec_of(call, 1), Choice("winner", "", VARIANTS["persistent"]))]

    monkeypatch.setattr(run, "_parts", parts)
    monkeypatch.setattr(run, "why_eager", lambda *_, **__: None)
    monkeypatch.setattr(slower, "slower", lambda *_, **__: None)
    assert training.why_not(call) is None
    training.choice_of(call)
    x = call.input.clone().requires_grad_()
    training.forward(dataclasses.replace(call, input=x))
    assert len(asked) == 4  # why_not asks twice
    assert all(asked)


@pytest.mark.usefixtures("interpreted", "backward")
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_a_stack_of_layers_trains_as_pytorchs(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    call = call_of(layout, 2, 2)
    choose(monkeypatch, ONE)
    monkeypatch.setattr(
        run, "_parts", lambda call, **_: [(*run.spec_of(call, 1), Choice("winner", "", VARIANTS["persistent"]))]
    )
    leaves = [t.detach().clone().requires_grad_() for t in call.tensors]
    one = dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:]))
    outputs = training.forward(one)
    given = tuple(torch.randn_like(out) for out in outputs)
    assert_alike(torch.autograd.grad(outputs, leaves, given), wanted_of(call, given))


@pytest.mark.usefixtures("interpreted", "backward")
@pytest.mark.parametrize(("recompute", "first"), [(False, True), (True, False)])
def test_layers_of_one_launch_train_as_pytorchs(
    monkeypatch: pytest.MonkeyPatch, *, recompute: bool, first: bool
) -> None:
    call = call_of("dense", 3, 1, first=first, recompute=recompute)
    choose(monkeypatch, ONE)
    parts = [(*run.spec_of(call, 3), Choice("winner", "", VARIANTS["persistent"]))]
    monkeypatch.setattr(run, "_parts", lambda _call, **_: parts)
    leaves = [t.detach().clone().requires_grad_() for t in call.tensors]
    outputs = training.forward(dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:])))
    kept = [t for t in outputs[0].grad_fn.saved_tensors if t is not None and t.shape[-1] == 3 * call.hx.shape[2]]  # type: ignore[union-attr]
    assert [tuple(t.shape[:-1]) for t in kept if t.dim() > 1] == [(T * B,)] * (not recompute), "the gates"
    given = tuple(torch.randn_like(out) for out in outputs)
    assert_alike(torch.autograd.grad(outputs, leaves, given), wanted_of(call, given))


@pytest.mark.usefixtures("interpreted", "backward")
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("resets", [False, True])
def test_several_gradients_may_be_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch, layers: int, *, resets: bool
) -> None:
    """As torch.autograd.functional.jacobian(vectorize=True) does: then gradients have no memory that a kernel can read."""
    call = call_of("dense", layers, resets=torch.rand(T, B) < 0.3 if resets else None)
    choose(monkeypatch, ONE)
    parts = [(*run.spec_of(call, 1), Choice("winner", "", VARIANTS["persistent"]))] * layers
    monkeypatch.setattr(run, "_parts", lambda _call, **_: parts[:1] if _call.num_layers == 1 else parts)
    leaves = [t.detach().clone().requires_grad_() for t in call.tensors]
    outputs = training.forward(dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:])))
    given = [torch.randn(4, *out.shape) for out in outputs]
    found = torch.autograd.grad(outputs, leaves, given, is_grads_batched=True)
    wanted = [wanted_of(call, (grad, last)) for grad, last in zip(*given, strict=True)]
    assert_alike(found, [torch.stack(grads) for grads in zip(*wanted, strict=True)])
    assert not any(grad.requires_grad for grad in found)


@pytest.mark.usefixtures("interpreted", "backward")
@pytest.mark.parametrize("by", ["forward mode", "vmap"])
def test_gradients_have_tangents_and_are_mapped(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """The forward ran before, by kernels: a kernel of the gradient would drop tangents."""
    call = call_of()
    choose(monkeypatch, ONE)
    parts = [(*run.spec_of(call, 1), Choice("winner", "", VARIANTS["persistent"]))]
    monkeypatch.setattr(run, "_parts", lambda _call, **_: parts)
    leaves = [t.detach().clone().requires_grad_() for t in call.tensors]
    outputs = training.forward(dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:])))
    one, other = ([torch.randn_like(out) for out in outputs] for _ in range(2))

    def gradients(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, given, retain_graph=True)

    wanted, of_other = (wanted_of(call, tuple(given)) for given in (one, other))
    if by == "vmap":
        found = torch.func.vmap(gradients)(*map(torch.stack, zip(one, other, strict=True)))
        assert_alike(found, [torch.stack(pair) for pair in zip(wanted, of_other, strict=True)])
        return
    with forward_ad.dual_level():
        duals = map(forward_ad.unpack_dual, gradients(*map(forward_ad.make_dual, one, other)))
        primals, tangents = zip(*duals, strict=True)
    assert_alike(primals, wanted)
    assert_alike(tangents, of_other)  # gradients are linear in what is given


@pytest.mark.usefixtures("interpreted", "backward")
@pytest.mark.parametrize("tied", [False, True])  # one tensor is both biases, and the first states are computed from it
def test_gradients_have_gradients_which_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, *, tied: bool
) -> None:
    call = call_of()
    choose(monkeypatch, ONE)
    monkeypatch.setattr(
        run, "_parts", lambda call, **_: [(*run.spec_of(call, 1), Choice("winner", "", VARIANTS["persistent"]))]
    )

    def penalty(by: Any) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in call.tensors]
        x, hx, *weights = leaves
        if tied:
            hx, weights[3] = hx * weights[2].mean(), weights[2]
        output, h_n = by(dataclasses.replace(call, input=x, hx=hx, weights=tuple(weights)))
        rest: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad((output.square().sum() + h_n.sum()), leaves, create_graph=True, **rest)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in found), leaves, **rest))

    assert_alike(penalty(training.forward), [t.double() for t in penalty(eager.gru)])


def test_where_no_row_says_that_kernels_are_faster_pytorchs_own_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of()
    choose(monkeypatch, None)
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    assert_alike(training.gradients(call, output, [True] * len(call.tensors), given), wanted_of(call, given))


# What is traced -------------------------------------------------------------------------------------------------------


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on a CPU are served as on a GPU: kernels run forward and backward."""
    for module in (run, serve):
        monkeypatch.setattr(module, "why_eager", lambda *_, **__: None)
    monkeypatch.setattr(run, "is_empty", lambda call: not call.input.numel())
    choose(monkeypatch, ONE)
    monkeypatch.setattr(
        run, "_parts", lambda call, **_: [(*run.spec_of(call, 1), Choice("winner", "", VARIANTS["persistent"]))]
    )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves_of(call: GruCall) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in call.tensors]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("PyTorch's own computed a recurrence")


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_stack_trains_by_kernels_without_a_second_forward(
    monkeypatch: pytest.MonkeyPatch, interpreted: list[Launch], backward: list[Launch], backend: str
) -> None:
    call = call_of("dense", 2, 2)
    leaves = leaves_of(call)
    given = torch.randn(*call.input.shape[:2], 40), torch.randn(call.hx.shape)
    wanted = wanted_of(call, given)
    monkeypatch.setattr(eager, "gru", refuse)

    def model(x: torch.Tensor, hx: torch.Tensor, *weights: torch.Tensor) -> Any:
        return gru(x, hx, weights, num_layers=2, bidirectional=True)

    outputs = torch.compile(model, backend=backend, fullgraph=True)(*leaves)
    assert (len(interpreted), len(backward)) == (2, 0)
    assert_alike(torch.autograd.grad(outputs, leaves, given), wanted)
    assert (len(interpreted), len(backward)) == (2, 2)


@pytest.mark.usefixtures("interpreted", "backward", "everywhere")
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("rows", [True, False])
def test_the_operator_of_a_gradient_keeps_the_rules_with_kernels_and_without(
    monkeypatch: pytest.MonkeyPatch, layout: str, rows: bool
) -> None:
    call = call_of(layout, 1, 2)
    choose(monkeypatch, ONE if rows else None)
    fixed = (call.input, call.hx, list(call.weights), True, 1, True, False, call.batch_sizes, None, None, None)
    output, h_n = eager.gru(call)
    wanted = [True, False, *[True] * len(call.weights)]
    for given in ((torch.ones_like(output), torch.ones_like(h_n)), (None, torch.ones_like(h_n))):
        arguments = (*given, wanted, output, *fixed)
        assert ops.gru_backward, "registered"
        torch.library.opcheck(torch.ops.tuned.gru_backward.default, arguments, test_utils=CHECKS, atol=1e-3, rtol=1e-3)
        found = torch.ops.tuned.gru_backward(*arguments)
        assert found[1].numel() == 0
        grads = [t for t in found if t.numel()]
        taken = {t.untyped_storage().data_ptr() for t in (*grads, *call.tensors, output, h_n, given[1])}
        assert len(taken) == len(grads) + len(call.tensors) + 3, "no two share memory"
        expected = wanted_of(call, given)
        assert_alike([found[0], *found[2:]], [expected[0], *expected[2:]])


@pytest.mark.usefixtures("everywhere")
def test_a_thread_that_listens_notes_the_launch_of_a_gradient_and_gets_true_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, heard = call_of(), Heard()
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    monkeypatch.setattr(gradient_run, "launch_known", lambda device, launch: heard.note(None, launch, device))
    with listen(heard):
        found = training.gradients(call, output, [True] * len(call.tensors), given)
    assert len(heard.launches) == 1
    assert_alike(found, wanted_of(call, given))


def test_short_calls_and_stacks_that_cudnn_runs_side_by_side_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(GruSpec("float32", H), GruSize(B, 64), ONE, None, 10.0, "a table", {}, eager_us=20.0)
    monkeypatch.setattr(training, "_choice", lambda _call: Choice("winner", "", ONE, row))
    monkeypatch.setattr(run, "why_not", lambda _call, **_: None)
    monkeypatch.setattr(slower, "called_us", lambda *_: 1.0)
    monkeypatch.setattr(slower, "_one_launch", lambda _spec: False)
    monkeypatch.setattr(run, "modelled_steps", lambda _call: False)
    monkeypatch.setattr(run, "in_one_launch", lambda _call: True)
    waves: list[Any] = [None]
    monkeypatch.setattr(training, "_planned", lambda *_: waves[0])
    for captured in (False, True):
        monkeypatch.setattr(run, "capturing", lambda _device, captured=captured: captured)
        least = slower.CAPTURED_STEPS if captured else slower.CALLED_STEPS[4]
        for steps, layers, served in (
            (least - 1, 1, False),
            (least, 1, True),
            (least, 2, True),
            (least, 6, not captured),
        ):
            call = call_of("dense", layers)
            call = dataclasses.replace(call, input=torch.randn(steps, B, call.input.shape[2]))
            assert (training.why_not(call) is None) == served, (captured, steps, layers)
    waves[0] = Wave(ONE, 6, 8, 6 * 10.0 * call.input.shape[0] / 64 / 3)  # a third of what it takes one by one
    assert training.why_not(call) is None
    assert training.why_not(dataclasses.replace(call, recompute=True)) is not None, (
        "one by one, which takes less memory"
    )


@pytest.mark.parametrize(
    ("hidden", "layers", "steps", "kernel_us", "eager_us", "served"),
    [
        (72, 4, 101, 100.0, 105.0, False),  # kernels take the host longer, and the device only 5 percent less
        (72, 4, 101, 100.0, 4000.0, True),  # the device takes longer than the host
        (72, 1, 6400, 100.0, 105.0, False),  # the row is of another size and leads by little
        (72, 1, 6400, 100.0, 130.0, True),
        (256, 4, 101, 100.0, 105.0, True),  # PyTorch launches each step, which takes the host longer
    ],
)
def test_where_cudnn_is_one_launch_a_layer_the_host_takes_longer_for_kernels(
    monkeypatch: pytest.MonkeyPatch,
    hidden: int,
    layers: int,
    steps: int,
    kernel_us: float,
    eager_us: float,
    served: bool,
) -> None:
    row = Row(GruSpec("float32", hidden), GruSize(B, 64), ONE, None, kernel_us, "a table", {}, eager_us=eager_us)
    monkeypatch.setattr(run, "in_one_launch", lambda _call: False)
    monkeypatch.setattr(slower, "_products_us", lambda *_: 0.0)
    spec, size = GruSpec("float32", hidden), GruSize(B, steps)
    call, choice = call_of("dense", layers), Choice("nearest size", "", ONE, row)
    for captured in (False, True):
        monkeypatch.setattr(run, "capturing", lambda _device, captured=captured: captured)
        why = slower.slower(call, spec, size, choice, lambda: None)
        if captured:
            assert why is None or "side by side" in why or "are not one" in why, "a graph spares the host all of it"
        else:
            assert (why is None) == served
            assert why is None or "a CUDA graph spares the host that" in why
    monkeypatch.setattr(run, "capturing", lambda _device: False)
    resets = dataclasses.replace(spec, resets=True)
    assert slower.slower(call, resets, size, choice, lambda: None) is None, "PyTorch's own has none"


# Whether kernels are faster, as measured (benchmarks/results/tuning/nvidia_h100-trainings-of-few-steps.json): steps, batch, units, dtype.
FEW_STEPS = (
    (17, 75, 480, "float32", False, False),
    (27, 38, 160, "bfloat16", False, False),
    (28, 38, 160, "bfloat16", False, True),
    (31, 131, 400, "float32", False, False),
    (32, 131, 400, "float32", False, True),
    (55, 30, 913, "bfloat16", False, False),  # padding takes the host longer
    (56, 30, 913, "bfloat16", False, True),
    (7, 30, 912, "bfloat16", True, False),
    (8, 30, 912, "bfloat16", True, True),
)


@pytest.mark.parametrize(("steps", "batch", "hidden", "dtype", "captured", "served"), FEW_STEPS)
def test_from_so_many_steps_on_kernels_take_less(
    monkeypatch: pytest.MonkeyPatch, steps: int, batch: int, hidden: int, dtype: str, *, captured: bool, served: bool
) -> None:
    monkeypatch.setattr(run, "capturing", lambda _device: captured)
    spec = GruSpec(dtype, hidden)
    call = dataclasses.replace(call_of(), width=916 if hidden == 913 else None)
    why = slower.slower(call, spec, GruSize(batch, steps), Choice("default", "", ONE, None), lambda: None)
    assert (why is None) is served, why


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("batch", "rows", "directions", "hidden", "served"),
    [
        (85, 190, 1, 97, False),  # 272 us in a graph, 322 by kernels; the row says 3.2 times as fast
        (85, 128, 1, 128, False),
        (128, 128, 1, 128, True),
        (150, 190, 1, 64, True),
        (85, 24, 1, 128, True),  # what leads with fewer rows does with more
        (47, 190, 2, 72, True),
        (85, 190, 1, 203, True),  # which cuDNN has no such launch for
    ],
)
def test_a_row_of_more_rows_says_nothing_where_cudnn_has_one_launch(
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    rows: int,
    directions: int,
    hidden: int,
    *,
    captured: bool,
    served: bool,
) -> None:
    """Up to 128 rows cuDNN's time hardly rises, then it doubles; the time of our kernels rises slowly."""
    monkeypatch.setattr(run, "capturing", lambda _device: captured)
    spec = GruSpec("float32", hidden, directions=directions)
    row = Row(spec, GruSize(rows, 64), ONE, None, 165.0, "a table", {}, eager_us=522.0)
    why = slower.slower(call_of(), spec, GruSize(batch, 1000), Choice("closest spec", "", ONE, row), lambda: None)
    assert (why is None) is served, why


def test_pytorchs_own_may_give_what_a_gradient_by_kernels_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient needs only the output: PyTorch may run the forward if it is faster there, and kernels the backward."""
    monkeypatch.setattr(training, "_choice", lambda _call: Choice("winner", "", ONE))
    monkeypatch.setattr(run, "why_not", lambda _call, **_: "PyTorch's own takes less")
    monkeypatch.setattr(run, "modelled_steps", lambda _call: False)
    monkeypatch.setattr(slower, "_least_steps", lambda *_, **__: 0)
    monkeypatch.setattr(training, "why_eager", lambda *_: None)
    monkeypatch.setattr(run, "capturing", lambda _device: True)
    call = call_of("dense")
    assert call.hx.shape[2] * call.input.element_size() % 16 == 0
    assert training.why_not(call) is None
    resets = torch.zeros(call.input.shape[:2], dtype=torch.bool)
    for other in (
        call_of("dense", 2),  # cuDNN runs the two directions side by side
        call_of("packed"),
        call_of("cu_seqlens"),
        dataclasses.replace(call, resets=resets),
        dataclasses.replace(call, width=H + 4),
        dataclasses.replace(call, hx=torch.zeros(1, B, 196)),  # cuDNN has no single launch for this
    ):
        assert "of the forward: PyTorch's own takes less" in (training.why_not(other) or "")
    for module, name, found in ((training, "why_eager", "no GPU"), (run, "capturing", False)):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda *_, found=found: found)
            assert training.why_not(call) is not None, name


@pytest.mark.usefixtures("interpreted", "backward")
@pytest.mark.parametrize("directions", [1, 2])
def test_gradients_by_kernels_of_an_output_that_pytorchs_own_gave(
    monkeypatch: pytest.MonkeyPatch, directions: int
) -> None:
    choose(monkeypatch, ONE)
    call = call_of("dense", 1, directions)
    monkeypatch.setattr(run, "_parts", lambda call, **_: [(*run.spec_of(call, 1), Choice("eager", "", None))])
    tensors = [t.requires_grad_() for t in call.tensors]
    ran: list[Any] = []
    by_kernels = training._by_kernels
    monkeypatch.setattr(training, "_by_kernels", lambda *args: ran.append(args[-1]) or by_kernels(*args))
    output, h_n = training.forward(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    found = torch.autograd.grad((output, h_n), tensors, given)
    assert ran == [None], "the input times the weights is not kept"
    _, kernels = training.choice_of(call)
    assert kernels == ("gru_dense_backward_split",)
    assert_alike(list(found), wanted_of(call, given))


@pytest.mark.parametrize("captured", [False, True])
def test_a_forward_of_a_launch_for_each_step_is_for_graphs(monkeypatch: pytest.MonkeyPatch, *, captured: bool) -> None:
    row = Row(GruSpec("bfloat16", H), GruSize(B, 64), ONE, None, 10.0, "a table", {}, eager_us=20.0)
    monkeypatch.setattr(training, "_choice", lambda _call: Choice("winner", "", ONE, row))
    monkeypatch.setattr(run, "why_not", lambda _call, **_: None)
    monkeypatch.setattr(slower, "called_us", lambda *_: 1.0)
    monkeypatch.setattr(slower, "_one_launch", lambda _spec: False)
    monkeypatch.setattr(run, "capturing", lambda _device: captured)
    call = call_of()
    call = dataclasses.replace(call, input=torch.randn(slower.CALLED_STEPS[4], B, call.input.shape[2]))
    for rule, variant, served in (
        ("model", GruVariant(), captured),
        ("winner", GruVariant(), True),
        ("model", GruVariant("persistent"), True),
    ):
        parts = [(*run.spec_of(call, 1), Choice(rule, "", variant, us=1.0))]
        monkeypatch.setattr(run, "_parts", lambda _call, parts=parts, **_: parts)
        assert (training.why_not(call) is None) == served, rule


@pytest.mark.usefixtures("interpreted")
def test_below_the_lowest_layer_that_trains_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, backward: list[Launch]
) -> None:
    call = call_of("dense", 3, 1)
    choose(monkeypatch, ONE)
    parts = [(*run.spec_of(call, 3), Choice("winner", "", VARIANTS["persistent"]))]
    monkeypatch.setattr(run, "_parts", lambda _call, **_: parts)
    leaves = [t.detach().clone().requires_grad_(index >= 2 + 8) for index, t in enumerate(call.tensors)]  # the highest
    outputs = training.forward(dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:])))
    given = tuple(torch.randn_like(out) for out in outputs)
    found = torch.autograd.grad(outputs, leaves[10:], given)
    assert len(backward) == 1
    assert_alike(found, wanted_of(call, given)[10:])


# Known calls -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call has a plan, of PyTorch's operators in place of a launch; yields a word for each that ran."""
    ran: list[str] = []

    def made(x: Any, hx: Any, weights: Any, _resets: Any) -> Any:
        ran.append("planned")
        out, h_n = torch.gru(x, hx, weights, True, 1, 0.0, False, False, False)
        return out, h_n, (x @ weights[0].t())[None], None

    monkeypatch.setattr(plan, "_TRAINED", Always(made))
    return ran


def small(*, grad: bool = True) -> tuple[Any, Any, list[Any]]:
    shapes = [(48, 8), (48, 16), (48,), (48,)]
    weights = [torch.randn(shape).requires_grad_(grad) for shape in shapes]
    return torch.randn(5, 2, 8), torch.randn(1, 2, 16), weights


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_known_call_has_the_gradients_of_a_new_one(
    monkeypatch: pytest.MonkeyPatch, planned: list[str], recompute: bool
) -> None:
    choose(monkeypatch, ONE)
    x, hx, weights = small()
    for _ in range(3):  # the short way knows the second and the third
        out, h_n = gru(x, hx, weights, recompute=recompute)
    found = torch.autograd.grad(out.square().sum() + h_n.sum(), weights)
    assert planned == ["planned"] * 3
    out, h_n = torch.gru(x, hx, weights, True, 1, 0.0, True, False, False)
    assert_alike(found, [g.double() for g in torch.autograd.grad(out.square().sum() + h_n.sum(), weights)])


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("variant", [POLL, GruVariant()], ids=["one launch", "steps"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("tf32", [False, True])
def test_a_checkpoint_keeps_the_same_with_a_plan_and_without(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, variant: GruVariant, directions: int, *, tf32: bool
) -> None:
    """torch.utils.checkpoint runs a forward again, with the plan that the first run made, and compares what both keep."""
    choose(monkeypatch, ONE)
    monkeypatch.setattr(training, "why_not", lambda _call: None)
    monkeypatch.setattr(run, "_parts", lambda call, **_: [(*run.spec_of(call, 1), Choice("winner", "", variant))])
    if tf32:  # a kernel multiplies the input, in place of the library
        monkeypatch.setattr("tuned.calls.gru.project.SMALL_PRODUCT", 0)
    module = torch.nn.GRU(8, 16, bidirectional=directions == 2)
    x, hx, weights = torch.randn(4, 3, 8), torch.randn(directions, 3, 16), tuple(module.parameters())
    with torch.enable_grad():
        theirs = [g.double() for g in torch.autograd.grad(module(x, hx)[0].square().sum(), weights)]
        for _ in range(2):

            def ours(x: torch.Tensor) -> Any:
                return gru(x, hx, weights, bidirectional=directions == 2)[0]

            out: Any = checkpoint(ours, x, use_reentrant=False)
            assert_alike(torch.autograd.grad(out.square().sum(), weights), theirs)
    assert machine.direct, "the forward that is run again finds a plan"


def test_what_needs_no_gradient_or_is_captured_or_listened_to_takes_no_plan_of_training(
    monkeypatch: pytest.MonkeyPatch, planned: list[str]
) -> None:
    settings = (True, 1, False, False)
    x, hx, weights = small(grad=False)
    assert training.known(x, hx, weights, settings) is None
    x, hx, weights = small()
    with torch.no_grad():
        assert training.known(x, hx, weights, settings) is None
    with listen(Heard()):
        assert training.known(x, hx, weights, settings) is None
    with monkeypatch.context() as under_autocast:
        for module in (tuned.launching.plan, plan):
            under_autocast.setattr(module, "_autocast", lambda: True)
        assert training.known(x, hx, weights, settings) is None
    monkeypatch.setattr(run, "capturing", lambda _device: True)
    assert training.known(x, hx, weights, settings) is None
    assert not planned
    monkeypatch.setattr(run, "capturing", lambda _device: False)
    assert training.known(x, hx, weights, settings) is not None


@pytest.mark.parametrize("width", [None, H + 3])
def test_what_a_graph_may_leave_to_pytorch_is_set_up(monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
    """cuDNN must be initialised before a capture, in this thread and in the thread of gradients."""
    asked: list[Any] = []
    fake = types.SimpleNamespace(set_up_recurrences=lambda device, **settings: asked.append((device.type, settings)))
    monkeypatch.setattr(training, "library", fake)
    monkeypatch.setattr(run, "forward", lambda call, _kept: eager.gru(call))
    training.forward(dataclasses.replace(call_of(), width=width))
    assert asked == [("cpu", {"gradients": True})]


def test_a_plan_that_cannot_serve_leaves_the_call_to_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_TRAINED", Always(lambda *_: None))
    served = []
    monkeypatch.setattr(run, "forward", lambda call, kept: served.append((call, kept)) or eager.gru(call))
    x, hx, weights = small()
    found = training.known(x, hx, weights, (True, 1, False, False))
    assert found is not None
    torch.testing.assert_close(found, torch.gru(x, hx, weights, True, 1, 0.0, True, False, False))
    assert len(served) == 1


def test_gradients_are_left_whose_products_would_be_coarser_than_those_of_a_gru(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "_choose", lambda *_: Choice("winner", "a test asked for it", ONE))
    monkeypatch.setattr(training, "gpu_of", lambda _device: None)
    monkeypatch.setattr(run, "why_not", lambda _call, **_: None)
    monkeypatch.setattr(run, "modelled_steps", lambda _call: False)
    monkeypatch.setattr(slower, "_least_steps", lambda *_, **__: 0)
    left: list[GruCall] = []
    monkeypatch.setattr(training, "leave", lambda call, **_: left.append(call))
    monkeypatch.setattr(run, "may_learn", lambda _device: True)
    call = call_of()
    half = dataclasses.replace(call, input=call.input.bfloat16())
    for gru_precision, gemm_precision in (("ieee", "tf32"), ("ieee", "ieee"), ("tf32", "tf32"), ("tf32", "ieee")):
        monkeypatch.setattr(training, "recurrent_precision", lambda said=gru_precision: said)
        monkeypatch.setattr(training, "precision_of", lambda _dtype, said=gemm_precision: said)
        coarse = (gru_precision, gemm_precision) == ("ieee", "tf32")
        assert ("TensorFloat-32" in (training.why_not(call) or "")) is coarse
        assert training.why_not(half) is None
        left.clear()
        training.remember_eager(call)
        assert bool(left) is not coarse, "with another setting it is decided anew"
        ran: list[str] = []
        monkeypatch.setattr(training, "_by_kernels", lambda *_, ran=ran: ran.append("kernels"))
        output, h_n = eager.gru(call)
        training.gradients(call, output, [True] * len(call.tensors), (output, h_n))
        assert bool(ran) is not coarse, "of a compiled model too, which asks for gradients alone"
