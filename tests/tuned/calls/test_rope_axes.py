"""Positions of several axes, and complex angles, as models write them: on both ways, in first and repeated calls."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tuned
from generator.rendering.structures import load
from tests.support import pairwise
from tests.support.rope_calls import Watch, watch
from tuned.calls.rope import saved
from tuned.dispatch import qk_norm_rope, rope, rope_backward, rope_qk, rope_qkv

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["watch"]

B, S, H, K, D, ROWS = 2, 5, 3, 2, 16, 12
PAIRS = D // 2
RATES = 10.0 ** -torch.arange(PAIRS)
TABLE = torch.outer(torch.arange(float(ROWS)), RATES)
SOURCES: dict[str, dict[str, Any]] = {
    "cos_sin": {"cos": TABLE.cos(), "sin": TABLE.sin()},
    "cache": {"cos_sin_cache": torch.cat((TABLE.cos(), TABLE.sin()), -1)},
    "freqs": {"freqs": TABLE, "angle_entries": "pair"},
    "inv_freq": {"inv_freq": RATES},
}


@pytest.fixture(params=["eager", "kernels"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to serve a call: PyTorch's operators, and kernels in the interpreter."""
    torch.manual_seed(0)
    if request.param == "kernels":
        watching: Watch = request.getfixturevalue("watch")
        watching.interpreted = True
        monkeypatch.setattr(saved, "run_steps", _interpreted)
    return str(request.param)


def _interpreted(steps: Any, _launch: Any) -> None:
    for step in steps:
        with np.errstate(all="ignore"):
            load(step.kernel)[(step.programs,)](*step.arguments, **step.constants | {"PDL": False})


def turned(x: torch.Tensor, angle: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """[b, s, h, d] by angles [b, s, pairs], in float64."""
    cos, sin = angle.double().cos()[:, :, None], angle.double().sin()[:, :, None]
    first, second = (x.double()[..., 0::2], x.double()[..., 1::2]) if interleaved else x.double().chunk(2, -1)
    both = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)


def in_a_row(positions: torch.Tensor, sections: tuple[int, ...]) -> torch.Tensor:
    """The angles of Qwen2-VL: each section takes its part from its own axis."""
    each = TABLE[positions].split(sections, -1)
    return torch.cat([part[axis] for axis, part in enumerate(each)], -1)


def in_turn(positions: torch.Tensor, sections: tuple[int, ...]) -> torch.Tensor:
    """The angles of Qwen3-VL: heights and widths replace every third time, as far as their sections go."""
    angle = TABLE[positions[0]].clone()
    for axis in (1, 2):
        places = slice(axis, sections[axis] * 3, 3)
        angle[..., places] = TABLE[positions[axis]][..., places]
    return angle


def drawn(axes: int = 3, tokens: tuple[int, ...] = (B, S)) -> torch.Tensor:
    return torch.randint(0, ROWS, (axes, *tokens))


LYING = (
    *((sections, in_a_row) for sections in ((2, 3, 3), (5, 3), (1, 2, 2, 3), (8, 0, 0))),
    *((sections, in_turn) for sections in ((4, 2, 2), (3, 3, 2), (6, 1, 1))),
)
TURNED = pairwise.covering(
    pairwise.product({"lying": LYING, "interleaved": (False, True), "source": tuple(SOURCES)}, lambda _: True)
)


