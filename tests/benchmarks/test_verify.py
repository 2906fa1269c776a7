"""Verification: suites that passed are not run again, and one that fails, hangs or is interrupted costs no other suite."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import verify
from benchmarks.verify import CALLS, CLASSES, Outcome, Step, fuzzed, junit
from generator.places import ROOT
from generator.publishing import verified
from generator.publishing.verified import SUITES, not_verified, read_verified

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.processes

ENVIRONMENT = {"device": "test_gpu", "torch": "2.11.0"}
SOURCES = "0123456789ab"
LIMIT = 600.0  # seconds, far more than anything here takes


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the digest, which has separate tests."""
    for module in (verify, verified):
        monkeypatch.setattr(module, "digest", lambda *_: SOURCES)


def counts(path: Path) -> Outcome:
    """Read the result file that a command of these tests leaves."""
    passed, failed, skipped = json.loads(path.read_text())
    return Outcome(passed, failed, skipped, ("a test",) * failed)


def step(folder: Path, name: str, program: str) -> Step:
    result = folder / f"{name}.result"
    begin = f"import pathlib, sys; result = pathlib.Path({str(result)!r}); "
    return Step((sys.executable, "-c", begin + program), result, counts)


def passing(folder: Path, name: str) -> Step:
    """A step that passes, and adds a dot to the file ``name`` for each run."""
    ran = (
        f"ran = pathlib.Path({str(folder / name)!r}); ran.write_text((ran.read_text() if ran.exists() else '') + '.'); "
    )
    return step(folder, name, ran + "result.write_text('[3, 0, 1]')")


def runs(folder: Path) -> dict[str, int]:
    return {name: len((folder / name).read_text()) for name in SUITES if (folder / name).exists()}


def call(folder: Path, chosen: dict[str, Sequence[Step]], **rest: Any) -> int:
    given = {"out": folder / "out", "cache": folder, "shipped": folder / "shipped", "limit_s": LIMIT, **rest}
    return verify.verify(given.pop("environment", ENVIRONMENT), chosen, **given)


def of(record: Path) -> dict[str, tuple[int, int, int]]:
    return {s.name: (s.passed, s.failed, s.skipped) for s in read_verified(record / "test_gpu.json").suites}


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "wanted", "why"),
    [
        ("result.write_text('[3, 0, 1]')", (3, 0, 1), None),
        ("result.write_text('[3, 2, 1]'); sys.exit(1)", (3, 2, 1), "a test"),
        ("result.write_text('[3, 0, 1]'); sys.exit(2)", (3, 1, 1), "exit code 2"),
        ("sys.exit(0)", (0, 1, 0), "exit code 0, and no result"),
        ("sys.exit(3)", (0, 1, 0), "exit code 3, and no result"),
        ("result.write_text('[3, 0')", (0, 1, 0), "exit code 0, and no result"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (0, 1, 0), "exit code -9"),
    ],
)
def test_a_command_that_fails_in_any_way_has_a_failure(
    tmp_path: Path, program: str, wanted: tuple[int, int, int], why: str | None
) -> None:
    (tmp_path / "one.result").write_text("[9, 0, 0]")  # left by an earlier run: it must not be taken for this run's
    found = verify.run_step(step(tmp_path, "one", program), tmp_path / "log", LIMIT)
    assert (found.passed, found.failed, found.skipped) == wanted
    assert found.names == () if why is None else why in found.names[0]


def test_no_option_of_a_user_narrows_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTEST_ADDOPTS="-k one" let one passed test stand for a whole suite."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k one")
    monkeypatch.setenv("TUNED_TABLES", "/elsewhere")
    program = "import os; left = {'PYTEST_ADDOPTS', 'TUNED_TABLES'} & set(os.environ); result.write_text(f'[1, {len(left)}, 0]')"
    found = verify.run_step(step(tmp_path, "one", program), tmp_path / "log", LIMIT)
    assert (found.passed, found.failed) == (1, 0)


