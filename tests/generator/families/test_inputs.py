"""Inputs on the device "meta", for compilers and estimates: they take no memory and no time."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from generator.places import ROOT
from generator.workload import WORKLOADS, default_problems

SMALL = 2**20  # elements, few enough for a CPU to fill at once
IMPORTED = """
import sys
from generator.workload import WORKLOADS, default_problems
before = set(sys.modules)
for problem in default_problems():
    WORKLOADS[problem.family].inputs(problem.spec, problem.size, "meta", 0)
print(sorted(set(sys.modules) - before))
"""


def fields(call: Any) -> dict[str, Any]:
    """What a launch knows of a call: everything but the values of tensors."""
    found = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return {
        name: (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


def test_they_import_nothing() -> None:
    """Arithmetic on the device "meta" would import sympy and torch.fx, which takes each compiler half a second to two."""
    said = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize("family", WORKLOADS)
def test_they_are_those_of_a_call_but_for_their_values(family: str) -> None:
    seen = 0
    specs = set()
    for problem in default_problems(family):
        inputs = WORKLOADS[family].inputs
        there = fields(inputs(problem.spec, problem.size, "meta", 0))
        shapes = [value[1] for value in there.values() if isinstance(value, tuple) and len(value) == 3]
        if problem.spec in specs or any(isinstance(s, torch.Size) and s.numel() > SMALL for s in shapes):
            continue
        specs.add(problem.spec)
        assert there == fields(inputs(problem.spec, problem.size, "cpu", 0)), problem.name
        seen += 1
    assert seen > 5
