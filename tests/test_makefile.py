"""Commands of the Makefile pass on the variables that they are given, and a variable means the same in each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
]

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("fuzz", "-m tests.fuzz --seconds 60"),
        ("fuzz SECONDS=240 SEED=7", "-m tests.fuzz --seconds 240 --seed 7"),
        ("verify", "-m benchmarks.verify"),
        ("verify GPUS=all", "-m benchmarks.verify --gpus all"),
        ("release", "-m benchmarks.release"),
        ("release BUDGET=10m GPUS=all TUNED=1 SECONDS=60", "-m benchmarks.release --budget 10m --gpus all --tuned --seconds 60"),
        ("release BY_ROW=1 WITHOUT_PEERS=Liger", "-m benchmarks.release --by-row --without-peers Liger"),
    ],
)  # fmt: skip
def test_a_command_is_what_its_help_says(told: str, wanted: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "--no-print-directory", *told.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.replace("\\\n", " ").split())
    assert words.endswith(wanted), words