def test_a_command_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"  # the command's child holds it open
    os.mkfifo(fifo)
    child = f"import time; held = open({str(fifo)!r}, 'w'); time.sleep(600)"
    program = f"import subprocess; child = subprocess.Popen([sys.executable, '-c', {child!r}]); child.wait()"
    wait, reading = subprocess.Popen.wait, []

    def hung(self: Any, timeout: float | None = None) -> int:
        if timeout == LIMIT:
            reading.append(fifo.open("rb"))  # returns once the child is there
            raise subprocess.TimeoutExpired(self.args, timeout)
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", hung)
    found = verify.run_step(step(tmp_path, "one", program), tmp_path / "log", LIMIT)
    assert (found.passed, found.failed) == (0, 1)
    assert "did not end in 600 s" in found.names[0]
    with reading[0] as end:
        assert select.select([end], [], [], 60)[0], "the child is still there"
        assert end.read() == b""


def test_the_output_of_every_command_is_in_the_log_of_its_suite(tmp_path: Path, capsys: Any) -> None:
    steps = [step(tmp_path, name, f"print('this is {name}'); result.write_text('[1, 1, 0]')") for name in ("a", "b")]
    (tmp_path / "gpu.log").write_text("of an earlier run")
    suite = verify.run_suite("gpu", steps, tmp_path / "gpu.log", LIMIT)
    assert (suite.passed, suite.failed) == (2, 2)
    log = (tmp_path / "gpu.log").read_text()
    assert "this is a" in log
    assert "this is b" in log
    assert "earlier" not in log
    assert "  a test\n  a test" in capsys.readouterr().out


# What is kept ---------------------------------------------------------------------------------------------------------


def test_what_passed_is_not_run_again_until_asked_or_another_environment(tmp_path: Path) -> None:
    chosen = {name: [passing(tmp_path, name)] for name in SUITES}
    assert call(tmp_path, dict(list(chosen.items())[:2])) == 0
    assert runs(tmp_path) == {"plain": 1, "gpu": 1}
    assert "suite fuzz was not run" in str(not_verified("test_gpu", tmp_path / "out"))
    assert call(tmp_path, chosen) == 0
    assert runs(tmp_path) == dict.fromkeys(SUITES, 1)
    assert not_verified("test_gpu", tmp_path / "out") is None
    record = json.loads((tmp_path / "out" / "test_gpu.json").read_text())
    assert (record["environment"], record["kernels"]) == (ENVIRONMENT, SOURCES)
    assert call(tmp_path, {"fuzz": chosen["fuzz"]}, again=True) == 0
    assert call(tmp_path, {"plain": chosen["plain"]}, environment={**ENVIRONMENT, "torch": "2.12.0"}) == 0
    assert runs(tmp_path) == {"plain": 2, "gpu": 1, "fuzz": 2, "sanitizers": 1}
    assert list(of(tmp_path / "out")) == ["plain"], "the others ran in another environment"


def test_a_suite_that_failed_is_run_again_and_the_others_after_it_are_run(tmp_path: Path) -> None:
    failing = step(tmp_path, "plain", "result.write_text('[3, 2, 0]'); sys.exit(1)")
    chosen = {"plain": [failing], "gpu": [passing(tmp_path, "gpu")]}
    assert call(tmp_path, chosen) == 1
    assert of(tmp_path / "out") == {"plain": (3, 2, 0), "gpu": (3, 0, 1)}
    assert call(tmp_path, {**chosen, "plain": [passing(tmp_path, "plain")]}) == 0
    assert runs(tmp_path) == {"plain": 1, "gpu": 1}
    assert of(tmp_path / "out") == {"plain": (3, 0, 1), "gpu": (3, 0, 1)}


def test_a_suite_that_ran_nothing_did_not_pass(tmp_path: Path) -> None:
    nothing = step(tmp_path, "sanitizers", "result.write_text('[0, 0, 36]')")
    assert call(tmp_path, {"sanitizers": [nothing]}) == 1


