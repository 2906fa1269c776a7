"""The journal of trials: Optuna studies in a file that outlives any run, and what they remember."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from generator.cache import cache_folder
from tuned.choices import choices
from tuned.family import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO
    from pathlib import Path

    from generator.problem import Problem

# What a measurement must share with this run to be worth as much as a new one.
KEY = ("device", "driver", "triton", "method")


class _File(JournalFileBackend):
    """Optuna's journal file, made for many small appends by a process that may be killed.

    Optuna's own waits for the disk at each append, a dozen a trial, which took longer than measuring; and a killed process
    leaves its lock behind for 30 s. Here the system's cache is enough (it outlives the process, not a power
    cut), and the lock is the kernel's, which goes with the process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        with self._locked():
            _cut_torn_line(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[FileIO]:
        with self._path.open("ab", buffering=0) as file:  # closing it gives the lock back
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append in one write."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._locked() as file:
            file.write(text.encode())


def _cut_torn_line(path: Path) -> None:
    """Drop what a machine that went down left of its last line; Optuna refuses the whole file for it."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


class Journal:
    """Every trial of one device, appended as it ends."""

    def __init__(self, device: str, path: Path | None = None) -> None:
        """Open or make the journal of a device."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.path = path or cache_folder("journal") / f"{device}.log"
        self._storage = JournalStorage(_File(self.path))

    def study(
        self, problem: Problem, environment: dict[str, Any], sampler: optuna.samplers.BaseSampler
    ) -> optuna.Study:
        """The study of a problem in its space; another one when choices are added, with what is known taken over."""
        space = json.dumps(choices(FAMILIES[problem.family].variant_type), default=str)
        digest = hashlib.sha256(f"{space}{problem.spec}{problem.size}".encode()).hexdigest()[:12]
        return optuna.create_study(
            study_name=f"{problem.family}/{problem.name}/{environment['method']}/{digest}",
            storage=self._storage,
            sampler=sampler,
            direction="minimize",
            load_if_exists=True,
        )

    def note(
        self,
        trial: optuna.Trial,
        variant: Any,
        result: tuple[float, float] | str,
        digests: dict[str, str],
        environment: dict[str, Any],
    ) -> None:
        """Keep what a trial gave beside the value that Optuna is told, with the key of the measurement."""
        del variant  # the trial's parameters are the variant
        note = {"digests": digests, **{k: environment[k] for k in KEY}}
        note |= {"failed": result} if isinstance(result, str) else {"median_us": result[0], "error": result[1]}
        trial.set_user_attr("note", note)

    def remembered(
        self, problem: Problem, environment: dict[str, Any], digests: Callable[[Any], dict[str, str]]
    ) -> Iterator[tuple[Any, tuple[float, float] | str]]:
        """What earlier runs measured of a problem with the same kernels, device, versions and method."""
        family = FAMILIES[problem.family]
        names = set(choices(family.variant_type))
        prefix = f"{problem.family}/{problem.name}/"
        for frozen in self._storage.get_all_studies():
            if not frozen.study_name.startswith(prefix):
                continue
            for trial in self._storage.get_all_trials(frozen._study_id, deepcopy=False):  # noqa: SLF001 - storage's own key
                note = trial.user_attrs.get("note")
                if note is None or set(trial.params) != names or any(note[k] != environment[k] for k in KEY):
                    continue
                variant = family.variant_type(**trial.params)
                if note["digests"] != digests(variant):
                    continue
                yield variant, note["failed"] if "failed" in note else (note["median_us"], note["error"])
