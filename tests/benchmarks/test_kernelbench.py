"""Our GRU in the problems of KernelBench: a small stand-in for KernelBench's checkout judges it on a CPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.nn
from benchmarks import kernelbench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features, hidden):
        super(Model, self).__init__()
        self.gru = nn.GRU(features, hidden, 2)

    def forward(self, x):
        return self.gru(x)[0]

def get_inputs():
    return [torch.rand(3, 2, 4)]

def get_init_inputs():
    return [4, 8]
"""

HARNESS = """
import types
import torch
from dotenv import load_dotenv
from openai import OpenAI

load_dotenv()
from litellm import completion

def made(text, name):
    space = {}
    exec(text, space)
    torch.manual_seed(0)
    return space[name](*space["get_init_inputs"]()), space["get_inputs"]()

def eval_kernel_against_ref(original, custom, *, precision, **settings):
    (theirs, inputs), (ours, _) = made(original, "Model"), made(custom, "ModelNew")
    theirs, ours = theirs.to(precision), ours.to(precision)
    right = torch.allclose(theirs(inputs[0].to(precision)), ours(inputs[0].to(precision))) and precision != torch.float16
    said = types.SimpleNamespace(compiled=True, correctness=right, metadata={"gru": type(ours.gru).__module__})
    said.ref_runtime, said.runtime = 3.0, 2.0
    return said
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for number in kernelbench.PROBLEMS:
        path = tmp_path / "KernelBench" / "level3" / f"{number}_GRU.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROBLEM)
    package = tmp_path / "src" / "kernelbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "eval.py").write_text(HARNESS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.qk_norm.environment", lambda _packages: {})
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernelbench"]:
        del sys.modules[name]


def test_the_harness_judges_each_problem_with_our_gru(checkout: Path, tmp_path: Path, capsys: Any) -> None:
    out, path = tmp_path / "out.json", list(sys.path)
    arguments = [str(checkout), "--dtype=float32", "--dtype=bfloat16", f"--out={out}"]
    assert kernelbench.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [row["problem"][:2] for row in found["rows"]] == ["39", "39", "40", "40", "41", "41", "42", "42"]
    assert all(row["correct"] and row["theirs_ms"] / row["ours_ms"] == 1.5 for row in found["rows"])
    assert "39_GRU, float32: correct; PyTorch 3 ms, tuned 2 ms, 1.50 times as fast" in capsys.readouterr().out
    assert sys.path == path
    assert not {"openai", "litellm", "dotenv"} & set(sys.modules)


def test_what_it_calls_wrong_is_told_and_fails(checkout: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = [str(checkout), "--problem=40", "--dtype=float16", f"--out={tmp_path / 'out.json'}"]
    assert kernelbench.main(arguments) == 1
    assert "the harness calls it wrong: {'gru': 'tuned.nn'}" in capsys.readouterr().out


def test_a_part_does_not_replace_the_file_of_all(checkout: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("benchmarks.session.RESULTS", tmp_path / "results")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    assert kernelbench.main([str(checkout), "--problem=39", "--dtype=float32"]) == 0
    assert "--out FILE writes them" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    kernelbench.main([str(checkout)])
    assert [path.name for path in tmp_path.glob("results/kernelbench/*")] == ["test_gpu.json"]


def test_a_harness_that_raises_costs_no_other_row(checkout: Path, tmp_path: Path, capsys: Any) -> None:
    (checkout / "KernelBench" / "level3" / "39_GRU.py").write_text(PROBLEM.replace("4, 8", "4"))
    assert kernelbench.main([str(checkout), "--dtype=float32", f"--out={tmp_path / 'out.json'}"]) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert (len(found["rows"]), list(found["failed"])) == (3, ["39_GRU, float32"])
    assert "39_GRU, float32: TypeError" in capsys.readouterr().out


def test_a_candidate_is_the_problem_with_our_gru() -> None:
    space: dict[str, Any] = {}
    exec(kernelbench.candidate(PROBLEM), space)
    model = space["ModelNew"](*space["get_init_inputs"]())
    assert type(model.gru) is tuned.nn.GRU
    with pytest.raises(kernelbench.CheckoutError, match="this one 0"):
        kernelbench.candidate(PROBLEM.replace("nn.GRU(", "nn.LSTM("))
