"""What tune.py prints: about a page of 80 columns for people, one object for programs, and a sentence for each error."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from generator import answer, command_line, commands, gpu
from generator.estimating import offline
from generator.estimating.offline import Estimate
from generator.estimating.targets import target_named
from generator.evaluation import evidence, foreign, regret
from generator.figures import figures, steps, turned
from generator.gpu import Facts
from generator.problem import Problem, SelectionError
from generator.reporting import planned
from generator.reporting.estimates import RANK, run_offline, style_of
from generator.searching.pool import Pool, legal_pool
from generator.selection import LISTED, problem_named, select
from generator.storage.landscape import load_landscapes
from generator.storage.record import save_winner
from generator.workload import default_problems, default_variant
from tests.support.command_line import ONE, call, machine
from tests.support.fakes import fine
from tests.support.processes import BACKSTOP_SECONDS
from tests.support.pythons import python
from tests.support.records import winner
from tuned.families.gru.spec import GruSize, GruSpec

pytestmark = pytest.mark.processes

__all__ = ["machine"]

ROOT = Path(command_line.__file__).parents[1]
COLUMNS, PAGE = 80, 60


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0+cpu"))


def words(done: Any) -> str:
    return " ".join(done.output.replace("│", " ").split())


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama3_8b_2x4069", "Did you mean llama3_8b_2x4096"),
        ("gru_cell_1024_65", "Did you mean gru_cell_1024_64"),
        ("lpcnet", "lpcnet_synthesis"),
        ("study*x", "study_16x512"),
    ],
)
def test_a_name_that_is_not_there_gets_the_nearest_and_not_all(name: str, near: str) -> None:
    done = call("explain", name)
    assert done.exit_code == 2
    assert near in words(done)
    assert f"python tune.py --list names all {len(default_problems())}" in words(done)
    assert len(words(done)) < 300
    assert sum(p.name in words(done) for p in default_problems()) <= LISTED


def test_a_name_that_nothing_is_like_gets_the_list() -> None:
    assert words(call("--list", "--problems", "%%%")) == (
        f"tune.py: no problem '%%%'. python tune.py --list names all {len(default_problems())}; a * stands for any letters"
    )


# --- a dry run ------------------------------------------------------------------------------------------------------


def some(count: int) -> list[planned.Plan]:
    pool = Pool(960, (1, 2, 3), {f"a tile of {n} pairs on 8 warps is too small": 2 for n in range(1, 30)})
    return [planned.Plan(problem, pool, 3) for problem in default_problems()[:: len(default_problems()) // count]]


def test_a_dry_run_of_all_problems_is_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(960, (1, 2, 3), {f"a tile of {n} pairs on 8 warps is too small": 2 for n in range(1, 30)})
    monkeypatch.setattr(commands, "legal_pool", lambda *_: pool)
    done = call("--dry-run")
    lines = done.output.splitlines()
    assert done.exit_code == 0
    assert len(lines) <= PAGE
    assert max(map(len, lines)) <= COLUMNS
    count = len(default_problems())
    assert f"all {count} {960 * count:,} {3 * count:,} {3 * count:,}" in words(done)
    assert f"rope: {58 * len(default_problems('rope')):,} tiles are not tried" in words(done)
    assert "a tile of N pairs on N warps is too small" in done.output
    whole = call("--dry-run", "--details").output.splitlines()
    assert len(whole) == count * 30
    assert sum("960 declared -> 3 legal -> 3 to measure" in line for line in whole) == count


def test_a_dry_run_of_few_problems_tells_of_each() -> None:
    (plan,) = some(1)[:1]
    lines = list(planned.lines(plan, details=False))
    assert len(lines) == 1 + planned.RULES + 1
    assert lines[-1].split(maxsplit=2) == ["48", "tiles:", "24 more rules, which --details lists"]
    assert len(list(planned.lines(plan, details=True))) == 30


def test_a_dry_run_is_for_the_target_that_is_named() -> None:
    found = [
        json.loads(call("--dry-run", "--problems", ONE, "--target", target, "--json").stdout)
        for target in ("h200", "4090")
    ]
    assert [one["target"] for one in found] == ["nvidia_h200", "nvidia_geforce_rtx_4090"]
    assert "--details is of --dry-run" in words(call("--details"))


# --- tables ---------------------------------------------------------------------------------------------------------


def drawn(table: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=COLUMNS)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_tables_fit_and_nothing_in_them_is_cut() -> None:
    landscapes = load_landscapes("nvidia_h200")
    summary = dict.fromkeys((*evidence.COLUMNS.values(), "wasted", "ms a proposal"), 0.1234)
    strategies = (
        "tune.py, seeded by other problems",
        "tune.py",
        "the default, then random, none twice",
        "Optuna TPE over the pool",
        "Optuna TPE",
        "Optuna GP over the pool",
        "Optuna GP",
    )
    names = [p.name for p in default_problems()]
    longest = max(names, key=len)
    tables = [
        evidence.search_table(landscapes, dict.fromkeys(strategies, (63, summary))),
        evidence.guess_table([evidence.Guess(longest, 0.1, 0.1, 0.1)]),
        regret.regret_table([regret.Score(regret.SERVED, {longest: 1.1})], "title"),
        figures("title", "problem", "us", "GB/s", "% of floor", "x eager", "x default", "trials"),
        planned.table(some(40), "nvidia_h200"),
        turned("title", "strategy", ("mean",), [(name, ("20.14\n[12.23, 30.21]",)) for name in strategies[:4]]),
    ]
    tables[3].add_row(longest, "123456.78", "4800", "100.0", "123.4", "12.34", "96")
    for table in tables:
        lines = drawn(table)
        assert max(map(len, lines)) <= COLUMNS
        assert not [line for line in lines if "…" in line], lines
    cells = [line.split(" ")[1 if line.startswith(" ") else 0] for line in drawn(tables[3])]
    assert longest in "".join(cells), "a name is folded, and none of it is lost"


def test_a_terminal_gets_the_list_in_its_width_and_a_pipe_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = call("--list").output.splitlines()
    assert max(map(len, whole)) > COLUMNS
    console = Console(file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system=None)
    monkeypatch.setattr(command_line, "console", console)
    assert call("--list").exit_code == 0
    file = console.file
    assert isinstance(file, io.StringIO)
    cut = file.getvalue().splitlines()
    assert len(cut) == len(whole)
    assert max(map(len, cut)) <= COLUMNS
    assert [line.split()[0] for line in cut] == [line.split()[0] for line in whole]


def test_what_choices_cost_is_wrapped_below_itself() -> None:
    lines = call("explain", "llama3_8b_2x4096").output.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("knob")) :]
    assert max(map(len, table)) <= COLUMNS
    assert [line for line in table if line.startswith(" " * 30)]
    assert "\N{NO-BREAK SPACE}" not in "".join(table)


def test_steps_are_drawn_on_terminals_alone() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), width=COLUMNS, force_terminal=terminal, color_system=None)
        with steps(console, "counting", 2) as step:
            step()
        file = console.file
        assert isinstance(file, io.StringIO)
        assert ("counting" in file.getvalue()) is terminal


# --- help -----------------------------------------------------------------------------------------------------------


def test_help_is_in_groups_and_has_examples() -> None:
    done = call("--help")
    text = words(done)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= COLUMNS
    at = [text.index(group) for group in (command_line.WHERE, command_line.HOW, command_line.WHAT, command_line.STOP)]
    assert len(set(at)) == len(at)
    for group in (command_line.SEE, command_line.SHARE, command_line.STUDY):
        assert group in text
    examples = [line for line in command_line.EXAMPLES.splitlines()[1:] if line]
    assert len(examples) >= 6
    for example in examples:
        assert example in text, example


def test_the_examples_name_what_there_is() -> None:
    for name in ("llama3_8b_2x4096",):
        assert name in command_line.EXAMPLES
        assert problem_named(name)
    assert select(None, "llama3*")
    assert call("explain", "llama3_8b_2x4096", "--gpu", "h200").exit_code == 0


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("asked", [("--gpu", "3"), ("--gpus", "0,1"), ("--gpu", "h200")])
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error(asked: tuple[str, str]) -> None:
    done = call(*asked, "--problems", ONE)
    assert done.exit_code == 1
    said = f"tune.py: {' '.join(asked)} asks for a GPU, and there is none to tune on: no GPU was found on this machine."
    assert said in words(done)
    assert "leave this option out for what is true without" in words(done)
    assert done.stdout == ""


def test_a_terminal_of_no_width_gets_the_lines_of_any_other() -> None:
    """Some terminals that do not know their width say 0, for which Rich would print nothing."""
    found = [
        python("tune.py", "--list", "--problems", ONE, environment=os.environ | {"COLUMNS": columns})
        for columns in ("0", "80")
    ]
    assert [done.returncode for done in found] == [0, 0]
    assert found[0].stdout == found[1].stdout
    assert ONE in found[0].stdout


@pytest.mark.parametrize("command", ["--list", "show " + ONE, "--list --json"])
def test_a_closed_stdout_is_a_sentence(command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} tune.py {command} >&-"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "tune.py: stdout cannot be written: it is closed\n")


@pytest.mark.parametrize("command", ["model", "render"])
def test_what_is_installed_stays_as_it_was_built(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "OWN", tmp_path)
    arguments = (None, "auto", 1.0, 0) if command == "model" else ()
    with pytest.raises(SelectionError, match="what is installed is as it was built"):
        getattr(commands, command)(*arguments, Console())


@pytest.mark.usefixtures("no_gpu")
def test_a_landscape_without_a_gpu_is_an_error() -> None:
    done = call("landscape", ONE)
    assert done.exit_code == 1
    assert "landscape measures, and there is no GPU to measure on: no GPU was found" in words(done)


@pytest.mark.parametrize("place", ["/proc/nowhere", "missing"])
@pytest.mark.parametrize(
    "asked",
    [
        ("show", ONE, "--out", "{}/winner.py"),
        ("report", "--out", "{}/page.html"),
        ("new-family", "mine", "--out", "/proc/nowhere"),
        ("submit", "--gpu", "nvidia_h200", "--kernels", "0", "--to", "/proc/nowhere"),
        ("--out", "{}", "show", ONE),
        ("--out", "{}", "report"),
        ("--out", "{}", "explain", ONE),
        ("replay", "--write", "{}/page.md"),
        ("check-submission", "{}/rows.zip"),
    ],
    ids=lambda asked: asked[0] if isinstance(asked, tuple) else asked,
)
def test_a_place_that_cannot_be_used_is_one_sentence(
    asked: tuple[str, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generator.reporting.html.page.page", lambda _: "")  # making the page takes a second
    where = place if place.startswith("/") else str(tmp_path / place)
    done = call(*(word.format(where) for word in asked))
    assert done.exit_code == 1
    assert done.output.startswith("tune.py: ")
    assert len(done.output.strip().splitlines()) == 1
    assert "Traceback" not in done.output
    assert ("/proc/nowhere" if "/proc/nowhere" in asked else where) in done.output
    assert "TUNED_TABLES" not in done.output, "which the user did not set"


@pytest.mark.parametrize(
    "asked",
    [
        ("show", ONE, "--out"),
        ("report", "--out"),
        ("new-family", "mine", "--out"),
        ("submit", "--to"),
        ("submit", "--out"),
        ("check-submission", "rows.zip", "--to"),
        ("landscape", ONE, "--out"),
        ("replay", "--write"),
        ("replay", "--foreign"),
    ],
    ids=" ".join,
)
def test_an_empty_name_is_not_the_current_folder(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from an unset variable of a shell; files were written into the current folder."""
    monkeypatch.chdir(tmp_path)
    done = call(*asked, "")
    assert done.exit_code == 2
    assert "got an empty name: . is the current" in words(done)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", ["--help", "show --help", "show llama3_8b_2x4096 --json"])
