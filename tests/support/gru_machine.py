"""CPU tensors that take the code path of GPU tensors through the GRU families."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.calls.gru_cell.run
import tuned.calls.linear_cat.run
import tuned.launching.launcher
import tuned.launching.plan
import tuned.nn
from generator.rendering.structures import load
from tests.support.gru_sequences import single_steps
from tuned.calls.gru import plan, project, run
from tuned.calls.recurrent import serve
from tuned.families.copying import KERNEL as COPY
from tuned.families.launch import Launch
from tuned.launching import copies, left
from tuned.launching.plan import DirectLaunch
from tuned.lookup.lookup import Gpu, choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuned.calls.gru.arguments import GruCall
    from tuned.families.family import Family

GPU = Gpu("some_gpu", 90, 132, "Some GPU")


class _NoDevice:
    def __init__(self, _device: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def _at(address: int, like: torch.Tensor) -> torch.Tensor:
    """One element at an address, which a kernel takes as a tensor: direct launches pass addresses."""
    memory = (ctypes.c_char * like.element_size()).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype)


class Machine:
    """Runs public and direct launches in the interpreter, in the place of a GPU, and counts them.

    Direct launches that pad, fill and cut tensors are counted as ``copies``.
    """

    def __init__(self) -> None:
        self.public = self.direct = self.copies = 0

    def interpret(self, launch: Launch) -> None:
        cooperative = launch.options.get("launch_cooperative_grid")
        kernel = load(launch.kernel)
        if not cooperative:
            kernel[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)
            return
        names = [parameter.name for parameter in kernel.params] if hasattr(kernel, "params") else kernel.arg_names
        begin, end = names.index("t_begin"), names.index("t_end")
        seq = launch.arguments[names.index("seq")]
        for window in single_steps(seq):  # a launch a step: each waits for the launch before it
            arguments = list(launch.arguments)
            arguments[begin], arguments[end] = window
            constants = {**launch.constants, "EXCHANGE": "none"}
            kernel[(launch.programs,)](*arguments, **constants, **launch.options)

    def launch_public(self, _kernel: Any, launch: Launch) -> str:
        self.public += launch.kernel != COPY
        self.interpret(launch)
        return "compiled"

    def launch(self, _device: Any, launch: Launch) -> str:
        return self.launch_public(None, launch)

    def direct_launch(self, launch: Launch, compiled: Any, _device: Any) -> DirectLaunch:
        assert compiled == "compiled"
        likes = [t.new_empty(1) if isinstance(t, torch.Tensor) else t for t in launch.arguments]
        aligned = [isinstance(t, torch.Tensor) and t.data_ptr() % 16 == 0 for t in launch.arguments]
        numbers = [n for n in launch.arguments if not isinstance(n, torch.Tensor)]
        rest = (*numbers, *launch.constants.values())

        def fire(programs: int, _y: int, _z: int, _stream: Any, _function: Any, *values: Any) -> None:
            self.direct += launch.kernel != COPY
            self.copies += launch.kernel == COPY
            assert values[len(likes) :] == tuple(launch.constants.values())
            arguments = []
            for value, like, was in zip(values[: len(likes)], likes, aligned, strict=True):
                if isinstance(like, torch.Tensor):
                    assert value % 16 == 0 or not was, "the kernel was compiled for an aligned address"
                else:
                    assert value == like
                arguments.append(_at(value, like) if isinstance(like, torch.Tensor) else like)
            self.interpret(dataclasses.replace(launch, programs=programs, arguments=tuple(arguments)))

        silent = types.SimpleNamespace(calls=[])
        return DirectLaunch(fire, 0, (), launch.programs, rest, lambda _: 7, silent, silent)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """CPU tensors are served as GPU tensors are."""
    made = Machine()
    for module in (tuned.nn, serve, run, tuned.calls.gru_cell.run, tuned.calls.linear_cat.run):
        monkeypatch.setattr(module, "why_eager", lambda *_, **__: None)
    for module in (run, project, tuned.calls.gru_cell.run, tuned.calls.linear_cat.run):
        monkeypatch.setattr(module, "gpu_of", lambda _device: GPU)
    for module in (plan, tuned.calls.gru_cell.run, tuned.calls.linear_cat.run):
        monkeypatch.setattr(module, "_PLANS", {})
    monkeypatch.setattr(plan, "_TRAINED", {})
    monkeypatch.setattr(left, "LEFT", {})
    for module in (copies, plan, project, tuned.launching.plan):
        monkeypatch.setattr(module, "direct_launch", made.direct_launch)
    monkeypatch.setattr(tuned.launching.launcher, "launch_public", made.launch_public)
    monkeypatch.setattr(tuned.launching.plan, "_capturing", lambda: False)
    for module in (copies, run, project):
        monkeypatch.setattr(module, "launch_known", made.launch)
    monkeypatch.setattr(copies, "_COMPILED", {})
    for module in (plan, project):
        monkeypatch.setattr(module, "compiled_before", lambda *_: "compiled")
    monkeypatch.setattr(run, "may_learn", lambda _device: True)
    monkeypatch.setattr(run, "PACKED_US", -1e9)
    monkeypatch.setattr(torch.cuda, "device", _NoDevice)
    believing(monkeypatch)
    with torch.no_grad():
        yield made


def laid_by_cudnn(weights: list[torch.Tensor], call: GruCall) -> torch.Tensor:
    """Move the weights into one memory as cuDNN lays them: the matrices of all cells, then the biases of all cells."""
    each = len(weights) // len(call.hx)
    order = [i for i in range(len(weights)) if i % each < 2] + [i for i in range(len(weights)) if i % each > 1]
    memory = torch.cat([weights[i].flatten() for i in order])
    parts = memory.split([weights[i].numel() for i in order])
    for i, part in zip(order, parts, strict=True):
        weights[i].set_(part.view_as(weights[i]))  # type: ignore[call-overload]
    return memory


def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels serve steps and linears of any shape, though no row says that they are faster than PyTorch's operators."""
    for moments, family in (
        (tuned.calls.gru_cell.run.MOMENTS, tuned.calls.gru_cell.run.GRU_CELL),
        (tuned.calls.linear_cat.run.MOMENTS, tuned.calls.linear_cat.run.LINEAR_CAT),
    ):
        believed = functools.partial(_believed, dataclasses.replace(family, doubt=None))
        monkeypatch.setattr(moments, "variant_of", believed)


def _believed(family: Family, spec: Any, size: Any, gpu: Gpu, _captured: bool) -> tuple[Any, bool]:
    chosen = choose(family, spec, size, gpu).variant
    return chosen or family.fit(family.default_variant(spec, size), spec, gpu.capability), True
