"""The static estimate: it ranks plainly better variants first, and it never looks like a measurement."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from generator.estimating import estimate, offline
from generator.estimating.estimate import START_US, by_hand_us
from generator.estimating.offline import Estimate, sample_of, save
from generator.estimating.targets import TARGETS, UnknownTargetError, resident, target_named
from generator.families.rope.reference import work as rope_work
from generator.measuring.compile import Resources, target_of
from generator.measuring.interpret import small
from generator.reporting.estimates import funnel, picks, run_offline
from generator.searching.pool import legal_pool
from generator.selection import problem_named
from generator.workload import WORKLOADS
from tests.support.records import winner
from tuned.families.rope.variant import RopeVariant, default_variant

pytestmark = pytest.mark.compiler

H200, H100, RTX_4090 = (target_named(n) for n in ("h200", "h100", "4090"))
PREFILL = problem_named("llama3_8b_2x4096")
DECODE = problem_named("llama3_8b_decode_64x1")


def need(registers: int = 32, shared: int = 0, code: str = "a") -> Resources:
    return Resources(registers, 0, shared, code)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_target_compiles_and_estimates(target: Any) -> None:
    target_of(target.architecture)
    for problem in (PREFILL, DECODE, problem_named("gru_cell_512_64")):
        pool = legal_pool(problem, target.capability)
        assert START_US / 2 < by_hand_us(problem, pool.variants[0], target) < 1e6


def test_no_estimate_is_below_the_bytes_over_the_bandwidth() -> None:
    least_us = 2 * 2 * 4096 * 32 * 128 * 2 / (H200.bandwidth_gb_s * 1e3)
    pool = legal_pool(PREFILL, 90).variants[::50]
    assert all(by_hand_us(PREFILL, v, H200) > least_us for v in pool)


def test_the_default_is_within_two_times_of_what_was_measured_on_one_h200() -> None:
    # From docs: copying the bytes of PREFILL took 33.9 us on one H200, copying those of DECODE 1.36 us.
    for problem, copy_us in ((PREFILL, 33.9), (DECODE, 1.36)):
        assert copy_us / 2 < by_hand_us(problem, default_variant(problem.spec, problem.size), H200) < copy_us * 2


def test_more_bandwidth_is_faster() -> None:
    default = default_variant(PREFILL.spec, PREFILL.size)
    times = [by_hand_us(PREFILL, default, t) for t in (H200, H100, RTX_4090)]
    assert times == sorted(times)


def test_many_registers_leave_few_programs_resident() -> None:
    (work,) = rope_work(PREFILL, RopeVariant(num_warps=4))
    assert resident(work, H200, need(32)) == 2048 // 128
    assert resident(work, H200, need(255)) == 65536 // (256 * 128)
    assert resident(work, H200, need(32, shared=100_000)) == 2
    assert resident(work, H200, need(255, shared=10**6)) == 1


def test_each_launch_of_a_call_has_its_own_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's report has launches of one code and grid once, however often and wherever they come."""
    # Where tests run, kernels are interpreted, and the compiler's key of their code is not to be had.
    monkeypatch.setattr(estimate, "same_code", lambda _, launch: (launch.kernel, repr(launch.options)))
    few, many = RopeVariant(num_warps=4), RopeVariant(num_warps=8)
    work = WORKLOADS["rope"]
    call = work.inputs(PREFILL.spec, PREFILL.size, "meta", 0)
    launches = {v: work.family.launches(PREFILL.spec, v, call) for v in (few, many)}
    times = {v: by_hand_us(PREFILL, v, H200, [report]) for v, report in ((few, need(32)), (many, need(255)))}
    for order in ((few, many, few), (few, few), (many, few, few)):
        steps = tuple(step for v in order for step in launches[v])
        several = dataclasses.replace(
            work,
            family=dataclasses.replace(work.family, launches=lambda *_, steps=steps: steps),
            work=lambda problem, _, order=order: tuple(w for v in order for w in rope_work(problem, v)),
        )
        monkeypatch.setitem(WORKLOADS, "rope", several)
        needs = [need(32 if v == few else 255) for v in dict.fromkeys(order)]
        assert by_hand_us(PREFILL, few, H200, needs) == pytest.approx(sum(times[v] for v in order))


