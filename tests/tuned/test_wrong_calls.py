"""Wrong calls of the public functions, and what each must say: the rule, the value that it got, and the way out.

Each part is a piece of the message; a row's parts do not overlap. Stand-ins for PyTorch's modules say what those say.
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import zeros
from torch.nn.utils.rnn import pack_sequence

import tuned
import tuned.nn
from tests.support.outcome import outcome
from tuned.compat import flash_attn, flashinfer, liger, megatron, sglang, transformer_engine, transformers, vllm
from tuned.dispatch import (
    gru,
    gru_cell,
    linear_cat,
    mla_kv_rope,
    qk_norm_rope,
    qkv_norm_rope_,
    rope,
    rope_append_,
    rope_backward,
    rope_qk,
    rope_qkv,
)

Row = tuple[Callable[[], Any], type[Exception], str, str, str]
B, S, H, K, D, ROWS = 2, 6, 4, 2, 8, 16
I, N, T = 6, 4, 5  # noqa: E741 - input size, hidden size and steps of a GRU
X, Q, KEY = torch.ones(B, S, H, D), torch.ones(B, S, H, D), torch.ones(B, S, K, D)
RADIANS = torch.outer(torch.arange(ROWS), 10_000.0 ** (-torch.arange(0, D, 2) / D))  # [rows, pairs]
COS, SIN = RADIANS.cos(), RADIANS.sin()
FREQS, CACHE, RATES = torch.cat((RADIANS, RADIANS), -1), torch.cat((COS, SIN), -1), RADIANS[1]
TABLE: dict[str, Any] = {"cos": COS, "sin": SIN}
TOKENS, BATCH, HEADS_FIRST = X[0], torch.arange(B), X.transpose(1, 2)
META = torch.device("meta")
FP8 = torch.float8_e4m3fn
W = list(torch.nn.GRU(I, N).parameters())
IN, HX, MARKS = zeros(T, B, I), zeros(1, B, N), zeros(T, B, dtype=torch.bool)
PACKED = zeros(6, I)
PACK = pack_sequence([zeros(4, I), zeros(2, I)])


OUTS = zeros(S, B, H, 23)


def autocast(call: Callable[[], Any]) -> Callable[[], Any]:
    """Runs the call under autocast to bfloat16."""

    def under() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call()

    return under


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_x(**named: Any) -> Callable[[], Any]:
    """A call of rope of X, by cos and sin unless it has angles of its own."""
    own = {"freqs", "cos", "sin", "cos_sin_cache", "inv_freq"} & set(named)
    return lambda: rope(**{"x": X, **({} if own else TABLE), **named})


def normed(**named: Any) -> Callable[[], Any]:
    """A call of qk_norm_rope of Q and KEY."""
    right = {"q": Q, "k": KEY, "q_weight": torch.ones(D), "k_weight": torch.ones(D)}
    return lambda: qk_norm_rope(**{**right, **TABLE, **named})


def latent(**named: Any) -> Callable[[], Any]:
    """A call of mla_kv_rope of heads of 12 + 4 features, and 8 that rotate."""
    right = {"kv": zeros(B, S, H, 16), "k_pe": zeros(B, S, 1, D), "k_dim": 12}
    return lambda: mla_kv_rope(**{**right, **TABLE, **named})


def of_megatron(**named: Any) -> Callable[[], Any]:
    """A call of Megatron's key and value."""
    right = {"kv": zeros(S, B, H, 16), "k_pos_emb": zeros(S, B, 1, D), "cos": FREQS, "sin": FREQS, "emb_dim": D}
    return lambda: megatron.fused_apply_mla_rope_for_kv(**{**right, "k_dim": 12, "v_dim": 4, **named})


def query_of_megatron(**named: Any) -> Callable[[], Any]:
    """A call of Megatron's query."""
    right = {"t": zeros(S, B, H, 12 + D), "cos": FREQS, "sin": FREQS, "qk_head_dim": 12, "emb_dim": D}
    return lambda: megatron.fused_apply_mla_rope_for_q(**{**right, **named})


def normed_qkv(qkv: Any, **named: Any) -> Callable[[], Any]:
    return lambda: qkv_norm_rope_(qkv, torch.ones(D), torch.ones(D), **{**TABLE, **named})


def appended(**named: Any) -> Callable[[], Any]:
    """A call of rope_append_ of packed tokens."""
    right = {"q": zeros(S, H, D), "k": zeros(S, K, D), "v": zeros(S, K, D), "slot_mapping": torch.arange(S)}
    right |= {"key_cache": zeros(3, 4, K, D), "value_cache": zeros(3, 4, K, D), "positions": torch.arange(S)}
    return lambda: rope_append_(**{**right, **TABLE, **named})


def kept(**named: Any) -> Callable[[], Any]:
    """A call of vLLM's append."""
    right = {"key": zeros(S, K, D), "value": zeros(S, K, D), "slot_mapping": torch.arange(S), "kv_cache_dtype": "auto"}
    right |= {"key_cache": zeros(3, 4, K, D), "value_cache": zeros(3, 4, K, D)}
    return lambda: vllm.reshape_and_cache_flash(
        **{**right, "k_scale": torch.ones(()), "v_scale": torch.ones(()), **named}
    )


def paged(**named: Any) -> Callable[[], Any]:
    """A call of FlashInfer's append."""
    right = {"append_key": zeros(S, K, D), "append_value": zeros(S, K, D), "batch_indices": torch.zeros(S).long()}
    right |= {"positions": torch.arange(S), "paged_kv_cache": zeros(3, 2, 4, K, D), "kv_indices": torch.arange(3)}
    right |= {"kv_indptr": ints(0, 3), "kv_last_page_len": ints(2)}
    return lambda: flashinfer.append_paged_kv_cache(**{**right, **named})


def of_vllm(**named: Any) -> Callable[[], Any]:
    """A call of vLLM's norm and rotation."""
    right = {"qkv": zeros(S, 8 * D), "num_heads_q": 4, "num_heads_k": 2, "num_heads_v": 2, "head_dim": D, "eps": 1e-6}
    right |= {"q_weight": torch.ones(D), "k_weight": torch.ones(D), "cos_sin_cache": CACHE, "is_neox": True}
    return lambda: vllm.fused_qk_norm_rope(**{**right, "position_ids": torch.arange(S), **named})


def of_sglang(**named: Any) -> Callable[[], Any]:
    """A call of SGLang's norm and rotation."""
    right = {"q": TOKENS, "k": KEY[0], "q_weight": torch.ones(D), "k_weight": torch.ones(D), "cos_sin_cache": CACHE}
    return lambda: sglang.fused_inplace_qknorm_rope(**{**right, "positions": torch.arange(S), "is_neox": True, **named})


def thd(bounds: Any, **named: Any) -> Callable[[], Any]:
    """A call of packed tokens."""
    return lambda: rope(**{"x": TOKENS, **TABLE, "tensor_format": "thd", "cu_seqlens": bounds, **named})


def by(bounds: Any, longest: Any = 3, **named: Any) -> Callable[[], Any]:
    """A GRU over packed rows."""
    return lambda: gru(PACKED, zeros(1, 3, N), W, cu_seqlens=bounds, max_seqlen=longest, **named)


def sizes(values: Any) -> Callable[[], Any]:
    return lambda: gru(PACKED, zeros(1, 3, N), W, batch_sizes=values)


def served(**named: Any) -> Callable[[], Any]:
    """A call of vLLM's function."""
    right = {"positions": torch.arange(S), "query": zeros(S, H * D), "key": zeros(S, K * D), "head_size": D}
    return lambda: vllm.rotary_embedding(**{**right, "cos_sin_cache": CACHE, "is_neox": True, **named})


def engine(**named: Any) -> Callable[[], Any]:
    """A call of TransformerEngine's function."""
    right = {"t": zeros(S, B, H, D), "freqs": FREQS[:, None, None]}
    return lambda: transformer_engine.apply_rotary_pos_emb(**{**right, **named})


def hugging(**named: Any) -> Callable[[], Any]:
    """A call of Liger's function."""
    right = {"q": zeros(B, H, S, D), "k": zeros(B, K, S, D), "cos": FREQS[None, :S], "sin": FREQS[None, :S]}
    return lambda: liger.liger_rotary_pos_emb(**{**right, **named})


def flash(**named: Any) -> Callable[[], Any]:
    return lambda: flash_attn.apply_rotary_emb(**{"x": X, **TABLE, **named})


def flash_qkv(qkv: Any, **named: Any) -> Callable[[], Any]:
    return lambda: flash_attn.apply_rotary_emb_qkv_(qkv, COS, SIN, **named)


def module(*args: Any, **named: Any) -> Callable[[], Any]:
    return lambda: tuned.nn.GRU(I, N)(*args, **named)


def cell(*args: Any, **named: Any) -> Callable[[], Any]:
    return lambda: tuned.nn.GRUCell(I, N)(*args, **named)


LENGTHS = "if these are lengths, pass where sequences start"
AS_TENSOR = "convert it with torch.as_tensor("
TO_32 = "convert with .to(torch.int32)"
MOVE = "move it with .to()"
PAIR, FEATURE = 'pass angle_entries="pair"', 'pass angle_entries="feature"'

