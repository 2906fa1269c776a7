"""What RoPE refuses: each rule with its message, before anything is written; and what RoPE does not refuse."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from tests.support.run import addresses
from tuned.calls.overlap import _within_a_row, check_strides, refuse_overlap
from tuned.calls.rope.arguments import (
    MAX_TOKENS,
    Given,
    Settings,
    offset_limits,
    prepare,
)
from tuned.dispatch import explain_rope, rope, rope_qk, rope_qkv
from tuned.families.rope.spec import RopeSpec

B, S, H, K, D = 2, 6, 4, 2, 8
ROWS = 12
TABLE = torch.zeros(ROWS, D // 2)
WIDE = torch.zeros(ROWS, D)
IDS = torch.zeros(B, S, dtype=torch.int64)
BOUNDS = torch.tensor([0, 2, S], dtype=torch.int32)
META = torch.device("meta")


def call(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """rope_qk of tensors that are all ones, as cos and sin say unless the arguments say otherwise."""
    layout = arguments.get("tensor_format", "bshd")
    tokens = {"thd": (S,), "sbhd": (S, B)}.get(layout, (B, S))
    q, k = torch.ones(*tokens, H, D), torch.ones(*tokens, K, D)
    sourced = {"freqs", "cos", "sin", "cos_sin_cache", "inv_freq"} & set(arguments)
    angles = {} if sourced else {"cos": TABLE, "sin": TABLE}
    return rope_qk(**{"q": q, "k": k, **angles, **arguments})


def like(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


Refusal = tuple[dict[str, Any], type[Exception], str]
TENSORS: dict[str, Refusal] = {
    "layout": ({"tensor_format": "hsbd"}, ValueError, r"tensor_format must be one of .*'hsbd'"),
    "q-no-tensor": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "q-axes": ({"q": like(S, H, D)}, ValueError, r"q must be \[b, s, h, d\] for tensor_format 'bshd', got \[6, 4, 8\]"),
    "q-integers": (
        {"q": like(B, S, H, D, dtype=torch.int32)},
        TypeError,
        "q must be floating point of at least 16 bits, got torch.int32",
    ),
    "k-no-tensor": ({"k": 3}, TypeError, "k must be a tensor, got int"),
    "k-axes": ({"k": like(B, S, D)}, ValueError, r"k must be \[b, s, h, d\]"),
    "k-batch": (
        {"k": like(1, S, K, D)},
        ValueError,
        r"k must have the tokens .* of q, \[2, 6\] and 8; got \[1, 6, 2, 8\]",
    ),
    "k-tokens": ({"k": like(B, S - 1, K, D)}, ValueError, "k must have the tokens and the head_dim of q"),
    "k-head-dim": ({"k": like(B, S, K, D // 2)}, ValueError, "k must have the tokens and the head_dim of q"),
    "k-dtype": (
        {"k": like(B, S, K, D, dtype=torch.float64)},
        ValueError,
        "k must be torch.float32 on cpu, as q is; got torch.float64",
    ),
    "k-device": (
        {"k": like(B, S, K, D, device=META)},
        ValueError,
        "k must be torch.float32 on cpu, as q is; got .* on meta",
    ),
}
ANGLES: dict[str, Refusal] = {
    "none": (
        {"cos": None},
        ValueError,
        "give the angles: freqs in radians, both cos and sin, a cos_sin_cache, freqs_cis, or inv_freq",
    ),
    "two": (
        {"freqs": WIDE, "cos": TABLE, "sin": TABLE},
        ValueError,
        "one source of angles, got freqs and cos and sin",
    ),
    "cache-and-rates": (
        {"cos_sin_cache": WIDE, "inv_freq": TABLE[0]},
        ValueError,
        "one source .* cos_sin_cache and inv_freq",
    ),
    "cos-alone": ({"cos": TABLE}, ValueError, "give both cos and sin"),
    "sin-alone": ({"sin": TABLE}, ValueError, "give both cos and sin"),
    "freqs-16-bit": ({"freqs": WIDE.bfloat16()}, TypeError, r"freqs must be float32, got torch.bfloat16.*\.float\(\)"),
    "freqs-integers": (
        {"freqs": WIDE.int()},
        TypeError,
        "freqs must be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    "freqs-no-tensor": ({"freqs": 1.0}, TypeError, "freqs must be a tensor, got float"),
    "freqs-device": (
        {"freqs": WIDE.to(META)},
        ValueError,
        r"freqs must be on the device of x, cpu, got meta: move it with",
    ),
    "freqs-axes": (
        {"freqs": like(ROWS, 2, D)},
        ValueError,
        r"freqs must be \[rows, entries\], or have axes of length 1",
    ),
    "freqs-vector": ({"freqs": like(D)}, ValueError, r"freqs must be \[rows, entries\]"),
    "cos-shape": (
        {"cos": TABLE, "sin": TABLE[:5]},
        ValueError,
        r"cos and sin must have the same shape and dtype, got \[12, 4\]",
    ),
    "cos-dtype": ({"cos": TABLE, "sin": TABLE.double()}, ValueError, "the same shape and dtype, .* torch.float64"),
    "cos-batch": ({"cos": like(3, ROWS, 4), "sin": like(3, ROWS, 4)}, ValueError, "must have the batch of x, 2, got"),
    "cos-batch-packed": (
        {"cos": like(B, ROWS, 4), "sin": like(B, ROWS, 4), "tensor_format": "thd", "cu_seqlens": BOUNDS},
        ValueError,
        "packed tokens have no batch",
    ),
    "cache-odd": ({"cos_sin_cache": like(ROWS, 7)}, ValueError, "rows of cosines followed by as many sines, .*; got 7"),
    "rates-axes": (
        {"inv_freq": TABLE},
        ValueError,
        r"inv_freq must be a tensor of \[pairs\], in radians per position, got \[12, 4\]",
    ),
    "rates-no-tensor": ({"inv_freq": 0.5}, ValueError, "inv_freq must be a tensor of .* got float"),
    "rates-64-bit": ({"inv_freq": TABLE[0].double()}, TypeError, "inv_freq must be float32, got torch.float64"),
    "entries": ({"angle_entries": "half"}, ValueError, "angle_entries must be \"feature\" .* got 'half'"),
    "rotary-dim": (
        {"rotary_dim": 4},
        ValueError,
        'rotary_dim=4 does not fit: angles with 4 entries, one per pair, rotate 8.*pass angle_entries="feature"',
    ),
    "too-wide": (
        {"freqs": WIDE, "angle_entries": "pair"},
        ValueError,
        r'in \(0, head_dim=8\], but .* rotate 16 features; .*"feature"',
    ),
    "odd": ({"freqs": WIDE[:, :3]}, ValueError, "rotary_dim must be even"),
    "no-entries": ({"freqs": WIDE[:, :0]}, ValueError, "rotary_dim must be even and in"),
    "scaled-cos": (
        {"attention_scaling": 1.5},
        ValueError,
        "attention_scaling must be 1.0 unless freqs or inv_freq give the angles, got 1.5",
    ),
}
POSITIONS: dict[str, Refusal] = {
    "too-short": (
        {"cos": TABLE[:5], "sin": TABLE[:5]},
        ValueError,
        "too short: 5 positions for a sequence of 6; make them",
    ),
    "too-short-from": ({"offset": 7}, ValueError, "too short: 12 positions for a sequence of 6 from position 7 on"),
    "too-short-ranks": ({"cp_size": 3}, ValueError, "12 positions for a sequence of 6 on each of 3 ranks"),
    "offset-below": ({"offset": -1}, ValueError, "offset must be at least 0 with a table of angles, got -1"),
    "offset-flag": ({"offset": True}, TypeError, "offset must be an int, got bool True"),
    "offset-float": ({"offset": 1.0}, TypeError, "offset must be an int, got float 1.0"),
    "offset-huge": (
        {"offset": MAX_TOKENS - S + 1, "inv_freq": TABLE[0]},
        ValueError,
        f"to {MAX_TOKENS - S}, got {MAX_TOKENS - S + 1}",
    ),
    "offset-tiny": (
        {"offset": -MAX_TOKENS - 1, "inv_freq": TABLE[0]},
        ValueError,
        f"offset must be from {-MAX_TOKENS} to",
    ),
    "offset-dtype": (
        {"offset": torch.tensor(1.0)},
        TypeError,
        r"offset must be int32 or int64, got torch.float32: convert with",
    ),
    "offset-16": (
        {"offset": torch.tensor(1, dtype=torch.int16)},
        TypeError,
        "offset must be int32 or int64, got torch.int16",
    ),
    "offset-device": (
        {"offset": torch.tensor(1, device=META)},
        ValueError,
        "offset must be on the device of x, cpu, got meta",
    ),
    "starts-count": (
        {"offset": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        r"a tensor of \[2\], one entry per sequence; got \[3\]",
    ),
    "starts-axes": (
        {"offset": torch.zeros(B, 1, dtype=torch.int32)},
        ValueError,
        r"a tensor of \[2\], one entry per sequence; got \[2, 1\]",
    ),
    "starts-count-packed": (
        {"offset": torch.zeros(3, dtype=torch.int32), "tensor_format": "thd", "cu_seqlens": BOUNDS},
        ValueError,
        "one entry per sequence",
    ),
    "starts-value": (
        {"offset": torch.tensor([0, 7])},
        ValueError,
        r"offset plus the index of each token must be in \[0, 12\), .*, got 0 to 12",
    ),
    "offset-value": (
        {"offset": torch.tensor(-1)},
        ValueError,
        "offset plus the index of each token must be in .*, got -1 to 4",
    ),
    "offset-value-ranks": ({"offset": torch.tensor(1), "cp_size": 2}, ValueError, "got 1 to 12"),
    "ids-list": ({"positions": [0] * S}, TypeError, "positions must be a tensor of int32 or int64, got list"),
    "ids-dtype": ({"positions": IDS.float()}, TypeError, "positions must be int32 or int64, got torch.float32"),
    "ids-device": ({"positions": IDS.to(META)}, ValueError, "positions must be on the device of x"),
    "ids-shape": (
        {"positions": IDS.t()},
        ValueError,
        r"positions must be \[2, 6\], as the tokens, or \[6\], shared by the batch; got \[6, 2\]",
    ),
    "ids-shape-sbhd": (
        {"positions": IDS, "tensor_format": "sbhd"},
        ValueError,
        r"positions must be \[6, 2\], as the tokens",
    ),
    "ids-shape-thd": (
        {"positions": IDS, "tensor_format": "thd"},
        ValueError,
        r"positions must be \[6\], as the tokens; got \[2, 6\]",
    ),
    "ids-and-offset": ({"positions": IDS, "offset": 1}, ValueError, "give positions or an offset, not both"),
    "ids-and-starts": ({"positions": IDS, "offset": IDS[:, 0]}, ValueError, "give positions or an offset, not both"),
    "ids-and-bounds": (
        {"positions": IDS[0], "cu_seqlens": BOUNDS, "tensor_format": "thd"},
        ValueError,
        "positions cannot be combined with cu_seqlens",
    ),
    "ids-and-length": ({"positions": IDS, "max_seqlen": 6}, ValueError, "positions cannot be combined with cu_seqlens"),
    "ids-and-ranks": ({"positions": IDS, "cp_size": 2}, ValueError, "positions cannot be combined with cu_seqlens"),
    "ids-past": ({"positions": IDS + 12}, ValueError, r"positions must be in \[0, 12\), .*, got 12 to 12"),
    "ids-below": ({"positions": IDS - 1}, ValueError, "got -1 to -1"),
    "ids-wrapped": ({"positions": IDS + 2**32}, ValueError, "got 4294967296 to"),
    "rank": (
        {"cp_size": 2, "cp_rank": 2},
        ValueError,
        "cp_rank must be from 0 to cp_size - 1, got cp_rank=2, cp_size=2",
    ),
    "rank-below": ({"cp_size": 2, "cp_rank": -1}, ValueError, "cp_rank must be from 0"),
    "ranks": ({"cp_size": 0}, ValueError, "got cp_rank=0, cp_size=0"),
    "ranks-odd": (
        {"q": like(B, 5, H, D), "k": None, "cp_size": 2},
        ValueError,
        "seq must be even with cp_size=2, .*; got 5",
    ),
}
PACKED: dict[str, Refusal] = {
    "no-bounds": (
        {"tensor_format": "thd"},
        ValueError,
        '"thd" needs cu_seqlens, .* or positions, one per token; got NoneType',
    ),
    "bounds-list": (
        {"tensor_format": "thd", "cu_seqlens": [0, 6]},
        ValueError,
        "needs cu_seqlens, a tensor .* got list",
    ),
    "bounds-axes": (
        {"tensor_format": "thd", "cu_seqlens": BOUNDS[None]},
        ValueError,
        r"needs cu_seqlens, .* got \[1, 3\]",
    ),
    "bounds-empty": ({"tensor_format": "thd", "cu_seqlens": BOUNDS[:0]}, ValueError, r"needs cu_seqlens, .* got \[0\]"),
    "bounds-dtype": (
        {"tensor_format": "thd", "cu_seqlens": BOUNDS.long()},
        TypeError,
        r"cu_seqlens must be int32, got torch.int64",
    ),
    "bounds-device": (
        {"tensor_format": "thd", "cu_seqlens": BOUNDS.to(META)},
        ValueError,
        "cu_seqlens must be on the device of x",
    ),
    "bounds-unasked": (
        {"cu_seqlens": BOUNDS},
        ValueError,
        "cu_seqlens and max_seqlen are for tensor_format \"thd\", got 'bshd'",
    ),
    "length-unasked": (
        {"max_seqlen": 6, "tensor_format": "sbhd"},
        ValueError,
        "are for tensor_format \"thd\", got 'sbhd'",
    ),
    "length": (
        {"tensor_format": "thd", "cu_seqlens": BOUNDS, "max_seqlen": 13},
        ValueError,
        "12 positions for sequences of up to max_seqlen=13; make",
    ),
    "length-from": (
        {"tensor_format": "thd", "cu_seqlens": BOUNDS, "max_seqlen": 10, "offset": 3},
        ValueError,
        "up to max_seqlen=10 from 3 on",
    ),
    "start": (
        {"tensor_format": "thd", "cu_seqlens": BOUNDS, "offset": torch.tensor([0, 12])},
        ValueError,
        "12 positions for a sequence of 4 from position 12 on, cu_seqlens 2 to 6; make",
    ),
}
FEATURES: dict[str, Refusal] = {
    "rotated": ({"rotated": "middle"}, ValueError, "rotated must be one of .* got 'middle'"),
    "proportional-interleaved": (
        {"cos": TABLE[:, :2], "sin": TABLE[:, :2], "rotated": "proportional", "interleaved": True},
        ValueError,
        "so interleaved must be False",
    ),
    "proportional-odd": (
        {"q": like(B, S, H, 7), "k": None, "cos": TABLE[:, :2], "sin": TABLE[:, :2], "rotated": "proportional"},
        ValueError,
        "an even head_dim",
    ),
}
REFUSALS = {**TENSORS, **ANGLES, **POSITIONS, **PACKED, **FEATURES}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_refusal_says_which_rule_and_writes_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str, *, inplace: bool
) -> None:
    tokens = {"thd": (S,), "sbhd": (S, B)}.get(arguments.get("tensor_format", ""), (B, S))
    tensors = {"q": like(*tokens, H, D), "k": like(*tokens, K, D)}
    with pytest.raises(error, match=message):
        call(**{**tensors, **arguments}, inplace=inplace)
    assert all(bool((t == 1).all()) for t in tensors.values())


def test_what_is_not_refused() -> None:
    assert call()[1].shape == (B, S, K, D)  # type: ignore[union-attr]
    for arguments in (
        {"offset": 6},
        {"offset": torch.tensor(6)},
        {"offset": torch.tensor([6, 0], dtype=torch.int32)},
        {"positions": IDS + 11},
        {"positions": IDS[0].int()},
        {"positions": IDS.t(), "tensor_format": "sbhd"},
        {"cp_size": 2, "cp_rank": 1},
        {"tensor_format": "thd", "positions": IDS[0]},
        {"tensor_format": "thd", "cu_seqlens": BOUNDS, "max_seqlen": 12},
        {"tensor_format": "thd", "cu_seqlens": BOUNDS, "offset": torch.tensor([10, 0])},
        {"tensor_format": "thd", "cu_seqlens": BOUNDS, "offset": 8},
        {"tensor_format": "thd", "cu_seqlens": BOUNDS, "inv_freq": TABLE[0], "offset": 11},
        {"tensor_format": "thd", "cu_seqlens": BOUNDS[:1].repeat(3), "offset": 12},  # empty sequences
        {"inv_freq": TABLE[0], "offset": MAX_TOKENS - S},
        {"inv_freq": TABLE[0], "offset": -MAX_TOKENS},
        {"inv_freq": TABLE[0], "offset": torch.tensor(-5)},
        {"inv_freq": TABLE[0], "positions": IDS - 3, "attention_scaling": 2.0},
        {"freqs": WIDE[:, None, None]},
        {"cos": TABLE[:, None, None], "sin": TABLE[:, None, None]},
        {"cos": like(B, ROWS, 4), "sin": like(B, ROWS, 4)},
        {"cos_sin_cache": WIDE.half()},
        {"cos": TABLE, "sin": TABLE.t().contiguous().t()},
        {"rotary_dim": D},
    ):
        call(**arguments)


def test_tokens_are_counted_in_32_bits() -> None:
    x = torch.empty((), dtype=torch.bfloat16, device=META).expand(2, 2**30, 1, 2)
    rates = torch.empty(1, device=META)
    with pytest.raises(ValueError, match=f"must be at most {MAX_TOKENS}, got {2**31}: split the call"):
        prepare(Given(x, inv_freq=rates), Settings(), make_out=lambda t: t)
    prepare(Given(x[:, 32:], inv_freq=rates), Settings(), make_out=lambda t: t)


# Packed qkv ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize(
    ("shape", "kv_heads", "message"),
    [
        (
            (B, S, 8, D),
            None,
            r"qkv must be \[b, s, 3, h, d\], or pass kv_heads for \[b, s, heads \+ 2 \* kv_heads, d\]; got",
        ),
        ((B, S, 2, 4, D), None, r"got \[2, 6, 2, 4, 8\]"),
        ((B, S, 4, D), 2, "more than 2 . kv_heads heads, got .* with kv_heads=2"),
        ((B, S, 3, 4, D), 2, "more than 2 . kv_heads heads"),
        ((B, S, 8, D), -1, "kv_heads must be at least 1, got kv_heads=-1"),
        ((B, S, 3, 4, D), 0, r"kv_heads must be at least 1, got kv_heads=0: pass None for .* axis of 3"),
        ((B, S, 8, D), 0, "kv_heads must be at least 1, got kv_heads=0"),
    ],
)
def test_a_packed_qkv_of_another_shape_is_refused(
    shape: tuple[int, ...], kv_heads: int | None, message: str, *, inplace: bool
) -> None:
    qkv = torch.ones(shape)
    with pytest.raises(ValueError, match=message):
        rope_qkv(qkv, cos=TABLE, sin=TABLE, kv_heads=kv_heads, inplace=inplace)
    with pytest.raises(ValueError, match=message):
        explain_rope(rope_qkv, qkv, cos=TABLE, sin=TABLE, kv_heads=kv_heads, inplace=inplace)
    assert bool((qkv == 1).all())


def test_a_packed_qkv_whose_parts_lie_apart_is_refused_in_place() -> None:
    qkv = torch.ones(B, S, 4, 3, D).transpose(2, 3)
    with pytest.raises(
        ValueError, match=r"must be contiguous to be rotated in place, .*: make qkv contiguous, or use rope_qk"
    ):
        rope_qkv(qkv, cos=TABLE, sin=TABLE, inplace=True)
    assert bool((qkv == 1).all())
    rope_qkv(
        torch.ones(B, S, 1, 3, D).transpose(2, 3), cos=TABLE, sin=TABLE, inplace=True
    )  # parts of one head always lie so


def test_a_packed_qkv_whose_parts_lie_apart_is_served_out_of_place() -> None:
    qkv = torch.randn(B, S, 4, 3, D).transpose(2, 3)
    assert torch.equal(rope_qkv(qkv, cos=TABLE, sin=TABLE), rope_qkv(qkv.contiguous(), cos=TABLE, sin=TABLE))


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_packed_qkv_is_one_tensor_of_which_the_last_heads_do_not_rotate(*, inplace: bool) -> None:
    for qkv, kv_heads, heads in ((torch.ones(B, S, 8, D), 2, 8), (torch.ones(B, S, 3, 4, D), 0, 12)):
        given = Given(qkv, cos=TABLE, sin=TABLE)
        values = kv_heads or 4
        prepared = prepare(given, Settings(kv_heads=kv_heads, inplace=inplace), make_out=torch.empty_like)
        spec = prepared.eager_spec
        assert (spec.heads, spec.copied_heads) == ((heads - values, 0) if inplace else (heads, values))
        assert prepared.call.x.data_ptr() == qkv.data_ptr()


# The spec of a call -------------------------------------------------------------------------------------------------


def spec(**arguments: Any) -> RopeSpec:
    settings = {name: arguments.pop(name) for name in Settings._fields if name in arguments}
    angles = {} if {"freqs", "cos", "inv_freq"} & set(arguments) else {"cos": TABLE, "sin": TABLE}
    return prepare(
        Given(torch.ones(B, S, H, D), **angles, **arguments), Settings(**settings), make_out=lambda t: t
    ).eager_spec


def test_calls_that_mean_the_same_have_one_spec() -> None:
    plain = spec()
    assert plain.plain
    assert spec(offset=0) == spec(rotated="last") == spec(rotated="proportional") == plain
    assert spec(conjugate=True) == spec(direction="backward")  # the transpose, where a pair shares its angle
    assert spec(conjugate=True, direction="backward") == plain
    assert spec(conjugate=True, cos=WIDE, sin=WIDE, angle_entries="feature").conjugate
    assert spec(conjugate=True, inplace=True).conjugate
    assert spec(offset=3) == spec(offset=5) != plain
    assert spec(freqs=WIDE, attention_scaling=2.0) == spec(freqs=WIDE, attention_scaling=3.0) != spec(freqs=WIDE)
    assert spec(cp_size=2) == spec(cp_size=2, cp_rank=1) != plain


@pytest.mark.parametrize(
    ("q", "k", "served"),
    [
        (torch.ones(B, S, H, D), torch.ones(B, S, K, D), True),
        (torch.ones(B, S, H, 3 * D)[..., ::3], torch.ones(B, S, K, D), False),
        (torch.ones(B, S, H, D), torch.ones(D, B, S, K).movedim(0, -1), False),
        (torch.ones(B, S, H, 3 * D)[..., ::3], torch.ones(B, S, K, 3 * D)[..., ::3], True),
        (torch.ones(D, B, S, H).movedim(0, -1), torch.ones(D, B, S, H).movedim(0, -1), True),
    ],
)
def test_no_kernel_takes_a_query_and_a_key_whose_features_lie_unlike(q: Any, k: Any, *, served: bool) -> None:
    prepared = prepare(Given(q, k, cos=TABLE, sin=TABLE), Settings(), make_out=torch.empty_like)
    assert (prepared.spec is not None) == served
    out, key_out = rope_qk(q, k, cos=TABLE + 0.5, sin=TABLE)
    assert torch.equal(out, torch.full_like(q, 0.5))
    assert torch.equal(key_out, torch.full_like(k, 0.5))  # type: ignore[arg-type]


# What may be overwritten --------------------------------------------------------------------------------------------


def test_an_expanded_tensor_is_not_overwritten() -> None:
    q, k = torch.ones(1, S, H, D).expand(B, S, H, D), torch.ones(B, S, K, D)
    for tensors in ({"q": q}, {"k": k[:, :, :1].expand(B, S, H, D)}):
        with pytest.raises(ValueError, match=r"cannot be overwritten: some of its elements share memory \(stride 0\)"):
            call(**tensors, inplace=True)
        call(**tensors)
    assert bool((q == 1).all())


@pytest.mark.parametrize("strides", [(0, 0, 0, 1), (0, D, H * D, 1)])
def test_an_empty_tensor_is_overwritten_whatever_its_strides(strides: tuple[int, ...]) -> None:
    """Elementwise results of transposed empty tensors have strides of 0."""
    q, k = torch.ones(B, 0, H, D).as_strided((B, 0, H, D), strides), torch.ones(B, 0, K, D)
    assert rope(q, cos=TABLE, sin=TABLE, inplace=True) is q
    assert rope_qk(q, k, cos=TABLE, sin=TABLE, inplace=True) == (q, k)


@pytest.mark.parametrize("rows", [0, 4])
def test_no_token_is_past_an_offset_of_all_rows(rows: int) -> None:
    none = torch.ones(1, 0, H, D)
    for offset in (rows, torch.tensor(rows), torch.tensor([rows])):
        assert rope(none, cos=TABLE[:rows], sin=TABLE[:rows], offset=offset).shape == none.shape
    with pytest.raises(ValueError, match=r"the rows of the angles|the angles are too short"):
        rope(torch.ones(1, 1, H, D), cos=TABLE[:rows], sin=TABLE[:rows], offset=torch.tensor(rows))


def test_windows_that_overlap_are_not_overwritten() -> None:
    memory = torch.zeros(4000)
    windows = memory.as_strided((B, S, H, D), (400, 16, 4, 1))
    beside = memory.as_strided((B, S, K, D), (400, 16, 8, 1), 2000)
    for tensors in ({"q": windows}, {"q": beside, "k": memory.as_strided((B, S, K, D), (400, 16, 4, 1))}):
        with pytest.raises(
            ValueError, match=r"overwritten: some of its elements share memory \(strides \[400, 16, 4, 1\] of"
        ):
            call(**tensors, inplace=True)
    assert not memory.any()
    rope_qk(windows, beside, cos=TABLE, sin=TABLE)


def test_a_tensor_is_overwritten_exactly_where_no_element_shares_memory_with_another() -> None:
    draw, found = random.Random(0), dict.fromkeys((False, True), 0)
    for _ in range(3000):
        shape = [draw.choice((1, 2, 3, 4, 7)) for _ in range(4)]
        strides = [draw.choice((1, 2, 3, 4, 5, 6, 8, 9, 12, 20, 24, 35, 60)) for _ in range(4)]
        if draw.random() < 0.5:
            strides = [s * f for s, f in zip(strides, draw.sample((1, 7, 30, 100), 4), strict=True)]
        x = torch.empty_strided(shape, strides)
        overlap = len(set(addresses(x).ravel().tolist())) < x.numel()
        try:
            check_strides("x", x)
        except ValueError:
            assert overlap, (shape, strides)
        else:
            assert not overlap, (shape, strides)
        found[overlap] += 1
    assert min(found.values()) > 500


def test_of_many_elements_no_two_are_compared() -> None:
    x = torch.empty_strided((64, 4096, 2, 128), (2**30, 2, 4097, 2**14), device=META)  # interleaved heads
    check_strides("x", x)
    with pytest.raises(ValueError, match="share memory"):
        check_strides("x", x.as_strided(x.shape, (2**30, 2, 4096, 2**14)))


def shared() -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
    """Pairs of views of one tensor, and whether they share an element."""
    qkv = torch.ones(B, S, 8, D)
    by_heads = torch.ones(B, 8, S, D).transpose(1, 2)
    flat = torch.ones(B, S, 8 * D)
    by_axis = torch.ones(2, B, S, H, D)
    features = torch.ones(B, S, H, 2 * D)
    return {
        "slices-of-heads": (qkv[:, :, :4], qkv[:, :, 4:6], False),
        "key-first": (qkv[:, :, 2:], qkv[:, :, :2], False),
        "more-key-heads": (qkv[:, :, :2], qkv[:, :, 2:], False),
        "one-key-head": (qkv[:, :, :4], qkv[:, :, 4:5], False),
        "heads-before-tokens": (by_heads[:, :, :4], by_heads[:, :, 4:6], False),
        "views-of-a-projection": (flat[..., :32].view(B, S, 4, D), flat[..., 32:48].view(B, S, 2, D), False),
        "one-after-the-other": (by_axis[0], by_axis[1], False),
        "features": (features[..., :D], features[..., D:], False),
        "every-other-head": (qkv[:, :, ::2], qkv[:, :, 1::2], False),
        "the-same": (qkv, qkv, True),
        "one-head-of-both": (qkv[:, :, :5], qkv[:, :, 4:6], True),
        "every-other-token-and-all": (qkv[:, ::2, :4], qkv[:, : S // 2, 2:6], True),
        "one-feature-of-both": (features[..., :D], features[..., D - 1 : -1], True),
    }


@pytest.mark.parametrize("name", shared())
def test_a_query_and_a_key_of_one_tensor_are_overwritten_where_they_share_nothing(name: str) -> None:
    q, k, overlap = shared()[name]
    assert overlap == share(q, k)
    if overlap:
        with pytest.raises(ValueError, match="q and k share memory, and both would be overwritten: use inplace=False"):
            rope_qk(q, k, cos=TABLE, sin=TABLE, inplace=True)
        assert bool((q == 1).all())
        rope_qk(q, k, cos=TABLE, sin=TABLE)
    else:
        want = rope_qk(q, k, cos=TABLE + 0.5, sin=TABLE - 0.25)
        got = rope_qk(q, k, cos=TABLE + 0.5, sin=TABLE - 0.25, inplace=True)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "name", [n for n, (*_, overlap) in shared().items() if not overlap and n != "every-other-head"]
)
def test_views_as_models_make_them_are_told_apart_by_their_strides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their addresses, listed one by one, would take eight bytes an element of the whole tensor.
    def enumerated(*_: Any) -> None:
        raise AssertionError("the addresses were looked at one by one")

    monkeypatch.setattr("tuned.calls.overlap._share", enumerated)
    q, k, _ = shared()[name]
    rope_qk(q, k, cos=TABLE, sin=TABLE, inplace=True)


def share(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether the two share an element."""
    return not set(addresses(q).ravel().tolist()).isdisjoint(addresses(k).ravel().tolist())


