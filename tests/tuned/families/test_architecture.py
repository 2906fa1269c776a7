"""The rules of variants, the compiler's report and the estimate use one table of shared memory."""

from __future__ import annotations

import pytest

from generator.estimating.targets import TARGETS, Target
from generator.measuring.compile import Resources
from generator.processes.compiler import hopeless
from tuned.families.architecture import LEAST_SHARED, SHARED_KIB, shared_limit

UNKNOWN = (75, 88, 102, 130)


@pytest.mark.parametrize("capability", [*SHARED_KIB, *UNKNOWN])
def test_tuning_rules_out_what_the_rules_of_variants_do(capability: int) -> None:
    fits, over = (Resources(32, 0, shared_limit(capability) + more, "") for more in (0, 1))
    assert hopeless((fits,), capability) is None
    assert hopeless((over,), capability) == f"needs {over.shared_bytes} bytes of shared memory a program"


def test_the_limits_are_those_of_the_programming_guide() -> None:
    known = {0: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
    assert {capability: shared_limit(capability) for capability in known} == known
    assert shared_limit(87) == shared_limit(80)
    assert shared_limit(121) == shared_limit(120)
    assert [shared_limit(capability) for capability in UNKNOWN] == [65_536, 65_536, 232_448, 101_376]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_program_may_have_what_a_processor_has_but_for_the_systems_own(target: Target) -> None:
    system = 1024 if target.capability else 0
    assert shared_limit(target.capability) + system == target.shared_bytes


def test_what_fits_the_least_fits_all() -> None:
    assert min(map(shared_limit, (*SHARED_KIB, *UNKNOWN))) == min(map(shared_limit, LEAST_SHARED))
