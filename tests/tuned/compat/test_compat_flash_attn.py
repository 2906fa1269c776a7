"""flash-attention's calls against their definition: offsets, packed sequences, packed qkv and kv, in place, gradients."""

from __future__ import annotations

import pytest
import torch

from tests.support.compat_formula import REQUIRED, assert_agree, randn, rotated, signature, tables
from tuned.compat.flash_attn import (
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

B, S, H, D = 2, 5, 4, 8
ROWS = 16
OFFSETS = (0, 3, torch.tensor((7, 2), dtype=torch.int32), torch.tensor((0, 11), dtype=torch.int64))


def rows_of(table: torch.Tensor, offsets: int | torch.Tensor) -> torch.Tensor:
    """The entries of each token, [b, s, pairs]."""
    starts = torch.as_tensor(offsets).expand(B)
    return torch.stack([table[start : start + S] for start in starts.tolist()])


def test_the_signatures_are_theirs():
    # Dao-AILab/flash-attention 0251105a, flash_attn/layers/rotary.py
    x_cos_sin = (("cos", REQUIRED), ("sin", REQUIRED))
    assert signature(apply_rotary_emb) == (
        ("x", REQUIRED),
        *x_cos_sin,
        ("interleaved", False),
        ("inplace", False),
        ("seqlen_offsets", 0),
        ("cu_seqlens", None),
        ("max_seqlen", None),
    )
    assert signature(apply_rotary_emb_qkv_) == (
        ("qkv", REQUIRED),
        *x_cos_sin,
        ("cos_k", None),
        ("sin_k", None),
        ("interleaved", False),
        ("seqlen_offsets", 0),
        ("num_heads_q", None),
    )
    assert signature(apply_rotary_emb_kv_) == (
        ("kv", REQUIRED),
        *x_cos_sin,
        ("interleaved", False),
        ("seqlen_offsets", 0),
    )
    assert apply_rotary_emb_func is apply_rotary_emb


# One tensor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [D // 2, 3])
@pytest.mark.parametrize("offsets", OFFSETS, ids=["none", "int", "int32", "int64"])
def test_batches(offsets, pairs, interleaved, inplace):
    cos, sin = tables(ROWS, pairs)
    assert_agree(
        lambda x: apply_rotary_emb(x.clone(), cos, sin, interleaved, inplace, offsets),
        lambda x: rotated(x, rows_of(cos, offsets), rows_of(sin, offsets), interleaved=interleaved),
        randn(B, S, H, D),
    )


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, torch.tensor((5, 0, 1), dtype=torch.int32)], ids=["none", "int32"])
@pytest.mark.parametrize("max_seqlen", [None, 6])
def test_packed_sequences(offsets, interleaved, inplace, max_seqlen):
    cos, sin = tables(ROWS, 3)
    lengths, cu_seqlens = (3, 0, 6), torch.tensor((0, 3, 3, 9), dtype=torch.int32)
    starts = torch.as_tensor(offsets).expand(3).tolist()
    at = [start + i for length, start in zip(lengths, starts, strict=True) for i in range(length)]
    assert_agree(
        lambda x: apply_rotary_emb(
            x.clone(),
            cos,
            sin,
            interleaved=interleaved,
            inplace=inplace,
            seqlen_offsets=offsets,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        ),
        lambda x: rotated(x, cos[at], sin[at], interleaved=interleaved),
        randn(9, H, D),
    )


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16(table_dtype):
    cos, sin = tables(ROWS, D // 2, dtype=table_dtype)
    assert_agree(
        lambda x: apply_rotary_emb(x, cos, sin),
        lambda x: rotated(x, cos[:S], sin[:S]),
        randn(B, S, H, D, dtype=torch.bfloat16),
    )


def test_in_place_writes_and_returns_what_was_given():
    cos, sin = tables(ROWS, 3)
    whole = randn(B, S, 3 * H, D)
    x, before = whole[:, :, H : 2 * H], whole.clone()
    assert apply_rotary_emb(x, cos, sin, inplace=True) is x
    assert torch.equal(x, apply_rotary_emb(before[:, :, H : 2 * H], cos, sin))
    assert not torch.equal(x, before[:, :, H : 2 * H])
    x.copy_(before[:, :, H : 2 * H])
    assert torch.equal(whole, before), "nothing beside it"


def test_max_seqlen_is_not_read_without_packing():
    cos, sin = tables(ROWS, 3)
    x = randn(B, S, H, D)
    assert torch.equal(apply_rotary_emb(x, cos, sin, max_seqlen=99), apply_rotary_emb(x, cos, sin))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seqlen_offsets": ROWS - S + 1}, str(ROWS)),
        ({"seqlen_offsets": -1}, "-1"),
        ({"seqlen_offsets": torch.tensor((0, ROWS - S + 1))}, str(ROWS)),
        ({"seqlen_offsets": torch.tensor((0, -1))}, "-1"),
        ({"seqlen_offsets": torch.zeros(B + 1, dtype=torch.int32)}, "offset"),
        ({"cos": tables(ROWS, D)[0], "sin": tables(ROWS, D)[1]}, "rotary_dim"),
        ({"x": randn(S, H, D)}, "bshd"),
    ],
)
def test_what_cannot_be_is_refused_before_any_write(arguments, message):
    cos, sin = tables(ROWS, 3)
    given = {"x": randn(B, S, H, D), "cos": cos, "sin": sin, "inplace": True, **arguments}
    before = given["x"].clone()
    with pytest.raises(ValueError, match=message):
        apply_rotary_emb(**given)
    assert torch.equal(given["x"], before)


