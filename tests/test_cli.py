"""tune.py as a user calls it."""

from __future__ import annotations

import importlib.abc
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from generator import command_line, commands, gpu
from generator.gpu import Facts, NoSuchGpuError, choose_gpu, choose_gpus, diagnose
from generator.publishing import audit
from generator.publishing import files as committed
from generator.reporting.progress import time_left
from generator.reporting.report import describe
from generator.searching import run as run_module
from generator.searching.pool import Pool
from generator.searching.search import EXHAUSTIVE
from generator.selection import SelectionError, select
from generator.storage import record as record_module
from generator.storage.record import read_record, save_winner
from generator.workload import default_problems
from tests.support.command_line import ONE, call, machine
from tests.support.ports import free_port
from tests.support.processes import complaints
from tests.support.pythons import python
from tests.support.records import winner

pytestmark = pytest.mark.processes

__all__ = ["machine"]

ROOT = Path(command_line.__file__).parents[1]


def test_a_python_without_what_tuning_needs_is_told_where_it_is() -> None:
    """make tune does not activate .venv: the next command is often run by the system's Python."""
    done = python("-S", "tune.py", "--list", cwd=ROOT, environment={**os.environ, "PYTHONPATH": ""}, new=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"tune.py: typer is not installed for {sys.executable}. In a checkout make tune sets up"
    )
    assert len(done.stderr.splitlines()) == 1


def test_an_environment_with_typer_alone_is_told_the_same() -> None:
    """Other packages bring Typer and Rich, and few bring Optuna."""
    code = "import sys; sys.modules['optuna'] = None; from generator.command_line import program; program()"
    done = python("-c", code, "--list", cwd=ROOT, new=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tune.py: optuna is not installed for {sys.executable}. In a checkout")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("where", [(), ("--target", "a100")])
def test_a_file_without_problems_is_nothing_to_do(where: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "misses.jsonl").touch()
    done = call(*where, "--problems", str(tmp_path / "misses.jsonl"))
    assert done.exit_code == 0
    assert done.output == f"nothing to tune: {tmp_path}/misses.jsonl names no problem\n"


def test_a_file_that_no_model_wrote_may_mean_that_every_problem_has_a_row(tmp_path: Path) -> None:
    done = call("--problems", str(tmp_path / "misses.jsonl"))
    assert done.exit_code == 2
    assert "a model that runs on a GPU with TUNED_RECORD=" in done.output


# --- lists ----------------------------------------------------------------------------------------------------------


def test_list_names_every_problem_and_what_was_measured(tmp_path: Path) -> None:
    save_winner(winner(), tmp_path)
    done = call("--list", "--target", "test_gpu", "--out", str(tmp_path))
    lines = done.output.splitlines()
    assert done.exit_code == 0
    assert [line.split()[0] for line in lines[1:]] == [p.name for p in default_problems()]
    assert [line.split()[1] for line in lines[1:3]] == ["34.50", "-"]


def test_a_part_of_a_name_is_a_target_wherever_one_is_asked_for() -> None:
    whole, part = (
        call("--list", "--target", name, "--problems", "llama3_8b_2x4096") for name in ("nvidia_h200", "H200")
    )
    assert whole.output == part.output
    assert " - " not in whole.output
    whole, part = (
        call("--check", "--target", name, "--problems", "llama3_8b_2x4096") for name in ("nvidia_h200", "H200")
    )
    assert (part.exit_code, part.output) == (whole.exit_code, whole.output)


def test_a_folder_that_is_no_package_is_no_family_and_its_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "softmax.py").touch()
    (tmp_path / "test_softmax.py").touch()
    said = "".join(call("--family", str(tmp_path), "--list").output.replace("│", " ").split())
    assert f"hasno__init__.py:namethefile,{tmp_path}/softmax.py".replace(" ", "") in said
    assert "test_softmax.py" not in said


