"""The benchmark of a norm before the rotation: all of it at tiny sizes without a clock, its bars, and its need of a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import qk_norm


def test_a_dry_run_measures_every_kind_of_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert qk_norm.main(["--dry", "--out", str(out)]) == 0
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["failed"] == {}
    kinds = [row["kind"] for row in told["rows"]]
    assert {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} == {
        "forward": len(qk_norm.MODELS), "with backward": len(qk_norm.MODELS), "decode": 1, "host": 1, "random": 2,
    }  # fmt: skip
    forward = [row for row in told["rows"] if row["kind"] in ("forward", "decode")]
    assert all({"ours", "floor", "our rotation", "eager", "torch.compile"} <= set(row) for row in forward)
    said = capsys.readouterr().out
    assert "calls ran and were compared with float64; a dry run times nothing" in said
    assert " us" not in said
    assert "bar" not in said


def test_a_row_is_told_beside_its_bars() -> None:
    row: dict[str, Any] = {"kind": "decode", "model": "Qwen3 8B", "tokens": 16, "ours": 1.5, "our rotation": 1.2}
    row |= {"eager": 40.0, "vLLM": 2.0, "refusals": {"FlashInfer": "ImportError"}}
    told = qk_norm.line(row)
    assert "1.50 us: 75.0% of best peer (bar 80%), 125.0% of our rotation (bar 115%, MISSED)" in told
    assert qk_norm.summary([row]).splitlines() == [
        "decode / best peer: 1 of 1 within 0.8, most 0.750",
        "decode / our rotation: 0 of 1 within 1.15, most 1.250",
    ]


def test_a_gradient_moves_one_and_a_half_times_what_the_forward_does() -> None:
    bench = qk_norm.Bench("cpu", dry=True)
    floors = [qk_norm.whole_row(bench, qk_norm.MODELS[1], 3, training=training)["floor"] for training in (False, True)]
    assert floors == [1.0, 2.5]


@pytest.mark.parametrize("wrong", ["weight", "rotation", "not written"])
def test_nothing_wrong_is_timed(wrong: str) -> None:
    model = qk_norm.MODELS[0]
    t = qk_norm.make(model, 9, "cpu")

    def launch() -> Any:
        if wrong == "weight":
            return qk_norm.own(*t.both, t.weights[0] * 1.2, t.weights[1], *t.angles(), "head", False)
        if wrong == "rotation":
            return qk_norm.own(*t.both, *t.weights, *t.angles()[::-1], "head", False)
        return [x * torch.nan for x in t.both]

    with pytest.raises(qk_norm.session.WrongResultError, match="largest error"):
        qk_norm.check(model, t, launch)
    qk_norm.check(model, t, lambda: qk_norm.ours(model, t))


def test_a_row_that_fails_is_told_and_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no memory")

    row = {"kind": "host", "model": "Qwen3 8B", "tokens": 1, "ours": 4.4, "our rotation": 4.0}
    rows, failed = qk_norm.measured([("one", broken), ("two", lambda: dict(row))])
    assert rows == [row]
    assert failed == {"0: one": "RuntimeError: no memory"}
    assert "110.0% of our rotation (bar 120%)" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert qk_norm.main([]) == 1
    assert "measures on a GPU, and PyTorch sees none here" in capsys.readouterr().out