def test_no_two_tensors_that_share_an_element_are_both_overwritten() -> None:
    # Views of any strides are refused exactly if an address is in both.
    draw, memory = random.Random(0), torch.zeros(4000)
    found = dict.fromkeys(itertools.product((False, True), (False, True)), 0)
    for _ in range(4000):
        tokens = draw.choice(((1, 3), (2, 2), (2, 3), (3, 1)))
        shapes = [(*tokens, draw.choice((1, 2, 3)), 2) for _ in range(2)]
        strides = [draw.choice((1, 2, 3, 4, 6, 8, 10, 12, 20, 24, 40, 45, 60)) for _ in range(4)]
        if draw.random() < 0.5:  # strides of a real tensor, its axes in any order
            order, step = draw.sample(range(4), 4), draw.choice((1, 2))
            for axis in order:
                strides[axis], step = step, step * (draw.choice((2, 3, 6)) if axis > 1 else tokens[axis])
        others = list(strides)
        if draw.random() < 0.2:
            others[draw.randrange(4)] = draw.choice((1, 2, 4, 12, 30))
        q = memory.as_strided(shapes[0], strides, draw.randrange(60))
        k = memory.as_strided(shapes[1], others, draw.randrange(60))
        if draw.random() < 0.5:
            q, k = k, q
        overlap, refused = share(q, k), False
        try:
            refuse_overlap(q, k)
        except ValueError as error:
            assert "share memory, and both" in str(error)  # noqa: PT017 - any other error is a fault
            refused = True
        assert refused == overlap, (q.shape, q.stride(), q.storage_offset(), k.shape, k.stride(), k.storage_offset())
        found[overlap, math.prod(shapes[0]) > 6] += 1
    assert min(found.values()) > 100


