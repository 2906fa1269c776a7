"""tuned.warm on a real GPU: a warmed process's first calls compile nothing, and the next finds all in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned
from tuned.families.registry import FAMILIES
from tuned.lookup.gpu import gpu_of
from tuned.lookup.lookup import choose

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]


def warmed(cache: Path, **environment: str) -> Mapping[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.warmed"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), **environment},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
def test_the_first_calls_compile_nothing_and_the_next_process_finds_all(tmp_path: Path) -> None:
    first = warmed(tmp_path)
    assert (first["compiled_later"], first["built_later"]) == (0, 0)
    assert len(first["compiled"]) + len(first["left"]) >= 4
    assert first["found"] == []
    second = warmed(tmp_path)
    assert (second["compiled"], second["compiled_later"], second["built"], second["built_later"]) == ([], 0, 0, 0)
    assert sorted(second["found"]) == sorted(first["compiled"])


@pytest.mark.gpu
def test_problems_are_warmed_for_this_gpu() -> None:
    from generator.workload import default_problems  # noqa: PLC0415

    problems = [default_problems(name)[0] for name in FAMILIES]
    served = [
        p for p in problems if choose(FAMILIES[p.family], p.spec, p.size, gpu_of(torch.device("cuda", 0))).variant
    ]
    done = tuned.warm(problems)
    kernels = {*done.compiled, *done.found, *done.ready}
    assert len(kernels) >= len(served)
    assert done.undone == ()
    again = tuned.warm(problems)
    assert (again.compiled, again.found) == ((), ())
    assert set(again.ready) == kernels
