"""Records that nobody would write: each gives winners or a RecordError; in a model, at most one warning."""

from __future__ import annotations

import ast
import copy
import json
import math
import random
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tuned.kernels
import tuned.lookup.portfolio
import tuned.lookup.table
from generator.publishing.files import table_source
from generator.selection import MissesError, read_misses
from generator.storage.record import WINNERS
from tuned.families.registry import FAMILIES
from tuned.lookup.lookup import Gpu, choose
from tuned.lookup.record import TEXT_CHARACTERS, RecordError, load_record
from tuned.lookup.table import tables, tables_or_error

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMITTED = WINNERS / "nvidia_h200.json"
DEVICE = "nvidia_h200"
GPU = Gpu(DEVICE, 90, 132, "NVIDIA H200")
SEEDS = range(8)
A_SEED = 40  # mutations
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, -(2**63), 10**4000, 0.0, -0.0, 0.5, 1e308, 1e-308),
    *(math.nan, math.inf, -math.inf, "", "x", "x" * 5000, "\ud800", "\0", "é", "gru", "rope", "../../os"),
    *('"""\nimport os\n', "a\nimport os", [], [1], [1.5], [True], [0], [2**70], ["x"], {}, {"a": 1}, [[[[]]]], [{}]),
)
LONG, DEEP = "9" * 5000, "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TUNED_TABLES", raising=False)
    tables.cache_clear()
    tuned.lookup.portfolio._known.cache_clear()
    yield
    tables.cache_clear()
    tuned.lookup.portfolio._known.cache_clear()


