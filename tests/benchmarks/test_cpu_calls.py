"""The benchmark of small calls on a CPU: each call is compared with its formula and gets a line."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cpu_calls


def test_each_call_is_held_against_its_formula_and_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert cpu_calls.main(["--rounds", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * 5 + 2
