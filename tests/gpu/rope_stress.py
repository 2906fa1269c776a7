"""RoPE calls of every kind, from memory of every kind, for compute-sanitizer: `python -m tests.gpu.rope_stress`."""

from __future__ import annotations

import dataclasses

import torch

from tests.rope_calls import Case, build
from tests.test_rope_plan import CASES
from tuned.rope import call

VIEWS = ("contiguous", "packed", "offset")
TIMES = 3  # the first makes a plan, the others launch it


def cases() -> list[Case]:
    """Each kind of call at two lengths, in each view that it takes: q, k and v of a packed qkv must lie side by side."""
    return [
        dataclasses.replace(case, seq=2 * seq, view=view)
        for case in CASES.values()
        for seq in (1, 5)
        for view in VIEWS
        if view != "packed" or case.kv_heads is None
    ]


def main(device: str) -> None:
    """All of them, several times each."""
    for case in cases():
        given, settings, _ = build(case, device)
        for _ in range(TIMES):
            call.call(*given, tuple(settings))
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main("cuda")
