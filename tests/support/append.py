"""Calls that write a cache: tensors as serving libraries hold them, a reference by loops, and GPU dispatch of CPU tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.calls.rope.append
import tuned.calls.rope.arguments
import tuned.calls.rope.plan
from tests.fuzz.interpreted import direct, interpret
from tuned.dispatch import rope_append_
from tuned.lookup.lookup import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES, PAGE_SIZE = 5, 4
ROWS = 40  # of the tables of angles
SAVED = (3, 17, -1, 8, 0, 19, 12)  # the slot of each token, of 20 slots; -1: not saved
FLOAT8 = torch.float8_e4m3fn


@dataclasses.dataclass
class Made:
    """The tensors of a call."""

    tensors: dict[str, torch.Tensor]  # q, k, v, key_cache, value_cache, slot_mapping
    named: dict[str, Any]
    storages: list[torch.Tensor]  # the memory of q, k, v and the caches, with what lies around them

    def call(self, **changes: Any) -> torch.Tensor:
        return rope_append_(**{**self.tensors, **self.named, **changes})


def make(
    heads: int = 3,
    key_heads: int = 2,
    dim: int = 8,
    rotary: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    layout: str = "NHD",
    lies: str = "packed",  # separate caches; "together": as FlashInfer's; "beside": keys and values in turn within a page
    slots: tuple[int, ...] = SAVED,
    tokens: int = len(SAVED),
    norm: bool = False,
    device: str = "cpu",
    pages: int = PAGES,
    seed: int = 0,
    **named: Any,
) -> Made:
    """Views of one qkv, cache pages filled with random numbers, and a canary page before and after them."""
    draw = torch.Generator(device).manual_seed(seed)
    qkv = torch.randn(tokens, heads + 2 * key_heads, dim, generator=draw, device=device).to(dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + key_heads], qkv[:, heads + key_heads :]
    page = (PAGE_SIZE, key_heads, dim) if layout == "NHD" else (key_heads, PAGE_SIZE, dim)
    shape = {
        "packed": (2, pages + 2, *page),
        "together": (pages + 2, 2, *page),
        "beside": (pages + 2, *page[:-1], 2, dim),
    }
    whole = torch.randn(shape[lies], generator=draw, device=device).to(cache or dtype)
    axis = {"packed": 0, "together": 1, "beside": 3}[lies]
    caches = [t[1:-1] for t in whole.unbind(axis)]
    angle = 6.3 * torch.rand(ROWS, rotary // 2, generator=draw, device=device)
    tensors = {"q": q, "k": k, "v": v, "key_cache": caches[0], "value_cache": caches[1]}
    tensors["slot_mapping"] = torch.tensor(slots, dtype=torch.int64, device=device)
    words: dict[str, Any] = {"cos": angle.cos(), "sin": angle.sin(), "cache_layout": layout}
    words["positions"] = torch.randint(0, ROWS, (tokens,), generator=draw, device=device)
    if norm:
        words |= {f"{n}_weight": 1 + 0.3 * torch.randn(dim, generator=draw, device=device).to(dtype) for n in "qk"}
    return Made(tensors, words | named, [qkv, whole])


def by_hand(made: Made, **changes: Any) -> dict[str, torch.Tensor]:
    """What the call leaves in q, k and both caches, computed row by row in float64 and not rounded to the cache's dtype."""
    t, named = made.tensors, made.named | changes
    rows = named["positions"].tolist()
    cos, sin = named["cos"].double(), named["sin"].double()
    rotary, eps = 2 * cos.shape[1], named.get("eps", 1e-6)
    found = {name: t[name].detach().double().clone() for name in ("q", "k", "v", "key_cache", "value_cache")}
    first = t["q"].shape[2] - rotary if named.get("rotated") == "last" else 0
    for name in "qk":
        weight = named.get(f"{name}_weight")
        for token, row in enumerate(rows):
            for head in range(t[name].shape[1]):
                x = found[name][token, head]
                if weight is not None:
                    x.mul_(((x * x).mean() + eps).rsqrt() * weight.double())
                part = x[first : first + rotary]
                one, two = (
                    (slice(0, None, 2), slice(1, None, 2))
                    if named.get("interleaved")
                    else (slice(rotary // 2), slice(rotary // 2, None))
                )
                a, b = part[one].clone(), part[two].clone()
                part[one], part[two] = a * cos[row] - b * sin[row], b * cos[row] + a * sin[row]
    for name, source in (("key_cache", "k"), ("value_cache", "v")):
        cache = found[name] if named["cache_layout"] == "NHD" else found[name].transpose(1, 2)
        scale = named.get(name.replace("cache", "scale"))
        for token, slot in enumerate(t["slot_mapping"].tolist()):
            if 0 <= slot < cache.shape[0] * cache.shape[1]:
                given = found[source][token]
                cache[slot // PAGE_SIZE, slot % PAGE_SIZE] = (
                    given if scale is None else given / scale.double().reshape(-1, 1)
                )
    if not named.get("key_inplace"):
        found["k"] = t["k"].detach().double()
    return found


GPU = Gpu("a_card_without_a_table", 90, 132)


class Launches:
    """Counts of public and direct launches."""

    def __init__(self) -> None:
        self.public = self.direct = 0


@contextlib.contextmanager
def interpreted(gpu: Gpu = GPU) -> Iterator[Launches]:
    """Inside, CPU tensors take the code path of GPU tensors, and Triton's interpreter runs the kernels."""
    plan, seen = tuned.calls.rope.plan, Launches()
    append = tuned.calls.rope.append

    def run_public(now: Any) -> str:
        seen.public += 1
        interpret(now.part)
        return "compiled"

    def run_directly(launch: Any, compiled: Any, device: Any) -> Any:
        made = direct(launch, compiled, device)

        def run(*given: Any) -> None:
            seen.direct += 1
            made.run(*given)

        return made._replace(run=run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "why_eager", lambda _x, supported: None if supported else "no kernel takes it")
        for module in (plan, append):
            patch.setattr(module, "gpu_of", lambda _device: gpu)
        patch.setattr(plan, "capturing", lambda: False)
        patch.setattr(plan, "run_public", run_public)
        patch.setattr(append, "direct_launch", run_directly)
        patch.setattr(append, "current_device", lambda: -1)
        patch.setattr(tuned.calls.rope.arguments, "_values_reach", lambda *_: None)
        patch.setattr(append, "_PLANS", {})
        patch.setattr(plan, "_COMPILED", {})
        patch.setattr(tuned.launching.plan, "_specialised", lambda _name: (True,) * 99)
        yield seen
