"""Compile kernels for named architectures in a separate process, where Triton compiles and does not interpret.

Whether @triton.jit makes a compiled or an interpreted kernel is settled when the kernel is defined, so one process
cannot do both. Tests submit these functions by name to the compiling process, and only plain values come back.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import hashlib
import importlib.metadata
import multiprocessing
import os
import re
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from generator.problem import Problem
    from tuned.families.gru_cell.spec import GruCellSpec
    from tuned.families.gru_cell.variant import GruCellVariant
    from tuned.families.launch import Launch


TRITON = tuple(
    int(part) for part in importlib.metadata.version("triton").split(".")[:2]
)  # major and minor; a test that holds for one version only says so


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    import generator.measuring.compile  # noqa: F401, PLC0415 - imports Triton

    gc.collect()
    gc.freeze()  # the garbage collector then skips all imported objects: saves a twentieth of the time of a compilation


def process() -> concurrent.futures.ProcessPoolExecutor:
    """One compiling process: pytest-xdist has a worker for each core already."""
    return concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_compile_for_real
    )


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one compiled kernel needs."""

    registers: int
    spill_bytes: int


@functools.cache
def default_launches(capability: int = 90) -> dict[str, Launch]:
    """Kernel name -> the launch that an untuned call of the kernel gets; tensors are on the device "meta"."""
    import torch  # noqa: PLC0415 - what follows imports Triton

    from generator.families.rope import reference as rope  # noqa: PLC0415
    from generator.families.rope.texts import (  # noqa: PLC0415
        angle_gradient_specs,
        append_specs,
        mla_specs,
        norm_specs,
        rope_specs,
        row_specs,
    )
    from tuned.families.copying import KERNEL as COPY  # noqa: PLC0415
    from tuned.families.copying import copy_launch, filled  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415
    from tuned.families.rope.launches import launches as rope_launches  # noqa: PLC0415
    from tuned.families.rope.spec import RopeSize  # noqa: PLC0415
    from tuned.families.rope.variant import default_variant as rope_default  # noqa: PLC0415
    from tuned.launching.launcher import PROBE_KERNEL  # noqa: PLC0415

    found = {}
    specs = (*rope_specs(), *norm_specs(), *mla_specs(), *append_specs(), *angle_gradient_specs())
    wanted = [(spec, rope_default(spec)) for spec in specs]
    wanted += [(spec, dataclasses.replace(rope_default(spec), whole_rows=True)) for spec in row_specs()]
    for spec, variant in wanted:
        call = rope.inputs(spec, RopeSize(batch=2, seq=4096), "meta", 0)
        for launch in rope_launches(spec, variant, call):
            found[launch.kernel] = launch
    freqs, cos, sin = (torch.empty((4, 16), dtype=torch.float32, device="meta") for _ in range(3))
    constants = {"WIDTH": 16, "BLOCK": 1024, "PDL": False}
    found[PROBE_KERNEL] = Launch(PROBE_KERNEL, 1, (freqs, cos, sin, 4, 16, 1), constants, {"num_warps": 4})
    memory = torch.empty(64, dtype=torch.int16, device="meta")
    found[COPY] = copy_launch([(memory, memory, filled(1, 1, 0))])
    found |= product_launches(capability)
    found |= recurrences("spin")
    found |= gradients()
    return found


