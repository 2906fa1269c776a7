"""What conftest.py decides for all tests: which cases a GPU runs, and how many threads a worker has."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch

from tests.conftest import _thinned, pytest_runtest_teardown
from tuned.dispatch import linear_cat
from tuned.launching import left


def item(name: str, every: int | None) -> Any:
    marker = None if every is None else types.SimpleNamespace(kwargs={"every": every})
    return types.SimpleNamespace(nodeid=name, get_closest_marker={"thinned_on_gpu": marker}.get)


def test_a_gpu_runs_the_first_case_of_a_function_and_every_nth() -> None:
    items = [item(f"a.py::test_many[{n}]", 3) for n in range(7)]
    items += [item("a.py::test_other[0]", 3), item("b.py::test_many[0]", 3), item("a.py::test_all[1]", None)]
    left_out = [one.nodeid for one in _thinned(items)]
    assert left_out == [f"a.py::test_many[{n}]" for n in (1, 2, 4, 5)]


def test_no_call_of_a_test_is_known_in_the_next(request: pytest.FixtureRequest) -> None:
    linear_cat((torch.ones(2, 3), torch.ones(2, 5)), torch.ones(4, 8))
    assert left.LEFT
    teardown = pytest_runtest_teardown(request.node)
    next(teardown)
    with pytest.raises(StopIteration):
        teardown.send(None)
    assert not left.LEFT


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="not one of several workers")
def test_a_worker_and_what_it_starts_compute_with_one_thread() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
