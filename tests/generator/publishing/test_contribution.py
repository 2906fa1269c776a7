"""Contributions: how one is made of a record, and what is refused in one that anybody may have written."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from generator import commands, gpu, places
from generator.evaluation.cards import Room
from generator.gpu import Facts
from generator.measuring.compile import Resources
from generator.publishing import archive, contribution
from generator.publishing.archive import MANIFEST, packed, signed, unpacked
from generator.publishing.contribution import KERNELS, WITH, Verdict, kernels_of, made, sample_of, verdict
from generator.selection import SelectionError
from generator.storage.record import WINNERS, read_record, save_winner
from tests.support.command_line import call
from tests.support.fakes import FakeCompiler
from tuned.families.registry import FAMILIES
from tuned.lookup.record import RecordError, load_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tuned.lookup.record import Winner

DEVICE = "nvidia_h200"
ROWS = read_record(DEVICE)
FIRST = list({w.family: w for w in reversed(ROWS)}.values())  # one row of each family
LONG, DEEP = "9" * 5000, "[" * 100_000 + "]" * 100_000
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 2**20, 2**21, 2**31, 2**63 - 1, 2**63, 10**4000, 0.5, 1e308, float("nan"), float("inf"), "", "x"),
    *("x" * 5000, "\ud800", "a\nimport os", "../../os", [], [1], [2**20] * 4, {}, [[[[]]]]),
)  # fmt: skip


def fine(problem: Any, variant: Any) -> Any:
    del problem, variant
    need = Resources(registers=32, spill_bytes=0, shared_bytes=0, machine_code="", programs=1)
    return (room(need),)


def room(need: Resources) -> Room:
    return Room(need, 4, waits=False)


def judged(data: bytes, report: Callable[..., Any] = fine, most: int = KERNELS) -> Verdict:
    found = verdict(data, FakeCompiler(report), most)
    assert all("\n" not in reason and len(reason) < 3000 for reason in found.reasons)
    return found


def forged(change: Callable[[dict[str, Any]], None] = lambda _: None, text: str | None = None) -> bytes:
    """A well-formed archive of a record that was changed before it was signed."""
    content = json.loads(unpacked(made(FIRST)[0])[f"{DEVICE}.json"])
    change(content)
    text = json.dumps(content) if text is None else text
    record = text.encode(errors="surrogatepass")
    try:
        rows = contribution.winners_of(text, "x")
        told = contribution._measured_with(rows)
    except (RecordError, IndexError, TypeError, ValueError):
        told = b"{}\n"
    name = content["device"] if isinstance(content.get("device"), str) else DEVICE
    return packed(signed({f"{name}.json": record, WITH: told}))


def of_row(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Change the first row: its fields, or fields of its parts, written as spec__hidden."""

    def change(content: dict[str, Any]) -> None:
        for name, value in values.items():
            *parts, last = name.split("__")
            inner = content["winners"][0]
            for part in parts:
                inner = inner[part]
            inner[last] = value

    return change


def of_every_environment(only: int = 0, **values: Any) -> Callable[[dict[str, Any]], None]:
    """Change the environment of all rows from number ``only`` on, and drop the rows before it."""

    def change(content: dict[str, Any]) -> None:
        del content["winners"][:only]
        for row in content["winners"][: bool(only)]:
            row["variant"]["pdl"] = False  # legal on any card
        for row in content["winners"]:
            row["environment"].update(values)
        content["device"] = values.get("device", content["device"])

    return change


# --- making ---------------------------------------------------------------------------------------------------------


def test_the_record_that_ships_is_accepted_whole() -> None:
    data, one = made(ROWS)
    found = judged(data)
    assert found.reasons == ()
    assert found.contribution == one
    assert list(one.winners) == sorted(ROWS, key=lambda w: (w.family, w.name))
    assert len(found.compiled) == KERNELS < found.kernels


def test_an_archive_has_the_record_and_what_it_was_measured_with() -> None:
    data, one = made(ROWS)
    files = unpacked(data)
    assert sorted(files) == [WITH, f"{DEVICE}.json"]
    assert files[f"{DEVICE}.json"] == (WINNERS / f"{DEVICE}.json").read_bytes()
    told = json.loads(files[WITH])
    assert sum(e["rows"] for e in told["environments"]) == len(ROWS)
    assert {"driver", "torch", "triton", "device_name", "capability", "multiprocessors"} <= set(told["environments"][0])
    assert told["kernels"] == {k: d for w in ROWS for k, d in w.digests.items()}
    assert one.name == f"{DEVICE}-{archive.digest_of(files)[:12]}"
    assert made(list(reversed(ROWS)))[0] == data, "the same rows, the same bytes"


