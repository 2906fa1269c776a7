"""Verify on a GPU all that ships: plain tests, GPU tests, the fuzz, the sanitizers; record what passed, of which sources.

`python -m benchmarks.verify` writes benchmarks/results/verified/<device>.json after each suite. A suite that passed
with these sources and this environment is not run again, so several commands may share the work: one after the other,
on several GPUs of one machine at once, or on several machines if the record is copied between them. `python tune.py
--check` compares the record with the sources here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks import shipped
from benchmarks.arguments import duration
from benchmarks.gpus import number_of_gpus, refusal, visible
from generator.disk import folder_lock, write_if_different
from generator.places import ROOT, cache_folder
from generator.publishing.verified import (
    FOLDER,
    SUITES,
    Suite,
    Verified,
    VerifiedError,
    digest,
    not_verified,
    read_verified,
    verified_path,
    verified_text,
)

PROCESSES = 14
PLAIN_PROCESSES = 40  # if they have their own GPU: few of them use it, and each process takes some of its memory
SANITIZED_PROCESSES = 12  # one a share
SPARE_CORES = 2  # for the driver's threads and this process
# Suite -> the suite that it runs beside, by its own command: the latter uses the GPU only for samples.
BESIDE = {"sanitizers": "plain"}
LONGEST = ("fuzz", "gpu", "plain", "sanitizers")  # of the suites, on an H100
COMMAND = (sys.executable, "-m", "benchmarks.verify")
CALLS, CLASSES = 100_000, 2_000  # of the fuzz
LIMIT_MINUTES = 20.0  # of one suite: a suite that takes longer hangs. All take 12 on an H200 with 16 cores
HANGING_SECONDS = 200  # of one test
STOP_SECONDS = 15.0  # for a suite that is interrupted to end its own processes
NAMES_SHOWN = 20
INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one command."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    names: tuple[str, ...] = ()  # of failed tests, or reasons

    def __add__(self, other: Outcome) -> Outcome:
        counts = (self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)
        return Outcome(*counts, self.names + other.names)


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a suite; ``read`` gets its outcome from the file that it leaves."""

    command: tuple[str, ...]
    result: Path
    read: Callable[[Path], Outcome]


# The suites -----------------------------------------------------------------------------------------------------------


def suites(cache: Path, cores: int, seed: int, *, apart: bool = False) -> dict[str, tuple[Step, ...]]:
    """Suite -> its commands, on a machine with so many cores. ``seed`` is for the fuzz; ``apart``: each has its own GPU."""

    def fitting(processes: int) -> int:
        return max(1, min(processes, cores - SPARE_CORES))

    def tests(name: str, processes: int, *arguments: str) -> Step:
        processes = fitting(processes)
        result = cache / f"{name}.xml"
        spread = (f"-n{processes}", "--dist=worksteal") if processes > 1 else ("-n0",)
        # For the log: where a test hangs, and which tests take longest.
        told = ("-o", f"faulthandler_timeout={HANGING_SECONDS}", "--durations=25")
        command = (sys.executable, "-m", "pytest", "-q", *told, *spread, f"--junit-xml={result}", *arguments)
        return Step(command, result, junit)

    fuzz = cache / "fuzz.json"
    # More processes do not fit on every GPU: each has a context, kernels, and library workspaces for each stream.
    drawn = (
        f"--calls={CALLS}",
        f"--classes={CLASSES}",
        f"--seed={seed}",
        f"--processes={fitting(PROCESSES)}",
        f"--out={fuzz}",
    )
    return {
        "plain": (tests("plain", PLAIN_PROCESSES if apart else PROCESSES),),
        "gpu": (
            # Tests marked gpu_sample are among the plain tests.
            tests("gpu", PROCESSES, "tests/gpu", "-m", "gpu and not alone"),
            tests("gpu_alone", 1, "tests/gpu", "-m", "gpu and alone"),
        ),
        "fuzz": (Step((sys.executable, "-m", "tests.fuzz", *drawn), fuzz, fuzzed),),
        "sanitizers": (tests("sanitizers", SANITIZED_PROCESSES, "tests/gpu", "-m", "sanitizer"),),
    }


def junit(path: Path) -> Outcome:
    """The outcome from pytest's JUnit XML."""
    (suite,) = ET.parse(path).getroot().iter("testsuite")  # noqa: S314 - of our own process
    total, failures, errors, skipped = (int(suite.get(n, 0)) for n in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    names = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    )
    return Outcome(max(0, total - failed - skipped), failed, skipped, names)


