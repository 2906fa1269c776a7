"""python -m tests.faults [NAME ...]: put each fault into a copy of the tree, and see that its tests fail there.

First the named tests must pass without a fault. A fault is caught if one of its tests fails; a test that cannot be
collected, a fixture that breaks or a run that hangs says nothing. Exit code 1 if a fault is not caught.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.listed import FAULTS, ROOT, Fault, faulty

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LEFT_OUT = (".git", ".cache", ".venv*", "__pycache__", ".hypothesis", ".*_cache", "build", "*.egg-info")
LIMIT_S = 600.0  # of one run of pytest: something hangs
STOP_S = 15.0  # for an interrupted run to end what it started
FAILED = re.compile(r"^FAILED (.*)$", re.MULTILINE)
SHOWN = 130  # characters of a reason
INTERRUPTED = 130  # what a shell gives for Ctrl-C


class Runs:
    """Processes in copies of the tree, which all end with ``stop``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "tree"  # as it was at the start, whatever is edited meanwhile
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    @contextlib.contextmanager
    def copy(self, name: str) -> Iterator[Path]:
        """A copy of the tree, which is deleted after the block."""
        tree = self.folder / name
        try:
            yield shutil.copytree(self.tree, tree, symlinks=True)
        finally:
            shutil.rmtree(tree, ignore_errors=True)

    def pytest(self, tree: Path, *arguments: str) -> tuple[int | None, str]:
        return self.run(tree, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *arguments)

    def run(self, tree: Path, *arguments: str) -> tuple[int | None, str]:
        """Exit code and output of Python in a tree, where no GPU is seen; None if it took too long."""
        # Bytecode would be that of another fault where two are as long and written in one second.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=tree,
                env={k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TUNED_CACHE")} | hidden,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _end(process)
            with self._lock:
                self._running.discard(process)
        return process.returncode, output

    def stop(self) -> None:
        """End what runs, and start nothing more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its group; as Ctrl-C first, so that tests can end what they have started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)  # noqa: T201 - a command


def sound(runs: Runs, tests: Sequence[str], number: int) -> str | None:
    """What is wrong with tests where there is no fault, or None."""
    with runs.copy(f"sound-{number}") as tree:
        code, output = runs.pytest(tree, *tests)
    return None if code == 0 else f"without a fault: exit code {code}\n" + "\n".join(output.splitlines()[-20:])


def caught(runs: Runs, fault: Fault) -> tuple[str, str]:
    """("caught", by what), ("SURVIVED", what it would do) or ("no verdict", why)."""
    with runs.copy(fault.name) as tree:
        (tree / fault.file).write_text(faulty(fault, tree), encoding="utf-8")
        if fault.render:
            code, output = runs.run(tree, "tune.py", "--render")
            if code != 0:
                return "no verdict", f"rendering ended with {code}: {(output.splitlines() or [''])[-1]}"
        code, output = runs.pytest(tree, "-x", *fault.tests)
    found = FAILED.search(output)
    if code == 1 and found:
        return "caught", found[1][:SHOWN]
    if code == 0:
        return "SURVIVED", fault.would
    return "no verdict", f"exit code {code}: {(output.splitlines() or [''])[-1]}"


def shares(tests: Iterable[str], count: int) -> list[list[str]]:
    """The tests in so many parts, those of a file together."""
    files: dict[str, list[str]] = {}
    for test in sorted(set(tests)):
        files.setdefault(test.split("::")[0], []).append(test)
    parts: list[list[str]] = [[] for _ in range(count)]
    for number, group in enumerate(files.values()):
        parts[number % count] += group
    return [part for part in parts if part]


def check(runs: Runs, faults: Sequence[Fault], processes: int) -> int:
    """Run all; print a line for each fault, and the sum."""
    begun = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(processes)
    try:
        parts = shares((test for fault in faults for test in fault.tests), processes)
        wrong = [text for text in pool.map(lambda n: sound(runs, parts[n], n), range(len(parts))) if text is not None]
        if wrong:
            say(*wrong)
            return 1
        say(f"without a fault every test passes ({time.monotonic() - begun:.0f} s)")
        counts = dict.fromkeys(("caught", "SURVIVED", "no verdict"), 0)

        def one(fault: Fault) -> tuple[Fault, float, str, str]:
            started = time.monotonic()
            verdict, told = caught(runs, fault)
            return fault, time.monotonic() - started, verdict, told

        for future in concurrent.futures.as_completed([pool.submit(one, fault) for fault in faults]):
            fault, seconds, verdict, told = future.result()
            counts[verdict] += 1
            say(f"{verdict:<10} {seconds:5.1f} s  {fault.name}: {told}")
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        say(f"{len(faults)} faults: {told} in {time.monotonic() - begun:.0f} s")
        return 0 if counts["caught"] == len(faults) else 1
    finally:
        runs.stop()
        pool.shutdown(cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults; without any, all")
    parser.add_argument("--processes", type=int, default=2, help="faults at once")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - {fault.name for fault in FAULTS})
    if unknown:
        parser.error(f"no fault has the name {', '.join(unknown)}")
    chosen = [fault for fault in FAULTS if not asked.names or fault.name in asked.names]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
            return check(Runs(Path(folder)), chosen, max(1, asked.processes))
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
