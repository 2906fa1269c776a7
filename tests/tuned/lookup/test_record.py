"""Records: what is written is read, and what is not a record is refused with a sentence."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import generator.storage.record
from generator.publishing.files import literal, table_source
from generator.storage.record import read_record, save_winner, write_record
from generator.workload import default_problems
from tests.support.fakes import ENVIRONMENT
from tests.support.locks import held
from tests.support.records import winner
from tuned.lookup.record import SCHEMA, RecordError, build, load_record, winner_from_json

if TYPE_CHECKING:
    from pathlib import Path


NAMES = ("llama3_8b_2x4096", "llama3_8b_decode_64x1", "study_thd_16x512", "gru_cell_512_64")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    winners = [winner(name) for name in NAMES]
    for one in winners:
        save_winner(one, tmp_path)
    assert sorted(read_record("test_gpu", tmp_path), key=lambda w: w.name) == sorted(winners, key=lambda w: w.name)


def test_the_same_winners_are_the_same_bytes(tmp_path: Path) -> None:
    winners = [winner(name) for name in NAMES]
    write_record(tmp_path / "a.json", "test_gpu", winners)
    write_record(tmp_path / "b.json", "test_gpu", winners[::-1])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_new_winner_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    save_winner(winner(), tmp_path)
    save_winner(winner("study_16x512"), tmp_path)
    path = save_winner(winner(median_us=30.0), tmp_path)
    assert {w.name: w.median_us for w in load_record(path)} == {"llama3_8b_2x4096": 30.0, "study_16x512": 34.5}


def test_a_table_is_literals_that_give_the_winners_back() -> None:
    winners = [winner(name) for name in NAMES]
    winners[1] = winner(NAMES[1], environment={**ENVIRONMENT, "triton": "3.7.0"})
    names: dict[str, Any] = {}
    exec(table_source("test_gpu", winners), names)
    assert names["DEVICE"]["capability"] == 90
    for made, row in zip(winners, names["ROWS"], strict=True):
        family, spec, size, variant, digests, median_us, eager_us, index = row
        assert (family, digests, median_us, eager_us) == (made.family, made.digests, made.median_us, made.eager_us)
        assert {"device": "test_gpu", **names["MEASURED"][index]}.items() <= made.environment.items()
        assert (type(made.spec)(**spec), type(made.size)(**size), type(made.variant)(**variant)) == (
            made.spec,
            made.size,
            made.variant,
        )


@pytest.mark.parametrize(
    "value", ['quo"te\n', "", 1, -2.5, True, None, (), (1,), (1, (2, "x")), {"a": {"b": (False,)}}]
)
def test_a_literal_evaluates_to_its_value(value: Any) -> None:
    assert eval(literal(value)) == value


def test_what_has_no_literal_is_refused() -> None:
    with pytest.raises(TypeError, match="no literal"):
        literal(object())


def test_a_write_that_fails_leaves_the_record_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_winner(winner(), tmp_path)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        save_winner(winner("study_16x512"), tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file stays"


def test_two_tuners_lose_nothing_of_each_other(tmp_path: Path) -> None:
    names = [p.name for p in default_problems()[:7]]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(lambda name: save_winner(winner(name), tmp_path), names))
    assert {w.name for w in read_record("test_gpu", tmp_path)} == set(names)


def test_a_record_is_read_and_written_under_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock, threads that happen to take turns would lose nothing either."""
    locked = []
    for name in ("read_record", "write_record"):
        function = getattr(generator.storage.record, name)
        monkeypatch.setattr(
            generator.storage.record, name, lambda *given, of=function: (locked.append(held(tmp_path)), of(*given))[1]
        )
    save_winner(winner(), tmp_path)
    assert locked == [True, True]
    assert not held(tmp_path)


