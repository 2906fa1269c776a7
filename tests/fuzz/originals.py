"""What the drop-ins and the GRU's modules replace: PyTorch's operators and modules, called with the same arguments."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

import tuned.nn
from tests.fuzz import appended, formula


def gru(
    input: torch.Tensor,  # noqa: A002
    hx: torch.Tensor,
    weights: Any,
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    batch_first: bool = False,
    batch_sizes: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    resets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.gru; sequences of cu_seqlens run one by one, and step by step where states are reset."""
    del max_seqlen
    dropout = dropout if training else 0.0
    training = training or any(t.requires_grad for t in (input, hx, *weights))  # cuDNN has a gradient only in training
    rest = (list(weights), bias, num_layers, dropout, training, bidirectional)
    hx = hx.contiguous()
    if resets is not None:
        alone = (list(weights), bias, training, bidirectional)
        if cu_seqlens is None and batch_sizes is None:
            turned = (input.transpose(0, 1), resets.t()) if batch_first else (input, resets)
            whole, state = _reset(*turned, hx, *alone)
            return whole.transpose(0, 1) if batch_first else whole, state
        return _reset_each(input, resets, hx, alone, _places(batch_sizes, cu_seqlens))
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        outs, states = [], []
        for b, (start, end) in enumerate(itertools.pairwise(bounds)):
            state = hx[:, b : b + 1].contiguous()
            out, state = torch.gru(input[start:end, None], state, *rest, False) if end > start else (None, state)
            outs += [] if out is None else [out[:, 0]]
            states.append(state)
        if not outs:
            return _no_token(input, hx, list(weights), bias, training, bidirectional)
        # The state of an empty sequence stays as it was; under autocast the other states have another dtype.
        return torch.cat(outs), torch.cat([state.to(outs[0].dtype) for state in states], 1)
    if batch_sizes is not None:
        return torch.gru(input, batch_sizes, hx, *rest)
    return torch.gru(input, hx, *rest, batch_first)


