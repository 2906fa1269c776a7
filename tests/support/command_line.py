"""tune.py called in this process, with a machine made of fakes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner

from generator import command_line, commands, gpu
from generator.gpu import Facts
from tests.support.fakes import FakeCompiler, FakeWorker

# A runner makes the commands of the program again for each call, which takes 14 ms: they are the same each time.
typer.testing._get_command = functools.cache(typer.testing._get_command)

ONE = "gru_cell_1024_inplace_64"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(command_line.app, list(arguments), catch_exceptions=False)


def gru_cost(problem: Any, variant: Any) -> float:
    del problem
    rows = variant.block_rows if hasattr(variant, "block_rows") else variant.block_batch
    return 4.0 + variant.num_warps / 8 + rows / 8


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine with one GPU, a fake of both."""
    workers: list[FakeWorker] = []
    options: dict[str, Any] = {"cost": gru_cost}

    def start(index: int) -> FakeWorker:
        assert index == 0
        workers.append(FakeWorker(**options))
        return workers[-1]

    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(commands, "Worker", start)
    monkeypatch.setattr(commands, "CompilerPool", lambda _: FakeCompiler())
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0", "12.8", names=("Test GPU",)))
    return options, workers
