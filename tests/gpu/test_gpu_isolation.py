"""Broken kernels on a real GPU, in the real worker: each has its reason, and the next variant is measured as before."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from generator.processes.worker import TrialFailedError, Worker, WorkerLostError
from generator.selection import problem_named
from tests.broken.server import ranked
from tests.gpu.broken import DEEDS

if TYPE_CHECKING:
    from pathlib import Path

COPY = problem_named("gru_cell_512_64")
INPLACE = problem_named("gru_cell_1024_inplace_64")
HANG_SECONDS = 5.0  # a kernel that compiles in this process takes one second
# deed -> the recorded reason, and whether the worker is lost
REASONS = {
    "wrong result": (r"WrongResultError: the worst error is .* times what rounding allows", False),
    "wrong result while timed": (r"WrongResultError: after it was timed, the worst error is .* times", False),
    "past the end": (r"WrongResultError: it wrote past an end of its output", False),
    "changed input": (r"WrongResultError: it changed its input x0", False),
    "out of memory": (r"OutOfMemoryError: CUDA out of memory", False),
    "far outside": (r"wrote outside its output, over its reference", True),
    "illegal access": (r"illegal memory access", True),
    "endless loop": (r"no answer in 5 s: it hung, and was killed", True),
}


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    ("problem", "deeds"),
    [(COPY, DEEDS), (INPLACE, ("wrong result while timed", "past the end", "changed input", "illegal access"))],
    ids=["copy", "inplace"],
)
def test_broken_kernels_are_data_and_the_others_measured_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Any, deeds: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path))
    assert tuple(REASONS) == DEEDS
    variants = ranked(problem)
    good = variants[len(DEEDS)]
    worker = Worker(0, "tests.gpu.broken:BrokenGpuServer", pause_seconds=0.0)
    worker.start()
    try:
        worker.stage(problem)
        first = worker.measure(good)
        for deed in deeds:
            reason, lost = REASONS[deed]
            usual = worker.trial_seconds
            worker.trial_seconds = HANG_SECONDS if deed == "endless loop" else usual
            with pytest.raises(WorkerLostError if lost else TrialFailedError) as raised:
                worker.measure(variants[DEEDS.index(deed)])
            worker.trial_seconds = usual
            assert re.search(reason, str(raised.value)), f"{deed}: {raised.value}"
            if lost:
                worker.start()
                worker.stage(problem)
            again = worker.measure(good)
            assert again.error == first.error, f"after {deed}"
            assert again.timing.median_us < 2 * first.timing.median_us, f"after {deed}"
    finally:
        worker.stop()
