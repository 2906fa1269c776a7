"""The launches of a file of `tune.py show`, compiled for an architecture; no GPU is needed."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Launched:
    """One launch of a shown file: whether it is a dependent launch, how its programs wait, and facts of its compiled code."""

    kernel: str
    dependent: bool
    exchange: str | None
    waits_for_the_kernel_before: bool  # has griddepcontrol, an instruction from sm_90 on
    code_bytes: int


class _Recorder:
    """Stands for a kernel in a shown file, and notes what it is launched with."""

    def __init__(self, function: Any) -> None:
        self.function, self.launches = function, []  # type: ignore[var-annotated]

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **named: self.launches.append((grid, arguments, named))


def shown_launches(name: str, architecture: str) -> list[Launched]:
    """The launches of a winner's file on a GPU of an architecture, compiled for it. Call it in a process that compiles."""
    import torch  # noqa: PLC0415 - what follows imports Triton

    from generator.reporting.show import standalone, winner_of  # noqa: PLC0415
    from generator.workload import WORKLOADS  # noqa: PLC0415

    winner = winner_of(name, "nvidia_h200")
    work = WORKLOADS[winner.family]
    call = work.inputs(winner.spec, work.shown_size(winner.size) if work.shown_size else winner.size, "meta", 0)
    capability = divmod(int(architecture.removeprefix("sm_")), 10)
    with tempfile.TemporaryDirectory() as folder:
        module = _module(Path(folder) / "shown.py", standalone(winner))
        kernels = {
            n: _Recorder(f) for n in work.family.kernel_names(winner.spec, winner.variant) if (f := vars(module)[n])
        }
        vars(module).update(kernels)
        (function,) = (f for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_"))
        given = [_as_on_a_gpu(torch, _argument(call, p)) for p in inspect.signature(function).parameters]
        with mock.patch("torch.cuda.get_device_capability", return_value=capability):
            function(*given)
        return [
            _compiled(recorder.function, arguments, named, architecture)
            for recorder in kernels.values()
            for _, arguments, named in recorder.launches
        ]


def _module(path: Path, text: str) -> Any:
    path.write_text(text)
    found = importlib.util.spec_from_file_location("shown", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _argument(call: Any, name: str) -> Any:
    """The tensor of a call for a parameter of the shown function."""
    if re.fullmatch(r"x\d", name):
        return call.segments[int(name[1:])]
    return getattr(call, {"grad": "x", "freqs": "cos"}.get(name, name))


def _as_on_a_gpu(torch: Any, tensor: Any) -> Any:
    return tensor.as_subclass(type("OnGpu", (torch.Tensor,), {"is_cuda": True}))


def _compiled(function: Any, arguments: tuple[Any, ...], named: dict[str, Any], architecture: str) -> Launched:
    from triton import compile as compile_  # noqa: PLC0415

    from generator.measuring.compile import source_of, target_of  # noqa: PLC0415
    from tuned.families.launch import Launch  # noqa: PLC0415

    known = {p.name: p.default for p in function.params[len(arguments) :]}
    constants = {name: named.get(name, value) for name, value in known.items()}
    options = {name: value for name, value in named.items() if name not in constants}
    source = source_of(function, Launch(function.__name__, 1, arguments, constants, options))
    found = compile_(source, target=target_of(architecture), options=options)
    return Launched(
        function.__name__,
        bool(options.get("launch_pdl", False)),
        constants.get("EXCHANGE"),
        "griddepcontrol" in found.asm["ptx"],
        len(found.asm["cubin"]),
    )