def test_a_full_stdout_is_a_sentence(arguments: str) -> None:
    command = ["sh", "-c", f"exec {sys.executable} tune.py {arguments} >/dev/full"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "tune.py: stdout cannot be written: No space left on device\n")


def test_a_file_that_is_no_text_has_no_marks(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_bytes(b"\xff\x00")
    done = call("replay", "--write", str(tmp_path / "page.md"))
    assert done.exit_code == 2
    assert "page.md must be text in UTF-8" in words(done)


def test_a_file_is_no_folder_of_records(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call("--out", str(tmp_path / "file"), "--list")
    assert done.exit_code == 2
    assert "--out must be a folder" in words(done)


def test_a_cache_that_cannot_be_written_is_one_sentence_of_the_program(tmp_path: Path) -> None:
    """In a separate process: before it knows its task, the program starts processes with logs in the cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TUNED_CACHE": "/proc/nowhere"}
    command = ("tune.py", "--target", "nvidia_h200", "--problems", ONE, "--trials", "1", "--out", str(tmp_path))
    done = python(*command, environment=environment)
    assert done.returncode == 1
    said = (
        "tune.py: /proc/nowhere cannot be used: No such file or directory. Name another place with TUNED_CACHE or --out "
        "(or --to, --write), or make this one usable"
    )
    assert done.stderr.splitlines() == [said]


def test_marks_are_looked_for_before_anything_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "searches", lambda *_, **__: pytest.fail("replayed"))
    page = tmp_path / "page.md"
    begin, end = "<!-- replay:begin -->", "<!-- replay:end -->"
    for text in (f"{begin}\n", f"{end}\n{begin}\n", f"{begin}\xff{end}"):
        page.write_bytes(text.encode("latin-1"))
        done = call("replay", "--write", str(page))
        assert done.exit_code == 2
        ways = (f"must have the marks {begin} and {end}, once each and in this order", "must be text in UTF-8")
        assert any(way in words(done) for way in ways)


# --- for programs ---------------------------------------------------------------------------------------------------


def one_object(*arguments: str) -> dict[str, Any]:
    """The object that a command prints with --json; the option may come before or after the command."""
    done = call(*arguments, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit_code"] == done.exit_code
    assert list(found)[:2] == ["command", "exit_code"]
    return found


def test_every_command_has_the_option() -> None:
    names = {info.name or info.callback.__name__.replace("_", "-") for info in command_line.app.registered_commands}  # type: ignore[union-attr]
    for name in sorted(names - {"tune"}):
        assert "--json" in call(name, "--help").output, name
    assert "--json" in call("tune", "--help").output


def test_lists_are_objects(tmp_path: Path) -> None:
    save_winner(winner(ONE), tmp_path)
    found = one_object(
        "--list", "--problems", f"{ONE},llama3_8b_2x4096", "--target", "test_gpu", "--out", str(tmp_path)
    )
    assert (found["command"], found["device"]) == ("list", "test_gpu")
    times = {p["name"]: p["median_us"] for p in found["problems"]}
    assert times == {ONE: winner(ONE).median_us, "llama3_8b_2x4096": None}
    assert found["problems"][0]["spec"]["head_dim"] == 128
    planned_ = one_object("--dry-run", "--problems", ONE)
    assert (
        planned_["problems"][0]["to_measure"] == commands.TRIALS or planned_["problems"][0]["legal"] < commands.TRIALS
    )
    checked = one_object("--check", "--problems", ONE, "--out", str(tmp_path))
    assert (checked["command"], checked["to_do"]) == ("check", 0)
    assert {f["kind"] for f in checked["findings"]} <= set(commands.STYLES)


def test_what_was_written_is_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "render_all", lambda: (["kernels/a.py"], []))
    assert one_object("--render") == {"command": "render", "exit_code": 0, "written": ["kernels/a.py"], "deleted": []}
    family = one_object("new-family", "mine", "--out", str(tmp_path / "mine"))
    assert all(Path(path).exists() for path in family["written"])
    page = tmp_path / "page.html"
    assert one_object("report", "--device", "h200", "--out", str(page)) == {
        "command": "report",
        "exit_code": 0,
        "device": "nvidia_h200",
        "path": str(page),
    }
    archive = one_object("submit", "--gpu", "nvidia_h200", "--kernels", "0", "--to", str(tmp_path))
    if archive["accepted"]:
        judged = one_object("check-submission", archive["archive"], "--kernels", "0")
        assert (judged["accepted"], judged["digest"]) == (True, archive["digest"])
    else:
        assert archive["reasons"]


def test_a_winner_is_an_object_with_its_source(tmp_path: Path) -> None:
    found = one_object("show", ONE)
    assert (found["problem"], found["device"], found["path"]) == (ONE, "nvidia_h200", None)
    assert found["source"] == call("show", ONE).stdout
    file = tmp_path / "winner.py"
    assert one_object("show", ONE, "--out", str(file))["path"] == str(file)
    assert file.read_text() == found["source"]


def test_an_explanation_is_an_object() -> None:
    found = one_object("explain", "llama3_8b_2x4096")
    assert (found["device"], found["rule"]) == ("nvidia_h200", "winner")
    assert found["kernels"] == ["rope_bshd_copy_half_freqs"]
    assert found["winner"]["variant"] == found["variant"]
    elsewhere = one_object("explain", "llama3_8b_2x4096", "--gpu", "a100")
    assert (elsewhere["device"], elsewhere["rule"]) == ("nvidia_a100_sxm4_80gb", "similar GPU")
    assert elsewhere["winner"] is None
    before = call("--json", "--gpu", "a100", "explain", "llama3_8b_2x4096")
    assert json.loads(before.stdout) == elsewhere
    assert "similar GPU" in before.stderr, "what people read is there still"


def test_what_cards_get_is_an_object() -> None:
    found = one_object("cards", "a100", "--shapes", "5", "--kernels", "0")
    card = found["cards"]["nvidia_a100_sxm4_80gb"]
    assert (card["shapes"], sum(card["rules"].values()), card["compiled"]) == (5, 5, 0)


def test_studies_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    landscapes = load_landscapes("nvidia_h200")
    figures_ = dict.fromkeys((*evidence.COLUMNS.values(), "wasted", "ms a proposal"), 0.5)
    monkeypatch.setattr(evidence, "searches", lambda *_, **__: {"tune.py": (3, figures_)})
    monkeypatch.setattr(evidence, "agreements", lambda *_: [0.01, 0.02])
    monkeypatch.setattr(evidence, "guesses", lambda _: [evidence.Guess("a", 0.1, 0.1, float("nan"))])
    found = one_object("replay", "--device", landscapes[0].environment["device"])
    assert found["searches"]["tune.py"]["searches"] == 3
    assert found["estimate"] == [{"problem": "a", "first": 0.1, "best_of_five": 0.1, "default": None}]
    refused = one_object("regret", "--device", "no_gpu")
    assert refused["error"].startswith("no landscape of no_gpu")
    monkeypatch.setattr(foreign, "load_folder", lambda _: [])
    assert one_object("carry", "HEAD", "--device", "no_gpu")["error"].startswith(
        "there is no record of no_gpu (there are: "
    )


def test_a_run_is_an_object(machine: Any, tmp_path: Path) -> None:
    found = one_object("--problems", ONE, "--out", str(tmp_path / "out"))
    assert found["command"] == "tune"
    assert [w["name"] for w in found["winners"]] == [ONE]
    assert found["record"] == str(tmp_path / "out" / "test_gpu.json")
    assert (found["skipped"], found["interrupted"]) == ({}, False)
    assert found["environment"]["device"] == "test_gpu"
    assert machine[1]


def test_what_is_refused_is_an_object_too(machine: Any) -> None:
    found = one_object("explain", "nothing_like_it")
    assert (found["command"], found["exit_code"]) == ("explain", 2)
    assert found["error"].startswith("no problem 'nothing_like_it'")
    assert one_object("--gpu", "b200", "--problems", ONE)["exit_code"] == 2
    assert not machine[1]


def test_without_a_gpu_it_compiles_checks_and_estimates(tmp_path: Path) -> None:
    """All of it for one small problem, in a separate process: there Triton must compile and not interpret."""
    save_winner(winner(ONE, environment={**winner().environment, "device": "nvidia_h200"}), tmp_path / "out")
    record = tmp_path / "out" / "nvidia_h200.json"
    before = record.read_bytes()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "tune.py", "--target", "h200", "--problems", ONE, "--trials", "4", "--json"]
    done = subprocess.run(
        [*command, "--out", record.parent], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=BACKSTOP_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "declared -> 28 legal -> a ranked sample of 4: 4 compiled -> 4 without spills -> " in done.stderr
    assert "distinct in machine code" in done.stderr
    assert "registers a thread" in done.stderr
    assert "checked in the interpreter against float64: 2 of 2 right" in done.stderr
    assert "measured     34.50 us  rank" in done.stderr
    assert "Not done, since it needs the device" in done.stderr
    assert record.read_bytes() == before, "a measured row is never touched"
    found = json.loads(done.stdout)
    (estimate,) = found["estimates"]
    assert (found["target"], found["estimated"], found["wrong"]) == ("nvidia_h200", True, [])
    assert estimate["measured_us"] == 34.5
    assert 1 <= estimate["rank_of_measured"] <= estimate["ranked"]
    assert f"rank {estimate['rank_of_measured']} of {estimate['ranked']} here" in done.stderr
    assert RANK in done.stderr
    assert Path(found["path"]) == tmp_path / "cache" / "estimates" / "nvidia_h200.json"
    assert json.loads(Path(found["path"]).read_text())["estimated"] is True


def test_an_estimate_skips_a_problem_that_nothing_is_legal_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner on the GPU would skip it too, and would fail if there is no other."""
    none = Problem("too_large", "gru_backward", GruSpec("float32", 4096), GruSize(64, 16))
    one = problem_named(ONE)
    found = [
        Estimate(none, legal_pool(none, 90, 132), {}, {}, [], None),
        Estimate(one, Pool(1, (variant := default_variant(one),), {}), {variant: fine(one, variant)}, {}, [], None),
    ]

    def estimate_all(problems: list[Problem], *given: Any) -> Any:
        estimates = [one for one in found if one.problem in problems]
        for estimate in estimates:
            given[-1](estimate)
        return estimates, []

    monkeypatch.setattr(offline, "estimate_all", estimate_all)
    for problems, right in (([none, one], True), ([none], False)):
        said: list[str] = []
        assert run_offline(problems, target_named("h200"), 1, None, math.inf, said.append) is right
        assert "    skipped: no variant of it is legal here" in said
        assert not any("WRONG" in line for line in said)


def test_lines_of_an_estimate_have_their_styles() -> None:
    assert style_of("    WRONG llama3: nan") == "red"
    assert style_of(RANK) == "dim"
    assert style_of("llama3_8b_2x4096: 960 declared") == ""


def test_plain_values_are_any_readers() -> None:
    assert answer.plain({"a": (1, float("inf")), 2: {3, 1}, "path": Path("/x")}) == {
        "a": [1, None],
        "2": [1, 3],
        "path": "/x",
    }
    answer.put(ignored=True)  # dropped: nobody collects answers here
    with answer.collected() as facts:
        answer.put(a=1)
        answer.put(b=2)
    assert facts == {"a": 1, "b": 2}
