"""Calls that write a cache: every layout, place and slot, over tensors of any strides. float8 has its own tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.case import Call, Name
from tests.fuzz.views import View, drawn

if TYPE_CHECKING:
    import random

    from tests.fuzz.draw import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALIKE = 0.9  # share of contiguous tensors in calls like a row: kernels take one stride of features for three of them
MODES = ("plain", "no_grad", "inference", "stream", "graph")


def draw(rng: random.Random, world: World, spec: Any = None) -> Call:  # noqa: PLR0912, PLR0915 - one thing after another
    """A call; like a spec if one is given."""
    mode = world.mode(rng, [m for m in MODES if m in world.modes] or ["no_grad"])
    dtype = rng.choices(DTYPES, (35, 27, 25, 13))[0]
    tokens = rng.choice((1, 1, 2, 3, 5, 7, 16, 0 if rng.random() < 0.1 else 3))
    heads, key_heads = rng.choice((1, 2, 3, 5, 8)), rng.choice((1, 2, 3))
    head_dim = rng.choice((4, 6, 8, 16, 24, 40, 64, 128))
    rotary = head_dim if rng.random() < 0.6 else 2 * rng.randint(1, head_dim // 2)
    style, source, normed = rng.random() < 0.4, rng.choice(("cos_sin", "freqs", "inv_freq")), rng.random() < 0.3
    plain: dict[str, float] = {}
    if spec is not None:
        dtype, tokens, plain = getattr(torch, spec.dtype), max(tokens, 1), {"plain": ALIKE}
        heads, key_heads, head_dim, rotary = spec.heads, spec.key_heads, spec.head_dim, spec.rotary_dim
        style, source, normed = spec.interleaved, spec.angles, spec.normed
    if mode == "graph" and dtype == torch.float64:  # PyTorch's operators serve it
        mode = "no_grad"
    rotated = rng.choice(("first", "first", "last", "proportional"))
    if rotated == "proportional" and (style or head_dim % 2):
        rotated = "last"
    layout, key_inplace = rng.choice(("NHD", "HND")), rng.random() < 0.3
    pages, page_size = rng.choice((1, 2, 5)), rng.choice((1, 3, 4, 16))
    views: dict[str, View] = {}
    arguments: dict[str, Any] = {}

    def tensor(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype, **rest: Any) -> None:
        views[name] = drawn(rng, shape, kind, **rest)
        arguments[name] = Name(name)

    written, see = [], {}
    if rng.random() < 0.5:
        tensor("qkv", (tokens, heads + 2 * key_heads, head_dim), shared=False, **plain)
        arguments["heads"] = heads
        written.append("qkv")
        see["qkv"] = f"qkv[:, :{heads + (key_heads if key_inplace else 0)}]"
    else:
        tensor("q", (tokens, heads, head_dim), shared=False, **plain)
        tensor("k", (tokens, key_heads, head_dim), shared=not key_inplace, **plain)
        tensor("v", (tokens, key_heads, head_dim), **plain)
        written.append("q")
    page = (page_size, key_heads) if layout == "NHD" else (key_heads, page_size)
    if rng.random() < 0.4:
        tensor("both", (pages, 2, *page, head_dim), shared=False, **plain)
        written.append("both")
    else:
        for name in ("key_cache", "value_cache"):
            tensor(name, (pages, *page, head_dim), shared=False, **plain)
            written.append(name)
    if key_inplace:
        arguments["key_inplace"] = True
        written += ["k"] if "k" in views else []
    # Each place occurs once; some tokens have no place, and the last may have no slot at all.
    kind, places = rng.choice((torch.int32, torch.int64)), pages * page_size
    count = tokens if rng.random() < 0.7 or spec is not None else rng.randint(0, tokens)
    free = rng.sample(range(places), places)
    slots = [
        free.pop() if free and rng.random() < 0.8 else rng.choice((-1, -7, places, places + 3)) for _ in range(count)
    ]
    views["slot_mapping"] = world.integers(rng, (count,), kind, slots)
    arguments["slot_mapping"] = Name("slot_mapping")
    if normed:
        kind = rng.choice((dtype, torch.float32))
        for name in ("q_weight", "k_weight"):
            tensor(name, (head_dim,), kind)
        arguments |= {"rounding": rng.choice(("once", "product", "each")), "zero_centered": rng.random() < 0.3}
    rows = tokens + 3
    if rng.random() < 0.7:
        ids = [rng.randrange(rows) for _ in range(tokens)]
        views["positions"] = world.integers(rng, (tokens,), rng.choice((torch.int32, torch.int64)), ids)
        arguments["positions"] = Name("positions")
    else:
        begin, end = (1, tokens - 1) if tokens > 2 and rng.random() < 0.3 else (0, tokens)
        bounds = sorted([begin, *(rng.randint(begin, end) for _ in range(rng.choice((0, 1, 3)))), end])
        views["cu_seqlens"] = world.integers(rng, (len(bounds),), torch.int32, bounds)
        arguments["cu_seqlens"] = Name("cu_seqlens")
        if rng.random() < 0.4:
            arguments["offset"] = rng.choice((1, 3))
    if source == "inv_freq":
        tensor("inv_freq", (rotary // 2,), torch.float32, function="rates")
    elif source == "freqs":
        tensor("freqs", (rows, rotary // 2), torch.float32, scale=3.0)
        arguments["angle_entries"] = "pair"
    else:
        for name, function in (("cos", "cos"), ("sin", "sin")):
            tensor(name, (rows, rotary // 2), torch.float32, function=function, scale=3.0)
    words = {"cache_layout": layout, "interleaved": style, "rotated": rotated, "conjugate": rng.random() < 0.2}
    usual = {"cache_layout": "NHD", "rotated": "first"}
    arguments |= {name: value for name, value in words.items() if value != usual.get(name, False)}
    return Call(
        function="tests.fuzz.appended.append", views=views, arguments=arguments, check="check_pytorch",
        judged=("rope_append_",), named={"parts": see} if see else {}, mode=mode, written=tuple(written),
        truncates=world.truncates and dtype == torch.bfloat16,
    )  # fmt: skip
