"""Our rotation as a candidate in TritonBench's operator: a small stand-in for TritonBench's checkout runs it on a CPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import tritonbench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPERATOR = """
import types
import torch

class Output:
    def __init__(self, result):
        self.result = result
    def __str__(self):
        return "a table"

class Operator:
    def __init__(self, tb_args, extra_args):
        self.asked = tb_args

    def prepare_input(self, hidden, tokens):
        q, k = torch.randn(1, 4, tokens, hidden // 4), torch.randn(1, 2, tokens, hidden // 4)
        radians = torch.randn(1, tokens, hidden // 8)
        radians = torch.cat((radians, radians), -1)
        self.given = q, k, radians.cos(), radians.sin(), torch.arange(tokens)[None]
        return tuple(t.clone() for t in self.given)

    def run(self, warmup, rep):
        q, k = self.tuned(64, 6)()
        q_in, k_in, cos, sin, _ = self.given
        turned = lambda x: x * cos[:, None] + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin[:, None]
        close = torch.allclose(q, turned(q_in), atol=1e-5) and torch.allclose(k, turned(k_in), atol=1e-5)
        self.output = Output([((64, 6), {"tuned": types.SimpleNamespace(latency=types.SimpleNamespace(p50=0.5), speedup=2.0, accuracy=close)})])
"""

UTILS = """
def register_benchmark(operator, name):
    assert operator == "rope"
    return lambda function: lambda self, *given: function(self, *given)
"""

PARSER = """
import argparse

def get_parser():
    parser = argparse.ArgumentParser()
    for name in ("--op", "--precision", "--metrics"):
        parser.add_argument(name)
    parser.add_argument("--bwd", action="store_true")
    parser.set_defaults(warmup=1, iter=1)
    return parser
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    texts = {"operators/rope/operator.py": OPERATOR, "utils/triton_op.py": UTILS, "utils/parser.py": PARSER}
    for name, text in texts.items():
        path = tmp_path / "tritonbench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.qk_norm.environment", lambda _packages: {})
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "tritonbench"]:
        del sys.modules[name]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ours_is_a_candidate_of_its_operator(checkout: Path, tmp_path: Path, capsys: Any, direction: str) -> None:
    out, path = tmp_path / "out.json", list(sys.path)
    more = ["--bwd"] if direction == "backward" else []
    assert tritonbench.main([str(checkout), f"--out={out}", *more]) == 0
    found = json.loads(out.read_text())
    row = {"hidden": 64, "tokens": 6, "name": "tuned", "ms": 0.5, "speedup": 2.0, "close": True}
    assert (found["direction"], found["rows"]) == (direction, [row])
    assert "a table" in capsys.readouterr().out
    assert sys.path == path
