"""A case of the fuzz: two neighbouring classes of calls, the order in which they come, and the script of the case."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

from tests.fuzz.given import Given, View, Wrong, _evaluated, brief

ALIASES = {
    "tuned.dispatch": "dispatch",
    "tuned.compat.transformer_engine": "transformer_engine",
    "tuned.compat.flash_attn": "flash_attn",
    "tuned.compat.liger": "liger",
    "tuned.compat.vllm": "vllm",
    "tuned.compat.flashinfer": "flashinfer",
    "tests.fuzz.originals": "originals",
    "tests.fuzz.normed": "normed",
    "tests.fuzz.appended": "appended",
}


class Name(str):
    """An argument that is a tensor of the call, as its name or as an expression over names."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclasses.dataclass(frozen=True)
class Call:
    """A class of calls: everything but the numbers in the tensors."""

    function: str  # "tuned.dispatch.rope"
    views: dict[str, View]
    arguments: dict[str, Any]  # a Name stands for a tensor
    check: str  # a method of Given
    judged: tuple[Any, ...] = ()  # the arguments of ``check``
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    mode: str = "plain"
    autocast: Any = None
    tf32: tuple[bool, bool] = (False, True)
    written: tuple[str, ...] = ()
    truncates: bool = False

    def key(self) -> str:
        """What distinguishes classes."""
        views = {name: dataclasses.replace(v, values=None, scale=1.0) for name, v in self.views.items()}
        return repr(
            (self.function, views, self.arguments, self.check, self.mode, self.autocast, self.tf32, self.written)
        )

    def settings(self, device: str) -> dict[str, Any]:
        """The settings of Given."""
        defaults = {f.name: f.default for f in dataclasses.fields(Call)}
        names = ("mode", "autocast", "tf32", "written", "truncates")
        return {"device": device} | {n: getattr(self, n) for n in names if getattr(self, n) != defaults[n]}


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that one index of one seed determines."""

    seed: int
    index: int
    calls: tuple[Call, ...]  # a class, and its neighbour
    steps: tuple[tuple[int, int], ...]  # which of the two calls, and the seed of its numbers
    forced: Any = None  # (family, row): the variant that lookups give


@dataclasses.dataclass(frozen=True)
class Failure:
    """What was wrong, and how to reproduce it."""

    seed: int
    index: int
    step: int
    message: str
    script: str  # only the wrong call, if it fails again without any earlier call
    whole: str  # all calls of the case up to the wrong one


def function_of(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def resolved(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, Name):
        return _evaluated(str(value), tensors)
    if isinstance(value, dict):
        return {k: resolved(v, tensors) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(resolved(v, tensors) for v in value)
    return value


def perform(call: Call, seed: int, device: str) -> None:
    """Make one call, and check everything about it.

    Raises:
        Wrong: the call did something that is not right.
    """
    given = Given(seed, **call.settings(device))
    tensors = {name: given.view(name, view) for name, view in call.views.items()}
    given.run(function_of(call.function), **resolved(call.arguments, tensors))
    getattr(given, call.check)(*call.judged, **call.named)


def run(case: Case, device: str, performed: Any = perform) -> tuple[int, Failure | None]:
    """Make the calls of a case up to the first wrong one; returns the number of calls, and what was wrong.

    The script of a failure has only the wrong call if that fails alone, else all calls of the case up to it.
    """
    from tests.fuzz.forced import forced, fresh  # noqa: PLC0415 - which imports all of tuned

    with forced(*case.forced) if case.forced else contextlib.nullcontext():
        for step, (which, seed) in enumerate(case.steps):
            try:
                performed(case.calls[which], seed, device)
            except Wrong as error:  # noqa: PERF203 - what comes after it says nothing
                steps = case.steps[: step + 1]
                with fresh():
                    alone = steps[-1:] if _again(performed, case.calls[which], seed, device) else steps
                told = (script(case, device, some, str(error)) for some in (alone, steps))
                return step + 1, Failure(case.seed, case.index, step, str(error), *told)
    return len(case.steps), None


def _again(performed: Any, call: Call, seed: int, device: str) -> bool:
    try:
        performed(call, seed, device)
    except Wrong:
        return True
    return False


# Scripts --------------------------------------------------------------------------------------------------------------


def script(case: Case, device: str, steps: tuple[tuple[int, int], ...] | None = None, message: str = "") -> str:
    """Python that makes the calls of a case again (by default all); it fails if one of them is wrong."""
    steps = case.steps if steps is None else steps
    used = sorted({which for which, _ in steps})
    functions = {case.calls[which].function.rsplit(".", 1)[0] for which in used}
    lines = [
        f"# python -m tests.fuzz --seed {case.seed} --only {case.index}: {message.splitlines()[0] if message else 'right'}",
        "import torch",
        *(f"import {module} as {ALIASES[module]}" for module in sorted(functions)),
        "from tests.fuzz.given import Given, Integer, Part, Rope",
    ]
    if case.forced is not None:
        lines.append("from tests.fuzz.forced import forced")
    for which in used:
        lines += _function(case.calls[which], f"call_{which}", device)
    runs = [f"call_{which}({seed})" for which, seed in steps]
    if len(steps) > 3:
        pairs = ", ".join(f"(call_{which}, {seed})" for which, seed in steps)
        runs = [f"for call, seed in [{pairs}]:", "    call(seed)"]
    if case.forced is not None:
        runs = [f"with forced{case.forced!r}:", *(f"    {line}" for line in runs)]
    return "\n".join([*lines, *runs, ""])


def _function(call: Call, name: str, device: str) -> list[str]:
    settings = "".join(f", {k}={v!r}" for k, v in call.settings(device).items())
    lines = [f"def {name}(seed):", f"    given = Given(seed{settings})"]
    for tensor, view in call.views.items():
        where = (view.shape, view.dtype, view.strides, view.offset, view.size)
        rest = {
            f.name: getattr(view, f.name) for f in dataclasses.fields(View)[5:] if getattr(view, f.name) != f.default
        }
        told = ", ".join([repr(tensor), *map(repr, where), *(f"{k}={v!r}" for k, v in rest.items())])
        lines.append(f"    {tensor} = given.tensor({told})")
    module, function = call.function.rsplit(".", 1)
    arguments = "".join(f", {k}={v!r}" for k, v in call.arguments.items())
    lines.append(f"    given.run({ALIASES[module]}.{function}{arguments})")
    judged = [*map(_told, call.judged), *(f"{k}={_told(v)}" for k, v in call.named.items())]
    lines.append(f"    given.{call.check}({', '.join(judged)})")
    return lines


def _told(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    return brief(value) if dataclasses.is_dataclass(value) and type(value).__name__ == "Rope" else repr(value)
