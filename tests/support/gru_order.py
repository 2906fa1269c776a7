"""The order of a recurrence's loads and stores in compiled code; runs in a separate process, see tests.support.compiling.

The state is the message: a program stores its part of the state at each step. At the next step it loads the parts of the
other programs again and again until all are there. PTX does not state that order formally (weak stores, relaxed loads in
assembly that is marked pure), so these checks follow it in the compiled code, where it can no longer change, along every path:

    store of a step -> loads of the next step, again until they see what they wait for -> what they saw -> its store

Both texts are read as a graph of instructions. In PTX, where operands are written out, the value of each store in the
loop must come from products of what was loaded since the previous execution of that store. In machine code every path
from a load to a store must contain a product, and the stored value must be computed after the loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tuned.families.gru.spec import GruSize, GruSpec
    from tuned.families.gru.variant import GruVariant

RELAXED = re.compile(r"ld\.(?:relaxed\.gpu\.global|volatile\.global)")
Edits = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of PTX or of machine code."""

    name: str
    guard: str  # the predicate before it, or ""
    operands: tuple[str, ...]
    following: tuple[int, ...]  # instructions that may come next

    @property
    def text(self) -> str:
        """The instruction about as it was written."""
        return f"{self.guard} {self.name} {', '.join(self.operands)}".strip()


Code = list[Instruction]


# Graphs ---------------------------------------------------------------------------------------------------------------


