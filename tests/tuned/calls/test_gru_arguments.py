"""tuned.dispatch.gru, gru_cell over segments and linear_cat: what they refuse, and packed sequences by their bounds."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned
from tests.support.gru_calls import FEATURES, B, H, T, kernels, weights_of
from tuned.calls.gru_cell.arguments import checked_cell
from tuned.dispatch import gru, gru_cell, linear_cat

if TYPE_CHECKING:
    from tuned.calls.gru.arguments import GruCall

__all__ = ["kernels"]


# Sequences by their bounds ------------------------------------------------------------------------------------------------

LENGTHS = {
    "unsorted": (2, 5, 1),
    "empty ones": (0, 3, 0, 4, 0),
    "all empty": (0, 0),
    "none": (),
    "one": (7,),
    "alike": (2, 2, 2),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 2)])
def test_sequences_by_their_bounds_are_what_each_gives_alone(
    lengths: tuple[int, ...], layers: int, directions: int
) -> None:
    torch.manual_seed(0)
    weights = weights_of(layers, directions, requires_grad=True)
    x = torch.randn(sum(lengths), FEATURES, requires_grad=True)
    hx = torch.randn(layers * directions, len(lengths), H, requires_grad=True)
    bounds = [0, *itertools.accumulate(lengths)]
    named: dict[str, Any] = {"num_layers": layers, "bidirectional": directions == 2}
    output, h_n = gru(
        x, hx, weights, **named, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=max(lengths, default=0)
    )
    assert (output.shape, h_n.shape) == ((len(x), directions * H), hx.shape)
    loss = torch.zeros(())
    for b, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(h_n[:, b], hx[:, b])
            loss = loss + hx[:, b].sum()
            continue
        alone, state = gru(x[bounds[b] : bounds[b + 1], None], hx[:, b : b + 1].contiguous(), weights, **named)
        torch.testing.assert_close(output[bounds[b] : bounds[b + 1]], alone[:, 0])
        torch.testing.assert_close(h_n[:, b], state[:, 0])
        loss = loss + alone.square().sum() + state.sum()
    if any(lengths):
        found = torch.autograd.grad(output.square().sum() + h_n.sum(), [x, hx, *weights])
        torch.testing.assert_close(found, torch.autograd.grad(loss, [x, hx, *weights]))


def test_weights_may_be_an_iterator() -> None:
    """For example module.parameters(): the first function to read an iterator uses it up."""
    module = torch.nn.GRU(FEATURES, H)
    x, hx = torch.randn(T, B, FEATURES), torch.zeros(1, B, H)
    for _ in range(2):
        for learns in (True, False):
            module.requires_grad_(learns)
            torch.testing.assert_close(gru(x, hx, module.parameters())[0], module(x)[0])


def test_a_wrong_call_is_refused_after_a_right_one_too() -> None:
    """PyTorch's operator, which serves calls that are known to be left to it, takes biases of other shapes and any flag."""
    weights = weights_of(1, 1)
    x, hx, w_ih, w_hh, b_ih, b_hh = torch.randn(T, B, FEATURES), torch.zeros(1, B, H), *weights
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ((w_ih, w_hh, bias, b_hh), {}) for bias in (b_ih[:1], b_ih[None], torch.tensor(5.0), b_ih.expand(B, -1))
    ]
    wrong += [(weights, {name: "no"}) for name in ("training", "recompute", "dropout", "bias", "bidirectional")]
    wrong += [(weights, {"dropout": -1.0}), (weights, {"dropout": 2}), (weights, {"training": True, "dropout": [1]})]
    for _ in range(3):
        gru(x, hx, weights)
        for given, named in wrong:
            with pytest.raises((TypeError, ValueError), match=r"must (be|have) .*got"):
                gru(x, hx, given, **named)


