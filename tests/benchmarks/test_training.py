"""The benchmark of training: the bar of each shape, the report, and its need of a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import training

ROW = {
    "steps": 512, "batch": 32, "hidden": 512, "layers": 1, "bidirectional": True, "dtype": "bfloat16", "theirs_us": 16000.0,
    "ours_us": 2500.0, "theirs_graph_us": 7200.0, "ours_graph_us": 2304.0, "theirs_bytes": 100, "ours_bytes": 80,
    "errors": [0.5, 0.7, 1.4],
}  # fmt: skip


def test_every_listed_shape_has_a_bar() -> None:
    assert {group for group, _, _ in training.LISTED} == set(training.BARS)


def test_a_row_is_told_beside_its_bar() -> None:
    told = training.line("to 512 units, batch to 64", ROW)
    assert "call 6.40 (bar 4.0), graph 3.12 (bar 2.0), 4.50 us a step; memory 0.80" in told
    assert "both ways" in told
    assert "errors 0.79, most 1.40" in told


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["training"])
    with pytest.raises(SystemExit, match="torch sees no GPU here: run it on a machine that has one"):
        training.main()


def test_resets_are_told_beside_their_bar() -> None:
    row = {
        "steps": 512,
        "batch": 32,
        "hidden": 512,
        "marks": 160,
        "plain_us": 2500.0,
        "resets_us": 2550.0,
        "cut_us": 20400.0,
    }
    told = training.reset_line({**row, "plain_graph_us": 2300.0, "resets_graph_us": 2392.0})
    assert told == (
        "resets, 512 steps of 32 x 512: call 1.020, graph 1.040 of none (bar 1.05); nn.GRU over 160 pieces more 8.00 times ours"
    )
