"""The example trains, swaps the kernels in and reports what it found, also if the swap is wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.nn
from examples import seq2seq
from tests.support.processes import complaints
from tests.support.pythons import python

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--hidden", "16", "--batch", "8", "--length", "3", "--symbols", "3"]
PARTS = ("encoder", "decoder step", "output layer")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.SECONDS", 0.0)


def test_a_user_sees_that_it_learns_and_that_the_swap_changes_nothing() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = python("examples/seq2seq.py", *SMALL, "--steps", "60", cwd=ROOT, environment=environment)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    before, after = (float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout))
    assert after < 0.75 * before
    assert "same symbols before and after: True" in done.stdout
    assert "The kernels need a GPU" in done.stdout
    for part in PARTS:
        assert f"\n{part}: eager: the tensors are on cpu, the kernels are for GPUs" in done.stdout
        assert re.search(rf"^{part} +[\d.]+ +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)
    assert re.search(r"^training step, PyTorch's operators in both +[\d.]+ +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        ("seq2seq", ("--device", "cuda"), "argument --device: torch sees no GPU here: pass cpu, or auto"),
        ("decode", ("--batch", "0"), "argument --batch: must be at least 1, got 0"),
        ("decode", ("--tokens", "-1"), "argument --tokens: must be at least 1, got -1"),
        ("llama_block", ("--heads", "0"), "argument --heads: must be at least 1, got 0"),
        ("ppo_resets", ("--rollouts", "-1"), "argument --rollouts: must be at least 0, got -1"),
        ("ppo_resets", ("--agents", "x"), "argument --agents: invalid int value: 'x'"),
    ],
)
def test_an_option_that_cannot_be_is_an_error_of_the_command_line(
    example: str, options: tuple[str, ...], said: str
) -> None:
    if options == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = python(f"examples/{example}.py", *options, cwd=ROOT, environment=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"{example}.py: error: {said}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dtype", sorted(seq2seq.DTYPES))
def test_the_swapped_model_runs_tuneds_modules_on_the_same_parameters(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, compared = seq2seq.compare, []

    def look(before: seq2seq.Seq2Seq, after: seq2seq.TunedSeq2Seq, *others: Any) -> bool:
        assert (type(before.encoder), type(before.decoder)) == (torch.nn.GRU, torch.nn.GRUCell)
        assert (type(after.encoder), type(after.decoder)) == (tuned.nn.GRU, tuned.nn.GRUCell)
        for theirs, ours in zip(before.parameters(), after.parameters(), strict=True):
            assert theirs.dtype == ours.dtype == seq2seq.DTYPES[dtype]
            assert torch.equal(theirs, ours)
        compared.append(after)
        return compare(before, after, *others)

    monkeypatch.setattr(seq2seq, "compare", look)
    assert seq2seq.main([*SMALL, "--steps", "1", "--dtype", dtype]) == 0
    (after,) = compared
    for name, parameter in after.named_parameters():
        assert parameter.isfinite().all(), name


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("method", ["advance", "predict"])
def test_a_swap_that_takes_the_segments_in_another_order_is_seen(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right: Callable[..., torch.Tensor] = getattr(seq2seq.TunedSeq2Seq, method)
    turned = {"advance": (1, 0, 2), "predict": (0, 2, 1)}[method]  # these two widths fit in either order

    def wrong(model: seq2seq.TunedSeq2Seq, *given: torch.Tensor) -> torch.Tensor:
        return right(model, *(given[i] for i in turned))

    monkeypatch.setattr(seq2seq.TunedSeq2Seq, method, wrong)
    assert seq2seq.main([*SMALL, "--steps", "20"]) == 1
    out = capsys.readouterr().out
    assert "same symbols before and after: False" in out
    assert re.search(r"\n[1-8] of 8 strings differ\n", out)
