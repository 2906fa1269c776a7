"""vLLM's, SGLang's and FlashInfer's calls against their definition: ids, packed parts, in place, part of a head."""

from __future__ import annotations

import pytest
import torch

from tests.support.compat_formula import REQUIRED, assert_agree, randn, rotated, signature, tables
from tuned.compat.flashinfer import apply_rope_with_cos_sin_cache_inplace
from tuned.compat.sglang import fused_inplace_qknorm_rope
from tuned.compat.vllm import fused_qk_norm_rope, rotary_embedding

H, KV, D = 4, 2, 8
ROWS = 20
TOKENS = torch.tensor([3, 0, 19, 7, 7, 1])
GRID = TOKENS.view(2, 3)


def cache_of(pairs: int = D // 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat(tables(ROWS, pairs, dtype=dtype), -1)


def formula(positions: torch.Tensor, cache: torch.Tensor, *, is_neox: bool = True, inverse: bool = False):
    cos, sin = cache.double().chunk(2, -1)
    sign = -1 if inverse else 1

    def turned(*tensors: torch.Tensor) -> list[torch.Tensor]:
        outs = [rotated(x, cos[positions], sign * sin[positions], interleaved=not is_neox) for x in by_head(tensors)]
        return [out.view(x.shape) for out, x in zip(outs, tensors, strict=True)]

    def by_head(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [x.unflatten(-1, (-1, D)) if x.ndim == positions.ndim + 1 else x for x in tensors]

    return turned


def in_place(call):
    """Runs ``call`` on copies, whose gradients flow to what they copy; returns the copies."""

    def called(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mine = tuple(x.clone() for x in tensors)
        assert call(*mine) is None
        return mine

    return called


def test_the_signatures_are_theirs():
    six = tuple((name, REQUIRED) for name in ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"))
    # vllm-project/vllm 0002bde5, vllm/_custom_ops.py
    assert signature(rotary_embedding) == (*six, ("rope_dim_offset", 0), ("inverse", False))
    names = (
        "qkv",
        "num_heads_q",
        "num_heads_k",
        "num_heads_v",
        "head_dim",
        "eps",
        "q_weight",
        "k_weight",
        "cos_sin_cache",
    )
    eleven = tuple((name, REQUIRED) for name in (*names, "is_neox", "position_ids"))
    assert signature(fused_qk_norm_rope) == (*eleven, ("forced_token_heads_per_warp", -1))
    # flashinfer-ai/flashinfer fb28d724, flashinfer/rope.py
    assert signature(apply_rope_with_cos_sin_cache_inplace) == (*six[:-1], ("is_neox", True))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("pairs", [D // 2, 3])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "heads"])
def test_flashinfer(flat, pairs, is_neox, ids):
    cache, n = cache_of(pairs), len(TOKENS)
    shapes = [(n, heads * D) if flat else (n, heads, D) for heads in (H, KV)]
    assert_agree(
        in_place(lambda q, k: apply_rope_with_cos_sin_cache_inplace(TOKENS.to(ids), q, k, D, cache, is_neox)),
        formula(TOKENS, cache, is_neox=is_neox),
        randn(*shapes[0]),
        randn(*shapes[1], seed=1),
    )


def test_flashinfer_is_neox_unless_told():
    cache, q, k = cache_of(), randn(6, H * D), randn(6, KV * D, seed=1)
    want = formula(TOKENS, cache)(q, k)
    apply_rope_with_cos_sin_cache_inplace(TOKENS, q, k, D, cache)
    for got, wanted in zip((q, k), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [H, KV, 1, None])
@pytest.mark.parametrize("positions", [TOKENS, GRID], ids=["tokens", "grid"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "heads"])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("inverse", [False, True])
def test_vllm(kv_heads, positions, flat, is_neox, inverse):
    cache = cache_of(3)
    given = [
        randn(*positions.shape, *((heads * D,) if flat else (heads, D)), seed=seed)
        for seed, heads in enumerate((H, kv_heads))
        if heads
    ]

    def call(q, k=None):
        return rotary_embedding(positions, q, k, D, cache, is_neox, inverse=inverse)

    assert_agree(in_place(call), formula(positions, cache, is_neox=is_neox, inverse=inverse), *given)


@pytest.mark.parametrize("begin", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, None])
def test_a_part_within_the_head(begin, kv_heads):
    cache = cache_of(3)  # two features do not rotate: before the six that do, after them, or one on each side
    turned = formula(TOKENS, cache, is_neox=False)

    def part_only(*tensors):
        heads = [x.double() for x in tensors]
        parts = [torch.cat((x[..., begin : begin + 6], x[..., :begin], x[..., begin + 6 :]), -1) for x in heads]
        back = [(out[..., :6], out[..., 6 : 6 + begin], out[..., 6 + begin :]) for out in turned(*parts)]
        return [torch.cat((before, part, after), -1) for part, before, after in back]

    given = [randn(6, heads, D, seed=heads) for heads in (H, kv_heads) if heads]
    assert_agree(in_place(lambda q, k=None: rotary_embedding(TOKENS, q, k, D, cache, False, begin)), part_only, *given)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16(cache_dtype):
    cache = cache_of(dtype=cache_dtype)
    q, k = (randn(6, heads * D, seed=heads, dtype=torch.bfloat16) for heads in (H, KV))
    assert_agree(
        in_place(lambda q, k: apply_rope_with_cos_sin_cache_inplace(TOKENS, q, k, D, cache)),
        formula(TOKENS, cache),
        q,
        k,
    )


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "heads"])
def test_parts_of_a_packed_qkv_are_written_where_they_lie(flat):
    cache = cache_of(3)
    qkv = randn(6, H + 2 * KV, D)
    before = qkv.clone()
    seen = qkv.view(6, -1) if flat else qkv
    q, k, v = seen.split([n * (D if flat else 1) for n in (H, KV, KV)], 1)
    apply_rope_with_cos_sin_cache_inplace(TOKENS, q, k, D, cache)
    want = torch.cat((*formula(TOKENS, cache)(before[:, :H], before[:, H : H + KV]), before[:, H + KV :].double()), 1)
    torch.testing.assert_close(qkv.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(v.reshape(6, KV, D), before[:, H + KV :])


def test_no_tokens():
    q, k = torch.empty(0, H * D), torch.empty(0, KV * D)
    apply_rope_with_cos_sin_cache_inplace(TOKENS[:0], q, k, D, cache_of())
    assert q.shape == (0, H * D)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_size": 5}, "query must have the axes of positions"),
        ({"key": randn(6, D + 1)}, "key must have the axes of positions"),
        ({"key": randn(6, KV, D + 1)}, "key must have the axes of positions"),
        ({"positions": GRID}, "query must have the axes of positions"),
        ({"positions": TOKENS[:5]}, "positions"),
        ({"key": randn(5, KV * D)}, "k must have the tokens"),
        ({"positions": TOKENS - 1}, "-1"),
        ({"positions": TOKENS + 1}, str(ROWS)),
        ({"rope_dim_offset": 3}, "features 3 to 9 of head_size=8"),
        ({"rope_dim_offset": -1}, "features -1 to 5"),
        ({"cos_sin_cache": cache_of(5)}, "rotary_dim"),
    ],
)
def test_what_cannot_be_is_refused_before_any_write(arguments, message):
    given = {
        "positions": TOKENS,
        "query": randn(6, H * D),
        "key": randn(6, KV * D),
        "head_size": D,
        "cos_sin_cache": cache_of(3),
        "is_neox": True,
        **arguments,
    }
    before = given["query"].clone(), given["key"].clone()
    with pytest.raises(ValueError, match=message):
        rotary_embedding(**given)
    assert torch.equal(given["query"], before[0])
    assert torch.equal(given["key"], before[1])


@pytest.mark.parametrize("which", [0, 1])
def test_a_leaf_that_requires_grad_is_not_overwritten(which):
    given = [randn(6, H, D), randn(6, KV, D)]
    before = [x.clone() for x in given]
    given[which].requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        apply_rope_with_cos_sin_cache_inplace(TOKENS, *given, D, cache_of())
    assert all(torch.equal(x, kept) for x, kept in zip(given, before, strict=True))


# With a norm -------------------------------------------------------------------------------------------------------------


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("pairs", [D // 2, 3])
def test_vllms_norm_and_rotation_of_a_packed_qkv(pairs, is_neox):
    cache, weights = cache_of(pairs), (randn(D, seed=2), randn(D, seed=3))

    def definition(qkv):
        q, k, v = qkv.unflatten(-1, (-1, D)).split((H, KV, KV), 1)
        q, k = formula(TOKENS, cache, is_neox=is_neox)(*map(normed, (q, k), weights, (1e-3, 1e-3)))
        return [torch.cat((q, k, v.double()), 1).flatten(1)]

    def ours(qkv):
        fused_qk_norm_rope(qkv, H, KV, KV, D, 1e-3, *weights, cache, is_neox, TOKENS)

    assert_agree(in_place(ours), definition, randn(len(TOKENS), (H + 2 * KV) * D))


@pytest.mark.parametrize("full_width", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
def test_sglangs_norm_and_rotation(is_neox, full_width):
    cache, weights = cache_of(3), (randn(D, seed=2), randn(D, seed=3))
    given = cache
    if full_width:
        halves = cache.chunk(2, -1)
        wide = [t.repeat(1, 2) if is_neox else t.repeat_interleave(2, -1) for t in halves]
        given = torch.cat(wide, -1)

    def definition(q, k):
        return formula(TOKENS, cache, is_neox=is_neox)(*map(normed, (q, k), weights, (0.1, 0.1)))

    def ours(q, k):
        fused_inplace_qknorm_rope(
            q, k, *weights, given, TOKENS, is_neox=is_neox, eps=0.1, cache_has_full_width=full_width
        )

    assert_agree(in_place(ours), definition, randn(len(TOKENS), H, D), randn(len(TOKENS), KV, D, seed=1))


def test_what_is_not_theirs_is_refused_and_nothing_is_written():
    qkv, weight = randn(6, 5 * D), randn(D)
    before = qkv.clone()
    with pytest.raises(ValueError, match=r"qkv must be \[tokens, 8 heads \* head_dim=8\], got \[6, 40\]"):
        fused_qk_norm_rope(qkv, H, KV, KV, D, 1e-6, weight, weight, cache_of(), True, TOKENS)
    with pytest.raises(ValueError, match="head_dim must be 0 or the features of a head, 8, got 4"):
        fused_inplace_qknorm_rope(
            qkv.view(6, 5, D), qkv.view(6, 5, D), weight, weight, cache_of(), TOKENS, is_neox=True, head_dim=4
        )
    assert torch.equal(qkv, before)