# fmt: off
OF_X: dict[str, Row] = {
    "x list": (on_x(x=[1.0]), TypeError, "x must be a tensor", "got list", AS_TENSOR),
    "x one sequence": (on_x(x=X[0]), ValueError, "x must be [b, s, h, d]", "got [6, 4, 8]", "for one sequence x[None]"),
    "x of a batch as thd": (on_x(x=X, tensor_format="thd"), ValueError, "x must be [t, h, d]", "got [2, 6, 4, 8]", 'for a batch pass tensor_format="bshd"'),
    "x packed qkv": (on_x(x=zeros(B, S, 3, H, D)), ValueError, "x must be [b, s, h, d]", "got [2, 6, 3, 4, 8]", "call rope_qkv"),
    "x flat": (on_x(x=zeros(S, H * D)), ValueError, "x must be [b, s, h, d]", "got [6, 32]", "reshape it"),
    "x integers": (on_x(x=X.long()), TypeError, "x must be floating point", "got torch.int64", "convert with .to("),
    "x fp8": (on_x(x=X.to(FP8)), TypeError, "at least 16 bits", "got torch.float8_e4m3fn", "convert with .to(torch.bfloat16)"),
    "x fp8 in place": (on_x(x=X.to(FP8), inplace=True), TypeError, "at least 16 bits", "got torch.float8_e4m3fn", "convert with .to(torch.bfloat16)"),
    "x complex": (on_x(x=X.to(torch.complex64)), TypeError, "x must be floating point", "got torch.complex64", "torch.view_as_real(x).flatten(-2) with interleaved=True"),
    "x leaf in place": (lambda: rope(zeros(B, S, H, D, requires_grad=True), **TABLE, inplace=True), RuntimeError, "overwriting it would lose", "of shape [2, 6, 4, 8], is a leaf that requires grad", "use inplace=False"),
    "x expanded in place": (on_x(x=X[:1].expand(B, S, H, D), inplace=True), ValueError, "cannot be overwritten", "share memory (stride 0)", "use inplace=False"),
    "layout": (on_x(tensor_format="hsbd"), ValueError, "tensor_format must be one of", "got 'hsbd'", "name the axes of x in their order"),
    "layout in capitals": (on_x(tensor_format="BSHD"), ValueError, "tensor_format must be one of", "got 'BSHD'", "name the axes of x"),
    "interleaved in words": (on_x(interleaved="half"), TypeError, "interleaved must be a bool", "got 'half'", "pass True or False"),
    "interleaved tensor": (on_x(interleaved=torch.tensor(True)), TypeError, "interleaved must be a bool", "got a tensor", "convert it with bool("),
    "inplace in words": (on_x(inplace="no"), TypeError, "inplace must be a bool", "got 'no'", "pass True or False"),
    "conjugate list": (on_x(conjugate=[False]), TypeError, "conjugate must be a bool", "got [False]", "pass True or False"),
    "rotated": (on_x(rotated="middle"), ValueError, "rotated must be one of", "got 'middle'", "name where in a head"),
    "proportional pairs": (on_x(rotated="proportional", interleaved=True), ValueError, "interleaved must be False", "got True", "leave it out"),
    "q list": (lambda: rope_qk([1.0], KEY, **TABLE), TypeError, "q must be a tensor", "got list", AS_TENSOR),
    "q axes": (lambda: rope_qk(Q[0], KEY[0], **TABLE), ValueError, "q must be [b, s, h, d]", "got [6, 4, 8]", 'pass tensor_format="thd"'),
    "k list": (lambda: rope_qk(Q, [1.0], **TABLE), TypeError, "k must be a tensor", "got list", AS_TENSOR),
    "k other tokens": (lambda: rope_qk(Q, KEY[:, :4], **TABLE), ValueError, "k must have the tokens and the head_dim of q, [2, 6] and 8", "got [2, 4, 2, 8]", "each by rope"),
    "k other head_dim": (lambda: rope_qk(Q, KEY[..., :4], **TABLE), ValueError, "k must have the tokens and the head_dim of q", "got [2, 6, 2, 4]", "each by rope"),
    "q and k heads first": (lambda: rope_qk(HEADS_FIRST, KEY.transpose(1, 2), **TABLE), ValueError, "k must have the tokens", "got [2, 2, 6, 8]", "pass q.transpose(1, 2) and k.transpose(1, 2)"),
    "k dtype": (lambda: rope_qk(Q, KEY.half(), **TABLE), ValueError, "k must be torch.float32 on cpu, as q is", "got torch.float16", "convert with k.to(q)"),
    "k device": (lambda: rope_qk(Q, KEY.to(META), **TABLE), ValueError, "k must be torch.float32 on cpu", "on meta", "convert with k.to(q)"),
    "q twice in place": (lambda: rope_qk(Q, Q, **TABLE, inplace=True), ValueError, "both would be overwritten", "q and k share memory", "use inplace=False"),
    "qkv list": (lambda: rope_qkv([1.0], **TABLE), TypeError, "qkv must be a tensor", "got list", AS_TENSOR),
    "qkv without its axis": (lambda: rope_qkv(X, **TABLE), ValueError, "qkv must be [b, s, 3, h, d]", "got [2, 6, 4, 8]", "or pass kv_heads for"),
    "qkv of too many kv_heads": (lambda: rope_qkv(X, **TABLE, kv_heads=2), ValueError, "more than 2 * kv_heads heads", "got [2, 6, 4, 8] with kv_heads=2", "pass the number of heads that k has"),
    "qkv no kv_heads": (lambda: rope_qkv(X, **TABLE, kv_heads=0), ValueError, "kv_heads must be at least 1", "got kv_heads=0", "pass None for a qkv with an axis of 3"),
    "qkv kv_heads float": (lambda: rope_qkv(X, **TABLE, kv_heads=1.0), TypeError, "kv_heads must be an int", "got float 1.0", "convert it with int("),
    "qkv apart in place": (lambda: rope_qkv(zeros(B, S, H, 3, D).transpose(2, 3), **TABLE, inplace=True), ValueError, "must be contiguous to be rotated in place", "got strides [576, 96, 8, 24, 1]", "make qkv contiguous, or use rope_qk"),
    "grad_output list": (lambda: rope_backward([1.0], FREQS), TypeError, "grad_output must be a tensor", "got list", AS_TENSOR),
    "grad_output axes": (lambda: rope_backward(X[0], FREQS), ValueError, "grad_output must be [b, s, h, d]", "got [6, 4, 8]", "for one sequence x[None]"),
    "grad_output of more tokens": (lambda: rope_backward(X, FREQS[:3]), ValueError, "the angles are too short", "3 positions for a sequence of 6", "make them at least as long"),
}
OF_ANGLES: dict[str, Row] = {
    "none": (lambda: rope(X), ValueError, "give the angles", "got none of them", "freqs in radians, both cos and sin"),
    "cos and sin by position": (lambda: rope(X, COS, SIN), ValueError, "give one source of angles", "got freqs and cos and sin", "name them, as cos=..., sin=..."),
    "freqs and a cache": (lambda: rope(X, FREQS, cos_sin_cache=CACHE), ValueError, "give one source of angles", "got freqs and cos_sin_cache", "leave out all but one"),
    "cos alone": (lambda: rope(X, cos=COS), ValueError, "give both cos and sin", "got cos alone", "pass the other too"),
    "sin alone": (lambda: rope_qk(Q, KEY, sin=SIN), ValueError, "give both cos and sin", "got sin alone", "pass the other too"),
    "complex freqs": (lambda: rope(X, torch.polar(COS, SIN)), TypeError, "freqs must be real", "got torch.complex64", "pass it as freqs_cis=, with interleaved=True"),
    "complex cos": (lambda: rope(X, cos=torch.polar(COS, SIN), sin=SIN), TypeError, "cos must be real", "got torch.complex64", "pass cos=cos.real"),
    "freqs integers": (lambda: rope(X, FREQS.int()), TypeError, "freqs must be float16", "got torch.int32", "convert with .float()"),
    "freqs in 16 bits": (lambda: rope(X, FREQS.bfloat16()), TypeError, "freqs must be float32", "got torch.bfloat16", "or pass cos and sin"),
    "freqs in 64 bits": (lambda: rope(X, FREQS.double()), TypeError, "freqs must be float32", "got torch.float64", "convert with .float()"),
    "freqs number": (lambda: rope(X, 10_000.0), TypeError, "freqs must be a tensor", "got float", AS_TENSOR),
    "freqs device": (lambda: rope(X, FREQS.to(META)), ValueError, "freqs must be on the device of x, cpu", "got meta", MOVE),
    "freqs are the key": (lambda: rope(Q, KEY), ValueError, "freqs must be [rows, entries]", "got [2, 6, 2, 8]", "give one row per position"),
    "freqs of one batch": (lambda: rope(X, FREQS[None]), ValueError, "freqs must be [rows, entries]", "got [1, 16, 8]", "pass freqs.squeeze(0)"),
    "freqs vector": (lambda: rope(X, RATES), ValueError, "freqs must be [rows, entries]", "got [4]", "give one row per position"),
    "freqs per pair": (on_x(freqs=RADIANS, rotary_dim=D), ValueError, "rotary_dim=8 does not fit", "4 entries, one per feature", PAIR),
    "freqs too wide": (on_x(freqs=zeros(ROWS, 16)), ValueError, "even and in (0, head_dim=8]", "angles with 16 entries", "give angles of as many features as rotate"),
    "freqs odd": (on_x(freqs=zeros(ROWS, 3)), ValueError, "rotary_dim must be even", "angles with 3 entries", PAIR),
    "cos fp8": (lambda: rope(X, cos=COS.to(FP8), sin=SIN.to(FP8)), TypeError, "cos must be float16", "got torch.float8_e4m3fn", "convert with .float()"),
    "cos of one batch": (lambda: rope(X, cos=FREQS[None], sin=FREQS[None], angle_entries="feature"), ValueError, "must have the batch of x, 2", "got [1, 16, 8]", "pass cos[0] and sin[0], which the batch shares"),
    "cos of another batch": (lambda: rope(X, cos=zeros(3, ROWS, 4), sin=zeros(3, ROWS, 4)), ValueError, "must have the batch of x, 2", "got [3, 16, 4]", "give one table per batch entry"),
    "cos with heads": (lambda: rope(X, cos=zeros(B, 1, S, 4), sin=zeros(B, 1, S, 4)), ValueError, "cos must be [rows, entries], [batch, rows, entries]", "got [2, 1, 6, 4]", "pass cos.squeeze(1)"),
    "cos of a batch, packed": (thd(ints(0, 6), cos=zeros(B, ROWS, 4), sin=zeros(B, ROWS, 4)), ValueError, "must have the batch of x", "got [2, 16, 4]", "give [rows, entries] and positions"),
    "cos unlike sin": (lambda: rope(X, cos=COS, sin=SIN[:5]), ValueError, "the same shape and dtype", "[5, 4] torch.float32", "take both from the same angles"),
    "cos repeated": (lambda: rope(X, cos=FREQS, sin=FREQS), ValueError, "rotary_dim must be even and in (0, head_dim=8]", "angles with 8 entries, one per pair", FEATURE),
    "cos list": (lambda: rope(X, cos=[1.0], sin=SIN), TypeError, "cos must be a tensor", "got list", AS_TENSOR),
    "angle_entries": (on_x(angle_entries="half"), ValueError, "angle_entries must be", "got 'half'", '"pair" (one per pair'),
    "rotary_dim": (on_x(rotary_dim=6), ValueError, "rotary_dim=6 does not fit", "angles with 4 entries", "leave rotary_dim out"),
    "rotary_dim float": (on_x(rotary_dim=8.0), TypeError, "rotary_dim must be an int", "got float 8.0", "convert it with int("),
    "cache odd": (on_x(cos_sin_cache=CACHE[:, :7]), ValueError, "an even number of entries", "got 7", "torch.cat((cos, sin), -1)"),
    "cache of cosines": (on_x(cos_sin_cache=torch.cat((COS, COS), -1)), ValueError, "then their sines", "got rows whose halves are equal", "pass cos=cos, sin=sin"),
    "cache of cosines per pair": (on_x(cos_sin_cache=COS), ValueError, "cos_sin_cache must hold the cosines", "([16, 4])", "torch.cat((cos, sin), -1)"),
    "cache of sines": (on_x(cos_sin_cache=torch.cat((SIN, SIN), -1)), ValueError, "then their sines", "got rows whose halves are equal", "pass cos=cos, sin=sin"),
    "cache of later cosines": (on_x(cos_sin_cache=torch.cat((COS, COS), -1)[3:]), ValueError, "then their sines", "([13, 8])", "pass cos=cos, sin=sin"),
    "cache of a batch": (on_x(cos_sin_cache=CACHE[None]), ValueError, "cos_sin_cache must be [rows, entries]", "got [1, 16, 8]", "pass cos_sin_cache.squeeze(0)"),
    "cache tuple": (on_x(cos_sin_cache=(COS, SIN)), TypeError, "cos_sin_cache must be a tensor", "got tuple", AS_TENSOR),
    "rates table": (on_x(inv_freq=RADIANS), ValueError, "inv_freq must be a tensor of [pairs]", "got [16, 4]", "base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)"),
    "rates number": (on_x(inv_freq=10_000.0), ValueError, "inv_freq must be a tensor of [pairs]", "got float", "make it with"),
    "rates in 64 bits": (on_x(inv_freq=RATES.double()), TypeError, "inv_freq must be float32", "got torch.float64", "convert with .float()"),
    "rates per feature": (on_x(inv_freq=torch.cat((RATES, RATES))), ValueError, "in (0, head_dim=8]", "angles with 8 entries, one per pair", FEATURE),
    "scaled cos": (on_x(attention_scaling=1.5), ValueError, "attention_scaling must be 1.0 unless freqs or inv_freq", "got 1.5", "multiply cos and sin by it"),
    "scaling tensor": (on_x(freqs=FREQS, attention_scaling=torch.tensor(2.0)), TypeError, "attention_scaling must be a number", "got a tensor", "convert it with float("),
    "scaling in words": (on_x(freqs=FREQS, attention_scaling="yarn"), TypeError, "attention_scaling must be a number", "got 'yarn'", "leave it out for 1.0"),
    "scaling none": (on_x(freqs=FREQS, attention_scaling=None), TypeError, "attention_scaling must be a number", "got None", "leave it out for 1.0"),
}
OF_POSITIONS: dict[str, Row] = {
    "too short": (on_x(cos=COS[:5], sin=SIN[:5]), ValueError, "the angles are too short", "5 positions for a sequence of 6", "make them at least as long"),
    "too short, heads first": (lambda: rope(zeros(B, 8, S, D), cos=COS[:S], sin=SIN[:S]), ValueError, "the angles are too short", "6 positions for a sequence of 8", "if x is [b, h, s, d], pass x.transpose(1, 2)"),
    "too short from an offset": (on_x(offset=11), ValueError, "the angles are too short", "16 positions for a sequence of 6 from position 11 on", "make them at least as long"),
    "offset below 0": (on_x(offset=-1), ValueError, "offset must be at least 0 with a table", "got -1", "need inv_freq"),
    "offset float": (on_x(offset=1.0), TypeError, "offset must be an int", "got float 1.0", "convert it with int("),
    "offset flag": (on_x(offset=True), TypeError, "offset must be an int", "got bool True", "convert it with int("),
    "offset huge": (on_x(inv_freq=RATES, offset=2**31), ValueError, "offset must be from -2147483584", "got 2147483648", "subtract the same number from those of q and k"),
    "offset tensor of floats": (on_x(offset=torch.tensor(1.0)), TypeError, "offset must be int32 or int64", "got torch.float32", TO_32),
    "offset device": (on_x(offset=torch.tensor(1, device=META)), ValueError, "offset must be on the device of x, cpu", "got meta", MOVE),
    "starts of another batch": (on_x(offset=ints(0, 0, 0)), ValueError, "a tensor of [2], one entry per sequence", "got [3]", "for positions of each token pass positions"),
    "starts past": (on_x(offset=torch.tensor([0, 11])), ValueError, "offset plus the index of each token must be in [0, 16)", "got 0 to 16", "make the angles longer"),
    "starts below": (on_x(offset=torch.tensor(-1)), ValueError, "offset plus the index of each token must be in [0, 16)", "got -1 to 4", "or pass inv_freq"),
    "positions list": (on_x(positions=[0] * S), TypeError, "positions must be a tensor of int32 or int64", "got list", "convert with torch.tensor("),
    "positions floats": (on_x(positions=zeros(S)), TypeError, "positions must be int32 or int64", "got torch.float32", TO_32),
    "positions device": (on_x(positions=torch.arange(S, device=META)), ValueError, "positions must be on the device of x, cpu", "got meta", MOVE),
    "positions of one batch": (on_x(positions=torch.arange(S)[None]), ValueError, "positions must be [2, 6], as the tokens", "got [1, 6]", "pass positions[0], which all share"),
    "positions transposed": (on_x(positions=zeros(S, B).long()), ValueError, "or [6], shared by the batch", "got [6, 2]", "give one position per token, in the order of x"),
    "positions past": (on_x(positions=torch.arange(S) + 15), ValueError, "positions must be in [0, 16), the rows of the angles", "got 15 to 20", "make the angles longer"),
    "positions below": (on_x(positions=torch.arange(S) - 1), ValueError, "positions must be in [0, 16)", "got -1 to 4", "or pass inv_freq"),
    "positions and an offset": (on_x(positions=torch.arange(S), offset=3), ValueError, "give positions or an offset, not both", "an offset of 3", "add the offset to the positions"),
    "positions and starts": (on_x(positions=torch.arange(S), offset=BATCH), ValueError, "give positions or an offset, not both", "an offset of [2]", "add the offset to the positions"),
    "positions and ranks": (on_x(positions=torch.arange(S), cp_size=2), ValueError, "positions cannot be combined with", "got cp_size too", "leave those out"),
    "positions and bounds": (thd(ints(0, 6), positions=torch.arange(S)), ValueError, "positions cannot be combined with", "got cu_seqlens too", "leave those out"),
    "rank past": (on_x(cp_size=2, cp_rank=2), ValueError, "cp_rank must be from 0 to cp_size - 1", "got cp_rank=2, cp_size=2", "pass the rank in, and the size of, the group"),
    "no ranks": (on_x(cp_size=0), ValueError, "cp_rank must be from 0 to cp_size - 1", "got cp_rank=0, cp_size=0", "leave both out"),
    "rank of another type": (on_x(cp_size=2.0), TypeError, "cp_size must be an int", "got float 2.0", "convert it with int("),
    "ranks of odd sequences": (on_x(x=X[:, :5], cp_size=2), ValueError, "seq must be even with cp_size=2", "got 5", "pad sequences to a multiple of 4"),
    "ranks past the table": (on_x(cp_size=3), ValueError, "the angles are too short", "a sequence of 6 on each of 3 ranks", "make them at least as long"),
    "no bounds": (thd(None), ValueError, '"thd" needs cu_seqlens', "got NoneType", "for one sequence pass torch.tensor([0, tokens]"),
    "bounds list": (thd([0, 6]), ValueError, "needs cu_seqlens, a tensor", "got list", "for one sequence pass torch.tensor([0, tokens]"),
    "bounds in 64 bits": (thd(torch.tensor([0, 6])), TypeError, "cu_seqlens must be int32", "got torch.int64", TO_32),
    "bounds device": (thd(ints(0, 6).to(META)), ValueError, "cu_seqlens must be on the device of x, cpu", "got meta", MOVE),
    "bounds of a batch": (on_x(cu_seqlens=ints(0, 6)), ValueError, 'are for tensor_format "thd"', "got 'bshd'", "or pass packed tokens [t, h, d]"),
    "bounds decrease": (thd(ints(0, 4, 3, 6)), ValueError, "cu_seqlens must not decrease", "got 4 and then 3 at index 2", LENGTHS),
    "bounds past the end": (thd(ints(0, 4, 9)), ValueError, "cu_seqlens must be from 0 to the 6 tokens of x", "got 0 to 9", LENGTHS),
    "bounds below 0": (thd(ints(-1, 6)), ValueError, "cu_seqlens must be from 0 to the 6 tokens of x", "got -1 to 6", LENGTHS),
    "bounds are falling lengths": (thd(ints(3, 2, 1)), ValueError, "cu_seqlens must not decrease", "got 3 and then 2 at index 1", LENGTHS),
    "bounds of ranks past the end": (thd(ints(0, 4, 16), cp_size=2), ValueError, "to the 12 tokens of x, 6 on each of 2 ranks", "got 0 to 16", LENGTHS),
    "bounds of uneven chunks": (thd(ints(0, 6, 12), cp_size=2), ValueError, "divisible by 2 * cp_size = 4", "got a length of 6", "pad each sequence"),
    "bounds of two axes": (thd(ints(0, 6)[None]), ValueError, "needs cu_seqlens, a tensor of [sequences + 1]", "got [1, 2]", "for one sequence pass torch.tensor([0, tokens]"),
    "length past": (thd(ints(0, 6), max_seqlen=17), ValueError, "the angles are too short", "16 positions for sequences of up to max_seqlen=17", "make them at least as long"),
    "sequence past": (thd(ints(0, 2, 6), cos=COS[:3], sin=SIN[:3]), ValueError, "the angles are too short", "3 positions for a sequence of 4, cu_seqlens 2 to 6", "make them at least as long, or pass inv_freq"),
    "sequence past from an offset": (thd(ints(0, 2, 6), offset=13), ValueError, "the angles are too short", "16 positions for a sequence of 4 from position 13 on", "or pass inv_freq"),
    "sequence past from a start": (thd(ints(0, 2, 6), offset=ints(15, 12)), ValueError, "the angles are too short", "16 positions for a sequence of 2 from position 15 on, cu_seqlens 0 to 2", "or pass inv_freq"),
    "sequence past from one start": (thd(ints(0, 2, 6), offset=torch.tensor(13)), ValueError, "the angles are too short", "16 positions for a sequence of 4 from position 13 on", "or pass inv_freq"),
    "sequence before the table": (thd(ints(0, 2, 6), offset=ints(0, -1)), ValueError, "offset must be at least 0", "got -1 for cu_seqlens 2 to 6", "need inv_freq"),
    "sequence of ranks past": (thd(ints(0, 4, 12), cp_size=2, offset=9), ValueError, "the angles are too short", "16 positions for a sequence of 8 from position 9 on", "or pass inv_freq"),
    "length below 0": (thd(ints(0, 6), max_seqlen=-1), ValueError, "max_seqlen must be at least 0", "got -1", "or leave it out"),
    "length tensor": (thd(ints(0, 6), max_seqlen=torch.tensor(6.0)), TypeError, "max_seqlen must be an int", "got a tensor of [] torch.float32", "convert it with int("),
    "length of a batch": (on_x(max_seqlen=6), ValueError, 'are for tensor_format "thd"', "got 'bshd'", "leave them out"),
}
OF_NORMS: dict[str, Row] = {
    "norm": (normed(norm="token"), ValueError, 'norm must be "head" or "all"', "got 'token'", "name what is normalised together"),
    "norm empty": (normed(norm=""), ValueError, 'norm must be "head" or "all"', "got ''", "name what is normalised together"),
    "norm None": (normed(norm=None), ValueError, 'norm must be "head" or "all"', "got None", "name what is normalised together"),
    "norm empty without weights": (normed(norm="", q_weight=None, k_weight=None), ValueError, 'norm must be "head" or "all"', "got ''", "name what is normalised together"),
    "norm empty of a packed qkv": (normed_qkv(zeros(B, S, 3, H, D), norm=""), ValueError, 'norm must be "head" or "all"', "got ''", "name what is normalised together"),
    "zero_centered in words": (normed(zero_centered="False"), TypeError, "zero_centered must be a bool", "got 'False'", "pass True or False"),
    "zero_centered tensor": (normed(zero_centered=torch.tensor(True)), TypeError, "zero_centered must be a bool", "got a tensor", "convert it with bool("),
    "zero_centered of a packed qkv": (normed_qkv(zeros(B, S, 3, H, D), zero_centered="False"), TypeError, "zero_centered must be a bool", "got 'False'", "pass True or False"),
    "zero_centered beside a cache": (appended(zero_centered="False", q_weight=torch.ones(D), k_weight=torch.ones(D)), TypeError, "zero_centered must be a bool", "got 'False'", "pass True or False"),
    "deinterleave tensor": (on_x(deinterleave=torch.ones(2)), TypeError, "deinterleave must be a bool", "got a tensor", "convert it with bool("),
    "rounding": (normed(rounding="bf16"), ValueError, 'rounding must be "once"', "got 'bf16'", "leave it out for the most precise"),
    "eps": (normed(eps=-1e-6), ValueError, "eps must be a number of at least 0", "got -1e-06", "give the norm's own"),
    "eps nan": (normed(eps=float("nan")), ValueError, "eps must be a number of at least 0", "got nan", "give the norm's own"),
    "eps word": (normed(eps="1e-6"), ValueError, "eps must be a number of at least 0", "got '1e-6'", "give the norm's own"),
    "eps bool": (normed(eps=True), ValueError, "eps must be a number of at least 0", "got True", "give the norm's own"),
    "eps tensor": (normed(eps=torch.tensor(1e-6)), ValueError, "eps must be a number of at least 0", "got tensor(", "give the norm's own"),
    "q_weight list": (normed(q_weight=[1.0]), TypeError, "q_weight must be a tensor", "got list", "or torch.ones(8)"),
    "q_weight module": (normed(q_weight=torch.nn.RMSNorm(D)), TypeError, "q_weight must be a tensor", "got RMSNorm", "give the norm's weight"),
    "q_weight of all heads": (normed(q_weight=torch.ones(H * D)), ValueError, "q_weight must be [8] (head_dim, of each head)", "got [32]", 'pass norm="all"'),
    "k_weight of each head": (normed(norm="all", q_weight=torch.ones(H * D)), ValueError, "k_weight must be [16] (heads * head_dim, of all heads)", "got [8]", 'pass norm="head"'),
    "k_weight integers": (normed(k_weight=torch.ones(D).long()), ValueError, "k_weight must be floating point", "got torch.int64", MOVE),
    "k_weight elsewhere": (normed(k_weight=torch.ones(D, device=META)), ValueError, "on the device of q", "on meta", MOVE),
    "no k": (normed(k=None), ValueError, "k and k_weight must come together", "got k_weight without k", "give both, or leave both out"),
    "no k_weight": (normed(k_weight=None), ValueError, "k and k_weight must come together", "got k without k_weight", "give both, or leave both out"),
    "norm leaf in place": (normed(q=zeros(B, S, H, D, requires_grad=True), inplace=True), RuntimeError, "overwriting it would lose", "of shape [2, 6, 4, 8], is a leaf", "use inplace=False"),
    "packed list": (normed_qkv([1.0]), TypeError, "qkv must be a tensor", "got list", AS_TENSOR),
    "packed without kv_heads": (normed_qkv(X), ValueError, "qkv must be [b, s, 3, h, d]", "got [2, 6, 4, 8]", "or pass kv_heads"),
    "packed too few heads": (normed_qkv(X, kv_heads=2), ValueError, "more than 2 * kv_heads heads", "got [2, 6, 4, 8]", "pass the number of heads that k has"),
    "vllm qkv width": (of_vllm(num_heads_v=1), ValueError, "qkv must be [tokens, 7 heads * head_dim=8]", "got [6, 64]", "how many heads each has"),
    "vllm qkv list": (of_vllm(qkv=[1.0]), TypeError, "qkv must be a tensor", "got list", AS_TENSOR),
    "vllm heads below 0": (of_vllm(num_heads_q=-1, num_heads_v=7), ValueError, "head_dim must be at least 0", "got -1, 2, 7 and 8", "give the heads of query, key and value"),
    "vllm heads float": (of_vllm(num_heads_q=4.0), TypeError, "num_heads_q must be an int", "got float 4.0", "convert it with int("),
    "vllm style of a norm in words": (of_vllm(is_neox="yes"), TypeError, "is_neox must be a bool", "got 'yes'", "False for adjacent pairs"),
    "sglang style in words": (of_sglang(is_neox="yes"), TypeError, "is_neox must be a bool", "got 'yes'", "False for adjacent pairs"),
    "sglang rounding in words": (of_sglang(round_norm_before_rope="no"), TypeError, "round_norm_before_rope must be a bool", "got 'no'", "pass True or False"),
    "sglang width tensor": (of_sglang(cache_has_full_width=torch.tensor(False)), TypeError, "cache_has_full_width must be a bool", "got a tensor", "convert it with bool("),
    "sglang head_dim": (lambda: sglang.fused_inplace_qknorm_rope(TOKENS, KEY[0], torch.ones(D), torch.ones(D), CACHE, torch.arange(S), is_neox=True, head_dim=4), ValueError, "head_dim must be 0 or the features of a head, 8", "got 4", "give q as [tokens, heads, head_dim]"),
    "sglang q list": (lambda: sglang.fused_inplace_qknorm_rope([1.0], KEY[0], torch.ones(D), torch.ones(D), CACHE, torch.arange(S), is_neox=True), TypeError, "q must be a tensor", "got list", AS_TENSOR),
    "sections sum": (on_x(sections=(2, 1), positions=zeros(2, S).long()), ValueError, "add up to rotary_dim / 2, 4", "got (2, 1)", "pass the model's mrope_section"),
    "sections of one": (on_x(sections=[4], positions=zeros(1, S).long()), ValueError, "2 to 4 numbers of pairs", "got (4,)", "how many pairs each axis has"),
    "sections in one number": (on_x(sections=4, positions=zeros(1, S).long()), TypeError, "sections must be a sequence of numbers of pairs", "got int 4", "how many pairs each axis has"),
    "sections in one number beside norms": (normed(sections=4, positions=zeros(1, S).long()), TypeError, "sections must be a sequence of numbers of pairs", "got int 4", "how many pairs each axis has"),
    "sections in one number beside a cache": (appended(sections=torch.tensor(4)), TypeError, "sections must be a sequence of numbers of pairs", "got Tensor tensor(4)", "how many pairs each axis has"),
    "sections alone": (on_x(sections=(2, 2)), ValueError, "sections need positions, one row for each of 2 axes", "got none", "leave sections out"),
    "sections with a row of positions": (on_x(sections=(2, 2), positions=torch.arange(S)), ValueError, "positions must be [2, tokens]", "got [6]", "one row for each of the 2 sections"),
    "sections in turn of two": (on_x(sections=(2, 2), interleaved_sections=True, positions=zeros(2, S).long()), ValueError, "interleaved sections must be 3", "got (2, 2)", "leave interleaved_sections out"),
    "in turn without sections": (on_x(interleaved_sections=True), ValueError, "interleaved_sections say how sections lie", "got True without sections", "pass them too"),
    "freqs_cis real": (lambda: rope(X, freqs_cis=RADIANS), TypeError, "freqs_cis must be a complex tensor", "got torch.float32", "pass radians as freqs"),
    "freqs_cis list": (lambda: rope(X, freqs_cis=[1j]), TypeError, "freqs_cis must be a complex tensor", "got list", "cosines and sines as cos and sin"),
    "freqs_cis and cos": (on_x(freqs_cis=torch.polar(COS, SIN), cos=COS, sin=SIN), ValueError, "give one source of angles", "got cos and sin and freqs_cis", "leave out all but one"),
    "bhsd qkv": (lambda: rope_qkv(X, **TABLE, kv_heads=1, tensor_format="bhsd"), ValueError, "must be one of bshd, sbhd and thd", "got 'bhsd'", "to rope_qk"),
    "bhsd axes": (on_x(x=TOKENS, tensor_format="bhsd"), ValueError, "x must be [b, h, s, d]", "got [6, 4, 8]", "for one sequence x[None]"),
}
OF_LATENT: dict[str, Row] = {
    "kv list": (latent(kv=[1.0]), TypeError, "kv must be a tensor", "got list", AS_TENSOR),
    "k_pe list": (latent(k_pe=[1.0]), TypeError, "k_pe must be a tensor", "got list", AS_TENSOR),
    "kv axes": (latent(kv=zeros(S, H, 16)), ValueError, "kv must be [b, s, h, d]", "got [6, 4, 16]", "pass tensor_format"),
    "k_pe without heads": (latent(k_pe=zeros(B, S, D)), ValueError, "k_pe must be [b, s, h, d]", "got [2, 6, 8]", "pass tensor_format"),
    "k_pe of all heads": (latent(k_pe=zeros(B, S, H, D)), ValueError, "k_pe must have the tokens of kv and one head, [2, 6, 1]", "got [2, 6, 4, 8]", "k_pe.unsqueeze(-2)"),
    "k_pe of other tokens": (latent(k_pe=zeros(B, S + 1, 1, D)), ValueError, "k_pe must have the tokens of kv and one head", "got [2, 7, 1, 8]", "pass that of the same tokens"),
    "k_pe half": (latent(k_pe=zeros(B, S, 1, D).half()), ValueError, "k_pe must be torch.float32", "got torch.float16", "convert with k_pe.to(kv)"),
    "kv integers": (latent(kv=zeros(B, S, H, 16).long()), TypeError, "kv must be floating point", "got torch.int64", "convert with .to(torch.bfloat16)"),
    "k_dim of all": (latent(k_dim=16), ValueError, "kv must be [b, s, h, k_dim + v_dim]", "got [2, 6, 4, 16] with k_dim=16", "the others are the value's"),
    "k_dim 0": (latent(k_dim=0), ValueError, "k_dim must be from 1", "got 0", "pass how many are the key's"),
    "k_dim float": (latent(k_dim=12.0), TypeError, "k_dim must be an int", "got float 12.0", "convert it with int("),
    "angles of half of k_pe": (latent(k_pe=zeros(B, S, 1, 2 * D)), ValueError, "the angles must rotate all features of k_pe, 16", "got those of 8", "by angle_entries"),
    "bhsd": (latent(tensor_format="bhsd"), ValueError, "tensor_format of kv must be one of", "got 'bhsd'", "pass kv.transpose(1, 2)"),
    "apart and interleaved": (latent(deinterleave=True, interleaved=True), ValueError, "deinterleave reads pairs (2 j, 2 j + 1)", "got interleaved=True", "leave that out"),
    "apart and proportional": (on_x(deinterleave=True, rotated="proportional"), ValueError, "deinterleave reads pairs", 'got rotated="proportional"', "or deinterleave"),
    "apart word": (on_x(deinterleave="no"), TypeError, "deinterleave must be a bool", "got 'no'", "pass True or False"),
    "table too short": (latent(kv=zeros(B, ROWS + 1, H, 16), k_pe=zeros(B, ROWS + 1, 1, D)), ValueError, "the angles are too short", "a sequence of 17", "make them at least as long"),
    "megatron interleaved": (of_megatron(rotary_interleaved=True), ValueError, "rotary_interleaved must be False", "got True", "call tuned.dispatch.rope"),
    "megatron query interleaved": (query_of_megatron(rotary_interleaved=True), ValueError, "rotary_interleaved must be False", "got True", "with interleaved=True"),
    "megatron kv width": (of_megatron(v_dim=5), ValueError, "k_dim + v_dim must be the features of a head of kv, 16", "got 12 + 5", "pass those of the model"),
    "megatron k_pos_emb width": (of_megatron(emb_dim=4), ValueError, "emb_dim must be the features of a head of k_pos_emb, 8", "got 4", "pass those of the model"),
    "megatron query width": (query_of_megatron(qk_head_dim=8), ValueError, "qk_head_dim + emb_dim must be the features of a head of t, 20", "got 8 + 8", "pass how many do not rotate"),
    "megatron kv list": (of_megatron(kv=[1.0]), TypeError, "kv must be a tensor", "got list", AS_TENSOR),
    "megatron query list": (query_of_megatron(t=[1.0]), TypeError, "t must be a tensor", "got list", AS_TENSOR),
    "megatron one buffer": (of_megatron(out_key=zeros(S, B, H, 20)), ValueError, "must come together", "got out_key without out_value", "give both, or leave both out"),
    "megatron buffer shape": (of_megatron(out_key=zeros(S, B, H, 20), out_value=zeros(S, B, H, 5)), ValueError, "out_value must be [6, 2, 4, 4]", "got [6, 2, 4, 5]", "pass out_value=None"),
    "megatron leaf": (query_of_megatron(t=zeros(S, B, H, 20, requires_grad=True)), RuntimeError, "overwriting it would lose", "of shape [6, 2, 4, 20], is a leaf", "use inplace=False"),
}
CACHES8 = {"key_cache": zeros(3, 4, K, D).to(FP8), "value_cache": zeros(3, 4, K, D).to(FP8)}
ROWS_OF_6, PAGES_OF_4 = zeros(S, 6, D), zeros(4, 4, K, D)
OF_CACHES: dict[str, Row] = {
    "cache layout": (appended(cache_layout="NCHW"), ValueError, 'cache_layout must be "NHD"', "got 'NCHW'", "name the axes of a page"),
    "cache key flag": (appended(key_inplace="yes"), TypeError, "key_inplace must be a bool", "got 'yes'", "pass True or False"),
    "cache k None": (appended(k=None), TypeError, "k must be a tensor", "got NoneType", "a call without a key is one of rope"),
    "cache v list": (appended(v=[1.0]), TypeError, "v must be a tensor", "got list", AS_TENSOR),
    "cache v wide": (appended(v=zeros(S, K, 2 * D)), ValueError, "v must be as k, [6, 2, 8]", "got [6, 2, 16]", "written by PyTorch's index_copy_"),
    "cache q batch": (appended(q=X), ValueError, "q must be [t, h, d]", "got [2, 6, 4, 8]", "for a batch pass"),
    "cache slots list": (appended(slot_mapping=[1]), TypeError, "slot_mapping must be a tensor", "got list", AS_TENSOR),
    "cache slots floats": (appended(slot_mapping=zeros(S)), TypeError, "slot_mapping must be int32 or int64", "got torch.float32", "convert with .to(torch.int64)"),
    "cache slots many": (appended(slot_mapping=torch.arange(7)), ValueError, "slot_mapping must be a place for each of the first tokens, [6]", "got [7]", "pass as many as tokens are to be kept"),
    "cache slots of pages": (appended(slot_mapping=torch.zeros(S, 2).long()), ValueError, "slot_mapping must be a place", "got [6, 2]", "page * page_size + slot each"),
    "cache slots elsewhere": (appended(slot_mapping=torch.arange(S, device=META)), ValueError, "slot_mapping must be a place", "on meta", "page * page_size + slot each"),
    "cache of both": (appended(key_cache=zeros(3, 2, 4, K, D)), ValueError, "key_cache must have 4 axes", "got [3, 2, 4, 2, 8]", "pass cache[:, 0] and cache[:, 1]"),
    "cache elsewhere": (appended(value_cache=zeros(3, 4, K, D, device=META)), ValueError, "on the device of q, cpu", "on meta", "pass cache[:, 0]"),
    "cache HND": (appended(cache_layout="HND"), ValueError, "[pages, heads, page_size, head_dim] for cache_layout 'HND'", "got [3, 4, 2, 8] and [3, 4, 2, 8]", "or the other cache_layout"),
    "cache heads": (appended(key_cache=zeros(3, 4, H, D)), ValueError, "with the 2 heads and the head_dim of k, 8", "got [3, 4, 4, 8]", "pass views that have these axes"),
    "cache dtype": (appended(key_cache=zeros(3, 4, K, D).half()), TypeError, "key_cache must be torch.float32, as k is, or torch.float8_e4m3fn", "got torch.float16", "view bytes as"),
    "cache bytes": (appended(key_cache=zeros(3, 4, K, D).byte()), TypeError, "key_cache must be torch.float32", "got torch.uint8", "cache.view(torch.float8_e4m3fn)"),
    "caches of two dtypes": (appended(value_cache=CACHES8["value_cache"]), TypeError, "and as key_cache is", "got torch.float8_e4m3fn", "view bytes as"),
    "cache expanded": (appended(key_cache=zeros(1, 4, K, D).expand(3, 4, K, D)), ValueError, "key_cache cannot be overwritten", "(stride 0)", "pass a contiguous copy of it"),
    "cache q expanded": (appended(q=zeros(1, H, D).expand(S, H, D)), ValueError, "q cannot be overwritten", "(stride 0)", "pass a contiguous copy of it"),
    "cache scale alone": (appended(**CACHES8, key_scale=torch.ones(())), ValueError, "key_scale and value_scale must come together", "got key_scale", "give both, or leave both out"),
    "cache scales without float8": (appended(key_scale=torch.ones(()), value_scale=torch.ones(())), ValueError, "with caches of torch.float8_e4m3fn", "with torch.float32", "leave both out"),
    "cache scale number": (appended(**CACHES8, key_scale=1.0, value_scale=1.0), TypeError, "key_scale must be a tensor", "got float", AS_TENSOR),
    "cache scale dtype": (appended(**CACHES8, key_scale=torch.ones(()).half(), value_scale=torch.ones(())), TypeError, "key_scale must be float32", "got torch.float16", "convert with .to(q.device, torch.float32)"),
    "cache scales of tokens": (appended(**CACHES8, key_scale=torch.ones(()), value_scale=torch.ones(S)), ValueError, "value_scale must be one number, or one for each of the 2 heads", "got [6]", "pass [1] or [2]"),
    "cache gradient": (appended(k=zeros(S, K, D, requires_grad=True)), RuntimeError, "rope_append_, has no gradient", "got k that requires one", "under torch.no_grad()"),
    "cache shares": (appended(q=ROWS_OF_6[:, :H], k=ROWS_OF_6[:, 3:5]), ValueError, "q is overwritten, and must not share memory with k", "got tensors that do", "pass a clone of k"),
    "caches share": (appended(key_cache=PAGES_OF_4[:3], value_cache=PAGES_OF_4[1:]), ValueError, "key_cache is overwritten, and must not share memory with value_cache", "got tensors that do", "pass a clone of value_cache"),
    "cache weights": (appended(q_weight=torch.ones(D)), ValueError, "k and k_weight must come together", "got k without k_weight", "give both, or leave both out"),
    "vllm cache kind": (kept(kv_cache_dtype="int8"), ValueError, "kv_cache_dtype must be one of ('auto', 'fp8', 'fp8_e4m3')", "got 'int8'", "convert key and value"),
    "vllm cache key": (kept(key=zeros(S, K * D)), ValueError, "k must be [tokens, heads, head_dim]", "got [6, 16]", "reshape it, as k.view("),
    "vllm cache dtype": (kept(kv_cache_dtype="fp8"), ValueError, "with caches of torch.float8_e4m3fn", "with torch.float32", "leave both out"),
    "vllm cache list": (kept(key_cache=[1.0]), TypeError, "key_cache must be a tensor", "got list", AS_TENSOR),
    "flashinfer pages": (paged(paged_kv_cache=zeros(3, 4, K, D)), ValueError, "paged_kv_cache must be [pages, 2, ...]", "got [3, 4, 2, 8]", "as a tuple of two"),
    "flashinfer tuple of one": (paged(paged_kv_cache=(zeros(3, 4, K, D),)), ValueError, "paged_kv_cache must be a tensor, or a tuple of two with 4 axes", "got a tuple of [3, 4, 2, 8]", "pass the pages of keys and of values"),
    "flashinfer tuple of none": (paged(paged_kv_cache=()), ValueError, "a tuple of two with 4 axes", "got a tuple of nothing", "pass the pages of keys and of values"),
    "flashinfer caches of 3 axes": (paged(paged_kv_cache=(zeros(4, K, D), zeros(4, K, D))), ValueError, "a tuple of two with 4 axes", "got a tuple of [4, 2, 8], [4, 2, 8]", "pass the pages of keys and of values"),
    "flashinfer caches None": (paged(paged_kv_cache=None), ValueError, "a tuple of two with 4 axes", "got NoneType", "pass the pages of keys and of values"),
    "flashinfer cache of values list": (paged(paged_kv_cache=(zeros(3, 4, K, D), [1.0])), TypeError, "value_cache must be a tensor", "got list", AS_TENSOR),
    "flashinfer indices": (paged(batch_indices=zeros(S)), ValueError, "batch_indices must be one row of int32 or int64", "got [6] torch.float32", ".to(torch.int32)"),
    "flashinfer positions": (paged(positions=torch.arange(5)), ValueError, "one number a token each", "got [6] and [5]", "get_batch_indices_positions"),
    "flashinfer layout": (paged(kv_layout="HDN"), ValueError, 'cache_layout must be "NHD"', "got 'HDN'", "name the axes of a page"),
    "cache no positions": (appended(positions=None), ValueError, 'tensor_format "thd" needs cu_seqlens', "got NoneType", "torch.tensor([0, tokens]"),
}
OF_GRU: dict[str, Row] = {
    "input list": (lambda: gru([1.0], HX, W), TypeError, "input must be a tensor", "got list", AS_TENSOR),
    "input packed": (lambda: gru(PACK, zeros(1, 2, N), W), TypeError, "input must be a tensor", "got PackedSequence", "with batch_sizes=packed.batch_sizes"),
    "input axes": (lambda: gru(IN[0], HX, W), ValueError, "input must be [seq, batch, features]", "got [2, 6]", "for one sequence add a batch of 1"),
    "input features": (lambda: gru(zeros(T, B, 7), HX, W), ValueError, "input must have 6 features", "got [5, 2, 7]", "features are the last axis"),
    "input integers": (lambda: gru(IN.long(), HX, W), TypeError, "input must be floating point", "got torch.int64", "convert with .to(hx.dtype)"),
    "input fp8": (lambda: gru(IN.to(FP8), HX.to(FP8), [w.to(FP8) for w in W]), TypeError, "at least 16 bits", "got torch.float8_e4m3fn", "convert all with .to(torch.bfloat16)"),
    "bias in words": (lambda: gru(IN, HX, W, bias="no"), TypeError, "bias must be a bool", "got 'no'", "pass True or False"),
    "training tensor": (lambda: gru(IN, HX, W, dropout=0.5, training=torch.tensor(False)), TypeError, "training must be a bool", "got a tensor", "convert it with bool("),
    "bidirectional in words": (lambda: gru(IN, HX, W, bidirectional="False"), TypeError, "bidirectional must be a bool", "got 'False'", "pass True or False"),
    "batch_first list": (lambda: gru(IN, HX, W, batch_first=[False]), TypeError, "batch_first must be a bool", "got [False]", "pass True or False"),
    "recompute in words": (by(ints(0, 3, 5, 6), recompute="no"), TypeError, "recompute must be a bool", "got 'no'", "pass True or False"),
    "no steps": (lambda: gru(IN[:0], HX, W), ValueError, "at least 1 step", "got input of [0, 2, 6]", "skip the call"),
    "batch first": (lambda: gru(zeros(3, T, I), zeros(1, 3, N), W), ValueError, "= [1, 5, hidden]", "got [1, 3, 4]", "if input is [batch, seq, features], pass batch_first=True"),
    "seq first": (lambda: gru(IN, HX, W, batch_first=True), ValueError, "= [1, 5, hidden]", "got [1, 2, 4]", "pass batch_first=False"),
    "hx none": (lambda: gru(IN, None, W), TypeError, "hx must be a tensor", "got NoneType", "pass torch.zeros(num_layers * directions, batch, hidden)"),
    "hx axes": (lambda: gru(IN, HX[0], W), ValueError, "hx must be [num_layers * directions, batch, hidden]", "got [2, 4]", "pass hx[None]"),
    "hx layers": (lambda: gru(IN, HX, W * 2, num_layers=2), ValueError, "= [2, 2, hidden]", "got [1, 2, 4]", "give each layer, direction and sequence its state"),
    "hx hidden": (lambda: gru(IN, zeros(1, B, 5), W), ValueError, "hx must have hidden = 4", "got [1, 2, 5]", "give the state of these weights"),
    "hx dtype": (lambda: gru(IN, HX.double(), W), TypeError, "all tensors must have the dtype of input", "hx is torch.float64", "or use torch.autocast"),
    "hx device": (lambda: gru(IN, HX.to(META), W), ValueError, "all tensors must be on the device of input, cpu", "hx is on meta", MOVE),
    "weights module": (lambda: gru(IN, HX, torch.nn.GRU(I, N)), TypeError, "weights must be the tensors of each layer", "got GRU", "pass tuple(module.parameters())"),
    "weights none": (lambda: gru(IN, HX, None), TypeError, "weights must be the tensors of each layer", "got NoneType", "pass tuple(module.parameters())"),
    "weights tensor": (lambda: gru(IN, HX, W[0]), TypeError, "weights must be the tensors of each layer", "got Parameter", "or call tuned.nn.GRU"),
    "weights by name": (lambda: gru(IN, HX, torch.nn.GRU(I, N).state_dict()), TypeError, "weights[0] must be a tensor", "got str", "pass bias=False"),
    "weights empty": (lambda: gru(IN, HX, []), ValueError, "weights must be 4 tensors", "got 0", "pass tuple(module.parameters())"),
    "weights without biases": (lambda: gru(IN, HX, W[:2]), ValueError, "weights must be 4 tensors for each of 1 layers", "got 2", "for weights without biases pass bias=False"),
    "weights with biases": (lambda: gru(IN, HX, W, bias=False), ValueError, "weights must be 2 tensors", "got 4", "for weights with biases pass bias=True"),
    "weights of two layers": (lambda: gru(IN, HX, W * 2), ValueError, "weights must be 4 tensors", "got 8", "with its num_layers, bias and bidirectional"),
    "weights shape": (lambda: gru(IN, HX, [*W[:3], zeros(5)]), ValueError, "b_hh of layer 0, must be [12]", "got [5]", "for input of [5, 2, 6]"),
    "no layers": (lambda: gru(IN, HX, W, num_layers=0), ValueError, "num_layers must be at least 1", "got 0", "pass the number of layers that weights has"),
    "layers in words": (lambda: gru(IN, HX, W, num_layers="1"), TypeError, "num_layers must be an int", "got '1'", "convert it with int("),
    "dropout": (lambda: gru(IN, HX, W, dropout=50), ValueError, "dropout must be a probability in [0, 1]", "got 50", "leave it out for 0"),
    "dropout none": (lambda: gru(IN, HX, W, dropout=None), TypeError, "dropout must be a number", "got None", "leave it out for 0"),
    "two kinds of lengths": (by(ints(0, 1, 3, 6), batch_sizes=torch.tensor([3, 2, 1])), ValueError, "give batch_sizes (of a PackedSequence) or cu_seqlens, not both", "got both", "leave one out"),
    "length alone": (lambda: gru(IN, HX, W, max_seqlen=5), ValueError, "max_seqlen is for cu_seqlens", "got 5", "leave it out, or pass cu_seqlens"),
    "packed of three axes": (lambda: gru(IN, HX, W, batch_sizes=torch.tensor([2])), ValueError, "[rows, features]", "got [5, 2, 6]", "packed input must be"),
    "packed batch first": (by(ints(0, 1, 3, 6), batch_first=True), ValueError, "batch_first must be False", "got True", "leave it out"),
    "batch_sizes list": (sizes([3, 2, 1]), TypeError, "batch_sizes must be an int64 tensor on the CPU", "got list", "pass packed.batch_sizes"),
    "batch_sizes in 32 bits": (sizes(ints(3, 2, 1)), TypeError, "batch_sizes must be an int64 tensor on the CPU", "got torch.int32 on cpu", "pass packed.batch_sizes"),
    "batch_sizes increase": (sizes(torch.tensor([1, 2, 3])), ValueError, "batch_sizes must not increase", "got [1, 2, 3]", "pack with torch.nn.utils.rnn"),
    "batch_sizes short": (sizes(torch.tensor([3, 2])), ValueError, "batch_sizes add up to 5 rows", "input has 6", "of one PackedSequence"),
    "bounds list": (by([0, 1, 3, 6]), TypeError, "cu_seqlens must be an int32 tensor", "got list", TO_32),
    "bounds in 64 bits": (by(torch.tensor([0, 1, 3, 6])), TypeError, "cu_seqlens must be an int32 tensor", "got torch.int64", TO_32),
    "bounds device": (by(ints(0, 1, 3, 6).to(META)), ValueError, "cu_seqlens must be on the device of input, cpu", "got meta", MOVE),
    "bounds are lengths": (by(ints(1, 2, 3)), ValueError, "cu_seqlens must start at 0 and end at the 6 rows", "got 1 and 3", LENGTHS),
    "bounds decrease": (by(ints(0, 4, 3, 6)), ValueError, "cu_seqlens must not decrease", "one length is -1", LENGTHS),
    "bounds past the end": (by(ints(0, 1, 3, 7)), ValueError, "end at the 6 rows of input", "got 0 and 7", LENGTHS),
    "no length": (by(ints(0, 1, 3, 6), None), ValueError, "cu_seqlens needs max_seqlen", "got None", "pass it as an int"),
    "length short": (by(ints(0, 1, 3, 6), 2), ValueError, "is less than the longest length, 3", "max_seqlen=2", "pass at least that"),
    "length float": (by(ints(0, 1, 3, 6), 3.0), TypeError, "max_seqlen must be an int", "got 3.0", "convert it with int("),
    "length tensor": (by(ints(0, 1, 3, 6), torch.tensor(3)), TypeError, "max_seqlen must be an int", "got a tensor", "pass max_seqlen.item()"),
    "resets in numbers": (lambda: gru(IN, HX, W, resets=zeros(T, B)), TypeError, "resets must be a bool tensor", "got torch.float32", "convert with .bool()"),
    "resets transposed": (lambda: gru(IN, HX, W, resets=MARKS.t()), ValueError, "a mark for each step of input, [5, 2]", "got [2, 5]", "transpose it"),
    "resets of sequences": (lambda: gru(IN, HX, W, resets=MARKS[0]), ValueError, "a mark for each step of input, [5, 2]", "got [2]", "expand marks of sequences to their steps"),
    "resets device": (lambda: gru(IN, HX, W, resets=MARKS.to(META)), ValueError, "resets must be on the device of input, cpu", "got meta", MOVE),
}
OF_STEPS: dict[str, Row] = {
    "x list": (lambda: gru_cell([1.0], HX[0], *W), TypeError, "x must be a tensor", "got list", "segments are a tuple of tensors"),
    "inplace in words": (lambda: gru_cell(zeros(B, I), HX[0], *W, inplace="False"), TypeError, "inplace must be a bool", "got 'False'", "pass True or False"),
    "inplace tensor with resets": (lambda: gru_cell(zeros(B, I), HX[0], *W, inplace=torch.tensor(True), resets=MARKS[0]), TypeError, "inplace must be a bool", "got a tensor", "convert it with bool("),
    "x features": (lambda: gru_cell(zeros(B, 7), HX[0], *W), ValueError, "x must be [batch, 6] for weight_ih of [12, 6]", "got [2, 7]", "give the features that the weights take"),
    "x batch": (lambda: gru_cell(zeros(3, I), HX[0], *W), ValueError, "x must be [2, 6] for h of [2, 4]", "got [3, 6]", "x and h are of one batch"),
    "x sequence": (lambda: gru_cell(IN, HX[0], *W), ValueError, "x must be [batch, input_size] and h [batch, hidden]", "got [5, 2, 6]", "for whole sequences call gru"),
    "x without a batch": (lambda: gru_cell(zeros(I), zeros(N), *W), ValueError, "x must be [batch, input_size]", "got [6] and [4]", "pass x[None] and h[None]"),
    "x dtype": (lambda: gru_cell(IN[0].half(), HX[0], *W), TypeError, "all tensors must have the floating point dtype of h", "x is torch.float16", "or use torch.autocast"),
    "x device": (lambda: gru_cell(IN[0].to(META), HX[0], *W), ValueError, "all tensors must be on the device of h, cpu", "x is on meta", MOVE),
    "all fp8": (lambda: gru_cell(IN[0].to(FP8), HX[0].to(FP8), *[w.to(FP8) for w in W]), TypeError, "at least 16 bits", "got torch.float8_e4m3fn", "convert all with .to(torch.bfloat16)"),
    "h none": (lambda: gru_cell(IN[0], None, *W), TypeError, "h must be a tensor", "got NoneType", "pass torch.zeros(batch, hidden)"),
    "h none, resets": (lambda: gru_cell(IN[0], None, *W, resets=MARKS[0]), TypeError, "h must be a tensor", "got NoneType", "pass torch.zeros(batch, hidden)"),
    "h hidden": (lambda: gru_cell(IN[0], zeros(B, 5), *W), ValueError, "h must be [batch, 4] for weight_hh of [12, 4]", "got [2, 5]", "give the state of these weights"),
    "h of a layer": (lambda: gru_cell(IN[0], HX, *W), ValueError, "h [batch, hidden]", "and [1, 2, 4]", "for whole sequences call gru"),
    "h leaf in place": (lambda: gru_cell(IN[0], zeros(B, N, requires_grad=True), *W, inplace=True), RuntimeError, "overwriting it would lose", "of shape [2, 4], is a leaf that requires grad", "use inplace=False"),
    "h needed in place": (lambda: gru_cell(IN[0], zeros(B, N), *W, inplace=True), RuntimeError, "h is overwritten", "its old value is needed for a gradient", "use inplace=False"),
    "h expanded in place": (lambda: gru_cell(IN[0], zeros(1, N).expand(B, N), *[w.detach() for w in W], inplace=True), ValueError, "h cannot be overwritten", "share memory (stride 0)", "use inplace=False"),
    "h of windows in place": (lambda: gru_cell(IN[0], zeros(8).as_strided((B, N), (2, 1)), *[w.detach() for w in W], inplace=True), ValueError, "h cannot be overwritten", "share memory (strides [2, 1] of [2, 4])", "use inplace=False"),
    "h expanded in place, autocast": (autocast(lambda: gru_cell(IN[0], zeros(1, N).expand(B, N), *[w.detach() for w in W], inplace=True)), ValueError, "h cannot be overwritten", "share memory (stride 0)", "use inplace=False"),
    "h integers, autocast": (autocast(lambda: gru_cell(IN[0], zeros(B, N).int(), *W)), TypeError, "the floating point dtype of h, torch.int32", "x is torch.bfloat16", "convert one with .to()"),
    "weights swapped": (lambda: gru_cell(IN[0], HX[0], W[1], W[0], *W[2:]), ValueError, "weight_ih must be [12, 6] for h of [2, 4]", "got [12, 4]", "weights are those of torch.nn.GRUCell"),
    "weights gates": (lambda: gru_cell(IN[0], HX[0], zeros(16, I), zeros(16, N)), ValueError, "weight_ih must be [12, 6]", "got [16, 6]", "gates r, z, n in the first axis"),
    "weight none": (lambda: gru_cell(IN[0], HX[0], None, W[1]), TypeError, "weight_ih must be a tensor", "got NoneType", "the order is x, h, weight_ih"),
    "bias": (lambda: gru_cell(IN[0], HX[0], W[0], W[1], zeros(5), W[3]), ValueError, "bias_ih must be [12]", "got [5]", "weights are those of torch.nn.GRUCell"),
    "bias alone": (lambda: gru_cell(IN[0], HX[0], W[0], W[1], W[2]), ValueError, "give both bias_ih and bias_hh, or neither", "got bias_ih alone", "pass zeros for the other"),
    "no segments": (lambda: gru_cell((), HX[0], *W), ValueError, "x must have at least one segment", "got an empty tuple", "pass a tensor, or a tuple of tensors"),
    "segment none": (lambda: gru_cell((IN[0], None), HX[0], *W), TypeError, "x[1] must be a tensor", "got NoneType", "every segment is one"),
    "segment batch": (lambda: gru_cell((zeros(B, 2), zeros(1, 4)), HX[0], *W), ValueError, "[batch, k] with one batch", "got [[2, 2], [1, 4]]", "expand what the batch shares"),
    "segment dtype": (lambda: gru_cell((zeros(B, 2), zeros(B, 4).half()), HX[0], *W), TypeError, "must have one dtype and device", "x[1] is torch.float16", "convert one with .to()"),
    "segments too wide": (lambda: gru_cell((zeros(B, 4), zeros(B, 4)), HX[0], *W), ValueError, "x must be [batch, 6] for weight_ih", "got [2, 8]", "several segments as a tuple count together"),
    "resets list": (lambda: gru_cell(IN[0], HX[0], *W, resets=[True, False]), TypeError, "resets must be a tensor", "got list", AS_TENSOR),
    "resets in numbers": (lambda: gru_cell(IN[0], HX[0], *W, resets=zeros(B)), TypeError, "resets must be a bool tensor", "got torch.float32", "convert with .bool()"),
    "resets axes": (lambda: gru_cell(IN[0], HX[0], *W, resets=MARKS), ValueError, "resets must have 1 axes", "got [5, 2]", "one mark for each row of h"),
    "resets of another batch": (lambda: gru_cell(IN[0], HX[0], *W, resets=MARKS[:, 0]), ValueError, "a mark for each of 2 rows of h", "got [5]", "expand it"),
    "linear of a tensor": (lambda: linear_cat(IN, W[0]), TypeError, "inputs must be a tuple of at least one tensor", "got Tensor", "pass (x,), or call torch.nn.functional.linear"),
    "linear of nothing": (lambda: linear_cat((), W[0]), TypeError, "inputs must be a tuple of at least one tensor", "got an empty tuple", "pass the segments, as (a, b)"),
    "linear of none": (lambda: linear_cat((IN, None), W[0]), TypeError, "inputs[1] must be a tensor", "got NoneType", "the order is (inputs, weight, bias)"),
    "linear shapes": (lambda: linear_cat((IN, IN[0]), W[0]), ValueError, "equal except in the last axis", "inputs[1] is [2, 6]", "expand what the others share"),
    "linear dtype": (lambda: linear_cat((IN, IN.half()), W[0]), TypeError, "the floating point dtype of inputs[0]", "inputs[1] is torch.float16", "or use torch.autocast"),
    "linear device": (lambda: linear_cat((IN,), W[0].to(META)), ValueError, "on the device of inputs[0], cpu", "weight: meta", MOVE),
    "linear weight": (lambda: linear_cat((IN, IN, IN), W[0]), ValueError, "weight must be [n, 18]", "got [12, 6]", "it takes all of [6, 6, 6] in one axis"),
    "linear weight transposed": (lambda: linear_cat((IN,), W[0].t()), ValueError, "weight must be [n, 6]", "got [6, 12]", "pass weight.t()"),
    "linear bias": (lambda: linear_cat((IN,), W[0], zeros(6)), ValueError, "bias must be [12]", "got [6]", "one entry for each row of weight"),
}
OF_EXPLAIN: dict[str, Row] = {
    "a result": (lambda: tuned.explain(rope(X, FREQS)), TypeError, "explain knows rope, rope_qk", "got what a call returned, a Tensor", "as tuned.explain(rope, x, freqs)"),
    "another module": (lambda: tuned.explain(torch.nn.LSTM(2, 2), IN), TypeError, "modules GRU and GRUCell", "got LSTM(2, 2)", "or a module of a model that calls them"),
    "another function": (lambda: tuned.explain(torch.relu, X), TypeError, "explain knows rope", "relu", "give one of these and then its arguments"),
    "a wrong call": (lambda: tuned.explain(rope, X[0], FREQS), ValueError, "x must be [b, s, h, d]", "got [6, 4, 8]", "for one sequence x[None]"),
    "a wrong count": (lambda: tuned.explain(rope, X, FREQS, rotary_dim=8.0), TypeError, "rotary_dim must be an int", "got float 8.0", "convert it with int("),
    "a wrong offset": (lambda: tuned.explain(rope, X, FREQS, offset="3"), TypeError, "offset must be an int", "got str '3'", "convert it with int("),
    "a wrong kv_heads": (lambda: tuned.explain(rope_qkv, X, FREQS, kv_heads=0), ValueError, "kv_heads must be at least 1", "got kv_heads=0", "pass None for a qkv with an axis of 3"),
    "a wrong GRU": (lambda: tuned.explain(gru, IN, HX[0], W), ValueError, "hx must be [num_layers * directions", "got [2, 4]", "pass hx[None]"),
    "a wrong step": (lambda: tuned.explain(gru_cell, zeros(B, 7), HX[0], *W), ValueError, "x must be [batch, 6]", "got [2, 7]", "give the features that the weights take"),
    "a wrong linear": (lambda: tuned.explain(linear_cat, IN, W[0]), TypeError, "inputs must be a tuple", "got Tensor", "pass (x,)"),
    "a wrong module": (lambda: tuned.explain(tuned.nn.GRU(I, N), zeros(T, B, 7)), ValueError, "input must have input_size=6 features", "got 7", "they are its last axis"),
}
OF_MODULES: dict[str, Row] = {
    "replace a function": (lambda: tuned.nn.replace(torch.relu), TypeError, "replace takes a torch.nn.Module", "got builtin_function_or_method", "call tuned.dispatch.gru"),
    "replace a class": (lambda: tuned.nn.replace(torch.nn.GRU), TypeError, "replace takes a torch.nn.Module", "got the class GRU", "pass the model itself"),
    "replace a list": (lambda: tuned.nn.replace([torch.nn.GRU(I, N)]), TypeError, "replace takes a torch.nn.Module", "got list", "pass the model itself"),
    "restore parameters": (lambda: tuned.nn.restore({"weight": W[0]}), TypeError, "restore takes a torch.nn.Module", "got dict", "pass the model itself"),
    "resets list": (module(IN, resets=[True]), TypeError, "resets must be a bool tensor", "got list", AS_TENSOR),
    "resets in numbers": (module(IN, resets=zeros(T, B)), TypeError, "resets must be a bool tensor", "got torch.float32", "convert with .bool()"),
    "resets transposed": (module(IN, resets=MARKS.t()), ValueError, "a mark for each step of input, [5, 2]", "got [2, 5]", "transpose it"),
    "resets of what is packed": (module(PACK, resets=MARKS), TypeError, "resets of a PackedSequence must be one too", "got PackedSequence and Tensor", "pack both, or neither"),
    "resets packed alone": (module(IN, resets=PACK), TypeError, "and of a tensor a tensor", "got Tensor and PackedSequence", "pack both, or neither"),
    "resets of other lengths": (module(PACK, resets=pack_sequence([MARKS[:3, 0], MARKS[:3, 0]])), ValueError, "resets must be packed with the lengths", "got batch_sizes [2, 2, 2] for [2, 2, 1, 1]", "pack both with the same lengths"),
    "resets and features": (module(zeros(T, B, 7), resets=MARKS), ValueError, "input must have input_size=6 features", "got 7", "they are its last axis"),
    "resets and a list": (module([1.0], resets=MARKS), TypeError, "input and hx must be tensors", "got list and NoneType", "convert them with torch.as_tensor("),
    "resets and axes": (module(zeros(I), resets=MARKS), ValueError, "input must be 3-D, or 2-D for one sequence", "got 1-D", "reshape it"),
    "resets and hx": (module(IN, zeros(2, B, N), resets=MARKS), ValueError, "hx must be [num_layers * directions, batch, hidden]", "got [2, 2, 4]", "leave it out for zeros"),
    "resets and hx axes": (module(IN, zeros(1, N), resets=MARKS), ValueError, "for 3-D input hx must be 3-D too", "got 2-D", "give both a batch axis"),
    "resets and dtype": (module(IN.half(), resets=MARKS), ValueError, "the weights are torch.float32", "input is torch.float16", "or use torch.autocast"),
    "cell resets list": (cell(IN[0], resets=[True]), TypeError, "resets must be a tensor", "got list", AS_TENSOR),
    "cell resets list unbatched": (cell(IN[0, 0], resets=[True]), TypeError, "resets must be a tensor", "got list", AS_TENSOR),
    "cell resets unbatched": (cell(IN[0, 0], resets=MARKS[0]), ValueError, "without a batch axis must be [], one mark", "got [2]", "give both a batch axis"),
    "gru resets unbatched": (module(IN[:, 0], resets=MARKS[:4, 0]), ValueError, "without a batch axis must be [5], a mark for each step", "got [4]", "give both a batch axis"),
    "explained resets unbatched": (lambda: tuned.explain(tuned.nn.GRUCell(I, N), IN[0, 0], resets=MARKS[0]), ValueError, "without a batch axis must be [], one mark", "got [2]", "give both a batch axis"),
    "explained resets": (lambda: tuned.explain(tuned.nn.GRUCell(I, N), IN[0], resets="no"), TypeError, "resets must be a tensor", "got str", AS_TENSOR),
    "gru flag": (lambda: gru(IN, HX, W, bias=2), TypeError, "bias must be a bool", "got 2", "pass True or False"),
    "gru dropout": (lambda: gru(IN, HX, W, dropout=[0.1]), TypeError, "dropout must be a number", "got [0.1]", "convert it with float("),
    "gru layers": (lambda: gru(IN, HX, W, num_layers=[1]), TypeError, "num_layers must be an int", "got [1]", "convert it with int("),
    "rope flag": (on_x(inplace={}), TypeError, "inplace must be a bool", "got {}", "pass True or False"),
    "scaling": (on_x(inv_freq=RATES, attention_scaling=[1]), TypeError, "attention_scaling must be a number", "got [1]", "leave it out for 1.0"),
    "max_seqlen of no number": (by(ints(0, 2, 6), [4]), TypeError, "max_seqlen must be an int", "got [4]", "convert it with int("),
    "a problem alone": (lambda: tuned.warm({"family": "rope"}), TypeError, "problems must be a list", "got one problem", "as tuned.warm([problem])"),
    "a class to warm": (lambda: tuned.warm(tuned.nn.GRU, 3, 4), TypeError, "model must be a module or function", "got the class GRU", "make one"),
    "cell no segments": (cell(()), ValueError, "input must have at least one segment", "got an empty tuple", "pass a tensor, or a tuple of tensors"),
    "cell segment none": (cell((zeros(B, 2), None)), TypeError, "input and hx must be tensors", "got NoneType", "segments are a tuple of tensors"),
    "cell segment axes": (cell((zeros(B, 2), zeros(4))), ValueError, "all segments alike", "got [2, 1]", "give all a batch axis, or none"),
    "cell segment state": (cell((zeros(B, 2), zeros(B, 4)), zeros(N)), ValueError, "hx must have as many axes as input, 2", "got 1", "give both a batch axis, or neither"),
    "cell segments short": (cell((zeros(B, 2), zeros(B, 3))), ValueError, "x must be [batch, 6] for weight_ih of [12, 6]", "got [2, 5]", "several segments as a tuple count together"),
}
OF_DROP_INS: dict[str, Row] = {
    "flash x list": (flash(x=[1.0]), TypeError, "x must be a tensor", "got list", AS_TENSOR),
    "flash without tables": (flash(cos=None, sin=None), ValueError, "give the angles", "got none of them", "both cos and sin"),
    "flash wide tables": (flash(cos=FREQS, sin=FREQS), ValueError, "in (0, head_dim=8]", "angles with 8 entries, one per pair", FEATURE),
    "flash offsets of floats": (flash(seqlen_offsets=zeros(B)), TypeError, "offset must be int32 or int64", "got torch.float32", TO_32),
    "flash offset past": (flash(seqlen_offsets=11), ValueError, "the angles are too short", "from position 11 on", "make them at least as long"),
    "flash offsets of another batch": (flash(seqlen_offsets=ints(0, 0, 0)), ValueError, "a tensor of [2], one entry per sequence", "got [3]", "for positions of each token"),
    "flash batch with bounds": (flash(cu_seqlens=ints(0, 6)), ValueError, "x must be [t, h, d]", "got [2, 6, 4, 8]", "for a batch pass"),
    "flash lengths": (flash(x=TOKENS, cu_seqlens=ints(4, 2)), ValueError, "cu_seqlens must not decrease", "got 4 and then 2 at index 1", LENGTHS),
    "flash style in words": (flash(interleaved="gpt-j"), TypeError, "interleaved must be a bool", "got 'gpt-j'", "pass True or False"),
    "flash qkv list": (flash_qkv([1.0]), TypeError, "qkv must be a tensor", "got list", AS_TENSOR),
    "flash qkv axes": (flash_qkv(X[0]), ValueError, "qkv must be [batch, seqlen, 3, heads, head_dim]", "got [6, 4, 8]", "call apply_rotary_emb"),
    "flash qkv heads missing": (flash_qkv(zeros(B, S, 8, D)), ValueError, "needs num_heads_q", "got None for [2, 6, 8, 8]", "pass it, or give qkv an axis of 3"),
    "flash qkv heads odd": (flash_qkv(zeros(B, S, 8, D), num_heads_q=3), ValueError, "an even and positive number of heads for k and v", "got num_heads_q=3 of 8 heads", "the heads are num_heads_q + 2 * num_heads_k"),
    "flash qkv heads float": (flash_qkv(zeros(B, S, 8, D), num_heads_q=4.0), TypeError, "num_heads_q must be an int", "got float 4.0", "convert it with int("),
    "flash cos_k": (flash_qkv(zeros(B, S, 3, H, D), cos_k=COS[:5]), ValueError, "cos_k must have the shape, dtype and device of cos", "got [5, 4]", "make all four tables for the same positions"),
    "flash sin_k list": (flash_qkv(zeros(B, S, 3, H, D), sin_k=[1.0]), TypeError, "sin_k must be a tensor", "got list", AS_TENSOR),
    "flash kv": (lambda: flash_attn.apply_rotary_emb_kv_(zeros(B, S, 3, H, D), COS, SIN), ValueError, "kv must be [batch, seqlen, 2, heads, head_dim]", "got [2, 6, 3, 4, 8]", "stack k and v with torch.stack"),
    "flash kv of one memory": (lambda: flash_attn.apply_rotary_emb_kv_(zeros(B, S, 1, H, D).expand(B, S, 2, H, D), COS, SIN), ValueError, "kv cannot be overwritten", "some of its elements share memory (stride 0)", "pass a contiguous copy"),
    "flash qkv of one memory": (flash_qkv(zeros(B, S, 1, H, D).expand(B, S, 3, H, D)), ValueError, "qkv cannot be overwritten", "some of its elements share memory (stride 0)", "pass a contiguous copy"),
    "flash kv none": (lambda: flash_attn.apply_rotary_emb_kv_(None, COS, SIN), TypeError, "kv must be a tensor", "got NoneType", AS_TENSOR),
    "megatron outs of one memory": (of_megatron(out_key=OUTS[..., :20], out_value=OUTS[..., 19:]), ValueError, "out_key and out_value share memory", "and both would be overwritten", "pass None for new memory"),
    "vllm positions list": (served(positions=[0] * S), TypeError, "positions must be a tensor", "got list", AS_TENSOR),
    "vllm positions floats": (served(positions=zeros(S)), TypeError, "positions must be int32 or int64", "got torch.float32", TO_32),
    "vllm positions short": (served(positions=torch.arange(3)), ValueError, "positions must be [6], as the tokens", "got [3]", "give one position per token"),
    "vllm positions past": (served(positions=torch.arange(S) + 11), ValueError, "positions must be in [0, 16)", "got 11 to 16", "make the angles longer"),
    "vllm query list": (served(query=[1.0]), TypeError, "query must be a tensor", "got list", AS_TENSOR),
    "vllm key list": (served(key=[1.0]), TypeError, "key must be a tensor", "got list", AS_TENSOR),
    "vllm head_size": (served(head_size=7), ValueError, "then heads * head_size=7 features", "got [6, 32]", "reshape it, or pass positions of its tokens"),
    "vllm head_size float": (served(head_size=8.0), TypeError, "head_size must be an int", "got float 8.0", "convert it with int("),
    "vllm cache of cosines": (served(cos_sin_cache=torch.cat((COS, COS), -1)), ValueError, "then their sines", "got rows whose halves are equal", "torch.cat((cos, sin), -1)"),
    "vllm part of a head": (served(rope_dim_offset=4), ValueError, "rope_dim_offset and rotary_dim must lie in a head", "got features 4 to 12 of head_size=8", "is at most head_size - rotary_dim"),
    "vllm style tensor": (served(is_neox=torch.tensor(True)), TypeError, "is_neox must be a bool", "got a tensor", "convert it with bool("),
    "vllm inverse in words": (served(inverse="no"), TypeError, "inverse must be a bool", "got 'no'", "pass True or False"),
    "vllm style in words": (served(is_neox="neox"), TypeError, "is_neox must be a bool", "got 'neox'", "False for adjacent pairs"),
    "vllm query leaf": (served(query=zeros(S, H * D, requires_grad=True)), RuntimeError, "overwriting it would lose", "a leaf that requires grad", "use inplace=False"),
    "flashinfer positions": (lambda: flashinfer.apply_rope_with_cos_sin_cache_inplace([0], X, X, D, CACHE), TypeError, "positions must be a tensor", "got list", AS_TENSOR),
    "flashinfer head_size": (lambda: flashinfer.apply_rope_with_cos_sin_cache_inplace(torch.arange(S), zeros(S, 30), None, D, CACHE), ValueError, "then heads * head_size=8 features", "got [6, 30]", "reshape it"),
    "engine t list": (engine(t=[1.0]), TypeError, "x must be a tensor", "got list", AS_TENSOR),
    "engine freqs none": (engine(freqs=None), TypeError, "freqs must be a tensor", "got NoneType", AS_TENSOR),
    "engine freqs complex": (engine(freqs=torch.polar(COS, SIN)[:, None, None]), TypeError, "freqs must be real, angles in radians", "got torch.complex64", "take freqs.angle()"),
    "engine freqs short": (engine(freqs=FREQS[:3, None, None]), ValueError, "the angles are too short", "3 positions for a sequence of 6", "make them at least as long"),
    "engine freqs axes": (engine(freqs=zeros(ROWS, 2, 1, D)), ValueError, "freqs must be [rows, entries]", "got [16, 2, 1, 8]", "give one row per position"),
    "engine layout": (engine(tensor_format="hsbd"), ValueError, "tensor_format must be one of", "got 'hsbd'", "name the axes of x"),
    "engine starts": (engine(start_positions=ints(0, 0, 0)), ValueError, "a tensor of [2], one entry per sequence", "got [3]", "for positions of each token"),
    "engine packed without bounds": (engine(t=TOKENS, tensor_format="thd"), ValueError, '"thd" needs cu_seqlens', "got NoneType", "for one sequence pass torch.tensor([0, tokens]"),
    "engine rank": (engine(cp_size=2, cp_rank=2), ValueError, "cp_rank must be from 0 to cp_size - 1", "got cp_rank=2", "the group that shares each sequence"),
    "liger q list": (hugging(q=[1.0]), TypeError, "q must be a tensor", "got list", AS_TENSOR),
    "liger k none": (hugging(k=None), TypeError, "k must be a tensor", "got NoneType", AS_TENSOR),
    "liger q axes": (hugging(q=zeros(H, S, D)), ValueError, "q and k must be [batch, heads, seq, head_dim]", "got [4, 6, 8] and [2, 2, 6, 8]", "reshape them to 4 axes"),
    "liger cos none": (hugging(cos=None), TypeError, "cos must be a tensor", "got NoneType", AS_TENSOR),
    "liger cos narrow": (hugging(cos=FREQS[None, :S, :4]), ValueError, "cos must have head_dim=8 entries per token", "got 4", "to rotate a part of each head, call tuned.dispatch.rope_qk"),
    "liger cos short": (hugging(cos=FREQS[None, :3], sin=FREQS[None, :3]), ValueError, "the angles are too short", "3 positions for a sequence of 6", "make them at least as long"),
    "liger axis of heads": (hugging(unsqueeze_dim=2), ValueError, "unsqueeze_dim must be 1", "got 2", "transpose them, or call tuned.dispatch.rope_qk"),
    "liger vision none": (lambda: liger.liger_rotary_pos_emb_vision(None, X[0], FREQS, FREQS), TypeError, "q must be a tensor", "got NoneType", AS_TENSOR),
    "liger vision axes": (lambda: liger.liger_rotary_pos_emb_vision(X, X, FREQS, FREQS), ValueError, "q and k must be [seq, heads, head_dim]", "got [2, 6, 4, 8]", "reshape them to 3 axes"),
    "transformers function": (lambda: transformers.use_tuned_rope(torch.relu), TypeError, "model must be a torch.nn.Module", "got builtin_function_or_method", "pass the model itself"),
    "transformers without attention": (lambda: transformers.use_tuned_rope(torch.nn.Linear(2, 2)), ValueError, "must have attention whose apply_rotary_pos_emb", "got no module that calls such a function", "call tuned.dispatch.rope_qk in its code instead"),
    "transformers layer": (lambda: transformers.RotaryPosEmb()(HEADS_FIRST, HEADS_FIRST, COS, SIN), ValueError, "q and k must be [b, h, s, d] and cos and sin [b or 1, s, d]", "(16, 4)", "use_tuned_rope(model) serves"),
}
# Calls that are allowed but unlikely to be meant: they warn.
WARNED: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "heads first": (lambda: rope(zeros(B, H, S, D), cos=COS[:S], sin=SIN[:S]), "must be [b, s, h, d]", "got [2, 4, 6, 8]", "pass x.transpose(1, 2)"),
    "heads first of two": (lambda: rope_qk(zeros(B, H, S, D), zeros(B, H, S, D), cos=COS[:S], sin=SIN[:S]), "must be [b, s, h, d]", "got [2, 4, 6, 8]", "pass x.transpose(1, 2)"),
    "heads first of Hugging Face": (lambda: rope(zeros(B, H, S, D), cos=zeros(B, S, D), sin=zeros(B, S, D), angle_entries="feature"), "whose third axis alone is as long as cos and sin", "(6 rows)", "pass x.transpose(1, 2)"),
    "heads first by flash-attention": (flash(x=zeros(B, H, S, D), cos=COS[:S], sin=SIN[:S]), "must be [b, s, h, d]", "got [2, 4, 6, 8]", "pass x.transpose(1, 2)"),
    "lengths": (thd(ints(2, 4)), "cu_seqlens must be where sequences start", "got [2, 4]", LENGTHS),
    "equal lengths": (thd(ints(3, 3)), "cu_seqlens must be where sequences start", "got [3, 3]", LENGTHS),
    "one length": (thd(ints(6)), "leave the first 6 tokens as they are", "got [6]", LENGTHS),
    "replace without a GRU": (lambda: tuned.nn.replace(torch.nn.LSTM(I, N)), "found no torch.nn.GRU or GRUCell", "in LSTM", "call tuned.dispatch.gru"),
}
# fmt: on
GROUPS = {
    "x": OF_X,
    "angles": OF_ANGLES,
    "positions": OF_POSITIONS,
    "norms": OF_NORMS,
    "latent": OF_LATENT,
    "caches": OF_CACHES,
    "gru": OF_GRU,
    "steps": OF_STEPS,
    "explain": OF_EXPLAIN,
    "nn": OF_MODULES,
    "compat": OF_DROP_INS,
}
WRONG = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