def test_what_is_compared_one_by_one_is_a_row_and_not_all_tokens() -> None:
    """For q and every other head of k, views of one tensor, addresses of 8 bytes an element would be gigabytes."""
    packed = torch.empty(1, 2**17, 3, 32, 128, device="meta")
    q, k = packed[:, :, 0], packed[:, :, 1, ::2]
    found = _within_a_row(q, k, 32 * 128 * 4)
    assert found == [[(4, 128), (512, 32)], [(4, 128), (1024, 16)]]
    found = _within_a_row(q[:, :, :2], k, 2**20 * 4)  # rows of other tokens, which lie apart, may meet
    assert math.prod(n for _, n in found[0]) == 2**17 * 2 * 128


def test_a_known_packed_call_takes_the_offsets_that_checks_take() -> None:
    bounds = torch.tensor([0, 3, S], dtype=torch.int32)
    given = Given(torch.zeros(S, 1, 8), freqs=TABLE[:, :4], cu_seqlens=bounds)
    settings = Settings(tensor_format="thd", angle_entries="pair")
    prepared = prepare(given, settings, make_out=torch.empty_like)
    assert prepared.spec is not None
    most = offset_limits(prepared.spec, settings, len(TABLE), S)[1]
    assert most == MAX_TOKENS - S
    with pytest.raises(ValueError, match=f"offset must be from .* to {most}, got {most + 1}"):
        prepare(given._replace(offset=most + 1), settings, make_out=torch.empty_like)
