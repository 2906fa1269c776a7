"""The command lines of the programs that show results: what they refuse, and how they end when nobody reads on."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from benchmarks import arguments, random_gru
from tests.fuzz import __main__ as fuzz

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "given", "why"),
    [
        ("summary", ("--results", "nope.json"), "argument --results: there is no file 'nope.json'"),
        ("summary", ("--write", "nope.md"), "argument --write: there is no file 'nope.md'"),
        ("table", ("nope.json",), "argument results: there is no file 'nope.json'"),
        ("table", ("--write", "nope.md"), "argument --write: there is no file 'nope.md'"),
        ("plot", ("nope.json",), "argument results: there is no file 'nope.json'"),
        ("random_tiles", ("nope",), "argument FILE: there is no file 'nope'"),
        ("pages", ("--results", "nope"), "argument --results: there is no folder 'nope'"),
        *(
            (program, ("--out", "tests"), "argument --out: 'tests' is a folder, not a file")
            for program in ("append", "mla", "qk_norm", "summary")
        ),
        (
            "summary",
            ("--out", "setup.py/new"),
            f"argument --out: 'setup.py/new' cannot be written: '{ROOT}/setup.py' is no folder",
        ),
        ("cpu_calls", ("--rounds", "0"), "argument --rounds: must be at least 1, got 0"),
        ("cpu_calls", ("--rounds", "many"), "argument --rounds: invalid count value: 'many'"),
    ],
)
def test_a_wrong_argument_is_told_in_one_sentence(
    program: str, given: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{program}").main(given)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {why}")


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "out.json"
    assert arguments.output(str(path)) == path, "its folder is made"
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="permission denied"):
        arguments.output(str(path))


@pytest.mark.parametrize("program", ["table", "plot", "summary --results", "random_tiles"])
@pytest.mark.parametrize(
    "content", ["", '{"rows": [', "[]", "{}", '{"rows": 1}', '{"rows": [{"peers": {}}]}', "\x80", "[" * 10**5]
)
def test_a_file_of_no_results_or_others_is_told_in_one_sentence(
    program: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(content, encoding="latin-1")
    name, *option = program.split()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main([*option, str(path)])
    assert end.value.code == 2
    assert f"{str(path)!r} is no file of results whose rows have" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1"])
def test_a_time_that_no_loop_can_keep_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments.duration("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be a number above 0, got {text}"):
        arguments.duration(text)
    monkeypatch.setattr(sys, "argv", ["", f"--seconds={text}"])
    for read in (fuzz.arguments, functools.partial(random_gru.options_of, "")):
        with pytest.raises(SystemExit) as end:
            read()
        assert end.value.code == 2


@pytest.mark.parametrize(
    ("program", "option", "why"),
    [
        ("gru", "--minutes=nan", "must be a number from 0 on, got nan"),
        ("rope", "--minutes=-1", "must be a number from 0 on, got -1"),
        ("verify", "--minutes=nan", "must be a number above 0, got nan"),
        ("verify", "--minutes=inf", "must be a number above 0, got inf"),
        ("random_gru", "--shapes=0", "must be at least 1, got 0"),
        ("random_gru", "--out=tests", "'tests' is a folder, not a file"),
        ("kernel_tuner", "--seeds=0", "must be at least 1, got 0"),
    ],
)
def test_numbers_that_would_leave_nothing_to_measure_are_refused(
    program: str, option: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", option])
    module = importlib.import_module(f"benchmarks.{program}")
    with pytest.raises(SystemExit) as end:
        module.options_of("") if program == "random_gru" else module.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: argument {option.partition('=')[0]}: {why}")


@pytest.mark.parametrize("option", ["--calls=0", "--calls=-1", "--classes=-1", "--repeats=0"])
def test_a_fuzz_of_no_calls_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", option])
    with pytest.raises(SystemExit) as end:
        fuzz.arguments()
    assert end.value.code == 2
    assert "must be at least 1, got" in capsys.readouterr().err


def test_files_without_a_call_whose_tile_was_measured_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").write_text('{"rows": []}')
    with pytest.raises(SystemExit) as end:
        importlib.import_module("benchmarks.random_tiles").main([str(tmp_path / "empty.json")])
    assert end.value.code == 2
    assert "the default tile of no call was measured" in capsys.readouterr().err


def test_the_code_of_a_program_is_passed_on() -> None:
    assert [arguments.ended(lambda code=code: code) for code in (None, 0, 3)] == [0, 0, 3]  # type: ignore[misc]
    with pytest.raises(SystemExit, match="why"):
        arguments.ended(lambda: sys.exit("why"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        ("table --all", ""),
        ("table --all", "1"),
        ("cpu_calls --rounds 1", ""),
        ("summary --results benchmarks/results/summary/nvidia_h200.json", ""),
    ],
)
def test_a_program_whose_output_nobody_reads_ends_without_a_word(command: str, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *f"benchmarks.{command}".split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
