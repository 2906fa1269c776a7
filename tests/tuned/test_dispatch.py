"""The public calls: what they refuse, compute and keep, and what importing them costs."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch

import tuned
import tuned.calls.rope.call
import tuned.dispatch
from tests.support.rope_calls import Watch, watch
from tuned.compat.transformer_engine import apply_rotary_pos_emb
from tuned.dispatch import gru_cell, rope, rope_backward, rope_qk, rope_qkv

pytestmark = pytest.mark.processes

__all__ = ["watch"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, S, H, D = 2, 5, 3, 16


def formula(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The studies' PyTorch formula on [b, s, h, d] with an entry a feature, in float64."""
    angle = freqs[: x.shape[1]].double().reshape(1, x.shape[1], 1, -1)
    rotary = angle.shape[-1]
    head, tail = x.double()[..., :rotary], x.double()[..., rotary:]
    first, second = head.chunk(2, -1)
    return torch.cat((head * angle.cos() + torch.cat((-second, first), -1) * angle.sin(), tail), -1)


def tensors(rotary: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, S, H, D, generator=generator), torch.randn(S + 2, 1, 1, rotary, generator=generator)


@pytest.fixture
def kernels(watch: Watch) -> Watch:
    """CPU tensors take the path of GPU tensors, through the interpreter."""
    watch.interpreted = True
    return watch


# Values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary", [D, 8])
def test_eager_on_a_cpu_is_the_studies_formula(rotary: int) -> None:
    x, freqs = tensors(rotary)
    torch.testing.assert_close(rope(x, freqs, rotary_dim=rotary).double(), formula(x, freqs), rtol=1e-5, atol=1e-5)
    sbhd = apply_rotary_pos_emb(x.transpose(0, 1), freqs, fused=False)
    torch.testing.assert_close(sbhd.transpose(0, 1), rope(x, freqs, rotary_dim=rotary))


