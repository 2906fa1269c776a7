"""Calls of a rotation with a norm before it: every norm, rounding, layout and place, over tensors of any strides."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.case import Call, Name
from tests.fuzz.views import View, drawn

if TYPE_CHECKING:
    import random

    from tests.fuzz.draw import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOGETHER = 0.4  # share of queries and keys that are parts of one tensor
ALIKE = 0.8  # share of contiguous queries and keys in calls like a row
MODES = ("plain", "no_grad", "inference", "grad", "stream", "graph")


def divided(rng: random.Random, pairs: int) -> tuple[int, ...]:
    """The pairs of each of two to four axes; in half of the cases three axes, with about a third of the pairs each."""
    if rng.random() < 0.5:
        return pairs - 2 * (pairs // 3), pairs // 3, pairs // 3
    cuts = sorted(rng.randint(0, pairs) for _ in range(rng.choice((1, 2, 3))))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, pairs), strict=True))


def taken_in_turn(sections: tuple[int, ...]) -> bool:
    """Whether three sections can be taken in turn: 0 1 2 0 1 2, as long as sections 1 and 2 have pairs."""
    pairs = sum(sections)
    return 3 * sections[1] <= pairs + 1 and 3 * sections[2] <= pairs


def draw(rng: random.Random, world: World, spec: Any = None) -> Call:  # noqa: PLR0912, PLR0915 - one thing after another
    """A call; like a spec if one is given. For a spec of a norm's gradient, a call that asks for the gradient."""
    mode = world.mode(rng, MODES)
    dtype = rng.choices(DTYPES, (35, 27, 25, 13))[0]
    layout = rng.choice(("bshd", "sbhd", "thd", "bhsd"))
    batch, seq = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 5, 7, 16, 0 if rng.random() < 0.1 else 3))
    heads, key_heads = rng.choice((1, 2, 3, 5, 8)), rng.choice((None, 1, 2, 3))
    head_dim = rng.choice((4, 6, 8, 16, 24, 40, 64, 128))
    rotary = head_dim if rng.random() < 0.6 else 2 * rng.randint(1, head_dim // 2)
    style, source = rng.random() < 0.4, rng.choice(("cos_sin", "freqs", "inv_freq"))
    inplace = rng.random() < 0.4
    if spec is not None:
        dtype, layout = getattr(torch, spec.dtype), spec.layout if rng.random() < 0.5 else layout
        heads, key_heads, head_dim, rotary = spec.heads, spec.key_heads or None, spec.head_dim, spec.rotary_dim
        style, source, inplace = spec.interleaved, spec.angles, spec.inplace
        seq = max(seq, 1)  # no kernel serves a call without tokens
        if spec.direction == "backward":
            mode = "grad"
        elif mode == "grad":
            mode = "no_grad"
    if mode == "grad" and inplace and spec is None:
        inplace = rng.random() < 0.5
    if world.device == "cuda" and dtype == torch.float64 and mode == "graph":
        mode = "no_grad"
    rotated = rng.choice(("first", "first", "last", "proportional"))
    if rotated == "proportional" and (style or head_dim % 2):
        rotated = "last"
    norm = rng.choice(("head", "all")) if spec is None else spec.norm
    tokens = {"sbhd": (seq, batch), "thd": (batch * seq,)}.get(layout, (batch, seq))
    together = key_heads is not None and rng.random() < TOGETHER
    packs = together and inplace and layout != "bhsd" and rng.random() < 0.5
    views: dict[str, View] = {}
    arguments: dict[str, Any] = {}

    def tensor(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype, *, grad: bool = True, **rest: Any) -> None:
        if spec is not None and name in (
            "q",
            "k",
        ):  # kernels take no key whose features lie otherwise than the query's
            rest["plain"] = ALIKE
        asks = mode == "grad" and grad and rng.random() < 0.8
        how = rng.choice(("leaf", "made")) if asks else ""
        if inplace and name in ("q", "k", "qkv"):
            rest["shared"] = False
            how = how and "made"
        views[name] = drawn(rng, shape, kind, grad=how, **rest)
        arguments[name] = Name(name)

    def shape(count: int) -> tuple[int, ...]:
        return (batch, count, seq, head_dim) if layout == "bhsd" else (*tokens, count, head_dim)

    what: dict[str, Any] = {}  # the function, and how it is checked
    if packs and key_heads:
        what = _packed(rng, tensor, views, arguments, tokens, (heads, key_heads, head_dim))
    elif together and key_heads:
        tensor("qkv", shape(heads + key_heads + rng.choice((0, key_heads))))
        arguments |= {"heads": heads, "key_heads": key_heads}
        see = f"qkv[:, :{heads + key_heads}]" if layout == "bhsd" else f"qkv[..., :{heads + key_heads}, :]"
        what = {"function": "tests.fuzz.normed.of_views", "judged": ("of_views",), "named": {"parts": {"qkv": see}}}
    else:
        tensor("q", shape(heads))
        if key_heads:
            tensor("k", shape(key_heads))
        else:
            arguments["k"] = None
    kind = rng.choice((dtype, dtype, torch.float32))
    for name, count in (("q_weight", heads), ("k_weight", key_heads)):
        if count:
            tensor(name, (count * head_dim if norm == "all" else head_dim,), kind)
        else:
            arguments[name] = None
    if mode == "grad" and not any(v.grad for v in views.values()):
        first = "q" if "q" in views else "qkv"
        views[first] = dataclasses.replace(views[first], grad="made")
    # Positions, and angles with rows for them.
    place = rng.choice(("order", "ids", "shifted", "axes"))
    sections = divided(rng, rotary // 2) if place == "axes" else ()
    in_turn = len(sections) == 3 and taken_in_turn(sections) and rng.random() < 0.5
    count = batch * seq if layout == "thd" else seq
    if layout == "thd" and place not in ("ids", "axes"):
        begin, end = (1, count - 1) if count > 2 and rng.random() < 0.3 else (0, count)
        bounds = sorted([begin, *(rng.randint(begin, end) for _ in range(rng.choice((0, 1, 3)))), end])
        views["cu_seqlens"] = world.integers(rng, (len(bounds),), torch.int32, bounds)
        arguments["cu_seqlens"] = Name("cu_seqlens")
    rows = count + 3
    if place == "ids":
        ids = [rng.randrange(rows) for _ in range(math.prod(tokens))]
        views["positions"] = world.integers(rng, tokens, rng.choice((torch.int32, torch.int64)), ids)
        arguments["positions"] = Name("positions")
    elif place == "axes":
        ids = [rng.randrange(rows) for _ in range(len(sections) * math.prod(tokens))]
        shape = (len(sections), *tokens)
        views["positions"] = world.integers(rng, shape, rng.choice((torch.int32, torch.int64)), ids)
        arguments |= {"positions": Name("positions"), "sections": sections}
        if in_turn:
            arguments["interleaved_sections"] = True
    elif place == "shifted":
        arguments["offset"] = rng.choice((1, 3))
    if source == "inv_freq":
        views["inv_freq"] = drawn(rng, (rotary // 2,), torch.float32, function="rates")
        arguments["inv_freq"] = Name("inv_freq")
    elif source == "freqs":
        tensor("freqs", (rows, rotary // 2), torch.float32, grad=False, scale=3.0)
        arguments["angle_entries"] = "pair"
    else:
        for name, function in (("cos", "cos"), ("sin", "sin")):
            tensor(name, (rows, rotary // 2), torch.float32, grad=False, function=function, scale=3.0)
    words = {
        "norm": norm, "zero_centered": rng.random() < 0.3, "rounding": rng.choice(("once", "once", "product", "each")),
        "eps": rng.choice((1e-6, 1e-5, 0.1)), "tensor_format": layout, "interleaved": style, "rotated": rotated,
        "inplace": inplace and not packs, "conjugate": rng.random() < 0.2,
    }  # fmt: skip
    usual = {
        "norm": "head", "rounding": "once", "eps": 1e-6, "tensor_format": "bshd", "rotated": "first",
    }  # fmt: skip
    arguments |= {name: value for name, value in words.items() if value != usual.get(name, False)}
    if mode != "grad":
        views = {name: dataclasses.replace(v, grad="") for name, v in views.items()}
    written = tuple(n for n in ("q", "k", "qkv") if n in views) if inplace else ()
    what = {"function": "tuned.dispatch.qk_norm_rope", "judged": ("qk_norm_rope",)} | what
    return Call(
        views=views, arguments=arguments, check="check_pytorch", mode=mode, written=written,
        truncates=world.truncates and dtype == torch.bfloat16, **what,
    )  # fmt: skip


def _packed(
    rng: random.Random, tensor: Any, views: dict[str, View], arguments: dict[str, Any], tokens: tuple[int, ...],
    sizes: tuple[int, int, int],
) -> dict[str, Any]:  # fmt: skip
    """A packed qkv; sometimes with an axis of 3, if there are as many keys as queries."""
    heads, key_heads, head_dim = sizes
    tensor("qkv", (*tokens, heads + 2 * key_heads, head_dim))
    see = f"qkv[..., :-{key_heads}, :]"
    if heads == key_heads and rng.random() < 0.6:
        *lead, step, feature = views["qkv"].strides
        shape, strides = (*tokens, 3, heads, head_dim), (*lead, heads * step, step, feature)
        views["qkv"] = dataclasses.replace(views["qkv"], shape=shape, strides=strides)
        see = "qkv[..., :2, :, :]"
    else:
        arguments["kv_heads"] = key_heads
    judged = {"judged": ("qkv_norm_rope_",), "named": {"parts": {"qkv": see}}}
    return {"function": "tuned.dispatch.qkv_norm_rope_", **judged}