def content(tmp_path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(save_winner(winner(), tmp_path).read_text())
    return loaded


def changed(row: dict[str, Any], path: str, value: Any) -> None:
    *parts, last = path.split(".")
    for part in parts:
        row = row[part]
    row[last] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "family",
            "attention",
            r"family must be one of \['gru', 'gru_backward', 'gru_cell', 'linear_cat', 'rope'\], got 'attention'",
        ),
        ("family", ["rope"], "family must be one of"),
        ("spec.layout", "hbsd", "layout must be one of"),
        ("spec.rotary_dim", 63, "rotary_dim must be even"),
        ("spec.heads", "32", "heads must be int, got '32'"),
        ("spec.heads", True, "heads must be int, got True"),
        ("spec.extra", 1, "spec must have the fields"),
        ("size", None, "size must have the fields .* got NoneType"),
        ("variant.num_warps", 3, "variant is not in the space: num_warps must be one of"),
        ("variant.num_warps", 4.0, "num_warps must be int"),
        ("variant.order", "__import__('os')", "order must be one of"),
        ("variant.num_warps", 8, "variant is not in the space: a tile of"),
        ("digests", {"os": "0"}, "digests must name the kernels"),
        ("median_us", "fast", "median_us must be a number of at least 0, got 'fast'"),
        ("median_us", -1, "median_us must be a number"),
        ("median_us", float("nan"), "median_us must be a number"),
        ("median_us", True, "median_us must be a number"),
        ("bytes_moved", 1.5, "bytes_moved must be an integer"),
        ("environment", [], "environment must be an object with the fields"),
        ("environment", {}, "environment.device must be str, got None"),
        ("environment.multiprocessors", "132", "environment.multiprocessors must be int, got '132'"),
        ("environment.driver", None, "environment.driver must be str, got None"),
        ("environment.device", "another_gpu", "is the record of 'test_gpu' but has rows of"),
        ("name", 7, "name must be a string"),
        ("surprise", 1, "must have the fields"),
    ],
)
def test_a_malformed_row_is_refused_with_where_and_why(tmp_path: Path, path: str, value: Any, said: str) -> None:
    record = content(tmp_path)
    changed(record["winners"][0], path, value)
    (tmp_path / "test_gpu.json").write_text(json.dumps(record))
    with pytest.raises(RecordError, match=said) as caught:
        load_record(tmp_path / "test_gpu.json")
    assert "test_gpu.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not whole JSON"),
        ('{"format": "tuned-winners", "schema": 1, "winners": [', "is not whole JSON .* tune again"),
        ("[]", "is not a record of winners"),
        ('{"winners": []}', 'is not a record of winners: "format" must be "tuned-winners"'),
        (f'{{"format": "tuned-winners", "schema": {SCHEMA + 1}, "winners": []}}', f"has schema {SCHEMA + 1}.* update"),
        ('{"format": "tuned-winners", "schema": 1, "winners": {}}', '"winners" must be a list'),
        (
            '{"format": "tuned-winners", "schema": 1, "device": "x", "winners": [3]}',
            r"winners\[0\] must have the fields",
        ),
        ('{"format": "tuned-estimates", "estimated": true, "rows": []}', "is not a record of winners"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "test_gpu.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=said):
        load_record(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "test_gpu.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="cannot be read"):
        load_record(path)
    with pytest.raises(RecordError, match="cannot be read"):
        load_record(tmp_path / "none.json")


def test_a_truncated_record_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = save_winner(winner(), tmp_path)
    whole = path.read_text()
    for end in range(0, len(whole) - 2, 97):
        path.write_text(whole[:end])
        with pytest.raises(RecordError):
            load_record(path)


def test_a_spec_may_be_older_than_a_field_and_a_variant_may_not() -> None:
    whole = dataclasses.asdict(winner("llama3_8b_2x4096"))
    del whole["spec"]["key_heads"]
    assert winner_from_json(whole, "it").spec.key_heads == 0
    del whole["variant"]["num_warps"]
    with pytest.raises(RecordError, match=r"it\.variant must have the fields"):
        winner_from_json(whole, "it")


def test_what_a_record_keeps_as_lists_are_tuples_again() -> None:
    """JSON has no tuples: lists become tuples again, in the spec of somebody's family too."""

    @dataclasses.dataclass(frozen=True)
    class Spec:
        shape: tuple[int, ...]
        name: str = "x"

    spec = Spec((2, 3))
    read = build(Spec, json.loads(json.dumps(dataclasses.asdict(spec))), "spec")
    assert read == spec
    assert hash(read) == hash(spec)


def written(kind: str) -> dict[str, Any]:
    """A dataclass whose annotations are types or, with the future import, text."""
    names: dict[str, Any] = {}
    lines = (
        kind,
        "import dataclasses, typing",
        "@dataclasses.dataclass(frozen=True)",
        "class Spec:",
        "    heads: int",
        "    eps: float",
    )
    more = (
        "    name: str",
        "    sizes: tuple[int, ...]",
        "    least: int | None",
        "    side: typing.Literal['left', 'right']",
    )
    exec(compile("\n".join((*lines, *more)), "spec", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
def test_types_are_looked_at_however_they_are_written(future: str) -> None:
    spec = written(future)["Spec"]
    right = {"heads": 4, "eps": 1, "name": "x", "sizes": [2, 3], "least": None, "side": "left"}
    assert build(spec, right, "spec").sizes == (2, 3)
    assert build(spec, right | {"least": 7}, "spec").least == 7
    wrong = {
        "heads": ("4", 4.0, None, True),
        "eps": ("1", float("inf"), float("nan"), None),
        "name": (4, None, torch.float16),
        "sizes": ([2, "3"], 2, "23"),
        "least": (1.5, "1"),
        "side": ([1], torch.float16, float("inf")),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(RecordError, match=rf"spec\.{name} must be .*: a record keeps str, bool, int"):
                build(spec, right | {name: value}, "spec")
