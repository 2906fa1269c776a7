"""RoPE of unusual arguments: no CUDA for CPU tensors, empty axes, numbers that are no ints, and nothing is kept."""

from __future__ import annotations

import dataclasses
import enum
import gc
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.lib import NumpyVersion

import tuned
import tuned.calls.rope.call
import tuned.calls.rope.lengths
import tuned.calls.rope.plan
import tuned.families.rope.variant
from tests.support import pairwise
from tests.support.rope_calls import Case, Watch, watch
from tests.support.rope_plans import check
from tuned.dispatch import rope, rope_backward, rope_qk, rope_qkv

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["watch"]

ROOT = Path(__file__).parents[3]
B, S, H, K, D = 2, 4, 4, 2, 16

# A CPU call and CUDA ----------------------------------------------------------------------------------------------------

# Calls that would create a CUDA context: a child that is forked afterwards could not make its own.
UNTOUCHED = """
import torch
def refuse(*_, **__):
    raise AssertionError("a call of CPU tensors asked for CUDA")
names = ("_lazy_init", "current_device", "get_device_properties", "get_device_capability", "current_stream", "device_count",
         "is_current_stream_capturing", "synchronize", "init")
for name in names:
    setattr(torch.cuda, name, refuse)
for name in ("_cuda_getDevice", "_cuda_init", "_cuda_getCurrentStream", "_cuda_getCurrentRawStream", "_cuda_setDevice",
             "_cuda_getDeviceCount", "_cuda_isCurrentStreamCapturing"):
    setattr(torch._C, name, refuse)
from tuned.compat import flash_attn, flashinfer, liger, transformer_engine, transformers, vllm
from tuned.dispatch import rope, rope_backward, rope_qk, rope_qkv
import tuned
import tuned.calls.rope.call
import tuned.calls.rope.lengths
B, S, H, K, D = 2, 4, 4, 2, 16
def new(*shape, grad=False):
    return torch.randn(*shape).requires_grad_(grad)
freqs, cos, sin, cache = torch.rand(8, D), torch.rand(8, D // 2), torch.rand(8, D // 2), torch.rand(8, D)
ids, starts, bounds = torch.arange(S), torch.arange(B), torch.tensor([0, 3, S], dtype=torch.int32)
whole = torch.tensor([0, 4, 2 * S], dtype=torch.int32)  # of two ranks
for _ in range(3):
    for grad in (False, True):
        q, k, qkv = new(B, S, H, D, grad=grad), new(B, S, K, D, grad=grad), new(B, S, H + 2 * K, D, grad=grad)
        outs = [rope(q, freqs), *rope_qk(q, k, None, cos, sin), rope_qkv(qkv, None, cos, sin, kv_heads=K),
                rope_backward(q, freqs), rope(q, inv_freq=cos[0], offset=3), rope(q, cos_sin_cache=cache, offset=starts),
                rope(q, None, cos, sin, positions=ids), rope(q[0], None, cos, sin, tensor_format="thd", cu_seqlens=bounds),
                rope(q[0], None, cos, sin, tensor_format="thd", cu_seqlens=whole, cp_size=2, max_seqlen=4),
                flash_attn.apply_rotary_emb(q, cos, sin), transformer_engine.apply_rotary_pos_emb(q, freqs[:, None, None]),
                *liger.liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), freqs[None, :S], freqs[None, :S]),
                *liger.liger_rotary_pos_emb_vision(q[0], k[0], freqs[:S], freqs[:S]),
                *transformers.RotaryPosEmb()(q, k, freqs[None, :S], freqs[None, :S], 2)]
        if grad:
            sum(out.sum() for out in outs if out.requires_grad).backward()
        with torch.no_grad():
            rope(q, freqs, inplace=True), rope_qk(q, k, None, cos, sin, inplace=True)
            rope_qkv(qkv, None, cos, sin, kv_heads=K, inplace=True)
            flash_attn.apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=H)
            flash_attn.apply_rotary_emb_kv_(new(B, S, 2, K, D), cos, sin)
            vllm.rotary_embedding(ids, q[0], k[0], D, cache, True)
            flashinfer.apply_rope_with_cos_sin_cache_inplace(ids, q[0], k[0], D, cache)
        tuned.explain(rope, q, freqs)
print("untouched")
"""


