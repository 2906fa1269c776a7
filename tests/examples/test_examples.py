"""The example trains, swaps the kernels in and reports what it found, also if the swap is wrong.

And what all examples share: options out of their limits, and the end of a script whose reader has gone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.nn
from examples import decode, llama_block, ppo_resets, seq2seq
from examples.shared import MOST
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
    served = r"^training step +[\d.]+ +[\d.]+ +[\d.]+\nencoder in training: eager: the tensors are on cpu"
    assert re.search(served, done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        ("seq2seq", ("--device", "cuda"), "argument --device: torch sees no GPU here: pass cpu, or auto"),
        ("decode", ("--batch", "0"), "argument --batch: must be at least 1, got 0"),
        ("decode", ("--tokens", "-1"), "argument --tokens: must be at least 2, got -1"),
        ("llama_block", ("--heads", "0"), "argument --heads: must be at least 1, got 0"),
        ("ppo_resets", ("--rollouts", "-1"), "argument --rollouts: must be at least 0, got -1"),
        ("ppo_resets", ("--agents", "x"), "argument --agents: invalid int value: 'x'"),
        ("ppo_resets", ("--longest", "2"), "argument --longest: must be at least 3, got 2"),
        ("ppo_resets", ("--longest", f"{2**63 - 1}"), f"argument --longest: must be at most {MOST}, got {2**63 - 1}"),
        ("seq2seq", ("--hidden", "1"), "argument --hidden: must be at least 2, got 1"),
        ("seq2seq", ("--seed", f"{2**64}"), f"argument --seed: must be at most {2**64 - 1}, got {2**64}"),
        ("decode", ("--seed", f"{-(2**63) - 1}"), f"argument --seed: must be at least {-(2**63)}, got {-(2**63) - 1}"),
        ("decode", ("--symbols", "1"), "argument --symbols: must be at least 2, got 1"),
        ("llama_block", ("--symbols", "1"), "argument --symbols: must be at least 2, got 1"),
        ("llama_block", ("--seq", "2"), "argument --seq: must be at least 4, got 2"),
        ("llama_block", ("--rate", "nan"), "argument --rate: must be at least 0.0, got nan"),
        ("llama_block", ("--rate", "inf"), "argument --rate: must be at most 1.0, got inf"),
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


TINY = ["--hidden", "2", "--heads", "1", "--kv-heads", "1", "--layers", "1", "--batch", "1", "--symbols", "2"]
LEAST = {
    seq2seq: ["--steps", "1", "--hidden", "2", "--batch", "1", "--length", "1", "--symbols", "1"],
    decode: [*TINY, "--tokens", "2"],
    llama_block: [*TINY, "--seq", "4", "--steps", "1", "--rate", "0"],
    ppo_resets: ["--rollouts", "1", "--agents", "1", "--rollout", "1", "--longest", "3", "--hidden", "1"],
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1], ids=["least seed", "greatest seed"])
@pytest.mark.parametrize("example", LEAST, ids=lambda example: example.__name__)
def test_the_least_of_every_option_serves(
    example: Any, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert example.main(["--device", "cpu", *LEAST[example], "--seed", str(seed)]) == 0
    assert "nan" not in capsys.readouterr().out


# Runs a script whose output goes into a pipe that nobody reads.
UNREAD = """import os, runpy, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""


@pytest.mark.parametrize("example", LEAST, ids=lambda example: example.__name__)
def test_a_script_whose_reader_has_gone_ends_without_a_traceback(example: Any, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    environment.pop(
        "PYTHONUNBUFFERED", None
    )  # buffered output remains after the error, and is written when Python ends
    command = ("-c", UNREAD, str(example.__file__), "--device", "cpu", *LEAST[example])
    done = python(*command, cwd=tmp_path, environment=environment)
    assert (done.returncode, complaints(done.stderr)) == (1, "")


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