def small() -> dict[str, Any]:
    """The committed record with one row of each family."""
    content: dict[str, Any] = json.loads(COMMITTED.read_text())
    first = {w["family"]: w for w in reversed(content["winners"])}
    assert set(first) == set(FAMILIES)
    return {**content, "winners": list(first.values())}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def holder(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        content = content[key]
    return content


def mutated(draw: random.Random, content: dict[str, Any]) -> str:
    """The text of a record with something wrong in it; it may still be a valid record."""
    content = copy.deepcopy(content)
    path = draw.choice(list(places(content)))
    parent, key = holder(content, path), path[-1]
    kind = draw.randrange(9)
    if kind <= 2:
        parent[key] = draw.choice(HOSTILE)
    elif kind == 3:
        del parent[key]
    elif kind == 4:
        other = draw.choice(list(places(content)))
        parent[key] = copy.deepcopy(holder(content, other)[other[-1]])
    elif kind == 5 and isinstance(parent, dict):
        parent[draw.choice(["surprise", "", "device", "family", "x\ny"])] = parent.pop(key)
    elif kind == 5:
        parent.append(parent[key])
    text = json.dumps(content)
    if kind == 6:
        text = text[: draw.randrange(len(text))]
    elif kind == 7:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(['"', "}", "]", ",", "\\", "9", "-", "é", "\n", "null", LONG]) + text[at + 1 :]
    elif kind == 8:
        parent[key] = "HERE"
        text = json.dumps(content).replace(
            '"HERE"', draw.choice([LONG, f"-{LONG}", "1e99999", DEEP, "Infinity", "NaN"])
        )
    return text


def refusal(path: Path) -> RecordError | None:
    """Why a record is refused, or None if it is read; then its winners can be used and written as a table."""
    try:
        winners = load_record(path)
    except RecordError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert path.name in str(refused)
        assert len(str(refused)) <= TEXT_CHARACTERS + 4
        return refused
    devices = {w.environment["device"] for w in winners}
    assert_literals(table_source(*(devices or {DEVICE}), winners))
    return None


def assert_literals(source: str) -> None:
    """The module contains only literals, so importing it runs nothing."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Expr):
            assert isinstance(statement.value, ast.Constant)
        else:
            assert isinstance(statement, ast.Assign)
            ast.literal_eval(statement.value)


def used_in_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings while a model uses the records of a folder."""
    monkeypatch.setenv("TUNED_TABLES", str(folder))
    tables.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for table in tables().values():
            for name, rows in table.rows.items():
                for row in rows[:3]:
                    choose(FAMILIES[name], row.spec, row.size, GPU)
        choose(FAMILIES["rope"], *SOME_ROPE, GPU)
    assert all(issubclass(w.category, RuntimeWarning) for w in told)
    return [str(w.message) for w in told]


def some_rope() -> tuple[Any, Any]:
    row = next(w for w in load_record(COMMITTED) if w.family == "rope")
    return row.spec, row.size


SOME_ROPE = some_rope()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_change_to_a_record_gives_winners_or_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw, content, path = random.Random(seed), small(), tmp_path / f"{DEVICE}.json"
    refused = 0
    for index in range(A_SEED):
        path.write_text(mutated(draw, content), encoding="utf-8", errors="surrogatepass")
        error = refusal(path)
        refused += error is not None
        if index % 10 == 0:
            told = used_in_a_model(tmp_path, monkeypatch)
            assert told == ([] if error is None else [f"{error}; it is not used"])
    assert refused > A_SEED / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_any_value_in_any_place_of_a_row(tmp_path: Path, seed: int) -> None:
    """Every field of a row takes each value, one after the other, so that nothing depends on luck."""
    content, path = small(), tmp_path / f"{DEVICE}.json"
    every = list(places(content))
    values = HOSTILE[seed :: len(SEEDS)]
    for number, where in enumerate(every):
        changed = copy.deepcopy(content)
        holder(changed, where)[where[-1]] = values[number % len(values)]
        path.write_text(json.dumps(changed), encoding="utf-8")
        refusal(path)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("environment.multiprocessors", -132, "multiprocessors must be from 1 to"),
        ("environment.multiprocessors", 0, "multiprocessors must be from 1 to"),
        ("environment.capability", 10**9, "capability must be from 0 to 999"),
        ("environment.l2_bytes", [1], "l2_bytes must be a line of text or a number"),
        ("environment.driver", "1\nimport os", "driver must be a line of text"),
        ("size.batch", 0, "batch must be int from 1 to"),
        ("size.batch", 2**63, "batch must be int from 1 to"),
        ("spec.dtype", {}, "dtype must be str"),
        ("median_us", 0, "median_us must be a number above 0"),
        ("median_us", 10**400, "median_us must be a number of at least 0"),
        ("median_us", math.inf, "median_us must be a number of at least 0, got inf"),
        ("trials", -1, "trials must be an integer of at least 0"),
        ("name", "llama\nimport os", "name must be a string of one printable line"),
        ("name", "", "name must be a string of one printable line"),
    ],
)
def test_absurd_values_are_refused_with_where_and_why(tmp_path: Path, where: str, value: Any, said: str) -> None:
    content = small()
    for row in content["winners"]:
        *parts, last = where.split(".")
        inner = row
        for part in parts:
            inner = inner[part]
        inner[last] = value
    path = tmp_path / f"{DEVICE}.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=said):
        load_record(path)


@pytest.mark.parametrize("inputs", [[1.5], "ab", {"1": 2}, [True], [2**64], [0], [[]], None, [math.nan]])
def test_the_widths_of_inputs_are_whole_numbers(tmp_path: Path, inputs: Any) -> None:
    content = small()
    for row in content["winners"]:
        if "inputs" in row["spec"]:
            row["spec"]["inputs"] = inputs
    path = tmp_path / f"{DEVICE}.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=r"inputs|widths"):
        load_record(path)


@pytest.mark.parametrize("text", [LONG, DEEP, "1e99999", "-Infinity"])
def test_what_json_cannot_hold_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    whole = json.dumps(small()).replace('"trials": ', f'"trials": {text}, "was": ', 1)
    path = tmp_path / f"{DEVICE}.json"
    path.write_text(whole)
    with pytest.raises(RecordError):
        load_record(path)
    (told,) = used_in_a_model(tmp_path, monkeypatch)
    assert told.startswith(f"{DEVICE}.json")
    assert DEVICE in tables(), "the shipped table serves on"
    problem = {"family": "rope", "spec": {}, "size": {}}
    (tmp_path / "misses.jsonl").write_text(json.dumps(problem).replace("{}", text, 1) + "\n")
    with pytest.raises(MissesError, match=r"misses.jsonl line 1"):
        read_misses(tmp_path / "misses.jsonl")


