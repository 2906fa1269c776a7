"""vLLM's and FlashInfer's calls that write a cache, compared with a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.append import FLOAT8, PAGE_SIZE, PAGES, make
from tests.support.compat_formula import REQUIRED, signature
from tuned.compat.flashinfer import append_paged_kv_cache
from tuned.compat.vllm import reshape_and_cache_flash


def test_the_signatures_are_theirs() -> None:
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale")
    assert signature(reshape_and_cache_flash) == tuple((name, REQUIRED) for name in names)
    names = ("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices", "kv_indptr")
    wanted = tuple((name, REQUIRED) for name in (*names, "kv_last_page_len"))
    assert signature(append_paged_kv_cache) == (*wanted, ("kv_layout", "NHD"))


def kept(rows: torch.Tensor, cache: torch.Tensor, slots: Any, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The cache [pages, page_size, heads, dim] with each row in its slot."""
    found = cache.clone()
    for row, slot in zip(rows, slots, strict=False):
        if 0 <= slot < found.shape[0] * found.shape[1]:
            value = row if scale is None else (row.float() / scale.view(-1, 1)).clamp(-448, 448).to(cache.dtype)
            found[slot // found.shape[1], slot % found.shape[1]] = value
    return found


@pytest.mark.parametrize("lies", ["packed", "together", "beside"])
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e4m3", "bytes"])
@pytest.mark.parametrize("scales", [1, 2])
def test_vllm_writes_what_has_a_slot(lies: str, kind: str, scales: int) -> None:
    made = make(dtype=torch.bfloat16, cache=None if kind == "auto" else FLOAT8, lies=lies, tokens=9)
    t, around = made.tensors, made.storages[1].view(torch.uint8).clone()
    scale = [torch.tensor([0.5, 3.0][:scales]), torch.tensor([2.0, 0.25][:scales])]
    wanted = [
        kept(t[rows], t[cache], t["slot_mapping"].tolist(), None if kind == "auto" else own)
        for rows, cache, own in (("k", "key_cache", scale[0]), ("v", "value_cache", scale[1]))
    ]
    caches = [t[n].view(torch.uint8) if kind == "bytes" else t[n] for n in ("key_cache", "value_cache")]
    word = "fp8" if kind == "bytes" else kind
    reshape_and_cache_flash(t["k"], t["v"], *caches, t["slot_mapping"].int(), word, *scale)
    for name, want in zip(("key_cache", "value_cache"), wanted, strict=True):
        assert torch.equal(t[name].view(torch.uint8), want.view(torch.uint8)), name
    whole = make(dtype=torch.bfloat16, cache=None if kind == "auto" else FLOAT8, lies=lies, tokens=9)
    for name, want in zip(("key_cache", "value_cache"), wanted, strict=True):
        whole.tensors[name].copy_(want)
    assert torch.equal(made.storages[1].view(torch.uint8), whole.storages[1].view(torch.uint8))
    assert not torch.equal(made.storages[1].view(torch.uint8), around)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("one_tensor", [True, False])
def test_flashinfer_finds_the_page_of_each_token(layout: str, one_tensor: bool) -> None:
    made = make(layout=layout, lies="together" if one_tensor else "packed")
    t = made.tensors
    pages, bounds = torch.tensor([4, 0, 2, 1], dtype=torch.int32), torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    batch = torch.tensor([0, 1, 1, 2, 2, 3, -1], dtype=torch.int32)  # the last two have no sequence
    places = torch.tensor([3, 0, 6, 1, 5, 0, 0], dtype=torch.int32)  # the fifth is past all pages
    slots = [4 * PAGE_SIZE + 3, 0, 2 * PAGE_SIZE + 2, PAGE_SIZE + 1, -1, -1, -1]
    logical = [t[n] if layout == "NHD" else t[n].transpose(1, 2) for n in ("key_cache", "value_cache")]
    wanted = [kept(rows, cache, slots) for rows, cache in zip((t["k"], t["v"]), logical, strict=True)]
    cache: Any = made.storages[1][1:-1] if one_tensor else (t["key_cache"], t["value_cache"])
    append_paged_kv_cache(t["k"], t["v"], batch, places, cache, pages, bounds, bounds[1:] * 0 + 1, layout)
    for found, want in zip(logical, wanted, strict=True):
        assert torch.equal(found, want)
    before = made.storages[1].clone()
    append_paged_kv_cache(t["k"], t["v"], batch[:0], places[:0], cache, pages, bounds, bounds[1:], layout)
    append_paged_kv_cache(t["k"], t["v"], batch, places, cache, pages[:0], bounds, bounds[1:], layout)
    assert torch.equal(made.storages[1], before)
    assert len(logical[0]) == PAGES


def test_both_are_traced_whole() -> None:
    def run(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(())
        reshape_and_cache_flash(k, v, cache[0], cache[1], slots, "auto", scale, scale)
        tokens = torch.arange(len(slots))
        append_paged_kv_cache(k, v, tokens * 0, tokens, (cache[0], cache[1]), tokens, tokens[:2] * 4, tokens[:1])
        return cache * 1

    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        made = make()
        cache = torch.stack([made.tensors[n] for n in ("key_cache", "value_cache")])
        found.append(function(made.tensors["k"], made.tensors["v"], cache, made.tensors["slot_mapping"]))
    assert torch.equal(*found)
