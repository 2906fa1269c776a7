"""Complete RoPE calls in eager PyTorch: against the oracle, by every public function, differentiable in the angles."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.support import oracle
from tests.support.rope_case import Built, RopeCase, assert_close, assert_memory_right, build, canonical, wanted
from tests.support.rope_rows import PACKED, PACKED_SEQ, ROWS, case_of, given_of, row_id, settings_of
from tests.support.run import DEVICE, to_numpy
from tuned.calls.rope.call import run_eager
from tuned.dispatch import rope, rope_backward, rope_qk, rope_qkv
from tuned.families.rope.eager import rotate
from tuned.families.rope.spec import LAYOUTS, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("rounded")


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch rounds what Triton's interpreter truncates."""
    monkeypatch.setattr("tests.support.rope_case.truncates", lambda _: False)


def assert_rotated(built: Built, out: torch.Tensor, key_out: torch.Tensor | None) -> None:
    """Results are the oracle's, computed from what the tensors held before the call."""
    assert_close(to_numpy(canonical(out, built.case.spec.layout)), *wanted(built))
    assert (key_out is None) == (built.key_before is None)
    if key_out is not None:
        assert_close(to_numpy(canonical(key_out, built.case.spec.layout)), *wanted(built, built.key_before))


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_the_formula_rotates_as_the_oracle_does(row: dict[str, Any]) -> None:
    built = build(case_of(row))
    out, key_out = rotate(built.case.spec, built.call)
    assert out.dtype == built.call.x.dtype
    assert_rotated(built, out, key_out)


def seen(case: RopeCase) -> bool:
    """Whether positions outside of the angles are an error; values on a GPU, packed lengths too, are not read."""
    spec = case.spec
    if DEVICE != "cpu" and (spec.packed or spec.positions in ("offset", "starts", "ids")):
        return False
    if spec.angles == "inv_freq":
        return False
    starts = (case.starts,) if isinstance(case.starts, int) else case.starts
    last = max(map(max, case.ids)) if case.ids is not None else max(starts, default=0)
    if spec.packed:
        assert case.cu_seqlens is not None
        lengths = [end - begin for begin, end in itertools.pairwise(case.cu_seqlens)]
        firsts = itertools.cycle(starts)
        reached = [first + length - 1 for first, length in zip(firsts, lengths, strict=False) if length]
        last = max(last if spec.positions in ("offset", "starts") else -1, *reached, -1)
    elif case.ids is None:
        last += case.seq * case.cp_size - 1  # of the whole sequence, whatever part this rank has
    return last >= case.angle_rows  # type: ignore[operator]


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_call_with_its_arguments_rotates_as_the_oracle_does(row: dict[str, Any]) -> None:
    built = build(case_of(row))
    given, settings = given_of(built), settings_of(built)
    if seen(built.case):
        with pytest.raises(ValueError, match=r"too short|must be in \[0, .*the rows of the angles, got"):
            run_eager(given, settings)
        assert all(torch.equal(t.nan_to_num(), built.before[name].nan_to_num()) for name, t in built.bases.items())
        return
    result = run_eager(given, settings)
    out, key_out = result if given.key is not None else (result, None)
    assert_rotated(built, out, key_out)
    if settings.inplace:
        assert out is given.x
        assert key_out is given.key
        assert_memory_right(built)
    else:
        assert all(torch.equal(t.nan_to_num(), built.before[name].nan_to_num()) for name, t in built.bases.items())


# The public functions -----------------------------------------------------------------------------------------------

SPEC = RopeSpec("bshd", "float32", 4, 12, 8, key_heads=2)


