"""One release run: on one commit and one GPU, tune from empty, verify, measure every suite, draw: ``make release``.

The tuned rows go into the checkout when every problem has one; results go there when every suite is whole. Until then
all are kept in .cache/release/<device>-<commit>, with a journal: the same command goes on where the last one was cut. A
suite that was cut is measured again from its first row, so that all rows are of one sitting; ``--by-row`` measures only
the rows that it lacks. ``--gpus all`` shares the work out among the GPUs of a host, with each suite on one GPU.
``--tuned`` tunes nothing, and measures with the committed rows. ``--list`` shows the plan, and needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import fcntl
import importlib.util
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gru_peers, peers, plan, random_rope, record, shipped
from benchmarks.gpus import number_of_gpus, refusal, visible
from benchmarks.release_plan import SECONDS, Stage, listed, stages, stamp
from benchmarks.verify import INTERRUPTED, stop
from generator.disk import write_whole
from generator.duration import seconds_of
from generator.places import ROOT, cache_folder, cache_path
from tuned.lookup.record import device_slug

OUT_OF_TIME = os.EX_TEMPFAIL  # 75, "try again": a budget was used up
BEAT_SECONDS = 5.0  # how often the time is saved while a command runs: a machine may be taken away
NAMES_SHOWN = 5
STOP_SECONDS = 60.0  # for a command that is cut: the verification ends its own suites first
# Peers of the suites that must be installed for a release.
REQUIRED = tuple(name for name in dict.fromkeys((*plan.REQUIRED, *random_rope.PEERS)) if name in peers.IMPORTED_AS)
PIP = {"transformer-engine": "'transformer-engine[pytorch]'"}  # distribution -> argument of pip, if it differs


class ReleaseError(Exception):
    """The release cannot go on; the message says why, and the way out."""


class OutOfTimeError(Exception):
    """The budget is used up."""


class CutError(Exception):
    """A stage is cut because another stage that ran beside it failed or was cut."""


# The journal ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Journal:
    """The progress of one release, saved after each change."""

    path: Path
    commit: str
    environment: dict[str, Any]
    stages: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # seconds, sittings, done
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # options that change what is tuned or measured
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock, repr=False)  # of stages that run at once

    @classmethod
    def open(cls, path: Path, commit: str, environment: dict[str, Any], settings: dict[str, Any]) -> Journal:
        """The journal in a file, or a new one.

        Raises:
            ReleaseError: the journal is of another environment, or began with other settings: what it calls done is theirs.
        """
        if not path.exists():
            return cls(path, commit, environment, settings=settings)
        kept = json.loads(path.read_text())
        for what, before, now in (
            ("environment", kept["environment"], environment),
            ("set of options", kept.get("settings", settings), settings),
        ):
            keys = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
            if keys:
                raise ReleaseError(
                    f"a release is of one {what}, and it changed since this one began: "
                    + "; ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)
                    + f". Put it back, or remove {path.parent} to begin again"
                )
        return cls(path, commit, environment, kept["stages"], settings)

    def save(self, path: Path | None = None, **facts: str) -> None:
        """Write the whole journal, or nothing, with further facts."""
        with self.lock:
            content = {
                "commit": self.commit,
                **facts,
                "environment": self.environment,
                "settings": self.settings,
                "stages": self.stages,
            }
            write_whole(path or self.path, (json.dumps(content, indent=1) + "\n").encode())

    def done(self, stage: Stage) -> bool:
        """Whether a stage has ended well."""
        return bool(self.stages.get(stage.name, {}).get("done"))

    def table(self, plan: Sequence[Stage]) -> str:
        """The wall time of each stage over all sittings, and the sum."""
        rows = [(s.name, self.stages[s.name]) for s in plan if s.name in self.stages]
        lines = [f"{'stage':18}{'seconds':>9}{'sittings':>10}"]
        lines += [f"{n:18}{r['seconds']:9.1f}{r['sittings']:10}{'' if r['done'] else '  cut'}" for n, r in rows]
        return "\n".join([*lines, f"{'sum':18}{sum(row['seconds'] for _, row in rows):9.1f}"])


def git(*arguments: str) -> str:
    """The output of a git command in this checkout.

    Raises:
        ReleaseError: this is not a git checkout.
    """
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S603, S607
    except (OSError, subprocess.CalledProcessError):
        raise ReleaseError(f"a release is of one commit, and {ROOT} is no git checkout: clone the repository") from None


def refuse_other_sources(journal: Journal, plan: Sequence[Stage]) -> None:
    """Raise a ReleaseError if the checkout differs from the commit in files that the stages begun so far may not change."""
    commit = journal.commit
    if git("rev-parse", "HEAD").strip() != commit:
        raise ReleaseError(f"the release is of commit {commit[:12]}, and another is checked out now: go back to it")
    allowed = [path for stage in plan if stage.name in journal.stages for path in stage.changes]
    said = git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
    paths = [ROOT / entry[3:] for entry in said.split("\0") if entry]
    others = [str(p.relative_to(ROOT)) for p in paths if not any(p.is_relative_to(one) for one in allowed)]
    if others:
        more = f" and {len(others) - NAMES_SHOWN} more" if others[NAMES_SHOWN:] else ""
        raise ReleaseError(
            f"a release is of one commit, and these differ from {commit[:12]}: {', '.join(others[:NAMES_SHOWN])}{more}. "
            "Commit them, or put them away (git stash -u)"
        )


# Running --------------------------------------------------------------------------------------------------------------


def run(  # noqa: PLR0913 - a stage, and how long and where it may run
    stage: Stage,
    journal: Journal,
    ends: float = math.inf,
    lock: int | None = None,
    gpu: Mapping[str, str] | None = None,
    cut: threading.Event | None = None,
) -> None:
    """Run a stage; its time is saved, however it ends. ``gpu``: further variables of its environment.

    Raises:
        ReleaseError: a command failed.
        OutOfTimeError: time.monotonic() has reached ``ends``.
        CutError: ``cut`` is set.
    """
    folder, begun = journal.path.parent, time.monotonic()
    if begun >= ends:
        raise OutOfTimeError
    with journal.lock:
        kept = journal.stages.setdefault(stage.name, {"seconds": 0.0, "sittings": 0, "done": False})
    kept["sittings"] += 1
    before = kept["seconds"]

    def beat() -> float:
        """Save the time, and return how many seconds to wait until it is saved again."""
        now = time.monotonic()
        kept["seconds"] = round(before + now - begun, 1)
        journal.save()
        if now >= ends:
            raise OutOfTimeError
        if cut is not None and cut.is_set():
            raise CutError
        return min(BEAT_SECONDS, ends - now)

    try:
        beat()
        environment = _environment(stage, folder) | dict(gpu or {})
        log = folder / "logs" / f"{stage.name}.log"
        log.parent.mkdir(exist_ok=True)
        for command in stage.commands:
            code = _ended((sys.executable, *command), environment, log, beat, lock)
            if code:
                raise ReleaseError(f"{stage.name} failed: python {' '.join(command)} ended with {code}, {log} says why")
        for source, target in stage.copies:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, source.read_bytes())
    finally:
        with contextlib.suppress(OutOfTimeError, CutError):
            beat()


def _environment(stage: Stage, folder: Path) -> dict[str, str]:
    """The environment of a stage; one that begins from empty gets the release's own caches."""
    found = shipped.environment()
    if not stage.from_empty:
        return found
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (cache / "locks").symlink_to(cache_folder("locks").resolve())  # tuners with other caches wait for this one
    return found | {"TUNED_CACHE": str(cache), "TRITON_CACHE_DIR": str(folder / "triton")}


