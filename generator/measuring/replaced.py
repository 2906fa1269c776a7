"""Time PyTorch's operators that a family replaces, on random shapes: a model of them is fitted to these times."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch

from ..problem import Problem
from ..workload import WORKLOADS
from .bench import device_time

REPLAYS = 4
SETS = 2  # sets of inputs, timed in turn


def replaced(family: str, seconds: float, seed: int) -> Iterator[tuple[Problem, float, float]]:
    """Yield (problem, us of PyTorch's operator, us of the product of its input alone) for shapes drawn by a seed."""
    work, draw, end = WORKLOADS[family], random.Random(seed), time.monotonic() + seconds  # noqa: S311 - shapes, no secrets
    assert work.drawn is not None, f"{family} draws no problems"
    with torch.no_grad():
        while time.monotonic() < end:
            problem = work.drawn(draw)
            calls = [work.inputs(problem.spec, problem.size, "cuda", seed) for seed in range(SETS)]
            whole = [work.eager(problem.spec, call) for call in calls]
            x = torch.zeros_like(calls[0].gates[0, ..., : problem.spec.hidden]).flatten(0, -2)
            products = [lambda x=x, w=call.weight_hh[0]: torch.mm(x, w.t()) for call in calls]
            us = device_time(whole, REPLAYS).median_us
            yield problem, us, device_time(products, REPLAYS).median_us * problem.spec.directions