def assert_parts(text: str, *parts: str) -> None:
    """Each part is in the text, and no two parts overlap."""
    spans = sorted((text.find(part), text.find(part) + len(part), part) for part in parts)
    missing = [part for begin, _, part in spans if begin < 0]
    assert not missing, f"{missing} in: {text}"
    assert all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(spans)), f"overlap in: {text}"


@pytest.mark.parametrize(("call", "error", "rule", "value", "way_out"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_says_the_rule_the_value_and_the_way_out(
    call: Callable[[], Any], error: type[Exception], rule: str, value: str, way_out: str
) -> None:
    for _ in range(2):  # the second call of equal properties is refused as the first is
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert_parts(str(caught.value), rule, value, way_out)


@pytest.mark.parametrize(("call", "rule", "value", "way_out"), WARNED.values(), ids=WARNED)
def test_a_call_that_is_hardly_meant_warns(call: Callable[[], Any], rule: str, value: str, way_out: str) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match=re.escape(rule)) as told:
            call()
        assert_parts(str(told[0].message), rule, value, way_out)
        assert len(told) == 1
        assert told[0].filename == __file__, "the warning is not at the line that called"


def test_calls_like_those_that_warn_are_served_in_silence() -> None:
    square, table = zeros(B, S, S, D), {"cos": COS[:S], "sin": SIN[:S]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (
            lambda: rope(square, **table),  # both axes have a fitting length
            lambda: rope(X, **table),  # the tokens' axis has a fitting length
            lambda: rope(zeros(B, 3, H, D), **table),  # neither axis is as long as the table
            lambda: rope_qk(
                zeros(B, 3, S, D), zeros(B, 3, 2, D), **table
            ),  # the key has another number of heads, so this axis is heads
            lambda: rope(zeros(B, 1, S, D), **table, offset=3),  # a step of decoding
            lambda: rope(zeros(B, 1, S, D), **table, positions=torch.tensor([3])),
            lambda: rope(zeros(B, 3, S, D), freqs=FREQS[:S]),
            thd(ints(0, 2, 6)),
            thd(ints(1, 2, 6)),  # tokens before the first sequence
            thd(ints(0, 2, 5)),  # and after the last
            thd(ints(0)),  # no sequence
            thd(ints(0, 4, 12), cp_size=2),
            on_x(cos_sin_cache=CACHE),
            on_x(cos_sin_cache=CACHE[3:]),
            on_x(cos_sin_cache=zeros(ROWS, D)),
            on_x(cos_sin_cache=torch.rand(ROWS, 2)),
            on_x(cos_sin_cache=torch.rand(ROWS, 1).expand(ROWS, D)),
            on_x(cos_sin_cache=CACHE.to(torch.bfloat16)),
        ):
            call()


def test_the_table_has_enough_rows_and_each_has_three_parts() -> None:
    assert len(WRONG) + len(WARNED) >= 250
    rows = [row[-3:] for row in (*WRONG.values(), *WARNED.values())]
    assert all(len(part) > 1 for parts in rows for part in parts), "a part that is empty is in every message"


KEPT = zeros(4, 2, K, D)
CALLS: dict[Any, dict[str, Any]] = {  # right ones, of every argument that is a tensor
    rope: {"x": X, "positions": torch.arange(S), **TABLE},
    rope_qk: {"q": Q, "k": KEY, "positions": torch.arange(S), "cos_sin_cache": CACHE},
    rope_qkv: {"qkv": torch.ones(B, S, H + 2 * K, D), "kv_heads": K, "inv_freq": RATES},
    rope_backward: {"grad_output": X, **TABLE},
    qk_norm_rope: {"q": Q, "k": KEY, "q_weight": torch.ones(D), "k_weight": torch.ones(D), **TABLE},
    qkv_norm_rope_: {
        "qkv": torch.ones(B, S, H + 2 * K, D), "kv_heads": K, "q_weight": torch.ones(D), "k_weight": torch.ones(D), **TABLE,
    },
    mla_kv_rope: {"kv": torch.ones(B, S, H, 2 * D), "k_pe": torch.ones(B, S, 1, D), "k_dim": D, **TABLE},
    rope_append_: {
        "q": Q[0], "k": KEY[0], "v": KEY[1], "key_cache": KEPT, "value_cache": KEPT.clone(),
        "slot_mapping": torch.arange(S), "positions": torch.arange(S), **TABLE,
    },
    gru: {"input": IN, "hx": HX, "weights": W, "resets": MARKS},
    gru_cell: {"x": IN[0], "h": HX[0], **dict(zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), W, strict=True)), "resets": MARKS[0]},
    linear_cat: {"inputs": (IN[0], IN[1]), "weight": zeros(3, 2 * I), "bias": zeros(3)},
}  # fmt: skip
NORMS = {"q_weight": torch.ones(D), "k_weight": torch.ones(D), "cos_sin_cache": CACHE}
DROP_INS: dict[Any, dict[str, Any]] = {
    transformer_engine.apply_rotary_pos_emb: {"t": zeros(S, B, H, D), "freqs": FREQS[:, None, None]},
    flash_attn.apply_rotary_emb: {"x": X, **TABLE},
    flash_attn.apply_rotary_emb_qkv_: {"qkv": torch.ones(B, S, 3, H, D), **TABLE, "cos_k": COS, "sin_k": SIN},
    flash_attn.apply_rotary_emb_kv_: {"kv": torch.ones(B, S, 2, H, D), **TABLE},
    liger.liger_rotary_pos_emb: {
        "q": zeros(B, H, S, D), "k": zeros(B, K, S, D), "cos": FREQS[None, :S], "sin": FREQS[None, :S],
    },
    flashinfer.apply_rope_with_cos_sin_cache_inplace: {
        "positions": torch.arange(S), "query": torch.ones(S, H * D), "key": torch.ones(S, K * D), "head_size": D,
        "cos_sin_cache": CACHE,
    },
    flashinfer.append_paged_kv_cache: {
        "append_key": KEY[0], "append_value": KEY[1], "batch_indices": torch.zeros(S).long(), "positions": torch.arange(S),
        "paged_kv_cache": zeros(3, 2, 4, K, D), "kv_indices": torch.arange(3), "kv_indptr": ints(0, 3),
        "kv_last_page_len": ints(2),
    },
    vllm.rotary_embedding: {
        "positions": torch.arange(S), "query": torch.ones(S, H * D), "key": torch.ones(S, K * D), "head_size": D,
        "cos_sin_cache": CACHE, "is_neox": True,
    },
    vllm.fused_qk_norm_rope: {
        "qkv": torch.ones(S, 8 * D), "num_heads_q": 4, "num_heads_k": 2, "num_heads_v": 2, "head_dim": D, "eps": 1e-6,
        **NORMS, "is_neox": True, "position_ids": torch.arange(S),
    },
    vllm.reshape_and_cache_flash: {
        "key": KEY[0], "value": KEY[1], "key_cache": KEPT.to(torch.uint8), "value_cache": KEPT.to(torch.uint8),
        "slot_mapping": torch.arange(S), "kv_cache_dtype": "fp8", "k_scale": torch.ones(()), "v_scale": torch.ones(()),
    },
    sglang.fused_inplace_qknorm_rope: {"q": TOKENS, "k": KEY[0], **NORMS, "positions": torch.arange(S), "is_neox": True},
    megatron.fused_apply_mla_rope_for_q: {
        "t": zeros(S, B, H, 12 + D), "cos": FREQS, "sin": FREQS, "qk_head_dim": 12, "emb_dim": D,
    },
    megatron.fused_apply_mla_rope_for_kv: {
        "kv": zeros(S, B, H, 16), "k_pos_emb": zeros(S, B, 1, D), "cos": FREQS, "sin": FREQS, "emb_dim": D, "k_dim": 12, "v_dim": 4,
        "out_key": zeros(S, B, H, 12 + D), "out_value": zeros(S, B, H, 4),
    },
}  # fmt: skip
STRANGE = (
    None,
    3,
    2.5,
    "x",
    {},
    [1.0],
    (None,),
    object(),
    zeros(0),
    zeros(2, 2, 2, 2, 2),
    zeros(3, 7),
    zeros(3, 7).int(),
    zeros(2, 2, 3, 2, 2).numpy(),
)
SETTINGS = (-1, 0, float("nan"), float("inf"), "", True, (), b"x", 10**30, 1j, range(3), torch.tensor(1.5), torch.zeros(2, 3, dtype=torch.complex64), int)  # fmt: skip
NUMBERS = {"kv_heads", "k_dim"}
OF_DROP_INS = ("head_size", "head_dim", "eps", "is_neox", "num_heads_q", "num_heads_k", "num_heads_v", "kv_cache_dtype", "qk_head_dim", "emb_dim", "v_dim", "kv_last_page_len")  # fmt: skip
UNLIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t[:1], t[1:]], layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
}