def fuzzed(path: Path) -> Outcome:
    """The outcome of the fuzz: its right calls count as passed; too few calls, or too few classes of them, as one failure."""
    content = json.loads(path.read_text(encoding="utf-8"))
    calls, classes, wrong, seed = (int(content[name]) for name in ("calls", "classes", "wrong", "seed"))
    cases = tuple(f"case {one['index']}: {one['message'].splitlines()[0]}" for one in content.get("failures", ()))
    found = Outcome(calls - wrong, wrong, 0, (f"{wrong} calls are wrong, seed {seed}", *cases) if wrong else ())
    if calls < CALLS or classes < CLASSES:
        found += Outcome(failed=1, names=(f"{calls} calls of {classes} classes, not {CALLS} of {CLASSES}",))
    return found


# Running --------------------------------------------------------------------------------------------------------------


def run_step(step: Step, log: Path, limit_s: float) -> Outcome:
    """Run a command to its end and append its output to the log; a command that fails in any way has at least one failure."""
    step.result.unlink(missing_ok=True)
    with log.open("ab") as file:
        file.write(f"$ {' '.join(step.command)}\n".encode())
        file.flush()
        code = _ended(step.command, file, limit_s)
    if code is None:
        return Outcome(failed=1, names=(f"it did not end in {limit_s:.0f} s",))
    try:
        found = step.read(step.result)
    except (OSError, ValueError, KeyError, ET.ParseError) as error:
        return Outcome(failed=1, names=(f"exit code {code}, and no result: {type(error).__name__}",))
    return found if code == 0 or found.failed else found + Outcome(failed=1, names=(f"exit code {code}",))


def _ended(command: Sequence[str], log: Any, limit_s: float) -> int | None:
    """The exit code of a command, or None if it had to be ended; its processes are all ended."""
    process = subprocess.Popen(  # noqa: S603 - our own words
        command,
        cwd=ROOT,
        env=shipped.environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], wait_s: float = STOP_SECONDS) -> None:
    """End a process and its group: by SIGINT, so that it can end its own processes; then, or at another Ctrl-C, by SIGKILL."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=wait_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_suite(name: str, steps: Sequence[Step], log: Path, limit_s: float) -> Suite:
    """Run a suite, print its failures, and return how it ended."""
    print(f"{name}: running, {log} has its output", flush=True)
    log.unlink(missing_ok=True)
    started, found = time.monotonic(), Outcome()
    for step in steps:
        found += run_step(step, log, limit_s - (time.monotonic() - started))
    suite = Suite(name, found.passed, found.failed, found.skipped, round(time.monotonic() - started, 1))
    print(told(suite), flush=True)
    for failed in found.names[:NAMES_SHOWN]:
        print(f"  {failed}")
    if len(found.names) > NAMES_SHOWN:
        print(f"  and {len(found.names) - NAMES_SHOWN} more")
    return suite


def told(suite: Suite) -> str:
    """A suite as a line."""
    return (
        f"{suite.name}: {suite.passed} passed, {suite.failed} failed, {suite.skipped} skipped in {suite.seconds:.0f} s"
    )


# The record -----------------------------------------------------------------------------------------------------------


def known(device: str, environment: Mapping[str, Any], kernels: str, folders: Sequence[Path]) -> dict[str, Suite]:
    """The suites that ran with these sources in this environment; each from the first folder that has it."""
    found: dict[str, Suite] = {}
    for folder in folders:
        try:
            record = read_verified(verified_path(device, folder))
        except VerifiedError:
            continue
        if (record.environment, record.kernels) == (environment, kernels):
            found = {suite.name: suite for suite in record.suites if suite.name in SUITES} | found
    return found


def verify(  # noqa: PLR0913 - what is run, and where things are
    environment: Mapping[str, Any],
    chosen: Mapping[str, Sequence[Step]],
    *,
    out: Path,
    cache: Path,
    again: bool = False,
    limit_s: float = 60 * LIMIT_MINUTES,
    shipped: Path = FOLDER,
) -> int:
    """Run the suites that have not passed yet, and write the record after each: 0, or 1 if a suite failed."""
    device, kernels = environment["device"], digest()
    done = known(device, environment, kernels, (out, shipped))
    for name, steps in chosen.items():
        before = done.get(name)
        if before is not None and before.passed and not before.failed and not again:
            print(f"{told(before)}, before; --again runs it again")
            continue
        suite = run_suite(name, steps, cache / f"{name}.log", limit_s)
        if digest() != kernels:
            print(f"the sources changed while {name} ran: it says nothing of either, and is not kept")
            return 1
        with folder_lock(out):  # a command for another suite, on another GPU, may have added that suite
            done = known(device, environment, kernels, (out, shipped)) | {name: suite}
            record = Verified(dict(environment), kernels, tuple(done.values()))
            write_if_different(verified_path(device, out), verified_text(record))
    return 1 if any(done[name].failed or not done[name].passed for name in chosen) else 0


def in_turns(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The turns, one after another: a suite, and the suites that run beside it. The next turn begins when all have ended."""
    apart = {name: BESIDE[name] for name in names if BESIDE.get(name) in names}
    return [(name, [other for other in apart if apart[other] == name]) for name in names if name not in apart]