def product_launches(capability: int = 90) -> dict[str, Launch]:
    """Kernel name -> the launch that an untuned GRU step or linear over segments gets, at sizes that select each form."""
    from generator.families.gru_cell import reference as gru_cell  # noqa: PLC0415 - as above
    from generator.families.gru_cell.texts import gru_gates_specs  # noqa: PLC0415
    from generator.families.linear_cat import reference as linear_cat  # noqa: PLC0415
    from generator.families.linear_cat.problems import problems as linear_problems  # noqa: PLC0415
    from tuned.families.gru_cell.launches import launches as cell_launches  # noqa: PLC0415
    from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec  # noqa: PLC0415
    from tuned.families.gru_cell.variant import GruCellVariant  # noqa: PLC0415
    from tuned.families.gru_cell.variant import default_variant as cell_default  # noqa: PLC0415
    from tuned.families.gru_cell.variant import fit as cell_fit  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415
    from tuned.families.linear_cat.launches import launches as linear_launches  # noqa: PLC0415
    from tuned.families.linear_cat.variant import default_variant as linear_default  # noqa: PLC0415

    steps: list[Any] = []
    for spec in gru_gates_specs():
        call = gru_cell.inputs(spec, GruCellSize(batch=64), "meta", 0)
        steps += cell_launches(spec, GruCellVariant("library", 1, 256), call)
    fused = GruCellSpec("bfloat16", 1024, (256, 1024))
    for size in map(GruCellSize, (1, 64, 256)):
        call = gru_cell.inputs(fused, size, "meta", 0)
        steps += cell_launches(fused, cell_fit(cell_default(fused, size), fused, capability), call)
    single, size = GruCellSpec("float32", 192, (192,), precision="ieee"), GruCellSize(40)
    steps += cell_launches(single, GruCellVariant("outer", 8, 2, num_warps=2), gru_cell.inputs(single, size, "meta", 0))
    unaligned, size = GruCellSpec("bfloat16", 675, (675,)), GruCellSize(180)
    padded = cell_fit(GruCellVariant("padded", 64, 16, 64, k_parts=1, num_stages=6), unaligned, capability)
    steps += cell_launches(unaligned, padded, gru_cell.inputs(unaligned, size, "meta", 0))
    for problem in linear_problems():
        variant = linear_default(problem.spec, problem.size)
        steps += linear_launches(problem.spec, variant, linear_cat.inputs(problem.spec, problem.size, "meta", 0))
    return {step.kernel: step for step in steps if isinstance(step, Launch)}


@functools.cache
def recurrences(exchange: str) -> dict[str, Launch]:
    """Kernel name -> the launch of a whole sequence, for every text of the recurrence."""
    from generator.families.gru import reference as gru  # noqa: PLC0415 - as above
    from generator.families.gru.texts import gru_texts  # noqa: PLC0415
    from tuned.families.gru.launches import launches  # noqa: PLC0415
    from tuned.families.gru.spec import GruSize  # noqa: PLC0415
    from tuned.families.gru.variant import row_variant  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415

    found = {}
    for text, structure in gru_texts():
        # A tile could hold more, but with twice the units or rows the kernel spills, and tuning would drop it.
        hidden = 256 if structure.form == "split" else 128
        spec = dataclasses.replace(text, hidden=hidden)
        variant = dataclasses.replace(structure, exchange=exchange, block_hidden=16, block_batch=16)
        if structure.by_row:  # the form "row" has one variant, whose program waits for no other
            variant = row_variant(spec.hidden)
        if structure.staged:  # several pieces
            spec = text
        call = gru.inputs(spec, GruSize(batch=32, seq=8), "meta", 0)
        found |= {step.kernel: step for step in launches(spec, variant, call) if isinstance(step, Launch)}
    return found


@functools.cache
def gradients() -> dict[str, Launch]:
    """Kernel name -> the launch of the gradient of a whole sequence, for every text of it; "thd" has the exchange "counter"."""
    from generator.families.gru_backward import reference as gru_backward  # noqa: PLC0415 - as above
    from generator.families.gru_backward.texts import texts  # noqa: PLC0415
    from tuned.families.gru.spec import GruSize  # noqa: PLC0415
    from tuned.families.gru_backward.launches import launches  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415

    found = {}
    for _, _, text, structure, _ in texts():
        spec = dataclasses.replace(text, hidden=128)
        exchange = "counter" if spec.thd else "poll"
        variant = dataclasses.replace(structure, exchange=exchange, block_hidden=16, block_batch=8)
        call = gru_backward.inputs(spec, GruSize(batch=32, seq=8), "meta", 0)
        found |= {step.kernel: step for step in launches(spec, variant, call) if isinstance(step, Launch)}
    return found


def waiting_code(name: str, exchange: str) -> tuple[str, int, bool]:
    """PTX of a whole sequence on sm_90, bytes that it spills, and whether its launch is cooperative: all programs at once."""
    from generator.measuring.compile import compile_launch, resources, target_of  # noqa: PLC0415

    launch, target = recurrences(exchange)[name], target_of("sm_90")
    spill_bytes = resources(launch, target).spill_bytes
    compiled = compile_launch(launch, target)
    return compiled.asm["ptx"], spill_bytes, compiled.metadata.launch_cooperative_grid