# Segments -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
@pytest.mark.parametrize("widths", [(6,), (1, 3, 2)])
def test_a_linear_over_segments_is_that_of_their_concatenation(shape: tuple[int, ...], widths: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(*shape, 6), torch.randn(5, 6), torch.randn(5)
    torch.testing.assert_close(linear_cat(x.split(widths, -1), weight), torch.nn.functional.linear(x, weight))
    torch.testing.assert_close(
        linear_cat(x.split(widths, -1), weight, bias), torch.nn.functional.linear(x, weight, bias)
    )
    told = tuned.explain(linear_cat, x.split(widths, -1), weight, bias)
    assert (told.rule, told.why) == ("eager", "the tensors are on cpu, the kernels are for GPUs")


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_over_segments_is_that_of_their_concatenation(inplace: bool) -> None:
    x, h, weights = torch.randn(B, FEATURES), torch.randn(B, H), weights_of(1, 1)
    wanted = torch.gru_cell(x, h, *weights)
    before = h._version
    found = gru_cell((x[:, :2], x[:, 2:]), h, *weights, inplace=inplace)
    torch.testing.assert_close(found, wanted)
    assert (found is h) == inplace
    assert (h._version > before) == inplace
    assert tuned.explain(gru_cell, (x[:, :2], x[:, 2:]), h, *weights).rule == "eager"


def test_a_step_in_place_under_autocast_keeps_the_dtype_of_the_state() -> None:
    x, h, weights = torch.randn(B, FEATURES), torch.randn(B, H), weights_of(1, 1)
    wanted = torch.gru_cell(x, h, *weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert gru_cell(x.bfloat16(), h, *weights, inplace=True) is h
    torch.testing.assert_close(h, wanted, rtol=0.05, atol=0.05)


# Refusals -----------------------------------------------------------------------------------------------------------------

X, HX, W = torch.zeros(T, B, FEATURES), torch.zeros(1, B, H), weights_of(1, 1)
ROWS, SIZES, BOUNDS = torch.zeros(6, FEATURES), torch.tensor([3, 2, 1]), torch.tensor([0, 1, 3, 6], dtype=torch.int32)


def by(bounds: Any, longest: int | None = 3, **kwargs: Any) -> Any:
    bounds = torch.tensor(bounds, dtype=torch.int32) if isinstance(bounds, list) else bounds
    return gru(ROWS, HX, W, cu_seqlens=bounds, max_seqlen=longest, **kwargs)


REFUSED = {
    "input is no tensor": (lambda: gru([1.0], HX, W), TypeError, "input must be a tensor, got list"),
    "a weight is none": (lambda: gru(X, HX, [None, *W[1:]]), TypeError, r"weights\[0\] must be a tensor, got NoneType"),
    "input axes": (lambda: gru(X[0], HX, W), ValueError, r"\[seq, batch, features\], got \[3, 6\].*add a batch of 1"),
    "input axes, batch first": (lambda: gru(X[0], HX, W, batch_first=True), ValueError, r"\[batch, seq, features\]"),
    "no steps": (lambda: gru(X[:0], HX, W), ValueError, "at least 1 step"),
    "integers": (lambda: gru(X.long(), HX, W), TypeError, "input must be floating point, got torch.int64"),
    "hx batch": (lambda: gru(X, torch.zeros(1, 2, H), W), ValueError, r"= \[1, 3, hidden\], got \[1, 2, 4\]"),
    "hx layers": (lambda: gru(X, HX, W * 2, num_layers=2), ValueError, r"= \[2, 3, hidden\], got \[1, 3, 4\]"),
    "hx axes": (lambda: gru(X, HX[0], W), ValueError, "hx must be"),
    "hx dtype": (lambda: gru(X, HX.double(), W), TypeError, "dtype of input, torch.float32; hx is torch.float64"),
    "weight dtype": (lambda: gru(X, HX, [*W[:3], W[3].half()]), TypeError, r"weights\[3\] is torch.float16"),
    "hx device": (lambda: gru(X, HX.to("meta"), W), ValueError, "device of input, cpu; hx is on meta"),
    "too few weights": (lambda: gru(X, HX, W[:2]), ValueError, "4 tensors for each of 1 layers and directions.*got 2"),
    "too many weights": (lambda: gru(X, HX, W, bias=False), ValueError, r"2 tensors.*\(w_ih, w_hh\), got 4"),
    "one direction short": (
        lambda: gru(X, torch.zeros(2, B, H), W, bidirectional=True),
        ValueError,
        "each of 2 layers",
    ),
    "w_ih": (
        lambda: gru(X, HX, [W[1], *W[1:]]),
        ValueError,
        r"input must have 4 features, .* w_ih of layer 0, of \[12, 4\] takes, got \[5, 3, 6\]",
    ),
    "w_ih of layer 1": (
        lambda: gru(X, torch.zeros(4, B, H), weights_of(1, 2) * 2, num_layers=2, bidirectional=True),
        ValueError,
        r"weights\[8\], w_ih of layer 1, must be \[12, 8\].*got \[12, 6\]",
    ),
    "bias": (lambda: gru(X, HX, [*W[:3], torch.zeros(4)]), ValueError, r"b_hh of layer 0, must be \[12\].*got \[4\]"),
    "no layers": (lambda: gru(X, HX, W, num_layers=0), ValueError, "num_layers must be at least 1, got 0"),
    "dropout": (lambda: gru(X, HX, W, dropout=1.5), ValueError, r"in \[0, 1\], got 1.5"),
    "both kinds of lengths": (lambda: by(BOUNDS, batch_sizes=SIZES), ValueError, "not both"),
    "max_seqlen alone": (lambda: gru(X, HX, W, max_seqlen=5), ValueError, "max_seqlen is for cu_seqlens"),
    "packed 3-D": (lambda: gru(X, HX, W, batch_sizes=SIZES), ValueError, r"\[rows, features\], got \[5, 3, 6\]"),
    "packed batch first": (lambda: by(BOUNDS, batch_first=True), ValueError, "batch_first must be False"),
    "batch_sizes on a GPU": (
        lambda: gru(ROWS, HX, W, batch_sizes=SIZES.to("meta")),
        TypeError,
        "int64 tensor on the CPU.*on meta",
    ),
    "batch_sizes int32": (lambda: gru(ROWS, HX, W, batch_sizes=SIZES.int()), TypeError, "got torch.int32 on cpu"),
    "batch_sizes list": (lambda: gru(ROWS, HX, W, batch_sizes=[3, 2, 1]), TypeError, "got list"),
    "batch_sizes empty": (lambda: gru(ROWS, HX, W, batch_sizes=SIZES[:0]), ValueError, r"at least 1 step, got \[0\]"),
    "batch_sizes increase": (lambda: gru(ROWS, HX, W, batch_sizes=SIZES.flip(0)), ValueError, "must not increase"),
    "batch_sizes with 0": (
        lambda: gru(ROWS, HX, W, batch_sizes=torch.tensor([3, 3, 0])),
        ValueError,
        "be at least 1",
    ),
    "batch_sizes short": (
        lambda: gru(ROWS, HX, W, batch_sizes=SIZES[:2]),
        ValueError,
        "add up to 5 rows, but input has 6",
    ),
    "batch_sizes of another batch": (
        lambda: gru(ROWS, HX, W, batch_sizes=torch.tensor([2, 2, 2])),
        ValueError,
        r"= \[1, 2, hidden\], got \[1, 3, 4\]",
    ),
    "cu_seqlens int64": (lambda: by(BOUNDS.long()), TypeError, "must be an int32 tensor, got torch.int64.*torch.int32"),
    "cu_seqlens list": (lambda: by((0, 6)), TypeError, "got tuple"),
    "cu_seqlens device": (lambda: by(BOUNDS.to("meta")), ValueError, "on the device of input, cpu, got meta"),
    "cu_seqlens empty": (lambda: by([]), ValueError, r"\[sequences \+ 1\], got \[0\]"),
    "no max_seqlen": (lambda: by(BOUNDS, None), ValueError, "needs max_seqlen, the longest length, got None"),
    "max_seqlen short": (lambda: by(BOUNDS, 2), ValueError, "max_seqlen=2 is less than the longest length, 3"),
    "cu_seqlens decrease": (lambda: by([0, 4, 3, 6], 6), ValueError, "must not decrease, but one length is -1"),
    "cu_seqlens end": (lambda: by([0, 1, 3, 5]), ValueError, "end at the 6 rows of input, got 0 and 5"),
    "cu_seqlens start": (lambda: by([1, 2, 3, 6]), ValueError, "start at 0"),
    "cu_seqlens of another batch": (lambda: by([0, 3, 6]), ValueError, r"= \[1, 2, hidden\], got \[1, 3, 4\]"),
    "segments": (lambda: linear_cat(X, W[0]), TypeError, "tuple of at least one tensor, got Tensor"),
    "no segments": (lambda: linear_cat((), W[0]), TypeError, "at least one"),
    "segment": (lambda: linear_cat((X, None), W[0]), TypeError, r"inputs\[1\] must be a tensor, got NoneType"),
    "segment shapes": (
        lambda: linear_cat((X, X[0]), W[0]),
        ValueError,
        r"must be \[5, 3, 'k'\].*inputs\[1\] is \[3, 6\]",
    ),
    "segment dtype": (lambda: linear_cat((X, X.half()), W[0]), TypeError, r"inputs\[1\] is torch.float16"),
    "linear weight": (lambda: linear_cat((X, X), W[0]), ValueError, r"weight must be \[n, 12\].*got \[12, 6\]"),
    "linear bias": (lambda: linear_cat((X,), W[0], W[2][:2]), ValueError, r"bias must be \[12\], got \[2\]"),
    "linear device": (
        lambda: linear_cat((X,), W[0].to("meta")),
        ValueError,
        r"device of inputs\[0\], cpu; weight: meta",
    ),
    "cell segment": (lambda: gru_cell((X[0], 1), HX[0], *W), TypeError, r"x\[1\] must be a tensor, got int"),
    "cell segment batch": (lambda: gru_cell((X[0], X[0, :2]), HX[0], *W), ValueError, r"got \[\[3, 6\], \[2, 6\]\]"),
    "cell segment dtype": (lambda: gru_cell((X[0], X[0].half()), HX[0], *W), TypeError, r"x\[1\] is torch.float16"),
    "cell segments": (lambda: gru_cell((), HX[0], *W), ValueError, "at least one segment"),
    "cell state": (lambda: gru_cell(X[0], None, *W), TypeError, "h must be a tensor"),
    "cell gradient": (
        lambda: gru_cell(X[0], HX[0] + 0, W[0].clone().requires_grad_(), *W[1:], inplace=True),
        RuntimeError,
        "use inplace=False",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_refused_with_the_rule_and_the_way_out(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_dropout_counts_between_layers_in_training_alone(kernels: list[GruCall]) -> None:
    two, hx = weights_of(1, 1) + weights_of(2, 1)[4:], torch.zeros(2, B, H)
    with torch.no_grad():
        gru(X, HX, W, dropout=0.5, training=True)
        gru(X, hx, two, num_layers=2, dropout=0.5)
        gru(X, hx, two, num_layers=2, dropout=0.5, training=True)
    assert [call.dropout for call in kernels] == [0.0, 0.0, 0.5]


def test_segments_are_checked_without_being_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise AssertionError("the segments were concatenated to look at their shape")

    monkeypatch.setattr(torch, "cat", refuse)
    a, b, h = torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 5)
    segments, _ = checked_cell((a, b), h, torch.ones(15, 7), torch.ones(15, 5), None, None, inplace=False)
    assert segments[0] is a
    assert segments[1] is b
    with pytest.raises(ValueError, match=r"x must be \[batch, 8\] for weight_ih of \[15, 8\], got \[2, 7\]"):
        checked_cell((a, b), h, torch.ones(15, 8), torch.ones(15, 5), None, None, inplace=False)
