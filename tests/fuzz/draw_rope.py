"""Calls of RoPE: every function, source of angles, position, layout and place, over tensors of any strides."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.case import Call, Name
from tests.fuzz.draw_norm import divided, taken_in_turn
from tests.fuzz.given import Integer, Part, Rope
from tests.fuzz.views import View, contiguous, dense, drawn

if TYPE_CHECKING:
    import random

    from tests.fuzz.draw import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ODDS = (35, 27, 25, 13)
HEAD_DIMS = (2, 4, 5, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)
FIRST = 0.25  # of calls like a row of [b, s, h, d], how many are of its views as [b, h, s, d]
LEARNED = 0.15  # of calls with gradients, how many have angles that need one
LIKE = 0.5  # of calls like a row, how many have its positions, and its parts that rotate
AXES = 0.25  # of calls with a position a token, how many have one an axis
SOURCES = ("freqs", "cos_sin", "cos_sin_cache", "inv_freq")
REFUSED = (TypeError, ValueError)


@dataclasses.dataclass
class Drawn:
    """Everything about a call but its tensors."""

    function: str
    layout: str
    dtype: torch.dtype
    batch: int
    seq: int
    heads: int
    key_heads: int | None
    kv_heads: int | None  # of rope_qkv; 0: an axis of 3
    head_dim: int
    rotary: int
    source: str
    entries: str
    interleaved: bool
    rotated: str
    inplace: bool


def chosen(rng: random.Random, world: World, spec: Any = None, size: Any = None) -> Drawn:
    """Sizes and other arguments of a call; those of a spec if one is given, with about its size."""
    function = rng.choices(("rope", "rope_qk", "rope_qkv", "rope_backward"), (30, 30, 20, 20))[0]
    layout = rng.choice(("bshd", "sbhd", "thd", "bhsd"))
    dtype = rng.choices(DTYPES, ODDS)[0]
    most = world.most
    batch = rng.choices((1, 2, 3, 5, 0), (45, 25, 15, 12, 3))[0]
    seq = rng.choices((1, 2, 3, 6, 7, 16, 33, 0), (22, 14, 12, 12, 12, 15, 10, 3))[0]
    heads = rng.choice((1, 1, 2, 3, 4, 6, 8, 16))
    key_heads = rng.choice((None, 1, 1, 2, 3, heads, 0 if rng.random() < 0.1 else heads))
    kv_heads = rng.choice((0, 0, 1, 2, heads))
    head_dim = rng.choice(HEAD_DIMS)
    source = rng.choice(SOURCES)
    entries = rng.choice(("feature", "pair"))
    interleaved = rng.random() < 0.5
    inplace = rng.random() < 0.4
    rotary = head_dim - head_dim % 2
    if spec is not None:
        function = "rope_qk" if spec.key_heads else "rope_qkv" if spec.copied_heads else function
        if spec.plain or (not spec.key_heads and not spec.copied_heads):
            function = "rope_backward" if spec.direction == "backward" and not spec.angle_gradient else "rope"
        dtype = getattr(torch, spec.dtype)
        layout, heads, head_dim, rotary = spec.layout, spec.heads, spec.head_dim, spec.rotary_dim
        key_heads, kv_heads = spec.key_heads or None, spec.copied_heads
        if spec.copied_heads:
            heads -= 2 * spec.copied_heads
        source = "cos_sin" if spec.angles == "cos_sin" else spec.angles
        entries, interleaved, inplace = spec.angle_entries, spec.interleaved, spec.inplace
        batch, seq = max(batch, 1) if size is None else min(size.batch, 8), rng.choice((6, 7, 16))
    elif rng.random() < 0.5 and head_dim > 2:
        rotary = rng.choice([n for n in range(2, head_dim + 1, 2) if n % 4 == 0 or n < 8 or n == rotary])
    rotated = (
        "first" if spec is not None and spec.plain else rng.choices(("first", "last", "proportional"), (70, 15, 15))[0]
    )
    if spec is not None and rng.random() < LIKE:
        rotated = spec.rotated
    if rotated == "proportional" and (interleaved or head_dim % 2):
        rotated = "last"
    if function == "rope_backward":
        inplace = False
    if spec is not None and layout == "bshd" and rng.random() < FIRST:
        layout = "bhsd"
    if function == "rope_qkv" and layout == "bhsd":  # it is refused
        layout = "bshd"
    while spec is None and batch * seq * max(heads, 1) * head_dim > most and (seq > 1 or heads > 1):
        seq, heads = (seq // 2, heads) if seq > 1 else (seq, heads // 2)
    if spec is None and function != "rope_qkv" and rng.random() < 0.02:
        heads = 0
    return Drawn(
        function, layout, dtype, batch, seq, heads, key_heads, kv_heads, head_dim, rotary, source, entries,
        interleaved, rotated, inplace,
    )  # fmt: skip


def draw(rng: random.Random, world: World, spec: Any = None, size: Any = None) -> Call:  # noqa: PLR0912, PLR0915 - one thing after another
    """A call that is right, or that is refused because of its values."""
    d = chosen(rng, world, spec, size)
    mode = world.mode(rng, ("plain", "no_grad", "inference", "grad", "autocast", "stream", "graph"))
    if world.device == "cuda" and d.dtype == torch.float64 and mode == "graph":
        mode = "no_grad"
    learns = spec is not None and spec.angle_gradient
    mode = "grad" if learns and "grad" in world.modes else mode
    views: dict[str, View] = {}
    arguments: dict[str, Any] = {}
    call = {"layout": d.layout, "interleaved": d.interleaved, "rotated": d.rotated}
    refusal = ""
    packed = d.layout == "thd"
    # Where tokens are.
    plain = spec is not None and spec.plain
    place = (
        "order"
        if plain
        else rng.choices(("order", "shifted", "offset", "starts", "ids", "shared"), (35, 14, 12, 14, 15, 10))[0]
    )
    if spec is not None and not plain and spec.positions == "order" and rng.random() < LIKE:
        place = "order"
    if packed and place == "shared":
        place = "ids"
    parallel = not plain and "ids" not in place and place != "shared" and rng.random() < 0.2
    cp_size = rng.choice((2, 2, 3, 4)) if parallel else 1
    cp_rank = rng.randrange(cp_size)
    tokens, batch, seq = d.batch * d.seq, d.batch, d.seq
    bounds: list[int] = []
    if parallel and not packed:
        seq += seq % 2
    if packed:
        batch, seq = 1, tokens
        if place != "ids":
            bounds = _bounds(rng, tokens, 2 * cp_size if parallel else 1, cp_size)
            views["cu_seqlens"] = world.integers(rng, (len(bounds),), torch.int32, bounds)
            arguments["cu_seqlens"] = Name("cu_seqlens")
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    sequences = len(bounds) - 1 if bounds else batch
    longest = max(lengths, default=0) if packed and bounds else seq * cp_size
    # How far positions reach, and the number of rows of the table.
    number = 0
    starts: list[int] = []
    if place == "shifted":
        number = rng.choice((1, 2, 5, 16))
    elif place == "offset":
        starts = [rng.randrange(9)]
    elif place == "starts":
        starts = [rng.randrange(9) for _ in range(sequences)]
    reach = longest + number + max(starts, default=0)
    slack = rng.choices((0, 1, 5, -1, -3), (50, 15, 15, 10, 10))[0]
    if d.source == "inv_freq":
        rows = 0
    else:
        rows = max(reach + slack, 0) if "ids" not in place and place != "shared" else rng.choice((1, 7, 40))
    shape = {"sbhd": (seq, batch), "thd": (seq,)}.get(d.layout, (batch, seq))
    sections: tuple[int, ...] = ()
    in_turn = False
    if place in ("ids", "shared"):
        many = shape if place == "ids" else (seq,)
        if rng.random() < AXES and not (spec is not None and spec.positions == "ids"):
            sections = divided(rng, d.rotary // 2)
            in_turn = len(sections) == 3 and taken_in_turn(sections) and rng.random() < 0.5
            many = (len(sections), *many)
            arguments["sections"] = sections
            if in_turn:
                arguments["interleaved_sections"] = True
        top = rows if d.source != "inv_freq" else rng.choice((50, 5000, 100_000))
        ids = [rng.randrange(top) for _ in range(math.prod(many))]
        if ids and d.source != "inv_freq" and rng.random() < 0.08:
            ids[rng.randrange(len(ids))] = rng.choice((-1, rows, rows + 3))
        views["positions"] = world.integers(rng, many, rng.choice((torch.int32, torch.int64)), ids)
        arguments["positions"] = Name("positions")
        starts = ids
    elif place in ("offset", "starts"):
        views["starts"] = world.integers(
            rng, () if place == "offset" else (sequences,), rng.choice((torch.int32, torch.int64)), starts
        )
        arguments["offset"] = Name("starts")
    elif number:
        arguments["offset"] = Integer(number) if rng.random() < 0.1 else number
    # Which of these values the call can see.
    if d.source != "inv_freq":
        if place not in ("ids", "shared") and not packed and number + seq * cp_size > rows:
            refusal = "positions past the table"
        if packed and place not in ("ids", "shared") and rng.random() < 0.4:
            arguments["max_seqlen"] = longest
            refusal = "max_seqlen past the table" if longest + number > rows else ""
        # Without a position nothing is read, wherever it starts. Of packed sequences the lengths tell, below.
        of_ids = place in ("ids", "shared")
        if starts and world.sees_values and (of_ids or (seq and not packed)):
            most = max(starts) + (0 if of_ids else seq * cp_size - 1)
            if min(starts) < 0 or most >= rows:
                refusal = "values past the table"
        if bounds and world.sees_values:
            firsts = itertools.cycle(starts or [number])
            if any(length and first + length > rows for first, length in zip(firsts, lengths, strict=False)):
                refusal = "lengths past the table"
    elif packed and place != "ids" and rng.random() < 0.3:
        arguments["max_seqlen"] = longest
    # Angles.
    width = d.rotary if d.entries == "feature" else d.rotary // 2
    named = _angles(rng, d, views, rows, width, batch if not packed else 0, plain=plain)
    arguments |= {name: Name(name) for name in named}
    if mode == "grad" and (learns or rng.random() < LEARNED):
        views[named[0]] = dataclasses.replace(views[named[0]], grad="leaf")
    if d.entries != ("feature" if d.source == "freqs" else "pair") or rng.random() < 0.2:
        arguments["angle_entries"] = d.entries
    if rng.random() < 0.2:
        arguments["rotary_dim"] = d.rotary
    scaling, conjugate = 1.0, False
    if not plain:
        if d.source in ("freqs", "inv_freq") and rng.random() < 0.2:
            scaling = arguments["attention_scaling"] = rng.choice((0.5, 1.5, 1.25, 2))
        if rng.random() < 0.2:
            conjugate = arguments["conjugate"] = True
    if d.rotated != "first":
        arguments["rotated"] = d.rotated
    if d.layout != "bshd":
        arguments["tensor_format"] = d.layout
    if d.interleaved:
        arguments["interleaved"] = True
    if d.inplace:
        arguments["inplace"] = True
    if parallel:
        arguments |= {"cp_size": cp_size, "cp_rank": cp_rank}
    rope = Rope(
        **call, entries=d.entries, conjugate=conjugate, scaling=float(scaling), cp_size=cp_size, cp_rank=cp_rank,
        offset=number, transposed=d.function == "rope_backward", sections=sections, in_turn=in_turn,
    )  # fmt: skip
    seen = {name: name for name in (*named, "cu_seqlens", "positions", "starts") if name in views}
    tensors, parts, results, refused = _rotated(rng, d, shape, views, rope, seen, mode)
    refusal = refused or refusal
    arguments = {**tensors, **arguments}
    mode = "no_grad" if refusal and mode in ("graph", "stream", "grad") else mode
    if any(v.negative for v in views.values()) and mode == "graph":
        mode = "no_grad"
    if mode != "grad":
        views = {name: dataclasses.replace(v, grad="") for name, v in views.items()}
    written = tuple(dict.fromkeys(p.tensor for p in parts)) if d.inplace else ()
    about: dict[str, Any] = {
        "mode": mode,
        "written": written,
        "autocast": torch.bfloat16 if mode == "autocast" else None,
    }
    path = f"tuned.dispatch.{d.function}"
    if refusal:
        return Call(path, views, arguments, "check_refused", REFUSED, {"text": refusal}, **about)
    if d.inplace and any(views[p.tensor].grad == "leaf" for p in parts):
        return Call(path, views, arguments, "check_refused", (RuntimeError,), {"text": "a leaf"}, **about)
    truncates = world.truncates and d.dtype == torch.bfloat16
    return Call(path, views, arguments, "check_rope", tuple(parts), {"results": results}, truncates=truncates, **about)


def _bounds(rng: random.Random, tokens: int, multiple: int, cp_size: int) -> list[int]:
    """cu_seqlens of whole sequences, of which this rank has ``tokens``; some tokens may belong to no sequence."""
    whole = tokens * cp_size // multiple
    first = rng.choice((0, 0, 0, 1)) if whole > 1 else 0
    last = whole - (rng.choice((0, 0, 0, 1)) if whole > 1 else 0)
    count = rng.choices((1, 2, 3, 6, 70, 0), (30, 30, 20, 12, 4, 4))[0]
    cuts = sorted(rng.randint(first, max(last, first)) for _ in range(max(count - 1, 0)))
    ends = [first, *cuts, max(last, first)] if count else [0]
    return [end * multiple for end in ends]


def _angles(
    rng: random.Random,
    d: Drawn,
    views: dict[str, View],
    rows: int,
    width: int,
    batch: int,
    *,
    plain: bool,
) -> list[str]:
    scale = rng.choice((1.0, 3.0, 100.0, 1e5))
    if d.source == "inv_freq":
        views["inv_freq"] = drawn(rng, (width,), torch.float32, function="rates", scale=rng.choice((1.0, 0.1)))
        return ["inv_freq"]
    if d.source == "freqs":
        shape: tuple[int, ...] = (rows, width) if rng.random() < 0.6 else (rows, 1, 1, width)
        views["freqs"] = drawn(rng, shape, torch.float32, scale=scale)
        return ["freqs"]
    dtype = rng.choices((torch.float32, d.dtype, torch.bfloat16, torch.float16, torch.float64), (40, 30, 10, 10, 10))[0]
    if d.source == "cos_sin_cache" and d.entries == "pair":
        views["cos_sin_cache"] = drawn(rng, (rows, 2 * width), dtype, function="cos", scale=scale)
        return ["cos_sin_cache"]
    if d.source == "cos_sin_cache":
        views["cos_sin_cache"] = drawn(rng, (rows, 2 * width), dtype, function="cos", scale=scale)
        return ["cos_sin_cache"]
    shape = (rows, width)
    if batch and not plain and rng.random() < 0.25:
        shape = (batch, rows, width)
    elif rng.random() < 0.2:
        shape = (rows, 1, 1, width)
    views["cos"] = drawn(rng, shape, dtype, function="cos", scale=scale)
    alike = rng.random() < 0.6
    views["sin"] = (
        dataclasses.replace(views["cos"], function="sin")
        if alike
        else drawn(rng, shape, dtype, function="sin", scale=scale)
    )
    return ["cos", "sin"]


def _rotated(
    rng: random.Random, d: Drawn, shape: tuple[int, ...], views: dict[str, View], rope: Rope,
    seen: dict[str, str], mode: str,
) -> tuple[dict[str, Any], list[Part], tuple[str, ...], str]:  # fmt: skip
    """The rotated tensors: arguments, parts, results, and why the call is refused."""
    scale = rng.choices((1.0, 100.0, 1e-3), (80, 10, 10))[0]

    def tensor(name: str, shape: tuple[int, ...]) -> None:
        negative = rng.random() < 0.04 and d.dtype in (torch.float32, torch.float64) and bool(math.prod(shape))
        grad = rng.choices(("leaf", "made"), (20, 80) if d.inplace else (50, 50))[0] if mode == "grad" else ""
        if negative and grad == "leaf":
            grad = "made"
        views[name] = drawn(rng, shape, d.dtype, shared=not d.inplace, scale=scale, negative=negative, grad=grad)

    def laid(heads: int) -> tuple[int, ...]:
        return (shape[0], heads, shape[1], d.head_dim) if d.layout == "bhsd" else (*shape, heads, d.head_dim)

    if d.function == "rope_qk":
        if d.key_heads and mode != "grad" and rng.random() < 0.35:  # parts of one tensor, as projections leave them
            h, k = d.heads, d.key_heads
            tensor("qkv", laid(h + k + rng.choice((0, k))))
            q, key = f"qkv[..., :{h}, :]", f"qkv[..., {h}:{h + k}, :]"
            if d.layout == "bhsd":
                q, key = f"qkv[:, :{h}]", f"qkv[:, {h}:{h + k}]"
            parts = [Part("qkv", see, rope, seen) for see in (q, key)]
            return {"q": Name(q), "k": Name(key)}, parts, (q, key), ""
        tensor("q", laid(d.heads))
        parts = [Part("q", "q", rope, seen)]
        if d.key_heads is None:
            return {"q": Name("q"), "k": None}, parts, ("q",), ""
        tensor("k", laid(d.key_heads))
        if mode == "grad" and rng.random() < 0.25:  # one of the two needs no gradient
            name = rng.choice(("q", "k"))
            views[name] = dataclasses.replace(views[name], grad="")
        return {"q": Name("q"), "k": Name("k")}, [*parts, Part("k", "k", rope, seen)], ("q", "k"), ""
    if d.function == "rope_qkv":
        return _packed(rng, d, shape, views, rope, seen, tensor)
    name = "x" if d.function == "rope" else "grad_output"
    tensor(name, laid(d.heads))
    return {name: Name(name)}, [Part(name, name, rope, seen)], (name,), ""


def _packed(
    rng: random.Random, d: Drawn, shape: tuple[int, ...], views: dict[str, View], rope: Rope, seen: dict[str, str],
    tensor: Any,
) -> tuple[dict[str, Any], list[Part], tuple[str, ...], str]:  # fmt: skip
    arguments: dict[str, Any] = {"qkv": Name("qkv")}
    if d.kv_heads:
        tensor("qkv", (*shape, d.heads + 2 * d.kv_heads, d.head_dim))
        arguments["kv_heads"] = d.kv_heads
        return arguments, [Part("qkv", f"qkv[..., :-{d.kv_heads}, :]", rope, seen)], ("qkv",), ""
    h = d.heads
    tensor("qkv", (*shape, 3 * h, d.head_dim))
    view = views["qkv"]
    *lead, step, feature = view.strides
    whole = (*lead, h * step, step, feature)
    apart = ""
    views["qkv"] = dataclasses.replace(view, shape=(*shape, 3, h, d.head_dim), strides=whole)
    if rng.random() < 0.1:
        tensor("qkv", (*shape, 3, h, d.head_dim))
        strides = views["qkv"].strides
        if d.inplace and h > 1 and strides[-3] != h * strides[-2]:
            apart = "q, k and v apart"
    parts = [Part("qkv", f"qkv[..., {i}, :, :]", rope, seen) for i in (0, 1)]
    return arguments, parts, ("qkv",), apart


# Wrong calls ------------------------------------------------------------------------------------------------------------


def spoiled(rng: random.Random, world: World, call: Call) -> Call:
    """The call, changed in one thing so that it is not allowed."""
    views, arguments = dict(call.views), dict(call.arguments)
    first = next(iter(arguments))
    name = str(arguments[first]).split("[")[0]
    shape, dtype = views[name].shape, views[name].dtype
    angle = next(n for n in ("freqs", "cos", "cos_sin_cache", "inv_freq") if n in views)
    table = views[angle]
    packed = arguments.get("tensor_format") == "thd"

    def other(n: str, shape: tuple[int, ...], dtype: torch.dtype, **rest: Any) -> None:
        views[n] = contiguous(shape, dtype, **rest)
        arguments.setdefault(n, Name(n))

    def swap(n: str, **changes: Any) -> None:
        old = views[n]
        views[n] = contiguous(
            changes.get("shape", old.shape), changes.get("dtype", old.dtype), device=changes.get("device", "")
        )

    away = "cpu" if world.device == "cuda" else "meta"
    ways: dict[str, Any] = {
        "integers": lambda: swap(name, dtype=torch.int64),
        "fewer axes": lambda: swap(name, shape=shape[1:]),
        "more axes": lambda: swap(name, shape=(1, 1, *shape)),
        "None": lambda: arguments.update({first: None}),
        "a number": lambda: arguments.update({first: 3}),
        "no angles": lambda: [arguments.pop(n, None) for n in ("freqs", "cos", "sin", "cos_sin_cache", "inv_freq")],
        "two sources": lambda: other(
            "inv_freq" if angle != "inv_freq" else "freqs", (4,) if angle != "inv_freq" else (40, 4), torch.float32
        ),
        "angles elsewhere": lambda: swap(angle, device=away),
        "angles of integers": lambda: swap(angle, dtype=torch.int32),
        "wide angles": lambda: swap(angle, shape=(*table.shape[:-1], 4 * shape[-1] + 4)),
        "no entries": lambda: swap(angle, shape=(*table.shape[:-1], 0)),
        "rotary_dim": lambda: arguments.update(rotary_dim=shape[-1] + 2),
        "format": lambda: arguments.update(tensor_format="hsbd"),
        "rotated": lambda: arguments.update(rotated="middle"),
        "entries": lambda: arguments.update(angle_entries="both"),
        "cp_rank": lambda: arguments.update(cp_rank=arguments.get("cp_size", 1)),
        "cp_size": lambda: arguments.update(cp_size=0),
        "proportional pairs": lambda: arguments.update(rotated="proportional", interleaved=True),
        "a scaling that is a tensor": lambda: (
            other("factor", (), torch.float32),
            arguments.pop("factor"),
            arguments.update(attention_scaling=Name("factor")),
        ),
    }
    if angle == "freqs":
        ways["half freqs"] = lambda: swap("freqs", dtype=torch.float16)
    if angle == "cos":
        ways["no sines"] = lambda: arguments.pop("sin")
        ways["fewer sines"] = lambda: swap("sin", shape=(*table.shape[:-1], table.shape[-1] + 2))
        ways["scaled tables"] = lambda: arguments.update(attention_scaling=1.5)
    if "k" in arguments and arguments["k"] == "k":
        key = views["k"]
        ways["another key dtype"] = lambda: swap("k", dtype=torch.float64 if dtype != torch.float64 else torch.float32)
        ways["other tokens of the key"] = lambda: swap("k", shape=(key.shape[0] + 1, *key.shape[1:]))
        ways["another head of the key"] = lambda: swap("k", shape=(*key.shape[:-1], key.shape[-1] + 2))
        ways["a key elsewhere"] = lambda: swap("k", device=away)
    if "cu_seqlens" in arguments:
        ways["long bounds"] = lambda: other("cu_seqlens", (2,), torch.int64, values=(0, 1))
        ways["bounds of two axes"] = lambda: other("cu_seqlens", (1, 2), torch.int32, values=(0, 1))
        ways["no bounds"] = lambda: arguments.pop("cu_seqlens")
    elif "positions" not in arguments and not packed:
        ways["bounds of padded"] = lambda: other("cu_seqlens", (2,), torch.int32, values=(0, 1))
    if "positions" in arguments:
        ways["float ids"] = lambda: swap("positions", dtype=torch.float32)
        ways["ids of another shape"] = lambda: other(
            "positions", (*views["positions"].shape, 2, 1), torch.int64, values=(0,) * (2 * views["positions"].numel)
        )
        ways["ids and offset"] = lambda: arguments.update(offset=1)
    else:
        ways["float offset"] = lambda: arguments.update(offset=1.5)
        ways["bool offset"] = lambda: arguments.update(offset=True)
        ways["no offset"] = lambda: arguments.update(offset=None)
        ways["far offset"] = lambda: arguments.update(offset=2**31)
        if angle != "inv_freq":
            ways["offset below 0"] = lambda: arguments.update(offset=-1)
    what = rng.choice(sorted(ways))
    ways[what]()
    views = {n: dataclasses.replace(v, grad="") for n, v in views.items()}
    mode = call.mode if call.mode in ("plain", "no_grad", "inference") else "plain"
    return Call(call.function, views, arguments, "check_refused", REFUSED, {"text": what}, mode=mode)


__all__ = ["dense", "draw", "spoiled"]
