"""A family from outside on a real GPU: its kernels serve calls, and its broken variants are recorded failures."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch

import tuned
from tests.support.outside import changed, copied, run, tune
from tuned.families.outside import load

if TYPE_CHECKING:
    from pathlib import Path

DEEDS = """    # {% endif %}
    # {% if variant.deed == "wrong" %}
    tl.store(out_ptr + row * COLUMNS, tl.zeros([BLOCK_ROWS, 1], tl.float32) + 3.0, row < rows)
    # {% elif variant.deed == "past" %}
    tl.store(out_ptr + (row + rows) * COLUMNS, tl.zeros([BLOCK_ROWS, 1], tl.float32) + 3.0, row == 0)
    # {% elif variant.deed == "far" %}
    tl.store(out_ptr + row + 17592186044416, tl.zeros([BLOCK_ROWS, 1], tl.float32) + 3.0, row == 0)
    # {% elif variant.deed == "hang" %}
    seen = tl.max(tl.load(x_ptr + row, row < rows, 0.0, volatile=True))
    while seen < 1e30:
        seen = tl.max(tl.load(x_ptr + row, row < rows, 0.0, volatile=True))
    # {% endif %}
"""
REASONS = {
    "wrong": "WrongResultError: the worst error is .* times what rounding allows",
    "past": "WrongResultError: it wrote past an end of its output",
    "far": "illegal memory access",
    "hang": "no answer in 5 s: it hung, and was killed",
}


@pytest.mark.gpu
def test_broken_variants_are_recorded_failures(tmp_path: Path) -> None:
    file = copied("softmax", tmp_path)
    knob = '    deed: str = own.one_of("none", "wrong", "past", "far", "hang", default="none")\n'
    changed(
        file,
        ('TEXT = ("strategy",)', 'TEXT = ("strategy", "deed")'),
        ("    block_rows: int =", f"{knob}    block_rows: int ="),
    )
    changed(file.with_suffix(".py.jinja"), ("    # {% endif %}\n", DEEDS))
    done = run(tmp_path, "-m", "tests.gpu.outside_broken", family=file)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["winner"] == "none"
    assert set(told["failed"]) == set(REASONS)
    for deed, reason in REASONS.items():
        assert re.search(reason, told["failed"][deed]), told["failed"][deed]


@pytest.mark.gpu
def test_calls_are_served_by_its_kernels(tmp_path: Path) -> None:
    file = copied("softmax", tmp_path)
    assert tune(tmp_path, "--family", file.name, "--render").returncode == 0
    softmax = load(str(file)).softmax
    for shape, dtype in (((3, 5, 1000), torch.bfloat16), ((70_000, 64), torch.float32), ((2, 128_256), torch.float16)):
        x = torch.randn(shape, device="cuda").to(dtype)
        assert tuned.explain(softmax, x).kernels
        for given in (x, x, x.clone(), x.transpose(0, -1).contiguous().transpose(0, -1), x[..., ::2]):
            wanted = torch.softmax(given.double(), -1)
            torch.testing.assert_close(softmax(given).double(), wanted, rtol=2**-7, atol=2**-20)
    x = torch.randn(64, 1000, device="cuda")
    softmax(x)
    assert len(softmax._plans) > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = softmax(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, torch.softmax(x, -1))
    y = x.clone().requires_grad_()
    softmax(y).square().sum().backward()
    z = x.clone().requires_grad_()
    torch.softmax(z, -1).square().sum().backward()
    torch.testing.assert_close(y.grad, z.grad)
    with torch.autocast("cuda", torch.bfloat16):
        assert tuned.explain(softmax, x).why == "autocast is on"
    compiled = torch.compile(lambda x: softmax(x) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.softmax(x, -1) + 1)
