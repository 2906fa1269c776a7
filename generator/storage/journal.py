"""The journal of trials: Optuna studies that outlive any run, and the results read back from them."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from tuned.families.choices import choices, undeclared
from tuned.families.registry import FAMILIES

from ..failures import times_to_be_a_fact
from ..problem import Problem
from .backends import study_named

# A measurement counts like a new one if it has this run's values of these. Rows older than "timing" have none.
KEY = ("device", "driver", "triton", "method", "timing")
Result = tuple[float, float] | str  # (median in microseconds, worst error over tolerance), or why there is none


def problem_digest(problem: Problem) -> str:
    """Twelve hex digits for a problem's family, spec and size, whatever its name."""
    return _digest(f"{problem.family}{problem.spec}{problem.size}")


Digests = Callable[[Any], dict[str, str]]  # variant -> kernel -> digest of its text


@dataclasses.dataclass(frozen=True)
class Held:
    """All that a journal holds of one problem, to be sent to another host."""

    known: dict[Any, Result]
    failures: collections.Counter[Any]
    ended: dict[str, dict[str, Any]]  # finished_key -> how the search ended


class Journal:
    """Every finished trial, in an Optuna storage, with one study for each device, problem and space; a trial is one append.

    A trial's value is its time in microseconds, and its parameters are the knobs, so that optuna-dashboard reads well.
    """

    def __init__(self, storage: optuna.storages.BaseStorage) -> None:
        self.storage = storage
        self._ids: dict[str, int] = {}  # name -> study, for the studies that this process uses
        self._earlier: list[tuple[str, int]] | None = None  # the studies that existed when they were first listed

    def remembered(self, problem: Problem, environment: dict[str, Any], digests: Digests) -> dict[Any, Result]:
        """The results for a problem with the same kernels, device, versions and method; a variant's last result counts.

        A failure that may pass is left out until it came often enough: generator.failures. Trials of another space of
        the same family count too: a knob that they lack had its default. Trials with a knob or a choice that was
        removed do not.
        """
        return self.recalled(problem, environment, digests)[0]

    def recalled(
        self, problem: Problem, environment: dict[str, Any], digests: Digests
    ) -> tuple[dict[Any, Result], collections.Counter[Any]]:
        """The ``remembered`` results, and how often each variant has failed since it was last measured."""
        known: dict[Any, Result] = {}
        failures: collections.Counter[Any] = collections.Counter()
        for variant, result in self._results(problem, environment, digests):
            known.pop(variant, None)  # so that the results that count are in order
            if isinstance(result, str):
                failures[variant] += 1
                if failures[variant] < times_to_be_a_fact(result):
                    continue
            else:
                del failures[variant]
            known[variant] = result
        return known, failures

    def _results(self, problem: Problem, environment: dict[str, Any], digests: Digests) -> Iterator[tuple[Any, Result]]:
        """Every result with the same kernels, device, versions and method, in order."""
        variant_type, asked = FAMILIES[problem.family].variant_type, problem_digest(problem)
        for study in self._studies(problem, environment["device"]):
            for trial in self.storage.get_all_trials(study, deepcopy=False):
                note = trial.user_attrs.get("note")
                if not isinstance(note, dict) or any(note.get(k) != environment.get(k) for k in KEY):
                    continue
                if note.get("problem", asked) != asked:  # the line that made its study was broken
                    continue
                variant = _variant(variant_type, trial.params)
                if variant is not None and note["digests"] == digests(variant):
                    yield variant, note["failed"] if "failed" in note else (note["median_us"], note["error"])

    def add(
        self, problem: Problem, environment: dict[str, Any], variant: Any, result: Result, digests: dict[str, str]
    ) -> None:
        """Keep a trial's result in one operation of the storage: it is there whole or not at all."""
        knobs = choices(type(variant))
        note = {"digests": digests, "problem": problem_digest(problem), **{k: environment.get(k) for k in KEY}}
        note |= {"failed": result} if isinstance(result, str) else {"median_us": result[0], "error": result[1]}
        trial = create_trial(
            state=TrialState.FAIL if isinstance(result, str) else TrialState.COMPLETE,
            value=None if isinstance(result, str) else result[0],
            params={name: getattr(variant, name) for name in knobs},
            distributions={n: optuna.distributions.CategoricalDistribution(values) for n, values in knobs.items()},
            user_attrs={"note": note},
        )
        self.storage.create_new_trial(self._study(problem, environment["device"]), template_trial=trial)

    def finished(self, problem: Problem, environment: dict[str, Any], settings: str) -> dict[str, Any] | None:
        """What ``finish`` kept for a problem under the same settings, device, versions and method, or None."""
        return self._ended(problem, environment).get(finished_key(environment, settings))

    def held(self, problem: Problem, environment: dict[str, Any], digests: Digests) -> Held:
        """All that is known of a problem: its ``recalled`` results, and how its searches ended."""
        return Held(*self.recalled(problem, environment, digests), self._ended(problem, environment))

    def _ended(self, problem: Problem, environment: dict[str, Any]) -> dict[str, Any]:
        study = self._there(_study_name(problem, environment["device"]))
        return {} if study is None else self.storage.get_study_user_attrs(study)

    def finish(self, problem: Problem, environment: dict[str, Any], settings: str, winner: dict[str, Any]) -> None:
        """Keep how the search of a problem ended, so that the next run under the same settings need not search again."""
        study = self._study(problem, environment["device"])
        self.storage.set_study_user_attr(study, finished_key(environment, settings), winner)

    def _study(self, problem: Problem, device: str) -> int:
        """The study of a problem on a device in its present space; it is made if there is none."""
        name = _study_name(problem, device)
        study = self._there(name)
        if study is None:
            # Another tuner may have made the study by now: then that one is used.
            made = optuna.create_study(storage=self.storage, study_name=name, load_if_exists=True)
            self._ids[name] = study = made._study_id  # noqa: SLF001 - the storage's own key
        return study

    def _there(self, name: str) -> int | None:
        """The study with a name, or None if there is none yet."""
        if name not in self._ids and (study := study_named(self.storage, name)) is not None:
            self._ids[name] = study
        return self._ids.get(name)

    def _studies(self, problem: Problem, device: str) -> Iterator[int]:
        """The studies of a problem, one for each space that its family had, the present one last."""
        if self._earlier is None:
            self._earlier = [(s.study_name, s._study_id) for s in self.storage.get_all_studies()]  # noqa: SLF001 - the storage's own key
        present = _study_name(problem, device)
        for name, study in self._earlier:
            if name != present and _asks(name) == (device, problem_digest(problem)):
                yield study
        there = self._there(present)
        if there is not None:
            yield there


def _study_name(problem: Problem, device: str) -> str:
    space = json.dumps(choices(FAMILIES[problem.family].variant_type), default=str)
    return f"trials/{device}/{problem.name}/{problem_digest(problem)}/{_digest(space)}"


def _asks(name: str) -> tuple[str, str] | None:
    """Device and problem digest of a study's name, or None if it is no study of trials."""
    parts = name.split("/")
    return (parts[1], parts[-2]) if parts[0] == "trials" else None


def _variant(variant_type: type, params: dict[str, Any]) -> Any | None:
    """The variant with a trial's parameters, or None if the present space does not have it."""
    try:
        variant = variant_type(**params)
    except (TypeError, ValueError):  # a knob that was removed, or values that a rule forbids
        return None
    return None if undeclared(variant) else variant


def finished_key(environment: dict[str, Any], settings: str) -> str:
    """The key under which the end of a search is kept: a digest of its settings and of the KEY values of its environment."""
    return "finished " + _digest(json.dumps([settings, *(environment.get(k) for k in KEY)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
