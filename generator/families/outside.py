"""Defaults for what tuning must know about a family from outside and its module does not define."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tuned.families.family import Family
from tuned.families.launch import Launch
from tuned.families.outside import FamilyError, family_name, kernel_name
from tuned.lookup.record import RecordError, Winner, build

from ..problem import Problem
from .amounts import Work
from .text import Shown, Text, head

SMALL = 3  # of each size, for the interpreter
REPRESENTATIVE = 3  # problems: the first ones


@dataclasses.dataclass(frozen=True)
class Read:
    """The fields of a Spec or Variant that a template may read: only those that TEXT names."""

    of: str
    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """A field of TEXT.

        Raises:
            FamilyError: TEXT does not name the field, so two different kernels would have the same name.
        """
        if name in self.values:
            return self.values[name]
        raise FamilyError(
            f"a template may read only what TEXT names, and it reads {self.of}.{name}: put it into TEXT, or make it a "
            "tl.constexpr"
        )


def answers(module: ModuleType, family: Family, names: Iterable[str]) -> dict[str, Any]:
    """Field of a Workload -> the module's definition, if it is of ``names`` and defined, or else a default for any kernel."""
    problems = tuple(problem.name for problem in _kept(module))
    title = (module.__doc__ or family.name).strip().splitlines()[0].rstrip(".")
    defaults = {
        "title": getattr(module, "TITLE", title),
        "groups": getattr(module, "GROUPS", (family.name,)),
        "representative": getattr(module, "REPRESENTATIVE", problems[:REPRESENTATIVE]),
        "eager": _float64(module.reference),
        "tensor_bytes": _tensor_bytes(module.inputs),
        "small": _small,
        "tile": _tile,
        "work": _work(module, family),
        "texts": lambda: _texts(module, family.name),
        "wrapper": wrapper,
    }
    return defaults | {name: getattr(module, name) for name in names if hasattr(module, name)}


def _kept(module: ModuleType) -> Iterator[Problem]:
    """The problems of a module.

    Raises:
        FamilyError: a problem is malformed, or a record could not store it and read it back unchanged.
    """
    family, names = family_name(Path(str(module.__file__)).resolve()), set()
    problems = module.problems()
    if not isinstance(problems, Iterable):
        raise FamilyError(f"{module.__file__}: problems must return problems, got {problems!r:.200}")
    for problem in problems:
        if not isinstance(problem, Problem) or problem.family != family:
            raise FamilyError(
                f"{module.__file__}: problems must give own.Problem(..., {family!r}, ...), got {problem!r:.200}"
            )
        where = f"{module.__file__}: the problem {problem.name!r}: "
        if not problem.name.isprintable() or not problem.name.strip() or "," in problem.name or problem.name in names:
            raise FamilyError(f"{where}a name must be one printable line without commas, and of one problem alone")
        names.add(problem.name)
        try:
            for name, kind, part in (("spec", module.Spec, problem.spec), ("size", module.Size, problem.size)):
                build(kind, dataclasses.asdict(part), where + name)
            build(module.Variant, dataclasses.asdict(module.Variant()), where + "variant")
        except RecordError as error:
            raise FamilyError(str(error)) from error
        yield problem
    if not names:
        raise FamilyError(f"{module.__file__}: problems must give at least one, got none")


def _float64(reference: Callable[..., tuple[Any, Any]]) -> Callable[..., Callable[[], Any]]:
    """The baseline of a family that names none: its reference."""
    return lambda spec, call: lambda: reference(spec, call)[0]


def _tensor_bytes(inputs: Callable[..., Any]) -> Callable[[Any, Any], int]:
    def count(spec: Any, size: Any) -> int:
        call = inputs(spec, size, "meta", 0)
        tensors = {id(t): t for t in vars(call).values() if isinstance(t, torch.Tensor)}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    return count


def _small(size: Any, _variant: Any) -> Any:
    return type(size)(*(min(value, SMALL) for value in dataclasses.astuple(size)))