def test_a_record_without_rows_is_no_contribution() -> None:
    with pytest.raises(RecordError, match="must have a row, and the record has none: run python"):
        made([])


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_row(median_us=0.01, spread_us=0), "it must take at least"),
        (of_row(default_us=0.01), "got default_us=0.01"),
        (of_row(floor_us=0.01), "got floor_us=0.01"),
        (of_row(eager_us=0), "got eager_us=0"),
        (of_row(floor_us=1e6), "a copy of"),
        (of_row(median_us=1e5, default_us=5e4), "a winner is not slower than the default variant"),
        (of_row(bytes_moved=10), "for these sizes, got 10"),
        (of_row(error=1.5), "the error must be at most 1 of the tolerance, got 1.5"),
        (of_row(spread_us=1e6), "the spread must be at most 0.5 of the time"),
        (of_row(trials=0), "got trials=0"),
        (of_row(environment__method="by hand"), "the timing method must be"),
        (of_row(environment__multiprocessors=131), "all rows must be of one card, and multiprocessors is 131 and 132"),
        (of_row(environment__capability=100), "all rows must be of one card, and capability is 100 and 90"),
        (of_row(environment__device_name="Other"), "'Other' is not nvidia_h200"),
        (of_row(name="x", size__seq=2**21), "sizes and widths are at most 1048576, got 2097152"),
        (of_row(name="x", size__seq=2**20, size__batch=2**10), "the sizes together are at most 16777216"),
        (of_row(environment__memory_bytes=1000), "the tensors must fit the memory of 1000 bytes"),
        (of_row(name="dreamer"), "dreamer must be the problem of this name"),
        (lambda c: c["winners"].append(c["winners"][0]), "each name must have one row, and 1 have more"),
        (lambda c: c["winners"].clear(), "a record must have 1 to 4096 rows to be accepted, got 0"),
        (lambda c: c["winners"][0]["digests"].update(dict.fromkeys(c["winners"][0]["digests"], "0")), "changed since"),
        (of_every_environment(only=4, capability=0), "must be 7.0 or later, got 0.0"),
        (of_every_environment(only=4, capability=61), "must be 7.0 or later, got 6.1"),
        (of_every_environment(multiprocessors=2000), "a card has at most 1024 multiprocessors"),
        (of_every_environment(capability=80), "more than the 166912 of shared memory that a program can have"),
        (of_every_environment(multiprocessors=16), "wait for each other, and 16 multiprocessors may hold"),
    ],
)
def test_what_would_not_be_accepted_is_said(change: Callable[[dict[str, Any]], None], said: str) -> None:
    found = judged(forged(change))
    assert any(said in reason for reason in found.reasons), found.reasons


def test_more_rows_than_anybody_measures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contribution, "MOST_ROWS", 3)
    assert judged(made(FIRST)[0]).reasons == ("a record must have 1 to 3 rows to be accepted, got 5",)


def test_rows_of_an_h200_under_another_name_are_too_fast_for_it() -> None:
    """Capability and multiprocessors identify a card, and an RTX 4090 does not reach the 4.8 TB/s of an H200."""
    rope = [w for w in ROWS if w.family == "rope" and w.bytes_moved > 1e8 and not getattr(w.variant, "pdl", False)]
    here = {"device": "nvidia_geforce_rtx_4090", "device_name": "NVIDIA GeForce RTX 4090", "capability": 89, "multiprocessors": 128}  # fmt: skip
    taken = [dataclasses.replace(w, environment=w.environment | here) for w in rope]
    assert len(taken) > 20
    found = judged(made(taken)[0])
    assert len(found.reasons) == len(taken)
    assert all("it must take at least" in reason for reason in found.reasons)


def test_a_kernel_that_spills_or_does_not_compile_is_refused() -> None:
    spills = room(Resources(64, 8, 0, "", 1))
    (reason,) = judged(made(FIRST[:1])[0], lambda *_: (spills,)).reasons
    assert reason.startswith(f"{FIRST[0].name}: its kernels must run on sm_90, and the variant spills 8 bytes a thread")
    assert "measure it again with python tune.py --gpu auto --problems" in reason
    (reason,) = judged(made(FIRST[:1])[0], lambda *_: "CompilationError: no").reasons
    assert "does not compile: CompilationError: no" in reason


