"""Compile a launch ahead of time for a named architecture, with no GPU, and say what it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Iterable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tuned.families.launch import Launch, Step
from tuned.launching.launcher import _offsets_of_64_bits
from tuned.launching.plan import ALIGNED_BYTES, kind_of

from ..disk import write_if_different
from ..places import cache_folder
from ..rendering.structures import load

TYPES = {  # type of a tuned.launching.plan.Kind -> its name for Triton's compiler
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    float: "fp32",
    "i32": "i32",
    "i64": "i64",
}

# Options that say how a kernel is launched. Its machine code is the same with and without them, and its time is not.
AT_LAUNCH = ("launch_pdl", "launch_cooperative_grid")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs, and a digest of its machine code under a common name."""

    registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads, as ptxas -v counts them; a stack frame alone is no spill
    shared_bytes: int  # per program
    machine_code: str  # digest: equal for two variants whose code is the same
    programs: int = 0  # of the launch
    launches: int = 1  # how many of this launch a call has
    at_launch: tuple[Any, ...] = ()  # what else decides the time of a launch: options of AT_LAUNCH, and numbers


def target_of(architecture: str) -> GPUTarget:
    """The Triton target of "sm_90" or "gfx942".

    Raises:
        ValueError: for anything else.
    """
    if match := re.fullmatch(r"sm_(\d+)", architecture):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]+", architecture):
        return GPUTarget("hip", architecture, 64)
    raise ValueError(f"an architecture is sm_NN (NVIDIA) or gfxNNN (AMD), got {architecture!r}")


def source_of(function: Any, launch: Launch) -> ASTSource:
    """The launch as the compiler takes it: types, constants and what Triton specialises on.

    It specialises as a public launch does, so that both compile the same code: integers equal to 1 become constants,
    pointers and integers divisible by 16 are marked so, unless the kernel says do_not_specialize.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, (parameter, known) in enumerate(zip(function.params, specialised(function, launch), strict=True)):
        if parameter.is_constexpr or known[1]:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = known if parameter.is_constexpr else 1
            continue
        kind, _, by_16 = known
        signature[parameter.name] = TYPES[kind]
        if by_16:
            attributes[(index,)] = [["tt.divisibility", ALIGNED_BYTES]]
    return ASTSource(function, signature, constants, attributes)


def specialised(function: Any, launch: Launch) -> tuple[Any, ...]:
    """What the code knows of each argument: equal for launches that one compilation serves.

    An argument gives a Kind, a constexpr its value. They are tuples: a strategy with a launch a step asks for
    thousands.
    """
    values = (*launch.arguments, *launch.constants.values())
    return tuple(
        value if parameter.is_constexpr else kind_of(value, not parameter.do_not_specialize)
        for parameter, value in zip(function.params, values, strict=True)
    )


def same_code(function: Any, launch: Launch) -> tuple[Any, ...]:
    """A key that launches share if and only if one compilation serves them."""
    return launch.kernel, tuple(launch.options.items()), specialised(function, launch)


def distinct(steps: Iterable[Step]) -> list[tuple[Launch, int]]:
    """The launches among the steps of a call, in order: one of each code and grid, with how many there are of it."""
    found: dict[Any, tuple[Launch, int]] = {}
    for step in steps:
        if isinstance(step, Launch):
            key = (step.programs, same_code(load(step.kernel), step))
            first, count = found.get(key, (step, 0))
            found[key] = first, count + 1
    return list(found.values())


def compile_launch(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """The compiled kernel of a launch, from Triton's cache when it is there."""
    # Without line information two variants with the same code have the same bytes.
    triton.knobs.compilation.disable_line_info = True
    options = {k: v for k, v in launch.options.items() if k != "launch_pdl" or target.backend == "cuda"}
    # Compile for an AMD GPU as tuned.launching.launcher launches there.
    with _offsets_of_64_bits() if target.backend == "hip" else contextlib.nullcontext():
        return triton.compile(source_of(load(launch.kernel), launch), target=target, options=options)


def resources(launch: Launch, target: GPUTarget, count: int = 1) -> Resources:
    """Compile a launch, of which a call has ``count``, and read the compiler's report.

    The report is kept beside Triton's own cache, which does not store it.
    """
    triton.knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = compile_launch(launch, target)
    kept = cache_folder("resources") / f"{compiled.hash}.json"
    if not kept.exists():
        found = _read(compiled, log.getvalue())
        if not found.registers:  # Triton's cache had the kernel but not the report: compile once more for that
            with triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
                triton.knobs.compilation.always_compile = True
                found = _read(compile_launch(launch, target), log.getvalue())
        report = dataclasses.asdict(found)
        del report["at_launch"]  # of the launch; and older revisions, which read this file too, do not know it
        write_if_different(kept, json.dumps(report))
    return dataclasses.replace(
        Resources(**json.loads(kept.read_text())),
        programs=launch.programs,
        launches=count,
        at_launch=(
            *(name for name in AT_LAUNCH if launch.options.get(name)),
            *(value for value in launch.arguments if isinstance(value, int | float)),
        ),
    )


def _read(compiled: CompiledKernel, log: str) -> Resources:
    code: bytes = compiled.kernel.replace(compiled.name.encode(), b"kernel")
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0)
    if not registers and "amdgcn" in compiled.asm:  # AMD reports in the assembly instead
        text = compiled.asm["amdgcn"]
        registers = max((int(n) for n in re.findall(r"\.vgpr_count:\s+(\d+)", text)), default=0)
        spills = sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)) * 4
    return Resources(registers, spills, compiled.metadata.shared, hashlib.sha256(code).hexdigest()[:16])
