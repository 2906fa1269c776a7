"""tuned.nn: inputs and outputs of PyTorch's modules, whatever serves them; and existing models converted to use it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import tuned
import tuned.nn
from tests.support import pairwise
from tests.support.gru_calls import FEATURES, B, H, T, kernels
from tuned.calls.gru import eager, training
from tuned.dispatch import gru, gru_cell
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from tuned.calls.gru.arguments import GruCall

__all__ = ["kernels"]

# Each pair of settings occurs in some row.
GRID = [
    tuple(row.values())
    for row in pairwise.covering(
        pairwise.product(
            {
                "layers": (1, 2, 3), "both": (False, True), "first": (False, True), "packs": (False, True),
                "bias": (True, False), "dtype": (torch.float32, torch.float64, torch.bfloat16),
            },
            lambda _: True,
        )
    )
]  # fmt: skip


def pair(*args: Any, **kwargs: Any) -> tuple[torch.nn.GRU, tuned.nn.GRU]:
    """torch's module and ours, with the same parameters."""
    torch.manual_seed(0)
    theirs, ours = torch.nn.GRU(*args, **kwargs), tuned.nn.GRU(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def packed(dtype: torch.dtype = torch.float32, **kwargs: Any) -> PackedSequence:
    sequences = [torch.randn(length, FEATURES, dtype=dtype) for length in (2, 5, 1)]
    return pack_sequence(sequences, **{"enforce_sorted": False, **kwargs})


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, PackedSequence):
            assert isinstance(a, PackedSequence)
            assert_same([t for t in a if t is not None], [t for t in b if t is not None])
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("layers", "both", "first", "packs", "bias", "dtype"), GRID)
def test_a_module_gives_what_pytorchs_gives_and_says_why_it_is_eager(
    layers: int, both: bool, first: bool, packs: bool, bias: bool, dtype: torch.dtype
) -> None:
    theirs, ours = pair(FEATURES, H, layers, bias, first, bidirectional=both, dtype=dtype)
    x = packed(dtype) if packs else torch.randn((B, T, FEATURES) if first else (T, B, FEATURES), dtype=dtype)
    hx = torch.randn(layers * (2 if both else 1), H, B, dtype=dtype).transpose(1, 2)  # not contiguous
    assert repr(ours) == f"tuned.nn.{theirs!r}"
    assert_same(ours(x), theirs(x))
    with torch.no_grad():
        assert_same(ours(x, hx), theirs(x, hx))
        told = tuned.explain(ours, x, hx)
    assert (told.rule, told.why) == ("eager", "the tensors are on cpu, the kernels are for GPUs")


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("it is known, and yet its arguments are checked")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_what_pytorch_serves_is_passed_on_without_checks(
    gradient: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, and with a gradient, which needs no earlier call."""
    theirs, ours = pair(FEATURES, H, 2, bidirectional=True, dropout=0.5 if training and gradient else 0.0)
    cells = torch.nn.GRUCell(FEATURES, H), tuned.nn.GRUCell(FEATURES, H)
    cells[1].load_state_dict(cells[0].state_dict())
    x, hx, step, state = (torch.randn(shape) for shape in ((T, B, FEATURES), (4, B, H), (B, FEATURES), (B, H)))
    with torch.set_grad_enabled(gradient):
        if not gradient:
            ours(x)
        monkeypatch.setattr(tuned.nn, "gru_arguments", refuse)
        monkeypatch.setattr(tuned.nn, "cell_arguments", refuse)
        for given in ((x,), (x, hx)):
            results = []
            for module in (theirs, ours):
                torch.manual_seed(1)
                results.append(module.train(training)(*given))
            assert_same(*results)
            assert results[1][0].requires_grad == gradient
        for given in ((step,), (step, state)):
            assert_same(cells[1](*given), cells[0](*given))


@pytest.mark.parametrize("gradient", [False, True])
def test_a_pack_that_pytorch_serves_is_passed_on_in_its_order(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a state and without, for unsorted sequences; wrong shapes are still refused as torch.nn.GRU refuses them."""
    theirs, ours = pair(FEATURES, H, 2, bidirectional=True)
    x, hx = packed(), torch.randn(4, B, H)
    with torch.set_grad_enabled(gradient):
        with torch.no_grad():
            ours(x)
        with monkeypatch.context() as patch:
            patch.setattr(tuned.nn, "gru_arguments", refuse)
            for given in ((x,), (x, hx)):
                found = ours(*given)
                assert_same(found, theirs(*given))
                assert found[1].requires_grad == gradient
        with pytest.raises(RuntimeError, match="Expected hidden size"):
            ours(x, hx[..., 1:])


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of values that become constants
@pytest.mark.parametrize("way", ["ours", "patched", "complex", "patched complex", "traced"])
def test_the_sizes_of_a_pack_may_have_strides(way: str) -> None:
    """torch.gru reads their memory one value after the other: the second call of a module used to pass them on so."""
    # Our checks refuse complex numbers, and PyTorch's do not.
    dtype = torch.complex64 if "complex" in way else torch.float32
    theirs, ours = (module.requires_grad_(False) for module in pair(FEATURES, H, dtype=dtype))
    x, sizes = torch.randn(15, FEATURES, dtype=dtype), torch.tensor([6, 4, 3, 2, 3, 9, 3])[::2]

    def run(x: torch.Tensor, sizes: torch.Tensor) -> Any:
        output, h_n = (theirs if "patched" in way else ours)(PackedSequence(x, sizes))
        return output.data, h_n

    with torch.no_grad():
        wanted = theirs(PackedSequence(x, sizes.contiguous()))
        called = torch.jit.trace(run, (x, sizes.contiguous())) if way == "traced" else run
        with tuned.nn.patched() if "patched" in way else contextlib.nullcontext():
            for _ in range(2):
                assert_same(called(x, sizes), (wanted[0].data, wanted[1]))


def test_what_is_known_of_a_class_of_calls_says_nothing_of_weights() -> None:
    """Each call may have other weights: of functional_call, of a parametrization, converted, or refused ones."""
    theirs, ours = pair(FEATURES, H)
    x = torch.randn(T, B, FEATURES)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(tuned.nn.gru_plan, "is_left", lambda *_: True)
        others = {name: 2 * weight for name, weight in theirs.named_parameters()}
        found, wanted = (torch.func.functional_call(module, others, (x,)) for module in (ours, theirs))
        assert_same(found, wanted)
        for module in (ours, theirs):
            torch.nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
        assert_same(ours(x), theirs(x))
        for module in (theirs, ours):
            torch.nn.utils.parametrize.remove_parametrizations(module, "weight_hh_l0")
            module.weight_hh_l0.data = module.weight_hh_l0.data.t().contiguous().t()
        assert_same(ours(x), theirs(x))
        for module in (theirs, ours):
            with pytest.raises(ValueError, match="RNN input dtype"):
                module.double()(x)
        assert_same(ours(x.double()), theirs(x.double()))


@pytest.mark.parametrize("first", [False, True])
def test_one_sequence_needs_no_batch_axis(first: bool) -> None:
    theirs, ours = pair(FEATURES, H, 2, batch_first=first)
    x, hx = torch.randn(T, FEATURES), torch.randn(2, H)
    assert_same(ours(x, hx), theirs(x, hx))
    assert_same(ours(x), theirs(x))


def test_a_sorted_pack_keeps_its_order() -> None:
    theirs, ours = pair(FEATURES, H)
    sequences = [torch.randn(n, FEATURES) for n in (4, 2)]
    x, hx = pack_sequence(sequences), torch.randn(1, 2, H)
    assert_same(ours(x, hx), theirs(x, hx))


def test_an_empty_batch_is_served() -> None:
    theirs, ours = pair(FEATURES, H, 2, bidirectional=True)
    assert_same(ours(torch.randn(T, 0, FEATURES)), theirs(torch.randn(T, 0, FEATURES)))


def test_dropout_draws_pytorchs_numbers_and_only_in_training() -> None:
    theirs, ours = pair(FEATURES, H, 3, dropout=0.5)
    x = torch.randn(T, B, FEATURES)
    results = []
    for module in (theirs, ours):
        torch.manual_seed(1)
        results.append((*module(x), *module.eval()(x)))
    assert_same(*results)
    assert not torch.equal(results[0][0], results[0][2])


def test_gradients_are_pytorchs() -> None:
    theirs, ours = pair(FEATURES, H, 2, bidirectional=True)
    x = torch.randn(T, B, FEATURES, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(m(x)[0].square().sum() + m(x)[1].sum(), [x, *m.parameters()]) for m in (ours, theirs)
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_on_a_cpu_is_pytorchs(dtype: torch.dtype) -> None:
    theirs, ours = pair(FEATURES, H, 2)
    cells = torch.nn.GRUCell(FEATURES, H), tuned.nn.GRUCell(FEATURES, H)
    cells[1].load_state_dict(cells[0].state_dict())
    x = torch.randn(T, B, FEATURES).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(ours(x), theirs(x))
        assert_same([cells[1](x[0])], [cells[0](x[0])])


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_module_can_be_copied_and_kept(way: str) -> None:
    _, ours = pair(FEATURES, H, 2)
    x = torch.randn(T, B, FEATURES)
    if way == "deepcopy":
        again = copy.deepcopy(ours)
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert_same(again(x), ours(x))
    assert {p.data_ptr() for p in again.parameters()}.isdisjoint(p.data_ptr() for p in ours.parameters())
    with torch.no_grad():
        next(again.parameters()).zero_()
    assert not torch.equal(again(x)[0], ours(x)[0]), "the copy reads its own weights"


def test_weights_are_read_where_they_are() -> None:
    theirs, ours = pair(FEATURES, H)
    x = torch.randn(T, B, FEATURES)
    halved = {name: p.detach() / 2 for name, p in ours.named_parameters()}
    wanted = torch.func.functional_call(theirs, halved, (x,))
    assert_same(torch.func.functional_call(ours, halved, (x,)), wanted)
    assert not torch.equal(ours(x)[0], wanted[0])
    torch.nn.utils.parametrize.register_parametrization(ours, "weight_hh_l0", torch.nn.Softsign())
    with torch.no_grad():
        theirs.weight_hh_l0.copy_(torch.nn.functional.softsign(theirs.weight_hh_l0))
    assert_same(ours(x), theirs(x))


# Kernels: a stand-in takes their place, in float64 --------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "both", "first", "packs", "bias"), sorted({row[:5] for row in GRID}))
def test_without_a_gradient_kernels_serve_every_form(
    kernels: list[GruCall], layers: int, both: bool, first: bool, packs: bool, bias: bool
) -> None:
    theirs, ours = pair(FEATURES, H, layers, bias, first, bidirectional=both)
    x = packed() if packs else torch.randn((B, T, FEATURES) if first else (T, B, FEATURES))
    ours(x)
    assert not kernels, "a gradient was needed"
    with torch.no_grad():
        found = ours(x)
        told = tuned.explain(ours, x)
        with tuned.nn.patched():
            patched = theirs(x)
            assert told == tuned.explain(theirs, x)
    assert (len(kernels), told.rule, told.kernels) == (2, "default", ("a_kernel",))
    assert_same(patched, found)
    for a, b in zip(found, theirs(x), strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-5)
    assert [t.data_ptr() for t in kernels[0].weights] == [p.data_ptr() for p in ours.parameters()]


def test_a_kernel_gets_what_autocast_casts_and_no_autocast(kernels: list[GruCall]) -> None:
    theirs, ours = pair(FEATURES, H, 2)
    x = torch.randn(T, B, FEATURES)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output, h_n = ours(x)
        assert tuned.explain(ours, x).rule == "default"
    (call,) = kernels
    assert {t.dtype for t in (*call.tensors, output, h_n)} == {torch.bfloat16}
    torch.testing.assert_close(output.float(), theirs(x)[0], rtol=0.05, atol=0.05)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same(ours.double()(x.double()), theirs.double()(x.double()))
        assert "float64" in tuned.explain(ours, x.double()).why


@pytest.mark.usefixtures("kernels")
def test_explain_names_what_keeps_the_kernels_away() -> None:
    theirs, ours = pair(FEATURES, H)
    x = torch.randn(T, B, FEATURES)
    assert tuned.explain(ours, x).why == "a gradient is needed: no row says so"
    assert "tuned.nn.patched()" in tuned.explain(theirs, x).why
    with torch.no_grad():
        assert tuned.explain(ours, x).rule == "default"
        assert tuned.explain(gru, x, torch.zeros(1, B, H), list(ours.parameters())).rule == "default"


@pytest.mark.parametrize("packs", [False, True])
def test_with_a_gradient_kernels_serve_where_a_row_says_that_they_are_faster(
    kernels: list[GruCall], monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    """A module of packed sequences, which is not passed on at once on a CPU; and a function."""
    theirs, ours = pair(FEATURES, H)
    x, state, weights = torch.randn(T, B, FEATURES), torch.zeros(1, B, H), list(ours.parameters())
    given: tuple[Any, ...] = (packed(),) if packs else (x, state, weights)
    function: Any = ours if packs else gru
    called: list[GruCall] = []
    monkeypatch.setattr(training, "_choice", lambda _call: Choice("winner", "of a row", "v"))
    monkeypatch.setattr(training.slower, "_least_steps", lambda *_, **__: 0)
    monkeypatch.setattr(training.run, "kernels_us", lambda _call, **_: 0.0)  # a GPU's times, which this call is not on
    own = dataclasses.replace(training.BACKWARD, kernel_names=lambda *_: ("its_gradient",))
    monkeypatch.setattr(training, "BACKWARD", own)
    monkeypatch.setattr(training, "forward", lambda call: called.append(call) or eager.gru(call))
    found = function(*given)
    assert_same(found, theirs(given[0]))
    assert found[1].requires_grad
    told = tuned.explain(function, *given)
    assert (told.rule, told.kernels) == ("winner", ("a_kernel", "its_gradient"))
    assert told.why.startswith("of the gradient, of a row; the forward has its own, ")
    assert (len(called), len(kernels)) == (1, 0)
    with torch.no_grad():
        function(*given)
    assert (len(called), len(kernels)) == (1, 1)


def test_what_looks_at_operators_finds_pytorchs(kernels: list[GruCall]) -> None:
    theirs, ours = pair(FEATURES, H)
    x, tangent = torch.randn(2, T, B, FEATURES)
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and warns of checks of shapes
            traced = torch.jit.trace(ours, x, check_trace=False)  # the check runs it once more, untraced
        assert_same(traced(x[1:]), theirs(x[1:]))
        found, wanted = (torch.func.jvp(lambda t, m=m: m(t)[0], (x,), (tangent,)) for m in (ours, theirs))
        assert_same(found, wanted)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            assert_same(torch.autograd.forward_ad.unpack_dual(ours(dual)[0]), wanted)
        why = []  # torch.gru has no rule for vmap, so the test looks at what the call would get
        torch.func.vmap(lambda t: why.append(tuned.explain(ours, t, torch.zeros(1, B, H)).why) or t)(x[None])
        assert "torch.func" in why[0]
    assert not kernels


# Cells ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(), (0,), (3,)])
def test_a_cell_gives_what_pytorchs_gives(bias: bool, batch: tuple[int, ...]) -> None:
    theirs, ours = torch.nn.GRUCell(FEATURES, H, bias), tuned.nn.GRUCell(FEATURES, H, bias)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == f"tuned.nn.{theirs!r}"
    x, hx = torch.randn(*batch, FEATURES), torch.randn(*batch, H)
    assert_same([ours(x), ours(x, hx)], [theirs(x), theirs(x, hx)])
    assert_same([ours(x.split((1, 3, 2), -1), hx)], [theirs(x, hx)])
    with torch.no_grad():
        assert_same([ours(x, hx)], [theirs(x, hx)])
        told = tuned.explain(ours, x, hx)
    assert (told.rule, told.why) == ("eager", "the tensors are on cpu, the kernels are for GPUs")
    found, wanted = (torch.autograd.grad(m(x, hx).square().sum(), list(m.parameters())) for m in (ours, theirs))
    assert_same(found, wanted)


CELL = tuned.nn.GRUCell(FEATURES, H)
WRONG = {
    "cell segments": (
        lambda: CELL((torch.zeros(B, 2), torch.zeros(B, 2))),
        ValueError,
        r"x must be \[batch, 6\] for weight_ih of \[12, 6\], got \[3, 4\]",
    ),
    "cell empty": (lambda: CELL(()), ValueError, "at least one segment"),
    "explain": (lambda: tuned.explain(torch.nn.LSTM(1, 1)), TypeError, "explain knows .*gru.*got LSTM"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# Existing models --------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A model that knows nothing of tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = torch.nn.GRU(FEATURES, H, batch_first=True), torch.nn.GRUCell(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, h_n = self.encoder(x)
        return self.cell(output[:, -1], h_n[0])


def test_an_existing_model_is_patched_and_left_as_it_was(kernels: list[GruCall]) -> None:
    model, x = Model(), torch.randn(B, T, FEATURES)
    with torch.no_grad():
        wanted = model(x)
        with tuned.nn.patched():
            with tuned.nn.patched():
                torch.testing.assert_close(model(x), wanted)
            assert len(kernels) == 1
            other = threading.Thread(target=torch.no_grad()(model), args=(x,))
            other.start()
            other.join()
            assert len(kernels) == 2, "another thread sees it, and the inner one that was left did not end it"
        with pytest.raises(KeyError), tuned.nn.patched():
            raise KeyError
        assert_same([model(x)], [wanted])
    assert len(kernels) == 2
    assert not tuned.nn.is_patched()
    assert not {"gru", "gru_cell"} & set(vars(torch._VF))


def test_another_patch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(*_: Any) -> str:
        return "another"

    monkeypatch.setattr(torch._VF, "gru_cell", another)
    with tuned.nn.patched():
        assert torch._VF.gru_cell is not another
    assert torch._VF.gru_cell is another


def test_other_forms_of_the_patched_functions_are_pytorchs() -> None:
    x, h, *weights = (torch.randn(*s) for s in ((B, FEATURES), (B, H), (3 * H, FEATURES), (3 * H, H)))
    with tuned.nn.patched():
        found = torch._VF.gru_cell(x, h, w_ih=weights[0], w_hh=weights[1])
        assert_same([torch._VF.gru_cell(x, h, *weights)], [found])
        whole = torch._VF.gru(
            x[None], h[None], weights, has_biases=False, num_layers=1, dropout=0.0, train=False, bidirectional=False,
            batch_first=False,
        )  # fmt: skip
    assert_same([gru_cell(x, h, *weights), whole[0][0]], [found, found])


class Kept(torch.nn.GRU):
    """A subclass that keeps PyTorch's forward."""

    def told(self) -> str:
        return super().extra_repr()


class KeptCell(torch.nn.GRUCell):
    """A cell that keeps PyTorch's forward."""


class Checked(torch.nn.GRU):
    """A subclass that keeps PyTorch's forward, and overrides a method that this forward calls."""

    def permute_hidden(self, hx: torch.Tensor, permutation: Any) -> torch.Tensor:
        return super().permute_hidden(hx, permutation)


class Otherwise(torch.nn.GRUCell):
    """A subclass with its own forward."""

    def forward(self, input: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 - its name there
        return super().forward(input, hx)


def test_subclasses_and_parametrized_modules_are_replaced_too(kernels: list[GruCall]) -> None:
    model = torch.nn.ModuleList([torch.nn.GRU(FEATURES, H), Kept(FEATURES, H)])
    torch.nn.utils.parametrizations.weight_norm(model[0], "weight_hh_l0")
    x, kinds = torch.randn(T, B, FEATURES), [type(m) for m in model]
    with torch.no_grad():
        wanted = [m(x)[0] for m in model]
        tuned.nn.replace(tuned.nn.replace(model))
        torch.testing.assert_close([m(x)[0] for m in model], wanted)
        assert len(kernels) == 2
        assert isinstance(model[0], tuned.nn.GRU)
        assert isinstance(model[1], Kept)
        assert (model[1].told(), repr(model[1])) == (f"{FEATURES}, {H}", f"tuned.nn.Kept({FEATURES}, {H})")
        assert "tuned.nn.ParametrizedGRU" in repr(model)
        tuned.nn.restore(model)
        assert [type(m) for m in model] == kinds
        tuned.nn.replace(model)
        torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight_hh_l0")
        assert type(model[0]) is tuned.nn.GRU
        torch.testing.assert_close(model[0](x)[0], wanted[0])


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save"])
def test_a_replaced_subclass_is_kept_and_copied(way: str) -> None:
    for kind in (Kept, KeptCell):
        kept = io.BytesIO()
        model = tuned.nn.replace(torch.nn.Sequential(kind(FEATURES, H)))
        if way == "torch.save":
            torch.save(model, kept)
            kept.seek(0)
            found = torch.load(kept, weights_only=False)
        else:
            found = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert type(found[0]) is type(model[0])
        assert type(found[0]).__qualname__ == kind.__qualname__
        assert found.state_dict().keys() == model.state_dict().keys()
        assert type(tuned.nn.restore(found)[0]) is kind
        x = torch.randn(T, B, FEATURES) if kind is Kept else torch.randn(B, FEATURES)
        torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize("change", ["one more", "one less", "the first"])
def test_what_was_parametrized_since_is_restored_too(change: str) -> None:
    norm, plain = torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrize.remove_parametrizations
    module, x = torch.nn.GRU(FEATURES, H), torch.randn(T, B, FEATURES)
    if change != "the first":
        norm(module, "weight_hh_l0")
    if change == "one less":
        norm(module, "weight_ih_l0")
    tuned.nn.replace(module)
    if change == "one less":
        plain(module, "weight_ih_l0")
    else:
        norm(module, "weight_ih_l0")
    assert tuned.nn.runs_ours(module)
    wanted = module(x)
    tuned.nn.restore(module)
    assert type(module).__bases__ == (torch.nn.GRU,)
    assert_same(module(x), wanted)
    for name in list(module.parametrizations):
        plain(module, name)
    assert type(module) is torch.nn.GRU
    torch.testing.assert_close(module(x), wanted)


def test_replacing_runs_no_code_of_the_class() -> None:
    made: list[str] = []

    class Meta(type):
        def __new__(cls, name: str, *rest: Any, **named: Any) -> Any:
            made.append(name)
            return super().__new__(cls, name, *rest, **named)

    class Registered(torch.nn.GRU, metaclass=Meta):
        def __init_subclass__(cls, *, key: str) -> None:
            made.append(key)

    class One(Registered, key="one"):
        pass

    known = list(made)
    model = torch.nn.Sequential(torch.nn.GRU(FEATURES, H), One(FEATURES, H))
    tuned.nn.replace(model)
    assert made == known
    assert all(map(tuned.nn.runs_ours, model))
    assert isinstance(model[1], One)


class Slotted(torch.nn.GRU):
    """A subclass whose objects have another memory layout."""

    __slots__ = ("more",)


class Further(tuned.nn.GRUCell):
    """A subclass of our cell with its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 100


class FurtherLayer(tuned.nn.GRU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0] + 100


def test_what_is_not_replaced_is_told() -> None:
    parts = [kind(FEATURES, H) for kind in (torch.nn.GRU, Otherwise, Slotted, Checked, torch.nn.GRUCell)]
    own = torch.nn.Sequential(*parts)
    with pytest.warns(
        UserWarning,
        match=r"left 1 \(Otherwise\), 2 \(Slotted\), 3 \(Checked\) as it is: a class or module with a forward, checks or __slots__ of "
        r"its own .* "
        "tuned.nn.patched",
    ):
        tuned.nn.replace(own)
    assert [type(module) for module in own] == [tuned.nn.GRU, Otherwise, Slotted, Checked, tuned.nn.GRUCell]
    with pytest.warns(
        UserWarning, match="found no torch.nn.GRU or GRUCell in Linear: what calls torch.gru itself has to call"
    ):
        tuned.nn.replace(torch.nn.Linear(2, 2))


def hooked(module: Any) -> Any:
    """The module with a forward as one of its attributes, which calls the one it had."""
    old = module.forward
    module.forward = functools.partial(old)
    return module


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.GRUCell, Kept])
def test_a_module_with_a_forward_of_its_own_is_left_alone(kind: Any) -> None:
    """Hooks such as accelerate's are put there. It used to be counted, and explain named kernels that did not run."""
    module, x = hooked(kind(FEATURES, H)), torch.randn(*(() if kind is torch.nn.GRUCell else (T,)), B, FEATURES)
    with pytest.warns(UserWarning, match=rf"left the model \({kind.__qualname__}\) as it is: a class or module with"):
        tuned.nn.replace(module)
    assert type(module) is kind
    with tuned.nn.patched():
        assert f"this {kind.__qualname__} has a forward of its own" in tuned.explain(module, x).why
    again = hooked(tuned.nn.replace(kind(FEATURES, H)))  # what it calls is ours
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tuned.nn.replace(again)
        assert not tuned.nn.runs_ours(again)
        assert f"this {kind.__qualname__} has a forward of its own" in tuned.explain(again, x).why
        assert type(tuned.nn.restore(again)) is kind


def test_a_module_with_a_check_of_its_own_is_left_alone() -> None:
    module = torch.nn.GRU(FEATURES, H)
    module.permute_hidden = lambda hx, _: hx + 1  # type: ignore[method-assign,assignment]
    with pytest.warns(UserWarning, match="left the model"):
        assert type(tuned.nn.replace(module)) is torch.nn.GRU


def test_a_subclass_of_pytorchs_with_a_forward_of_its_own_is_explained() -> None:
    """While patched, explain took the arguments of the subclass's forward for those of torch.nn.GRU."""

    class Passing(torch.nn.GRU):
        def forward(self, *args: Any, **named: Any) -> Any:
            return super().forward(*args, **named)

    for block in (tuned.nn.patched(), contextlib.nullcontext()):
        with block:
            told = tuned.explain(Passing(FEATURES, H), torch.randn(T, B, FEATURES))
            assert (told.rule, told.kernels) == ("eager", ())
            assert "Passing has a forward of its own, which may do anything" in told.why


@pytest.mark.parametrize("kind", [Further, FurtherLayer])
def test_a_subclass_of_ours_with_a_forward_of_its_own_keeps_it(kind: Any) -> None:
    """torch.jit.script replaced such a subclass by PyTorch's module, in the model too."""
    model, x = torch.nn.Sequential(kind(FEATURES, H)), torch.randn(2, 3, FEATURES)
    x = x[0] if kind is Further else x
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tuned.nn.replace(model)  # the model contains one of ours
    with pytest.raises(RuntimeError):
        torch.jit.script(model)
    assert type(model[0]) is kind
    assert model(x).min() > 50
    assert f"{kind.__qualname__} has a forward of its own" in tuned.explain(model[0], x).why
    with pytest.warns(UserWarning, match=rf"restore left 0 \({kind.__qualname__}\) as it is"):
        tuned.nn.restore(model)
    assert type(model[0]) is kind


@pytest.mark.parametrize("bad", ["no", 2, None, torch.tensor(True)])
def test_recompute_is_true_or_false(bad: Any) -> None:
    with pytest.raises(TypeError, match="recompute must be a bool, got"):
        tuned.nn.GRU(FEATURES, H, recompute=bad)
    assert repr(tuned.nn.GRU(FEATURES, H, recompute=True)) == f"tuned.nn.GRU({FEATURES}, {H}, recompute=True)"
    assert repr(tuned.nn.GRU(FEATURES, H)) == f"tuned.nn.GRU({FEATURES}, {H})"


def test_explaining_a_module_changes_nothing_of_it() -> None:
    """Spectral norm updates its vectors whenever the weight is computed in training, so explain must not compute it."""
    for module, x in (
        (tuned.nn.GRU(FEATURES, H), torch.randn(T, B, FEATURES)),
        (tuned.nn.GRUCell(FEATURES, H), torch.randn(B, FEATURES)),
    ):
        name = "weight_hh_l0" if isinstance(module, tuned.nn.GRU) else "weight_hh"
        torch.nn.utils.parametrizations.spectral_norm(module, name)
        before = {key: t.clone() for key, t in module.state_dict().items()}
        tuned.explain(module, x)
        assert all(torch.equal(t, before[key]) for key, t in module.state_dict().items())
        assert all(part.training for part in module.modules())
        module(x)
        assert not all(torch.equal(t, before[key]) for key, t in module.state_dict().items())


def test_on_meta_a_dtype_that_does_not_fit_is_pytorchs_error() -> None:
    x = torch.empty(T, B, FEATURES, dtype=torch.float64, device="meta")
    for kind in (torch.nn.GRU, tuned.nn.GRU):
        with pytest.raises(ValueError, match="does not match weight dtype"):
            kind(FEATURES, H, device="meta")(x)


def test_modules_are_replaced_in_place_and_restored(kernels: list[GruCall]) -> None:
    model, x = Model(), torch.randn(B, T, FEATURES)
    before = dict(model.named_parameters())
    with torch.no_grad():
        wanted = model(x)
        assert tuned.nn.replace(model) is model
        assert (type(model.encoder), type(model.cell)) == (tuned.nn.GRU, tuned.nn.GRUCell)
        torch.testing.assert_close(model(x), wanted)
        assert len(kernels) == 1
        assert all(p is before[name] for name, p in model.named_parameters())
        tuned.nn.restore(model)
        assert (type(model.encoder), type(model.cell)) == (torch.nn.GRU, torch.nn.GRUCell)
        assert_same([model(x)], [wanted])
    assert len(kernels) == 1


def test_a_traced_module_beside_a_gru_stays_as_it_is() -> None:
    """Any assignment to the class of such a module takes its forward away, unless it was called before."""
    linear, x = torch.nn.Linear(FEATURES, FEATURES), torch.randn(T, B, FEATURES)
    model = torch.nn.Sequential(torch.jit.trace(linear, x), torch.nn.GRU(FEATURES, H))
    tuned.nn.restore(tuned.nn.replace(model))
    assert_same(model(x), model[1](linear(x)))
    assert type(model[1]) is torch.nn.GRU
