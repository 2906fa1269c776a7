"""The tuned softmax and RMSNorm beside those of torch.compile, on this GPU: python examples/own_kernel/compare.py.

PyTorch's operator is compiled for each shape alone. Both are timed on the device (CUDA graphs over inputs and results
beyond the L2) and as a call. Writes results/DEVICE.json beside this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rmsnorm
import softmax
import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # the checkout

from generator.measuring.bench import (  # noqa: E402
    copy_time,
    device_time,
    host_time,
    keeping,
    sets_beyond_l2,
    timed_emptying,
)
from generator.measuring.environment import environment  # noqa: E402
from tuned import explain  # noqa: E402

MOST_SETS = 64
ROUNDS = 5  # in each, both are timed in turn


def arguments(family: Any, call: Any) -> tuple[Any, ...]:
    """The arguments of a family's function, for the tensors of a call."""
    return (call.x,) if family is softmax else (call.x, call.weight)


def operator(family: Any) -> Callable[..., torch.Tensor]:
    """PyTorch's operator, as a model calls it."""
    if family is softmax:
        return lambda x: torch.softmax(x, -1)
    return lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def measured(family: Any, problem: Any) -> dict[str, Any]:
    """The row of one shape: microseconds of each way, medians of interleaved rounds."""
    one = family.bytes_moved(problem.spec, problem.size)
    beyond = sets_beyond_l2(one)
    count = min(beyond, MOST_SETS)
    emptied = timed_emptying() if beyond > count else None  # as the tuner does if the sets are too few to leave the L2
    calls = [family.inputs(problem.spec, problem.size, "cuda", seed) for seed in range(count)]
    given = [arguments(family, call) for call in calls]
    torch._dynamo.reset()  # noqa: SLF001 - each shape is compiled as if it were the only one
    theirs = torch.compile(operator(family), dynamic=False)
    ours = getattr(family, problem.family)
    wanted, bound = family.reference(problem.spec, calls[0])
    assert bool(((ours(*given[0]).double() - wanted).abs() <= bound).all()), problem.name
    theirs(*given[0])
    ways = {"ours": ours, "compiled": theirs}
    clock = functools.partial(device_time, emptied=emptied)
    device: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            kept = keeping([functools.partial(way, *g) for g in given])
            device[name].append(clock(kept).median_us)
            host[name].append(host_time(functools.partial(way, *given[0]), batches=5).median_us)
    choice = explain(ours, *given[0])
    copied = copy_time([(call.x, torch.empty_like(call.x)) for call in calls], clock).median_us
    return {
        "problem": problem.name,
        "rule": choice.rule,
        "device_us": {name: statistics.median(times) for name, times in device.items()},
        "host_us": {name: statistics.median(times) for name, times in host.items()},
        "copy_us": copied,
    }


def main() -> int:
    """Measure, print and write all shapes of both families."""
    torch.set_grad_enabled(False)
    rows = [measured(family, problem) for family in (softmax, rmsnorm) for problem in family.problems()]
    here = environment(0)
    (HERE / "results").mkdir(exist_ok=True)
    path = HERE / "results" / f"{here['device']}.json"
    path.write_text(json.dumps({"environment": here, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    table = Table("problem", "rule", "us", "torch.compile / ours", "call us", "torch.compile / ours", "copy / ours")
    for row in rows:
        device, host = row["device_us"], row["host_us"]
        figures = (device["ours"], device["compiled"] / device["ours"], host["ours"], host["compiled"] / host["ours"])
        table.add_row(row["problem"], row["rule"], *(f"{f:.2f}" for f in (*figures, row["copy_us"] / device["ours"])))
    Console(width=120).print(table)
    for name in ("softmax", "rmsnorm"):
        ratios = [r["device_us"]["compiled"] / r["device_us"]["ours"] for r in rows if r["problem"].startswith(name)]
        print(f"{name}: geometric mean {statistics.geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")  # noqa: T201
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("compare.py measures on a GPU, and torch sees none")
    sys.exit(main())
