"""A bounded share of the fuzz without a GPU, by PyTorch's operators and in the interpreter; and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import case as cases
from tests.fuzz.draw import CPU, World, case
from tests.fuzz.interpreted import interpreted_families
from tests.fuzz.planted import PLANTS, planted
from tests.rope_calls import Watch, watch
from tests.run import INTERPRETED

__all__ = ["watch"]
SEED = 11
KERNELS = World(
    truncates=True, sees_values=False, most=1000, hidden=16, long=0, modes=("plain", "no_grad", "inference", "grad")
)
ROPE = dataclasses.replace(KERNELS, kinds=("rope", "dropin"))
FAMILIES = dataclasses.replace(KERNELS, kinds=("gru", "gru_cell", "linear_cat"), modes=("no_grad", "inference"))


def assert_right(world: World, indices: range, repeats: int = 2) -> int:
    """Run cases; every failure is told with its script."""
    wrong, calls = [], 0
    for index in indices:
        made, failure = cases.run(case(world, SEED, index, repeats), "cpu")
        calls += made
        wrong += [] if failure is None else [f"{failure.message}\n{failure.script}"]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    return calls


def test_calls_by_pytorchs_operators_are_right() -> None:
    assert assert_right(CPU, range(150)) > 500


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_rope_by_kernels_is_right(watch: Watch) -> None:
    watch.interpreted = True
    assert assert_right(ROPE, range(24), 1) > 40
    assert watch.bare > 10


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_the_gru_families_by_kernels_are_right() -> None:
    with interpreted_families():
        assert assert_right(FAMILIES, range(9), 1) > 15


# The fuzz itself ------------------------------------------------------------------------------------------------------

QUICK = dataclasses.replace(CPU, most=3000, hidden=8, long=0, modes=("plain", "no_grad", "grad"))
ROOT = Path(__file__).parents[2]


def found(name: str, most: int = 60) -> cases.Failure:
    """The first failure with a defect planted."""
    world = dataclasses.replace(QUICK, kinds=("gru",) if name == "half_state" else ("rope",))
    with planted(name):
        for index in range(most):
            _, failure = cases.run(case(world, SEED, index), "cpu")
            if failure is not None:
                return failure
    raise AssertionError(f"{name} was not found in {most} cases")


def test_planted_defects_are_found_and_their_scripts_fail_elsewhere_too(tmp_path: Path) -> None:
    failures = {name: found(name) for name in PLANTS}
    for name, failure in failures.items():
        (tmp_path / f"{name}.short.py").write_text(failure.script, encoding="utf-8")
        (tmp_path / f"{name}.whole.py").write_text(failure.whole, encoding="utf-8")
        assert len(failure.script.splitlines()) < 40
    command = [sys.executable, "-m", "tests.fuzz.planted", str(tmp_path)]
    told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    for name in PLANTS:
        (short, without), (whole, without_whole) = told[f"{name}.short"], told[f"{name}.whole"]
        assert (whole, without, without_whole) == (True, False, False), name
        assert short or name == "stale", name


def test_a_case_is_a_seed_and_an_index() -> None:
    for index in range(40):
        first, again = (case(CPU, SEED, index) for _ in range(2))
        assert first == again
        assert cases.script(first, "cpu") == cases.script(again, "cpu")
    assert len({call.key() for index in range(100) for call in case(CPU, SEED, index).calls}) > 150
    assert case(CPU, SEED, 1) != case(CPU, SEED + 1, 1)
