"""The benchmark of MLA: all of it at tiny sizes without a clock; it times no wrong result, and it needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import mla
from tests.support.run import DEVICE


def test_a_dry_run_measures_every_kind_of_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert mla.main(["--dry", "--out", str(out)]) == 0
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["failed"] == {}
    kinds = [row["kind"] for row in told["rows"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "query": 2,
        "key and value": 2,
        "with backward": 2,
        "host": 1,
    }
    for row in told["rows"]:
        wanted = {"query": {*mla.SAME, "same addresses", "eager"}, "host": {"our rotation"}}
        assert wanted.get(row["kind"], {"floor", "eager", "torch.compile"}) | {"ours"} <= set(row)
    said = capsys.readouterr().out
    assert "calls ran and were compared with float64; a dry run times nothing" in said
    assert " us" not in said
    assert "bar" not in said


def test_a_row_is_told_beside_its_bars() -> None:
    row: dict[str, Any] = {
        "kind": "query",
        "model": "128 heads, apart",
        "tokens": 4096,
        "ours": 2.1,
        "same addresses": 2.0,
    }
    row |= {"view.mul_(1)": 2.0, "Megatron": 4.2, "refusals": {"eager": "no memory"}}
    assert mla.ratios(row) == {"same addresses": (1.05, 1.05), "best peer": (0.5, 0.95)}


@pytest.mark.parametrize("style", mla.STYLES)
def test_nothing_wrong_is_timed(style: str) -> None:
    t = mla.make(2, 9, "cpu")
    mla.check(lambda t: mla.our_key(style, t), mla.own_key, style, t)
    other = mla.STYLES[1 - mla.STYLES.index(style)]
    with pytest.raises(mla.session.WrongResultError, match="largest error"):
        mla.check(lambda t: mla.our_key(other, t), mla.own_key, style, t)
    with pytest.raises(mla.session.WrongResultError, match="largest error"):
        mla.check(lambda t: mla.our_query(other, t), mla.own_query, style, mla.make(2, 9, "cpu"))


@pytest.mark.parametrize("name", mla.SAME)
def test_what_touches_the_same_addresses_touches_no_other(name: str) -> None:
    q = torch.randn(5, 1, 2, mla.KEPT + mla.TURNED)
    before = q.clone()
    mla.SAME[name](q[..., mla.KEPT :])
    assert torch.equal(q[..., : mla.KEPT], before[..., : mla.KEPT])
    assert torch.equal(q[..., mla.KEPT :].abs(), before[..., mla.KEPT :].abs())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mla.main([]) == 1
    assert "measures on a GPU, and PyTorch sees none here" in capsys.readouterr().out


@pytest.mark.interpreter
def test_the_kernel_that_turns_signs_touches_all_rows_and_no_other() -> None:
    q = torch.randn(37, 192, device=DEVICE)
    before, view = q.clone(), q[:, 128:]
    mla._touch[(5,)](view, 37, view.stride(0), 64, 8)
    assert torch.equal(q[:, :128], before[:, :128])
    assert torch.equal(q[:, 128:], -before[:, 128:])