def copied(call: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in call.items()} | changed


def refusal(function: Any, call: dict[str, Any], **changed: Any) -> Exception | None:
    """The error of a refused call, which must have written nothing; None if the call is served."""
    given = copied(call, **changed)
    try:
        function(**given)
    except (TypeError, ValueError) as error:
        kept = [
            torch.equal(t, call[name])
            for name, t in given.items()
            if isinstance(t, torch.Tensor) and name not in changed
        ]
        assert all(kept), f"refused with {changed}, and written"
        return error
    return None


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("function", CALLS | DROP_INS, ids=lambda f: f.__name__)
def test_anything_in_the_place_of_a_tensor_is_served_or_refused_in_words_of_ours(function: Any) -> None:
    """No AttributeError from a line inside and no RuntimeError from an operator; a refused call has written nothing."""
    call = (CALLS | DROP_INS)[function]
    function(**copied(call))
    for name, strange in itertools.product(call, STRANGE):
        if name in NUMBERS or (function in DROP_INS and name in OF_DROP_INS):
            continue
        if refusal(function, call, **{name: strange}) is not None:
            continue
        assert strange is None, f"{name} may be {strange!r}"
        may_be = {"positions", "bias", "resets", "k", "k_weight", "key", "cos_k", "sin_k", "out_key", "out_value"}
        assert name in may_be, f"{name} may be None"


