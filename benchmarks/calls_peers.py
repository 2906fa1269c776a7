"""The peers of complete calls: each turns a call and its sets into one launch a set, or says why it cannot.

A launch returns the query and the key as it leaves them. Each peer is imported from its own public package inside its
function, and gets the angles in the form that it takes, made beforehand.
"""

# ruff: noqa: PLC0415 (a peer is imported where it is used: one that is missing, or slow to import, costs nothing)

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from benchmarks import extension, peers

if TYPE_CHECKING:
    from benchmarks.calls import CompleteCall, Launch, Table, Tensors

    Peer = Callable[[CompleteCall, Sequence[Tensors]], "list[Launch] | str"]
    Pair = tuple[torch.Tensor, torch.Tensor]

HALVES_IN_FRONT = "it rotates the first features of each head, by halves"


def _each_table(sets: Sequence[Tensors], make: Callable[[Table], Pair]) -> list[Pair]:
    """What a peer needs of each set's table, made once a table."""
    made: dict[int, Pair] = {}
    for t in sets:
        if id(t.table) not in made:
            made[id(t.table)] = make(t.table)
    return [made[id(t.table)] for t in sets]


def _wide(call: CompleteCall, table: Table) -> Pair:
    """Cosines and sines as transformers makes them: an entry a feature that a pair spans, of the type of x."""

    def spread(x: torch.Tensor, rest: float) -> torch.Tensor:
        if call.rotated == "proportional":
            others = x.new_full((len(x), (call.head_dim - call.rotary_dim) // 2), rest)
            x = torch.cat((x, others), dim=-1)
        wide = x.repeat_interleave(2, dim=-1) if call.interleaved else torch.cat((x, x), dim=-1)
        return wide.to(call.dtype)

    return spread(table.cos, 1.0), spread(table.sin, 0.0)


def _span(x: torch.Tensor, width: int, *, last: bool) -> torch.Tensor:
    return x[..., x.shape[-1] - width :] if last else x[..., :width]


def _formula(
    call: CompleteCall,
    rotated: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    ids: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """``x * cos + rotate_half(x) * sin``, as transformers writes it, with the row of each token chosen first."""
    last = call.rotated == "last"
    cos, sin = (table if ids is None else table[ids] for table in (cos, sin))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    width = cos.shape[-1]
    out = []
    for x in rotated:
        span = _span(x, width, last=last)
        if call.interleaved:
            other = torch.stack((-span[..., 1::2], span[..., ::2]), dim=-1).flatten(-2)
        else:
            first, second = span.chunk(2, dim=-1)
            other = torch.cat((-second, first), dim=-1)
        turned = span * cos + other * sin
        if call.inplace:
            span.copy_(turned)
            out.append(x)
        elif width == call.head_dim:
            out.append(turned)
        else:
            tail = x[..., : call.head_dim - width] if last else x[..., width:]
            out.append(torch.cat((tail, turned) if last else (turned, tail), dim=-1))
    return tuple(out)


def _joined(call: CompleteCall, t: Tensors) -> tuple[torch.Tensor, ...]:
    """Query and key; as one tensor where they lie side by side."""
    return t.rotated if t.qkv is None else (t.qkv[:, : call.heads + call.key_heads],)


def _by_formula(
    run: Callable[..., tuple[torch.Tensor, ...]], call: CompleteCall, sets: Sequence[Tensors]
) -> list[Launch]:
    tables = _each_table(sets, functools.partial(_wide, call))

    def ids(t: Tensors) -> torch.Tensor | None:
        if call.layout == "thd":
            return t.ids
        return None if call.positions == "implicit" else t.ids.view(call.batch, call.seq)

    def launch(t: Tensors, cos: torch.Tensor, sin: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        out = run(_joined(call, t), cos, sin, ids)
        return t.rotated if call.inplace else out

    return [functools.partial(launch, t, *table, ids(t)) for t, table in zip(sets, tables, strict=True)]


def eager(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """The formula of transformers, one PyTorch operation after another."""
    return _by_formula(functools.partial(_formula, call), call, sets)


@functools.cache
def _compiled(call: CompleteCall) -> Callable[..., tuple[torch.Tensor, ...]]:
    def rotate(
        rotated: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return _formula(call, rotated, cos, sin, ids)

    dynamic = None if call.layout == "thd" else False  # None: what has changed between calls
    return torch.compile(peers.private_copy(rotate), fullgraph=True, dynamic=dynamic)


def compiled(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """The same with query and key in one ``torch.compile``, for this shape; thd as serving has it, for any length."""
    same: CompleteCall = dataclasses.replace(call, angles="freqs pair")  # its tables are the same whatever ours gets
    if call.layout == "thd":
        same = dataclasses.replace(same, seq=1, sequences=1, rows=1, positions="counted")
    return _by_formula(_compiled(same), call, sets)


def flash_attention(angles: torch.dtype, call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Its Triton kernel, once for a query and a key that lie side by side, else for each."""
    if call.rotated == "proportional" or (call.rotated == "last" and not call.inplace):
        return "it rotates the first features; a view of the last in place"
    if call.head_dim > peers.MAX_HEAD_DIM:
        return f"head_dim {call.head_dim} is above the {peers.MAX_HEAD_DIM} that it offers"
    if call.gradient:
        from flash_attn.layers.rotary import apply_rotary_emb as apply
    else:
        from flash_attn.ops.triton.rotary import apply_rotary as apply

    def launch(t: Tensors, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = []
        for x in _joined(call, t):
            view = _span(x, call.rotary_dim, last=True) if call.rotated == "last" else x
            if call.positions == "random":  # each token is a sequence of one, at an offset of its own
                turned = apply(view[:, None], cos, sin, t.ids, inplace=call.inplace, interleaved=call.interleaved)[:, 0]
            elif t.cu_seqlens is not None:
                turned = apply(
                    view, cos, sin, cu_seqlens=t.cu_seqlens, max_seqlen=call.longest,
                    inplace=call.inplace, interleaved=call.interleaved,
                )  # fmt: skip
            elif call.layout == "thd":
                turned = apply(view[None], cos, sin, inplace=call.inplace, interleaved=call.interleaved)[0]
            else:
                turned = apply(view, cos, sin, inplace=call.inplace, interleaved=call.interleaved)
            out.append(turned)
        return t.rotated if call.inplace else tuple(out)

    tables = _each_table(sets, lambda table: (table.cos.to(angles), table.sin.to(angles)))
    return [functools.partial(launch, t, *table) for t, table in zip(sets, tables, strict=True)]


def _feature_freqs(call: CompleteCall, table: Table) -> Pair:
    freqs = table.freqs
    wide = freqs.repeat_interleave(2, dim=-1) if call.interleaved else torch.cat((freqs, freqs), dim=-1)
    return wide[:, None, None], wide[:, None, None]


def transformer_engine(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Its fused kernel, for query and key in turn."""
    if call.inplace:
        return "it always allocates its output"
    if call.rotated != "first":
        return "it rotates the first features of each head"
    if call.positions == "random":
        return "it counts positions itself"
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    def launch(t: Tensors, freqs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            apply_rotary_pos_emb(
                x, freqs, tensor_format=call.layout, interleaved=call.interleaved, fused=True, cu_seqlens=t.cu_seqlens
            )
            for x in t.rotated
        )

    tables = _each_table(sets, functools.partial(_feature_freqs, call))
    return [functools.partial(launch, t, *table) for t, table in zip(sets, tables, strict=True)]


def transformer_engine_qkv(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Its fused kernel for a packed qkv: query, key and value are written anew, from a qkv packed a group at a time."""
    if not call.packed:
        return "it takes a packed query, key and value"
    from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

    shape = (call.tokens, 1) if call.positions == "random" else (1, call.tokens)  # batch, sequence
    split = [call.heads // call.key_heads * call.head_dim, call.head_dim, call.head_dim]

    def grouped(t: Tensors) -> torch.Tensor:
        assert t.qkv is not None
        parts = t.qkv.split((call.heads, call.key_heads, call.key_heads), dim=1)
        return torch.cat([part.reshape(*shape, call.key_heads, -1) for part in parts], dim=-1)

    def launch(
        qkv: torch.Tensor, starts: torch.Tensor | None, freqs: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        query, key, _value = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, split, "bshd", starts)
        return query.flatten(0, 1), key.flatten(0, 1)

    tables = _each_table(sets, functools.partial(_feature_freqs, call))
    starts = [t.ids.int() if call.positions == "random" else None for t in sets]
    return [functools.partial(launch, grouped(t), s, *table) for t, s, table in zip(sets, starts, tables, strict=True)]


def liger(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Query and key in one Triton kernel, in place."""
    if not (call.inplace and call.key_heads) or call.layout != "bshd" or call.positions != "implicit":
        return "it rotates a query and a key together, bshd in place"
    if call.interleaved or call.rotated != "first":
        return HALVES_IN_FRONT
    from liger_kernel.ops.rope import LigerRopeFunction

    def launch(t: Tensors) -> tuple[torch.Tensor, ...]:
        query, key = (x.transpose(1, 2) for x in t.rotated)
        LigerRopeFunction.apply(query, key, t.table.cos[None], t.table.sin[None], None, 1, call.rotary_dim)
        return t.rotated

    return [functools.partial(launch, t) for t in sets]


def _serves(call: CompleteCall) -> str | None:
    if not (call.inplace and call.key_heads) or call.rotated != "first":
        return "it rotates the first features of a query and a key together, in place"
    return None


def _rows(call: CompleteCall, x: torch.Tensor) -> torch.Tensor:
    """View x as [tokens, heads * D], as serving calls it."""
    return x.flatten(1) if call.layout == "thd" else x.flatten(0, 1).flatten(1)


def flashinfer(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Query and key in one kernel, in place, a row of float32 cosines and sines for each token's id."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    def launch(t: Tensors) -> tuple[torch.Tensor, ...]:
        query, key = (_rows(call, x) for x in t.rotated)
        apply_rope_with_cos_sin_cache_inplace(t.ids, query, key, call.head_dim, t.table.cache, not call.interleaved)
        return t.rotated

    return _serves(call) or [functools.partial(launch, t) for t in sets]


def vllm(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """Query and key in one kernel, in place, by each token's id; its layer keeps the cache in the type of the query."""
    ops = importlib.import_module("vllm._custom_ops")

    def launch(t: Tensors, cache: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key = (_rows(call, x) for x in t.rotated)
        ops.rotary_embedding(t.ids, query, key, call.head_dim, cache, not call.interleaved)
        return t.rotated

    def cast(table: Table) -> Pair:
        cache = table.cache.to(call.dtype)
        return cache, cache

    tables = _each_table(sets, cast)
    return _serves(call) or [functools.partial(launch, t, *table) for t, table in zip(sets, tables, strict=True)]


def cpp_extension(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """A plain C++ extension with a CUDA kernel: what such a call costs the host."""
    if call.gradient:
        return "it has no gradient"
    run = extension.load()

    def launch(t: Tensors) -> Launch:
        rotated, cos, sin = t.rotated, t.table.cos, t.table.sin
        if not call.inplace:
            return lambda: (run.rope(rotated[0], cos, sin),)
        both = list(rotated)

        def in_place() -> tuple[torch.Tensor, ...]:
            run.rope_inplace(both, cos, sin)
            return rotated

        return in_place

    return extension.refuses(call) or [launch(t) for t in sets]


def add(call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """``torch.add``, which is no RoPE: what any call costs."""
    del call
    return [
        functools.partial(lambda x, other: (torch.add(x, other),), t.rotated[0], torch.randn_like(t.rotated[0]))
        for t in sets
    ]


PEERS: dict[str, Peer] = {
    "eager PyTorch": eager,
    "torch.compile": compiled,
    "flash-attention": functools.partial(flash_attention, torch.float32),
    "flash-attention bf16 angles": functools.partial(flash_attention, torch.bfloat16),
    "TransformerEngine": transformer_engine,
    "TransformerEngine fused qkv": transformer_engine_qkv,
    "Liger-Kernel": liger,
    "FlashInfer": flashinfer,
    "vLLM": vllm,
    "C++ extension": cpp_extension,
    "torch.add": add,
}


def launches(name: str, call: CompleteCall, sets: Sequence[Tensors]) -> list[Launch] | str:
    """One launch a set, or the reason why there is none: the call, or a package that cannot be imported."""
    try:
        return PEERS[name](call, sets)
    except ImportError as error:
        return f"not installed: {error}"