def _ended(
    command: Sequence[str], environment: dict[str, str], log: Path, beat: Callable[[], float], lock: int | None
) -> int:
    """The exit code of a command. The command holds the lock too, and its processes are ended, unless this one is killed."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(  # noqa: S603 - our own words
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=beat())
    finally:
        stop(process, STOP_SECONDS)


def batches(plan: Sequence[Stage], gpus: int) -> list[list[list[Stage]]]:
    """Batches that run one after another on ``gpus`` GPUs: lists of lanes that run at once; a lane has stages in order."""
    found: list[list[list[Stage]]] = []
    for laned, stages_of in itertools.groupby(plan, lambda stage: bool(stage.lane) and gpus > 1):
        every = list(stages_of)
        names = dict.fromkeys(stage.lane for stage in every)
        lanes = [[stage for stage in every if stage.lane == name] for name in names]
        found += [lanes] if laned else [[[stage]] for stage in every]
    return found


def at_once(lanes: Sequence[Sequence[Stage]], gpus: int, one: Callable[..., None]) -> None:
    """Run lanes on so many GPUs; a free GPU takes the next lane, and ``one`` runs a stage. An exception in one ends all."""
    waiting: queue.SimpleQueue[Sequence[Stage]] = queue.SimpleQueue()
    for lane in lanes:
        waiting.put(lane)
    cut, raised = threading.Event(), []

    def work(gpu: Mapping[str, str]) -> None:
        try:
            while not cut.is_set():
                for stage in waiting.get_nowait():
                    one(stage, gpu, cut)
        except (queue.Empty, CutError):
            pass
        except Exception as error:  # noqa: BLE001 - raised below
            raised.append(error)
            cut.set()

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in visible(min(gpus, len(lanes)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # a join without a timeout would block Ctrl-C
                thread.join(BEAT_SECONDS)
    finally:
        cut.set()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]


def release(
    plan: Sequence[Stage], journal: Journal, ends: float = math.inf, lock: int | None = None, gpus: int = 1
) -> int:
    """Run the stages that are not done yet, print how far they came, and return the exit code."""
    said, code = "", 0

    def one(stage: Stage, gpu: Mapping[str, str] | None = None, cut: threading.Event | None = None) -> None:
        if journal.done(stage):
            return
        print(f"{stage.name}: running", flush=True)
        run(stage, journal, ends, lock, gpu, cut)
        with journal.lock:
            refuse_other_sources(journal, plan)
            journal.stages[stage.name]["done"] = True
            journal.save()
        print(f"{stage.name}: done in {journal.stages[stage.name]['seconds']:.1f} s", flush=True)

    try:
        refuse_other_sources(journal, plan)
        for lanes in batches(plan, gpus):
            if len(lanes) == 1:
                for stage in lanes[0]:
                    one(stage)
            else:
                at_once(lanes, gpus, one)
    except (ReleaseError, OSError) as error:
        said, code = str(error), 1
    except OutOfTimeError:
        said, code = "the budget is used up", OUT_OF_TIME
    except KeyboardInterrupt:
        said, code = "interrupted", INTERRUPTED
    print(journal.table(plan))
    left = [stage.name for stage in plan if not journal.done(stage)]
    told = (
        f"not done: {', '.join(left)}; the same command goes on" if left else f"{journal.commit}: every stage is done"
    )
    print(*([said] if said else []), f"{told}; what they printed is in {journal.path.parent / 'logs'}", sep="\n")
    return code


# The command ----------------------------------------------------------------------------------------------------------


def facts() -> None:
    """Print what a release depends on besides the commit, as a line of JSON; in its own process, since peers take memory."""
    import torch  # noqa: PLC0415

    from generator.measuring.environment import driver_version  # noqa: PLC0415

    found: dict[str, Any] = {"device": None}
    if torch.cuda.is_available():
        found = record.environment({**peers.PACKAGES, **gru_peers.PACKAGES}) | {"driver": driver_version()}
        found["gpus"] = torch.cuda.device_count()
    print(json.dumps(found))


def here() -> dict[str, Any]:
    """The output of ``facts``, run in another process."""
    command = [sys.executable, "-c", "from benchmarks.release import facts; facts()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]  # peers may print on being imported
    if done.returncode or not found:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ReleaseError(f"the GPU and the peers cannot be looked at: {why}: {' '.join(command[:2])} {command[2]!r}")
    return dict(json.loads(found[-1]))


def refuse_missing(installed: Collection[str], without: Collection[str]) -> None:
    """Raise a ReleaseError if a required peer or matplotlib is not installed; print which other peers are not."""
    missing = [name for name, package in peers.IMPORTED_AS.items() if package not in installed]
    required = [name for name in missing if name in REQUIRED and name not in without]
    if required:
        named = [peers.PACKAGES[peers.IMPORTED_AS[name]] for name in required]
        raise ReleaseError(
            f"a release is measured beside {', '.join(required)}, not installed here: pip install --no-build-isolation "
            f"{' '.join(PIP.get(name, name) for name in named)}; or --without-peers {','.join(required)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ReleaseError("a release draws plots, and matplotlib is not installed here: pip install matplotlib")
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}")


def budget(text: str) -> float:
    """A time in seconds; for other text argparse says what is wrong."""
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> int:
    """A whole number from 1 on; for other text argparse says what is wrong."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"seconds are a number from 1 on, got {text!r}")
    return int(text)