def test_what_is_to_be_called_next_names_the_family_from_outside(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "own_kernel", tmp_path, dirs_exist_ok=True)
    family, record = tmp_path / "softmax.py", tmp_path / "softmax_tuned" / "winners" / "nvidia_h200.json"
    record.write_text(re.sub(r'"torch": "[^"]*"', '"torch": "2.9.0"', record.read_text()))
    done = python(str(ROOT / "tune.py"), "--family", str(family), "--target", "h200", "--check")
    assert f"every row: python tune.py --family {family} --gpu auto" in " ".join(done.stdout.split())


def test_ctrl_c_while_imports_go_on_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops an exception that is raised in a callback of its import system: the run would go on."""

    class Released:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    class Slow(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "generator.commands":
                released = Released()
                del released

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.delitem(sys.modules, "generator.commands")
    monkeypatch.delattr(sys.modules["generator"], "commands")
    monkeypatch.setattr(sys, "meta_path", [Slow(), *sys.meta_path])
    done = call("--list", "--problems", ONE)
    assert done.exit_code == 130
    assert "interrupted" in done.output
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
def test_an_answer_that_cannot_be_written_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tune.py"), "--list", "--problems", ONE, "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert complaints(done.stderr).splitlines()[-1] == "tune.py: stdout cannot be written: No space left on device"


def test_a_problem_is_described_by_what_is_not_its_default() -> None:
    known = {p.name: p for p in default_problems()}
    for name, words in {
        "llama3_8b_2x4096": "bshd bfloat16 heads=32 head_dim=128 rotary_dim=128",
        "study_inplace_sbhd_16x512": "sbhd bfloat16 heads=10 head_dim=512 rotary_dim=512 inplace",
        "llama3_8b_append_float8_1x4096": "thd bfloat16 heads=32 head_dim=128 rotary_dim=128 angles=cos_sin inplace key_heads=8 "
        "positions=ids cache=float8",
        "linear_cat_grid_tf32_1x384x768": "float32 inputs=(256, 128) outputs=768 precision=tf32",
    }.items():
        assert describe(known[name].spec) == words


def test_list_takes_a_family_and_patterns() -> None:
    assert len(call("--list", "--family", "gru_cell").output.splitlines()) == 1 + len(default_problems("gru_cell"))
    names = [line.split()[0] for line in call("--list", "--problems", f"study_*,{ONE}").output.splitlines()[1:]]
    assert names == [p.name for p in default_problems() if p.name.startswith("study_") or p.name == ONE]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--list", "--problems", "llama3_8b_2x4095"), "no problem 'llama3_8b_2x4095'. Did you mean llama3_8b_2x4096"),
        (("--list", "--problems", "nothing*"), "no problem 'nothing*'"),
        (
            ("--list", "--family", "roppe"),
            "no family 'roppe'. Did you mean rope? There are: rope, gru_cell, linear_cat, gru",
        ),
        (
            ("--list", "--family", "rope", "--problems", ONE),
            f"no problem '{ONE}' of family rope. Did you mean|tune.py --list --family rope names all",
        ),
        (("--list", "--problems", ""), "--problems names none, got '': leave it out for all"),
        (("show", "llama3_8b_2x4095"), "Did you mean llama3_8b_2x4096"),
        (("explain", "llama3*"), "; give one name, without a pattern"),
        (("show", ONE, "--gpu", ""), "--gpu must say something, got ''"),
        (("--gpu", "h200", "explain", ONE, "--gpu", "h100"), "--gpu h200 and --gpu h100 exclude each other"),
        (("--out", "a", "submit", "--out", "b"), "--out a and --out b exclude each other"),
        (("--gpu", "0", "landscape", ONE, "--gpu", "1"), "--gpu 0 and --gpu 1 exclude each other"),
        (("--gpu", "0", "model", "--gpu", "1"), "--gpu 0 and --gpu 1 exclude each other"),
        (("replay", "--foreign", "x", "--device", "nvidia_h100"), "--device nvidia_h100 and --foreign x exclude each"),
        *(
            ((*command, "--device", ""), "--device must say something, got ''")
            for command in (("regret",), ("replay",), ("carry", "HEAD"))
        ),
        (("model", "--family", " "), "--family must say something, got ' '"),
        (("model", "--seconds", "inf"), "--seconds must be a number from 1 on, got inf"),
        (("--quick", "--trials", "5"), "--trials 5 is of a search: leave one out"),
        (("--quick", "--target", "a100"), "--target a100 measures nothing: leave one out"),
        (("--target", "h300", "--problems", ONE), "Did you mean nvidia_h"),
        (("--list", "--target", "h300"), "Did you mean nvidia_h"),
        (("--check", "--target", "h300"), "Did you mean nvidia_h"),
        (("--list", "--family", ""), "--family must name a family, got ''"),
        (("--list", "--dry-run"), "--dry-run and --list exclude each other"),
        (("--json", "tune", "--list"), "--json must stand behind tune"),
        (("model", "--family", "rope"), "--family must be one that has a model (gru, gru_backward), got 'rope'|gru"),
        (("--budget", "10 parsecs", "--list"), "90s, 10m or 1h"),
        *(
            ((f"--{name}", " ", "--list"), f"--{name} must say something, got ' '")
            for name in ("gpu", "gpus", "ray", "storage", "target")
        ),
        (("--out", "", "--list"), "--out must be a folder, got an empty name"),
        (("cards", " , "), "cards must be names with commas between, got ' , '"),
        (("--target", "h200", "--gpu", "1", "--dry-run"), "--gpu 1 and --target h200 exclude each other"),
        (("--target", "h200", "--storage", "x", "--dry-run"), "--storage keeps what is measured"),
        (("--target", "h200", "explain", ONE), "explain does not read --target: leave it out"),
        (("--problems", ONE, "report"), "report does not read --problems"),
        (("--family", "rope", "show", ONE), "show does not read --family"),
        (("--gpu", "h100", "--list"), "--list does not read --gpu"),
        (("--quick", "--dry-run"), "--dry-run does not read --quick"),
        (("--trials", "0", "--list"), "greater than or equal to 1|0 is not in the range x>=1"),  # of Typer, or of Click
    ],
)
def test_a_name_that_is_not_there_is_an_error_that_helps(arguments: tuple[str, ...], said: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    printed = " ".join(done.output.replace("│", " ").split())  # without the frame, in which lines are broken
    assert any(words in printed for words in said.split("|"))


def test_the_representative_problems_exist() -> None:
    named = ["llama3_8b_2x4096", "llama3_8b_decode_64x1", "half_rotary_inplace_bshd_4x4096", "gru_cell_1024_64"]
    assert [p.name for p in select(None, None, representative=True)] == named
    assert select(None, "all", representative=True) == default_problems()
    with pytest.raises(SelectionError):
        select("rope", "gru_*")


@pytest.mark.parametrize(("text", "wanted"), [("90s", 90), ("10m", 600), ("1h", 3600), ("1.5m", 90), ("45", 45)])
def test_a_budget_is_a_time(text: str, wanted: float) -> None:
    assert command_line.seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "ten", "-1m", "0s", "5d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="a number above 0 with s, m or h, as in 90s, 10m or 1h"):
        command_line.seconds(text)


def test_time_left_is_by_the_pace_and_the_budget() -> None:
    assert time_left(10, 0, 4) == "?"
    assert time_left(10, 1, 4) == "0:30"
    assert time_left(100, 1, 4, budget_s=250) == "2:30"
    assert time_left(300, 1, 4, budget_s=250) == "0:00"


def test_what_a_command_reads_in_front_of_it_is_listed() -> None:
    """What is not listed is refused."""
    for info in command_line.app.registered_commands:
        assert info.callback is not None
        name = info.name or info.callback.__name__.replace("_", "-")
        read = set(re.findall(r"\b(?:given|context\.obj)\.(\w+)", inspect.getsource(info.callback))) - {"json"}
        assert {f"--{one}".replace("device", "gpu") for one in read} == command_line.READ.get(name, set()), name


@pytest.mark.parametrize("command", ["show", "report", "explain", "regret", "carry"])
def test_the_help_of_a_command_tells_what_only_stands_in_front_of_it(command: str) -> None:
    said = " ".join(call(command, "--help").output.split())
    assert f"In front of {command}: --out DIRECTORY (the folder of the record)" in said
    assert ("and --storage (the trials)" in said) == ("--storage" in command_line.READ[command])


def test_the_gpu_of_a_record_may_stand_in_front_of_a_command_or_behind_it(tmp_path: Path) -> None:
    save_winner(winner(ONE), tmp_path)
    save_winner(winner(ONE, environment={**winner().environment, "device": "nvidia_h200"}), tmp_path)
    shown = [
        json.loads(call("--out", str(tmp_path), *before, "show", ONE, *behind, "--json").stdout)["device"]
        for before, behind in ((("--gpu", "test"), ()), ((), ("--gpu", "test")), ((), ("--device", "test")), ((), ()))
    ]
    assert shown == ["test_gpu", "test_gpu", "test_gpu", "nvidia_h200"]
    page = str(tmp_path / "page.html")
    done = call("--out", str(tmp_path), "--gpu", "test", "report", "--out", page, "--json")
    assert json.loads(done.stdout)["device"] == "test_gpu"


def test_a_password_is_not_printed() -> None:
    done = call("--target", "a100", "--storage", "postgresql://me:s3cret@h/db")
    assert done.exit_code == 2
    assert "s3cret" not in done.output


def test_dry_run_of_a_pool_that_is_measured_whole_says_so() -> None:
    (found,) = json.loads(call("--dry-run", "--problems", "gru_cell_2048_1", "--json").stdout)["problems"]
    assert commands.TRIALS < found["legal"] <= EXHAUSTIVE
    assert found["to_measure"] == found["legal"]


def test_dry_run_counts_and_says_why() -> None:
    done = call("--dry-run", "--problems", "llama3_8b_2x4096")
    assert done.exit_code == 0
    assert "declared -> " in done.output
    assert f"{commands.TRIALS} to measure" in done.output
    assert "tiles: a tile of" in done.output


# --- check, render and show -----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the generated part of the package, which a test may damage."""
    copy = tmp_path / "tuned"
    for folder in ("kernels", "tables", "winners"):
        shutil.copytree(ROOT / "tuned" / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for module in (committed, audit, record_module, commands):
        for name in ("HOME", "KERNELS", "TABLES", "WINNERS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, copy if name == "HOME" else copy / name.lower())
    return copy


def test_render_mends_what_is_damaged_and_then_writes_nothing(package: Path) -> None:
    kernel = package / "kernels" / "rope_table.py"
    whole = kernel.read_text()
    kernel.write_text(whole + "# edited by hand\n")
    (package / "kernels" / "rope_old.py").write_text("")
    findings = call("--check", "--problems", ONE).output
    assert "tuned/kernels/rope_table.py is not what the templates and records give: python tune.py --render" in findings
    assert "tuned/kernels/rope_old.py belongs to nothing" in findings
    done = call("--render")
    assert done.exit_code == 0
    assert "wrote tuned/kernels/rope_table.py" in done.output
    assert "deleted tuned/kernels/rope_old.py" in done.output
    assert kernel.read_text() == whole
    assert "0 written, 0 deleted" in call("--render").output


def test_a_winner_brings_its_table_and_its_kernels(package: Path) -> None:
    for path in (package / "winners").glob("*.json"):
        path.unlink()
    save_winner(winner(ONE))
    committed.write_table("test_gpu")
    assert "tables/test_gpu.py" not in call("--render").output, "it was written before"
    assert (package / "tables" / "test_gpu.py").exists()
    done = call("--check", "--problems", ONE)
    assert done.exit_code == 0
    assert "0 to do" in done.output or "up to date" in done.output


def test_check_lists_rows_that_are_stale_or_missing(tmp_path: Path) -> None:
    check = ("--check", "--out", str(tmp_path), "--problems", f"{ONE},llama3_8b_2x4096")
    assert call(*check).exit_code == 1
    assert "no record in" in call(*check).output
    save_winner(winner(ONE), tmp_path)
    assert "test_gpu: llama3_8b_2x4096 has no row: python tune.py --problems llama3_8b_2x4096" in call(*check).output
    path = save_winner(winner(), tmp_path)
    assert call(*check).exit_code == 0
    content = json.loads(path.read_text())
    row = next(w for w in content["winners"] if w["name"] == ONE)
    row["digests"] = dict.fromkeys(row["digests"], "0123456789ab")
    path.write_text(json.dumps(content))
    done = call(*check)
    assert done.exit_code == 1
    assert f"test_gpu: {ONE} does not count: the source of " in done.output
    assert "1 to do" in done.output
    assert "nvidia_b200: no record" in call(*check, "--target", "nvidia_b200").output
    tells = json.loads(call(*check, "--json").stdout)["findings"]
    commands_told = [one["text"] for one in tells if "tune.py " in one["text"]]
    assert commands_told
    assert all(text.endswith(f" --out {tmp_path}") for text in commands_told)


def test_a_record_that_cannot_be_read_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "test_gpu.json").write_text('{"format": "tuned-winners", "sch')
    done = call("--check", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "test_gpu.json is not whole JSON" in " ".join(done.output.split())


def test_show_writes_the_winner_of_a_record(tmp_path: Path) -> None:
    save_winner(winner(ONE), tmp_path)
    done = call("--out", str(tmp_path), "show", ONE, "--device", "test_gpu")
    assert done.exit_code == 0
    assert "def gru_cell(" in done.output
    file = tmp_path / "gates.py"
    assert call("--out", str(tmp_path), "show", ONE, "--out", str(file)).exit_code == 0
    compile(file.read_text(), str(file), "exec")
    missing = call("--out", str(tmp_path), "show", "llama3_8b_2x4096")
    assert missing.exit_code == 1
    assert "has no row of llama3_8b_2x4096" in " ".join(missing.output.split())


# --- GPUs -----------------------------------------------------------------------------------------------------------

NVIDIA = ("/dev/nvidia0", "nvidia-smi")


@pytest.mark.parametrize(
    ("facts", "kind", "said"),
    [
        (Facts("2.11.0", "12.8", names=("NVIDIA H200",)), "ready", ""),
        (Facts("2.11.0+cpu"), "no_gpu", "no GPU was found"),
        (Facts("2.11.0", "12.8"), "no_gpu", "no GPU was found"),
        (Facts("2.11.0+cpu", signs=NVIDIA), "cpu_only_torch", "--index-url https://download.pytorch.org/whl/cuXXX"),
        (Facts("2.11.0+cpu", driver_cuda=12040), "cpu_only_torch", "of a CUDA version up to 12.4"),
        (
            Facts("2.11.0", "13.0", signs=NVIDIA, driver_cuda=12040),
            "old_driver",
            "supports CUDA up to 12.4: it is too old",
        ),
        (
            Facts(
                "2.11.0",
                "12.8",
                signs=NVIDIA,
                error="The NVIDIA driver on your system is too old (found version 11040)",
            ),
            "old_driver",
            "Update the driver, or install a torch built for the driver's CUDA",
        ),
        (Facts("2.11.0", "12.8", signs=NVIDIA, driver_cuda=12020), "broken", "docker run --gpus all"),
        (Facts("2.11.0", "12.8", signs=NVIDIA, visible=""), "hidden", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        (Facts("2.11.0", None, "6.4", names=("AMD Instinct MI300X",)), "rocm", "measuring there is not supported yet"),
    ],
)
def test_each_reason_for_having_no_gpu_has_its_way_out(facts: Facts, kind: str, said: str) -> None:
    answer = diagnose(facts)
    assert answer.kind == kind
    assert said in answer.message


def test_the_facts_of_this_machine_can_be_gathered() -> None:
    assert diagnose(gpu.gather()).kind in {
        "ready",
        "no_gpu",
        "cpu_only_torch",
        "old_driver",
        "hidden",
        "broken",
        "rocm",
    }


def test_a_gpu_is_chosen_by_index_or_name() -> None:
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H200")
    assert [choose_gpu(names, wanted) for wanted in ("auto", "1", "h200", "a100")] == [0, 1, 1, 0]
    for wanted in ("2", "b200", ""):
        with pytest.raises(NoSuchGpuError, match=r"0: NVIDIA A100-SXM4-80GB, 1: NVIDIA H200"):
            choose_gpu(names if wanted else (), wanted) if wanted else choose_gpu(names, "nothing")


# --- a run, with a worker that needs no GPU --------------------------------------------------------------------------


def test_a_run_tells_what_it_found_and_where_it_is(machine: Any, tmp_path: Path) -> None:
    done = call("--gpu", "auto", "--family", "linear_cat", "--out", str(tmp_path / "out"))
    text = " ".join(done.output.split())
    assert done.exit_code == 0
    told = (
        "GB/s",
        "% of floor",
        "x eager",
        "x default",
        "Wall time, ",
        " declared -> ",
        "TUNED_TABLES=",
        "the record:",
    )
    for part in told:
        assert part in text
    assert [w.name for w in read_record("test_gpu", tmp_path / "out")] == sorted(
        p.name for p in default_problems("linear_cat")
    )
    assert not machine[1][0].alive, "the worker was ended"


@pytest.mark.parametrize("named", [False, True])
def test_a_run_into_the_package_names_what_models_import(
    machine: Any, package: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setattr(commands, "ROOT", package.parent)
    done = call("--problems", ONE, *(("--out", str(package / "winners")) if named else ()))
    assert done.exit_code == 0
    if not named:
        assert "models import it: tuned.dispatch, through tuned/tables/test_gpu.py" in done.output
        assert "the record: tuned/winners/test_gpu.json" in done.output
    assert (package / "tables" / "test_gpu.py").exists()
    assert machine[1]


def test_a_run_into_another_folder_leaves_the_tables_of_the_package_alone(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("write_table", "render_all"):
        monkeypatch.setattr(commands, name, lambda *_: pytest.fail("written into the package"))
    assert call("--problems", ONE, "--out", str(tmp_path / "out")).exit_code == 0
    assert machine[1]


def test_ctrl_c_keeps_what_was_measured_and_says_how_to_go_on(machine: Any, tmp_path: Path) -> None:
    options, workers = machine
    options["stop_after"] = 170
    named = ("--problems", "linear_cat_decoder_*,gru_projection_*", "--out", str(tmp_path / "out"))
    done = call(*named)
    assert done.exit_code == 130
    assert "Interrupted. 1 of 3 problems are done and every trial is kept: the same command goes on" in done.output
    assert not workers[0].alive
    options["stop_after"] = None
    again = call(*named)
    assert again.exit_code == 0
    assert not set(map(str, workers[1].measured[:1])) & set(map(str, workers[0].measured[-10:]))


def test_what_has_no_room_is_skipped_and_said(machine: Any, tmp_path: Path) -> None:
    machine[0]["free"] = 1000
    done = call("--problems", ONE, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1, "nothing was measured"
    assert f"skipped {ONE}: it needs" in done.output


@pytest.mark.usefixtures("machine")
def test_what_no_variant_is_legal_for_is_skipped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = Pool(12, (), {"it is too wide": 8, "it spills": 4})
    monkeypatch.setattr(run_module, "legal_pool", lambda *_: none)
    done = call("--problems", ONE, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1, "nothing was measured"
    said = f"skipped {ONE}: no variant of it is legal here: 8 x it is too wide; 4 x it spills"
    assert said in " ".join(done.output.split())


def test_a_gpu_that_is_not_there_is_refused(machine: Any) -> None:
    done = call("--gpu", "b200", "--problems", ONE)
    assert done.exit_code == 2
    assert "0: Test GPU" in done.output
    assert not machine[1]


def test_an_explicit_gpu_without_any_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0+cpu", signs=NVIDIA))
    for wanted in (("--gpu", "0"), ("--gpus", "all"), ("--storage", "postgresql://db1/tuned")):
        done = call(*wanted, "--problems", ONE)
        assert done.exit_code == 1
        assert "CPU-only build" in done.output


@pytest.mark.parametrize("wanted", [("--gpus", "all"), ("--ray", "auto")])
def test_without_ray_it_says_how_to_install_it(
    machine: Any, monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, str]
) -> None:
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0", "12.8", names=("Test GPU", "Test GPU")))
    monkeypatch.setitem(sys.modules, "ray", None)
    done = call(*wanted, "--problems", ONE)
    assert done.exit_code == 1
    assert "need Ray: pip install -c constraints.txt -e '.[tune,hosts]'" in done.output
    assert not machine[1]


@pytest.mark.usefixtures("machine")
def test_one_gpu_needs_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for wanted in (("--gpu", "auto"), ("--gpus", "all")):
        done = call(*wanted, "--problems", ONE, "--out", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
    code = "import sys, tune, generator.commands; print(sorted(m for m in sys.modules if m.split('.')[0] == 'ray'))"
    asked = python("-c", code)
    assert asked.stdout == "[]\n", asked.stderr


ALIKE = ("NVIDIA H200", "NVIDIA H200", "NVIDIA H200")
MIXED = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H200")


@pytest.mark.parametrize(
    ("names", "wanted", "indices"),
    [
        (ALIKE, "all", [0, 1, 2]),
        (ALIKE, "0,2", [0, 2]),
        (ALIKE, "2, 0,2", [0, 2]),
        (MIXED, "0,2", [0, 2]),
        (MIXED, "1", [1]),
    ],
)
def test_gpus_are_named_by_index_or_all(names: tuple[str, ...], wanted: str, indices: list[int]) -> None:
    assert choose_gpus(names, wanted) == indices


def test_gpus_of_different_models_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        NoSuchGpuError, match=r"of one model.*0: NVIDIA H200, 1: NVIDIA A100-SXM4-80GB, 2: .*--gpus 0,2"
    ):
        choose_gpus(MIXED, "all")


@pytest.mark.parametrize("wanted", ["3", "0,3", "h200", "", "0,", "auto"])
def test_gpus_that_are_not_there_are_refused(wanted: str) -> None:
    with pytest.raises(NoSuchGpuError, match=r"--gpus must be all or indices of GPUs here \(0: NVIDIA H200"):
        choose_gpus(ALIKE, wanted)


def test_gpus_of_different_models_are_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0", "12.8", names=("Test GPU", "Another")))
    done = call("--gpus", "all", "--problems", ONE)
    assert done.exit_code == 2
    assert "must be of one model" in done.output
    assert "0: Test GPU, 1: Another" in done.output
    assert not machine[1]


@pytest.mark.parametrize(
    "both", [("--gpu", "0", "--gpus", "all"), ("--gpu", "0", "--ray", "auto"), ("--gpus", "0,1", "--ray", "auto")]
)
def test_one_gpu_or_several_or_a_cluster_not_both(machine: Any, both: tuple[str, ...]) -> None:
    done = call(*both)
    assert done.exit_code == 2
    assert f"{both[0]} {both[1]} and {both[2]} {both[3]} exclude each other" in done.output
    assert not machine[1]


def test_trials_are_kept_in_a_database(machine: Any, tmp_path: Path) -> None:
    storage = ("--storage", f"sqlite:///{tmp_path}/trials.db", "--problems", "linear_cat_decoder_1", "--trials", "6")
    first = call(*storage, "--out", str(tmp_path / "first"))
    assert first.exit_code == 0, first.output
    assert machine[1][0].measured
    assert not (tmp_path / "cache" / "trials").exists()
    second = call(*storage, "--out", str(tmp_path / "second"))
    assert second.exit_code == 0, second.output
    assert not machine[1][1].measured
    assert read_record("test_gpu", tmp_path / "second") == read_record("test_gpu", tmp_path / "first")


def test_a_storage_that_cannot_be_reached_is_said_before_a_gpu_is_woken(machine: Any) -> None:
    pytest.importorskip("psycopg")
    done = call("--storage", f"postgresql://tuner:s3cret@127.0.0.1:{free_port()}/tuned", "--problems", ONE)
    assert done.exit_code == 1
    assert "cannot be used" in done.output
    assert "s3cret" not in done.output
    assert not machine[1]
