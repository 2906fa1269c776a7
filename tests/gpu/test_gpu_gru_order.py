"""All recurrences that a lookup can give here, as compiled here: tests/gru_order.py says what is looked at."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os

import pytest
import torch

from tests import gru_order
from tests.gru_order import Case


def wrong_here(case: Case) -> list[str]:
    return [f"{case}: {text}" for text in gru_order.wrong_in(case)]


@pytest.mark.gpu
@pytest.mark.xdist_group("pools")
def test_no_recurrence_that_ships_loads_a_step_before_it_stores_the_last() -> None:
    major, minor = torch.cuda.get_device_capability()
    cases = gru_order.all_that_ships(10 * major + minor)
    assert len(cases) > 50
    processes = max(1, min(14, len(os.sched_getaffinity(0)) - 2))
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        assert [text for found in pool.map(wrong_here, cases) for text in found] == []


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_text_and_every_way_to_wait_ships(capability: int) -> None:
    cases = gru_order.all_that_ships(capability)
    ways = {(c.spec.layout, c.spec.stacked, c.variant.form, c.variant.exchange) for c in cases}
    texts = [
        (layout, *rest)
        for layout in ("dense", "packed", "thd")
        for rest in ((False, "split"), (False, "tile"), (True, "split"))
    ]
    assert ways == {(*text, exchange) for text in texts for exchange in ("counter", "poll", "spin", "probe")}