def test_a_machine_goes_on_with_what_the_checkout_brings(tmp_path: Path) -> None:
    chosen = {name: [passing(tmp_path, name)] for name in SUITES}
    assert call(tmp_path, {"fuzz": chosen["fuzz"]}, out=tmp_path / "shipped") == 0
    assert call(tmp_path, {"plain": chosen["plain"]}) == 0
    assert call(tmp_path, chosen) == 0
    assert runs(tmp_path) == dict.fromkeys(SUITES, 1)
    assert set(of(tmp_path / "out")) == set(SUITES)


def test_commands_side_by_side_keep_what_each_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_suite = verify.run_suite

    def with_a_neighbour(name: str, *rest: Any) -> Any:
        if name == "plain":
            assert call(tmp_path, {"gpu": [passing(tmp_path, "gpu")]}) == 0
        return run_suite(name, *rest)

    monkeypatch.setattr(verify, "run_suite", with_a_neighbour)
    assert call(tmp_path, {"plain": [passing(tmp_path, "plain")]}) == 0
    assert of(tmp_path / "out") == {"plain": (3, 0, 1), "gpu": (3, 0, 1)}


def test_a_broken_record_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "test_gpu.json").write_text('{"suites": [')
    assert call(tmp_path, {"plain": [passing(tmp_path, "plain")]}) == 0
    assert of(tmp_path / "out") == {"plain": (3, 0, 1)}


def test_sources_that_change_meanwhile_were_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([SOURCES, "ba9876543210"])
    monkeypatch.setattr(verify, "digest", lambda: next(said))
    assert call(tmp_path, {"plain": [passing(tmp_path, "plain")]}) == 1
    assert not (tmp_path / "out").exists()


def test_an_interrupted_suite_is_ended_and_what_ended_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []
    stop, wait = verify.stop, subprocess.Popen.wait

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if any("while True" in part for part in self.args) and timeout == LIMIT:
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    monkeypatch.setattr(verify, "stop", lambda process: (stop(process), stopped.append(process.poll())))
    monkeypatch.setattr(verify.time, "monotonic", lambda: 0.0)
    endless = step(tmp_path, "gpu", "while True: pass")
    chosen = {"plain": [passing(tmp_path, "plain")], "gpu": [endless], "fuzz": [passing(tmp_path, "fuzz")]}
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path, chosen)
    assert of(tmp_path / "out") == {"plain": (3, 0, 1)}
    assert stopped[0] == 0
    assert stopped[1], "it goes on, or ended by itself"  # -2, or 1 if SIGINT arrived while Python started


