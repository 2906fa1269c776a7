"""`tune.py show` of the gradient of a sequence: the file runs on its own, and its results are those of the reference."""

from __future__ import annotations

import ast
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.families.gru_backward.reference import gradients
from generator.measuring.check import worst_error
from generator.measuring.mended import mended_interpreter
from generator.reporting.show import standalone
from generator.workload import WORKLOADS
from tests.support.records import winner
from tests.support.run import DEVICE
from tests.support.shown_gru import GRADIENTS, load
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant

if TYPE_CHECKING:
    from pathlib import Path

    from tuned.families.gru_backward.launches import RecurrenceGradient

SIZE = GruSize(batch=11, seq=3)


def shown(spec: GruSpec, variant: GruVariant) -> str:
    row = dataclasses.replace(winner(), name="a_problem", family="gru_backward", spec=spec, size=SIZE)
    return standalone(dataclasses.replace(row, variant=variant, digests={}))


def given(spec: GruSpec, call: RecurrenceGradient) -> list[Any]:
    """The arguments of the shown function."""
    arguments = [call.gates, call.hidden, call.before, call.grad_out, call.grad_h_n, call.weight_hh]
    arguments += [call.bias_ih, call.bias_hh] if spec.bias else []
    if spec.packed:
        arguments.append(torch.tensor([int((call.lengths > step).sum()) for step in range(call.seq)]))
    arguments += [call.starts, call.seq] if spec.thd else []
    return [*arguments, call.resets] if spec.resets else arguments


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_shown_runs_and_is_right(name: str, tmp_path: Path) -> None:
    spec, variant = GRADIENTS[name]
    module = load(shown(spec, variant), tmp_path)
    work = WORKLOADS["gru_backward"]
    call = work.inputs(spec, SIZE, DEVICE, 1)
    wanted, bound = work.reference(spec, call)
    with mended_interpreter():
        out, grad_h_0 = module.gru_backward(*given(spec, call))
    assert worst_error(out, wanted, bound) <= 1
    _, first = gradients(spec, call)
    torch.testing.assert_close(grad_h_0.double(), first, rtol=0, atol=1e-2)
    with pytest.raises(ValueError, match=r"gates must be \w+ \[\d, .*\], got torch.float64"):
        module.gru_backward(call.gates.double(), *given(spec, call)[1:])


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_shown_is_self_contained_and_has_each_kernel_once(name: str) -> None:
    tree = ast.parse(shown(*GRADIENTS[name]))
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert imported == {"torch", "triton", "triton.language"}
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == len(set(functions))
    (kernel,) = WORKLOADS["gru_backward"].family.kernel_names(*GRADIENTS[name])
    assert kernel in functions


def test_programs_that_wait_are_launched_together_and_what_they_wait_for_is_filled() -> None:
    several = GruVariant("persistent", "split", 16, 8, "poll")
    assert "launch_cooperative_grid=True" in shown(GruSpec("float32", 20), several)
    assert "launch_cooperative_grid" not in shown(*GRADIENTS["poll"])
    assert ".fill_(-1)" in shown(*GRADIENTS["poll"])
    assert ".fill_(-1)" not in shown(*GRADIENTS["counter-thd-no-bias"])


def test_packed_rows_never_spin() -> None:
    """Their ends differ, so that a thread that spins would take values that are not there yet."""
    spin = GruVariant("persistent", "split", 16, 8, "spin")
    assert 'exchange = "spin"' in shown(GruSpec("float32", 64), spin)
    assert 'exchange = "spin"' not in shown(GruSpec("float32", 64, layout="packed"), spin)