def test_float64_stays_float64() -> None:
    x, freqs = tensors()
    torch.testing.assert_close(rope(x.double(), freqs), formula(x, freqs), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rotary", [D, 8])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_kernel_gives_what_eager_gives_first_and_again(rotary: int, inplace: bool) -> None:
    x, freqs = tensors(rotary)
    for _ in range(2):
        given = x.clone()
        before = given._version
        out = rope(given, freqs, inplace=inplace, rotary_dim=rotary)
        torch.testing.assert_close(out.double(), formula(x, freqs), rtol=1e-5, atol=1e-5)
        assert (out is given) == inplace
        assert (given._version > before) == inplace
        assert inplace or torch.equal(given, x)
    plans = tuned.calls.rope.call._PLANS
    assert [type(kept) is tuple for kept in plans.values()] == [False, True]  # a plan, and the tensors that have it


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_is_the_transpose_and_differentiable_again(inplace: bool) -> None:
    x, freqs = tensors()
    leaf = x.clone().requires_grad_()
    wanted = x.double().requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(formula(wanted, freqs), wanted, grad.double())
    for _ in range(2):
        (found,) = torch.autograd.grad(rope(leaf * 1, freqs, inplace=inplace), leaf, grad)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    turning = grad.clone().requires_grad_()
    (first,) = torch.autograd.grad(rope(leaf, freqs), leaf, turning, create_graph=True)
    (second,) = torch.autograd.grad(first, turning, x)
    torch.testing.assert_close(second.double(), formula(x, freqs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rope_backward(grad, freqs).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_a_stride_0_gradient_is_read_and_never_written() -> None:
    x, freqs = tensors()
    leaf = x.clone().requires_grad_()
    rope(leaf, freqs).sum().backward()
    wanted = x.double().requires_grad_()
    formula(wanted, freqs).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("inplace", [False, True])
def test_a_query_goes_with_a_key_or_without_and_values_stay(inplace: bool) -> None:
    x, freqs = tensors()
    for _ in range(2):
        q, k = x.clone(), x[:, :, :1].clone()
        found = rope_qk(q, k, freqs, inplace=inplace)
        torch.testing.assert_close(
            [t.double() for t in found], [formula(x, freqs), formula(x[:, :, :1], freqs)], rtol=1e-5, atol=1e-5
        )
        alone, nothing = rope_qk(x.clone(), None, freqs, inplace=inplace)
        assert nothing is None
        assert torch.equal(alone, found[0])
        packed = rope_qkv(torch.cat((x, x[:, :, :1], x[:, :, 1:2]), 2), freqs, kv_heads=1, inplace=inplace)
        assert torch.equal(packed, torch.cat((*found, x[:, :, 1:2]), 2))


@pytest.mark.usefixtures("kernels")
def test_cos_and_sin_of_different_strides_are_right_every_time() -> None:
    x, freqs = tensors()
    cos, sin = freqs.cos()[:, 0, 0].contiguous(), freqs.sin()[:, 0, 0].t().contiguous().t()
    assert cos.stride() != sin.stride()
    for _ in range(3):
        out = rope(x, cos=cos, sin=sin, angle_entries="feature")
        torch.testing.assert_close(out.double(), formula(x, freqs), rtol=1e-5, atol=1e-5)


def test_what_is_wrapped_in_dispatch_can_still_be_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    x, freqs = tensors()
    genuine = tuned.dispatch.rope_qk
    monkeypatch.setattr(tuned.dispatch, "rope_qk", functools.partial(genuine))
    assert tuned.explain(genuine, x, x, freqs).rule == "eager"
    with pytest.raises(TypeError, match="explain knows rope, rope_qk"):
        tuned.explain(len, x)


def test_angles_that_require_grad_get_one() -> None:
    x, freqs = tensors()
    freqs.requires_grad_()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad((rope(x, freqs) * weights).sum(), freqs)
    (expected,) = torch.autograd.grad((formula(x, freqs) * weights).sum(), freqs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert bool(found[:S].any())
    assert tuned.explain(rope, x, freqs).rule == "eager"


@pytest.mark.usefixtures("kernels")
def test_empty_tensors_come_back_empty() -> None:
    _, freqs = tensors()
    assert rope(torch.empty(0, S, H, D), freqs).shape == (0, S, H, D)
    assert rope(torch.empty(B, 0, H, D), freqs, inplace=True).shape == (B, 0, H, D)


def test_torch_compile_traces_it_whole() -> None:
    x, freqs = tensors()
    compiled = torch.compile(lambda t: rope(t * 2, freqs) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), rope(x * 2, freqs) + 1)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_gru_step_is_that_of_pytorch(inplace: bool) -> None:
    cell = torch.nn.GRUCell(7, 9)
    x, h = torch.randn(4, 7), torch.randn(4, 9)
    wanted = cell(x, h)
    with torch.no_grad():
        found = gru_cell(x, h, *cell.parameters(), inplace=inplace)
    torch.testing.assert_close(found, wanted.detach())
    assert (found is h) == inplace
    assert gru_cell(x, torch.randn(4, 9), *cell.parameters()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("read", ["h", "h and more", "part of h"])
def test_a_step_in_place_may_read_what_it_overwrites(read: str, resets: bool, dtype: torch.dtype) -> None:
    wide = {"h": 8, "h and more": 8 + 5, "part of h": 6}[read]
    cell = torch.nn.GRUCell(wide, 8).to(DEVICE, dtype).requires_grad_(False)
    marks = torch.tensor([True, False, True, False], device=DEVICE) if resets else None
    for _ in range(3):  # known from the second call on
        h, more = torch.randn(4, 8).to(DEVICE, dtype), torch.randn(4, 5).to(DEVICE, dtype)
        x = {"h": (h,), "h and more": (h, more), "part of h": (h[:, 2:],)}[read]
        state = h if marks is None else h.masked_fill(marks[:, None], 0)
        given, weights = torch.cat(x, -1), list(cell.parameters())
        exact = torch.gru_cell(given.double(), state.double(), *(w.double() for w in weights))
        theirs = cell(given, state)
        found = gru_cell(x, h, *weights, inplace=True, resets=marks)
        assert found is h
        if dtype is torch.float32:
            torch.testing.assert_close(found, theirs)
            continue
        # Kernels round once, PyTorch also rounds in between: a kernel is nearer to float64, up to that rounding.
        once = torch.finfo(dtype).eps * exact.abs().max()
        assert (found - exact).abs().max() <= (theirs - exact).abs().max() + once


def test_a_step_in_place_that_fails_leaves_its_state() -> None:
    cell = torch.nn.GRUCell(6, 8).requires_grad_(False)
    h = torch.randn(4, 8, dtype=torch.float64)  # autocast does not cast float64
    before, marks = h.clone(), torch.ones(4, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError):
        gru_cell(torch.randn(4, 6), h, *cell.parameters(), inplace=True, resets=marks)
    assert torch.equal(h, before)
    cell.requires_grad_()
    state = before.float()
    with pytest.raises(RuntimeError, match="its old value is needed for a gradient"):
        gru_cell(torch.randn(4, 6), state, *cell.parameters(), inplace=True, resets=marks)
    assert torch.equal(state, before.float())


# Refusals -----------------------------------------------------------------------------------------------------------

X, FREQS = tensors()
REFUSED = {
    "angles too short": (lambda: rope(X, FREQS[:3]), ValueError, "3 positions for a sequence of 5; make them"),
    "half precision freqs": (lambda: rope(X, FREQS.half()), TypeError, "must be float32.*convert with .float"),
    "wrong rotary_dim": (
        lambda: rope(X, FREQS, rotary_dim=8),
        ValueError,
        "rotary_dim=8.*rotate 16 features; leave rotary_dim out",
    ),
    "too many entries": (lambda: rope(X, torch.zeros(9, 40)), ValueError, "even and in .0, head_dim=16"),
    "odd entries": (lambda: rope(X, torch.zeros(9, 7)), ValueError, "even and in"),
    "no angles": (lambda: rope(X), ValueError, "give the angles"),
    "both kinds": (lambda: rope(X, FREQS, FREQS, FREQS), ValueError, "one source of angles, got freqs and cos and sin"),
    "cos alone": (lambda: rope(X, cos=FREQS), ValueError, "both cos and sin"),
    "cos unlike sin": (lambda: rope(X, cos=FREQS, sin=FREQS[:4]), ValueError, "the same shape and dtype"),
    "unknown layout": (lambda: rope(X, FREQS, tensor_format="hbsd"), ValueError, "one of .*sbhd.*got 'hbsd'"),
    "wrong axes": (lambda: rope(X[0], FREQS), ValueError, r"x must be \[b, s, h, d\].*got \[5, 3, 16\]"),
    "integers": (lambda: rope(X.long(), FREQS), TypeError, "floating point"),
    "no tensor": (lambda: rope([1.0], FREQS), TypeError, "must be a tensor, got list"),
    "thd without cu_seqlens": (lambda: rope(X[0], FREQS, tensor_format="thd"), ValueError, "needs cu_seqlens"),
    "cu_seqlens int64": (
        lambda: rope(X[0], FREQS, tensor_format="thd", cu_seqlens=torch.tensor([0, 5])),
        TypeError,
        "must be int32.*torch.int32",
    ),
    "max_seqlen past the angles": (
        lambda: rope(
            X[0], FREQS, tensor_format="thd", cu_seqlens=torch.tensor([0, 5], dtype=torch.int32), max_seqlen=99
        ),
        ValueError,
        "max_seqlen=99",
    ),
    "cu_seqlens without thd": (
        lambda: rope(X, FREQS, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32)),
        ValueError,
        'for tensor_format "thd"',
    ),
    "angle_entries unknown": (lambda: rope(X, FREQS, angle_entries="both"), ValueError, "angle_entries must be"),
    "shared memory in place": (
        lambda: rope(torch.zeros(1, 1, 1, D).expand(B, S, H, D), FREQS, inplace=True),
        ValueError,
        "share memory",
    ),
    "other device": (lambda: rope(X, FREQS.to("meta")), ValueError, "must be on the device of x"),
    "one bias": (
        lambda: gru_cell(torch.ones(1, 2), torch.ones(1, 3), torch.ones(9, 2), torch.ones(9, 3), torch.ones(9)),
        ValueError,
        "both bias_ih and bias_hh",
    ),
    "gru weight": (
        lambda: gru_cell(torch.ones(1, 2), torch.ones(1, 3), torch.ones(8, 2), torch.ones(9, 3)),
        ValueError,
        r"weight_ih must be \[9, 2\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_refused_with_the_rule_and_the_way_out(call: object, error: type, message: str) -> None:
    before = X.clone()
    with pytest.raises(error, match=message):
        call()
    assert torch.equal(X, before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("which", ["leaf", "view of a leaf", "one of several views"])
def test_what_autograd_could_not_follow_is_not_overwritten(which: str) -> None:
    x, freqs = tensors()
    leaf = x.clone().requires_grad_()
    target = {"leaf": leaf, "view of a leaf": leaf[:], "one of several views": torch.stack((leaf, leaf)).unbind()[0]}[
        which
    ]
    before = target.detach().clone()
    with pytest.raises(RuntimeError, match="use inplace=False"):
        rope(target, freqs, inplace=True)
    assert torch.equal(target.detach(), before)


# Import -------------------------------------------------------------------------------------------------------------


MOST_CALLS = 11_700  # of Python functions; 11,373 on Python 3.11 today


def test_importing_dispatch_needs_torch_alone_and_does_little() -> None:
    code = """
import sys, torch
calls = 0
def count(frame, event, _):
    global calls
    # The import system's own depend on where packages lie, and how they are installed.
    calls += event == "call" and "importlib" not in frame.f_code.co_filename
before = set(sys.modules)
sys.setprofile(count)
import tuned.dispatch
sys.setprofile(None)
print(calls, *sorted(m for m in set(sys.modules) - before if not m.startswith("tuned")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    calls, *loaded = done.stdout.split()
    assert not {m.split(".")[0] for m in loaded} & {"triton", "jinja2", "optuna", "generator", "numpy"}
    # Most of it is making the dataclasses of four families; importing torch takes a hundred times as many.
    assert int(calls) < MOST_CALLS


def test_without_triton_a_call_runs_eager() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch, tuned; from tuned.dispatch import rope; "
        "x, f = torch.ones(1, 2, 1, 4), torch.zeros(2, 4); assert torch.equal(rope(x, f), x); "
        "print(tuned.explain(rope, x, f).rule)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["eager"]
