"""Gradients of recurrences to compile. All tests of compiled code share these few, since each takes a second."""

from __future__ import annotations

import dataclasses

from tests.support.gru_order import Case
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant

ROW, ONE, TWO = GruSize(1, 8), GruSize(16, 8), GruSize(32, 8)
SPIN = GruVariant("persistent", "split", 16, 8, "spin")
TURNS = dataclasses.replace(SPIN, turns=2)
LAYER = GruSpec("bfloat16", 128)
GRADIENTS = [
    Case(*case, "gru_backward")
    for case in (
        (LAYER, ONE, SPIN, "sm_90"),
        (LAYER, ROW, SPIN, "sm_90"),
        (LAYER, ONE, dataclasses.replace(SPIN, exchange="counter"), "sm_90"),
        (GruSpec("bfloat16", 128, "packed", directions=2), TWO, TURNS, "sm_90"),
        (GruSpec("bfloat16", 100, "packed"), ONE, dataclasses.replace(SPIN, exchange="poll", prefetch="late"), "sm_80"),
        (GruSpec("float32", 64, precision="ieee"), ONE, dataclasses.replace(SPIN, prefetch="late"), "sm_80"),
        (GruSpec("bfloat16", 128, resets=True), ONE, SPIN, "sm_90"),
        (GruSpec("bfloat16", 128, "thd"), TWO, dataclasses.replace(TURNS, exchange="counter"), "sm_100"),
    )
]