def _tile(_spec: Any, variant: Any) -> tuple[int, int]:
    """The tile of a program: the first knob named block_something, and the product of the others."""
    blocks = [value for name, value in vars(variant).items() if name.startswith("block_")]
    return (math.prod(blocks[:1]), math.prod(blocks[1:]))


def _work(module: ModuleType, family: Family) -> Callable[[Problem, Any], tuple[Work, ...]]:
    """The work of the family's launches, as far as it is known without the family's help: grid, warps, bytes, operations."""

    def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
        spec, size = problem.spec, problem.size
        steps = family.launches(spec, variant, module.inputs(spec, size, "meta", 0))
        launches = [step for step in steps if isinstance(step, Launch)]
        moved = module.bytes_moved(spec, size) / max(1, len(launches))
        counted = getattr(module, "operations", module.bytes_moved)(spec, size) / max(1, len(launches))
        return tuple(
            Work(
                programs=launch.programs,
                warps=int(launch.options.get("num_warps", 4)),
                memory_bytes=moved,
                again_bytes=0.0,
                in_flight_bytes=moved / launch.programs,
                elements=counted / 10,  # the estimate counts ten instructions for each
                sines=0.0,
                pairs_per_thread=max(1.0, counted / launch.programs / (32 * int(launch.options.get("num_warps", 4)))),
                early=bool(launch.options.get("launch_pdl", False)),
            )
            for launch in launches
        )

    return work


def _texts(module: ModuleType, name: str) -> Iterator[Text]:
    """A kernel text for each combination of values of the fields that TEXT names; a call can get any of them by default."""
    declared = {
        field.name: (of, field.metadata.get("choices"))
        for of, kind in (("spec", module.Spec), ("variant", module.Variant))
        for field in dataclasses.fields(kind)
    }
    silent = [name for name in module.TEXT if not declared[name][1]]
    if silent:
        raise FamilyError(f"each field of Spec that TEXT names must be declared by one_of, got {', '.join(silent)}")
    made: dict[str, Any] = {}
    for values in itertools.product(*(declared[field][1] or () for field in module.TEXT)):
        chosen = dict(zip(module.TEXT, values, strict=True))
        parts = {of: {n: v for n, v in chosen.items() if declared[n][0] == of} for of in ("spec", "variant")}
        spec, variant = (Read(of, parts[of]) for of in ("spec", "variant"))
        named = SimpleNamespace(**chosen)
        kernel = kernel_name(name, tuple(module.TEXT), named, named)
        if not kernel.isidentifier():
            raise FamilyError(f"the values of TEXT name a kernel, whose name must be one of Python's, got {kernel!r}")
        if (other := made.setdefault(kernel, values)) is not values:
            raise FamilyError(
                f"each text must have a name of its own, and {other} and {values} are both {kernel}: name the choices so that they "
                "differ in more than case, and where they are joined"
            )
        yield name, kernel, spec, variant, True


def wrapper(winner: Winner, shown: Shown) -> str:
    """A function with the launches and numbers of a shown winner; tensors and sizes are the function's arguments."""
    launches = (*shown.others, shown.launch)
    variant = " ".join(f"{name}={value!r}" for name, value in vars(winner.variant).items())
    takes = [
        "programs: the grid of each launch; the others are the kernel's own arguments, tensors first.",
        f"It was measured with {[launch.programs for launch in launches]} programs and {variant}.",
    ]
    lines = head(
        f"{winner.family}_launch", ["programs", *shown.parameters], "The launches as they were measured.", takes
    )
    lines += ["    dependent = torch.version.hip is None"] if "launch_pdl" in shown.launch.options else []
    lines.append(f"    with torch.cuda.device_of({shown.parameters[0]}):")
    names = dict(zip(shown.parameters, shown.parameters, strict=True))
    for index, launch in enumerate(launches):
        differs = [f"{k}={v!r}" for k, v in launch.constants.items() if v != shown.launch.constants[k]]
        one = dataclasses.replace(shown, launch=launch)
        lines.append(one.text(f"programs[{index}]", {}, names, options=", ".join(differs)).rstrip("\n"))
    return "\n".join([*lines, ""])
