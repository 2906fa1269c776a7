"""Facts of a compiled recurrence, as plain values; runs in a separate process, see tests.support.compiling."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuned.families.gru.spec import GruSize, GruSpec
    from tuned.families.gru.variant import GruVariant

LOAD = re.compile(r"\b(?:tt|amdg|amdgpu)\.(?:buffer_)?load\b.*?tensor<([\dx]+)x(?:!tt\.ptr<)?\w+")
LAYOUT = re.compile(r"^(#\w+) = #ttg\.(blocked|linear)<\{(.*)\}>", re.MULTILINE)
GUARDED = re.compile(r"@p\d+ ld\.relaxed")
VECTOR = re.compile(r"\bld\.global\S*\.v\d")
RESULT = re.compile(r"-> tensor<[^,]*, (#\w+)>")


@dataclasses.dataclass(frozen=True)
class Found:
    """One compiled launch."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    cooperative: bool
    loads: tuple[str, ...]  # the shape of every load from global memory in the loop of the steps, as "16x512"
    stores: int  # stores to global memory in the loop
    converts: int  # conversions between layouts in the loop
    waits: tuple[tuple[int, ...], ...]  # for each wait in PTX: how a thread's elements lie in a row, see neighbours
    asm: int  # loops of such waits in the whole PTX
    guarded: int  # predicated loads of such waits, in the whole PTX
    shuffles: int  # in the whole PTX: for sums whose parts several threads hold
    vectors: int  # loads from global memory of several elements, in the whole PTX


def found(spec: GruSpec, size: GruSize, variant: GruVariant, architecture: str, family: str = "gru") -> Found:
    """Compile the recurrence of a call, or its gradient, for an architecture."""
    from generator.measuring.compile import compile_launch, resources, target_of  # noqa: PLC0415 - imports Triton
    from generator.workload import WORKLOADS  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415

    work = WORKLOADS[family]
    steps = work.family.launches(spec, variant, work.inputs(spec, size, "meta", 0))
    launch = next(step for step in steps if isinstance(step, Launch))
    target = target_of(architecture)
    needs, compiled = resources(launch, target), compile_launch(launch, target)
    text = compiled.asm["ttgir"]
    body = _loop(text)
    layouts = {name: neighbours(kind, fields) for name, kind, fields in LAYOUT.findall(text)}
    asm = [line for line in body.splitlines() if "tt.elementwise_inline_asm" in line]
    return Found(
        registers=needs.registers,
        spill_bytes=needs.spill_bytes,
        shared_bytes=needs.shared_bytes,
        cooperative=bool(compiled.metadata.launch_cooperative_grid),
        loads=tuple(sorted(match[1] for match in LOAD.finditer(body))),
        stores=body.count("tt.store") + body.count("buffer_store"),
        converts=body.count("ttg.convert_layout"),
        waits=tuple(layouts[RESULT.findall(line)[-1]] for line in asm),
        asm=compiled.asm.get("ptx", "").count("again:"),
        guarded=len(GUARDED.findall(compiled.asm.get("ptx", ""))),
        shuffles=compiled.asm.get("ptx", "").count("shfl."),
        vectors=len(VECTOR.findall(compiled.asm.get("ptx", ""))),
    )


def _loop(text: str) -> str:
    """The loop of the steps: the longest loop with no other inside. In the form "row" it is a "while", and there is no "for"."""
    lines = text.splitlines()
    begins = "scf.for" if "scf.for" in text else "} do {"
    found: list[list[str]] = []
    for first, line in enumerate(lines):
        if begins in line:
            end = line[: len(line) - len(line.lstrip())] + "}"
            last = next(i for i in range(first + 1, len(lines)) if lines[i].startswith(end))
            if not any(begins in inner for inner in lines[first + 1 : last]):
                found.append(lines[first:last])
    return "\n".join(max(found, key=len))


def neighbours(kind: str, fields: str) -> tuple[int, ...]:
    """The places in a row of the first elements that a thread holds, in the order of its registers.

    (0, 1, 2, 3) is four neighbours. The run ends before the first element that is not the next one of the same row.
    """
    if kind == "linear":
        registers = [tuple(map(int, base)) for base in re.findall(r"\[(\d+), (\d+)\]", fields.partition("lane")[0])]
        run = [0]
        for index, base in enumerate(registers):
            if base != (0, 1 << index):
                break
            run += [x + (1 << index) for x in run]
        return tuple(run)
    numbers: dict[str, Any] = {
        name: [int(n) for n in values.split(",")] for name, values in re.findall(r"(\w+) = \[([\d, ]+)\]", fields)
    }
    if len(numbers["order"]) != 2 or numbers["order"][0] != 1:
        return (0,)
    return tuple(range(numbers["sizePerThread"][1]))