def _places(batch_sizes: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> list[list[int]]:
    """For each sequence, the rows of its tokens in order."""
    if cu_seqlens is not None:
        return [list(range(*bounds)) for bounds in itertools.pairwise(cu_seqlens.tolist())]
    assert batch_sizes is not None
    starts = (batch_sizes.cumsum(0) - batch_sizes).tolist()
    alive = batch_sizes.tolist()
    return [[starts[t] + b for t in range(len(alive)) if b < alive[t]] for b in range(alive[0])]


def _reset_each(
    input: torch.Tensor,  # noqa: A002
    resets: torch.Tensor,
    hx: torch.Tensor,
    rest: tuple[Any, ...],
    places: list[list[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    found = [_reset(input[p][:, None], resets[p][:, None], hx[:, b : b + 1], *rest) for b, p in enumerate(places) if p]
    done = iter(found)
    states = [next(done)[1] if p else hx[:, b : b + 1] for b, p in enumerate(places)]
    if not found:
        return _no_token(input, hx, *rest)
    outs = torch.cat([out[:, 0] for out, _ in found])
    order = torch.tensor([row for p in places for row in p], device=outs.device).argsort()
    return outs[order], torch.cat([state.to(outs.dtype) for state in states], 1)


def _no_token(
    input: torch.Tensor,  # noqa: A002
    hx: torch.Tensor,
    weights: list[torch.Tensor],
    bias: bool,
    training: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An output without rows, and the states as they were, in the dtypes that one token would give."""
    layers, zeros = len(hx) // (2 if bidirectional else 1), hx.new_zeros((len(hx), 1, hx.shape[2]))
    out, state = torch.gru(
        input.new_zeros((1, 1, input.shape[1])), zeros, weights, bias, layers, 0.0, training, bidirectional, False
    )
    return out[0, :0], hx.to(state.dtype, copy=True)


def _reset(
    x: torch.Tensor,
    resets: torch.Tensor,
    hx: torch.Tensor,
    weights: list[torch.Tensor],
    bias: bool,
    training: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.gru on ``[T, B, I]`` with marks ``[T, B]``, one step after another, each with its proper state."""
    each, directions = 4 if bias else 2, 2 if bidirectional else 1
    states: list[torch.Tensor] = []
    outs: list[torch.Tensor] = []
    for cell in range(len(hx)):
        if cell % directions == 0:
            given, outs = torch.cat(outs, -1) if outs else x, []
        backward, state, rows = cell % directions == 1, hx[cell : cell + 1].contiguous(), {}
        own = weights[cell * each : (cell + 1) * each]
        for t in reversed(range(len(x))) if backward else range(len(x)):
            mark = t + 1 if backward else t
            if mark < len(x):
                state = torch.where(resets[mark][None, :, None], torch.zeros_like(state), state)
            rows[t], state = torch.gru(given[t : t + 1].contiguous(), state, own, bias, 1, 0.0, training, False, False)
        outs.append(torch.cat([rows[t] for t in range(len(x))]))
        states.append(state)
    return torch.cat(outs, -1), torch.cat(states)


def gru_cell(
    x: Any,
    h: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias_ih: Any = None,
    bias_hh: Any = None,
    *,
    inplace: bool = False,
    resets: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch.gru_cell of the concatenated segments."""
    del inplace
    h = h if resets is None else torch.where(resets[:, None], torch.zeros_like(h), h)
    return torch.gru_cell(torch.cat(x, -1) if isinstance(x, tuple) else x, h, weight_ih, weight_hh, bias_ih, bias_hh)


def linear_cat(inputs: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    """torch's linear of the concatenated segments."""
    return torch.nn.functional.linear(torch.cat(tuple(inputs), -1), weight, bias)


# Modules ------------------------------------------------------------------------------------------------------------


def _parametrised(module: torch.nn.Module, weights: Any, *, chunk: bool) -> Any:
    """The module with these parameters: the tensors themselves, or copied into the module's."""
    names = [name for name, _ in module.named_parameters()]
    for name, weight in zip(names, weights, strict=True):
        if chunk:
            with torch.no_grad():
                getattr(module, name).copy_(weight)
        else:
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=weight.requires_grad))
    return module


def _called(kind: str, module: Any, given: Any) -> Any:
    if kind == "replace":
        tuned.nn.replace(module)
    with tuned.nn.patched() if kind == "patched" else contextlib.nullcontext():
        return module(*given)


def _made(name: str, kind: str, constructor: dict[str, Any], weights: Any, chunk: bool) -> Any:
    library = tuned.nn if kind == "nn" else torch.nn
    where = weights[0]
    module = getattr(library, name)(**constructor, device=where.device if chunk else "meta", dtype=where.dtype)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return _parametrised(module, weights, chunk=chunk).train(constructor_trains(weights))


def constructor_trains(weights: Any) -> bool:
    return any(w.requires_grad for w in weights)


def nn_gru(
    kind: str,
    constructor: dict[str, Any],
    weights: Any,
    input: Any,  # noqa: A002
    hx: Any = None,
    batch_sizes: Any = None,
    order: Any = None,
    *,
    chunk: bool = True,
) -> Any:
    """Calls a GRU module: tuned.nn's ("nn"), torch's after "patched" or "replace", or torch's ("torch")."""
    module = _made("GRU", kind, constructor, weights, chunk)
    if isinstance(input, torch.Tensor) and input.requires_grad:
        module.train()
    if batch_sizes is not None:
        unsorted = None if order is None else torch.argsort(order)
        input = PackedSequence(input, batch_sizes, order, unsorted)  # noqa: A001
    out, h_n = _called(kind, module, (input,) if hx is None else (input, hx))
    return (out.data if isinstance(out, PackedSequence) else out), h_n


def nn_gru_cell(
    kind: str,
    constructor: dict[str, Any],
    weights: Any,
    input: Any,  # noqa: A002
    hx: Any = None,
    *,
    chunk: bool = True,
) -> Any:
    """A GRUCell module called; see nn_gru."""
    module = _made("GRUCell", kind, constructor, weights, chunk)
    return _called(kind, module, (input,) if hx is None else (input, hx))


def original_nn_gru(kind: str, *args: Any, **kwargs: Any) -> Any:
    """torch.nn.GRU with the arguments of nn_gru."""
    del kind
    return nn_gru("torch", *args, **kwargs)


def original_nn_gru_cell(kind: str, *args: Any, input: Any, **kwargs: Any) -> Any:  # noqa: A002
    """torch.nn.GRUCell with the arguments of nn_gru_cell; segments are concatenated."""
    del kind
    return nn_gru_cell("torch", *args, input=torch.cat(input, -1) if isinstance(input, tuple) else input, **kwargs)


# Arguments ------------------------------------------------------------------------------------------------------------


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    norm: str = "head",
    zero_centered: bool = False,
    rounding: str = "once",
    tensor_format: str = "bshd",
    interleaved: bool = False,
    inplace: bool = False,
    rotated: str = "first",
    conjugate: bool = False,
    angle_entries: str = "pair",
    offset: int = 0,
    sections: tuple[int, ...] = (),
    interleaved_sections: bool = False,
    **tensors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm as models write it, then the rotation by its definition; tokens of no sequence are copied."""
    first = tensor_format == "bhsd"
    call = formula.Rope(
        "bshd" if first else tensor_format, interleaved, angle_entries, rotated, conjugate, offset=offset,
        sections=sections, in_turn=interleaved_sections,
    )  # fmt: skip
    held = formula.held(tensors)  # tokens outside have no angle; NaN would spread to gradients
    if "cu_seqlens" in tensors:
        tensors["cu_seqlens"] = tensors["cu_seqlens"] - held.start
    found: list[torch.Tensor | None] = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is None or weight is None:
            found.append(None)
            continue
        own = x.transpose(1, 2) if first else x[held]
        wide = own.to(torch.promote_types(x.dtype, torch.float32))
        whole = wide.flatten(-2) if norm == "all" else wide
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + eps)
        if rounding == "each":
            normed = normed.to(x.dtype).to(wide.dtype)
        normed = normed * (weight.to(wide.dtype) + (1.0 if zero_centered else 0.0))
        if rounding != "once":
            normed = normed.to(x.dtype)
        out = formula.rope(call, normed.reshape(own.shape).double(), tensors)[0].to(x.dtype)
        if "cu_seqlens" in tensors:
            out = torch.cat((x[: held.start], out, x[held.stop :]))
        out = out.transpose(1, 2) if first else out
        leaf = x.is_leaf and x.requires_grad  # in the float64 reference, whose tensors are no views
        found.append(x.copy_(out) if inplace and not leaf else out)
    return found[0], found[1]  # type: ignore[return-value]


def mla_kv_rope(
    kv: torch.Tensor, k_pe: torch.Tensor, *, k_dim: int, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and the value as models write them: the shared head, rotated by definition and repeated, after kv's."""
    shared = rope_apart(k_pe, **others).expand(*kv.shape[:-1], -1)
    return torch.cat((kv[..., :k_dim], shared), -1), kv[..., k_dim:]


def rope_apart(
    x: torch.Tensor,
    *,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    deinterleave: bool = False,
    inplace: bool = False,
    rotated: str = "first",
    conjugate: bool = False,
    angle_entries: str = "pair",
    offset: int = 0,
    sections: tuple[int, ...] = (),
    interleaved_sections: bool = False,
    **tensors: torch.Tensor,
) -> torch.Tensor:
    """The rotation by definition, after putting pairs apart; pairs of tokens of no sequence are put apart too."""
    call = formula.Rope(
        tensor_format, interleaved, angle_entries, rotated, conjugate, offset=offset, sections=sections,
        in_turn=interleaved_sections,
    )  # fmt: skip
    entries = next(tensors[n] for n in ("cos", "freqs", "inv_freq") if n in tensors).shape[-1]
    rotary = entries if angle_entries == "feature" else 2 * entries
    begin = x.shape[-1] - rotary if rotated == "last" else 0
    own = x
    if deinterleave:
        turned = x[..., begin : begin + rotary]
        own = torch.cat((x[..., :begin], turned[..., ::2], turned[..., 1::2], x[..., begin + rotary :]), -1)
    held = formula.held(tensors)  # tokens outside have no angle; NaN would spread to gradients
    if "cu_seqlens" in tensors:
        tensors["cu_seqlens"] = tensors["cu_seqlens"] - held.start
    out = formula.rope(call, own[held].double(), tensors)[0].to(x.dtype)
    if "cu_seqlens" in tensors:
        out = torch.cat((own[: held.start], out, own[held.stop :]))
    return _overwritten(x, out) if inplace else out


def of_views(qkv: torch.Tensor, *, heads: int, key_heads: int, inplace: bool = False, **others: Any) -> Any:
    """qk_norm_rope of parts of one tensor."""
    axis = 1 if others.get("tensor_format") == "bhsd" else -2
    q, k, rest = qkv.split((heads, key_heads, qkv.shape[axis] - heads - key_heads), axis)
    out = qk_norm_rope(q, k, **others)
    return _overwritten(qkv, torch.cat((*out, rest), axis)) if inplace else out  # type: ignore[arg-type]


def qkv_norm_rope_(qkv: torch.Tensor, *, kv_heads: int | None = None, **others: Any) -> torch.Tensor:
    """qk_norm_rope of a packed qkv in place."""
    whole = qkv if kv_heads else qkv.flatten(-3, -2)
    keys = kv_heads or qkv.shape[-2]
    q, k, v = whole.split((whole.shape[-2] - 2 * keys, keys, keys), -2)
    out = torch.cat((*qk_norm_rope(q, k, **others), v), -2)  # type: ignore[arg-type]
    return _overwritten(qkv, out.view(qkv.shape))


def rope_append_(**arguments: Any) -> tuple[torch.Tensor, ...]:
    """A rotation, with a norm before it if weights are given; then a loop over the tokens that have a place."""
    return appended.called(_append, **arguments)


def _append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_layout: str = "NHD",
    key_inplace: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    begin, end, _ = formula.held(others).indices(len(q))
    if q_weight is None:
        turned = _turned(q, **others), _turned(k, **others)
    else:
        turned = qk_norm_rope(q, k, q_weight, k_weight, tensor_format="thd", **others)  # type: ignore[assignment]
    caches = [t if cache_layout == "NHD" else t.transpose(1, 2) for t in (key_cache, value_cache)]
    pages, page_size = caches[0].shape[:2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if begin <= token < end and 0 <= slot < pages * page_size:
            for cache, rows in zip(caches, (turned[1], v), strict=True):
                cache[slot // page_size, slot % page_size] = rows[token]
    q.copy_(turned[0])
    if key_inplace:
        k.copy_(turned[1])
    return q


def _turned(x: torch.Tensor, **others: Any) -> torch.Tensor:
    names = ("freqs", "cos", "sin", "inv_freq", "cu_seqlens", "positions")
    tensors = {n: others.pop(n) for n in names if others.get(n) is not None}
    call = formula.Rope("thd", others.pop("interleaved", False), others.pop("angle_entries", "pair"), **others)
    held = formula.held(tensors)
    if "cu_seqlens" in tensors:
        tensors["cu_seqlens"] = tensors["cu_seqlens"] - held.start
    out = x.clone()
    out[held] = formula.rope(call, x[held].double(), tensors)[0].to(x.dtype)
    return out


def _overwritten(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The tensor, overwritten with a value; in the float64 reference, whose tensors may be leaves, a new tensor."""
    return value if t.is_leaf and t.requires_grad else t.copy_(value)


def swapped(value: Any, made: dict[int, torch.Tensor], *, doubled: bool) -> Any:
    """Arguments whose tensors are replaced by others."""
    if isinstance(value, torch.Tensor):
        return made.get(id(value), value)
    if isinstance(value, dict):
        return {key: swapped(v, made, doubled=doubled) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(swapped(v, made, doubled=doubled) for v in value)
    return value


def size(arguments: dict[str, Any]) -> tuple[Any, int, int]:
    """A bound on what goes into a sigmoid or a sum, by norms of rows; steps times layers; and terms of a sum."""
    weights, given = [], []

    def sort(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            (weights if "weight" in name and value.ndim > 1 else given).append(value.detach().double())
        elif isinstance(value, (tuple, list)):
            for one in value:
                sort(name, one)

    for name, value in arguments.items():
        sort(name, value)
    # A norm's result is about its weight times the root of its features; beside a cache results are like inputs.
    if {"eps", "q_weight", "slot_mapping"} & set(arguments):
        scale = torch.stack([t.abs().amax() for t in given]).amax().clamp(min=1.0) if given else torch.ones(())
        return 4.0 * scale, 1, 16
    if "k_dim" in arguments or "deinterleave" in arguments:  # two products with what is rotated
        scale = torch.stack([t.abs().amax() for t in given]).amax().clamp(min=1.0) if given else torch.ones(())
        return 2.0 * scale, 1, 1
    if not weights or not given:
        return 1.0, 1, 1
    largest = torch.stack([t.abs().amax() for t in given]).amax().clamp(min=1.0)
    norms = torch.stack([w.square().sum(-1).amax() for w in weights]).sum().sqrt()
    x = arguments.get("input")
    steps = max(x.shape[:2]) if isinstance(x, torch.Tensor) and x.ndim > 1 else 1
    layers = (
        arguments.get("num_layers", 1) * 2
        if "constructor" not in arguments
        else 2 * arguments["constructor"].get("num_layers", 1)
    )
    return 1.0 + norms * largest, int(steps) * layers, max(w.shape[-1] for w in weights)