def dealt(names: Sequence[str], gpus: int) -> list[list[str]]:
    """The suites of each of so many GPUs, dealt out in turn, the longest first."""
    order = sorted(names, key=LONGEST.index)
    return [order[first::gpus] for first in range(min(gpus, len(order)))]


def beside(
    names: Sequence[str], arguments: Sequence[str]
) -> contextlib.AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """Start commands that run these suites meanwhile; they are ended when the block ends."""
    return _meanwhile([([*arguments, f"--suite={name}"], {}) for name in names])


def on_each(
    shares: Sequence[Sequence[str]], arguments: Sequence[str], cores: int
) -> contextlib.AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """Start commands that run each share of the suites on its own GPU; they are ended when the block ends."""
    alone = visible(len(shares))
    return _meanwhile(
        [
            (
                [*arguments, f"--cores={cores_of(share, cores, len(shares))}", *(f"--suite={name}" for name in share)],
                gpu,
            )
            for share, gpu in zip(shares, alone, strict=True)
        ]
    )


def cores_of(share: Sequence[str], cores: int, shares: int) -> int:
    """How many of a machine's cores a share of the suites may use. Few plain tests wait for a GPU; the other suites do."""
    return cores // (2 if shares > 1 and "plain" in share else shares)


@contextlib.contextmanager
def _meanwhile(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start these commands, each with further environment variables; they are ended when the block ends."""
    started = [
        subprocess.Popen(  # noqa: S603 - our own words
            (*COMMAND, *arguments, "--part"),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **more},
        )
        for arguments, more in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            stop(process)


def here() -> dict[str, Any]:
    """The environment that the outcomes depend on, besides the sources."""
    from generator.measuring.environment import environment  # noqa: PLC0415 - imports torch

    found = environment(0)
    del found["method"], found["timing"]  # nothing is timed
    return {**found, "python": platform.python_version()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 where there is no GPU or a suite failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this one; may be given several times")
    parser.add_argument("--again", action="store_true", help="run also what passed before")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the record; a record in it is gone on with")
    parser.add_argument("--cache", type=Path, help="folder of the logs; .cache/verified")
    parser.add_argument("--minutes", type=duration, default=LIMIT_MINUTES, help="end a suite after this many, as hung")
    parser.add_argument("--seed", type=int, help="of the fuzz; a new one each time")
    parser.add_argument("--gpus", type=number_of_gpus, default=1, help="how many run suites at once, or all")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)  # another command tells the end
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = [name for name in SUITES if name in (options.suite or SUITES)]

    import torch  # noqa: PLC0415 - --help must not wait for it

    if not torch.cuda.is_available():
        print(f"verifying needs a GPU, and PyTorch sees none here: not run were {', '.join(names)}")
        return 1
    cache = (options.cache or cache_folder("verified")).resolve()
    cache.mkdir(parents=True, exist_ok=True)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    every = suites(cache, options.cores, seed, apart=options.part)
    gpus = options.gpus or torch.cuda.device_count()
    if why := refusal(gpus, torch.cuda.device_count()):
        print(why)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # suites run in their own sessions, and end with this
    rest = [f"--out={options.out.resolve()}", f"--cache={cache}", f"--minutes={options.minutes}", f"--seed={seed}"]
    rest += ["--again"] if options.again else []
    environment, out, failed = here(), options.out.resolve(), False
    settings: dict[str, Any] = {
        "out": out, "cache": cache, "again": options.again, "limit_s": 60 * options.minutes,
    }  # fmt: skip
    try:
        if gpus > 1:
            with on_each(dealt(names, gpus), rest, options.cores) as started:
                codes = [process.wait() for process in started]
            failed, names = any(codes), []
        for name, others in in_turns(names):
            with beside(others, rest) as started:
                failed |= bool(verify(environment, {name: every[name]}, **settings))
                codes = [process.wait() for process in started]
                failed |= any(codes)
    except KeyboardInterrupt:
        print("interrupted: what had ended is kept, and the same command goes on with the rest")
        return INTERRUPTED
    if not options.part:
        print(not_verified(environment["device"], out) or f"{environment['device']}: verified, {digest()}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
