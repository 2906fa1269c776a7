"""TUNED_TABLES with the records of several devices, as contributions are put there: each serves its own, and those most like it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

import tuned.lookup.table
from generator.storage.record import record_text, write_record
from tests.support.records import winner
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.registry import FAMILIES
from tuned.families.rope.variant import RopeVariant
from tuned.lookup.lookup import Gpu, choose, has_rows
from tuned.lookup.record import RecordError, device_slug, winners_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CARDS = {  # name -> capability, multiprocessors, and the number of warps of its winner, which tells it from the others
    "NVIDIA A100-SXM4-80GB": (80, 108, 1),
    "NVIDIA GeForce RTX 4090": (89, 128, 2),
    "NVIDIA B200": (100, 148, 4),
}


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, (capability, multiprocessors, warps) in CARDS.items():
        here = {"device": device_slug(name), "device_name": name, "capability": capability}
        environment = winner().environment | here | {"multiprocessors": multiprocessors}
        row = winner(variant=dataclasses.replace(RopeVariant(), num_warps=warps), environment=environment)
        write_record(tmp_path / f"{device_slug(name)}.json", device_slug(name), [row])
    monkeypatch.setenv("TUNED_TABLES", str(tmp_path))
    tuned.lookup.table.tables.cache_clear()
    yield
    tuned.lookup.table.tables.cache_clear()


def warps(gpu: Gpu) -> tuple[str, int]:
    row = winner()
    choice = choose(FAMILIES[row.family], row.spec, row.size, gpu)
    return choice.rule, choice.variant.num_warps


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("name", CARDS)
def test_each_device_is_served_by_its_own_record(name: str) -> None:
    capability, multiprocessors, own = CARDS[name]
    gpu = Gpu(device_slug(name), capability, multiprocessors, name)
    assert has_rows(gpu)
    assert warps(gpu) == ("winner", own)
    assert set(tuned.lookup.table.tables()) >= {*map(device_slug, CARDS), "nvidia_h200"}


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(
    ("capability", "multiprocessors", "like"),
    [
        (80, 56, "NVIDIA A100-SXM4-80GB"),  # an A30
        (89, 76, "NVIDIA GeForce RTX 4090"),  # an RTX 4080
        (103, 160, "NVIDIA B200"),  # a B300
    ],
)
def test_another_card_is_served_by_the_record_of_the_one_most_like_it(
    capability: int, multiprocessors: int, like: str
) -> None:
    gpu = Gpu("some_other_card", capability, multiprocessors, "Some other card")
    assert warps(gpu) == ("similar GPU", CARDS[like][2])


def test_a_row_is_read_by_the_rules_of_the_card_that_it_was_measured_on() -> None:
    """A GRU that polls for 16-bit states is what an A100 has, and left out where spinning is possible."""
    spec, size = GruSpec("bfloat16", 512), GruSize(16, 64)
    variant = GruVariant("persistent", block_hidden=8, exchange="poll")
    gru = FAMILIES["gru"]
    assert gru.rejection(spec, size, variant, 80, 108) is None
    assert gru.rejection(spec, size, variant, 90, 132) is not None
    for capability in (80, 86, 89, 90):
        environment = winner().environment | {"capability": capability}
        digests = dict.fromkeys(gru.kernel_names(spec, variant), "0" * 12)
        row = winner("dreamer", spec=spec, size=size, variant=variant, digests=digests, environment=environment)
        text = record_text("test_gpu", [row])
        if capability < 90:
            assert winners_of(text, "x") == [row]
        else:
            with pytest.raises(RecordError, match="not in the space: exchange='poll'"):
                winners_of(text, "x")
