"""The variant of a rotation that no row is near, and what its launch tells the kernel about strides."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from generator.families.rope.reference import inputs
from generator.storage.landscape import load_landscapes
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.launches import launches
from tuned.families.rope.spec import LAYOUTS, RopeSize, RopeSpec
from tuned.families.rope.variant import (
    MANY_SINES,
    RopeVariant,
    adapt,
    default_variant,
    distance,
    fit,
    half_block,
    half_row,
    programs,
    rejection,
    row_block,
    rows_at_once,
    vector_bytes,
)

SPEC = RopeSpec("bshd", "bfloat16", 32, 128, 128)


def drawn(draw: random.Random) -> tuple[RopeSpec, RopeSize]:
    half = draw.randint(1, 128)
    inplace = draw.random() < 0.5
    spec = RopeSpec(
        draw.choice(LAYOUTS),
        draw.choice(["bfloat16", "float32"]),
        heads=draw.choice([1, 2, 3, 7, 32, 61]),
        head_dim=2 * half,
        rotary_dim=2 * draw.choice([half, draw.randint(1, half)]),
        style=draw.choice(["half", "interleaved"]),
        inplace=inplace,
        key_heads=draw.choice([0, 0, 1, 5]),
    )
    return spec, RopeSize(draw.choice([1, 2, 33, 4096]), draw.choice([1, 2, 5, 100, 4097, 200_000]))


def test_the_default_is_legal_for_any_call_on_any_card() -> None:
    draw = random.Random(0)
    for _ in range(400):
        spec, size = drawn(draw)
        for capability in (80, 90, 100):
            variant = fit(default_variant(spec, size), spec, capability)
            assert rejection(spec, size, variant, capability) is None, (spec, size)
        assert not default_variant(spec).pdl, "of no size: what compiles for every card"


def test_a_small_call_is_spread_over_the_multiprocessors() -> None:
    def held(size: RopeSize) -> float:
        variant = default_variant(SPEC, size)
        return variant.block_tokens * variant.block_heads * row_block(SPEC) * 4 / (32 * variant.num_warps)

    large, small = RopeSize(2, 4096), RopeSize(1, 8)
    assert held(large) == 64
    assert held(small) <= 32
    assert programs(SPEC, default_variant(SPEC, small), 8, 1) >= 32  # of one warp each


def test_threads_compute_few_sines_where_hardly_any_heads_share_them() -> None:
    def sines(spec: RopeSpec) -> float:
        variant = default_variant(spec, RopeSize(1, 15_158))
        return variant.block_tokens * half_block(spec) / (32 * variant.num_warps)

    one = RopeSpec("bshd", "float32", 1, 58, 58, inplace=True, style="interleaved")
    tables = dataclasses.replace(one, angles="cos_sin")
    assert sines(one) == MANY_SINES, "8 took 1.7 of its time on an H200"
    assert sines(tables) > MANY_SINES, "what is read from a table costs less"


def test_the_default_is_launched_as_its_tile_was_measured_to_take_less() -> None:
    """A dependent launch starts 65,536 small programs more slowly than memory takes, but not few or large programs."""
    found = {}
    for one in load_landscapes("nvidia_h200"):
        if one.problem.family == "rope":
            chosen = default_variant(one.problem.spec, one.problem.size)
            other = dataclasses.replace(chosen, pdl=not chosen.pdl)
            found[one.problem.name] = chosen.pdl, one.times[chosen] <= one.times[other]
    assert len(found) == 21
    assert all(faster for _, faster in found.values()), found
    assert found["gpt_neox_20b_25_percent_4x2048"][0] is False
    assert found["llama3_8b_2x4096"][0] is found["llama3_8b_decode_64x1"][0] is True


def test_the_default_is_near_the_best_of_every_landscape() -> None:
    regrets = {
        one.problem.name: one.regret(default_variant(one.problem.spec, one.problem.size))
        for one in load_landscapes("nvidia_h200")
        if one.problem.family == "rope"
    }
    assert statistics.median(regrets.values()) <= 0.03
    assert max(regrets.values()) <= 0.15, regrets


def test_rows_that_are_loaded_in_other_pieces_are_further_away() -> None:
    odd = dataclasses.replace(SPEC, head_dim=70, rotary_dim=70)
    like = dataclasses.replace(SPEC, head_dim=80, rotary_dim=80)
    assert (vector_bytes(odd), vector_bytes(like), vector_bytes(SPEC)) == (2, 16, 16)
    assert distance(SPEC, odd) == 1.5 > ROPE.reach - 1e-9
    assert distance(SPEC, like) == 0


def test_a_tile_of_whole_rows_holds_all_features_in_order() -> None:
    spec = dataclasses.replace(SPEC, head_dim=36, rotary_dim=20)
    assert (half_row(spec, False), half_row(spec, True)) == (16 + 8, 32)  # 10 pairs and a tail of 16; 36 features
    inplace = dataclasses.replace(spec, inplace=True)
    assert (half_row(inplace, False), half_row(inplace, True)) == (16, 16)  # 20 features


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"style": "interleaved"}, "style half"),
        ({"norm": "head"}, "no such kernel"),
        ({"direction": "backward", "angle_gradient": True}, "no such kernel"),
        ({"rotated": "proportional", "rotary_dim": 4}, None),
        ({"rotated": "proportional", "rotary_dim": 4, "inplace": True}, "no such kernel"),
        ({"head_dim": 48, "rotary_dim": 48}, "load each feature twice"),
        ({"head_dim": 68, "rotary_dim": 68}, "took as long"),
        ({"dtype": "float32"}, "took as long"),
    ],
)
def test_whole_rows_are_tried_where_there_is_such_a_kernel_and_halves_are_not_aligned(
    changes: dict[str, Any], reason: str | None
) -> None:
    spec = RopeSpec(**{"layout": "bshd", "dtype": "bfloat16", "heads": 16, "head_dim": 36, "rotary_dim": 36, **changes})
    found = rejection(spec, None, RopeVariant(whole_rows=True))
    assert found is None if reason is None else reason in (found or "")
    # The default is never a variant that some rule forbids.
    assert rejection(spec, None, default_variant(spec)) is None


OF_ALL = dataclasses.replace(SPEC, key_heads=8, norm="all", angles="cos_sin")  # 40 heads
GRADIENT = dataclasses.replace(OF_ALL, direction="backward")


@pytest.mark.parametrize(
    ("spec", "knobs", "why"),
    [
        (OF_ALL, {"chunk_heads": 16}, None),
        (dataclasses.replace(OF_ALL, norm="head"), {"chunk_heads": 16}, "normalised together"),
        (dataclasses.replace(OF_ALL, heads=8), {"chunk_heads": 16}, "holds all 16 heads"),
        (OF_ALL, {"chunk_heads": 16, "resident": 8}, "come from L1"),
        (OF_ALL, {"chunk_heads": 32, "num_warps": 1}, "4 to 16 per thread"),
        (OF_ALL, {"chunk_heads": 8, "num_warps": 8}, "4 to 16 per thread"),
        (GRADIENT, {"chunk_heads": 16, "resident": 16}, None),
        (dataclasses.replace(GRADIENT, heads=56), {"chunk_heads": 16}, "more than 24 per thread"),
    ],
)
def test_chunks_are_tried_where_several_have_room(spec: RopeSpec, knobs: dict[str, int], why: str | None) -> None:
    found = rejection(spec, RopeSize(1, 4096), RopeVariant(1, 8, **knobs))  # type: ignore[arg-type]
    assert (found is None) if why is None else (why in str(found))


def test_the_default_takes_many_tokens_in_chunks_and_few_at_once() -> None:
    for spec in (OF_ALL, GRADIENT):
        assert default_variant(spec, RopeSize(1, 4096)).chunk_heads == 16
        assert rejection(spec, RopeSize(1, 4096), default_variant(spec, RopeSize(1, 4096))) is None
        assert not default_variant(spec, RopeSize(1, 512)).chunk_heads
    wide = default_variant(dataclasses.replace(OF_ALL, heads=56), RopeSize(1, 4096))
    assert (wide.chunk_heads, wide.num_warps) == (32, 4)


def test_chunks_have_no_empty_rows_but_in_the_last() -> None:
    chunked = RopeVariant(1, 8, chunk_heads=16)
    assert rows_at_once(OF_ALL, chunked) == 48
    assert rows_at_once(OF_ALL, RopeVariant(1, 8)) == 64
    assert programs(OF_ALL, chunked, 100, 2) == 200


def test_a_row_with_chunks_serves_a_call_of_few_heads_without() -> None:
    chunked = RopeVariant(1, 8, chunk_heads=16)
    assert adapt(chunked, OF_ALL, dataclasses.replace(OF_ALL, heads=32)).chunk_heads == 16
    assert not adapt(chunked, OF_ALL, dataclasses.replace(OF_ALL, heads=8)).chunk_heads
    assert not adapt(chunked, OF_ALL, dataclasses.replace(OF_ALL, norm="head")).chunk_heads


def test_a_row_of_the_table_with_whole_rows_serves_no_call_that_has_no_such_kernel() -> None:
    whole = RopeVariant(2, 8, whole_rows=True)
    narrow = dataclasses.replace(SPEC, head_dim=36, rotary_dim=36)
    assert adapt(whole, narrow, dataclasses.replace(narrow, heads=8)).whole_rows
    assert not adapt(whole, narrow, dataclasses.replace(narrow, style="interleaved")).whole_rows
    assert not adapt(whole, narrow, SPEC).whole_rows
    aligned = dataclasses.replace(narrow, head_dim=48, rotary_dim=48)
    assert distance(narrow, aligned) > ROPE.reach  # a row of pairs does not serve a call for whole rows either


def measured() -> list[dict[str, Any]]:
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "tuning" / "nvidia_h100-whole-rows.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_whole_rows_are_the_default_where_an_h100_took_less_for_them() -> None:
    took = []
    for row in measured():
        named = {name: row[name] for name in ("dtype", "heads", "head_dim", "rotary_dim", "inplace")}
        spec = RopeSpec("bshd", angles="cos_sin", **named)
        chosen = default_variant(spec, RopeSize(row["tokens"] // row["seq"], row["seq"]))
        times = {tuple(tile): us for *tile, us in row["tiles"]}
        pairs = min(us for (whole, *_), us in times.items() if not whole)
        tile = True, chosen.block_tokens, chosen.block_heads, chosen.num_warps
        if not chosen.whole_rows:  # calls left to pairs lose at most 5 percent by that
            assert min(us for (whole, *_), us in times.items() if whole) > 0.95 * pairs, row
        elif tile in times:  # no tile of eight heads and several tokens was measured
            took.append(times[tile] / pairs)
    assert len(took) == 6
    assert max(took) < 1, took
    assert statistics.geometric_mean(took) < 0.89


def gained(name: str, calls: str, least_us: float = 0.0, left: float | None = None) -> list[float]:
    """Time by whole rows over time by pairs, of measured calls whose default are whole rows.

    Calls that take less than ``least_us`` do not count; those left to pairs count as ``left``.
    """
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "tuning" / name
    ratios = []
    for call in json.loads(path.read_text())[calls]:
        found = re.match(r"b(\d+) s(\d+) h(\d+)(?:\+(\d+))? d(\d+) r(\d+)", call["problem"])
        assert found is not None
        batch, seq, heads, key_heads, head_dim, rotary_dim = (int(text or 0) for text in found.groups())
        spec = RopeSpec(
            *(call["layout"], call["dtype"], heads, head_dim, rotary_dim),
            inplace=call["inplace"], direction=call["direction"], key_heads=key_heads,
        )  # fmt: skip
        if call["pairs_us"] <= least_us:
            continue
        if default_variant(spec, RopeSize(batch, seq)).whole_rows:
            ratios.append(call["whole_rows_us"] / call["pairs_us"])
        elif left is not None:
            ratios.append(left)
    return ratios


def test_whole_rows_are_the_default_of_random_calls_that_an_h200_took_less_for() -> None:
    ratios = gained("nvidia_h200-whole-rows.json", "calls_third")
    assert len(ratios) >= 30
    assert statistics.geometric_mean(ratios) < 0.85
    assert max(ratios) < 1.06
    assert sorted(ratios)[-2] < 1.05


def test_whole_rows_are_the_default_where_many_rows_of_a_position_share_angles() -> None:
    ratios = gained("nvidia_h200-few-heads-of-narrow-rows.json", "few")
    assert len(ratios) >= 25
    assert statistics.geometric_mean(ratios) < 0.88
    assert max(ratios) < 1.13


def test_with_a_key_whole_rows_are_the_default_only_where_many_features_are_copied() -> None:
    ratios = gained("nvidia_h200-few-heads-of-narrow-rows.json", "some")
    assert len(ratios) >= 14
    assert statistics.geometric_mean(ratios) < 0.9
    assert max(ratios) < 1.19, "with a key and all features rotated it was up to 1.68"


def test_the_choice_between_whole_rows_and_pairs_gains_as_decision_89_says() -> None:
    few = "nvidia_h200-few-heads-of-narrow-rows.json"
    lists = (("nvidia_h200-whole-rows.json", "calls_third"), (few, "few"), (few, "some"))
    ratios = [ratio for name, calls in lists for ratio in gained(name, calls, least_us=4.0, left=1.0)]
    assert len(ratios) == 131
    assert statistics.geometric_mean(ratios) == pytest.approx(0.92, abs=0.005)
    assert max(ratios) == pytest.approx(1.19, abs=0.005)


def constants(spec: RopeSpec, size: RopeSize, **changes: Any) -> tuple[int, int]:
    call = dataclasses.replace(inputs(spec, size, "meta", 0), **changes)
    (launch,) = launches(spec, default_variant(spec, size), call)
    return launch.constants["MULTIPLE"], launch.constants["ANGLE_MULTIPLE"]


@pytest.mark.parametrize(
    ("dim", "style", "dtype", "wanted"),
    [
        (128, "half", "bfloat16", (1, 1)),  # Triton sees that 16 divides the strides
        (72, "half", "bfloat16", (4, 4)),  # halves of 36
        (72, "interleaved", "bfloat16", (8, 4)),
        (72, "interleaved", "float32", (4, 4)),  # 16 bytes
        (34, "interleaved", "bfloat16", (2, 1)),
        (34, "half", "bfloat16", (1, 1)),
    ],
)
def test_a_kernel_is_told_what_divides_strides(dim: int, style: str, dtype: str, wanted: tuple[int, int]) -> None:
    spec = RopeSpec("bshd", dtype, 3, dim, dim, style=style)
    assert constants(spec, RopeSize(2, 5)) == wanted


def test_what_a_kernel_is_told_is_true_of_every_stride_that_counts() -> None:
    spec, size = RopeSpec("bshd", "bfloat16", 3, 72, 72, style="interleaved"), RopeSize(2, 5)
    odd = (3 * 72, 5 * 3 * 72 + 1, 72, 1)
    assert constants(spec, size, x_strides=odd)[0] == 1
    assert constants(spec, size, out_strides=odd)[0] == 1
    assert constants(spec, RopeSize(1, 5), x_strides=odd)[0] == 8, (
        "nothing is multiplied by the stride of an axis of one"
    )
    assert constants(spec, size, angle_strides=(37, 1))[1] == 1
    assert constants(spec, RopeSize(1, 1), angle_strides=(37, 1), angle_rows=1)[1] == 4
    keyed = dataclasses.replace(spec, key_heads=2)
    key = inputs(keyed, size, "meta", 0).key_strides
    assert constants(keyed, size)[0] == 8
    assert constants(keyed, size, key_strides=(key[0] + 2, *key[1:]))[0] == math.gcd(key[0] + 2, 8)