@pytest.mark.parametrize("device", ['x"""\nimport os\n"""', "../x", "", "NVIDIA H200", None, 7, ["x"]])
def test_a_device_is_a_file_name_and_nothing_else(tmp_path: Path, device: Any) -> None:
    content = small()
    content["device"] = device
    for row in content["winners"]:
        row["environment"]["device"] = device
    path = tmp_path / f"{DEVICE}.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match="device"):
        load_record(path)


# --- folders and tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "file", "null"])
def test_a_folder_that_is_none_is_said_once_and_the_shipped_tables_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = tmp_path / "records"
    if kind == "file":
        place.write_text("")
    if kind == "null":  # no environment variable can hold this, but a caller may pass it
        with pytest.raises(RecordError, match="must be a readable folder"):
            tuned.lookup.table.folder_of_records("a\0b")
        return
    (told,) = used_in_a_model(place, monkeypatch)
    assert told.startswith("TUNED_TABLES: a folder of records must be a readable folder, got ")
    assert repr(str(place)) in told
    assert "name the folder that python tune.py --out wrote" in told
    assert DEVICE in tables()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tables()
    with pytest.raises(RecordError, match="TUNED_TABLES: a folder of records"):
        tables_or_error()


def test_a_record_that_is_a_folder_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{DEVICE}.json").mkdir()
    (tmp_path / f".{DEVICE}.json.half").write_text("{")
    (told,) = used_in_a_model(tmp_path, monkeypatch)
    assert told.startswith(f"{DEVICE}.json cannot be read")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torn", 'DEVICE = {"device_name": "x"'),
        ("merge", "<<<<<<< ours\n"),
        ("empty", ""),
        ("family", 'DEVICE, MEASURED = {}, ({},)\nROWS = (("attention", {}, {}, {}, {}, 1.0, 0),)\n'),
        ("knob", 'DEVICE, MEASURED = {}, ({},)\nROWS = (("rope", {}, {}, {"no_knob": 1}, {}, 1.0, 0),)\n'),
        ("short", 'DEVICE, MEASURED = {}, ()\nROWS = (("rope", {}, {}, {}, {}, 1.0),)\n'),
        ("raises", "raise SystemError\n"),
    ],
)
def test_a_table_of_the_package_that_cannot_be_used_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / f"broken_{name}.py").write_text(text)
    monkeypatch.setattr(tuned.tables, "__path__", [*tuned.tables.__path__, str(tmp_path)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert set(tables()) >= {DEVICE}
    assert f"broken_{name}" not in tables()
    (message,) = [str(w.message) for w in told]
    assert message.startswith(f"tuned/tables/broken_{name}.py cannot be used")
    assert "tune.py --render" in message
    with pytest.raises(RecordError, match=f"broken_{name}"):
        tables_or_error()


def test_a_portfolio_that_cannot_be_used_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_portfolio.py").write_text("VARIANTS = (")
    monkeypatch.setattr(tuned.tables, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tuned.tables._portfolio", raising=False)
    with pytest.warns(RuntimeWarning, match=r"_portfolio.py cannot be used \(SyntaxError"):
        assert tuned.lookup.portfolio.rows_for("rope", 90) == ()
    assert tuned.lookup.portfolio.variants_for("rope", 90) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(FAMILIES["rope"], *SOME_ROPE, GPU).rule == "default"
    sys.modules.pop("tuned.tables._portfolio", None)


def test_every_table_that_ships_is_literals() -> None:
    for path in Path(tuned.tables.__path__[0]).glob("*.py"):
        assert_literals(path.read_text())