def left_behind(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let this program stand for the command that runs a suite beside another."""
    monkeypatch.setattr(verify, "COMMAND", (sys.executable, "-c", program))


def test_a_suite_beside_another_is_a_command_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_behind(
        monkeypatch, f"import pathlib, sys; pathlib.Path({str(tmp_path / 'told')!r}).write_text(str(sys.argv[1:]))"
    )
    with verify.beside(["sanitizers"], ["--seed=7"]) as started:
        assert [process.wait() for process in started] == [0]
    assert (tmp_path / "told").read_text() == "['--seed=7', '--suite=sanitizers', '--part']"


def test_what_comes_next_waits_for_all_that_runs() -> None:
    assert verify.in_turns(SUITES) == [("plain", ["sanitizers"]), ("gpu", []), ("fuzz", [])]
    assert verify.in_turns(["gpu", "sanitizers"]) == [("gpu", []), ("sanitizers", [])]


def test_a_suite_beside_another_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left_behind(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt), verify.beside(["sanitizers"], []) as started:
        raise KeyboardInterrupt
    assert started[0].poll() is not None


def test_the_next_suite_begins_when_what_ran_beside_the_last_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    left_behind(monkeypatch, "pass")
    wait = subprocess.Popen.wait

    def ended(self: Any, timeout: float | None = None) -> int:
        if "--part" in self.args:
            order.append("sanitizers")
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", ended)
    monkeypatch.setattr(verify, "verify", lambda _environment, chosen, **_: order.extend(chosen) or 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(verify, "here", lambda: ENVIRONMENT)
    monkeypatch.setattr(verify.signal, "signal", lambda *_: None)
    verify.main([f"--out={tmp_path / 'out'}", f"--cache={tmp_path / 'cache'}"])
    assert order.index("sanitizers") < order.index("gpu")


@pytest.mark.parametrize(("code", "wanted"), [(0, 0), (1, 1), (130, 1)])
def test_a_suite_that_fails_beside_another_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, code: int, wanted: int
) -> None:
    left_behind(monkeypatch, f"raise SystemExit({code})")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(verify, "here", lambda: ENVIRONMENT)
    monkeypatch.setattr(verify.signal, "signal", lambda *_: None)
    monkeypatch.setattr(verify, "suites", lambda *_, **__: {name: [passing(tmp_path, name)] for name in SUITES})
    folders = [f"--out={tmp_path / 'out'}", f"--cache={tmp_path / 'cache'}"]
    assert verify.main(folders) == wanted
    assert runs(tmp_path) == {"plain": 1, "gpu": 1, "fuzz": 1}
    assert "suite sanitizers was not run" in capsys.readouterr().out.splitlines()[-1]


# On several GPUs ------------------------------------------------------------------------------------------------------


def test_suites_are_dealt_to_gpus_the_longest_first() -> None:
    assert set(verify.LONGEST) == set(SUITES)
    assert verify.dealt(SUITES, 2) == [["fuzz", "plain"], ["gpu", "sanitizers"]]
    assert verify.dealt(SUITES, 8) == [["fuzz"], ["gpu"], ["plain"], ["sanitizers"]]
    assert verify.dealt(["plain", "gpu"], 4) == [["gpu"], ["plain"]]


@pytest.mark.parametrize(("code", "wanted"), [(0, 0), (1, 1)])
def test_each_gpu_runs_its_suites_in_a_command_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, wanted: int
) -> None:
    told = f"open({str(tmp_path)!r} + '/gpu-' + os.environ['CUDA_VISIBLE_DEVICES'], 'w').write(' '.join(sys.argv[1:]))"
    left_behind(monkeypatch, f"import os, sys\n{told}\nraise SystemExit({code})")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(verify, "here", lambda: ENVIRONMENT)
    monkeypatch.setattr(verify.signal, "signal", lambda *_: None)
    folders = [f"--out={tmp_path / 'out'}", f"--cache={tmp_path / 'cache'}"]
    assert verify.main([*folders, "--gpus=all", "--cores=32", "--seed=7"]) == wanted
    first, second = ((tmp_path / f"gpu-{name}").read_text() for name in "46")
    assert first.endswith("--seed=7 --cores=16 --suite=fuzz --suite=plain --part")
    assert second.endswith("--cores=16 --suite=gpu --suite=sanitizers --part")


def test_the_plain_tests_have_half_of_the_cores_where_each_suite_has_a_gpu() -> None:
    shares = verify.dealt(list(verify.SUITES), 4)
    assert {share[0]: verify.cores_of(share, 64, len(shares)) for share in shares} == {
        "fuzz": 16,
        "gpu": 16,
        "plain": 32,
        "sanitizers": 16,
    }
    assert verify.cores_of(list(verify.SUITES), 64, 1) == 64


@pytest.mark.parametrize(("apart", "processes"), [(False, 14), (True, 30)])
def test_many_plain_processes_are_for_a_gpu_that_nothing_else_uses(
    tmp_path: Path, *, apart: bool, processes: int
) -> None:
    every = verify.suites(tmp_path, 32, 7, apart=apart)
    assert f"-n{processes}" in every["plain"][0].command
    assert "-n14" in every["gpu"][0].command


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert verify.main(["--gpus=3", f"--cache={tmp_path}"]) == 1
    assert capsys.readouterr().out == "--gpus 3, and PyTorch sees 2 here: ask for no more, or for all\n"


# What the suites leave ------------------------------------------------------------------------------------------------

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_wrong_as_known(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
@pytest.mark.parametrize("n", [1, 2])
def test_many(n): pass
"""


def test_pytests_own_result_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=found.xml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    found = junit(tmp_path / "found.xml")
    assert (found.passed, found.failed, found.skipped) == (3, 2, 2)
    assert found.names == ("test_one::test_fails", "test_one::test_error")


@pytest.mark.parametrize(
    ("changes", "wanted", "said"),
    [
        ({}, (CALLS, 0), []),
        ({"wrong": 3}, (CALLS - 3, 3), ["3 calls are wrong, seed 7"]),
        (
            {"wrong": 1, "failures": [{"index": 12, "message": "k is wrong\nsee"}]},
            (CALLS - 1, 1),
            ["1 calls are wrong, seed 7", "case 12: k is wrong"],
        ),
        ({"calls": 10}, (10, 1), [f"10 calls of {CLASSES} classes"]),
        ({"classes": 10}, (CALLS, 1), [f"{CALLS} calls of 10 classes"]),
    ],
)
def test_the_result_of_the_fuzz_is_read(
    tmp_path: Path, changes: dict[str, Any], wanted: tuple[int, int], said: list[str]
) -> None:
    content = {"calls": CALLS, "classes": CLASSES, "wrong": 0, "seed": 7, "seconds": 1.5, **changes}
    (tmp_path / "fuzz.json").write_text(json.dumps(content))
    found = fuzzed(tmp_path / "fuzz.json")
    assert (found.passed, found.failed) == wanted
    assert len(found.names) == len(said)
    assert all(text in name for text, name in zip(said, found.names, strict=True))


def test_the_suites_are_those_of_the_record_and_no_test_is_in_none(tmp_path: Path) -> None:
    every = verify.suites(tmp_path, 16, 7)
    assert tuple(every) == SUITES
    assert "-n14" in every["plain"][0].command
    assert {"--seed=7", "--processes=14"} <= set(every["fuzz"][0].command)
    assert "--processes=14" in verify.suites(tmp_path, 64, 7)["fuzz"][0].command, "all have to fit on one GPU"
    chosen = [one.command[-3:] for name in ("gpu", "sanitizers") for one in every[name]]
    marks = ("gpu and not alone", "gpu and alone", "sanitizer")
    assert chosen == [("tests/gpu", "-m", mark) for mark in marks]
    # Samples in other folders run as plain tests too. Tests with these marks run in no other suite.
    marked = re.compile(r"^[^#\n]*\bpytest\.mark\.(gpu|alone|sanitizer)\b", re.MULTILINE)
    found = [path for path in (ROOT / "tests").rglob("*.py") if marked.search(path.read_text())]
    assert {path.parent for path in found} == {ROOT / "tests" / "gpu"}, "the suites would not find them elsewhere"
    assert all("-n0" in one.command for one in verify.suites(tmp_path, 2, 7)["gpu"]), "two cores have none to spare"


def test_without_a_gpu_it_says_what_was_not_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert verify.main(["--suite", "gpu", "--suite", "plain"]) == 1
    assert "PyTorch sees none here: not run were plain, gpu" in capsys.readouterr().out


def test_the_makefile_runs_the_gpu_tests_as_the_verification_does(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for one in verify.suites(tmp_path, 16, 7)["gpu"]:
        assert f'pytest tests/gpu -m "{one.command[-1]}"' in makefile
    assert "-n $(GPU_PROCESSES) --dist worksteal" in makefile
    assert f"GPU_PROCESSES ?= {verify.PROCESSES}\n" in makefile
