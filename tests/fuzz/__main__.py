"""python -m tests.fuzz --seconds 60 --seed 1: random calls until the time is over, or so many are made."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.arguments import count, duration

PATIENCE = 180  # seconds for one case, in which a few kernels are compiled
SWEEPS = 12  # sweeps over the rows that were not chosen, with a case for each row; more if few rows are left
FIRST_TURN = 1000  # the turn of the first sweep; even turns have calls like the row
TRIED = 5  # scripts that are run again before they are printed
LEAST = 3  # calls of each class
CAP = 600  # seconds, if only a number of calls is given
# Cases come in pairs: one with twice as many calls as repeats, and a short one. New classes of a pair, as seen on a GPU.
CLASSES_OF_TWO, SHORT = 3.8, 8


def main() -> int:
    asked = arguments()
    if asked.worker is not None:
        from tests.fuzz.worker import work  # noqa: PLC0415 - the parent imports no torch

        pairs = itertools.count(asked.worker, asked.step)  # of a case with many calls and one that forces a variant
        stream = iter(asked.indices) if asked.indices else (2 * pair + n for pair in pairs for n in range(2))
        work(asked.seed, stream, asked.repeats, asked.seconds, asked.crash)
        return 0
    if asked.only is not None:
        return only(asked.seed, asked.only, asked.repeats)
    processes = asked.processes or max(1, len(os.sched_getaffinity(0)) - 2)
    repeats = asked.repeats
    if asked.calls and asked.classes:
        repeats = max(LEAST, int(CLASSES_OF_TWO * asked.calls / asked.classes - SHORT) // 2)
    print(f"fuzz: seed {asked.seed}, {processes} processes, {2 * repeats} calls a case", flush=True)  # noqa: T201
    found = Found()
    found.run(asked, processes, repeats)
    if asked.calls:
        found.sweep(asked, processes)
    return found.report(asked)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=duration, default=None)
    parser.add_argument("--seed", type=int, default=None, help="by default the time; it is printed")
    parser.add_argument("--processes", type=lambda text: None if text == "auto" else int(text), default=None)
    parser.add_argument("--calls", type=count, default=0, help="stop when so many were made")
    parser.add_argument("--classes", type=count, default=0, help="and of so many classes")
    parser.add_argument("--repeats", type=count, default=LEAST, help="half as many as calls of a case")
    parser.add_argument("--out", type=Path, default=None, help="write the result there as JSON")
    parser.add_argument("--only", type=int, default=None, help="run the case of one index, here")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--indices", type=lambda text: [int(n) for n in text.split(",")], help=argparse.SUPPRESS)
    parser.add_argument("--crash", type=int, default=-1, help=argparse.SUPPRESS)  # the process dies in this case
    asked = parser.parse_args()
    asked.seed = int(time.time()) if asked.seed is None else asked.seed
    asked.seconds = asked.seconds or (CAP if asked.calls else 60.0)
    return asked


def only(seed: int, index: int, repeats: int) -> int:
    from tests.fuzz import case as cases  # noqa: PLC0415
    from tests.fuzz.draw import case  # noqa: PLC0415
    from tests.fuzz.worker import world  # noqa: PLC0415

    here = world()
    made = case(here, seed, index, repeats)
    calls, failure = cases.run(made, here.device)
    print(cases.script(made, here.device) if failure is None else failure.script)  # noqa: T201
    print(f"{calls} calls:", "right" if failure is None else failure.message)  # noqa: T201
    return int(failure is not None)


class Found:
    """What all processes reported."""

    def __init__(self) -> None:
        self.calls = self.cases = self.restarts = 0
        self.classes: set[str] = set()
        self.kernels: set[str] = set()
        self.rows: set[tuple[str, int]] = set()
        self.failures: list[dict[str, Any]] = []
        self.seconds = 0.0

    def run(self, asked: argparse.Namespace, processes: int, repeats: int) -> None:
        """Run processes until the time is over or enough was called; one that ends is restarted after its case."""
        begin, told = time.monotonic(), queue.Queue[tuple[int, Any]]()
        workers = {k: _Worker(asked, k, k, processes, repeats, asked.seconds, told) for k in range(processes)}
        shown = begin
        while workers:
            now = time.monotonic() - begin
            try:
                which, line = told.get(timeout=1.0)
            except queue.Empty:
                which, line = -1, {}
            worker = workers.get(which)
            if worker is not None and line is None:  # it has ended
                del workers[which]
                at = worker.at
                if at is not None:
                    worker.kept = True
                    self._lost(asked.seed, at, f"the process ended with {worker.process.wait()} in this case")
                if (at is not None or worker.process.wait() == 3) and now < asked.seconds:
                    self.restarts += 1
                    after = (worker.last if at is None else at) // 2 + processes
                    workers[which] = _Worker(asked, which, after, processes, repeats, asked.seconds - now, told)
            elif worker is not None:
                worker.note(line)
                self._note(line)
            for one in workers.values():
                if one.at is not None and time.monotonic() - one.since > PATIENCE:
                    one.process.kill()
                    one.since = time.monotonic()
            enough = asked.calls and self.calls >= asked.calls and len(self.classes) >= asked.classes
            if enough:
                break
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"{now:6.0f} s: {self._summary()}", flush=True)  # noqa: T201
        for one in workers.values():
            one.process.terminate()
        for one in workers.values():
            one.process.wait()
        self.seconds = time.monotonic() - begin

    def sweep(self, asked: argparse.Namespace, processes: int) -> None:
        """Run cases that force the rows that were not chosen, or whose kernels were not, a few cases for each row.

        The calls drawn for such a row may not have suited it.
        """
        if not self.kernels:
            return
        from tests.fuzz.draw import index_of  # noqa: PLC0415
        from tests.fuzz.forced import every_row, kernels_of  # noqa: PLC0415
        from tests.fuzz.worker import world  # noqa: PLC0415

        turn = FIRST_TURN
        for _ in range(SWEEPS):
            left = [row for row in every_row() if row not in self.rows or not kernels_of(*row) <= self.kernels]
            turns = range(turn, turn + 2 * max(1, processes // max(1, len(left))), 2)  # every process gets a case
            turn = turns.stop
            indices = [index_of(world(), *row, each) for row in left for each in turns]
            parts = [indices[k::processes] for k in range(processes) if indices[k::processes]]
            told = queue.Queue[tuple[int, Any]]()
            workers = {k: _Worker(asked, k, 0, 1, LEAST, PATIENCE, told, part) for k, part in enumerate(parts)}
            while workers:
                which, line = told.get()
                if line is None:
                    at = workers.pop(which).at
                    if at is not None:
                        self._lost(asked.seed, at, "the process ended in this case")
                else:
                    workers[which].note(line)
                    self._note(line)

    def _note(self, line: dict[str, Any]) -> None:
        if "end" not in line:
            return
        self.cases += 1
        self.calls += line["calls"]
        self.classes |= set(line["keys"])
        self.kernels |= set(line["kernels"])
        self.rows |= {tuple(row) for row in line["rows"]}
        if line["failure"]:
            self._fail(line["failure"])

    def _lost(self, seed: int, index: int, message: str) -> None:
        from tests.fuzz.worker import lost  # noqa: PLC0415

        self._fail(lost(seed, index, message))

    def _fail(self, failure: dict[str, Any]) -> None:
        self.failures.append(failure)
        print(f"wrong: case {failure['index']}: {failure['message'].splitlines()[0][:200]}", flush=True)  # noqa: T201

    def _summary(self) -> str:
        return (
            f"{self.calls} calls of {len(self.classes)} classes in {self.cases} cases, {len(self.kernels)} kernels, "
            f"{len(self.rows)} rows forced, {len(self.failures)} wrong"
        )

    def report(self, asked: argparse.Namespace) -> int:
        """Print everything and write the file; returns 1 if something is wrong, or less was done than was asked for."""
        for number, failure in enumerate(self.failures):
            told = failure["script"]
            if number < TRIED and told != failure["whole"] and not raises(told):
                told = failure["whole"]  # the failure needs the calls before it
            print(f"\n{failure['message']}\n{told}")  # noqa: T201
        missing = self._missing() if self.kernels else []
        rate = self.calls / max(self.seconds, 1e-9)
        print(f"\nfuzz: seed {asked.seed}: {self._summary()}; {rate:.0f} calls a second")  # noqa: T201
        if missing:
            print(f"did not come up: {', '.join(missing)}")  # noqa: T201
        if asked.out is not None:
            told = {
                "calls": self.calls,
                "classes": len(self.classes),
                "wrong": len(self.failures),
                "seed": asked.seed,
                "seconds": round(self.seconds, 1),
                "kernels": sorted(self.kernels),
                "rows": len(self.rows),
                "missing": missing,
                "failures": self.failures,
            }
            asked.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        short = self.calls < asked.calls or len(self.classes) < asked.classes
        if short:
            print(f"fewer than the {asked.calls} calls of {asked.classes} classes that were asked for")  # noqa: T201
        return int(bool(self.failures or short or (asked.calls and missing)))

    def _missing(self) -> list[str]:
        """Kernels and rows that a lookup can choose, and none chose."""
        from tests.fuzz.forced import all_kernels, every_row  # noqa: PLC0415

        rows = [f"row {index} of {family}" for family, index in every_row() if (family, index) not in self.rows]
        return sorted(all_kernels() - self.kernels) + rows


def raises(script: str) -> bool:
    """Whether a script fails in its own process."""
    try:
        return bool(
            subprocess.run(
                [sys.executable, "-c", script], check=False, capture_output=True, timeout=PATIENCE
            ).returncode
        )
    except subprocess.TimeoutExpired:
        return True


class _Worker:
    """A process, and the case that it is running."""

    def __init__(
        self, asked: argparse.Namespace, name: int, start: int, step: int, repeats: int, seconds: float,
        told: queue.Queue[Any], indices: list[int] | None = None,
    ) -> None:  # fmt: skip
        options = {"seed": asked.seed, "worker": start, "step": step, "repeats": repeats, "crash": asked.crash}
        command = [sys.executable, "-m", "tests.fuzz", *(f"--{name}={value}" for name, value in options.items())]
        command += [f"--seconds={max(seconds, 0.1)}"]
        command += ["--indices=" + ",".join(map(str, indices))] if indices else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        self.at: int | None = None
        self.last, self.since, self.kept = start, time.monotonic(), False
        threading.Thread(target=self._read, args=(name, told), daemon=True).start()

    def _read(self, name: int, told: queue.Queue[Any]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                told.put((name, json.loads(line)))
        told.put((name, None))

    def note(self, line: dict[str, Any]) -> None:
        self.since = time.monotonic()
        self.at = line.get("begin")
        self.last = line.get("end", self.last)


if __name__ == "__main__":
    sys.exit(main())
