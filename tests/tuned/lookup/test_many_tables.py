"""TUNED_TABLES with records of several devices, as contributed: each serves its own device, and those most like it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

import tuned.lookup.table
from generator.selection import problem_named
from generator.storage.record import record_text, write_record
from tests.support.records import winner
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.registry import FAMILIES
from tuned.families.rope.variant import RopeVariant
from tuned.lookup.lookup import Choice, Gpu, choose, has_rows, near_rows, variant_at
from tuned.lookup.record import RecordError, device_slug, winners_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CARDS = {  # name -> capability, multiprocessors, and the number of warps in its winner, which identifies it
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


# A few rows, as a stopped tuner leaves them ---------------------------------------------------------------------------

ODD = "gru_grid_backward_bf16_24x813"  # rows of no multiple of 16 bytes: only rows like it say what is faster


@pytest.fixture(params=[(90, 132), (90, 114), (80, 108)], ids=["equal", "fewer", "older"])
def begun(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A card with one row for a rotation and one for a gradient; the first has the multiprocessors of an H200."""
    capability, multiprocessors = request.param
    name = "NVIDIA New Card"
    facts = {"device": device_slug(name), "device_name": name, "capability": capability}
    environment = winner().environment | facts | {"multiprocessors": multiprocessors}
    rows = [winner(of, environment=environment) for of in ("llama3_8b_2x4096", "gru_backward_32x512")]
    rows = [dataclasses.replace(r, variant=FAMILIES[r.family].fit(r.variant, r.spec, capability)) for r in rows]
    write_record(tmp_path / f"{device_slug(name)}.json", device_slug(name), rows)
    monkeypatch.setenv("TUNED_TABLES", str(tmp_path))
    tuned.lookup.table.tables.cache_clear()
    yield Gpu(device_slug(name), capability, multiprocessors, name)
    tuned.lookup.table.tables.cache_clear()


def served(name: str, gpu: Gpu) -> Choice:
    problem = problem_named(name)
    return choose(FAMILIES[problem.family], problem.spec, problem.size, gpu)


def test_the_first_rows_of_a_gpu_take_nothing_from_others_of_which_they_say_nothing(begun: Gpu) -> None:
    before = dataclasses.replace(begun, device="another_card", name="Another card")  # it has no row
    assert served(ODD, before).variant is not None
    choice = served(ODD, begun)
    assert (choice.rule, choice.variant) == ("similar GPU", served(ODD, before).variant), choice.why


def test_own_rows_come_first_and_those_of_an_equal_gpu_where_they_are_nearer(begun: Gpu) -> None:
    assert served("llama3_8b_2x4096", begun).rule == "winner"
    decode, far = served("llama3_8b_decode_64x1", begun), problem_named("llama3_8b_decode_64x1")
    near = problem_named("llama3_8b_2x4096")
    between = dataclasses.replace(near.size, seq=near.size.seq - 1)
    assert choose(FAMILIES["rope"], near.spec, between, begun).rule == "nearest size", "its own row is as near"
    if begun.multiprocessors == 132:
        assert decode.rule == "similar GPU"
        assert decode.row is not None
        assert (decode.row.spec, decode.row.size) == (far.spec, far.size)
        assert decode.why.startswith("no row of nvidia_new_card is as near as one of a GPU that is like it: ")


def test_lengths_find_the_rows_that_a_choice_finds(begun: Gpu) -> None:
    """Some are nearest to the card's own row, some to a row of an equal card, and one is out of reach of both."""
    problem = problem_named("llama3_8b_2x4096")
    family = FAMILIES["rope"]
    rows = near_rows(family, problem.spec, begun)
    assert rows is not None
    rules = set()
    for seq in (128, 200, 900, 4095, 4096, 9000):
        size = dataclasses.replace(problem.size, seq=seq)
        choice = choose(family, problem.spec, size, begun)
        assert variant_at(rows, family, problem.spec, size, begun) == choice.variant
        rules.add(choice.rule)
    if begun.multiprocessors == 132:
        assert rules > {"winner", "nearest size", "similar GPU"}


def test_a_row_is_read_by_the_rules_of_the_card_that_it_was_measured_on() -> None:
    """An A100 may have a GRU that polls for 16-bit states; where spinning is possible such variants are left out."""
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
