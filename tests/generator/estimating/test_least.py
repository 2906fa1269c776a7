"""The least possible time of a call on a card: faster claims are not believed, and no measured row is below it."""

from __future__ import annotations

import dataclasses

import pytest

from generator.estimating.least import ALLOWED, LEAST_LAUNCH_US, card_of, cards_like, least_possible_us, memory_us
from generator.estimating.targets import TARGETS
from generator.problem import Problem
from generator.storage.record import read_record

ROWS = read_record("nvidia_h200")
H200 = card_of("nvidia_h200", 90, 132)


def least(index: int, card: object = H200) -> float:
    row = ROWS[index]
    return least_possible_us(Problem(row.name, row.family, row.spec, row.size), row.variant, card)  # type: ignore[arg-type]


def test_every_row_of_the_h200_takes_longer_than_is_possible_and_some_not_much() -> None:
    over = [row.median_us / least(i) for i, row in enumerate(ROWS)]
    assert min(over) > 1.05
    assert sorted(over)[20] < 1.5, "the bound is near what large calls take"


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "fastest"),
    [
        (80, 108, "nvidia_a100_sxm4_80gb"),
        (90, 132, "nvidia_h200"),
        (90, 114, "nvidia_h200"),
        (89, 76, "nvidia_geforce_rtx_4090"),
        (120, 188, "nvidia_geforce_rtx_5090"),
        (75, 40, "nvidia_b200"),
    ],
)
def test_a_card_is_its_capability_and_multiprocessors(capability: int, multiprocessors: int, fastest: str) -> None:
    card = card_of("some_card", capability, multiprocessors)
    assert card.bandwidth_gb_s == TARGETS[fastest].bandwidth_gb_s
    assert (card.device, card.architecture, card.processors) == ("some_card", f"sm_{capability}", multiprocessors)


def test_cards_with_as_many_multiprocessors_come_before_others_of_their_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {t.device for t in cards_like(90, 132)} == {"nvidia_h200", "nvidia_h100_80gb_hbm3"}
    assert cards_like(86, 1) == [TARGETS["nvidia_geforce_rtx_3090"]]
    assert cards_like(75, 1) == list(TARGETS.values())
    slower = dataclasses.replace(TARGETS["nvidia_h200"], device="h100_pcie", processors=114, bandwidth_gb_s=2000.0)
    monkeypatch.setitem(TARGETS, slower.device, slower)
    assert cards_like(90, 114) == [slower]
    assert card_of("x", 90, 114).bandwidth_gb_s == 2000.0


def test_the_room_of_an_architecture_is_its_own_or_the_least_there_is() -> None:
    known, unknown = card_of("x", 89, 76), card_of("x", 103, 160)
    assert (known.threads, known.shared_bytes) == (1536, 102_400)
    assert (unknown.threads, unknown.registers, unknown.warp) == (1024, 65536, 32)
    assert unknown.shared_bytes == 228 * 1024


def test_bytes_launches_and_waits_each_take_time() -> None:
    assert memory_us(4_800_000, H200) == pytest.approx(1 / ALLOWED)
    small = next(i for i, w in enumerate(ROWS) if w.name == "llama3_8b_served_1x1")
    assert least(small) == LEAST_LAUNCH_US
    steps = next(i for i, w in enumerate(ROWS) if w.name == "gru_512x10x256")
    assert least(steps) > 50 * memory_us(ROWS[steps].bytes_moved, H200)
    slow = dataclasses.replace(H200, bandwidth_gb_s=1.0)
    assert least(small, slow) > LEAST_LAUNCH_US
