"""The parts of tests/gpu still fit the code, as far as that can be checked without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re

import pytest
import torch

import tests.gpu
from generator.searching.pool import legal_pool
from generator.workload import WORKLOADS
from tests.broken.server import ranked
from tests.gpu import broken, gru_stress, test_gpu_isolation, test_gpu_variants
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import rejection

MODULES = sorted(m.name for m in pkgutil.iter_modules(tests.gpu.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(f"tests.gpu.{name}")


def test_the_decode_problem_has_variants_to_try() -> None:
    found = {c: len(legal_pool(test_gpu_variants.WHOLE, c).variants) for c in (80, 90, 100)}
    assert found == {80: 33, 90: 66, 100: 66}, "fewer test little; and each of hundreds is compiled"


@pytest.mark.parametrize("problem", [test_gpu_isolation.COPY, test_gpu_isolation.INPLACE], ids=lambda p: p.name)
def test_broken_kernels_write_where_the_call_has_tensors(problem: object) -> None:
    assert tuple(test_gpu_isolation.REASONS) == broken.DEEDS
    assert len(ranked(problem)) > len(broken.DEEDS), "a right one is left"  # type: ignore[arg-type]
    call = WORKLOADS[problem.family].inputs(problem.spec, problem.size, "meta", 0)  # type: ignore[attr-defined]
    said, _ = test_gpu_isolation.REASONS["changed input"]
    name = re.search(r"its input (\w+)", said)
    assert name is not None
    assert name[1] == broken.INPUT
    assert getattr(call, broken.INPUT).numel() > broken.PLACE
    assert call.out.numel() > broken.PLACE


def test_the_recurrences_under_stress_are_legal() -> None:
    cases = [
        (GruSpec("bfloat16", 512), gru_stress.SPLIT),
        (GruSpec("bfloat16", 256), gru_stress.TILE),
        (GruSpec("float32", 256, layers=4), dataclasses.replace(gru_stress.SPLIT, block_batch=8)),
        (GruSpec("bfloat16", 96), gru_stress.SPLIT),
        (GruSpec("bfloat16", 96), gru_stress.TILE),
        (GruSpec("bfloat16", 64, layout="thd", layers=2), gru_stress.SPLIT),
    ]
    cases += [
        (GruSpec(dtype, 256), dataclasses.replace(gru_stress.SPLIT, exchange=exchange, block_batch=8))
        for exchange in gru_stress.EXCHANGES
        if exchange != "poll"  # it works, but searches leave it out: it was never faster than "spin"
        for dtype in ("bfloat16", "float32")
    ]
    for spec, variant in cases:
        assert rejection(spec, None, variant, 90, 132) is None, (spec, variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_state_that_is_no_number_has_a_place(dtype: torch.dtype) -> None:
    built = gru_stress.case_of(3, 9, 256, str(dtype).split(".")[1], device="cpu")
    assert built.call.gates[0, 4, 2, 7].dtype == dtype
    assert built.call.h_0.shape[0] >= 1
