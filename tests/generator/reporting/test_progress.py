"""The live display: what it shows of a run, in any width, for one GPU or several."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from generator.measuring.compile import Resources
from generator.processes.compiler import hopeless
from generator.reporting.progress import Display, Part, bar, fit
from generator.reporting.report import Funnel, funnel_of, stages_table
from generator.searching.search import Outcome, Progress
from tests.support.records import winner


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give rich a fixed environment, whatever the user's is (with TERM=dumb it draws no bar)."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(**changes: Any) -> Progress:
    made = Progress("llama3_8b_2x4096", 43, 96, 34.344, failed=2, floor_us=33.458, funnel="3840 declared, 1032 legal")
    return dataclasses.replace(made, **changes)


def shown(display: Display, width: int) -> list[str]:
    return [line.plain for line in display.lines(width)]


def test_one_gpu_is_told_whole() -> None:
    clock = Clock()
    display = Display(94, clock=clock)
    clock.now += 60
    display.report(11, progress())
    lines = shown(display, 120)
    assert lines[0].startswith("11/94 problems")
    assert lines[0].endswith(" left")
    assert lines[1] == "llama3_8b_2x4096  measuring  43/96  best 34.34 us  97.4% of the floor  2 failed"
    assert lines[2] == "3840 declared, 1032 legal, 43 tried, 41 right and measured"


def test_several_gpus_have_a_line_each() -> None:
    display = Display(94)
    display.report(3, progress(note="staging", trial=0, best_us=float("inf")), "GPU 1")
    display.report(4, progress(note="comparing the best"), "GPU 0")
    display.report(3, progress(problem="study_16x512"), "GPU 1")  # a message that arrives late: GPU 0 has reported 4
    lines = shown(display, 120)
    assert lines[0].startswith("4/94 problems")
    assert [line.split("  ")[:3] for line in lines[1:]] == [
        ["GPU 0", "llama3_8b_2x4096", "comparing the best"],
        ["GPU 1", "study_16x512", "measuring"],
    ]


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40, 24, 8])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    display = Display(94)
    display.report(11, progress())
    assert all(len(line) <= width for line in shown(display, width))
    display.report(11, progress(), "GPU 1")
    assert all(len(line) <= width for line in shown(display, width))


def test_what_matters_least_goes_first() -> None:
    parts = [Part("problem", 0), Part("best 3 us", 1), Part("", 0), Part("a longer detail", 2)]
    assert fit(parts, 80).plain == "problem  best 3 us  a longer detail"
    assert fit(parts, 20).plain == "problem  best 3 us"
    assert fit(parts, 10).plain == "problem"
    assert fit(parts, 5).plain == "prob…"


def test_the_time_left_is_by_the_pace_of_the_last_problems() -> None:
    clock = Clock()
    display = Display(100, clock=clock)
    assert display.left() == "?"
    for done in range(1, 51):  # remembered from an earlier run, so they take no time
        display.report(done, progress(trial=0))
    for done in range(51, 61):
        clock.now += 6
        display.report(done, progress(trial=0))
    assert display.left() == "4:00"
    clock.now += 3
    display.report(60, progress(trial=48))  # half of the next problem is done
    assert display.left() == "3:57"
    assert Display(100, budget_s=90, clock=clock).left() == "1:30"
    hours = Display(10_000, clock=clock)
    clock.now += 1
    hours.report(1, progress(trial=0))
    assert hours.left() == "2:46:39"


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    with bar(Console(file=text), 3) as report:
        report(0, progress())
        report(1, progress(), "GPU 1")
    assert text.getvalue() == ""


def test_a_terminal_sees_the_problem_and_lines_above_it_stay() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with bar(console, 3) as report:
        report(0, progress())
        console.print("study_16x512: done")
    assert "llama3_8b_2x4096" in text.getvalue()
    assert "study_16x512: done" in text.getvalue()


def test_funnels_count_what_each_step_left_and_add_up() -> None:
    needs = [Resources(40, spill, shared, "c0de") for spill, shared in ((8, 0), (0, 300_000))]
    reasons = [hopeless((n,), 90) for n in needs] + [hopeless("SyntaxError", 90), "the result is wrong"]
    outcome = Outcome(winner(), 40, {str(i): str(r) for i, r in enumerate(reasons)}, 1032, 3840, 10)
    found = funnel_of(outcome)
    assert found == Funnel(3840, 1032, 44, 41, 40)
    assert str(found + found) == "7,680 declared -> 2,064 legal -> 88 tried -> 82 compiled -> 80 right and measured"


def printed(thing: Any) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=80).print(thing)
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def test_wall_time_is_told_by_stage_with_what_no_stage_accounts_for() -> None:
    lines = printed(stages_table({"compile": 10.0, "measure": 25.5, "render": 0.0}, 40.0))
    assert lines[0] == "Wall time, 64% of it on the GPU"
    assert lines[-4:-1] == ["measure 25.5 64%", "compile 10.0 25%", "the rest 4.5 11%"]
    together = printed(stages_table({"measure": 60.0}, 40.0, gpus=2))
    assert together[0] == "Wall time of 2 GPUs together, 75% of it on the GPU"
    assert "measure 60.0 75%" in together
