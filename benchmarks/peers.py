"""The peers of RoPE: each turns a call and its sets into one launch for each set, or says in a sentence why it cannot.

A launch returns the rotated query and key. Each peer is imported from its public package inside its function, so that a
peer that is not installed costs nothing. It gets the angles in the form that it takes, made beforehand.
"""

# ruff: noqa: PLC0415 (a peer is imported where it is used: a peer that is missing, or slow to import, costs nothing)

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import extension
from benchmarks.call import Call, Launch, Table, Tensors, per_feature

Peer = Callable[[Call, Sequence[Tensors]], "list[Launch] | str"]
Rotated = tuple[torch.Tensor, ...]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

MAX_HEAD_DIM = 256  # the kernels of flash-attention and flash-linear-attention assert this limit


def private_copy(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a new code object: compilers keep caches and recompile limits for each code object."""
    if not isinstance(run, types.FunctionType):
        raise TypeError(f"only a plain function can be copied, got {run!r}")
    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)


def _with_tables(
    run: Callable[..., Any], sets: Sequence[Tensors], make: Callable[[Table], Sequence[torch.Tensor]]
) -> list[Launch]:
    """A launch for each set: ``run`` with the set and with the tensors that ``make`` derives from its table, once a table."""
    tables = {id(t.table): t.table for t in sets}
    made = {key: make(table) for key, table in tables.items()}
    return [functools.partial(run, t, *made[id(t.table)]) for t in sets]


# PyTorch --------------------------------------------------------------------------------------------------------------


def halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """Rotate pairs (j, j + R / 2) of all R features of x, or back if ``sign`` is -1; cos and sin broadcast over x."""
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.add(x * cos, torch.cat((-second, first), dim=-1) * sin, alpha=sign)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """As ``halves`` for pairs (2 j, 2 j + 1)."""
    exchanged = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return torch.add(x * cos, exchanged * sin, alpha=sign)


ROTATIONS: dict[bool, Rotate] = {False: halves, True: interleaved}


def from_angles(rotate: Rotate) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """TransformerEngine's formula, as a new function each time: compilers keep a cache for each function.

    It takes cosine and sine of float32 angles ``[..., R]``, casts them to the type of x, rotates the first R features,
    and appends the other features.
    """

    def run(x: torch.Tensor, angles: torch.Tensor, sign: float) -> torch.Tensor:
        cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)
        width = angles.shape[-1]
        return torch.cat((rotate(x[..., :width], cos, sin, sign), x[..., width:]), dim=-1)

    return run


def _sign(call: Call) -> float:
    return -1.0 if call.direction == "backward" else 1.0


def _wide(call: Call, table: Table) -> Rotated:
    """The tables of a formula, with one entry for each feature: angles, or cosines and sines in the type of x."""
    if call.formula == "TransformerEngine":
        return (per_feature(call, table.freqs),)
    others = (call.head_dim - call.rotary_dim) // 2 if call.rotated == "proportional" else 0
    padded = torch.nn.functional.pad(table.cos, (0, others), value=1.0), torch.nn.functional.pad(table.sin, (0, others))
    return tuple(per_feature(call, x).to(call.dtype) for x in padded)


def _chosen(call: Call, table: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The table's row for each token, to broadcast over heads: [B, S, 1, R], [S, 1, R], [S, 1, 1, R] or [T, 1, R]."""
    rows = table if ids is None else table[ids]
    return rows[:, None, None] if call.layout == "sbhd" else rows.unsqueeze(-2)


def _ids(call: Call, t: Tensors) -> torch.Tensor | None:
    if call.layout == "thd":
        return t.ids
    return None if call.positions == "implicit" else t.ids.view(call.batch, call.seq)


def _span(x: torch.Tensor, width: int, *, last: bool) -> torch.Tensor:
    return x[..., x.shape[-1] - width :] if last else x[..., :width]


def _joined(call: Call, t: Tensors) -> Rotated:
    """Query and key; as one tensor if they are views of a packed qkv."""
    return t.rotated if t.qkv is None else (t.qkv[:, : call.heads + call.key_heads],)


def _formula(call: Call, rotated: Rotated, ids: torch.Tensor | None, *tables: torch.Tensor) -> Rotated:
    """``x * cos + rotate_half(x) * sin`` with the rows chosen first, as written in transformers or in TransformerEngine."""
    rows = [_chosen(call, table, ids) for table in tables]
    rotate, last, width = ROTATIONS[call.interleaved], call.rotated == "last", rows[0].shape[-1]
    out = []
    for x in rotated:
        span = _span(x, width, last=last)
        if call.formula == "TransformerEngine":
            turned = from_angles(rotate)(span if call.inplace else x, rows[0], _sign(call))
        else:
            turned = rotate(span, rows[0], rows[1], _sign(call))
        if call.inplace:
            span.copy_(turned)
        elif turned.shape[-1] < call.head_dim:
            tail = _span(x, call.head_dim - width, last=not last)
            turned = torch.cat((tail, turned) if last else (turned, tail), dim=-1)
        out.append(x if call.inplace else turned)
    return tuple(out)


def _by_formula(run: Callable[..., Rotated], call: Call, sets: Sequence[Tensors]) -> list[Launch]:
    def launch(t: Tensors, *tables: torch.Tensor) -> Rotated:
        out = run(_joined(call, t), _ids(call, t), *tables)
        return t.rotated if call.inplace else out

    return _with_tables(launch, sets, functools.partial(_wide, call))


def eager(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """The formula, one PyTorch operation after another."""
    return _by_formula(functools.partial(_formula, call), call, sets)


@functools.cache
def _compiled(call: Call, *, any_length: bool) -> Callable[..., Rotated]:
    def rotate(rotated: Rotated, ids: torch.Tensor | None, *tables: torch.Tensor) -> Rotated:
        return _formula(call, rotated, ids, *tables)

    dynamic = None if any_length else False  # None: sizes that have changed between calls are dynamic
    return torch.compile(private_copy(rotate), fullgraph=True, dynamic=dynamic)


def compiled(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """The formula in one ``torch.compile``, for this shape; for packed tokens as in serving, for any number of tokens."""
    same = dataclasses.replace(call, angles="freqs pair")  # the tables do not depend on the angles that our call gets
    serving = call.layout == "thd" and call.formula == "transformers"
    if serving:
        same = dataclasses.replace(same, seq=1, sequences=1, rows=1, positions="counted")
    return _by_formula(_compiled(same, any_length=serving), call, sets)


def scripted(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """TransformerEngine's formula through ``torch.jit.script``; only the angles of packed tokens are gathered outside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, but users still have it
        run = torch.jit.script(from_angles(ROTATIONS[call.interleaved]))

    def launch(t: Tensors, angles: torch.Tensor) -> Rotated:
        return (run(t.rotated[0], _chosen(call, angles, _ids(call, t)), _sign(call)),)

    return _with_tables(launch, sets, functools.partial(_wide, call))


# Other projects -------------------------------------------------------------------------------------------------------


def flash_attention(angles: torch.dtype, call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """flash-attention's Triton kernel: one launch if query and key are views of a packed qkv, else one for each."""
    if call.gradient:
        from flash_attn.layers.rotary import apply_rotary_emb as apply
    else:
        from flash_attn.ops.triton.rotary import apply_rotary as apply
    keywords: dict[str, Any] = {"inplace": call.inplace, "interleaved": call.interleaved}
    if call.direction == "backward":
        keywords |= {"conjugate": True}

    def turned(x: torch.Tensor, t: Tensors, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if call.positions == "random":  # each token is a sequence of one token with its own offset
            return apply(x[:, None], cos, sin, t.ids, **keywords)[:, 0]
        if t.cu_seqlens is not None:
            return apply(x, cos, sin, cu_seqlens=t.cu_seqlens, max_seqlen=call.longest, **keywords)
        if call.layout == "thd":
            return apply(x[None], cos, sin, **keywords)[0]
        if call.layout == "sbhd":  # the kernel knows only bshd
            return apply(x.transpose(0, 1), cos, sin, **keywords).transpose(0, 1)
        return apply(x, cos, sin, **keywords)

    def launch(t: Tensors, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
        last = call.rotated == "last"
        views = [_span(x, call.rotary_dim, last=True) if last else x for x in _joined(call, t)]
        out = tuple(turned(x, t, cos, sin) for x in views)
        return t.rotated if call.inplace else out

    return _with_tables(launch, sets, lambda table: (table.cos.to(angles), table.sin.to(angles)))


def _feature_freqs(call: Call, table: Table) -> Rotated:
    return (per_feature(call, table.freqs)[:, None, None],)


def transformer_engine(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """TransformerEngine's fused CUDA kernel, for query and key in turn."""
    from transformer_engine.pytorch.attention.rope import FusedRoPEFunc, apply_rotary_pos_emb

    keywords = {"tensor_format": call.layout, "interleaved": call.interleaved}

    def forward(t: Tensors, freqs: torch.Tensor) -> Rotated:
        return tuple(apply_rotary_pos_emb(x, freqs, **keywords, fused=True, cu_seqlens=t.cu_seqlens) for x in t.rotated)

    def backward(t: Tensors, freqs: torch.Tensor) -> Rotated:
        # The context that autograd would hand to their function, so that the backward kernel is timed alone.
        context = types.SimpleNamespace(saved_tensors=(freqs, t.cu_seqlens, None), **keywords, cp_size=1, cp_rank=0)
        return tuple(FusedRoPEFunc.backward(context, x)[0] for x in t.rotated)

    run = forward if call.direction == "forward" else backward
    return _with_tables(run, sets, functools.partial(_feature_freqs, call))


def transformer_engine_qkv(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """TransformerEngine's fused kernel for a qkv packed by groups of heads; it writes new query, key and value tensors."""
    from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

    shape = (call.tokens, 1) if call.positions == "random" else (1, call.tokens)  # batch, sequence
    split = [call.heads // call.key_heads * call.head_dim, call.head_dim, call.head_dim]

    def grouped(t: Tensors) -> Tensors:
        assert t.qkv is not None
        parts = t.qkv.split((call.heads, call.key_heads, call.key_heads), dim=1)
        qkv = torch.cat([part.reshape(*shape, call.key_heads, -1) for part in parts], dim=-1)
        return dataclasses.replace(t, qkv=qkv, ids=t.ids.int())

    def launch(t: Tensors, freqs: torch.Tensor) -> Rotated:
        starts = t.ids if call.positions == "random" else None
        query, key, _value = apply_fused_qkv_rotary_pos_emb(t.qkv, freqs, freqs, split, "bshd", starts)
        return query.flatten(0, 1), key.flatten(0, 1)

    return _with_tables(launch, [grouped(t) for t in sets], functools.partial(_feature_freqs, call))


def liger(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Liger-Kernel: query and key in one Triton kernel, in place."""
    from liger_kernel.ops.rope import LigerRopeFunction

    def launch(t: Tensors) -> Rotated:
        query, key = (x.transpose(1, 2) for x in t.rotated)
        LigerRopeFunction.apply(query, key, t.table.cos[None], t.table.sin[None], None, 1, call.rotary_dim)
        return t.rotated

    return [functools.partial(launch, t) for t in sets]


def flash_linear_attention(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """flash-linear-attention: Triton, autotuned over warps and stages, angles of the type of x."""
    from fla.modules.rotary.ops import rotary_embedding_fwdbwd as run

    def launch(t: Tensors, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
        return (run(t.rotated[0], cos, sin, interleaved=call.interleaved, conjugate=call.direction == "backward"),)

    return _with_tables(launch, sets, lambda table: (table.cos.to(call.dtype), table.sin.to(call.dtype)))


def quack(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Quack: CuTe DSL, with flash-attention's interface."""
    from quack.rotary import apply_rotary_emb as run

    def launch(t: Tensors) -> Rotated:
        cos, sin = t.table.cos, t.table.sin
        return (run(t.rotated[0], cos, sin, interleaved=call.interleaved, inplace=call.inplace),)

    return [functools.partial(launch, t) for t in sets]


def _by_cache(
    run: Callable[..., object], call: Call, sets: Sequence[Tensors], dtype: torch.dtype
) -> list[Launch] | str:
    """Query and key in one kernel, in place; each token's id chooses a row of cosines and sines."""

    def launch(t: Tensors, cache: torch.Tensor) -> Rotated:
        query, key = (x.flatten(-2).flatten(0, -2) for x in t.rotated)  # views [tokens, heads * D], as serving calls it
        run(t.ids, query, key, call.head_dim, cache, not call.interleaved)
        return t.rotated

    if not (call.inplace and call.key_heads) or call.rotated != "first":
        return "it rotates the first features of a query and a key together, in place"
    return _with_tables(launch, sets, lambda table: (table.cache.to(dtype),))


def flashinfer(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """FlashInfer's kernel; the cache is float32."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    return _by_cache(apply_rope_with_cos_sin_cache_inplace, call, sets, torch.float32)


def vllm(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """The kernel of vLLM; vLLM's layer keeps the cache in the type of the query."""
    return _by_cache(importlib.import_module("vllm._custom_ops").rotary_embedding, call, sets, call.dtype)


def cpp_extension(call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """A plain C++ extension with a CUDA kernel, for the host's time of such a call."""
    run = extension.load()

    def launch(t: Tensors) -> Launch:
        rotated, cos, sin = t.rotated, t.table.cos, t.table.sin
        if not call.inplace:
            return lambda: (run.rope(rotated[0], cos, sin),)
        both = list(rotated)

        def in_place() -> Rotated:
            run.rope_inplace(both, cos, sin)
            return rotated

        return in_place

    return extension.refuses(call) or [launch(t) for t in sets]


def add(_call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """``torch.add``, which is no RoPE, for the cost of any call."""
    return [
        functools.partial(lambda x, other: (torch.add(x, other),), t.rotated[0], torch.randn_like(t.rotated[0]))
        for t in sets
    ]


PEERS: dict[str, Peer] = {
    "eager PyTorch": eager,
    "torch.jit.script": scripted,
    "torch.compile": compiled,
    "flash-attention": functools.partial(flash_attention, torch.float32),
    "flash-attention bf16 angles": functools.partial(flash_attention, torch.bfloat16),
    "TransformerEngine": transformer_engine,
    "TransformerEngine fused qkv": transformer_engine_qkv,
    "Liger-Kernel": liger,
    "flash-linear-attention": flash_linear_attention,
    "FlashInfer": flashinfer,
    "vLLM": vllm,
    "quack": quack,
    "C++ extension": cpp_extension,
    "torch.add": add,
}
Limit = tuple[Callable[[Call], bool], str]  # whether a call is beyond the limit; the reason, formatted with the call
TOO_WIDE: Limit = (
    lambda call: call.head_dim > MAX_HEAD_DIM,
    f"head_dim {{call.head_dim}} is above the {MAX_HEAD_DIM} that it offers",
)
ONE_TENSOR: Limit = (
    lambda call: (call.layout, call.key_heads, call.positions, call.rotated) != ("bshd", 0, "implicit", "first"),
    "timed on one bshd tensor, its first features, by place",
)
FLASH: tuple[Limit, ...] = (
    (
        lambda call: call.rotated == "proportional" or (call.rotated == "last" and not call.inplace),
        "it rotates the first features; a view of the last in place",
    ),
    TOO_WIDE,
)
# Calls that a peer is not asked for, installed or not; the first limit that holds gives the reason.
LIMITS: dict[str, tuple[Limit, ...]] = {
    "torch.jit.script": (
        (lambda call: call.inplace, "a copy after the formula: no faster than out of place, where it is timed"),
        (lambda call: call.formula != "TransformerEngine", "timed on one tensor by place"),
    ),
    "flash-attention": FLASH,
    "flash-attention bf16 angles": FLASH,
    "TransformerEngine": (
        (lambda call: call.inplace, "it always allocates its output"),
        (lambda call: call.rotated != "first", "it rotates the first features of each head"),
        (lambda call: call.positions == "random", "it counts positions itself"),
    ),
    "TransformerEngine fused qkv": ((lambda call: not call.packed, "it takes a packed query, key and value"),),
    "Liger-Kernel": (
        (
            lambda call: (
                not (call.inplace and call.key_heads and call.layout == "bshd" and call.positions == "implicit")
            ),
            "it rotates a query and a key together, bshd in place",
        ),
        (
            lambda call: call.interleaved or call.rotated != "first",
            "it rotates the first features of each head, by halves",
        ),
    ),
    "flash-linear-attention": (
        TOO_WIDE,
        (lambda call: call.inplace, "timed out of place, where it needs no copies"),
        ONE_TENSOR,
    ),
    "quack": ((lambda call: call.direction == "backward", "timed forward"), ONE_TENSOR),
    "C++ extension": ((lambda call: call.gradient, "it has no gradient"),),
}
PACKAGES = {  # import name to distribution
    "flash_attn": "flash-attn",
    "transformer_engine": "transformer-engine",
    "liger_kernel": "liger-kernel",
    "fla": "fla-core",
    "flashinfer": "flashinfer-python",
    "vllm": "vllm",
    "quack": "quack-kernels",
}
IMPORTED_AS = {  # peer to import name
    "flash-attention": "flash_attn",
    "TransformerEngine": "transformer_engine",
    "Liger-Kernel": "liger_kernel",
    "flash-linear-attention": "fla",
    "FlashInfer": "flashinfer",
    "vLLM": "vllm",
    "quack": "quack",
}


def launches(name: str, call: Call, sets: Sequence[Tensors]) -> list[Launch] | str:
    """One launch for each set, or the reason why there is none: the call, or a package that cannot be imported."""
    for beyond, reason in LIMITS.get(name, ()):
        if beyond(call):
            return reason.format(call=call)
    try:
        return PEERS[name](call, sets)
    except ImportError as error:
        return f"not installed: {error}"