def staged_steps(strategy: str) -> tuple[int, list[list[tuple[int, int]]]]:
    """How often a stage compiles for a call of six steps; and for each of its thunks, the steps (begin, end) of every launch."""
    import torch  # noqa: PLC0415 - as above

    from generator.measuring import stage as module  # noqa: PLC0415
    from generator.problem import Problem  # noqa: PLC0415
    from tuned.families.gru.spec import GruSize, GruSpec  # noqa: PLC0415
    from tuned.families.gru.variant import GruVariant  # noqa: PLC0415

    compiled: list[Launch] = []
    launched: list[tuple[int, int]] = []

    def direct(code: Launch, _: int) -> Any:
        begin = next(i for i, p in enumerate(module.load(code.kernel).params) if p.name == "t_begin")
        return lambda _, values: launched.append(values[begin : begin + 2])

    module.compile_launch = lambda launch, _: compiled.append(launch) or launch  # type: ignore[assignment, func-returns-value]
    module.direct_launcher = direct  # type: ignore[assignment]
    stage = module.Stage(Problem("six steps", "gru", GruSpec("bfloat16", 32), GruSize(3, 6)), None, "cpu")
    thunks = []
    exchange = "poll" if strategy == "persistent" else GruVariant.exchange
    for thunk in stage.launches(GruVariant(strategy, block_hidden=16, exchange=exchange)):
        launched.clear()
        thunk()
        thunks.append(list(launched))
    if strategy == "persistent":
        assert bool((stage.probe.out.view(torch.int16) == -1).all()), "what readers wait for was not put into place"
    return len(compiled), thunks


def needs(name: str, architecture: str) -> Needs:
    """Compile a kernel's default launch for an architecture."""
    from generator.measuring.compile import resources, target_of  # noqa: PLC0415

    launches = default_launches() if architecture.startswith("sm_") else default_launches(0)
    if architecture != "sm_90":
        launches = launches | recurrences("poll")  # the exchange "spin" is PTX of sm_90
    found = resources(launches[name], target_of(architecture))
    return Needs(found.registers, found.spill_bytes)


def instructions(cubin: bytes) -> list[str]:
    """The machine code of a cubin, one instruction a line, without addresses and names."""
    from triton.backends.nvidia import compiler  # noqa: PLC0415

    from generator.disk import write_if_different  # noqa: PLC0415
    from generator.places import cache_folder  # noqa: PLC0415

    # The text is kept in the cache, beside the compiler's reports: disassembling takes a quarter of a second.
    digest = hashlib.sha256(cubin + importlib.metadata.version("triton").encode()).hexdigest()
    kept = cache_folder("disassembled") / f"{digest}.txt"
    if not kept.exists():
        tool = Path(compiler.__file__).parent / "bin" / "nvdisasm"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [tool, "-ndf", "-c", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        write_if_different(kept, text)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?;)", kept.read_text())


def machine_code(cubin: bytes) -> bytes:
    """The bytes of a cubin's .text section, which holds no names. It takes no time; disassembling takes 0.25 s."""
    table, width, count, names = (*struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<3H", cubin, 0x3A))
    # The fields of a section header: name, type, flags, address, offset, size (ELF-64 specification, figure 8).
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + width * index) for index in range(count)]
    strings = sections[names][4]
    (text,) = (s for s in sections if cubin[strings + s[0] :].startswith(b".text."))
    return cubin[text[4] : text[4] + text[5]]


# Instructions of sm_90 have 128 bits. The lowest 12 say which access it is, bits 73 to 75 how many bits it moves.
ACCESSES = {0x981: "LDG", 0x986: "STG", 0xFAE: "LDGSTS"}
MOVED = (8, 8, 16, 16, 32, 64, 128)  # signed and unsigned


def accesses(cubin: bytes) -> dict[str, dict[int, int]]:
    """Kind, "LDG", "STG" or "LDGSTS" (to shared memory), -> bits -> how many such instructions a cubin of sm_90 has."""
    found = Counter(
        (ACCESSES[low & 0xFFF], MOVED[high >> 9 & 7])
        for low, high in struct.iter_unpack("<QQ", machine_code(cubin))
        if low & 0xFFF in ACCESSES
    )
    return {kind: {bits: n for (k, bits), n in found.items() if k == kind} for kind in ACCESSES.values()}


def accesses_and_instructions(name: str) -> tuple[dict[str, dict[int, int]], list[str]]:
    """``accesses`` of a kernel's default launch on sm_90, and ``instructions``."""
    from generator.measuring.compile import compile_launch, resources, target_of  # noqa: PLC0415 - as above

    launch, target = default_launches()[name], target_of("sm_90")
    resources(launch, target)
    cubin = compile_launch(launch, target).asm["cubin"]
    return accesses(cubin), instructions(cubin)