def names(text: str) -> list[str]:
    """Names with commas between, each of a required peer."""
    found = [name.strip() for name in text.split(",")]
    if not set(found) <= set(REQUIRED):
        raise argparse.ArgumentTypeError(f"required peers are {', '.join(REQUIRED)}, got {text!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, 1 where something fails or is refused, 75 where the budget is used up, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.release", description=__doc__)
    option = parser.add_argument
    option("--list", "--dry-run", action="store_true", help="show the plan; needs no GPU")
    option("--budget", type=budget, default=math.inf, help="stop after this time, 90s, 10m or 1h; exit code 75")
    option("--by-row", action="store_true", help="a suite that was cut goes on with the rows that it lacks")
    option("--tuned", action="store_true", help="tune nothing: the rows that are committed must count, every one")
    option("--gpus", type=number_of_gpus, default=1, metavar="N", help="measure on so many GPUs at once, or on all")
    option(
        "--seconds",
        type=seconds,
        default=SECONDS,
        metavar="N",
        help="of random calls of each kind, by default %(default)s",
    )
    option("--without-peers", type=names, default=[], metavar="NAME,...", help="do without these required peers")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.budget
    # Commands run in their own sessions, and end with this process. A shell's background jobs ignore SIGINT, with their
    # children.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.default_int_handler)
    try:
        return _main(options, ends)
    except ReleaseError as error:
        print(error)
        return 1
    except KeyboardInterrupt:
        print("interrupted")
        return INTERRUPTED