def cycles(code: Code, among: Iterable[int]) -> list[frozenset[int]]:
    """The strongly connected components of more than one instruction, or of one that follows itself (Tarjan)."""
    allowed, found = set(among), []
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in sorted(allowed):
        if root in index:
            continue
        work = [(root, iter(code[root].following))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for after in rest:
                if after not in allowed:
                    continue
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(code[after].following)))
                    break
                if after in on_stack:
                    low[node] = min(low[node], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set()
                    while node not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    if len(component) > 1 or node in code[node].following:
                        found.append(frozenset(component))
    return found


def step_loop(code: Code, loads: list[int]) -> frozenset[int]:
    """The loop of the steps: the loop that has all of the loads, or an empty set."""
    return next((loop for loop in cycles(code, range(len(code))) if set(loads) <= loop), frozenset())


def waits(code: Code, loop: frozenset[int], stores: list[int], loads: list[int]) -> list[frozenset[int]]:
    """The loops that wait: inside of the loop of the steps, they load the state and store nothing."""
    return [inner for inner in cycles(code, loop - set(stores)) if inner & set(loads)]


# PTX ------------------------------------------------------------------------------------------------------------------

PTX_LABEL = re.compile(r"^(\$?\w+):")
PTX_REGISTER = re.compile(r"%\w+|\b(?:most|missing)\b")


def ptx(text: str) -> Code:
    """The instructions of the only kernel in a PTX text. Braces on separate lines are scopes of labels."""
    lines: list[tuple[str, tuple[int, ...]]] = []
    labels: dict[tuple[tuple[int, ...], str], int] = {}
    scope, opened = (), itertools.count()
    body = text[text.index(".entry") :]
    for part in re.split(r"[;\n]", re.sub(r"//.*", "", body)):
        line = part.strip()
        if line == "{":
            scope = (*scope, next(opened))
            continue
        if line == "}":
            scope = scope[:-1]
            continue
        if match := PTX_LABEL.match(line):
            labels[scope, match[1]] = len(lines)
            line = line[match.end() :].strip()
        if line and line[0] not in ".({)[" and not line.startswith("%"):
            lines.append((line, scope))
    return [_ptx(at, *line, labels) for at, line in enumerate(lines)]


def _ptx(at: int, line: str, scope: tuple[int, ...], labels: dict[tuple[tuple[int, ...], str], int]) -> Instruction:
    guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
    name, _, operands = rest.strip().partition(" ")
    following: tuple[int, ...] = (at + 1,)
    if name.startswith("bra"):
        scopes = (scope[:depth] for depth in range(len(scope), -1, -1))
        target = next(labels[s, operands.strip()] for s in scopes if (s, operands.strip()) in labels)
        following = (at + 1, target) if guard else (target,)
    if name in {"ret", "exit"}:
        following = (at + 1,) if guard else ()
    return Instruction(name, guard, tuple(_operands(operands)), following)


def _operands(text: str) -> Iterator[str]:
    """The operands, split at commas outside of brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            yield text[begin:at].strip()
            begin = at + 1
    if text[begin:].strip():
        yield text[begin:].strip()


SHARED_MEMORY, TENSOR_MEMORY = "memory s", "memory t"
NO_RESULT = ("st.", "bra", "bar.", "ret", "red.", "cp.", "fence", "membar", "mbarrier", "prefetch", "trap")


MMA = re.compile(r"mma\.|wgmma\.mma|tcgen05\.mma")
FMA = re.compile(r"fma\.rn\.f32$")  # where no instruction is an MMA: products of plain float32


def seen_since_the_last(code: Code, store: int, loads: list[int]) -> int:
    """The loads, as bits, whose products the value of a store may hold; only loads since the last execution of that store count.

    The state of a register is a set of bits: the low ones say which loads it holds, the high ones which loads it holds
    products of. Shared memory and tensor memory are one register each.
    """
    bits = {load: 1 << number for number, load in enumerate(loads)}
    product = MMA if any(MMA.match(one.name) for one in code) else FMA
    entry: dict[int, dict[str, int]] = {0: {}}
    waiting, found = [0], 0
    while waiting:
        at = waiting.pop()
        while True:
            state = dict(entry[at])
            shift = len(loads) if product.match(code[at].name) else 0
            found |= _transfer(code[at], at == store, bits.get(at, 0), shift, state)
            after = [n for n in code[at].following if n < len(code)]
            changed = [n for n in after if _merge(entry, n, state)]
            waiting += changed[1:]
            if not changed:
                break
            at = changed[0]
    return found >> len(loads)


def _merge(entry: dict[int, dict[str, int]], at: int, state: dict[str, int]) -> bool:
    if at not in entry:
        entry[at] = dict(state)
        return True
    known, changed = entry[at], False
    for place, bits in state.items():
        if bits & ~known.get(place, 0):
            known[place] = known.get(place, 0) | bits
            changed = True
    return changed


def _transfer(one: Instruction, is_store: bool, loaded: int, shift: int, state: dict[str, int]) -> int:
    """Update ``state`` by an instruction. Returns the bits of the stored value if it is the store in question, else 0.

    ``shift``: how far the bits of a product are from those of its factors; 0 if the instruction is no product.
    """
    written, read = _effects(one)
    bits = loaded
    for place in read:
        bits |= state.get(place, 0)
    bits |= (bits & (1 << shift) - 1) << shift
    if is_store:
        state.clear()
        return bits
    for place in written:
        kept = state.get(place, 0) if one.guard or place.startswith("memory") else 0
        if bits | kept:
            state[place] = bits | kept
        else:
            state.pop(place, None)
    return 0


Places = tuple[str, ...]


@functools.cache
def _effects(one: Instruction) -> tuple[Places, Places]:
    """The places that an instruction writes, and those that it reads, without addresses in global memory."""
    registers = [tuple(PTX_REGISTER.findall(operand)) for operand in one.operands]
    every = tuple(itertools.chain.from_iterable(registers))
    first, rest = every[: len(registers[0])] if registers else (), every[len(registers[0]) :] if registers else ()
    by_name: tuple[tuple[tuple[str, ...], Places, Places], ...] = (
        (("tcgen05.ld",), first, (TENSOR_MEMORY,)),
        (("tcgen05",), (TENSOR_MEMORY,), (*every, SHARED_MEMORY)),
        (("wgmma.mma",), first, (*every, SHARED_MEMORY)),
        (("st.global", "st.volatile.global", "st.relaxed"), (), rest),
        (("st.shared", "stmatrix"), (SHARED_MEMORY,), rest),
        (("ld.global", "ld.relaxed", "ld.volatile"), first, ()),
        (("ld.shared", "ldmatrix"), first, (SHARED_MEMORY,)),
        (NO_RESULT, (), ()),
    )
    return next(((written, read) for names, written, read in by_name if one.name.startswith(names)), (first, rest))


# Machine code ---------------------------------------------------------------------------------------------------------

SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
SASS_REGISTER = re.compile(r"\bR(\d+)\b")
STRONG = re.compile(r"^LDG\..*STRONG\.(?:GPU|SYS)")


def disassembled(cubin: bytes) -> str:
    """The machine code of a cubin as text, with labels."""
    from triton.backends.nvidia import compiler  # noqa: PLC0415

    tool = Path(compiler.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-ndf", "-c", file.name], check=True, capture_output=True, text=True).stdout


def sass(text: str) -> Code:
    """The instructions of the only kernel in a text of nvdisasm."""
    lines: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in text[text.index("\n.text.") :].splitlines():
        if match := re.match(r"(\.L_\w+):", line):
            labels[match[1]] = len(lines)
        elif match := SASS_LINE.search(line):
            lines.append((match[1] or "", match[2], match[3]))
    return [_sass(at, *line, labels) for at, line in enumerate(lines)]


def _sass(at: int, guard: str, name: str, rest: str, labels: dict[str, int]) -> Instruction:
    following: tuple[int, ...] = (at + 1,)
    if name.startswith("BRA"):
        target = labels[re.findall(r"\(?(\.L_\w+)", rest)[-1]]
        always = not guard and rest.lstrip().startswith("`")
        following = (target,) if always else (at + 1, target)
    if name == "EXIT":
        following = (at + 1,) if guard else ()
    return Instruction(name, guard, tuple(_operands(rest)), following)


def _width(name: str) -> int:
    """How many registers the result of an instruction takes, for those that may overwrite what was loaded."""
    if ".128" in name or "M88.4" in name or name.startswith("HMMA"):
        return 4
    return 2 if ".64" in name or "M88.2" in name or "WIDE" in name or name.startswith("CS2R") else 1


def _written(one: Instruction) -> set[int]:
    if one.name.startswith(("ST", "RED", "BAR", "BRA")) or not one.operands:
        return set()
    first = re.match(r"R(\d+)\b", one.operands[0])
    return set(range(int(first[1]), int(first[1]) + _width(one.name))) if first else set()


TENSOR = re.compile(r"HMMA|[HQ]GMMA|LDTM")  # LDTM: on sm_100 one warp multiplies, and all warps read the result


def without_product(code: Code, loop: frozenset[int], loads: list[int], stores: list[int]) -> str | None:
    """A store that some path reaches from a load of the state without a product, or None."""
    product = TENSOR if any(TENSOR.match(code[at].name) for at in loop) else re.compile("FFMA")
    seen: set[int] = set()
    work = list(itertools.chain.from_iterable(code[load].following for load in loads))
    while work:
        at = work.pop()
        if at in stores:
            return code[at].text
        if at in seen or at not in loop or product.match(code[at].name):
            continue
        seen.add(at)
        work += code[at].following
    return None


def made_after(code: Code, store: int, loads: list[int]) -> bool:
    """Whether every path back from a store meets the instruction that makes its value before any load or the store itself."""
    before: dict[int, list[int]] = {}
    for at, one in enumerate(code):
        for after in one.following:
            before.setdefault(after, []).append(at)
    (value,) = SASS_REGISTER.findall(code[store].operands[-1])[:1] or ["-1"]
    seen, work = set[int](), list(before.get(store, ()))
    while work:
        at = work.pop()
        if at in seen:
            continue
        seen.add(at)
        if at in loads or at == store:
            return False
        if int(value) in _written(code[at]) and not code[at].guard:
            continue
        work += before.get(at, ())
    return True


# Judging --------------------------------------------------------------------------------------------------------------


def wrong_in_ptx(text: str, exchange: str) -> Iterator[str]:
    """What is wrong with the order in PTX."""
    code = ptx(text)
    loads = [at for at, one in enumerate(code) if RELAXED.match(one.name)]
    if not loads:
        yield "PTX: the state is not loaded by relaxed or volatile loads"
        return
    loop = step_loop(code, loads)
    stores = [at for at in sorted(loop) if code[at].name.startswith("st.") and ".global" in code[at].name]
    if not stores:
        yield "PTX: the loop of the loads has no store"
        return
    if exchange == "counter":
        yield from _counted(code, loop)
    elif not (inner := waits(code, loop, stores, loads)):
        yield "PTX: no load of the state is executed again until it sees what it waits for"
    elif 2 * sum(load in one for load in loads for one in inner) < len(loads):  # "poll" has each load twice
        yield "PTX: not every load of the state is executed again"
    reached = 0
    for store in stores:
        bits = seen_since_the_last(code, store, loads)
        reached |= bits
        if not bits:
            yield f"PTX: a store is not of what was loaded since the step before: {code[store].text}"
    probes = len(re.findall(r"^\s*probe:", text, re.MULTILINE))
    unused = [code[load].text for number, load in enumerate(loads) if not reached >> number & 1]
    if len(unused) > probes:
        yield f"PTX: {len(unused)} loads reach no store of their step, first {unused[0]}"


def _counted(code: Code, loop: frozenset[int]) -> Iterator[str]:
    """What is wrong with a counter: it needs an acquire, a release, and a barrier of all threads between state and release."""
    names = {at: code[at].name for at in sorted(loop)}
    if not any("acquire" in name for name in names.values()):
        yield "PTX: no counter is acquired"
    if not any("release" in name for name in names.values()):
        yield "PTX: no counter is released"
    for at, name in names.items():
        if "release" in name and not _barred(code, at, loop):
            yield f"PTX: no barrier between the store and {code[at].text}"


def _barred(code: Code, at: int, loop: frozenset[int]) -> bool:
    """Whether every path from a store to an instruction passes a barrier."""
    stores = [n for n in loop if code[n].name.startswith("st.global")]
    seen: set[int] = set()
    work = [after for store in stores for after in code[store].following]
    while work:
        here = work.pop()
        if here == at:
            return False
        if here in seen or here not in loop or code[here].name.startswith("bar"):
            continue
        seen.add(here)
        work += code[here].following
    return True


def wrong_in_sass(text: str, exchange: str) -> Iterator[str]:
    """What is wrong with the order in machine code."""
    code = sass(text)
    strong = [at for at, one in enumerate(code) if STRONG.match(one.name)]
    loop = step_loop(code, strong) if strong else frozenset()
    stores = [at for at in sorted(loop) if code[at].name.startswith("STG")]
    if not stores:
        yield "machine code: no loop has both strong loads, which pass over L1, and stores"
        return
    inner = waits(code, loop, stores, strong)
    again = frozenset(itertools.chain.from_iterable(inner))
    if not inner:
        yield "machine code: no strong load is executed again until it sees what it waits for"
    if exchange == "counter":
        yield from _fenced(code, loop, stores)
        strong = [at for at in strong if at not in again]
    late = [code[store].text for store in stores if not made_after(code, store, strong)]
    if late:
        yield f"machine code: stored after the loads of the next step: {late[0]}"
    if (early := without_product(code, loop, strong, stores)) is not None:
        yield f"machine code: loaded for the next step before the store of this one: {early}"


def _fenced(code: Code, loop: frozenset[int], stores: list[int]) -> Iterator[str]:
    """What is wrong if a path from a store to the counter has no fence of the whole GPU."""
    seen: set[int] = set()
    work = [after for store in stores for after in code[store].following]
    while work:
        at = work.pop()
        if at in seen or at not in loop or re.match(r"MEMBAR\..*(GPU|SYS)", code[at].name):
            continue
        seen.add(at)
        if code[at].name.startswith(("RED", "ATOM")):
            yield f"machine code: no fence between the store and {code[at].text}"
            return
        work += code[at].following


# What ships -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A recurrence whose programs wait for each other, or its gradient, and the architecture to compile it for."""

    spec: GruSpec
    size: GruSize
    variant: GruVariant
    architecture: str
    family: str = "gru"

    def __str__(self) -> str:
        s, v = self.spec, self.variant
        tile = f"{v.form}{v.block_hidden}x{v.block_batch}x{v.num_warps}"
        text = f"{self.architecture}-{s.layout}{s.directions}{s.layers}-{s.dtype}-{s.precision}-{s.hidden}-{tile}-{v.exchange}-{v.prefetch}"
        return text if self.family == "gru" else f"{self.family}-{text}-{v.turns}"


def all_that_ships(capability: int) -> list[Case]:
    """What a lookup can give on an architecture: every row, as ``fit`` adapts it, and every text with every exchange."""
    from generator.storage.record import WINNERS  # noqa: PLC0415
    from tuned.families.registry import FAMILIES  # noqa: PLC0415
    from tuned.lookup.record import load_record  # noqa: PLC0415

    rows = [winner for path in sorted(WINNERS.glob("*.json")) for winner in load_record(path)]
    found = []
    for name, texts in (("gru", _texts_and_exchanges), ("gru_backward", _gradients_and_exchanges)):
        fit = FAMILIES[name].fit
        own = [(row.spec, row.size, fit(row.variant, row.spec, capability)) for row in rows if row.family == name]
        own += [(spec, _size(variant), variant) for spec, variant in texts()]
        found += [Case(*one, f"sm_{capability}", name) for one in own]
    return list({str(case): case for case in found if _waits(case, capability)}.values())


def _texts_and_exchanges() -> Iterator[tuple[GruSpec, GruVariant]]:
    from generator.families.gru.texts import gru_texts  # noqa: PLC0415
    from tuned.families.choices import choices  # noqa: PLC0415
    from tuned.families.gru.variant import GruVariant, default_variant  # noqa: PLC0415

    exchanges, dtypes = choices(GruVariant)["exchange"], ("bfloat16", "float32")
    for at, ((text, structure), exchange, dtype) in enumerate(itertools.product(gru_texts(), exchanges, dtypes)):
        # With 100 units no piece can be waited for in 16 bytes by PTX: such sizes use "poll".
        hidden = 100 if exchange == "poll" else 128
        spec = dataclasses.replace(text, dtype=dtype, hidden=hidden, directions=1 if text.stacked else 2)
        units, rows = (16, 8) if structure.splits_columns else (32, 32)
        prefetch = "early" if structure.in_turn else ("early", "late")[at // 2 % 2]
        yield spec, GruVariant("persistent", structure.form, units, rows, exchange, prefetch, turns=structure.turns)
        yield spec, default_variant(spec)


def _gradients_and_exchanges() -> Iterator[tuple[GruSpec, GruVariant]]:
    """As _texts_and_exchanges, for gradients, whose text depends on the layout; also with several tiles in turn."""
    from tuned.families.choices import choices  # noqa: PLC0415
    from tuned.families.gru.spec import LAYOUTS, GruSpec  # noqa: PLC0415
    from tuned.families.gru.variant import GruVariant  # noqa: PLC0415

    exchanges = choices(GruVariant)["exchange"]
    for layout, exchange, dtype in itertools.product(LAYOUTS, exchanges, ("bfloat16", "float32")):
        spec = GruSpec(dtype, 100 if exchange == "poll" else 128, layout, directions=2)
        for turns, prefetch in ((1, "early"), (1, "late"), (2, "early")):
            yield spec, GruVariant("persistent", "split", 16, 8, exchange, prefetch, turns=turns)


def _size(variant: GruVariant) -> GruSize:
    from tuned.families.gru.spec import GruSize  # noqa: PLC0415

    return GruSize(2 * variant.block_batch * variant.turns, 8)


def _waits(case: Case, capability: int) -> bool:
    """Whether tuning could choose the case on that architecture, and its programs wait for each other."""
    from tuned.families.gru.variant import alone  # noqa: PLC0415
    from tuned.families.gru_backward.variant import alone as gradient_alone  # noqa: PLC0415
    from tuned.families.registry import FAMILIES  # noqa: PLC0415

    by_itself = alone if case.family == "gru" else gradient_alone
    if case.variant.strategy != "persistent" or by_itself(case.spec, case.variant):
        return False
    return FAMILIES[case.family].rejection(case.spec, case.size, case.variant, capability) is None


# Compiling ------------------------------------------------------------------------------------------------------------


def wrong(ptx_text: str, sass_text: str, exchange: str) -> list[str]:
    """What is wrong with the order in a recurrence that waits; empty if nothing is."""
    return [*wrong_in_ptx(ptx_text, exchange), *wrong_in_sass(sass_text, exchange)]


def wrong_in(case: Case) -> list[str]:
    """What is wrong with the order in a case."""
    return wrong(*texts(case), case.variant.exchange)


def texts(case: Case, edits: Edits = ()) -> tuple[str, str]:
    """PTX and machine code of a case; ``edits`` are made to the text of its kernel first."""
    os.environ.pop("TRITON_INTERPRET", None)
    from generator.measuring.compile import compile_launch, resources, target_of  # noqa: PLC0415 - imports Triton
    from generator.workload import WORKLOADS  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415

    work = WORKLOADS[case.family]
    steps = work.family.launches(case.spec, case.variant, work.inputs(case.spec, case.size, "meta", 0))
    launch = next(step for step in steps if isinstance(step, Launch))
    target = target_of(case.architecture)
    with _edited(launch.kernel, edits):
        resources(
            launch, target
        )  # keeps the report: tests of what the same case needs would else compile it again for that
        compiled = compile_launch(launch, target)
    return compiled.asm["ptx"], disassembled(compiled.asm["cubin"])


@contextlib.contextmanager
def _edited(name: str, edits: Edits) -> Iterator[None]:
    """Inside, the kernel ``name`` compiles from its edited text."""
    from generator.measuring import compile as module  # noqa: PLC0415
    from generator.rendering.structures import structures  # noqa: PLC0415

    if not edits:
        yield
        return
    source = structures()[name].source
    for before, after in edits:
        assert source.count(before), f"the text of {name} has no {before!r}"
        source = source.replace(before, after)
    usual: Callable[[str], Any] = module.load
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        found = importlib.util.spec_from_file_location(f"edited_{name}", path)
        assert found is not None
        assert found.loader is not None
        edited = importlib.util.module_from_spec(found)
        found.loader.exec_module(edited)
        module.load = lambda _: getattr(edited, name)
        try:
            yield
        finally:
            module.load = usual
