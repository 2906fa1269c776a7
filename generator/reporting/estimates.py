"""Compile, check and estimate without a GPU, and report as it goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..answer import put
from ..estimating import offline
from ..estimating.offline import PICKS, Estimate, check_sample
from ..estimating.targets import Target
from ..places import TUNE
from ..problem import Problem
from ..rendering.structures import structures
from ..storage.record import read_record
from ..workload import default_variant
from .report import knobs


def picks(estimate: Estimate) -> list[str]:
    """The picks of a problem with their registers and shared memory, and the measured row beside them, as lines."""
    default = default_variant(estimate.problem)
    lines = [estimate.problem.name]
    for us, variant in estimate.ranked[:PICKS]:
        needs = estimate.compiled[variant]
        registers = "+".join(str(n.registers) for n in needs) or "no"
        shared = "+".join(str(n.shared_bytes) for n in needs) or "no"
        lines.append(
            f"    estimated {us:8.2f} us  {registers} registers, {shared} bytes shared: {knobs(variant, default)}"
        )
    return [*lines, f"    {beside(estimate, default)}"]


def beside(estimate: Estimate, default: Any) -> str:
    """A line with the measured row of the same problem, and the rank that the estimate gives its variant."""
    if estimate.measured is None:
        return "measured: no row in the record"
    row = estimate.measured
    order = [v for _, v in estimate.ranked]
    place = f"rank {order.index(row.variant) + 1} of {len(order)} here" if row.variant in order else "not compiled here"
    return f"measured  {row.median_us:8.2f} us  {place}: {knobs(row.variant, default)}"


# The meaning of a rank, said once below the picks.
RANK = (
    "A rank is the place of the measured winner among the variants that were compiled here, ordered by the estimate: rank 1 of "
    "40 is the estimate's own first pick, rank 40 of 40 the one that it thinks slowest. Not compiled here: the winner was ruled "
    "out or is not legal on this device."
)


# Beginning of a line, without its indent -> its style on a terminal.
STYLES = {
    "Without a GPU": "bold",
    "Estimated for": "bold",
    "WRONG": "red",
    "ruled out": "dim",
    "A rank is": "dim",
    "not reached": "yellow",
    "skipped": "yellow",
    "Not done": "yellow",
}


def style_of(line: str) -> str:
    """The style of a line that ``run_offline`` says."""
    return next((style for begin, style in STYLES.items() if line.lstrip().startswith(begin)), "")


def facts(estimate: Estimate) -> dict[str, Any]:
    """The results of a problem for programs; times are estimates, except that of the measured row."""
    row, order = estimate.measured, [v for _, v in estimate.ranked]
    return {
        "problem": estimate.problem.name,
        "declared": estimate.pool.declared,
        "legal": len(estimate.pool.variants),
        "compiled": len(estimate.compiled),
        "ranked": len(order),
        "picks": [{"estimated_us": us, "variant": v} for us, v in estimate.ranked[:PICKS]],
        "measured_us": None if row is None else row.median_us,
        "rank_of_measured": order.index(row.variant) + 1 if row is not None and row.variant in order else None,
    }


def funnel(estimate: Estimate) -> str:
    """The counts of variants from declared to distinct, in one line."""
    sampled = len(estimate.compiled) + sum(v not in estimate.compiled for v in estimate.refused)
    what = "all" if sampled == len(estimate.pool.variants) else f"a ranked sample of {sampled}"
    return (
        f"{estimate.problem.name}: {estimate.pool.declared} declared -> {len(estimate.pool.variants)} legal -> "
        f"{what}: {len(estimate.compiled)} compiled -> {len(estimate.ranked)} without spills -> "
        f"{estimate.distinct} distinct in machine code"
    )


def resource_use(estimate: Estimate) -> str:
    """The range of registers, shared memory and spills of the sample's kernels."""
    every = [need for needs in estimate.compiled.values() for need in needs]
    if not every:
        return "nothing compiled"
    registers = [n.registers for n in every]
    return (
        f"registers a thread {min(registers)} to {max(registers)}, shared memory a program up to "
        f"{max(n.shared_bytes for n in every)} bytes, spills up to {max(n.spill_bytes for n in every)} bytes a thread"
    )


def run_offline(  # noqa: PLR0913 - the parts are independent of each other
    problems: list[Problem],
    target: Target,
    count: int,
    folder: Path | None,
    budget_s: float,
    say: Callable[[str], None],
    step: Callable[[], None] = lambda: None,
) -> bool:
    """Compile, check and estimate, and report as it goes; True if each problem compiles and every checked result is right.

    A problem without a legal variant is left out, unless there is no other. ``step`` is called after each problem.
    """
    winners = read_record(target.device, folder)
    say(
        f"Without a GPU, for {target.device} ({target.architecture}): {len(structures())} kernels rendered; "
        f"{len(problems)} problems, {count} variants compiled for each."
    )

    def tell(estimate: Estimate) -> None:
        say(funnel(estimate))
        if not estimate.pool.variants:  # tuned on the GPU it would be skipped too, so that is no mistake of a kernel
            say("    skipped: no variant of it is legal here")
            step()
            return
        say(f"    {resource_use(estimate)}")
        for reason in sorted(set(estimate.refused.values()))[:PICKS]:
            say(f"    ruled out: {reason}")
        step()

    estimates, left = offline.estimate_all(problems, target, count, winners, budget_s, tell)
    checked = check_sample(estimates)
    wrong = [(name, v, said) for (name, v), said in checked.items() if said is not None]
    say(f"checked in the interpreter against float64: {len(checked) - len(wrong)} of {len(checked)} right")
    for name, variant, said in wrong:
        say(f"    WRONG {name}: {said}: {variant}")
    broken = [e.problem.name for e in estimates if e.pool.variants and not e.compiled]
    if broken:
        say(f"    WRONG: no variant of {', '.join(broken)} compiles")
    say(f"Estimated for {target.device}, not measured; best first, within 2 percent the simpler first:")
    for line in (line for e in estimates if e.pool.variants for line in picks(e)):
        say(line)
    if any(e.measured is not None for e in estimates):
        say(RANK)
    if left:
        say(f"not reached in the time budget: {', '.join(p.name for p in left)}")
    path = offline.save(estimates, target)
    put(
        target=target.device,
        estimated=True,
        estimates=[facts(e) for e in estimates],
        checked=len(checked),
        wrong=[{"problem": name, "variant": v, "why": said} for name, v, said in wrong],
        not_compiled=broken,
        not_reached=[p.name for p in left],
        path=path,
    )
    say(f"the estimates, marked as such: {path}")
    say(
        "Not done, since it needs the device: timing, the check on its hardware, and a row in a dispatch table. No measured "
        f"row was touched. On a machine with the GPU, {TUNE} --gpu auto does it."
    )
    tried = [e for e in estimates if e.pool.variants]
    return not wrong and not broken and bool(tried or left)  # without any, a tuner on the GPU ends with 1 too
