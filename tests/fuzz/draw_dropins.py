"""Calls of the drop-ins for other libraries' RoPE, and wrong calls of them from tests.fuzz.refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz import refusals
from tests.fuzz.case import Call, Name
from tests.fuzz.given import Part, Rope
from tests.fuzz.views import View, contiguous, drawn

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.fuzz.draw import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ODDS = (35, 30, 25, 10)
INDICES = (torch.int32, torch.int64)


@dataclasses.dataclass
class Made:
    """A call of a drop-in, before it gets a mode."""

    path: str
    views: dict[str, View]
    arguments: dict[str, Any]
    parts: tuple[Part, ...]
    results: tuple[str, ...]
    written: tuple[str, ...] = ()
    contiguous: bool = False
    spoil: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    refusal: str = ""


def draw(rng: random.Random, world: World, *, wrong: bool = False) -> Call:
    """A call of one of the drop-ins."""
    make = rng.choice((_te, _te, _flash, _flash, _flash_qkv, _flash_kv, _liger, _liger_vision, _vllm, _vllm))
    dtype = rng.choices(DTYPES, ODDS)[0]
    mode = world.mode(rng, ("plain", "no_grad", "inference", "grad", "autocast", "stream"))
    if make is _vllm and mode == "grad":
        mode = "no_grad"
    d = _Drawer(rng, world, dtype, mode)
    made = make(d)
    name = made.path.rsplit(".", 1)[1]
    if wrong and made.spoil:
        table = {r.what: r for r in refusals.of(name)}
        what = rng.choice(sorted(made.spoil))
        made.spoil[what]()
        types = table[what].ours
        views = {n: dataclasses.replace(v, grad="") for n, v in d.views.items()}
        return Call(made.path, views, made.arguments, "check_refused", types, {"text": what}, mode="no_grad")
    if made.refusal:
        views = {n: dataclasses.replace(v, grad="") for n, v in d.views.items()}
        return Call(
            made.path, views, made.arguments, "check_refused", (ValueError,), {"text": made.refusal}, mode="no_grad"
        )
    about: dict[str, Any] = {
        "mode": mode,
        "written": made.written,
        "autocast": torch.bfloat16 if mode == "autocast" else None,
    }
    if made.written and any(v.grad == "leaf" for v in d.views.values()):
        return Call(made.path, d.views, made.arguments, "check_refused", (RuntimeError,), {"text": "a leaf"}, **about)
    named: dict[str, Any] = {"results": made.results} | ({"contiguous": True} if made.contiguous else {})
    truncates = world.truncates and dtype == torch.bfloat16
    return Call(made.path, d.views, made.arguments, "check_rope", made.parts, named, truncates=truncates, **about)


class _Drawer:
    """Draws the tensors of one call."""

    def __init__(self, rng: random.Random, world: World, dtype: torch.dtype, mode: str) -> None:
        self.rng, self.world, self.dtype, self.mode = rng, world, dtype, mode
        self.views: dict[str, View] = {}
        self.batch = rng.choices((1, 2, 3, 0), (50, 25, 22, 3))[0]
        self.seq = rng.choices((1, 2, 6, 7, 17), (25, 15, 20, 20, 20))[0]
        self.heads = rng.choice((1, 2, 3, 4, 8))
        self.key_heads = rng.choice((1, 1, 2, self.heads))
        self.dim = rng.choice((4, 8, 16, 32, 48, 64, 128))
        self.rotary = (
            self.dim
            if rng.random() < 0.6
            else rng.choice([n for n in range(2, self.dim + 1, 2) if n < 8 or n % 8 == 0])
        )
        self.slack = rng.choice((0, 0, 3))
        self.interleaved = rng.random() < 0.5

    def rotated(self, name: str, shape: tuple[int, ...], *, inplace: bool = False, grad: bool = True) -> None:
        kind = ""
        if self.mode == "grad" and grad:
            kind = self.rng.choice(("made", "made", "leaf")) if inplace else self.rng.choice(("made", "leaf"))
        self.views[name] = drawn(self.rng, shape, self.dtype, shared=not inplace, grad=kind)

    def table(self, name: str, shape: tuple[int, ...], function: str, dtype: Any = None) -> None:
        dtype = dtype or self.rng.choice((torch.float32, self.dtype))
        self.views[name] = drawn(self.rng, shape, dtype, function=function, scale=self.rng.choice((1.0, 50.0)))

    def tables(self, rows: int, width: int, names: tuple[str, str] = ("cos", "sin")) -> None:
        self.table(names[0], (rows, width), "cos", self.views["cos"].dtype if "cos" in self.views else None)
        self.table(names[1], (rows, width), "sin", self.views[names[0]].dtype)

    def indices(self, name: str, shape: tuple[int, ...], values: Any, dtype: Any = None) -> None:
        self.views[name] = self.world.integers(self.rng, shape, dtype or self.rng.choice(INDICES), values)

    def bounds(self, tokens: int, multiple: int = 1) -> list[int]:
        whole = tokens // multiple
        cuts = sorted(self.rng.randint(0, whole) for _ in range(self.rng.choice((0, 1, 2, 5))))
        return [n * multiple for n in (0, *cuts, whole)]


def _te(d: _Drawer) -> Made:
    rng = d.rng
    layout = rng.choice(("sbhd", "bshd", "thd"))
    cp = rng.choice((2, 3)) if rng.random() < 0.2 else 1
    seq, batch = d.seq + (d.seq % 2 if cp > 1 else 0), max(d.batch, 1)
    arguments: dict[str, Any] = {"t": Name("t"), "freqs": Name("freqs")}
    angles = {"freqs": "freqs.float()"}
    tokens = seq * batch * (1 if cp == 1 else 2)
    sequences, longest = batch, seq * cp
    shape: tuple[int, ...] = {"sbhd": (seq, batch), "bshd": (batch, seq), "thd": (tokens,)}[layout]
    if layout == "thd":
        bounds = [b * cp for b in d.bounds(tokens, 2 if cp > 1 else 1)]
        d.indices("cu_seqlens", (len(bounds),), bounds, torch.int32)
        arguments["cu_seqlens"], angles["cu_seqlens"] = Name("cu_seqlens"), "cu_seqlens"
        longest, sequences = max(b - a for a, b in itertools.pairwise(bounds)), len(bounds) - 1
    if rng.random() < 0.3:
        starts = [rng.randrange(7) for _ in range(sequences)]
        d.indices("start_positions", (sequences,), starts)
        arguments["start_positions"], angles["starts"] = Name("start_positions"), "start_positions"
        longest += max(starts, default=0)
    d.rotated("t", (*shape, d.heads, d.dim))
    d.views["freqs"] = drawn(
        rng,
        (longest + d.slack, 1, 1, d.rotary),
        rng.choice((torch.float32, torch.float32, torch.float64, torch.float16)),
        scale=rng.choice((1.0, 100.0)),
    )
    arguments |= {"tensor_format": layout} if layout != "sbhd" or rng.random() < 0.5 else {}
    arguments |= {"interleaved": True} if d.interleaved else {}
    arguments |= {"cp_size": cp, "cp_rank": rng.randrange(cp)} if cp > 1 else {}
    arguments |= {"fused": rng.random() < 0.5} if rng.random() < 0.3 else {}
    rope = Rope(layout, d.interleaved, "feature", cp_size=cp, cp_rank=arguments.get("cp_rank", 0))
    made = Made(
        "tuned.compat.transformer_engine.apply_rotary_pos_emb", d.views, arguments,
        (Part("t", "t", rope, angles),), ("t",), contiguous=True,
    )  # fmt: skip
    freqs = d.views["freqs"]
    made.spoil = {
        "unknown format": lambda: arguments.update(tensor_format="bhsd"),
        "angles wider than a head": lambda: d.views.update(
            freqs=contiguous((*freqs.shape[:3], d.dim + 2), torch.float32)
        ),
        "odd width": lambda: d.views.update(freqs=contiguous((*freqs.shape[:3], d.dim - 1), torch.float32)),
        "no freqs": lambda: arguments.update(freqs=None),
    }
    if layout == "thd":
        made.spoil["thd without cu_seqlens"] = lambda: arguments.pop("cu_seqlens")
    else:
        made.spoil["fewer rows than tokens"] = lambda: d.views.update(
            freqs=contiguous((seq * cp - 1, 1, 1, d.rotary), torch.float32)
        )
    return made


def _flash(d: _Drawer) -> Made:
    rng = d.rng
    packed, inplace = rng.random() < 0.35, rng.random() < 0.5
    arguments: dict[str, Any] = {n: Name(n) for n in ("x", "cos", "sin")}
    angles = {"cos": "cos", "sin": "sin"}
    longest, sequences, number = d.seq, d.batch, 0
    if packed:
        tokens = max(d.batch, 1) * d.seq
        bounds = d.bounds(tokens)
        d.indices("cu_seqlens", (len(bounds),), bounds, torch.int32)
        arguments["cu_seqlens"], angles["cu_seqlens"] = Name("cu_seqlens"), "cu_seqlens"
        longest, sequences = max(b - a for a, b in itertools.pairwise(bounds)), len(bounds) - 1
        if rng.random() < 0.7:
            arguments["max_seqlen"] = longest
        d.rotated("x", (tokens, d.heads, d.dim), inplace=inplace)
    else:
        d.rotated("x", (d.batch, d.seq, d.heads, d.dim), inplace=inplace)
        if rng.random() < 0.2:
            arguments["max_seqlen"] = 10**6  # read with cu_seqlens only
    reach, number, angles = _offsets(d, arguments, angles, sequences)
    d.tables(longest + reach + d.slack, d.rotary // 2)
    arguments |= {"interleaved": True} if d.interleaved else {}
    arguments |= {"inplace": True} if inplace else {}
    rope = Rope("thd" if packed else "bshd", d.interleaved, offset=number)
    name = rng.choice(("apply_rotary_emb", "apply_rotary_emb_func"))
    made = Made(
        f"tuned.compat.flash_attn.{name}",
        d.views,
        arguments,
        (Part("x", "x", rope, angles),),
        ("x",),
        ("x",) if inplace else (),
    )
    made.path = "tuned.compat.flash_attn.apply_rotary_emb"
    cos, x = d.views["cos"], d.views["x"]
    made.spoil = {
        "angles wider than a head": lambda: d.views.update(
            {n: contiguous((cos.shape[0], d.dim // 2 + 1), cos.dtype) for n in ("cos", "sin")}
        ),
        "sin unlike cos": lambda: d.views.update(sin=contiguous((cos.shape[0] + 1, cos.shape[1]), cos.dtype)),
        "float offsets": lambda: (
            d.views.update(seqlen_offsets=contiguous((sequences,), torch.float32)),
            arguments.update(seqlen_offsets=Name("seqlen_offsets")),
        ),
        "offset below 0": lambda: arguments.update(seqlen_offsets=-1),
        "offsets of another batch": lambda: (
            d.views.update(seqlen_offsets=contiguous((sequences + 1,), torch.int32, values=(0,) * (sequences + 1))),
            arguments.update(seqlen_offsets=Name("seqlen_offsets")),
        ),
    }
    if not packed:
        made.spoil |= {
            "fewer rows than tokens": lambda: (
                arguments.pop("seqlen_offsets", None),
                d.views.update({n: contiguous((d.seq - 1, cos.shape[1]), cos.dtype) for n in ("cos", "sin")}),
            ),
            "offset past the table": lambda: arguments.update(seqlen_offsets=cos.shape[0]),
            "three axes and no cu_seqlens": lambda: d.views.update(x=contiguous(x.shape[1:], x.dtype)),
        }
        if inplace and d.heads > 1:
            made.spoil["an expanded x in place"] = lambda: d.views.update(
                x=dataclasses.replace(x, strides=(*x.strides[:2], 0, x.strides[3]))
            )
    return made


def _offsets(
    d: _Drawer, arguments: dict[str, Any], angles: dict[str, str], batch: int
) -> tuple[int, int, dict[str, str]]:
    """seqlen_offsets: how far they reach, the number, and the names of the angles together with that of a tensor."""
    way = d.rng.random()
    if way < 0.3:
        arguments["seqlen_offsets"] = number = d.rng.choice((1, 3, 16))
        return number, number, angles
    if way < 0.6:
        values = [d.rng.randrange(9) for _ in range(batch)]
        d.indices("seqlen_offsets", (batch,), values)
        arguments["seqlen_offsets"] = Name("seqlen_offsets")
        return max(values, default=0), 0, {**angles, "starts": "seqlen_offsets"}
    return 0, 0, angles


def _flash_qkv(d: _Drawer) -> Made:
    rng = d.rng
    five, own = rng.random() < 0.5, rng.random() < 0.3
    h, k = d.heads, d.heads if five else d.key_heads
    arguments: dict[str, Any] = {n: Name(n) for n in ("qkv", "cos", "sin")}
    shape = (d.batch, d.seq, 3, h, d.dim) if five else (d.batch, d.seq, h + 2 * k, d.dim)
    d.rotated("qkv", shape, inplace=True)
    angles = {"cos": "cos", "sin": "sin"}
    reach, number, angles = _offsets(d, arguments, angles, d.batch)
    d.tables(d.seq + reach + d.slack, d.rotary // 2)
    other = angles
    if own:
        d.tables(d.seq + reach + d.slack, d.rotary // 2, ("cos_k", "sin_k"))
        arguments |= {n: Name(n) for n in ("cos_k", "sin_k")}
        other = {**angles, "cos": "cos_k", "sin": "sin_k"}
    arguments |= {"num_heads_q": h} if not five or rng.random() < 0.2 else {}
    arguments |= {"interleaved": True} if d.interleaved else {}
    rope = Rope("bshd", d.interleaved, offset=number)
    q, key = ("qkv[:, :, 0]", "qkv[:, :, 1]") if five else (f"qkv[:, :, :{h}]", f"qkv[:, :, {h}:{h + k}]")
    parts = Part("qkv", q, rope, angles), Part("qkv", key, rope, other)
    made = Made("tuned.compat.flash_attn.apply_rotary_emb_qkv_", d.views, arguments, parts, ("qkv",), ("qkv",))
    if own:
        cos = d.views["cos"]
        made.spoil["cos_k unlike cos"] = lambda: d.views.update(
            {n: contiguous((cos.shape[0] + 1, cos.shape[1]), cos.dtype) for n in ("cos_k", "sin_k")}
        )
    if five:
        made.spoil["an axis of 4"] = lambda: d.views.update(qkv=contiguous((d.batch, d.seq, 4, h, d.dim), d.dtype))
    else:
        made.spoil["four axes and no num_heads_q"] = lambda: arguments.pop("num_heads_q")
        made.spoil["odd heads left"] = lambda: arguments.update(num_heads_q=h + 1)
    return made


def _flash_kv(d: _Drawer) -> Made:
    arguments: dict[str, Any] = {n: Name(n) for n in ("kv", "cos", "sin")}
    d.rotated("kv", (d.batch, d.seq, 2, d.heads, d.dim), inplace=True)
    reach, number, angles = _offsets(d, arguments, {"cos": "cos", "sin": "sin"}, d.batch)
    d.tables(d.seq + reach + d.slack, d.rotary // 2)
    arguments |= {"interleaved": True} if d.interleaved else {}
    part = Part("kv", "kv[:, :, 0]", Rope("bshd", d.interleaved, offset=number), angles)
    made = Made("tuned.compat.flash_attn.apply_rotary_emb_kv_", d.views, arguments, (part,), ("kv",), ("kv",))
    made.spoil["an axis of 3"] = lambda: d.views.update(kv=contiguous((d.batch, d.seq, 3, d.heads, d.dim), d.dtype))
    return made


def _liger(d: _Drawer) -> Made:
    rng = d.rng
    d.rotated("q", (d.batch, d.heads, d.seq, d.dim))
    d.rotated("k", (d.batch, d.key_heads, d.seq, d.dim))
    many = rng.choice((1, d.batch)) if d.batch else 1
    dtype = rng.choice((torch.float32, d.dtype))
    d.table("cos", (many, d.seq, d.dim), "cos", dtype)
    d.table("sin", (many, d.seq, d.dim), "sin", dtype)
    arguments: dict[str, Any] = {n: Name(n) for n in ("q", "k", "cos", "sin")}
    if rng.random() < 0.2:
        arguments["position_ids"] = None
    see = f"[0, :, :{d.dim // 2}]" if many == 1 else f"[..., :{d.dim // 2}]"
    angles = {"cos": "cos" + see, "sin": "sin" + see}
    parts = tuple(Part(n, f"{n}.transpose(1, 2)", Rope("bshd"), angles) for n in ("q", "k"))
    made = Made("tuned.compat.liger.liger_rotary_pos_emb", d.views, arguments, parts, ("q", "k"))
    made.spoil = {
        "unsqueeze_dim of 2": lambda: arguments.update(unsqueeze_dim=2),
        "narrower cos": lambda: d.views.update(
            {n: contiguous((many, d.seq, d.dim // 2), dtype) for n in ("cos", "sin")}
        ),
        "fewer rows than tokens": lambda: d.views.update(
            {n: contiguous((many, d.seq - 1, d.dim), dtype) for n in ("cos", "sin")}
        ),
    }
    return made


def _liger_vision(d: _Drawer) -> Made:
    d.rotated("q", (d.seq, d.heads, d.dim))
    d.rotated("k", (d.seq, d.key_heads, d.dim))
    dtype = d.rng.choice((torch.float32, d.dtype))
    d.table("cos", (d.seq, d.dim), "cos", dtype)
    d.table("sin", (d.seq, d.dim), "sin", dtype)
    angles = {n: f"{n}[:, :{d.dim // 2}]" for n in ("cos", "sin")}
    parts = tuple(Part(n, f"{n}[None]", Rope("bshd"), angles) for n in ("q", "k"))
    names = {n: Name(n) for n in ("q", "k", "cos", "sin")}
    return Made("tuned.compat.liger.liger_rotary_pos_emb_vision", d.views, names, parts, ("q", "k"))


def _vllm(d: _Drawer) -> Made:
    rng = d.rng
    inference = rng.random() < 0.3
    lead = (d.batch * d.seq,) if rng.random() < 0.6 or inference else (d.batch, d.seq)
    rows = rng.choice((1, 8, 40))
    ids = [rng.randrange(rows) for _ in range(math.prod(lead))]
    refusal = ""
    if ids and rng.random() < 0.1:
        ids[rng.randrange(len(ids))] = rng.choice((-1, rows))
        refusal = "an id past the cache" if d.world.sees_values else ""
    d.indices("positions", lead, ids)
    before = rng.choice((1, 2, 4)) if not inference and d.rotary <= d.dim - 4 and rng.random() < 0.5 else 0
    d.table("cos_sin_cache", (rows, d.rotary), "cos")
    arguments: dict[str, Any] = {"positions": Name("positions")}
    parts = []
    rope = Rope("thd" if len(lead) == 1 else "bshd", d.interleaved, conjugate=not inference and rng.random() < 0.3)
    angles = {"cos_sin_cache": "cos_sin_cache", "positions": "positions"}
    for name, heads in (("query", d.heads), ("key", d.key_heads)):
        if name == "key" and not inference and rng.random() < 0.2:
            arguments["key"] = None
            continue
        flat = rng.random() < 0.6
        d.rotated(name, (*lead, heads * d.dim) if flat else (*lead, heads, d.dim), inplace=True, grad=False)
        arguments[name] = Name(name)
        see = f"{name}.view({', '.join(map(str, lead))}, {heads}, {d.dim})" if flat else name
        see += f"[..., {before}:{before + d.rotary}]" if before else ""
        parts.append(Part(name, see, rope, angles))
    arguments |= {"head_size": d.dim, "cos_sin_cache": Name("cos_sin_cache"), "is_neox": not d.interleaved}
    arguments |= {"rope_dim_offset": before} if before else {}
    arguments |= {"inverse": True} if rope.conjugate else {}
    path = (
        "tuned.compat.flashinfer.apply_rope_with_cos_sin_cache_inplace"
        if inference
        else "tuned.compat.vllm.rotary_embedding"
    )
    written = tuple(p.tensor for p in parts)
    made = Made(path, d.views, arguments, tuple(parts), (), written, refusal=refusal)
    if not inference:
        made.spoil = {
            "heads that do not fit": lambda: d.views.update(query=contiguous((*lead, d.heads * d.dim + 1), d.dtype)),
            "rotation past the head": lambda: arguments.update(rope_dim_offset=d.dim),
            "float positions": lambda: d.views.update(positions=contiguous(lead, torch.float32)),
            "positions of another number": lambda: d.views.update(
                positions=contiguous(
                    (lead[0] + 1, *lead[1:]), torch.int64, values=(0,) * ((lead[0] + 1) * math.prod(lead[1:]))
                )
            ),
        }
    return made
