"""The journal of trials: Optuna studies that outlive any run, and what they remember."""

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

# What a measurement must share with this run to be worth as much as a new one. Rows of before "timing" was have none.
KEY = ("device", "driver", "triton", "method", "timing")
Result = tuple[float, float] | str  # (median in microseconds, worst error over tolerance), or why there is none


def problem_digest(problem: Problem) -> str:
    """Twelve hex digits of what a problem asks, whatever it is named."""
    return _digest(f"{problem.family}{problem.spec}{problem.size}")


Digests = Callable[[Any], dict[str, str]]  # variant -> kernel -> digest of its text


@dataclasses.dataclass(frozen=True)
class Held:
    """What a journal holds of one problem, to be sent to another host."""

    known: dict[Any, Result]
    failures: collections.Counter[Any]
    ended: dict[str, dict[str, Any]]  # finished_key -> how the search ended


class Journal:
    """Every finished trial, in an Optuna storage: a study for each device, problem and space; a trial is one append.

    The value of a trial is its time in microseconds, its parameters are the knobs, so that optuna-dashboard reads well.
    """

    def __init__(self, storage: optuna.storages.BaseStorage) -> None:
        self.storage = storage
        self._ids: dict[str, int] = {}  # name -> study, of those that this process uses
        self._earlier: list[tuple[str, int]] | None = None  # the studies that were there at the first question

    def remembered(self, problem: Problem, environment: dict[str, Any], digests: Digests) -> dict[Any, Result]:
        """What was measured of a problem with the same kernels, device, versions and method; the last result counts.

        A failure that may pass is left out until it came often enough: generator.failures. Trials of another space
        of the same family count too: a knob that they lack had its default. Those with a knob or a choice that is no more do not.
        """
        return self.recalled(problem, environment, digests)[0]

    def recalled(
        self, problem: Problem, environment: dict[str, Any], digests: Digests
    ) -> tuple[dict[Any, Result], collections.Counter[Any]]:
        """What is ``remembered``, and how often each variant has failed since it was last measured."""
        known: dict[Any, Result] = {}
        failures: collections.Counter[Any] = collections.Counter()
        for variant, result in self._results(problem, environment, digests):
            known.pop(variant, None)  # so that the order is that of the results that count
            if isinstance(result, str):
                failures[variant] += 1
                if failures[variant] < times_to_be_a_fact(result):
                    continue
            else:
                del failures[variant]
            known[variant] = result
        return known, failures

    def _results(self, problem: Problem, environment: dict[str, Any], digests: Digests) -> Iterator[tuple[Any, Result]]:
        """Every result of the same kernels, device, versions and method, in their order."""
        variant_type, asked = FAMILIES[problem.family].variant_type, problem_digest(problem)
        for study in self._studies(problem, environment["device"]):
            for trial in self.storage.get_all_trials(study, deepcopy=False):
                note = trial.user_attrs.get("note")
                if not isinstance(note, dict) or any(note.get(k) != environment.get(k) for k in KEY):
                    continue
                if note.get("problem", asked) != asked:  # a broken line before it was that of its study
                    continue
                variant = _variant(variant_type, trial.params)
                if variant is not None and note["digests"] == digests(variant):
                    yield variant, note["failed"] if "failed" in note else (note["median_us"], note["error"])

    def add(
        self, problem: Problem, environment: dict[str, Any], variant: Any, result: Result, digests: dict[str, str]
    ) -> None:
        """Keep what a trial gave, in one operation of the storage: it is there whole or not at all."""
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
        """What ``finish`` kept of a problem under the same settings, device, versions and method, or None."""
        return self._ended(problem, environment).get(finished_key(environment, settings))

    def held(self, problem: Problem, environment: dict[str, Any], digests: Digests) -> Held:
        """All that is known of a problem: what is ``recalled``, and how its searches ended."""
        return Held(*self.recalled(problem, environment, digests), self._ended(problem, environment))

    def _ended(self, problem: Problem, environment: dict[str, Any]) -> dict[str, Any]:
        study = self._there(_study_name(problem, environment["device"]))
        return {} if study is None else self.storage.get_study_user_attrs(study)

    def finish(self, problem: Problem, environment: dict[str, Any], settings: str, winner: dict[str, Any]) -> None:
        """Keep how the search of a problem ended: the next run under the same settings need not search it."""
        study = self._study(problem, environment["device"])
        self.storage.set_study_user_attr(study, finished_key(environment, settings), winner)

    def _study(self, problem: Problem, device: str) -> int:
        """The study of a problem on a device in its present space; made if it is not there."""
        name = _study_name(problem, device)
        study = self._there(name)
        if study is None:
            # Another tuner may be faster: then it is that one's.
            made = optuna.create_study(storage=self.storage, study_name=name, load_if_exists=True)
            self._ids[name] = study = made._study_id  # noqa: SLF001 - the storage's own key
        return study

    def _there(self, name: str) -> int | None:
        """The study of a name, or None if there is none yet."""
        if name not in self._ids and (study := study_named(self.storage, name)) is not None:
            self._ids[name] = study
        return self._ids.get(name)

    def _studies(self, problem: Problem, device: str) -> Iterator[int]:
        """The studies of a problem, one for each space that it had, the present one last."""
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
    """The variant of a trial's parameters in the present space, or None if it is not in it."""
    try:
        variant = variant_type(**params)
    except (TypeError, ValueError):  # a knob that is no more, or values that a rule forbids
        return None
    return None if undeclared(variant) else variant


def finished_key(environment: dict[str, Any], settings: str) -> str:
    """Under what it is kept how a search ended: its settings, and what its measurements were made with."""
    return "finished " + _digest(json.dumps([settings, *(environment.get(k) for k in KEY)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