# Packed qkv ---------------------------------------------------------------------------------------------------------


def turned_qkv(qkv, cos_sin_q, cos_sin_k, heads_q, kv_heads, *, interleaved):
    """The same rotation on [b, s, heads, d]."""
    q, k, v = qkv.split((heads_q, kv_heads, kv_heads), 2)
    turned = rotated(q, *cos_sin_q, interleaved=interleaved), rotated(k, *cos_sin_k, interleaved=interleaved)
    return torch.cat((*turned, v.double()), 2)


@pytest.mark.parametrize("own_k", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS, ids=["none", "int", "int32", "int64"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [D // 2, 3])
@pytest.mark.parametrize("kv_heads", [None, H, 2, 1], ids=["five axes", "MHA", "GQA", "MQA"])
def test_qkv(kv_heads, pairs, interleaved, offsets, own_k):
    cos, sin = tables(ROWS, pairs)
    cos_k, sin_k = tables(ROWS, pairs, seed=10) if own_k else (None, None)
    cos_sin_q = [rows_of(a, offsets) for a in (cos, sin)]
    cos_sin_k = [rows_of(a, offsets) for a in (cos_k, sin_k)] if own_k else cos_sin_q
    shape = (B, S, 3, H, D) if kv_heads is None else (B, S, H + 2 * kv_heads, D)
    num_heads_q = None if kv_heads is None else H
    for lies in ("contiguous", "wider rows", "apart"):

        def call(qkv, lies=lies):
            if lies == "wider rows":
                mine = torch.cat((qkv, qkv), -1)[..., :D]
            elif lies == "apart":  # no single axis can hold the heads of q, k and v
                mine = qkv.movedim(2, 0).contiguous().movedim(0, 2)
            else:
                mine = qkv.clone()
            out = apply_rotary_emb_qkv_(mine, cos, sin, cos_k, sin_k, interleaved, offsets, num_heads_q)
            assert out is mine
            return out

        def formula(qkv):
            flat = qkv.flatten(2, 3) if kv_heads is None else qkv
            turned = turned_qkv(flat, cos_sin_q, cos_sin_k, H, kv_heads or H, interleaved=interleaved)
            return turned.view(qkv.shape)

        assert_agree(call, formula, randn(*shape))


@pytest.mark.parametrize("own", ["cos_k", "sin_k"])
def test_one_table_of_k_goes_with_the_other_of_q(own):
    cos, sin = tables(ROWS, 3)
    mine = tables(ROWS, 3, seed=10)[own == "sin_k"]
    both = {"cos_k": cos, "sin_k": sin, own: mine}
    qkv = randn(B, S, 3, H, D)
    got = apply_rotary_emb_qkv_(qkv.clone(), cos, sin, **{own: mine})
    assert torch.equal(got, apply_rotary_emb_qkv_(qkv.clone(), cos, sin, **both))
    assert not torch.equal(got, apply_rotary_emb_qkv_(qkv.clone(), cos, sin))


@pytest.mark.parametrize("own_k", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_v_is_not_touched(kv_heads, own_k):
    cos, sin = tables(ROWS, 3)
    own = dict(zip(("cos_k", "sin_k"), tables(ROWS, 3, seed=10), strict=True)) if own_k else {}
    qkv = randn(B, S, 3, H, D) if kv_heads is None else randn(B, S, H + 2 * kv_heads, D)
    v = qkv[:, :, 2] if kv_heads is None else qkv[:, :, -kv_heads:]
    v.fill_(torch.nan)
    apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=H, **own)
    assert v.isnan().all()
    assert qkv.isnan().sum() == v.numel()


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((B, S, 2, H, D), {}, "qkv must be"),
        ((B, S, D), {"num_heads_q": H}, "qkv must be"),
        ((B, S, H + 2, D), {}, "num_heads_q"),
        ((B, S, H + 3, D), {"num_heads_q": H}, "num_heads_q=4 of 7"),
        ((B, S, H, D), {"num_heads_q": H}, "num_heads_q=4 of 4"),
        ((B, S, H, D), {"num_heads_q": 0}, "num_heads_q=0"),
        ((B, S, 3, H, D), {"cos_k": tables(ROWS, 2)[0]}, "cos_k must have"),
        ((B, S, 3, H, D), {"sin_k": tables(ROWS, 3)[1].double()}, "sin_k must have"),
        ((B, S, 3, H, D), {"seqlen_offsets": ROWS}, str(ROWS)),
    ],
)
def test_qkv_that_cannot_be_is_refused_before_any_write(shape, arguments, message):
    qkv = randn(*shape)
    before = qkv.clone()
    with pytest.raises(ValueError, match=message):
        apply_rotary_emb_qkv_(qkv, *tables(ROWS, 3), **arguments)
    assert torch.equal(qkv, before)


def other_tables():
    cos_k, sin_k = tables(ROWS, 3)
    return {"cos_k": cos_k, "sin_k": sin_k}


@pytest.mark.parametrize("own", [{}, other_tables()], ids=["one table", "own tables of k"])
@pytest.mark.parametrize("heads", [1, H])
def test_qkv_whose_parts_are_one_memory_is_refused_before_any_write(heads, own):
    packed = randn(B, S, 1, heads, D)
    before = packed.clone()
    with pytest.raises(ValueError, match="share memory"):
        apply_rotary_emb_qkv_(packed.expand(B, S, 3, heads, D), *tables(ROWS, 3), **own)
    with pytest.raises(ValueError, match="share memory"):
        apply_rotary_emb_qkv_(packed[:, :, 0, :1].expand(B, S, 3, D), *tables(ROWS, 3), **own, num_heads_q=1)
    assert torch.equal(packed, before)


# Packed kv ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", OFFSETS, ids=["none", "int", "int32", "int64"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [D // 2, 3])
def test_kv(pairs, interleaved, offsets):
    cos, sin = tables(ROWS, pairs)

    def call(kv):
        mine = kv.clone()
        out = apply_rotary_emb_kv_(mine, cos, sin, interleaved, offsets)
        assert out is mine
        return out

    def formula(kv):
        k = rotated(kv[:, :, 0], rows_of(cos, offsets), rows_of(sin, offsets), interleaved=interleaved)
        return torch.stack((k, kv[:, :, 1].double()), 2)

    assert_agree(call, formula, randn(B, S, 2, H, D))


def test_kv_leaves_v_alone():
    kv = randn(B, S, 2, H, D)
    kv[:, :, 1] = torch.nan
    apply_rotary_emb_kv_(kv, *tables(ROWS, 3))
    assert kv[:, :, 1].isnan().all()
    assert not kv[:, :, 0].isnan().any()


@pytest.mark.parametrize("shape", [(B, S, 3, H, D), (B, S, 2 * H, D)])
def test_kv_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="kv must be"):
        apply_rotary_emb_kv_(randn(*shape), *tables(ROWS, 3))


