"""The benchmark of a rotation that writes the cache: all of it at tiny sizes without a clock, its bars, and its need of a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import append, qk_norm


def test_a_dry_run_measures_every_kind_of_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert append.main(["--dry", "--out", str(out)]) == 0
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["failed"] == {}
    kinds = [row["kind"] for row in told["rows"]]
    assert {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} == {"prefill": 3, "decode": 3, "host": 1}
    assert all({"ours", "floor", "our rotation"} <= set(row) for row in told["rows"][:-1])
    assert all({"eager", "torch.compile"} <= set(row) for row in told["rows"] if row["kind"] == "decode")
    said = capsys.readouterr().out
    assert "calls ran and were compared with float64; a dry run times nothing" in said
    assert " us" not in said
    assert "bar" not in said


def test_a_row_is_told_beside_its_bars() -> None:
    row: dict[str, Any] = {"kind": "decode", "model": "NHD", "tokens": 16, "ours": 1.5, "floor": 1.0}
    row |= {"our rotation": 1.2, "eager": 40.0, "rotation, vLLM": 1.8}
    assert "1.50 us: 83.3% of best peer (bar 80%, MISSED)" in qk_norm.line(row, append.ratios)


def test_the_floor_is_what_must_move() -> None:
    """q is read and written, k and v are read, two caches are written: 2 bytes an element, 1 in a float8 cache."""
    moved = [4 * kind.elements(10) / 10 for kind in append.KINDS]
    q, k = 2 * 32 * 128, 2 * 8 * 128
    assert moved == [2 * q + 4 * k, 2 * q + 4 * k, 2 * q + 3 * k]


@pytest.mark.parametrize("wrong", ["nothing", "query", "key", "value"])
@pytest.mark.parametrize("kind", append.KINDS, ids=lambda kind: kind.name)
def test_nothing_wrong_is_timed(kind: append.Kind, wrong: str) -> None:
    torch.manual_seed(0)
    t = append.make(kind, 9, "cpu")

    def launch() -> None:
        append.ours(kind, t)
        if wrong == "query":
            t.q[3, 1] *= 1.1
        elif wrong != "nothing":
            cache = t.caches[int(wrong == "value")]
            cache.copy_(cache.float() * -1.0)

    if wrong == "nothing":
        append.check(kind, t, launch)
        return
    with pytest.raises(append.session.WrongResultError, match="largest error"):
        append.check(kind, t, launch)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert append.main([]) == 1
    assert "measures on a GPU, and PyTorch sees none here" in capsys.readouterr().out
