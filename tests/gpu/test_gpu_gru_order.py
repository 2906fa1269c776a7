"""All recurrences that a lookup can give on this device, as compiled here; tests/support/gru_order.py has the check."""

from __future__ import annotations

import pytest
import torch

from tests.support import gru_order

SHARES = 14  # for as many processes as there are: compiling one recurrence takes seconds


@pytest.mark.gpu
@pytest.mark.parametrize("share", range(SHARES))
def test_no_recurrence_that_ships_loads_a_step_before_it_stores_the_last(share: int) -> None:
    major, minor = torch.cuda.get_device_capability()
    cases = gru_order.all_that_ships(10 * major + minor)
    assert len(cases) > 50
    assert [f"{case}: {text}" for case in cases[share::SHARES] for text in gru_order.wrong_in(case)] == []


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_text_and_every_way_to_wait_ships(capability: int) -> None:
    cases = gru_order.all_that_ships(capability)
    ways = {(c.spec.layout, c.spec.stacked, c.variant.form, c.variant.exchange) for c in cases if c.family == "gru"}
    texts = [
        (layout, *rest)
        for layout in ("dense", "packed", "thd")
        for rest in ((False, "split"), (False, "tile"), (True, "split"))
    ]
    exchanges = ("counter", "poll", "spin", "probe")
    staged = {
        way for way in ways if way[2] == "staged"
    }  # those that rows chose: not every layout has a row with so many units
    assert ways - staged == {(*text, exchange) for text in texts for exchange in exchanges}
    gradients = {(c.spec.layout, c.variant.exchange, c.variant.in_turn) for c in cases if c.family == "gru_backward"}
    assert gradients == {
        (layout, exchange, in_turn)
        for layout in ("dense", "packed", "thd")
        for exchange in (exchanges[:1] if layout == "thd" else exchanges[:3])
        for in_turn in (False, True)
    }
