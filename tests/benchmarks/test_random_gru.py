"""The random GRUs of the benchmark: which are drawn, and what is reported of the measurements."""

from __future__ import annotations

import json
import os
import random
import signal
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import random_gru
from benchmarks.random_gru import MOST_ELEMENTS, drawn, in_turns, kept, summary

if TYPE_CHECKING:
    from pathlib import Path


def test_shapes_are_of_all_kinds_and_follow_the_seed() -> None:
    draw = random.Random(1)
    shapes = [drawn(draw) for _ in range(300)]
    again = random.Random(1)
    assert shapes == [drawn(again) for _ in range(300)]
    assert {shape.layers for shape in shapes} == {1, 2, 3}
    assert {shape.dtype for shape in shapes} == {"bfloat16", "float32"}
    assert {(shape.packed, shape.bidirectional) for shape in shapes} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
    assert all(3 * shape.steps * shape.batch * shape.hidden <= MOST_ELEMENTS for shape in shapes)
    assert min(shape.hidden for shape in shapes) < 40
    assert max(shape.hidden for shape in shapes) > 1500


def test_the_summary_counts_what_is_under_the_bar() -> None:
    row = {"rule": "model", "apart": 0.1, "theirs_us": 100.0, "ours_us": 50.0}
    slow = {"rule": "eager", "apart": 0.0, "theirs_us": 100.0, "ours_us": 110.0}
    near = {"rule": "eager", "apart": 0.0, "theirs_us": 10.0, "ours_us": 10.9}
    graph = {**row, "theirs_graph_us": 90.0, "ours_graph_us": 100.0}
    told = summary([row, slow, near, graph], "nn.GRU")
    assert "as a call: 4 shapes" in told
    assert "least 0.909; 1 under the bar" in told, "less than a microsecond is allowed"
    assert "in a graph: 1 shapes, nn.GRU / ours 0.90 in the geometric mean, least 0.900; 1 under the bar" in told
    assert "kernels serve 2 of 4; results at most 0.1 apart" in told


def test_what_seems_slower_is_measured_again() -> None:
    def turns(*us: float) -> tuple[tuple[float, float], int]:
        calls: list[str] = []
        slow = iter([us[0], *us])

        def clock(which: str) -> float:
            calls.append(which)
            return 10.0 if which == "theirs" else next(slow)

        return in_turns("theirs", "ours", clock), len(calls)

    assert turns(*[10.1] * 5) == ((10.0, 10.1), 12)
    assert turns(*[11.0] * 5, *[10.1] * 20) == ((10.0, 10.1), 52), "a disturbance"
    assert turns(*[11.0] * 25) == ((10.0, 11.0), 52)


@pytest.mark.parametrize("cut", [None, signal.SIGINT, signal.SIGTERM, 0], ids=["whole", "Ctrl-C", "SIGTERM", "error"])
def test_what_was_measured_is_told_and_kept_however_a_run_ends(
    cut: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(random_gru, "environment", lambda _: {"device": "a GPU"})
    before, path = signal.getsignal(signal.SIGTERM), tmp_path / "new" / "found.json"
    rows: list[int] = []

    def measure() -> None:
        with kept(path, {"seed": 1, "rows": rows}, lambda rows: f"{len(rows)} rows"):
            rows.append(1)
            if cut:
                os.kill(os.getpid(), cut)
                signal.pause()
            if cut == 0:
                raise torch.OutOfMemoryError
            rows.append(2)

    try:
        if cut is None:
            measure()
        else:
            with pytest.raises(SystemExit if cut else torch.OutOfMemoryError) as ended:
                measure()
            assert not cut or ended.value.code == 130  # type: ignore[union-attr]
    finally:
        signal.signal(signal.SIGTERM, before)
    found = json.loads(path.read_text())
    assert found.pop("cut", False) == (cut is not None)
    assert found == {"seed": 1, "rows": rows, "environment": {"device": "a GPU"}}
    assert rows == ([1, 2] if cut is None else [1])
    assert f"{len(rows)} rows" in capsys.readouterr().out