def test_more_shared_memory_than_the_card_has_is_refused() -> None:
    (reason,) = judged(made(FIRST[:1])[0], lambda *_: (room(Resources(64, 0, 240_000, "", 1)),)).reasons
    assert "needs 240000 bytes of shared memory a program" in reason


@pytest.mark.parametrize(
    "text", ["", "{", LONG, DEEP, "null", f'{{"format": {LONG}}}', '{"format": "tuned-winners"}', "\ud800"]
)
def test_a_record_that_is_none_is_refused(text: str) -> None:
    (reason,) = judged(forged(text=text)).reasons
    assert f"{DEVICE}.json" in reason


@pytest.mark.parametrize("value", [LONG, DEEP, "1e99999", f"-{LONG}"])
def test_numbers_and_nesting_that_nobody_writes_are_refused(value: str) -> None:
    content = json.loads(unpacked(made(FIRST)[0])[f"{DEVICE}.json"])
    text = json.dumps(content).replace('"trials": ', f'"trials": {value}, "was": ', 1)
    assert len(judged(forged(text=text)).reasons) == 1


def test_an_archive_of_other_files_is_refused() -> None:
    files = unpacked(made(FIRST)[0])
    record = files.pop(f"{DEVICE}.json")
    assert "must have measured_with.json and one record" in judged(packed(signed(files))).reasons[0]
    assert "must be called so" in judged(packed(signed({**files, "other.json": record}))).reasons[0]
    assert "and one record" in judged(packed(signed({**files, "a.json": record, "b.json": record}))).reasons[0]
    lied = {**files, f"{DEVICE}.json": record, WITH: b"{}\n"}
    assert "must be what the record says" in judged(packed(signed(lied))).reasons[0]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places_in(value[key], (*path, key))


def test_any_value_in_any_place_is_a_verdict() -> None:
    content = json.loads(unpacked(made(FIRST)[0])[f"{DEVICE}.json"])
    draw, refused = random.Random(0), 0
    every = [path for path in places_in(content) if path != ("device",)]
    for path in every:

        def put(changed: dict[str, Any], path: tuple[Any, ...] = path) -> None:
            inner: Any = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = copy.deepcopy(draw.choice(HOSTILE))

        refused += bool(judged(forged(put)).reasons)
    assert refused > 0.8 * len(every)


# --- the sample -----------------------------------------------------------------------------------------------------


