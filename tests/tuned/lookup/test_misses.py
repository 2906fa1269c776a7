"""Calls without a row: warned of once, written down once, read again and tuned; repeated calls do none of this."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import tuned
import tuned.calls.gru_cell.run
import tuned.calls.recurrent.serve
import tuned.calls.rope.call
import tuned.calls.rope.plan
import tuned.launching.plan
import tuned.lookup.lookup
from generator import command_line
from generator.rendering.structures import structures
from generator.selection import MissesError, SelectionError, name_of, read_misses, select
from generator.storage.record import save_winner
from generator.workload import default_problems
from tests.support.records import winner
from tests.support.rope_calls import specialised
from tuned.dispatch import gru_cell, rope
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.registry import FAMILIES
from tuned.families.rope.spec import ANGLE_ENTRIES, ANGLES, DTYPES, ITEM_SIZE, LAYOUTS, STYLES, RopeSize, RopeSpec
from tuned.families.rope.variant import default_variant
from tuned.lookup import misses, place, table
from tuned.lookup.lookup import Choice, Gpu, choose
from tuned.lookup.table import Row, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

ROPE = FAMILIES["rope"]
UNKNOWN = Gpu("a_card", 89, 142, "A Card")
SPEC, SIZE = RopeSpec("bshd", "float32", 3, 16, 16), RopeSize(2, 5)


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNED_RECORD", raising=False)
    monkeypatch.setattr(misses, "_TOLD", set())
    monkeypatch.setattr(misses, "_RECORDED", set())


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Table]:
    made: dict[str, Table] = {}
    monkeypatch.setattr(tuned.lookup.lookup, "tables", lambda: made)
    monkeypatch.setattr(tuned.lookup.lookup, "rows_for", lambda *_: ())  # no portfolio
    return made


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tables: dict[str, Table]) -> Iterator[dict[str, Table]]:
    """CPU tensors take the path of GPU tensors, through the interpreter, with public launches only."""
    if torch.cuda.is_available():
        pytest.skip("this stands in for a GPU where there is none")
    for module in (tuned.calls.rope.plan, tuned.calls.gru_cell.run, tuned.calls.recurrent.serve):
        monkeypatch.setattr(module, "why_eager", lambda *_, **__: None)
    for module in (tuned.calls.rope.plan, tuned.calls.gru_cell.run):
        monkeypatch.setattr(module, "gpu_of", lambda _: UNKNOWN)
    monkeypatch.setattr(tuned.launching.plan, "_capturing", lambda: False)
    monkeypatch.setattr(tuned.launching.plan, "direct_launch", lambda *_: None)
    monkeypatch.setattr(tuned.calls.gru_cell.run, "_PLANS", {})
    monkeypatch.setattr(tuned.calls.rope.plan, "direct_launch", lambda *_: None)
    monkeypatch.setattr(tuned.calls.rope.plan, "capturing", lambda: False)
    monkeypatch.setattr(tuned.launching.plan, "_specialised", specialised)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    tuned.calls.rope.call._PLANS.clear()
    for variant_of in tuned.calls.gru_cell.run.MOMENTS.variants:
        variant_of.cache_clear()
    with np.errstate(all="ignore"):
        yield tables
    tuned.calls.rope.call._PLANS.clear()
    for variant_of in tuned.calls.gru_cell.run.MOMENTS.variants:
        variant_of.cache_clear()


def note(size: RopeSize = SIZE, gpu: Gpu = UNKNOWN, spec: RopeSpec = SPEC) -> None:
    misses.note(ROPE, spec, size, choose(ROPE, spec, size, gpu))


def note_all(*sizes: RopeSize) -> None:
    for size in sizes:
        note(size)


def row_of(gpu: Gpu, size: RopeSize = SIZE, **measured: Any) -> Row:
    board = {"device_name": gpu.name, "multiprocessors": gpu.multiprocessors}
    return Row(SPEC, size, default_variant(SPEC, size), None, 1.0, f"tuned.tables.{gpu.device}", board | measured)


def table_of(gpu: Gpu, *rows: Row) -> Table:
    properties = {"capability": gpu.capability, "multiprocessors": gpu.multiprocessors}
    return Table(gpu.device, properties, {"rope": rows, "gru_cell": (), "linear_cat": ()})


# What is said -------------------------------------------------------------------------------------------------------


def test_a_gpu_without_rows_is_told_of_once_with_what_serves_and_the_way_out(tables: dict[str, Table]) -> None:
    other = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
    tables[other.device] = table_of(other, row_of(other))
    with pytest.warns(tuned.TunedWarning) as said:
        note_all(SIZE, RopeSize(9, 9))
    assert len(said) == 1
    text = str(said[0].message)
    for part in ("nothing was tuned on A Card (sm_89, 142 multiprocessors)", "similar GPU", "tuned.tables.nvidia_h200"):
        assert part in text
    assert "python tune.py --gpu auto" in text


def test_each_gpu_is_told_of_and_one_with_rows_is_not(tables: dict[str, Table]) -> None:
    with pytest.warns(tuned.TunedWarning, match="A Card"):
        note()
    with pytest.warns(tuned.TunedWarning, match="Another"):
        note(gpu=Gpu("another", 80, 108, "Another"))
    tables["tuned_card"] = table_of(UNKNOWN, row_of(Gpu("tuned_card", 89, 142, "Tuned Card")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note(RopeSize(7, 7), Gpu("tuned_card", 89, 142, "Tuned Card"))


def test_a_board_of_the_same_name_with_other_multiprocessors_has_no_rows(tables: dict[str, Table]) -> None:
    tables[UNKNOWN.device] = table_of(UNKNOWN, row_of(UNKNOWN))
    assert choose(ROPE, SPEC, SIZE, UNKNOWN).rule == "winner"
    part = dataclasses.replace(UNKNOWN, multiprocessors=16)
    choice = choose(ROPE, SPEC, SIZE, part)
    assert choice.rule == "nearest size"
    assert "this size, but multiprocessors was 142, here it is 16" in choice.why
    with pytest.warns(tuned.TunedWarning, match="16 multiprocessors"):
        note(gpu=part)


def test_pythons_own_filters_silence_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="nothing was tuned on")
        note()


def test_threads_are_told_once_together(tables: dict[str, Table]) -> None:
    assert tables == {}
    start = threading.Barrier(8)

    def first(_: int) -> None:
        start.wait()
        note()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            list(threads.map(first, range(8)))
    assert len(said) == 1


@pytest.mark.usefixtures("on_a_gpu")
def test_nothing_is_said_while_torch_compile_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "note", lambda *_: pytest.fail("noted while tracing"))
    with FakeTensorMode():
        assert rope(torch.randn(1, 2, 3, 16), torch.randn(2, 16)).shape == (1, 2, 3, 16)


# What is written ----------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.filterwarnings("ignore::tuned.TunedWarning")
def test_each_problem_without_a_row_is_written_once(
    tables: dict[str, Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "misses.jsonl"
    monkeypatch.setenv("TUNED_RECORD", str(path))
    tables[UNKNOWN.device] = table_of(UNKNOWN, row_of(UNKNOWN))
    for size in (SIZE, RopeSize(1, 7), RopeSize(1, 7), RopeSize(1, 8)):
        note(size)
    wanted = {"family": "rope", "spec": json.loads(json.dumps(dataclasses.asdict(SPEC)))}
    assert lines(path) == [wanted | {"size": {"batch": 1, "seq": n}} for n in (7, 8)]


@pytest.mark.filterwarnings("ignore::tuned.TunedWarning")
def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    note()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::tuned.TunedWarning")
def test_a_file_that_cannot_be_written_stops_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_RECORD", str(tmp_path / "no folder" / "misses.jsonl"))
    with pytest.warns(RuntimeWarning, match=r"TUNED_RECORD: .*misses.jsonl cannot be written") as said:
        note_all(SIZE, RopeSize(1, 7))
    assert sum("cannot be written" in str(w.message) for w in said) == 1


@pytest.mark.filterwarnings("ignore::tuned.TunedWarning")
def test_a_file_in_the_users_home_whose_last_line_is_torn_takes_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "misses.jsonl"
    path.write_text('{"family": "gru')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TUNED_RECORD", "~/misses.jsonl")
    note_all(SIZE, RopeSize(1, 7))
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"family": "gru'
    assert [json.loads(line)["size"]["seq"] for line in whole] == [SIZE.seq, 7]


@pytest.mark.parametrize("given", ["", "share", "./share"])
def test_records_lie_in_the_home_where_the_data_folder_is_no_absolute_path(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.setenv("XDG_DATA_HOME", given)
    assert place.own_records() == Path("/home/one/.local/share/tuned-kernels/winners")
    monkeypatch.setenv("XDG_DATA_HOME", "~/share")
    assert place.own_records() == Path("/home/one/share/tuned-kernels/winners")


def test_a_user_without_a_home_has_no_records_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no home; no model may stop because of it."""

    def nobody(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert place.own_records() is None
    assert place.expanded("~/x") == Path("~/x")
    monkeypatch.setenv("TUNED_TABLES", "~nobody/tables")
    with pytest.warns(RuntimeWarning, match="TUNED_TABLES: a folder of records must be") as said:
        assert table.tables.__wrapped__()
    assert said[0].filename == __file__


@pytest.mark.filterwarnings("ignore::tuned.TunedWarning")
def test_lengths_that_never_come_twice_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "misses.jsonl"
    monkeypatch.setenv("TUNED_RECORD", str(path))
    monkeypatch.setattr(misses, "MAX_RECORDED", 3)
    with pytest.warns(RuntimeWarning, match="no more are recorded") as said:
        note_all(*(RopeSize(1, n) for n in range(1, 9)))
    assert len(lines(path)) == 3
    assert sum("no more" in str(w.message) for w in said) == 1


@pytest.mark.filterwarnings("ignore::tuned.TunedWarning")
def test_a_line_is_one_short_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "misses.jsonl"
    monkeypatch.setenv("TUNED_RECORD", str(path))
    written: list[bytes] = []
    write = misses.os.write
    monkeypatch.setattr(misses.os, "write", lambda file, data: written.append(data) or write(file, data))
    note(RopeSize(2**31, 2**31), spec=dataclasses.replace(SPEC, dtype="bfloat16", heads=2**31))
    assert len(written) == 1
    assert len(written[0]) < 4096
    assert written[0].endswith(b"}\n")


# Repeated calls -------------------------------------------------------------------------------------------------------


def test_a_call_that_was_seen_before_notes_nothing(on_a_gpu: dict[str, Table], monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_gpu == {}
    noted: list[Any] = []
    monkeypatch.setattr(misses, "note", lambda _family, _spec, size, choice: noted.append((size, choice.rule)))
    for length in (5, 5, 5, 6, 5, 6):
        x, freqs = torch.randn(2, length, 3, 16), torch.randn(8, 16)
        rope(x, freqs)
    assert noted == [(RopeSize(2, 5), "default"), (RopeSize(2, 6), "default")], "each new length once, no call twice"
    noted.clear()
    x = torch.randn(2, 5, 3, 16, requires_grad=True)
    for _ in range(3):
        rope(x, freqs).sum().backward()
    assert len(noted) == 2, "forward and backward, once each"


def test_a_gru_step_is_looked_up_once(on_a_gpu: dict[str, Table], monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_gpu == {}
    noted: list[Any] = []
    monkeypatch.setattr(misses, "note", lambda _family, _spec, size, _choice: noted.append(size.batch))
    weights = torch.randn(24, 4), torch.randn(24, 8)
    for batch in (2, 2, 3, 2):
        gru_cell(torch.randn(batch, 4), torch.randn(batch, 8), *weights)
    assert noted == [2, 3]


@pytest.mark.usefixtures("on_a_gpu")
def test_explaining_a_call_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "note", lambda *_: pytest.fail("noted"))
    assert tuned.explain(rope, torch.randn(2, 5, 3, 16), torch.randn(8, 16)).rule == "default"


def test_on_a_cpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_RECORD", str(tmp_path / "misses.jsonl"))
    rope(torch.randn(2, 5, 3, 16), torch.randn(8, 16))
    assert list(tmp_path.iterdir()) == []


# There and back -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::tuned.TunedWarning")
def test_what_a_model_ran_is_what_is_tuned_and_then_has_a_row(
    on_a_gpu: dict[str, Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "misses.jsonl"
    monkeypatch.setenv("TUNED_RECORD", str(path))
    x, freqs = torch.randn(2, 5, 3, 16), torch.randn(8, 16)
    rope(x, freqs)
    gru_cell(torch.randn(2, 4), torch.randn(2, 8), torch.randn(24, 4), torch.randn(24, 8))
    problems = select(None, str(path))
    assert [p.family for p in problems] == ["rope", "gru_cell"]
    assert problems[0].size == RopeSize(2, 5)
    assert select("rope", str(path)) == problems[:1]
    # Tuned: each problem has its row.
    board = {"device_name": UNKNOWN.name, "multiprocessors": UNKNOWN.multiprocessors}
    rows = {
        p.family: (Row(p.spec, p.size, FAMILIES[p.family].default_variant(p.spec, p.size), None, 1.0, "t", board),)
        for p in problems
    }
    on_a_gpu[UNKNOWN.device] = Table(UNKNOWN.device, {}, rows)
    path.unlink()
    misses._RECORDED.clear()
    tuned.calls.rope.call._PLANS.clear()
    assert tuned.explain(rope, x, freqs).rule == "winner"
    rope(x, freqs)
    assert not path.exists()


def problem_line(**changes: Any) -> str:
    values: dict[str, Any] = {"family": "rope", "spec": dataclasses.asdict(SPEC), "size": dataclasses.asdict(SIZE)}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            values[part] = values[part] | {field: value}
        else:
            values[part] = value
    return json.dumps(values)


def test_files_of_several_processes_are_one_set_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    path.write_text("\n".join([problem_line(), problem_line(size__seq=9), "", problem_line()]) + "\n")
    problems = read_misses(path)
    assert [p.size.seq for p in problems] == [5, 9]
    assert [p.name for p in problems] == [
        "rope_bshd_float32_heads3_head_dim16_rotary_dim16_2x5",
        "rope_bshd_float32_heads3_head_dim16_rotary_dim16_2x9",
    ]


def test_a_default_problem_keeps_its_name_and_is_tuned_once(tmp_path: Path) -> None:
    known = default_problems()[0]
    path = tmp_path / "misses.jsonl"
    path.write_text(problem_line(spec=dataclasses.asdict(known.spec), size=dataclasses.asdict(known.size)))
    assert read_misses(path) == [known]
    assert select(None, f"{known.name},{path}") == [known]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"family": "rope", "sp', r"misses.jsonl line 2 is not JSON .*: delete the line"),
        ("[1]", r"line 2 must have the fields \['family', 'size', 'spec'\], got list"),
        ('{"family": "rope"}', r"line 2 must have the fields .* got \['family'\]"),
        (problem_line(family="attention"), r"line 2: family must be one of .* got 'attention'"),
        (problem_line(spec__layout="hbsd"), "line 2: spec: layout must be one of"),
        (problem_line(spec__surprise=1), "line 2: spec must have the fields"),
        (problem_line(spec__heads="3"), "line 2: spec.heads must be int, got '3'"),
        (problem_line(size__seq=1.5), r"line 2: size.seq must be int, got 1.5"),
        (problem_line(size__seq=0), "line 2: size.seq must be at least 1, got 0"),
        (problem_line(size__batch=2**40), r"line 2: RopeSize.* takes .* TiB, more than any GPU has; delete the line"),
    ],
)
def test_a_line_that_is_no_problem_is_refused_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "misses.jsonl"
    path.write_text(problem_line() + "\n" + line + "\n")
    with pytest.raises(MissesError, match=said):
        read_misses(path)
    with pytest.raises(SelectionError, match=said):
        select(None, str(path))


def test_a_file_that_is_not_there_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"none.jsonl cannot be read .*TUNED_RECORD="):
        select(None, str(tmp_path / "none.jsonl"))


CELLS = list(itertools.product((False, True), (False, True), ((), (4,))))  # bias, in place, a second segment


def test_no_two_problems_have_the_same_name() -> None:
    specs = [
        RopeSpec(layout, dtype, 8, 64, rotary, style, angles, angle_dtype, entries, inplace, direction)
        for layout, dtype, rotary, style, angles, angle_dtype, entries, (inplace, direction) in itertools.product(
            LAYOUTS,
            DTYPES,
            (32, 64),
            STYLES,
            ANGLES,
            ITEM_SIZE,
            ANGLE_ENTRIES,
            ((False, "forward"), (True, "forward"), (False, "backward")),
        )
    ]
    cells = [GruCellSpec("float16", 8, (4, *more), bias, inplace) for bias, inplace, more in CELLS]
    names = [name_of("rope", spec, SIZE) for spec in specs] + [name_of("gru_cell", spec, SIZE) for spec in cells]
    assert len(set(names)) == len(names)


def test_a_string_of_a_field_that_may_be_left_out_has_its_name() -> None:
    """A family of one's own may have two fields with the same values."""

    @dataclasses.dataclass(frozen=True)
    class Cast:
        dtype: str = "float32"
        result: str = "float32"

    names = [name_of("cast", spec, SIZE) for spec in (Cast("bfloat16"), Cast(result="bfloat16"), Cast())]
    assert len(set(names)) == 3
    assert names[0].startswith("cast_dtypebfloat16_")


def test_a_name_has_no_comma() -> None:
    """--problems takes names with commas between."""
    name = name_of("gru_cell", GruCellSpec("bfloat16", 512, (256, 512)), SIZE)
    assert name.startswith("gru_cell_bfloat16_hidden512_inputs256x512_")


def test_the_rule_of_a_choice_without_a_gpu_is_no_miss() -> None:
    misses.note(ROPE, SPEC, SIZE, Choice("eager", "on a CPU", None))
    assert not misses._TOLD


def test_the_command_line_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    path.write_text(problem_line() + "\n" + problem_line(size__seq=9) + "\n")
    done = CliRunner().invoke(command_line.app, ["--list", "--problems", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()[1:]] == [p.name for p in read_misses(path)]
    path.write_text("nonsense\n")
    done = CliRunner().invoke(command_line.app, ["--list", "--problems", str(path)])
    assert done.exit_code == 2
    assert "misses.jsonl line 1 is not JSON" in " ".join(done.output.split())


def test_a_row_that_was_once_a_miss_can_be_tuned_and_shown_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    path.write_text(problem_line(spec__head_dim=64, spec__rotary_dim=64))
    (problem,) = read_misses(path)
    made = winner()
    variant = default_variant(problem.spec, problem.size)
    digests = {n: structures()[n].digest for n in ROPE.kernel_names(problem.spec, variant)}
    row = dataclasses.replace(
        made, name=problem.name, spec=problem.spec, size=problem.size, variant=variant, digests=digests
    )
    save_winner(row, tmp_path / "out")
    assert select(None, problem.name, folder=tmp_path / "out") == [problem]
    assert select(None, "rope_bshd_*", folder=tmp_path / "out") == [problem]
    shown = CliRunner().invoke(command_line.app, ["--out", str(tmp_path / "out"), "show", problem.name])
    assert shown.exit_code == 0
    assert "@triton.jit" in shown.output
