"""The random GRUs of the benchmark: what is drawn, and what is said of what was measured."""

from __future__ import annotations

import random

from benchmarks.random_gru import MOST_ELEMENTS, drawn, in_turns, summary


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
