"""Models of the time are fitted correctly, and their picks for shapes that they never saw are near the best."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import nnls

from generator.commands import refusal
from generator.disk import gzipped
from generator.evaluation import fitting
from generator.problem import Problem
from generator.storage import samples
from tuned.families.gru.model import kernels
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.lookup.model import weighted

# Bars of the regrets for hidden sizes left out. The worst calls are those where the library's float32 steps win, which have
# no model.
MEDIAN, TENTH, WORST = 0.005, 0.25, 0.85


@pytest.fixture(scope="module")
def measured() -> samples.Samples:
    return samples.load(samples.path_of("nvidia_h200", "gru"))


def test_the_least_squares_have_no_negative_weight_and_are_the_least() -> None:
    draw = np.random.default_rng(3)
    for rows, columns in ((30, 5), (60, 12), (12, 12)):
        matrix = np.abs(draw.normal(size=(rows, columns)))
        wanted = matrix @ np.maximum(draw.normal(size=columns), 0) + 0.1 * draw.normal(size=rows)
        found = fitting.least_squares(matrix, wanted)
        assert (found >= 0).all()
        np.testing.assert_allclose(found, nnls(matrix, wanted)[0], atol=1e-8)


def test_weights_that_made_the_times_are_found_again() -> None:
    truth = {"call": 4.0, "step": 0.4, "spin": 0.5, "state": 9.0}
    times: dict[Problem, dict[GruVariant, float]] = {}
    for hidden in (64, 256, 512, 1024):
        for seq in (16, 200):
            problem = Problem(f"p{hidden}x{seq}", "gru", GruSpec("bfloat16", hidden), GruSize(16, seq))
            variants = [GruVariant("persistent", "split", u, 16, "spin", "late", w) for u in (8, 16) for w in (4, 8)]
            times[problem] = {v: weighted(kernels(problem.spec, problem.size, v), truth) for v in variants}
    problem = next(iter(times))
    made = samples.Samples(
        "gru", {"device": "made_up"}, times, (samples.Replaced(problem.spec, problem.size, 90.0, 9.0),)
    )
    found = fitting.fit([made])["kernels"]
    for problem, variants in times.items():
        for variant, us in variants.items():
            assert weighted(kernels(problem.spec, problem.size, variant), found) == pytest.approx(us, rel=1e-3)


def test_pytorchs_own_is_rather_thought_faster_than_it_is(measured: samples.Samples) -> None:
    """If the model overestimates the time of PyTorch's operator, it picks a kernel that is slower."""
    weights = fitting.fit([measured])
    model = fitting.WORKLOADS["gru"].family.model
    assert model is not None
    ratios = []
    for one in measured.replaced:
        kind, amounts = model.library(one.spec, one.size)
        ratios.append(weighted(amounts, weights[kind]) / one.us)
    assert statistics.median(ratios) < 1
    assert sorted(ratios)[int(0.95 * len(ratios))] < 1.25


def test_picks_for_hidden_sizes_that_were_never_measured_are_near_the_best() -> None:
    """For each device, with an eleventh of the sizes left out at a time."""
    every = [one for one in samples.load_all() if one.family == "gru"]
    counted = 0
    for one in every:
        regrets = fitting.regrets(one, fitting.same_part, [other for other in every if other is not one])
        found = sorted(regrets.values())
        counted += len(found)
        assert statistics.median(found) <= MEDIAN
        assert found[int(0.9 * len(found))] <= TENTH
        assert found[-1] <= WORST
    assert counted > 200


def test_a_summary_says_what_was_left_out_and_of_how_many() -> None:
    found = {f"p{i}": i / 100 for i in range(11)}
    told = fitting.summary(found)
    assert told == "median 5.00 %, mean 5.00 %, nine in ten at most 9.0 %, worst 10.0 % (p10), of 11 problems"
    assert fitting.summary({}).startswith("nothing is known")


def test_problems_with_few_kernels_have_no_regret(measured: samples.Samples) -> None:
    few = {problem: dict(list(times.items())[:3]) for problem, times in measured.times.items()}
    assert fitting.regrets(dataclasses.replace(measured, times=few), fitting.same_part) == {}


def test_samples_are_read_as_they_were_written(measured: samples.Samples, tmp_path: Path) -> None:
    path = samples.save(measured, tmp_path)
    assert samples.load(path) == measured
    assert path.read_bytes() == samples.path_of("nvidia_h200", "gru").read_bytes(), "the same samples, the same bytes"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no gzip", "cannot be read as gzipped JSON"),
        (gzipped(b"[]" * 1000)[:20], "cannot be read as gzipped JSON"),
        (gzipped(b"{"), "cannot be read as gzipped JSON"),
        (gzipped(b"[]"), "holds no samples of schema 1: take them again"),
        (gzipped(b"{}"), "holds no samples of schema 1: take them again"),
    ],
)
def test_a_file_of_no_samples_ends_a_command_with_a_sentence(data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "gru.json.gz"
    path.write_bytes(data)
    with pytest.raises(samples.SamplesError, match=why) as told:
        samples.load(path)
    assert refusal(told.value) == (str(told.value), 1)
