"""A GRU on a part of a GPU: ``python -m tests.gpu.green <deed>``. It prints "skip: <why>" if the driver gives no part.

asked: the driver is asked how many programs may wait for each other. unasked: a launch that fails shows it.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

import tuned
import tuned.nn
from tuned.calls.gru import run
from tuned.families.gru.variant import GruVariant, programs
from tuned.launching import residents
from tuned.lookup.lookup import Choice

PART = 32  # multiprocessors
WAITING = GruVariant("persistent", "split", 16, 16, "spin")
ATOL = 3e-2  # bfloat16


def part() -> Any:
    """A green context of a part of the GPU; without one the process ends."""
    try:
        from torch.cuda import green_contexts  # noqa: PLC0415 - newer versions of torch have it
    except ImportError as error:
        skip(error)
    try:  # a torch built without them raises here
        return green_contexts.GreenContext.create(PART, 0)
    except RuntimeError as error:
        skip(error)


def skip(error: Exception) -> NoReturn:
    """End the process with the reason."""
    sys.stdout.write(f"skip: {str(error).splitlines()[0]}\n")
    sys.exit(0)


def captured(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The output of a call in a replayed graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = module(x)
    output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return output


def main(deed: str, layers: int) -> None:
    """Calls on the whole GPU, on a part of it, captured on that part, and on the whole GPU again."""
    green = part()
    genuine, asked = run._choose, residents._multiprocessors

    def choose(spec: Any, size: Any, gpu: Any, *limit: int) -> Choice:
        if limit:
            return genuine(spec, size, gpu, *limit)
        assert PART < programs(spec, size, WAITING) <= gpu.multiprocessors
        return Choice("default", "", WAITING)

    run._choose = choose  # type: ignore[assignment]
    if deed == "unasked":
        residents._multiprocessors = lambda _device: None
    torch.manual_seed(0)
    module = tuned.nn.GRU(64, 1024 // layers, layers, device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(20, 3, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        module(x)
        wanted = module(x)[0].clone()  # by the short way
        torch.cuda.synchronize()
        green.set_context()
        for _ in range(3):
            found = module(x)[0]
            torch.cuda.synchronize()
            torch.testing.assert_close(found, wanted, rtol=0, atol=ATOL)
        told = tuned.explain(module, x).why
        if layers == 1:  # several layers run one by one, and a layer of fewer units has room
            assert "may wait for each other here" in told, told
        if deed == "asked":
            assert residents.allowed(0) == PART, residents.allowed(0)
            torch.testing.assert_close(captured(module, x), wanted, rtol=0, atol=ATOL)
        green.pop_context()
        assert torch.equal(module(x)[0], wanted)
        if deed == "asked":
            # PyTorch keeps the streams that it made above. They still belong to the part, which only the driver tells.
            torch.testing.assert_close(captured(module, x), wanted, rtol=0, atol=ATOL)
    residents._multiprocessors = asked


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
