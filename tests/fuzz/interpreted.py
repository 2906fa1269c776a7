"""Calls of CPU tensors on the path of GPU tensors, with kernels in Triton's interpreter: the fuzz where there is no GPU.

A direct launch gets exactly the addresses and numbers that the plan gave.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tuned.calls.gru.run
import tuned.calls.gru_cell.run
import tuned.calls.linear_cat.run
import tuned.calls.recurrent.serve
import tuned.launching.launcher
import tuned.launching.plan
from generator.measuring.mended import mended_interpreter
from tests.fuzz.forced import fresh, replaced
from tests.support.rope_calls import PLAIN
from tuned.calls.gru import project
from tuned.families.gru.launches import sequence
from tuned.families.launch import Fill, Launch
from tuned.launching.launcher import kernel, launch_public
from tuned.launching.plan import DirectLaunch
from tuned.lookup.lookup import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

# Kernels have no PTX of newer architectures, which the interpreter does not know; variants are from the H200's rows.
GPU = Gpu("a_card_without_a_table", 80, 132)
SILENT = types.SimpleNamespace(calls=[])


class Address:
    """A pointer for the interpreter: an object with a dtype and a memory."""

    def __new__(cls, address: int, dtype: torch.dtype) -> Any:
        if not address:
            raise AssertionError("a launch on a null pointer")
        memory = (ctypes.c_byte * dtype.itemsize).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)


def interpret(launch: Launch) -> None:
    """Run one launch."""
    constants = launch.constants | ({"PDL": False} if "PDL" in launch.constants else {})
    with np.errstate(all="ignore"), mended_interpreter():
        launch_public(kernel(launch.kernel), dataclasses.replace(launch, constants=constants))


def direct(launch: Launch, compiled: Any, device: Any) -> DirectLaunch:
    """Takes the place of tuned.launching.plan.direct_launch."""
    del compiled, device
    numbers = tuple(v for v in launch.arguments if not isinstance(v, torch.Tensor))
    kinds = [v.dtype if isinstance(v, torch.Tensor) else None for v in launch.arguments]

    def run(programs: int, *given: Any) -> None:
        values = given[8:]  # after the grid, the stream, the function and the head
        arguments = tuple(v if kind is None else Address(v, kind) for v, kind in zip(values, kinds, strict=False))
        constants = dict(zip(launch.constants, values[len(kinds) :], strict=True))
        interpret(dataclasses.replace(launch, programs=programs, arguments=arguments, constants=constants))

    rest = (*numbers, *launch.constants.values())
    return DirectLaunch(
        run, "function", ("metadata", None, None, None), launch.programs, rest, lambda _: 7, SILENT, SILENT
    )


@contextlib.contextmanager
def interpreted_families() -> Iterator[None]:
    """The GRU, its step and the linear over segments; tests.support.rope_calls.watch does the same for RoPE."""
    # torch built with CUDA raises where there is no driver.
    no_device = replaced("current_device", tuned.launching.plan.current_device, lambda: -1)
    with pytest.MonkeyPatch.context() as patch, fresh(), no_device:
        cell, linear, run = tuned.calls.gru_cell.run, tuned.calls.linear_cat.run, tuned.calls.gru.run

        def why_eager(x: Any, supported: bool) -> str | None:
            return None if supported and type(x) in PLAIN else "no kernel takes it"

        for module in (cell, linear, run):
            patch.setattr(module, "why_eager", why_eager)
        for module in (cell, linear, run, project):
            patch.setattr(module, "gpu_of", lambda _device: GPU)
        patch.setattr(tuned.launching.plan, "_capturing", lambda: False)
        patch.setattr(tuned.launching.plan, "direct_launch", direct)
        patch.setattr(tuned.launching.launcher, "launch_public", lambda _function, launch: interpret(launch))
        patch.setattr(
            tuned.calls.recurrent.serve,
            "why_eager",
            lambda x, **_: None if type(x) in PLAIN else "it has rules of its own",
        )
        patch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        _sequences(patch)
        yield


def _sequences(patch: pytest.MonkeyPatch) -> None:
    """Launches whose programs wait for each other run one step at a time, so that each launch is a barrier."""
    run, pending = tuned.calls.gru.run, list[Any]()
    genuine = run.GRU.launches

    def launches(*parts: Any) -> Any:
        pending[:] = [parts]
        return genuine(*parts)

    def launched(_device: Any, launch: Launch) -> None:
        if not launch.options.get("launch_cooperative_grid"):
            interpret(launch)
            return
        spec, variant, recurrence = pending[-1]
        for step in range(recurrence.seq + spec.layers - 1):
            if step < recurrence.seq:
                for fill in (Fill(recurrence.counters, 0),) if variant.exchange == "counter" else ():
                    tuned.launching.launcher.run_step(fill)
                interpret(sequence(spec, variant, recurrence, step, step + 1))

    patch.setattr(run, "GRU", dataclasses.replace(run.GRU, launches=launches))
    for module in (run, project):
        patch.setattr(module, "launch_known", launched)
