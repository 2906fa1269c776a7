"""How many of the package's Python functions a repeated call runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned
from tests.support.gru_machine import Machine, machine
from tests.support.run import INTERPRETED
from tuned.calls.gru import run
from tuned.dispatch import gru, gru_cell, linear_cat
from tuned.families.gru.variant import GruVariant
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["machine"]

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="this stands in for a GPU where there is none"),
]
PACKAGE = str(Path(tuned.__file__).parent)
HIDDEN, WIDTH = 8, 8
POLL = GruVariant("persistent", block_hidden=8, block_batch=8, exchange="poll")

# Counts frames of Python functions, generators and comprehensions on 3.11: 3.12 has no frames for comprehensions.
MOST = {"gru": 29, "gru_cell": 5, "segments": 8, "linear_cat": 12}


def names(function: Callable[[], Any]) -> list[str]:
    """Names of the functions of the package that ran, in order; kernels are not counted."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and "/kernels/" not in name:
            found.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def call(family: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    x, h = torch.randn(2, WIDTH), torch.randn(2, HIDDEN)
    weights = [torch.randn(3 * HIDDEN, WIDTH), torch.randn(3 * HIDDEN, HIDDEN), *torch.randn(2, 3 * HIDDEN)]
    return {
        "gru": lambda: gru(torch.stack((x, x)), h[None], weights),
        "gru_cell": lambda: gru_cell(x, h, *weights),
        "segments": lambda: gru_cell((x[:, :4].contiguous(), x[:, 4:].contiguous()), h, *weights),
        "linear_cat": lambda: linear_cat((x, h), torch.cat(weights[:2], 1), weights[2]),
    }[family]


@pytest.mark.parametrize("family", MOST)
def test_a_known_call_runs_few_functions_and_one_launch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(machine, "interpret", lambda _launch: None)
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("default", "", POLL))
    function = call(family)
    for _ in range(2):
        function()
    before = machine.direct
    found = names(function)
    assert machine.direct == before + 1
    assert len(found) <= MOST[family], found
