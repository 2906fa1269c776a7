"""compute-sanitizer finds nothing in any shipped kernel: no access out of bounds, no race, no barrier misused.

Reads before writes (initcheck) show without a tool: every test fills the memory for results with NaN.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import sanitized
from tuned.kernels import DIGESTS

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")  # memcheck runs first, and compiles for all three
SECONDS = 500  # a backstop; most of a test is PyTorch's start

# The tools of a share run one after another, in one process, so that each kernel is compiled once.
RUNS = [pytest.param(index, tool, marks=pytest.mark.sanitizer) for index in range(sanitized.SHARES) for tool in TOOLS]


@pytest.mark.parametrize(("index", "tool"), RUNS)
def test_the_sanitizer_finds_nothing(index: int, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = [sys.executable, "-m", "tests.gpu.sanitized", str(index), *(["no-library"] if tool != "memcheck" else [])]
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", *program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        timeout=SECONDS,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[:6000] + "\n...\n" + told[-3000:]
    assert "all right" in done.stdout, told[-3000:]


def test_every_kernel_that_ships_is_run() -> None:
    assert {name for deed in sanitized.deeds() for name in deed.kernels} == set(DIGESTS)
    shares = [sanitized.share(index) for index in range(sanitized.SHARES)]
    assert sum(map(len, shares)) == len(sanitized.deeds())
    assert all(shares)