@pytest.mark.parametrize(
    ("lying", "interleaved", "source"),
    [tuple(row.values()) for row in TURNED],
    ids=lambda value: (
        "-".join(map(str, value[0])) + f"-{value[1].__name__}" if isinstance(value, tuple) else str(value)
    ),
)
def test_each_pair_takes_the_angle_of_its_own_axis(
    lying: tuple[tuple[int, ...], Callable[..., torch.Tensor]], interleaved: bool, source: str
) -> None:
    sections, lie = lying
    given = drawn(len(sections))
    named = SOURCES[source] | {"sections": sections, "interleaved_sections": lie is in_turn, "interleaved": interleaved}
    for _ in range(2):
        q, k = torch.randn(B, S, H, D), torch.randn(B, S, K, D)
        angle = lie(given, sections)
        found = rope_qk(q, k, **named, positions=given)
        for one, x in zip(found, (q, k), strict=True):
            torch.testing.assert_close(one.double(), turned(x, angle, interleaved=interleaved), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lies", ["contiguous", "tokens first", "gaps", "one axis for all"])
def test_positions_may_lie_in_any_way(lies: str, dtype: torch.dtype) -> None:
    sections, given = (2, 3, 3), drawn().to(dtype)
    if lies == "tokens first":
        given = given.movedim(0, -1).contiguous().movedim(-1, 0)
    elif lies == "gaps":
        given = torch.stack((given, given), -1)[..., 0]
    elif lies == "one axis for all":
        given = given[:1].expand(3, B, S)
    x = torch.randn(B, S, H, D)
    for _ in range(2):
        found = rope(x, **SOURCES["cos_sin"], positions=given, sections=sections)
        torch.testing.assert_close(found.double(), turned(x, in_a_row(given.long(), sections)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_layouts_lengths_and_a_shared_row_of_positions(inplace: bool) -> None:
    sections = [2, 3, 3]  # a list, as configurations have it
    for tokens in (S, S, 4):
        given, x = drawn(tokens=(B, tokens)), torch.randn(B, tokens, H, D)
        wanted = turned(x, in_a_row(given, tuple(sections)))
        named = SOURCES["cos_sin"] | {"sections": sections, "inplace": inplace}
        sbhd = rope(x.transpose(0, 1).clone(), **named, positions=given.transpose(1, 2), tensor_format="sbhd")
        thd = rope(x.flatten(0, 1), **named, positions=given.flatten(1), tensor_format="thd") if not inplace else None
        bhsd = rope(x.transpose(1, 2).clone(), **named, positions=given, tensor_format="bhsd")
        bshd = rope(x.clone(), **named, positions=given)
        for found in (sbhd.transpose(0, 1), bhsd.transpose(1, 2), bshd, *([] if thd is None else [thd.view(x.shape)])):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        shared = rope(x.clone(), **named, positions=given[:, 0])
        wanted = turned(x, in_a_row(given[:, :1].expand(3, B, tokens), tuple(sections)))
        torch.testing.assert_close(shared.double(), wanted, rtol=1e-5, atol=1e-5)


def test_axial_positions_have_a_table_whose_columns_belong_to_axes() -> None:
    """Frames, rows and columns as video models have them; each axis has frequencies of its own width."""
    widths = (2, 3, 3)
    tables = [torch.outer(torch.arange(float(ROWS)), 100.0 ** -(torch.arange(n) / n)) for n in widths]
    frame, row, column = (t.flatten() for t in torch.meshgrid(*(torch.arange(n) for n in (2, 3, 4)), indexing="ij"))
    x = torch.randn(1, 24, H, D)
    angle = torch.cat([table[at] for table, at in zip(tables, (frame, row, column), strict=True)], -1)
    whole = torch.cat(tables, -1)
    found = rope(
        x, cos=whole.cos(), sin=whole.sin(), positions=torch.stack((frame, row, column)), sections=widths, interleaved=True
    )  # fmt: skip
    torch.testing.assert_close(found.double(), turned(x, angle[None], interleaved=True), rtol=1e-5, atol=1e-5)


def test_gradients_a_norm_and_a_packed_qkv_take_axes_too() -> None:
    sections, given = (2, 3, 3), drawn()
    named = SOURCES["cos_sin"] | {"sections": sections, "positions": given}
    angle = in_a_row(given, sections)
    q, k = torch.randn(B, S, H, D, requires_grad=True), torch.randn(B, S, K, D, requires_grad=True)
    weight = torch.rand(D) + 0.5
    grads = torch.randn(B, S, H, D), torch.randn(B, S, K, D)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (D,), weight, 1e-6)

    for function, before in (
        (rope_qk, lambda x: x),
        (lambda q, k, **n: qk_norm_rope(q, k, weight, weight, **n), normed),
    ):
        found = torch.autograd.grad(function(q, k, **named), (q, k), grads)
        wanted = torch.autograd.grad([turned(before(x), angle).float() for x in (q, k)], (q, k), grads)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        rope_backward(grads[0], **named).double(), turned(grads[0], -angle), rtol=1e-5, atol=1e-5
    )
    qkv = torch.randn(B, S, H + 2 * K, D)
    out = rope_qkv(qkv, **named, kv_heads=K)
    torch.testing.assert_close(out[:, :, : H + K].double(), turned(qkv[:, :, : H + K], angle), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[:, :, H + K :], qkv[:, :, H + K :])


def test_a_table_for_each_batch_entry_and_entries_of_features() -> None:
    sections, given, x = (3, 5), drawn(2), torch.randn(B, S, H, D)
    wide = torch.cat((TABLE, TABLE), -1)
    own = torch.stack((wide, wide * 2))
    found = rope(x, cos=own.cos(), sin=own.sin(), angle_entries="feature", positions=given, sections=sections)
    angle = in_a_row(given, sections) * torch.tensor([1.0, 2.0])[:, None, None]
    torch.testing.assert_close(found.double(), turned(x, angle), rtol=1e-5, atol=1e-5)


def test_axes_and_complex_angles_are_traced(way: str) -> None:
    if way == "kernels":
        pytest.skip("torch.compile's operators run whatever way there is")
    given, x = drawn(), torch.randn(B, S, H, D, requires_grad=True)
    cis = torch.polar(torch.ones_like(TABLE), TABLE)

    def run(x: torch.Tensor) -> torch.Tensor:
        one = rope(x, **SOURCES["cos_sin"], positions=given, sections=[2, 3, 3])
        return rope(one, freqs_cis=cis, interleaved=True).square().sum()

    found = [torch.autograd.grad(f(x), x)[0] for f in (run, torch.compile(run, backend="aot_eager", fullgraph=True))]
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("tokens", [(B, S), (S,)])
def test_a_trace_of_torch_jit_holds_the_axes(tokens: tuple[int, ...]) -> None:
    """Lengths are tensors in a trace."""
    x, given, other = torch.randn(B, S, H, D), drawn(3, tokens), drawn(3, tokens)

    def run(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rope(x, **SOURCES["cos_sin"], positions=positions, sections=[2, 3, 3])

    traced = torch.jit.trace(run, (x, given))
    torch.testing.assert_close(traced(2 * x, other), run(2 * x, other))


# Complex angles -----------------------------------------------------------------------------------------------------------


def of_llama(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """[b, s, h, d] times [s, pairs] or [b, s, pairs], as Llama's reference multiplies."""
    cis = cis[..., None, :] if cis.ndim > 2 else cis[None, :, None]
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * cis).flatten(-2)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_angles_are_llamas(kind: torch.dtype, inplace: bool) -> None:
    cis = torch.polar(torch.ones_like(TABLE), TABLE).to(kind)
    for given in (cis, cis[1:], cis.conj(), cis.conj().resolve_conj(), cis):  # the same properties with another sign
        x = torch.randn(B, S, H, D)
        wanted = of_llama(x, given[:S].to(torch.complex128))
        found = rope(x, freqs_cis=given, interleaved=True, inplace=inplace)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    own = torch.stack((cis, cis.conj().resolve_conj()))
    x = torch.randn(B, S, H, D)
    found = rope(x, freqs_cis=own, interleaved=True)
    torch.testing.assert_close(found.double(), of_llama(x, own[:, :S].to(torch.complex128)), rtol=1e-5, atol=1e-5)


def test_complex_angles_get_a_gradient_and_positions() -> None:
    cis = torch.polar(torch.ones_like(TABLE), TABLE).to(torch.complex128).requires_grad_()
    x, ids = torch.randn(B, S, H, D, dtype=torch.float64), torch.randint(0, ROWS, (B, S))
    found = torch.autograd.grad(rope(x, freqs_cis=cis, positions=ids, interleaved=True).square().sum(), cis)[0]
    wanted = torch.autograd.grad(of_llama(x, cis[ids]).square().sum(), cis)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sections": (2, 3)}, r"sections must be 2 to 4 numbers of pairs that add up to rotary_dim / 2, 8, got \(2, 3\)"),
        ({"sections": (8,)}, r"sections must be 2 to 4 numbers.*got \(8,\)"),
        ({"sections": (1, 1, 1, 1, 4)}, "sections must be 2 to 4 numbers"),
        ({"sections": (9, -1)}, r"got \(9, -1\)"),
        ({"sections": (4.0, 4.0)}, r"got \(4.0, 4.0\)"),
        ({"sections": (2, 3, 3), "positions": None}, "sections need positions, one row for each of 3 axes, got none"),
        ({"sections": (5, 3)}, r"positions must be \[2, tokens\].*got \[3, 2, 5\]"),
        ({"sections": (2, 3, 3), "positions": torch.zeros(2, 5, dtype=torch.int64)}, r"positions must be \[3, tokens\].*got \[2, 5\]"),
        ({"sections": (2, 3, 3), "positions": torch.full((3, 2, 5), 99)}, "positions"),
        ({"sections": (2, 3, 3), "interleaved_sections": True}, "a third of the 8 pairs at most"),
        ({"sections": (4, 4), "interleaved_sections": True, "positions": torch.zeros(2, 5, dtype=torch.int64)}, "interleaved sections must be 3"),
        ({"interleaved_sections": True, "positions": torch.zeros(5, dtype=torch.int64)}, "without sections: pass them too"),
        ({"sections": (2, 3, 3), "offset": 1}, "positions or an offset, not both"),
        ({"freqs_cis": torch.ones(12, 8)}, "freqs_cis must be a complex tensor.*got torch.float32"),
        ({"freqs_cis": torch.ones(12, 8, dtype=torch.complex64)}, "one source of angles, got cos and sin and freqs_cis"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_axes_and_complex_angles_cannot_be_is_refused(change: dict[str, Any], said: str, way: str) -> None:
    if way == "kernels" and said == "positions":
        pytest.skip("values are looked at on a CPU alone: a kernel gives NaN")
    named: dict[str, Any] = SOURCES["cos_sin"] | {"positions": drawn()} | change
    if "freqs_cis" in change:
        named.pop("positions")
        if not change["freqs_cis"].is_complex():
            named = change
    with pytest.raises((TypeError, ValueError), match=said):
        rope(torch.randn(B, S, H, D), **named)


@pytest.mark.parametrize(
    "sections", [np.array([2, 3, 3]), torch.tensor([2, 3, 3]), [torch.tensor(2), 3, np.int32(3)], (np.int64(2), 3, 3)]
)
def test_sections_are_whatever_stands_for_ints(sections: Any) -> None:
    x, given = torch.randn(B, S, H, D), drawn()
    named = SOURCES["cos_sin"] | {"positions": given}
    for _ in range(2):
        found = rope(x, **named, sections=sections)
        torch.testing.assert_close(found.double(), turned(x, in_a_row(given, (2, 3, 3))), rtol=1e-5, atol=1e-5)
    assert torch.equal(rope_qk(x, x, **named, sections=sections)[1], found)
    assert tuned.explain(rope, x, **named, sections=sections).rule in ("eager", "winner", "default")


@pytest.mark.parametrize("kind", [list, tuple])
def test_tensors_among_sections_are_not_kept(kind: Any) -> None:
    """The key of a known call would keep their memory, and take a later value in it for the first."""
    x, given = torch.randn(B, S, H, D), drawn()
    parts = [torch.tensor(2), torch.tensor(3), torch.tensor(3)]
    kept = [weakref.ref(t) for t in parts]
    for _ in range(3):
        rope(x, **SOURCES["cos_sin"], positions=given, sections=kind(parts))
    parts[0] += 1
    parts[1] -= 1
    found = rope(x, **SOURCES["cos_sin"], positions=given, sections=kind(parts))
    torch.testing.assert_close(found.double(), turned(x, in_a_row(given, (3, 2, 3))), rtol=1e-5, atol=1e-5)
    del parts
    gc.collect()
    assert [t() for t in kept] == [None] * 3


@pytest.mark.parametrize("sections", [[True, 4, 3], [torch.tensor(True), 4, 3], [torch.tensor(2.0), 3, 3], "233"])
def test_sections_of_no_ints_are_refused(sections: Any) -> None:
    with pytest.raises(ValueError, match="sections must be 2 to 4 numbers of pairs"):
        rope(torch.randn(B, S, H, D), **SOURCES["cos_sin"], positions=drawn(), sections=sections)


def test_explain_takes_sections_as_a_list() -> None:
    x = torch.randn(B, S, H, D)
    assert tuned.explain(rope, x, **SOURCES["cos_sin"], positions=drawn(), sections=[2, 3, 3]).rule in (
        "eager",
        "winner",
        "default",
    )
