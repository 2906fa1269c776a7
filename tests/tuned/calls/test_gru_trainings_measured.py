"""Which trainings kernels serve, held against what an H100 took for them (docs/decisions/0082)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.random_gru import Shape
from tests.support.otherwise import by_kernels
from tuned.lookup.lookup import Gpu

FILE = Path(__file__).parents[3] / "benchmarks/results/tuning/nvidia_h100-trainings-of-few-steps.json"
H100 = Gpu("nvidia_h100_80gb_hbm3", 90, 132, "NVIDIA H100 80GB HBM3")
# Of the time of PyTorch's own, what kernels may take where they serve, and where they do not: as calls those of fast hosts.
LEAST, MOST = 0.98, {False: 1.66, True: 1.25}


@pytest.mark.parametrize("captured", [False, True])
def test_kernels_serve_where_they_were_measured_to_take_less(*, captured: bool) -> None:
    rows = [row for row in json.loads(FILE.read_text())["rows"] if row["captured" if captured else "called"]]
    graph = "_graph" if captured else ""
    served, wrong = 0, []
    for row in rows:
        names = ("steps", "batch", "hidden", "layers", "bidirectional", "dtype")
        shape = Shape(**{name: row[name] for name in names}, packed=False)
        times_faster = row[f"theirs{graph}_us"] / row[f"ours{graph}_us"]
        kernels = by_kernels(shape, H100, captured=captured, trained=True)
        served += kernels
        if times_faster < LEAST if kernels else times_faster > MOST[captured]:
            wrong.append((shape, kernels, round(times_faster, 2)))
    assert not wrong
    assert served > len(rows) / 4