def code_digests(architecture: str) -> dict[str, str]:
    """Kernel name -> digest of the machine code of its default launch."""
    from generator.measuring.compile import compile_launch, resources, target_of  # noqa: PLC0415

    target, found = target_of(architecture), {}
    # Another process may be compiling the same launches for `needs`, from the first on. This one starts at the last, so that each
    # finds what the other has compiled.
    for name, launch in sorted(default_launches().items(), reverse=True):
        resources(launch, target)
        found[name] = hashlib.sha256(machine_code(compile_launch(launch, target).asm["cubin"])).hexdigest()
    return found


def packed_halves(arguments: dict[str, Any], knobs: dict[str, Any], strides: tuple[int, int, int, int]) -> list[str]:
    """The instructions of a RoPE call's PTX on sm_90 that add two 16-bit integers at once.

    ``strides`` of x and the output: tokens, batch, heads, features.
    """
    from generator.families.rope.reference import inputs  # noqa: PLC0415 - as above
    from generator.measuring.compile import compile_launch, target_of  # noqa: PLC0415
    from tuned.families.rope.launches import launches  # noqa: PLC0415
    from tuned.families.rope.spec import RopeSize, RopeSpec  # noqa: PLC0415
    from tuned.families.rope.variant import RopeVariant  # noqa: PLC0415

    spec = RopeSpec(**arguments)
    call = inputs(spec, RopeSize(batch=2, seq=16), "meta", 0)
    call = dataclasses.replace(call, x_strides=strides, out_strides=strides)
    found = []
    for launch in launches(spec, RopeVariant(**knobs), call):
        ptx = compile_launch(launch, target_of("sm_90")).asm["ptx"]
        found += re.findall(r"\w+\.[su]16x2", ptx)
    return found


def widths(
    arguments: dict[str, Any], knobs: dict[str, Any], shift: int = 0, key_shift: int = 0
) -> dict[str, dict[int, int]]:
    """``accesses`` of a RoPE kernel on sm_90.

    ``shift`` moves x and the output by so many elements from an aligned address, ``key_shift`` the key and its output.
    """
    from generator.families.rope.reference import inputs  # noqa: PLC0415
    from generator.measuring.compile import compile_launch, resources, target_of  # noqa: PLC0415
    from generator.rendering.structures import load  # noqa: PLC0415
    from tuned.families.rope.launches import launches  # noqa: PLC0415
    from tuned.families.rope.spec import RopeSize, RopeSpec  # noqa: PLC0415
    from tuned.families.rope.variant import default_variant  # noqa: PLC0415

    spec = RopeSpec(**arguments)
    call = inputs(spec, RopeSize(batch=2, seq=4096), "meta", 0)
    if shift:
        call = dataclasses.replace(call, x=_moved(call.x, shift), out=_moved(call.out, shift))
    variant = dataclasses.replace(default_variant(spec), **knobs)
    launch, *_ = launches(spec, variant, call)
    if key_shift:
        named = [parameter.name for parameter in load(launch.kernel).params[: len(launch.arguments)]]
        arguments = zip(named, launch.arguments, strict=True)
        moved = tuple(_moved(t, key_shift) if name in ("key", "key_out") else t for name, t in arguments)
        launch = dataclasses.replace(launch, arguments=moved)
    target = target_of("sm_90")
    resources(launch, target)  # keeps the report for another test: Triton's cache may have forgotten the kernel
    return accesses(compile_launch(launch, target).asm["cubin"])


def rope_needs(arguments: dict[str, Any], architecture: str) -> tuple[int, Needs]:
    """``chunk_heads`` of the default variant for 4,096 tokens, and the needs of its kernel."""
    from generator.families.rope.reference import inputs  # noqa: PLC0415
    from generator.measuring.compile import resources, target_of  # noqa: PLC0415
    from tuned.families.rope.launches import launches  # noqa: PLC0415
    from tuned.families.rope.spec import RopeSize, RopeSpec  # noqa: PLC0415
    from tuned.families.rope.variant import default_variant  # noqa: PLC0415

    spec, size = RopeSpec(**arguments), RopeSize(batch=1, seq=4096)
    variant = default_variant(spec, size)
    launch, *_ = launches(spec, variant, inputs(spec, size, "meta", 0))
    return variant.chunk_heads, resources(launch, target_of(architecture))