def emptied(call: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The call with each axis of each tensor empty in turn, and its name; and with the first axis of all tensors empty."""
    tensors = {name: t for name, t in call.items() if isinstance(t, torch.Tensor)}
    for name, t in tensors.items():
        yield from ((name, copied(call, **{name: t.narrow(axis, 0, 0)})) for axis in range(t.ndim))
    yield "", copied(call, **{name: t[:0] for name, t in tensors.items() if t.ndim})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", CALLS | DROP_INS, ids=lambda f: f.__name__)
def test_anything_beside_what_is_empty_and_any_setting_is_served_or_refused_in_words_of_ours(function: Any) -> None:
    """For example a number as query beside a key without tokens: code that read one's size read the other's too."""
    call = (CALLS | DROP_INS)[function]
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    calls = [*emptied(call), ("", call)]
    for name, strange in itertools.product(names, (*STRANGE, *SETTINGS)):
        for empty, near in calls:
            if empty != name:  # the strange one would be in place of what is empty, beside the call as it is
                with torch.no_grad():
                    refusal(function, near, **{name: strange})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("function", [f for f in CALLS | DROP_INS if f is not linear_cat], ids=lambda f: f.__name__)
def test_a_tensor_of_another_kind_is_served_or_refused_in_words_of_ours(function: Any, kind: str) -> None:
    """Sparse weights of linear_cat are left to PyTorch's linear, which takes some."""
    call = (CALLS | DROP_INS)[function]
    for name, t in call.items():
        unlike = (
            not isinstance(t, torch.Tensor)
            or (kind == "csr" and t.ndim != 2)
            or (kind in ("nested", "mkldnn") and not t.ndim)
        )
        if unlike or name == "kv_last_page_len":
            continue
        said = str(refusal(function, call, **{name: UNLIKE[kind](t.float())}) or "")
        assert "must " in said or kind == "quantized", (name, said)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("function", [gru, gru_cell, linear_cat], ids=lambda f: f.__name__)
def test_a_tensor_of_another_kind_after_right_calls_gives_what_a_dense_one_does_or_is_refused(
    function: Any, kind: str
) -> None:
    """A call like one that PyTorch served goes to PyTorch at once, which takes some tensors that a first call refuses."""
    names = [n for n, value in CALLS[function].items() if isinstance(value, torch.Tensor) and n != "resets"]
    call = {n: torch.rand_like(v) if n in names else v for n, v in CALLS[function].items() if n != "resets"}
    if function is linear_cat:
        call["inputs"] = tuple(map(torch.rand_like, call["inputs"]))
        names.append("inputs")
    with torch.no_grad():
        right = function(**call)
        for name in names:
            first = call[name][0] if name == "inputs" else call[name]
            if kind == "csr" and first.ndim != 2:
                continue
            unlike = UNLIKE[kind](first)
            function(**call)  # the weights of the earlier call, which this call must resemble
            changed = {name: (unlike, call[name][1]) if name == "inputs" else unlike}
            if function is gru_cell:
                error = refusal(function, call, **changed)  # of a first call: its weights are copies
                with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
                    function(**call | changed)
                continue
            try:
                got = function(**call | changed)
            except (TypeError, ValueError, RuntimeError):  # PyTorch's errors are of the last kind
                continue
            assert kind != "quantized", "it stands for other numbers"
            torch.testing.assert_close(got, right)


@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_without_sizes_after_right_calls_is_refused() -> None:
    """What compares the tensors of repeated calls ends the process at such a tensor."""
    a, b, h = torch.rand(B, 3), torch.rand(B, I - 3), torch.rand(B, N)
    nested = torch.nested.nested_tensor([a[0], a[1]])
    cell, weight = [w.detach() for w in W], torch.rand(T, I)
    for _ in range(4):
        linear_cat((a, b), weight)
        gru_cell((a, b), h, *cell)
        gru_cell(torch.cat((a, b), -1), h, *cell)
    with pytest.raises(TypeError, match=r"inputs\[0\] must be a dense tensor, got a nested one.*layout=torch.jagged"):
        linear_cat((nested, nested), weight)
    for x in (nested, (nested, b)):
        with pytest.raises(TypeError, match=r"must be a dense tensor, got a nested one"):
            gru_cell(x, h, *cell)


def test_segments_of_another_kind_after_right_ones_are_refused_as_at_first() -> None:
    """PyTorch's cat makes one sparse tensor of sparse segments, which its step takes."""
    call = copied(CALLS[gru_cell], x=(IN[0][:, :2], IN[0][:, 2:]), resets=None)
    sparse = tuple(t.to_sparse() for t in call["x"])
    for _ in range(3):
        with pytest.raises(TypeError, match=r"x\[0\] must be a dense tensor, got a sparse_coo one"):
            gru_cell(**call | {"x": sparse})
        gru_cell(**call)


@torch.no_grad()
def test_a_state_that_cannot_be_overwritten_is_refused_after_right_steps_too() -> None:
    """A step in place like one that PyTorch served goes to PyTorch at once, which would write one element several times."""
    call = copied(CALLS[gru_cell], resets=None) | {"inplace": True}
    shared, turned = zeros(20).as_strided((B, N), (1, 1)), torch.rand(N, B).mT
    for _ in range(3):
        with pytest.raises(ValueError, match="h cannot be overwritten: some of its elements share memory"):
            gru_cell(**call | {"h": shared})
        assert not shared.any()
        for h in (HX[0].clone(), turned):
            wanted = gru_cell(**call | {"h": h, "inplace": False})
            assert gru_cell(**call | {"h": h}) is h
            torch.testing.assert_close(h, wanted)


# Replacements of PyTorch's modules use PyTorch's text for the rule and the value. test_nn_errors has more.
Call = Callable[[Any], Any]
GRU_WORDS: dict[str, tuple[Call, str]] = {
    "axes": (lambda m: m(zeros(I)), "Expected input to be 2D or 3D, got 1D"),
    "four axes": (lambda m: m(zeros(1, 1, 1, I)), "4D"),
    "features": (lambda m: m(zeros(T, B, 7)), "got 7"),
    "features unbatched": (lambda m: m(zeros(T, 7)), "got 7"),
    "features packed": (lambda m: m(pack_sequence([zeros(4, 7), zeros(2, 7)])), "got 7"),
    "hx layers": (lambda m: m(IN, zeros(2, B, N)), "[2, 2, 4]"),
    "hx batch": (lambda m: m(IN, zeros(1, 3, N)), "[1, 3, 4]"),
    "hx hidden": (lambda m: m(IN, zeros(1, B, 5)), "[1, 2, 5]"),
    "hx axes": (lambda m: m(IN, zeros(1, N)), "2-D"),
    "hx packed": (lambda m: m(PACK, zeros(1, 3, N)), "3"),
    "dtype": (lambda m: m(IN.half()), "dtype"),
    "fp8": (lambda m: m(IN.to(FP8)), "float8_e4m3fn"),
    "none": (lambda m: m(None), "NoneType"),
    "list": (lambda m: m([1.0]), "list"),
    "nothing": (lambda m: m(), "input"),
    "unknown argument": (lambda m: m(IN, batch_first=True), "batch_first"),
}
CELL_WORDS: dict[str, tuple[Call, str]] = {
    "axes": (lambda m: m(zeros(1, B, I)), "3D"),
    "features": (lambda m: m(zeros(B, 7)), "7"),
    "hx axes": (lambda m: m(zeros(B, I), zeros(N)), "hidden0 batch size 4"),
    "hx batch": (lambda m: m(zeros(B, I), zeros(3, N)), "3"),
    "hx hidden": (lambda m: m(zeros(B, I), zeros(B, 5)), "5"),
    "dtype": (lambda m: m(zeros(B, I).half()), "dtype"),
    "none": (lambda m: m(None), "NoneType"),
    "list of segments": (lambda m: m([zeros(B, 2), zeros(B, 4)]), "list"),
}


@pytest.mark.parametrize(
    ("names", "call", "words"),
    [(names, *row) for names, rows in (("GRU", GRU_WORDS), ("GRUCell", CELL_WORDS)) for row in rows.values()],
    ids=[f"{names}: {name}" for names, rows in (("GRU", GRU_WORDS), ("GRUCell", CELL_WORDS)) for name in rows],
)
def test_a_module_says_what_pytorchs_says(names: str, call: Call, words: str) -> None:
    theirs, ours = getattr(torch.nn, names)(I, N), getattr(tuned.nn, names)(I, N)
    kind, text = outcome(lambda: call(theirs))
    assert kind != "served"
    assert words in text
    replaced = tuned.nn.replace(getattr(torch.nn, names)(I, N))
    for module_of_ours in (ours, replaced):
        mine = outcome(lambda m=module_of_ours: call(m))  # type: ignore[misc]
        assert mine[0] == kind
        assert mine[1].replace("tuned.nn.", "") == text
    with tuned.nn.patched():
        assert outcome(lambda: call(theirs)) == (kind, text)
