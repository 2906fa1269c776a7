"""Recurrences whose programs wait for each other while others use the GPU; a hang costs only the process of a deed.

`python -m tests.gpu.gru_stress DEED` ends with 0 if all results are right, else with a sentence.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.language.extra.cuda import globaltimer

from tests.support.gru_sequences import Sequences, assert_steps_right, build
from tests.support.run import run
from tuned.families.gru.launches import launches
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.launching.launcher import run_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.gru_sequences import Built

FULL_WARPS = 32  # warps of one program of spin: half of the threads that a multiprocessor holds
TILE = GruVariant("persistent", "tile", 32, 32, "spin", num_warps=4)
SPLIT = GruVariant("persistent", "split", 16, 16, "spin", num_warps=4)
EXCHANGES = ("counter", "poll", "spin", "probe")


@triton.jit
def spin(nanoseconds):
    """Occupy a place on a multiprocessor for this long."""
    start = globaltimer()
    while globaltimer() - start < nanoseconds:
        pass


def occupy(programs: int, microseconds: float) -> None:
    """Launch programs with many threads that do nothing, on the current stream."""
    spin[(programs,)](int(1000 * microseconds), num_warps=FULL_WARPS)


def case_of(
    rows: int, steps: int, hidden: int = 512, dtype: str = "bfloat16", device: str = "cuda", **rest: Any
) -> Built:
    return build(Sequences(GruSpec(dtype, hidden, **rest), (steps,) * rows), device)


def launch(built: Built, variant: GruVariant) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a whole sequence on the current stream; returns copies of the results."""
    for step in launches(built.case.spec, variant, built.call):
        run_step(step, lambda found: run([found]))
    return built.call.out.clone(), built.call.h_n.clone()


def require(same: bool, sentence: str) -> None:
    if not same:
        raise SystemExit(sentence)


def equal(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def two_streams() -> None:
    """Two streams launch grids of nearly all multiprocessors, many times: neither may wait for what the other holds."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    rows = 16 * max(1, processors // 32)
    built = [case_of(rows, 64), case_of(rows, 64)]
    wanted = [launch(b, SPLIT) for b in built]
    streams = [torch.cuda.Stream() for _ in built]
    torch.cuda.synchronize()
    found: list[tuple[int, tuple[torch.Tensor, torch.Tensor]]] = []
    for _ in range(60):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((index, launch(built[index], SPLIT)))
    torch.cuda.synchronize()
    require(all(equal(f, wanted[index]) for index, f in found), "two streams disturbed each other")


def beside_others() -> None:
    """Runs while half of the GPU is taken, and beside a long product of matrices."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    built = case_of(16 * max(1, processors // 32), 64)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    wanted = launch(built, SPLIT)
    occupy(1, 1.0)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()

    def half() -> None:
        occupy(processors + processors // 2, 20_000)

    def whole() -> None:
        occupy(4 * processors, 5_000)

    def product() -> None:
        for _ in range(10):
            torch.mm(matrix, matrix)

    tenants: tuple[Callable[[], None], ...] = (half, whole, product)
    for tenant in tenants:
        found = []
        for _ in range(5):
            with torch.cuda.stream(other):
                tenant()
            found.append(launch(built, SPLIT))
        torch.cuda.synchronize()
        require(all(equal(f, wanted) for f in found), f"wrong beside {tenant.__name__}")


def delays() -> None:
    """Delays programs of one grid at random, by other programs that come and go on their multiprocessors."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    draw = random.Random(0)
    noise = [torch.cuda.Stream() for _ in range(3)]
    occupy(1, 1.0)
    cases: list[tuple[Built, GruVariant]] = [
        (case_of(17, 200), dataclasses.replace(SPLIT, exchange=name, prefetch=prefetch))
        for name, prefetch in zip(EXCHANGES, ("early", "late", "early", "late"), strict=True)
    ]
    cases.append((case_of(65, 200, 256), TILE))
    cases.append((case_of(9, 200, 256, "float32", layers=4), dataclasses.replace(SPLIT, block_batch=8)))
    for built, variant in cases:
        wanted = launch(built, variant)
        torch.cuda.synchronize()
        for _ in range(10):
            for stream in noise:
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        occupy(draw.randrange(1, processors), draw.uniform(1, 60))
            require(equal(launch(built, variant), wanted), f"wrong with delays: {variant}")
    torch.cuda.synchronize()


def no_numbers() -> None:
    """The input has NaN and infinities, and the state has the bits that readers wait to see replaced: all ones."""
    for exchange in EXCHANGES:
        for dtype, steps in (("bfloat16", 9), ("float32", 9)):
            variant = dataclasses.replace(SPLIT, exchange=exchange, block_batch=8)
            built = case_of(3, steps, 256, dtype)
            integers = torch.int16 if dtype == "bfloat16" else torch.int32
            built.call.gates[0, 2, 1, 5] = float("nan")
            built.call.gates[0, 4, 2, 7] = float("inf")
            built.call.h_0.view(integers)[0, 0] = -1
            out, h_n = launch(built, variant)
            torch.cuda.synchronize()
            finite = out.isfinite()
            require(not bool(finite[:, 0].any()), f"a state that is no number gave numbers: {variant}")
            require(not bool(finite[3:, 1].any()), f"NaN was lost: {variant}")
            require(bool(finite[:2, 1].all()), f"NaN came before its time: {variant}")
            require(bool(finite[:, 2].all()), f"an infinite gate saturates, and no NaN of another row comes: {variant}")
            require(not bool((out.view(integers) == -1).any()), f"what readers wait for was written: {variant}")
            require(bool(h_n[0, :2].isnan().all()), f"h_n: {variant}")


def empty_tiles() -> None:
    """The same programs take tiles of cu_seqlens in turn, some without a token, each both ways."""
    for exchange in ("counter", "poll", "spin"):
        variant = dataclasses.replace(SPLIT, exchange=exchange, block_batch=8, turns=2)
        spec = GruSpec("float32", 256, "thd", directions=2)
        for lengths in ((0, *(3,) * 7) + (0,) * 8, (0,) * 8 + (0, *(3,) * 7), (3,) * 8 + (0,) * 8):
            built = build(Sequences(spec, lengths), "cuda")
            launch(built, variant)
            torch.cuda.synchronize()
            assert_steps_right(built)


DEEDS = {deed.__name__: deed for deed in (two_streams, beside_others, delays, no_numbers, empty_tiles)}

if __name__ == "__main__":
    DEEDS[sys.argv[1]]()
