"""`tune.py show` of a sequence: the file runs on its own, and its results are those of the reference."""

from __future__ import annotations

import ast
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.measuring.check import worst_error
from generator.measuring.mended import mended_interpreter
from generator.reporting.show import standalone
from generator.workload import WORKLOADS
from tests.support.records import winner
from tests.support.run import DEVICE
from tests.support.shown_gru import CASES, load, size_of
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant

if TYPE_CHECKING:
    from pathlib import Path

    from tuned.families.gru.launches import Recurrence


def shown(spec: GruSpec, variant: GruVariant) -> str:
    return standalone(
        dataclasses.replace(
            winner(), name="a_problem", family="gru", spec=spec, size=size_of(variant), variant=variant, digests={}
        )
    )


def given(spec: GruSpec, call: Recurrence) -> list[Any]:
    """The arguments of the shown function."""
    arguments = [call.gates, call.h_0, call.weight_hh]
    arguments += [call.weight_ih] if spec.stacked else []
    arguments += [call.bias_ih, call.bias_hh] if spec.bias else []
    if spec.packed:
        arguments.append(torch.tensor([int((call.lengths > step).sum()) for step in range(call.seq)]))
    arguments += [call.starts, call.seq] if spec.thd else []
    return [*arguments, call.resets] if spec.resets else arguments


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown_runs_and_is_right(name: str, tmp_path: Path) -> None:
    spec, variant = CASES[name]
    module = load(shown(spec, variant), tmp_path)
    work = WORKLOADS["gru"]
    call = work.inputs(spec, size_of(variant), DEVICE, 1)
    wanted, bound = work.reference(spec, call)
    with mended_interpreter():
        out, h_n = module.gru(*given(spec, call))
    assert worst_error(out, wanted, bound) <= 1
    top, units = (spec.layers - 1) * spec.directions, slice(0, spec.hidden)
    last = out[-1, :, units] if spec.layout == "dense" else None
    if last is not None:
        assert torch.equal(h_n[top], last)
    with pytest.raises(ValueError, match=r"gates must be \w+ \[\d, .*\], got torch.float64"):
        module.gru(call.gates.double(), *given(spec, call)[1:])


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown_is_self_contained_and_has_each_kernel_once(name: str) -> None:
    tree = ast.parse(shown(*CASES[name]))
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert imported == {"torch", "triton", "triton.language"}
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == len(set(functions))
    (kernel,) = WORKLOADS["gru"].family.kernel_names(*CASES[name])
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == kernel)
    constants = [a for a in found.args.args if a.annotation is not None]
    assert len(found.args.defaults) == len(constants) > 0


def test_programs_that_wait_are_launched_together() -> None:
    assert "launch_cooperative_grid=True" in shown(*CASES["poll"])
    assert ".fill_(-1)" in shown(*CASES["poll"])
    assert ".fill_(-1)" not in shown(*CASES["alone"])
    assert "launch_cooperative_grid" not in shown(*CASES["steps-thd"])
