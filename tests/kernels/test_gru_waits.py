"""Programs of one launch that wait for each other, each in a process of its own: all of them end.

In other tests the interpreter runs programs one after another, a step at a time, so that no program ever waits.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import Any

import pytest
import torch

from generator.rendering.structures import load
from tests.support.gru_sequences import Sequences, build
from tests.support.processes import end_all, forked
from tests.support.run import INTERPRETED
from tuned.families.gru.launches import sequence
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.launching.launcher import as_integers

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.processes,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
]

TURNS = GruVariant("persistent", "split", 16, 8, "poll", turns=2)
END_SECONDS = 120.0  # normally 2 s; a program that waits for a value that never comes waits for ever
# Two tiles of 8 sequences, which the same programs take in turn.
LENGTHS = {
    "the second is empty": (3,) * 8 + (0,) * 8,
    "the first sequence and the second are empty": (0, *(3,) * 7) + (0,) * 8,
    "the first is empty": (0,) * 8 + (0, *(3,) * 7),
    "the last sequence has one token": (0, *(3,) * 7) + (0,) * 7 + (1,),
}


def run_one(launch: Any, program: int) -> None:
    """Run one program of a launch."""
    from triton.runtime import interpreter  # noqa: PLC0415 - another module where nothing is interpreted

    builder = interpreter.interpreter_builder
    place, dim = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda x, y, z: place(x + program, y, z)
    builder.set_grid_dim = lambda *_: dim(launch.programs, 1, 1)
    load(launch.kernel)[(1,)](*launch.arguments, **launch.constants, **launch.options)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_all_programs_end_whatever_is_empty(lengths: tuple[int, ...], directions: int) -> None:
    spec = GruSpec("float32", 20, "thd", directions, precision="ieee")
    call = build(Sequences(spec, lengths), "cpu").call
    for field in dataclasses.fields(call):
        if isinstance(shared := getattr(call, field.name), torch.Tensor):
            shared.share_memory_()
    as_integers(call.out).fill_(-1)  # programs wait until these bits change
    launch = sequence(spec, TURNS, call, 0, call.seq)
    waiting = {forked(functools.partial(run_one, launch, program)) for program in range(launch.programs)}
    until = time.monotonic() + END_SECONDS
    try:
        while waiting and time.monotonic() < until:
            for pid in list(waiting):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    assert status == 0
                    waiting.remove(pid)
            time.sleep(0.01)
        assert not waiting, f"{len(waiting)} of {launch.programs} programs wait for what never comes"
    finally:
        end_all()
    assert not bool((as_integers(call.out) == -1).any()), "all of the output is written"
