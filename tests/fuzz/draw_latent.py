"""Calls of multi-head latent attention: key and value of kv, rotations that put pairs apart; any strides."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.case import Call, Name
from tests.fuzz.draw_norm import ALIKE, DTYPES, MODES, divided, taken_in_turn
from tests.fuzz.views import View, drawn

if TYPE_CHECKING:
    import random

    from tests.fuzz.draw import World


def draw(rng: random.Random, world: World, spec: Any = None) -> Call:  # noqa: PLR0912, PLR0915 - one thing after another
    """A call; like a spec if one is given. For a spec of a gradient, a call that asks for the gradient."""
    mode = world.mode(rng, MODES)
    splits = rng.random() < 0.7
    dtype = rng.choices(DTYPES, (35, 27, 25, 13))[0]
    layout = rng.choice(("bshd", "sbhd", "thd"))
    batch, seq = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 5, 7, 16, 0 if rng.random() < 0.1 else 3))
    heads = rng.choice((1, 2, 3, 5, 8, 17))
    kept, rotary, value = rng.choice((1, 3, 8, 16, 24)), 2 * rng.choice((1, 2, 4, 7, 16)), rng.choice((1, 4, 8, 20))
    style = rng.choice(("half", "interleaved", "apart")) if splits else "apart"
    source, inplace = rng.choice(("cos_sin", "freqs", "inv_freq")), not splits and rng.random() < 0.5
    if spec is not None:
        dtype, layout = getattr(torch, spec.dtype), spec.layout if rng.random() < 0.5 else layout
        splits, inplace, source = spec.splits, spec.inplace, spec.angles
        heads, kept, rotary, value = min(spec.heads, 16), spec.kept_dim, spec.rotary_dim, spec.value_dim
        style = "apart" if spec.deinterleaves else spec.style
        seq = max(seq, 1)  # no kernel serves a call without tokens
        if spec.direction == "backward":
            mode = "grad"
        elif mode == "grad":
            mode = "no_grad"
    if world.device == "cuda" and dtype == torch.float64 and mode == "graph":
        mode = "no_grad"
    tokens = {"sbhd": (seq, batch), "thd": (batch * seq,)}.get(layout, (batch, seq))
    views: dict[str, View] = {}
    arguments: dict[str, Any] = {}

    def tensor(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype, *, grad: bool = True, **rest: Any) -> None:
        if spec is not None and grad:
            rest["plain"] = ALIKE
        how = rng.choice(("leaf", "made")) if mode == "grad" and grad and rng.random() < 0.8 else ""
        if inplace and grad:
            rest["shared"] = False
            how = how and "made"
        views[name] = drawn(rng, shape, kind, grad=how, **rest)
        arguments[name] = Name(name)

    if splits:
        tensor("kv", (*tokens, heads, kept + value))
        tensor("k_pe", (*tokens, 1, rotary))
        arguments["k_dim"] = kept
        first = "kv"
    else:
        tensor("x", (*tokens, heads, kept + rotary))
        first = "x"
    if mode == "grad" and not any(v.grad for v in views.values()):
        views[first] = dataclasses.replace(views[first], grad="made")
    # Positions, and angles with rows for them.
    place = rng.choice(("order", "ids", "shifted", "axes"))
    sections = divided(rng, rotary // 2) if place == "axes" else ()
    count = batch * seq if layout == "thd" else seq
    if layout == "thd" and place not in ("ids", "axes"):
        begin, end = (1, count - 1) if count > 2 and rng.random() < 0.3 else (0, count)
        bounds = sorted([begin, *(rng.randint(begin, end) for _ in range(rng.choice((0, 1, 3)))), end])
        views["cu_seqlens"] = world.integers(rng, (len(bounds),), torch.int32, bounds)
        arguments["cu_seqlens"] = Name("cu_seqlens")
    rows = count + 3
    if place in ("ids", "axes"):
        shape = (len(sections), *tokens) if sections else tokens
        ids = [rng.randrange(rows) for _ in range(math.prod(shape))]
        views["positions"] = world.integers(rng, shape, rng.choice((torch.int32, torch.int64)), ids)
        arguments["positions"] = Name("positions")
    elif place == "shifted":
        arguments["offset"] = rng.choice((1, 3))
    if sections:
        arguments["sections"] = sections
        if len(sections) == 3 and taken_in_turn(sections) and rng.random() < 0.5:
            arguments["interleaved_sections"] = True
    entries = rng.choice(("pair", "pair", "feature"))
    width = rotary if entries == "feature" else rotary // 2
    if source == "inv_freq":
        views["inv_freq"] = drawn(rng, (width,), torch.float32, function="rates")
        arguments["inv_freq"] = Name("inv_freq")
    elif source == "freqs":
        tensor("freqs", (rows, width), torch.float32, grad=False, scale=3.0)
    else:
        for name, function in (("cos", "cos"), ("sin", "sin")):
            tensor(name, (rows, width), torch.float32, grad=False, function=function, scale=3.0)
    arguments["angle_entries"] = entries
    words = {
        "tensor_format": layout, "interleaved": style == "interleaved", "deinterleave": style == "apart",
        "conjugate": rng.random() < 0.2,
    }  # fmt: skip
    if not splits:
        words |= {"inplace": inplace, "rotated": rng.choice(("first", "last")) if spec is None else "last"}
    usual = {"tensor_format": "bshd", "rotated": "first"}
    arguments |= {name: value for name, value in words.items() if value != usual.get(name, False)}
    if mode != "grad":
        views = {name: dataclasses.replace(v, grad="") for name, v in views.items()}
    function = "mla_kv_rope" if splits else "rope"
    return Call(
        function=f"tuned.dispatch.{function}", judged=("mla_kv_rope" if splits else "rope_apart",), views=views,
        arguments=arguments, check="check_pytorch", mode=mode, written=("x",) if inplace else (),
        truncates=world.truncates and dtype == torch.bfloat16,
    )  # fmt: skip
