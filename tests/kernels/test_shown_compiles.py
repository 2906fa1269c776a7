"""Files of `tune.py show` compile for GPUs below sm_90 too: features of newer GPUs are chosen when the file runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from generator.storage.record import read_record
from tests.support.shown import shown_launches

if TYPE_CHECKING:
    import concurrent.futures

WINNERS = {w.name: w for w in read_record("nvidia_h200")}
DEPENDENT = ("llama3_8b_2x4096", "llama3_8b_decode_thd_64x1", "gru_cell_1024_64", "linear_cat_decoder_128")
WAITING = {"gru_512x32x512": "spin", "gru_128x1024x256": "probe", "gru_backward_16x512": "spin"}


@pytest.mark.parametrize(("name", "older"), list(zip(DEPENDENT, ("sm_80", "sm_86", "sm_86", "sm_80"), strict=True)))
def test_dependent_launch_is_for_gpus_that_have_it(
    name: str, older: str, compiler: concurrent.futures.Executor
) -> None:
    assert WINNERS[name].variant.pdl, "another winner is to be shown here"
    for architecture, has in ((older, False), ("sm_90", True)):
        (found,) = compiler.submit(shown_launches, name, architecture).result()
        assert (found.dependent, found.waits_for_the_kernel_before) == (has, has)
        assert found.code_bytes


@pytest.mark.parametrize("name", WAITING)
def test_programs_wait_by_what_a_gpu_has(name: str, compiler: concurrent.futures.Executor) -> None:
    assert WINNERS[name].variant.exchange == WAITING[name], "another winner is to be shown here"
    for architecture, exchange in (("sm_80", "poll"), ("sm_90", WAITING[name])):
        (found,) = compiler.submit(shown_launches, name, architecture).result()
        assert found.exchange == exchange
        assert found.code_bytes