def tables(rows: int, pairs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    radians = torch.randn(rows, pairs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return radians.cos().to(dtype), radians.sin().to(dtype)


def draws(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_query_and_key_are_rotated_as_each_alone(layout: str, *, inplace: bool) -> None:
    q, k = draws(*(((14, h, 12) if layout == "thd" else (2, 7, h, 12)) for h in (4, 2)))
    cos, sin = tables(14, 4)
    arguments: dict[str, Any] = {"cos": cos, "sin": sin, "tensor_format": layout, "conjugate": True, "rotated": "last"}
    if layout == "thd":
        arguments["cu_seqlens"] = torch.tensor(PACKED, dtype=torch.int32)
    want = [rope(t, **arguments) for t in (q, k)]
    got = rope_qk(q, k, inplace=inplace, **arguments)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert [a is b for a, b in zip(got, (q, k), strict=True)] == [inplace] * 2
    alone = rope_qk(q if not inplace else q.clone(), None, **arguments)
    assert alone[1] is None


def test_proportional_in_two_halves_of_a_head() -> None:
    (x,) = draws((1, 5, 2, 12))
    cos, sin = tables(5, 2)
    whole = torch.cat((cos, torch.ones(5, 4)), -1), torch.cat((sin, torch.zeros(5, 4)), -1)
    assert torch.equal(rope(x, cos=cos, sin=sin, rotated="proportional"), rope(x, cos=whole[0], sin=whole[1]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("axes", ["heads", "three"])
def test_a_packed_qkv_keeps_its_values(layout: str, axes: str, *, inplace: bool) -> None:
    tokens = (14,) if layout == "thd" else (2, 7)
    heads, kv_heads = (4, 2) if axes == "heads" else (3, 3)
    shape = (*tokens, 8, 12) if axes == "heads" else (*tokens, 3, 3, 12)
    (qkv,) = draws(shape)
    cos, sin = tables(14, 6)
    arguments: dict[str, Any] = {"cos": cos, "sin": sin, "tensor_format": layout}
    if layout == "thd":
        arguments["cu_seqlens"] = torch.tensor(PACKED, dtype=torch.int32)
    parts = qkv.reshape(*tokens, -1, 12).split([heads, kv_heads, kv_heads], -2)
    want = torch.cat((*(rope(t, **arguments) for t in parts[:2]), parts[2]), -2).reshape(shape)
    before = qkv.clone()
    got = rope_qkv(qkv, inplace=inplace, kv_heads=kv_heads if axes == "heads" else None, **arguments)
    assert got.shape == shape
    assert torch.equal(got, want)
    assert (got is qkv) == inplace
    assert inplace or torch.equal(qkv, before)


@pytest.mark.parametrize("name", ["freqs", "inv_freq", "cos"])
def test_float64_is_computed_in_float64(name: str) -> None:
    (x,) = draws((2, 5, 3, 8), dtype=torch.float64)
    radians = torch.randn(4 if name == "inv_freq" else (5, 4), generator=torch.Generator().manual_seed(3))
    exact = (
        oracle.radians_at(radians.numpy(), [[p] for p in range(5)])
        if name == "inv_freq"
        else radians.double().numpy()[:, None]
    )
    angles: dict[str, Any] = {name: radians, "angle_entries": "pair"}
    if name == "cos":
        angles = {"cos": radians.double().cos(), "sin": radians.double().sin()}
    cos, sin = (np.broadcast_to(a, (5, 2, 4)) for a in (np.cos(exact), np.sin(exact)))
    turned = oracle.features(8, 8, "half", "first")
    want = oracle.rope(x.transpose(0, 1).numpy(), cos, sin, turned=turned, style="half", entries="pair")
    got = rope(x, **angles)
    assert got.dtype == torch.float64
    assert np.abs(got.transpose(0, 1).numpy() - want).max() < 1e-14


EMPTY: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "no-tokens": ((2, 0, 4, 8), {}),
    "no-batch": ((0, 5, 4, 8), {}),
    "no-heads": ((2, 5, 0, 8), {}),
    "no-packed-tokens": ((0, 4, 8), {"tensor_format": "thd", "cu_seqlens": torch.zeros(1, dtype=torch.int32)}),
    "no-sequences": ((0, 4, 8), {"tensor_format": "thd", "cu_seqlens": torch.zeros(3, dtype=torch.int32)}),
    "no-ids": ((0, 4, 8), {"tensor_format": "thd", "positions": torch.zeros(0, dtype=torch.int64)}),
    "no-starts": ((0, 5, 4, 8), {"offset": torch.zeros(0, dtype=torch.int32)}),
}


@pytest.mark.parametrize(("shape", "arguments"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("angles", ["cos", "freqs", "inv_freq"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_empty_tensors_come_back_empty(
    shape: tuple[int, ...], arguments: dict[str, Any], angles: str, *, inplace: bool
) -> None:
    table = torch.zeros(6, 4)
    given = {"cos": {"cos": table, "sin": table}, "freqs": {"freqs": table}, "inv_freq": {"inv_freq": table[0]}}[angles]
    q = torch.zeros(shape)
    k = q.narrow(-2, 0, shape[-2] // 2) if not inplace else torch.zeros((*shape[:-2], shape[-2] // 2, 8))
    got = rope_qk(q, k, angle_entries="pair", inplace=inplace, **given, **arguments)
    assert [t.shape for t in got] == [q.shape, k.shape]
    assert rope(q, angle_entries="pair", inplace=inplace, **given, **arguments).shape == q.shape


def test_a_call_of_no_rows_needs_no_angles() -> None:
    table = torch.zeros(0, 4)
    assert rope(torch.zeros(2, 0, 4, 8), cos=table, sin=table).shape == (2, 0, 4, 8)
    padding = torch.ones(3, 4, 8)
    bounds = torch.zeros(2, dtype=torch.int32)
    assert torch.equal(rope(padding, cos=table, sin=table, tensor_format="thd", cu_seqlens=bounds), padding)


# Gradients ----------------------------------------------------------------------------------------------------------


def calls() -> dict[str, Callable[..., Any]]:
    """Calls of q, k, cos and sin, float64 [9, 4] or with a batch; each finds the angles of a token in another way."""
    ids = torch.tensor([[4, 0, 8], [1, 1, 7]])
    bounds, whole = (torch.tensor(b, dtype=torch.int32) for b in ((0, 2, 2, 5), (0, 8, 12)))
    flat = (0, 1)
    return {
        "order": lambda q, k, c, s: rope_qk(q, k, cos=c, sin=s),
        "ids": lambda q, k, c, s: rope_qk(q, k, cos=c, sin=s, positions=ids),
        "shared-ids": lambda q, k, c, s: rope_qk(q, k, cos=c, sin=s, positions=ids[0], rotated="last"),
        "starts": lambda q, k, c, s: rope_qk(q, k, cos=c, sin=s, offset=torch.tensor([3, 0]), conjugate=True),
        "proportional": lambda q, k, c, s: rope_qk(q, k, cos=c[:, :2], sin=s[:, :2], rotated="proportional"),
        "packed": lambda q, k, c, s: rope_qk(
            *(t.flatten(*flat) for t in (q, k)), cos=c, sin=s, tensor_format="thd", cu_seqlens=bounds, interleaved=True
        ),
        "ranks": lambda q, k, c, s: rope_qk(
            *(t.flatten(*flat) for t in (q, k)),
            cos=c,
            sin=s,
            tensor_format="thd",
            cu_seqlens=whole,
            cp_size=2,
            cp_rank=1,
        ),
        "per-batch": lambda q, k, c, s: rope_qk(q, k, cos=torch.stack((c, 2 * s)), sin=torch.stack((s, c))),
        "inplace": lambda q, k, c, s: rope_qk(q * 1, k * 1, cos=c, sin=s, inplace=True),
        "qkv": lambda q, k, c, s: rope_qkv(torch.cat((q, k, k), 2), cos=c, sin=s, kv_heads=1, inplace=False),
    }


@pytest.mark.parametrize("name", calls())
def test_gradients_in_x_and_in_the_angles_are_those_of_the_formula(name: str) -> None:
    tensors = draws((2, 3, 2, 8), (2, 3, 1, 8), (9, 4), (9, 4), dtype=torch.float64)
    assert torch.autograd.gradcheck(calls()[name], [t.requires_grad_() for t in tensors], fast_mode=True)


def test_gradients_in_radians_are_those_of_their_cosines_and_sines() -> None:
    x, rates = draws((2, 3, 2, 8), (4,))
    rates.requires_grad_()
    radians = torch.arange(3.0)[:, None] * rates
    ways: list[dict[str, Any]] = [
        {"cos": 1.5 * radians.cos(), "sin": 1.5 * radians.sin()},
        {"freqs": radians, "angle_entries": "pair", "attention_scaling": 1.5},
        {"inv_freq": rates, "attention_scaling": 1.5},
    ]
    want, *found = (torch.autograd.grad(rope(x, **way)[..., 0].sum(), rates, retain_graph=True) for way in ways)
    for got in found:
        torch.testing.assert_close(got, want)


def test_the_backward_call_is_the_gradient_of_the_call() -> None:
    x, grad = draws((2, 7, 3, 12), (2, 7, 3, 12))
    cos, sin = tables(9, 8)
    arguments: dict[str, Any] = {"cos": cos, "sin": sin, "angle_entries": "feature", "offset": 2, "rotated": "last"}
    leaf = x.clone().requires_grad_()
    rope(leaf, **arguments).backward(grad)
    torch.testing.assert_close(rope_backward(grad, **arguments), leaf.grad)
    assert not torch.allclose(rope(grad, conjugate=True, **arguments), leaf.grad)  # entries of a pair differ


def test_padding_of_packed_sequences_is_copied_with_its_gradient() -> None:
    spec = dataclasses.replace(SPEC, layout="thd", key_heads=0)
    built = build(RopeCase(spec, seq=PACKED_SEQ, cu_seqlens=PACKED))
    leaf = built.call.x.clone().requires_grad_()
    bounds = built.call.cu_seqlens
    out = rope(leaf, built.call.cos, tensor_format="thd", cu_seqlens=bounds, angle_entries="pair")
    out.sum().backward()
    outside = torch.from_numpy(~built.case.held())
    assert torch.equal(out[outside], leaf[outside])
    assert bool((leaf.grad[outside] == 1).all())  # type: ignore[index]
    assert not bool((leaf.grad[~outside] == 1).all())  # type: ignore[index]


@pytest.mark.parametrize("strides", [(3, 0, 0, 1), (0, 32, 16, 1), (0, 0, 0, 1)])
def test_each_element_of_an_expanded_qkv_has_a_gradient_of_its_own(strides: tuple[int, ...]) -> None:
    def gradient(qkv: torch.Tensor) -> torch.Tensor:
        leaf = qkv.detach().requires_grad_()
        out = rope_qkv(
            leaf, torch.ones(4, 8).cumsum(0), rotary_dim=8, tensor_format="thd",
            cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        )  # fmt: skip
        (found,) = torch.autograd.grad(out, leaf, torch.arange(out.numel(), dtype=out.dtype).view(out.shape))
        return found

    expanded = torch.randn(200, dtype=torch.float64).as_strided((4, 3, 2, 16), strides)
    torch.testing.assert_close(gradient(expanded), gradient(expanded.contiguous()))


def test_autocast_changes_no_dtype() -> None:
    x, freqs = torch.randn(1, 2, 2, 8).half(), torch.rand(4, 4)
    want = rope(x, freqs, angle_entries="pair")
    with torch.autocast("cpu", torch.bfloat16):
        out = rope(x, freqs, angle_entries="pair")
    assert out.dtype == torch.float16
    assert torch.equal(out, want)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("offset", [0, torch.tensor([2, 1])], ids=["order", "starts"])
def test_no_tokens_are_an_empty_result(layout: str, offset: Any) -> None:
    shape = (2, 0, 8, 40) if layout == "bshd" else (0, 2, 8, 40)
    out = rope(torch.zeros(shape), torch.rand(3, 16), offset=offset, tensor_format=layout, angle_entries="pair")
    assert out.shape == shape