def _moved(tensor: Any, elements: int) -> Any:
    """The tensor with an address that is some elements further on, which is all that the compiler sees of it."""
    import torch  # noqa: PLC0415 - as above

    address = tensor.data_ptr() + elements * tensor.element_size()
    moved = type("Moved", (torch.Tensor,), {"data_ptr": lambda _: address})
    return tensor.as_subclass(moved)


def pool_failures(problem: Problem, first: int, step: int) -> tuple[int, dict[str, str]]:
    """Compile every ``step``th variant of a pool from ``first`` on: their number, and variant -> what is wrong with it."""
    from generator.processes.compiler import compile_variant  # noqa: PLC0415
    from generator.searching.pool import legal_pool  # noqa: PLC0415

    variants = legal_pool(problem, 90).variants[first::step]
    found = {str(variant): compile_variant(problem, variant, "sm_90") for variant in variants}
    return len(variants), {variant: result for variant, result in found.items() if isinstance(result, str)}


def code_with_pdl(name: str) -> list[str]:
    """The machine code on sm_90 of a kernel's default launch with pdl=True."""
    from generator.measuring.compile import compile_launch, target_of  # noqa: PLC0415

    launch = default_launches()[name]
    launch = dataclasses.replace(
        launch, constants={**launch.constants, "PDL": True}, options={**launch.options, "launch_pdl": True}
    )
    return instructions(compile_launch(launch, target_of("sm_90")).asm["cubin"])


def rope_ptx(arguments: dict[str, Any], knobs: dict[str, Any]) -> str:
    """The PTX of a RoPE kernel on sm_90."""
    from generator.families.rope.reference import inputs  # noqa: PLC0415
    from generator.measuring.compile import compile_launch, target_of  # noqa: PLC0415
    from tuned.families.rope.launches import launches  # noqa: PLC0415
    from tuned.families.rope.spec import RopeSize, RopeSpec  # noqa: PLC0415
    from tuned.families.rope.variant import RopeVariant  # noqa: PLC0415

    spec = RopeSpec(**arguments)
    launch, *_ = launches(spec, RopeVariant(**knobs), inputs(spec, RopeSize(batch=2, seq=4096), "meta", 0))
    return str(compile_launch(launch, target_of("sm_90")).asm["ptx"])


def cell_code(spec: GruCellSpec, variant: GruCellVariant, batch: int) -> tuple[Needs, str]:
    """What the kernel of a GRU step needs on sm_90, and its PTX."""
    from generator.families.gru_cell.reference import inputs  # noqa: PLC0415
    from generator.measuring.compile import compile_launch, resources, target_of  # noqa: PLC0415
    from tuned.families.gru_cell.launches import launches  # noqa: PLC0415
    from tuned.families.gru_cell.spec import GruCellSize  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415

    steps = launches(spec, variant, inputs(spec, GruCellSize(batch), "meta", 0))
    (launch,) = (step for step in steps if isinstance(step, Launch))
    found = resources(launch, target_of("sm_90"))
    return Needs(found.registers, found.spill_bytes), compile_launch(launch, target_of("sm_90")).asm["ptx"]


def ptx_of(problem: Problem, variant: Any) -> str:
    """The PTX of a variant's last launch, for sm_90."""
    from generator.measuring.compile import compile_launch, target_of  # noqa: PLC0415
    from generator.workload import WORKLOADS  # noqa: PLC0415

    work = WORKLOADS[problem.family]
    launch = work.family.launches(problem.spec, variant, work.inputs(problem.spec, problem.size, "meta", 0))[-1]
    return str(compile_launch(launch, target_of("sm_90")).asm["ptx"])


def buffers_of_products(problem: Problem, variant: Any) -> list[tuple[int, ...]]:
    """How many buffers the operands of each asynchronous warpgroup product have, in a variant's kernel on sm_90."""
    from generator.measuring.compile import compile_launch, target_of  # noqa: PLC0415
    from generator.workload import WORKLOADS  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415

    work = WORKLOADS[problem.family]
    steps = work.family.launches(problem.spec, variant, work.inputs(problem.spec, problem.size, "meta", 0))
    found = []
    for launch in (step for step in steps if isinstance(step, Launch)):
        text = compile_launch(launch, target_of("sm_90")).asm["ttgir"]
        buffers = dict(re.findall(r"(%\w+) = ttg.memdesc_index .*?memdesc<(\d+)x", text))
        products = re.findall(r"ttng.warp_group_dot (%\w+), (%\w+), .*?isAsync = true", text)
        found += [tuple(int(buffers[name]) for name in operands if name in buffers) for operands in products]
    return found