def test_a_program_of_one_tiny_tile_is_estimated_slower() -> None:
    tiny = RopeVariant(block_tokens=1, block_heads=1, num_warps=1)
    assert by_hand_us(PREFILL, tiny, H200) > 1.1 * by_hand_us(PREFILL, RopeVariant(num_warps=8), H200)


def test_a_sample_has_the_default_what_is_wanted_and_a_spread() -> None:
    pool = legal_pool(PREFILL, 90)
    wanted = pool.variants[123]
    sample = sample_of(PREFILL, pool, H200, 40, [wanted])
    assert sample[:2] == [default_variant(PREFILL.spec, PREFILL.size), wanted]
    assert len(sample) == len(set(sample)) <= 40
    assert set(sample) <= set(pool.variants)
    assert {v.block_tokens for v in sample} == {v.block_tokens for v in pool.variants}
    assert sample_of(PREFILL, pool, H200, 40, [wanted]) == sample
    small_pool = legal_pool(problem_named("gru_cell_dreamer_200_16"), 90)
    assert sample_of(problem_named("gru_cell_dreamer_200_16"), small_pool, H200, len(small_pool.variants)) == list(
        small_pool.variants
    )


def made(measured: Any = None) -> Estimate:
    pool = legal_pool(PREFILL, 90)
    default = default_variant(PREFILL.spec, PREFILL.size)
    other, spills, broken = pool.variants[:3]
    compiled = {default: (need(),), other: (need(60, code="b"),), spills: (need(255, code="c"),)}
    refused = {spills: "spills 16 bytes a thread", broken: "does not compile: no"}
    return Estimate(PREFILL, pool, compiled, refused, [(34.0, default), (35.0, other)], measured)


def test_the_funnel_counts_every_step() -> None:
    assert funnel(made()).endswith(
        " legal -> a ranked sample of 4: 3 compiled -> 2 without spills -> 2 distinct in machine code"
    )


def test_the_measured_row_stands_beside_the_picks() -> None:
    assert picks(made())[-1].strip() == "measured: no row in the record"
    line = picks(made(winner()))[-1]
    assert "34.50 us" in line
    assert "rank 1 of 2 here" in line


def test_what_is_kept_is_marked_as_estimated_and_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path))
    path = save([made(winner())], H200)
    content = json.loads(path.read_text())
    assert path == tmp_path / "estimates" / "nvidia_h200.json"
    assert content["estimated"] is True
    assert all(row["estimated"] is True and row["picks"] for row in content["rows"])
    assert "34.5" not in path.read_text(), "a measured time is not repeated here"


def test_the_interpreter_is_given_a_few_tokens() -> None:
    problem = small(PREFILL, RopeVariant(block_tokens=4))
    assert (problem.size.batch, problem.size.seq) == (2, 5)
    assert small(DECODE, RopeVariant(block_tokens=1)).size.seq == 1


def test_a_wrong_result_in_the_interpreter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(offline, "estimate_all", lambda *_: ([made()], []))
    monkeypatch.setattr(offline, "save", lambda *_: Path("none"))
    monkeypatch.setattr(offline, "interpreted", lambda cases: [None] * (len(cases) - 1) + ["it wrote past an end"])
    assert not run_offline([PREFILL], H200, 4, None, 60, said.append)
    assert any("1 of 2 right" in line for line in said)
    assert any("WRONG llama3_8b_2x4096: it wrote past an end" in line for line in said)


@pytest.mark.parametrize(
    ("name", "said"), [("h300", "Did you mean"), ("nvidia", "no single target 'nvidia'"), ("", "no single target")]
)
def test_an_unknown_target_lists_the_known(name: str, said: str) -> None:
    with pytest.raises(UnknownTargetError, match=said) as caught:
        target_named(name)
    assert "nvidia_h200" in str(caught.value)


def test_a_target_is_found_by_a_part_of_its_name() -> None:
    assert target_named("RTX 4090") is RTX_4090
    assert target_named("mi300x").architecture == "gfx942"