def test_a_sample_has_different_texts_first_and_no_row_twice() -> None:
    every = kernels_of(tuple(ROWS))
    sample = sample_of(every, 24)
    assert len(sample) == 24
    assert len({(w.family, w.name) for w in sample}) == 24
    families = {w.family for w in ROWS}
    assert {w.family for w in sample_of(every, 2 * len(families))[: len(families)]} == families

    def texts(rows: list[Winner]) -> set[Any]:
        return {FAMILIES[w.family].kernel_names(w.spec, w.variant) for w in rows}

    assert len(texts(sample[:12])) == 12
    assert sample_of(every, len(every)) == every
    assert sample_of(every, 0) == []


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the record of one card, on a machine without a GPU."""
    monkeypatch.setattr(commands, "CompilerPool", lambda **_: FakeCompiler(fine))
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0", "12.8"))
    monkeypatch.setattr(commands, "CONTRIBUTIONS", tmp_path / "contributions")
    for row in FIRST:
        save_winner(row, _made(tmp_path / "out"))
    return tmp_path / "out"


def _made(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def test_submit_writes_an_archive_and_a_text_and_check_submission_accepts_it(folder: Path, tmp_path: Path) -> None:
    done = call("submit", "--out", str(folder))
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "contributions").glob("*.zip")
    (text,) = (tmp_path / "contributions").glob("*.md")
    assert path.stem == text.stem == made(FIRST)[1].name
    assert path.read_bytes() == made(FIRST)[0]
    assert text.read_text() in done.output
    title, _, body = text.read_text().partition("\n\n")
    assert title == "Rows of NVIDIA H200: 5 winners"
    for fact in (
        "| driver | 580",
        "| torch | 2.11.0 |",
        "| Triton | 3.6.0 |",
        "5: 1 gru, 1 gru_backward, 1 gru_cell, 1 linear_cat, 1 rope",
    ):
        assert fact in body
    assert f"python tune.py check-submission contributions/{path.name}" in body
    done = call("check-submission", str(path), "--to", str(tmp_path / "tables"))
    assert done.exit_code == 0
    assert f"{path.name} is accepted: 5 rows of NVIDIA H200" in done.output
    assert "5 of its 5 kernels were compiled for it, all without an error" in done.output
    assert load_record(tmp_path / "tables" / f"{DEVICE}.json") == load_record(folder / f"{DEVICE}.json")


def test_rows_that_a_record_has_already_stay_in_it(folder: Path, tmp_path: Path) -> None:
    assert call("submit", "--out", str(folder)).exit_code == 0
    (path,) = (tmp_path / "contributions").glob("*.zip")
    others = [w for w in ROWS if w not in FIRST][:3]
    older = dataclasses.replace(FIRST[0], median_us=FIRST[0].median_us * 2)
    for row in (*others, older):
        save_winner(row, _made(tmp_path / "tables"))
    assert call("check-submission", str(path), "--to", str(tmp_path / "tables")).exit_code == 0
    found = {w.name: w for w in load_record(tmp_path / "tables" / f"{DEVICE}.json")}
    assert found == {w.name: w for w in (*others, *FIRST)}, "and a row of the same problem is the one that was sent"


def test_check_submission_writes_nothing_of_what_it_refuses(folder: Path, tmp_path: Path) -> None:
    del folder
    path = tmp_path / "x.zip"
    path.write_bytes(forged(of_row(error=2.0)))
    done = call("check-submission", str(path), "--to", str(tmp_path / "tables"))
    assert done.exit_code == 1
    assert "x.zip is not accepted:" in done.output
    assert "the error must be at most 1 of the tolerance, got 2" in done.output
    assert not (tmp_path / "tables").exists()
    for missing in (tmp_path, tmp_path / "none.zip"):
        done = call("check-submission", str(missing))
        assert done.exit_code == 1
        assert "an archive is a file that python tune.py submit wrote" in done.output


def test_submit_refuses_what_would_not_be_accepted_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    save_winner(dataclasses.replace(FIRST[0], error=2.0), folder)
    done = call("submit", "--out", str(folder))
    assert done.exit_code == 1
    assert f"the record of {DEVICE} is not accepted:" in done.output
    assert "the error must be at most 1" in done.output
    assert not (tmp_path / "contributions").exists()


def test_submit_leaves_nothing_half_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = commands.write_whole

    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".zip":
            raise OSError(28, "No space left on device", str(path))
        whole(path, data)

    monkeypatch.setattr(commands, "write_whole", full)
    done = call("submit", "--out", str(folder))
    assert done.exit_code == 1
    assert "No space left on device" in done.output
    assert list((tmp_path / "contributions").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "names", "exit_code"),
    [
        (("--gpu", "h200"), (), 0),
        (("--gpu", DEVICE), (), 0),
        (("--gpu", "auto"), ("NVIDIA H200",), 0),
        (("--gpu", "0"), ("NVIDIA H200",), 0),
        (("--gpu", "auto"), ("NVIDIA A100-SXM4-80GB",), 2),
        (("--gpu", "a100"), (), 2),
        (("--gpu", "1"), ("NVIDIA H200",), 2),
    ],
)
def test_which_record_is_submitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], names: tuple[str, ...], exit_code: int
) -> None:
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0", "12.8", names=names))
    done = call("submit", "--out", str(folder), *arguments)
    assert done.exit_code == exit_code, done.output
    before = call("--out", str(folder), *arguments, "submit")
    assert before.exit_code == exit_code


def test_without_a_gpu_the_record_that_ships_is_not_taken_for_ones_own(folder: Path, tmp_path: Path) -> None:
    del folder
    done = call("submit")
    assert done.exit_code == 2
    assert "--gpu auto must mean one record" in done.output
    assert "run python tune.py --gpu auto first" in " ".join(done.output.split())
    empty = tmp_path / "empty"
    said = " ".join(call("submit", "--out", str(empty)).output.split())
    assert f"run python tune.py --gpu auto --out {empty} first" in said


def test_an_installed_program_names_both_folders_that_it_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that the records that ship lie in the user's own folder, which need not exist."""
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0", "12.8"))
    monkeypatch.setattr(commands, "OWN", tmp_path / "own")
    with pytest.raises(SelectionError, match=f"in {tmp_path / 'own'} and {commands.WINNERS}, which has"):
        commands.submitted_device("auto", None)


def test_a_family_of_ones_own_is_not_submitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "OUTSIDE", "softmax.py")
    done = call("submit", "--out", str(folder))
    assert done.exit_code == 2
    assert "a contribution is of the families that ship" in done.output


def test_contributions_lie_in_the_checkout() -> None:
    assert places.INSTALLED or places.CONTRIBUTIONS == places.ROOT / "contributions"
    assert MANIFEST == "manifest.json"