def test_kv_whose_parts_are_one_memory_is_refused_before_any_write():
    packed = randn(B, S, 1, H, D)
    before = packed.clone()
    with pytest.raises(ValueError, match=r"kv cannot be overwritten: .*share memory.* pass a contiguous copy"):
        apply_rotary_emb_kv_(packed.expand(B, S, 2, H, D), *tables(ROWS, 3))
    assert torch.equal(packed, before)


# Autograd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x, *table: apply_rotary_emb(x, *table, inplace=True), (B, S, H, D)),
        (apply_rotary_emb_qkv_, (B, S, 3, H, D)),
        (lambda x, *table: apply_rotary_emb_qkv_(x, *table, *tables(ROWS, 3, seed=10)), (B, S, 3, H, D)),
        (apply_rotary_emb_kv_, (B, S, 2, H, D)),
    ],
    ids=["x", "qkv", "qkv with cos_k", "kv"],
)
def test_a_leaf_that_requires_grad_is_not_overwritten(call, shape):
    leaf = randn(*shape).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        call(leaf, *tables(ROWS, 3))
    assert torch.equal(leaf, randn(*shape))
    with torch.no_grad():
        call(leaf, *tables(ROWS, 3))
    assert not torch.equal(leaf, randn(*shape))


def test_a_view_that_no_gradient_may_come_to_is_refused_before_any_write():
    """k's tables require a gradient and q's do not: q would be written before k is refused."""
    whole = randn(B, S, 3, H, 2 * D)
    with torch.no_grad():
        qkv = whole.split(D, -1)[0]  # one of several views, which autograd lets no tensor with a gradient overwrite
    before = qkv.clone()
    cos_k, sin_k = tables(ROWS, 3, seed=10)
    for learned in ((cos_k.requires_grad_(), sin_k), (cos_k.detach(), sin_k.requires_grad_())):
        with pytest.raises(RuntimeError, match="view"):
            apply_rotary_emb_qkv_(qkv, *tables(ROWS, 3), *learned)
        assert torch.equal(qkv, before)


@pytest.mark.parametrize("name", ["qkv", "kv"])
def test_a_gradient_that_is_shared_is_not_overwritten(name):
    """The sum of the two results passes the same gradient tensor to both."""
    call, shape = {
        "qkv": (apply_rotary_emb_qkv_, (B, S, 3, H, D)),
        "kv": (apply_rotary_emb_kv_, (B, S, 2, H, D)),
    }[name]
    leaf, other = randn(*shape).requires_grad_(), randn(*shape, seed=1).requires_grad_()
    given = randn(*shape, seed=2)
    (call(leaf * 1, *tables(ROWS, 3)) + other).backward(given)
    assert torch.equal(given, randn(*shape, seed=2))
    assert torch.equal(other.grad, given)