def test_a_cpu_call_never_asks_for_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", UNTOUCHED],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["untouched"]


FORMS: dict[str, Callable[..., Any]] = {
    "order": rope,
    "pair": lambda q, t: rope_qk(q, q[:, :, :K], t),
    "in place": lambda q, t: rope_qk(q.clone(), q[:, :, :K].clone(), t, inplace=True),
    "parallel": lambda q, t: rope(q, t, cp_size=2, cp_rank=1),
    "packed": lambda q, t: rope(
        q[0], t, tensor_format="thd", cp_size=2, cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32, device="cpu")
    ),
    "interleaved views": lambda q, t: rope_qk(q[..., : D // 2], q[..., D // 2 :], t[:, : D // 2], inplace=True),
    "one batch": lambda q, t: rope_qk(q[:1].clone(), q[:1, :, :K].clone(), t, inplace=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_default_device_is_that_of_the_tensors(name: str) -> None:
    q, table = torch.randn(B, S, H, D), torch.rand(16, D)
    wanted = FORMS[name](q.clone(), table)
    with torch.device("meta"):
        found = FORMS[name](q.clone(), table)
    torch.testing.assert_close(found, wanted)


# Empty tensors ----------------------------------------------------------------------------------------------------------

EMPTY: dict[str, Case] = {
    "batch": Case(batch=0),
    "tokens": Case(seq=0),
    "tokens in place": Case(seq=0, inplace=True),
    "packed tokens": Case("thd", seq=0),
    "starts of no batch": Case(batch=0, place="starts"),
    "ids of no token": Case(seq=0, place="ids", source="cache"),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("grad", ["none", "leaf", "made"])
def test_what_has_no_elements_is_not_launched(watch: Watch, name: str, grad: str) -> None:
    base = dataclasses.replace(EMPTY[name], x_grad=grad, key_grad=grad)
    full = dataclasses.replace(base, batch=2, seq=4)
    for case in (base, base, full, full, base, base):
        before = watch.public + watch.direct
        check(case)
        assert (watch.public + watch.direct > before) == (case is full and (grad != "leaf" or not case.inplace))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("source", ["freqs", "inv_freq", "cos_sin"])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 0), (0, 2), (0, 0)])
def test_a_query_or_a_key_of_no_heads_stays_one_of_two(
    watch: Watch, heads: int, key_heads: int, source: str, grad: bool, inplace: bool
) -> None:
    table = torch.rand(8, D // 2)
    angles: dict[str, Any] = {
        "freqs": {"freqs": table, "angle_entries": "pair"},
        "inv_freq": {"inv_freq": table[0]},
        "cos_sin": {"cos": table, "sin": table},
    }[source]
    for length in (4, 4, 4, 6, 6, 4):
        leaves = [torch.randn(B, length, n, D, requires_grad=grad) for n in (heads, key_heads)]
        q, k = (t * 1 for t in leaves)
        wanted = [rope(t, **angles) if t.numel() else t.clone() for t in (q, k)]
        versions = q._version, k._version
        launched = watch.public + watch.direct
        out = rope_qk(q, k, inplace=inplace, **angles)
        assert watch.public + watch.direct == launched + bool(heads or key_heads)
        assert isinstance(out, tuple)
        assert [t.shape for t in out] == [q.shape, k.shape]
        assert [t.requires_grad for t in out] == [grad, grad]
        if inplace:
            assert out[0] is q
            assert out[1] is k
        else:
            assert (q._version, k._version) == versions
        torch.testing.assert_close(out, tuple(wanted))
        if grad and (heads or key_heads):
            sum(t.sum() for t in out).backward()
            for t, leaf in zip((q, k), leaves, strict=True):
                assert not t.numel() or leaf.grad is not None


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that was not seen before: whether a call of its class, with other lengths, was."""
    found: list[bool] = []

    def sized(*arguments: Any) -> Any:
        out = tuned.calls.rope.lengths.sized(*arguments)
        found.append(out is not None)
        return out

    monkeypatch.setattr(tuned.calls.rope.call, "sized", sized)
    return found


def test_bounds_of_a_known_class_must_still_be_bounds(watch: Watch, known: list[bool]) -> None:
    freqs, x = torch.rand(64, 32), torch.randn(32, 16, 64)
    x[:] = x[0]

    def run(*bounds: int) -> torch.Tensor:
        given = torch.tensor(bounds, dtype=torch.int32)
        return rope(x, freqs, tensor_format="thd", cu_seqlens=given, angle_entries="pair")

    for _ in range(3):
        whole = run(0, 32)
        with pytest.raises(ValueError, match="needs cu_seqlens"):
            run()
        for none in ((0,), (0, 0), (0, 0, 0), (31,)):
            torch.testing.assert_close(run(*none), x)
        with pytest.warns(UserWarning, match="as lengths do"):
            torch.testing.assert_close(run(32), x)
        torch.testing.assert_close(run(0, 0, 4, 4, 32), torch.cat((whole[:4], whole[:28])))
    assert any(known)
    assert watch.direct


def test_starts_and_tables_of_a_known_class_that_are_empty_are_not_launched(watch: Watch, known: list[bool]) -> None:
    cache, x, q = torch.rand(64, 64), torch.randn(32, 16, 64), torch.randn(32, 8, 64)

    def run(rows: int, *bounds: int) -> Any:
        starts = torch.ones(len(bounds) - 1, dtype=torch.int64)
        return rope_qk(
            x, q, cos_sin_cache=cache[:rows], tensor_format="thd", offset=starts,
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        )  # fmt: skip

    for _ in range(3):
        run(64, 0, 32)
        launched = watch.public + watch.direct
        torch.testing.assert_close(run(64, 0), (x, q))
        torch.testing.assert_close(run(0, 0, 0), (x, q))
        assert bool(run(0, 0, 32)[0].isnan().all())
        assert watch.public + watch.direct == launched
        run(64, 0, 16, 32)
    assert any(known)


@pytest.mark.parametrize("start", [-3, 1000])
def test_an_empty_sequence_may_start_anywhere(start: int) -> None:
    """No token has the position where it starts; a batch of a server may hold a sequence that has ended."""
    freqs, x = torch.rand(8, D), torch.randn(5, H, D)
    bounds, starts = (torch.tensor(given, dtype=torch.int32) for given in ([0, 2, 2, 5], [3, start, 1]))
    found = rope(x, freqs, tensor_format="thd", cu_seqlens=bounds, offset=starts)
    wanted = [rope(part[None], freqs, offset=first)[0] for part, first in ((x[:2], 3), (x[2:], 1))]
    torch.testing.assert_close(found, torch.cat(wanted))
    no_tokens = bounds[2:3].expand(3)
    torch.testing.assert_close(rope(x, freqs, tensor_format="thd", cu_seqlens=no_tokens, offset=torch.tensor(start)), x)


# Unusual memory -----------------------------------------------------------------------------------------------------------


def test_bounds_may_have_any_strides(watch: Watch) -> None:
    watch.interpreted = True
    freqs, x = torch.rand(8, D), torch.randn(6, H, D)
    wanted = torch.cat([rope(part[None], freqs)[0] for part in x.split([2, 1, 3])])
    bounds = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    apart = torch.full((4, 3), 9, dtype=torch.int32)
    apart[:, 0] = bounds
    for given in (bounds, apart[:, 0], apart[:, 0], bounds, apart[:, 0], bounds[:1].expand(4)):
        found = rope(x, freqs, tensor_format="thd", cu_seqlens=given)
        torch.testing.assert_close(found, wanted if given.stride(0) else x)
    assert watch.public
    for given in (bounds, apart[:, 0]) * 3:
        q, k = x.clone(), x[:, :K].clone()
        rope_qk(q, k, freqs, tensor_format="thd", cu_seqlens=given, inplace=True)
        torch.testing.assert_close((q, k), (wanted, wanted[:, :K]))


NARROW = (9, 5, 3, 22)  # sbhd: three heads, but fifteen rows of a position
STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(NARROW),
    "expanded": lambda: torch.randn(9, 1, 3, 22).expand(NARROW),
    "of bshd": lambda: torch.randn(5, 9, 3, 22).transpose(0, 1),
    "misaligned": lambda: torch.randn(math.prod(NARROW) + 3)[3:].view(NARROW),
    "with gaps": lambda: torch.randn(*NARROW[:3], 27)[..., :22],
    "heads apart": lambda: torch.randn(3, 9, 5, 22).permute(1, 2, 0, 3),
    "one step": lambda: torch.randn(1, *NARROW[1:]),
}


@pytest.mark.parametrize("name", STRIDED)
def test_whole_rows_of_a_position_may_have_any_strides(
    name: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned.families.rope.variant, "LARGE_US", 0.0)  # only large calls take whole rows
    launched: list[str] = []
    run = watch.run_public
    monkeypatch.setattr(
        tuned.calls.rope.plan, "run_public", lambda now: (launched.append(now.part.kernel), run(now))[1]
    )
    x, grad = STRIDED[name](), STRIDED[name]()
    freqs, named = torch.randn(len(x), 11), {"tensor_format": "sbhd", "angle_entries": "pair"}
    wanted, wanted_grad = rope(x, freqs, **named), rope_backward(grad, freqs, **named)
    watch.interpreted = True
    given = x.detach().requires_grad_()
    out = rope(given, freqs, **named)
    out.backward(grad)
    torch.testing.assert_close((out, given.grad), (wanted, wanted_grad))
    if name != "expanded":  # several elements of one place cannot be overwritten
        torch.testing.assert_close(rope(x, freqs, **named, inplace=True), wanted)
    assert launched
    assert all("_rows_" in name for name in launched), launched


def apart(place: int, shape: tuple[int, ...], memory: bytearray, how: str) -> torch.Tensor:
    """float32 values that start at some byte of a memory, in their own storage."""
    count = math.prod(shape)
    t = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=place)
    if how == "dlpack":
        t = torch.from_dlpack(t)  # type: ignore[attr-defined]
    if how == "numpy":
        t = torch.from_numpy(np.frombuffer(memory, dtype=np.float32, count=count, offset=place))
    return t.view(shape)


@pytest.mark.parametrize("served", ["kernel", "eager"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["buffer", "dlpack", "numpy"])
def test_storages_over_one_memory_are_not_both_overwritten(
    request: pytest.FixtureRequest, how: str, served: str, grad: bool
) -> None:
    if served == "kernel":
        request.getfixturevalue("watch")
    freqs, memory = torch.rand(8, D), bytearray(65536)
    of_q, of_k = (1, S, H, D), (1, S, K, D)
    size = 4 * S * H * D
    for _ in range(2):
        for distance in (
            size,
            4096,
            size,
            size - 4,
            0,
            size,
            -2048,
            4,
            2,
            size + 16,
            size - 64,
            -size // 2,
            -size // 2 + 64,
        ):
            q, k = apart(16384, of_q, memory, how), apart(16384 + distance, of_k, memory, how)
            with torch.no_grad():
                q.normal_()
                k.normal_()
            wanted = rope(q, freqs), rope(k, freqs)
            before = bytes(memory)
            if grad:
                q.requires_grad_()
                k.requires_grad_()
            with torch.no_grad():
                if -size // 2 < distance < size:
                    with pytest.raises(ValueError, match="q and k share memory"):
                        rope_qk(q, k, freqs, inplace=True)
                    assert bytes(memory) == before
                else:
                    rope_qk(q, k, freqs, inplace=True)
                    torch.testing.assert_close((q.detach(), k.detach()), wanted)


def test_a_query_and_a_key_side_by_side_in_storages_of_their_own_are_overwritten() -> None:
    freqs, memory = torch.rand(8, D), bytearray(65536)
    whole = torch.frombuffer(memory, dtype=torch.float32, count=S * (H + K) * D, offset=0).view(1, S, H + K, D)
    other = torch.frombuffer(memory, dtype=torch.float32, count=S * (H + K) * D, offset=0).view(1, S, H + K, D)
    whole.normal_()
    wanted = rope(whole, freqs)
    rope_qk(whole[:, :, :H], other[:, :, H:], freqs, inplace=True)
    torch.testing.assert_close(whole, wanted)


def test_tensors_without_memory_may_be_rotated_in_place() -> None:
    q, k, freqs = (
        torch.empty(B, S, H, D, device="meta"),
        torch.empty(B, S, K, D, device="meta"),
        torch.empty(8, D, device="meta"),
    )
    for _ in range(2):
        assert rope_qk(q, k, freqs, inplace=True)[1] is k
        assert rope(q, freqs).shape == q.shape


def negative(t: torch.Tensor) -> torch.Tensor:
    """A view with the values of t that PyTorch negates on each read."""
    view = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("rows", [5, 1])
def test_a_negative_view_is_negated_whatever_the_strides_of_axes_of_one(rows: int) -> None:
    x = torch.randn(1, rows, 3, 2)
    angle = torch.rand(rows, 1)
    forms: list[torch.Tensor] = [angle, negative(angle), negative(angle[:, 0]).unsqueeze(-1), angle]
    for length in (5, 1, rows):
        for freqs in forms:
            given = freqs[:length]
            found = rope(x[:, :length], given, angle_entries="pair")
            torch.testing.assert_close(
                found, rope(x[:, :length].double(), angle[:length], angle_entries="pair").float()
            )
    wanted = rope(x, angle, angle_entries="pair")
    for _ in range(2):
        for given in (x, negative(x), negative(x.permute(3, 0, 1, 2)).permute(1, 2, 3, 0)):
            torch.testing.assert_close(rope(given, angle, angle_entries="pair"), wanted)
            torch.testing.assert_close(rope(given.clone(), angle, angle_entries="pair", inplace=True), wanted)


# Numbers ------------------------------------------------------------------------------------------------------------------


class Offset(enum.IntEnum):
    """An int for which ``type`` does not say int."""

    THREE = 3


class Plain(int):
    """Another such int."""


THREES = [Offset.THREE, Plain(3), np.int64(3), np.int32(3), np.uint8(3)]


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("source", ["freqs", "inv_freq"])
@pytest.mark.parametrize("three", THREES, ids=lambda three: type(three).__name__)
def test_an_offset_that_stands_for_an_int_is_one(source: str, three: Any) -> None:
    table = torch.rand(16, D // 2)
    angles: Any = {"freqs": table, "angle_entries": "pair"} if source == "freqs" else {"inv_freq": table[0]}
    x = torch.randn(B, S, H, D)
    wanted = rope(x, offset=3, **angles)
    for _ in range(3):
        torch.testing.assert_close(rope(x, offset=three, **angles), wanted)
        torch.testing.assert_close(rope_qk(x, x, offset=three, **angles), (wanted, wanted))
        assert tuned.explain(rope, x, offset=three, **angles).rule != "eager"
    ids = torch.arange(S)
    with pytest.raises(ValueError, match="positions or an offset, not both"):
        rope(x, offset=three, positions=ids, **angles)
    for nothing in (0, np.int64(0), Plain(0)):
        torch.testing.assert_close(rope(x, offset=nothing, positions=ids, **angles), rope(x, positions=ids, **angles))


def counts(x: torch.Tensor, freqs: torch.Tensor) -> dict[str, Callable[[Any], Any]]:
    bounds = torch.tensor([0, S], dtype=torch.int32)
    qkv = x[:, :, :H]
    return {
        "rotary_dim": lambda n: rope(x, freqs[:, :2], rotary_dim=n),
        "max_seqlen": lambda n: rope(x[0], freqs, tensor_format="thd", cu_seqlens=bounds, max_seqlen=n),
        "cp_size": lambda n: rope_qk(x, x, freqs, cp_size=n)[0],
        "cp_rank": lambda n: rope_backward(x, freqs, cp_size=4, cp_rank=n),
        "kv_heads": lambda n: rope_qkv(torch.cat((qkv, qkv), 2), freqs, kv_heads=n),
        "offset": lambda n: rope(x, freqs, offset=n),
    }


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("name", ["rotary_dim", "max_seqlen", "cp_size", "cp_rank", "kv_heads", "offset"])
def test_a_number_that_counts_is_an_int_before_and_after_one_was_seen(name: str) -> None:
    run = counts(torch.randn(B, S, H, D), torch.rand(32, D))[name]
    wanted = None
    for _ in range(3):
        for two in (np.int64(2), Plain(2), torch.tensor(2), torch.tensor([2], dtype=torch.int16)):
            if name == "offset" and isinstance(two, torch.Tensor):
                continue
            found = (
                run(two) if name != "max_seqlen" else run(type(two)(4) if not isinstance(two, torch.Tensor) else two)
            )
            assert wanted is None or torch.equal(found, wanted)
        # Before 2.4 NumPy only warns of a bool as an index.
        booleans = (True,) if NumpyVersion(np.__version__) < "2.4.0" else (True, np.bool_(True))
        for wrong in (2.0, *booleans, np.float32(2), "2", torch.tensor(2.0), torch.tensor(True)):
            if name == "offset" and isinstance(wrong, torch.Tensor):
                continue
            with pytest.raises(TypeError, match=rf"{name} must be an int, got .*: convert it with int"):
                run(wrong)
        wanted = run(2)
    with pytest.raises(TypeError):
        run(1.5)


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("name", ["cp_size", "cp_rank"])
@pytest.mark.parametrize("wrong", [True, 1.0, False, 0.0, None])
def test_what_only_equals_a_default_is_refused(name: str, wrong: Any) -> None:
    x, freqs = torch.randn(B, S, H, D), torch.rand(32, D)
    for _ in range(2):
        rope(x, freqs)
        with pytest.raises(TypeError, match=rf"{name} must be an int"):
            rope(x, freqs, **{name: wrong})


# What is kept -------------------------------------------------------------------------------------------------------------

KEPT: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "freqs": lambda: ({}, {"freqs": torch.rand(8, D)}),
    "cos": lambda: ({}, {"cos": torch.rand(8, D // 2), "sin": torch.rand(8, D // 2)}),
    "sin apart": lambda: ({}, {"cos": torch.rand(8, D // 2), "sin": torch.rand(D // 2, 8).t()}),
    "cache": lambda: ({}, {"cos_sin_cache": torch.rand(8, D)}),
    "rates": lambda: ({}, {"inv_freq": torch.rand(D // 2), "offset": torch.tensor(2)}),
    "ids": lambda: ({}, {"cos_sin_cache": torch.rand(8, D), "positions": torch.arange(S)}),
    "starts": lambda: ({}, {"inv_freq": torch.rand(D // 2), "offset": torch.arange(B)}),
    "packed": lambda: (
        {"tensor_format": "thd"},
        {
            "freqs": torch.rand(8, D),
            "cu_seqlens": torch.tensor([0, 1, S], dtype=torch.int32),
            "max_seqlen": torch.tensor(8),
        },
    ),
    "counts": lambda: ({}, {"freqs": torch.rand(16, D), "cp_size": torch.tensor(2), "cp_rank": torch.tensor(1)}),
    "width": lambda: ({}, {"freqs": torch.rand(8, D), "rotary_dim": torch.tensor(D)}),
    "interleaved": lambda: ({}, {"freqs": torch.rand(8, D), "interleaved": torch.tensor(True)}),
    "conjugate": lambda: ({}, {"freqs": torch.rand(8, D), "conjugate": torch.tensor(True)}),
    "scaling": lambda: ({}, {"freqs": torch.rand(8, D), "attention_scaling": torch.tensor(1.5)}),
}


KEPT_CALLS = pairwise.covering(
    pairwise.product(
        {"name": tuple(KEPT), "served": ("kernel", "eager"), "inplace": (False, True), "grad": (False, True)},
        lambda _: True,
    )
)


@pytest.mark.parametrize(
    ("name", "served", "inplace", "grad"),
    [tuple(row.values()) for row in KEPT_CALLS],
    ids=["-".join(map(str, row.values())) for row in KEPT_CALLS],
)
def test_nothing_of_a_caller_is_kept(
    request: pytest.FixtureRequest, name: str, served: str, inplace: bool, grad: bool
) -> None:
    if served == "kernel":
        request.getfixturevalue("watch")
    kept: list[weakref.ref[Any]] = []
    gc.freeze()  # objects that other tests left need not be looked at
    for _ in range(3):
        words, tensors = KEPT[name]()
        shape = (S, H, D) if words else (B, S, H, D)
        tensors |= {"q": torch.randn(shape).requires_grad_(grad) * 1, "k": torch.randn(shape).requires_grad_(grad) * 1}
        kept += [weakref.ref(t) for t in tensors.values()]
        try:
            outs = rope_qk(**tensors, **words, inplace=inplace)
            kept += [weakref.ref(t) for t in outs]
            if grad:
                torch.autograd.grad([t.sum() for t in outs], [t for t in outs if t.requires_grad][:1])
            del outs
        except TypeError as refused:
            assert "tensor" in str(refused)  # noqa: PT017 - what is refused must not be kept either
        del tensors
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
