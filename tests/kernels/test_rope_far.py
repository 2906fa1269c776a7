"""RoPE where a few elements lie gigabytes apart: every offset is 64-bit, also those of features and of entries."""

from __future__ import annotations

import dataclasses
import resource
from typing import Any

import pytest
import torch

from tests.support.far import FAR, far
from tests.support.run import INTERPRETED, run
from tuned.families.rope.launches import RopeCall, launches
from tuned.families.rope.spec import RopeSpec
from tuned.families.rope.variant import RopeVariant

pytestmark = pytest.mark.interpreter

DIM, PAIRS = 8, 4  # features that lie FAR apart
PAGES = 500_000  # pages that may be touched: a copy of the whole storage would touch millions

PLAIN = RopeSpec("bshd", "float16", 1, DIM, DIM, angles="cos_sin", angle_dtype="float16", angle_entries="feature")
FORMS = {
    "plain": PLAIN,
    "plain tail": dataclasses.replace(PLAIN, rotary_dim=6),
    "plain in place": dataclasses.replace(PLAIN, inplace=True),
    "plain interleaved": dataclasses.replace(PLAIN, style="interleaved"),
    "pair": dataclasses.replace(PLAIN, key_heads=1),
    "pair tail": dataclasses.replace(PLAIN, key_heads=1, rotary_dim=6, rotated="last"),
    "pair in place": dataclasses.replace(PLAIN, key_heads=1, inplace=True),
    "pair interleaved": dataclasses.replace(PLAIN, key_heads=1, style="interleaved", angle_dtype="float32"),
    "rates": dataclasses.replace(PLAIN, angles="inv_freq", angle_dtype="float32", angle_entries="feature"),
    "starts": dataclasses.replace(PLAIN, layout="thd", positions="starts"),
}
CASES = [
    (name, what)
    for name, spec in FORMS.items()
    for what in ("x", "out", "key", "angles", "starts")
    if (what != "key" or spec.key_heads) and (what != "out" or not spec.inplace)
    if (what == "starts") == (name == "starts")
]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """One head, [head_dim], float64."""
    first = spec.head_dim - spec.rotary_dim if spec.rotated == "last" else 0
    out, half = x.clone(), spec.rotary_dim // 2
    for j in range(half):
        a, b = (2 * j, 2 * j + 1) if spec.interleaved else (j, j + half)
        one, two = x[first + a], x[first + b]
        out[first + a] = one * cos[a] - two * sin[a]
        out[first + b] = two * cos[b] + one * sin[b]
    return out


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has no memory without pages: tests/gpu has one such call")
@pytest.mark.parametrize(("name", "what"), CASES, ids=[f"{name}-{what}" for name, what in CASES])
def test_what_lies_gigabytes_apart_is_found(name: str, what: str) -> None:
    spec, generator = FORMS[name], torch.Generator().manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def values(count: int, dtype: torch.dtype, of: str) -> torch.Tensor:
        made = (torch.rand(count, generator=generator) + 0.5).to(dtype)
        return far(made) if of == what else made

    angle_dtype = getattr(torch, spec.angle_dtype)
    x, key = values(DIM, torch.float16, "x"), values(DIM, torch.float16, "key")
    if what in ("x", "key") and spec.key_heads:  # one stride is used for the features of both
        x, key = (t if t.stride(0) == FAR else far(t) for t in (x, key))
    out, key_out = x, key
    if not spec.inplace:
        out, key_out = values(DIM, torch.float16, "out").zero_(), values(DIM, torch.float16, "out").zero_()
    # The second of two rows of angles is read, since the position is 1.
    turned = [values(spec.rotary_dim, angle_dtype, "angles") for _ in range(1 if spec.computes_sincos else 2)]
    step = turned[0].stride(0)
    starts = None
    if what == "starts":
        starts = far(torch.tensor([9, 9, 1], dtype=torch.int32))
    read = [t.double() for t in turned]
    cos, sin = (read[0].cos(), read[0].sin()) if spec.computes_sincos else read
    wanted = [rotated(t.double(), cos, sin, spec) for t in (x, key)]

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t[None, None] if spec.layout == "thd" else t[None, None, None]

    more: dict[str, Any] = {"offset": 0}
    if spec.takes_rates:
        spec, more = dataclasses.replace(spec, positions="shifted"), {"offset": 1}
    if starts is not None:  # two of three sequences are empty; the last of two rows of angles is read
        more = {
            "cu_seqlens": torch.tensor([0, 0, 0, 1], dtype=torch.int32),
            "sequences": 3,
            "positions": starts,
            "position_strides": (0, FAR),
        }
        turned = [torch.stack((torch.zeros_like(t), t)) for t in turned]
    else:
        turned = [t[None] for t in turned]
    call = RopeCall(
        x=shaped(x),
        out=shaped(out),
        cos=turned[0],
        sin=None if spec.computes_sincos else turned[1],
        seq=1,
        batch=1,
        angle_rows=len(turned[0]),
        x_strides=(1, 1, 1, x.stride(0)),
        out_strides=(1, 1, 1, out.stride(0)),
        angle_strides=(spec.rotary_dim, step),
        key=shaped(key) if spec.key_heads else None,
        key_out=shaped(key_out) if spec.key_heads else None,
        key_strides=(1, 1, 1, key.stride(0)),
        key_out_strides=(1, 1, 1, key_out.stride(0)),
        **more,
    )
    run(launches(spec, RopeVariant(block_tokens=1, block_heads=2, num_warps=1), call))
    for found, exact in list(zip((out, key_out), wanted, strict=True))[: 1 + bool(spec.key_heads)]:
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < PAGES, "memory in between was touched"