def _main(options: argparse.Namespace, ends: float) -> int:
    commit = git("rev-parse", "HEAD").strip()
    if options.list:
        folder = cache_path("release", "DEVICE").resolve()
        settings: dict[str, Any] = {
            "by_row": options.by_row,
            "tuned": options.tuned,
            "gpus": str(options.gpus or "all"),
            "seconds": options.seconds,
        }
        print(listed(stages("DEVICE", commit, folder, **settings)))
        return 0
    environment = dict(here())
    there = environment.pop("gpus", 1)
    gpus = options.gpus or there
    if why := refusal(gpus, there):
        raise ReleaseError(why)
    if environment["device"] is None:
        raise ReleaseError(
            "a release needs a GPU, and PyTorch sees none: run it where there is one; --list shows the plan"
        )
    refuse_missing(environment["peers"], options.without_peers)
    device = device_slug(environment["device"])
    folder = cache_folder("release", f"{device}-{commit[:12]}").resolve()
    with (folder.parent / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReleaseError("a release runs here, or the last command of a killed one: wait until it ends") from None
        settings = {"tuned": options.tuned, "seconds": options.seconds}
        journal = Journal.open(folder / "journal.json", commit, environment, settings)
        plan = stages(
            device, commit, folder, by_row=options.by_row, tuned=options.tuned, gpus=str(gpus), seconds=options.seconds
        )
        code = release(plan, journal, ends, lock.fileno(), gpus)
    if not code:
        stamp(device).parent.mkdir(exist_ok=True)
        journal.save(stamp(device), ended=dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M"))
    return code


if __name__ == "__main__":
    sys.exit(main())
