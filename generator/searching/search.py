"""Search one problem on one GPU: propose, compile, measure, compare the best again, name the winner.

A search is a function of its arguments and of the measured times: proposals depend on nothing else. A variant that an
earlier run measured is read from the journal and not measured again. So a run that was interrupted replays its trials
in no time, up to where it ended, and goes on as if it had not been.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optuna

from tuned.families.choices import choices
from tuned.lookup.record import RecordError, Winner, winner_from_json

from ..failures import LOST_WORKER, times_to_be_a_fact
from ..measuring.bench import half_spread
from ..measuring.stage import Compared, dependent, middle
from ..problem import Problem
from ..processes.compiler import compile_variant, hopeless
from ..processes.compiler import compiled as result_of
from ..processes.worker import TrialFailedError, Worker, WorkerLostError
from ..storage.journal import Journal, Result
from .pool import same_problem
from .sampler import BATCH, LEAST_RESULTS, STARTUP, PoolSampler
from .space import Space, space_of
from .stopwatch import Stopwatch

EXHAUSTIVE = 300  # a pool up to this size is measured whole: at 15 ms a variant, under 5 s
FINALISTS = 6  # measured again, interleaved: re-measuring a handful is the cheapest cure for the winner's curse
FEW = 2  # finalists, where the candidates are a handful themselves
# A new winner must beat the incumbent by more than the noise. Among variants within the noise the simpler wins, which
# also serves other problems best. Two runs differ by NOISE; where the rounds of two compared variants differ by more,
# that counts.
NOISE = 0.01
MOST_NOISE = 0.05  # the most within which a simpler variant wins, however far its own rounds spread
# Proposals that are compiled while earlier ones are measured. A compilation takes 0.2 to 0.5 s and a measurement 17 ms,
# so with fewer the GPU waits. With more, proposals rest on results that are too old: with three batches two tunings of
# one problem end up to 1.8 percent apart, with two 1.4.
AHEAD = 2 * BATCH
MOST_AGAIN = 16  # failed variants that a search tries again: if all of them hang, that takes minutes
SEED = 0
TRIALS = 96  # a problem


@dataclasses.dataclass
class Progress:
    """What a display shows; the same object each time, changed in place."""

    problem: str = ""
    trial: int = 0
    trials: int = 0
    best_us: float = math.inf
    floor_us: float = 0.0
    failed: int = 0
    note: str = ""
    funnel: str = ""  # how many variants are declared, and how many of them legal


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the search of one problem ended."""

    winner: Winner
    measured: int  # variants that were right and timed, earlier runs included
    failed: dict[str, str]  # a failed variant's knobs -> the reason
    pool: int  # legal variants
    declared: int
    remembered: int  # variants taken from the journal instead of measured again
    same: int = 0  # variants not measured: another variant has the same machine code on the same grid
    passing: int = 0  # failures that may pass: the next run tries them again


def tune(  # noqa: PLR0913 - the parts are independent of each other
    problem: Problem,
    worker: Worker,
    compiler: concurrent.futures.Executor,
    journal: Journal,
    environment: dict[str, Any],
    *,
    trials: int,
    seeds: Iterable[Any] = (),
    incumbent: Any = None,
    candidates: Iterable[Any] | None = None,
    deadline: float = math.inf,
    stopwatch: Stopwatch | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    seed: int = SEED,
    space: Space | None = None,
) -> Outcome:
    """The winner of a problem, after at most ``trials`` measurements or at ``deadline`` (time.monotonic).

    ``seeds``, the winners of similar problems, are tried first, after the default and the ``incumbent``. If
    ``candidates`` are given, they are measured in place of seeds, and nothing is searched. If an earlier search ended
    under the same settings, and the incumbent is its winner, the problem is not searched again. ``space`` is by default
    that of the problem's family; a problem of no family needs one.

    Raises:
        WorkerLostError: the GPU could not be brought to measure even the default variant.
    """
    wanted = None if candidates is None else list(dict.fromkeys(candidates))
    watch = stopwatch or Stopwatch()
    space = space or space_of(problem, environment["capability"], environment["multiprocessors"])
    search = _Search(problem, worker, compiler, journal, environment, deadline, watch, report, seed, space)
    settings = search.settings(trials, wanted)
    known = search.ended_before(settings, incumbent)
    if known is not None:
        return known
    first = [v for v in _first(space.default, seeds if wanted is None else wanted, incumbent) if v in search.legal]
    search.prepare(planned(trials, len(search.pool.variants)) if wanted is None else len(first))
    search.explore(first, trials if wanted is None else len(first))
    if wanted is None and len(search.pool.variants) <= EXHAUSTIVE:
        search.explore(search.pool.variants, len(search.pool.variants))
    search.try_again()
    return search.finish(space.default, incumbent, settings, FINALISTS if wanted is None else FEW)


def planned(trials: int, legal: int) -> int:
    """How many of so many legal variants a search of ``trials`` measures: a small pool is measured whole."""
    return legal if legal <= EXHAUSTIVE else min(trials, legal)


def opening(
    problem: Problem,
    capability: int,
    seeds: Iterable[Any] = (),
    incumbent: Any = None,
    multiprocessors: int | None = None,
) -> list[Any]:
    """The variants that a search with these arguments asks for before it knows any time; they can be compiled early."""
    space = space_of(problem, capability, multiprocessors)
    if not space.pool.variants:  # the problem will be skipped: a sampler needs something to draw from
        return []
    sampler, legal = _sampler(space, SEED), frozenset(space.pool.variants)
    for variant in _first(space.default, seeds, incumbent):
        if variant in legal:
            sampler.propose_next(_row(variant))
    study = optuna.create_study(sampler=sampler)
    return [propose(study, space.variant_type)[1] for _ in range(min(STARTUP, len(space.pool.variants)))]


def propose(study: optuna.Study, variant_type: type) -> tuple[optuna.Trial, Any]:
    """The next trial of a study with a PoolSampler, and its variant.

    The variant is read whole from the sampler's proposal. Suggesting it knob by knob would take three times as long,
    and would only fill in the parameters of this study, which ends with the search. The journal keeps them.
    """
    trial = study.ask()
    return trial, variant_type(**trial.relative_params)


def _first(default: Any, seeds: Iterable[Any], incumbent: Any) -> list[Any]:
    return list(dict.fromkeys([default, *([] if incumbent is None else [incumbent]), *seeds]))


def _row(variant: Any) -> dict[str, Any]:
    return {name: getattr(variant, name) for name in choices(type(variant))}


def _sampler(space: Space, seed: int) -> PoolSampler:
    variants = space.pool.variants
    rows, features = [_row(v) for v in variants], [space.features(v) for v in variants]
    return PoolSampler(choices(space.variant_type), rows, seed, features)


class _Search:
    """The state of one problem's search: an Optuna study, its pool, and what was measured."""

    def __init__(  # noqa: PLR0913 - as tune
        self,
        problem: Problem,
        worker: Worker,
        compiler: concurrent.futures.Executor,
        journal: Journal,
        environment: dict[str, Any],
        deadline: float,
        stopwatch: Stopwatch,
        report: Callable[[Progress], None],
        seed: int,
        space: Space,
    ) -> None:
        self.problem, self.worker, self.compiler, self.deadline = problem, worker, compiler, deadline
        self.environment, self.stopwatch, self.report = environment, stopwatch, report
        self.variant_type, self.pool, self.digests = space.variant_type, space.pool, space.digests
        self.legal = frozenset(self.pool.variants)
        self.architecture = f"sm_{environment['capability']}"
        self.times: dict[Any, float] = {}
        self.errors: dict[Any, float] = {}
        self.failed: dict[Any, str] = {}
        self.failures: collections.Counter[Any] = collections.Counter()  # variant -> failures, in earlier runs too
        self.codes: dict[Any, Result] = {}  # machine code and grid -> the result of the first variant with them
        self.known: dict[Any, Result] = {}
        self.progress = Progress(
            problem=problem.name, funnel=f"{self.pool.declared:,} declared, {len(self.pool.variants):,} legal"
        )
        self.journal = journal
        self.sampler = _sampler(space, seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(sampler=self.sampler)
        self.remembered = self.same = 0
        self.lost = False  # whether the worker was lost

    def settings(self, trials: int, candidates: list[Any] | None) -> str:
        """What decides how a search ends, besides times: its length, its pool, and the texts of the kernels in it."""
        texts: dict[str, str] = {}
        for variant in self.pool.variants:
            texts |= self.digests(variant)
        pool = hashlib.sha256(repr(self.pool.variants).encode()).hexdigest()[:12]
        return json.dumps([trials, None if candidates is None else repr(candidates), pool, sorted(texts.items())])

    def ended_before(self, settings: str, incumbent: Any) -> Outcome | None:
        """The outcome of an earlier run with these settings; None if the record has named another variant since."""
        kept = self.journal.finished(self.problem, self.environment, settings)
        if kept is None:
            return None
        try:
            winner = winner_from_json(kept["winner"], "the journal's winner")
        except (RecordError, KeyError, TypeError):  # an older version wrote it
            return None
        if not same_problem(winner, self.problem) or (incumbent is not None and incumbent != winner.variant):
            return None
        winner = dataclasses.replace(winner, name=self.problem.name)
        pool = len(self.pool.variants)
        return Outcome(winner, winner.trials, kept["failed"], pool, self.pool.declared, winner.trials)

    def prepare(self, trials: int) -> None:
        """Stage the problem and take over what earlier runs measured."""
        with self.stopwatch.time("journal"):
            self.known, self.failures = self.journal.recalled(self.problem, self.environment, self.digests)
        self.progress.trials = min(trials, len(self.pool.variants))
        self._tell("staging")
        self.baselines = self._stage()
        self.progress.floor_us = self.baselines.floor_us

    def _tell(self, note: str) -> None:
        self.progress.note = note
        self.progress.trial = len(self.times) + len(self.failed)
        self.progress.failed = len(self.failed)
        self.progress.best_us = min(self.times.values(), default=math.inf)
        self.report(self.progress)

    def _stage(self) -> Any:
        with self.stopwatch.time("stage"):
            try:
                return self.worker.stage(self.problem)
            except WorkerLostError:
                self.worker.start()
                return self.worker.stage(self.problem)

    def explore(self, first: Iterable[Any], goal: int) -> None:
        """Measure ``first`` and then what the sampler proposes, until ``goal`` variants are measured."""
        for variant in first:
            self.sampler.propose_next(_row(variant))
        goal = min(goal, len(self.pool.variants))
        waiting: collections.deque[Any] = collections.deque()
        asked = told = len(self.times) + len(self.failed)
        while True:
            while asked < goal and len(waiting) <= AHEAD and self._has_time(told):
                # A model fitted to too few results proposes nothing worth compiling: measure first.
                if not self.sampler.promised and waiting and told < LEAST_RESULTS <= asked:
                    break
                waiting += self._ask(min(BATCH, goal - asked))
                asked = told + len(waiting)
            if not waiting:
                return
            trial, variant, compiled = waiting.popleft()
            if self._has_time(told):
                self._measure(trial, variant, compiled)
            told += 1

    def _has_time(self, told: int) -> bool:
        return not told or time.monotonic() <= self.deadline  # at least one variant is measured: the default

    def _ask(self, count: int) -> list[tuple[optuna.Trial, Any, Any]]:
        with self.stopwatch.time("search"):
            asked = [propose(self.study, self.variant_type) for _ in range(count)]
        return [(t, v, None if v in self.known else self._compile(v)) for t, v in asked]

    def _compile(self, variant: Any) -> concurrent.futures.Future[Any]:
        return self.compiler.submit(compile_variant, self.problem, variant, self.architecture)

    def _measure(self, trial: optuna.Trial, variant: Any, compiled: Any) -> None:
        if variant in self.known:
            result = self.known[variant]
            self.remembered += 1
        else:
            result = self._tried(variant, compiled)
        if isinstance(result, str):
            self.failed[variant] = result
            # Not FAIL: samplers ignore failed trials and propose similar variants again.
            value = math.log(2 * max(self.times.values(), default=1e6))
        else:
            self.times[variant], self.errors[variant] = result
            value = math.log(result[0])
        with self.stopwatch.time("search"):
            self.study.tell(trial, value)
        self._tell("")

    def _tried(self, variant: Any, compiled: concurrent.futures.Future[Any]) -> Result:
        """Get the result of a variant, and keep it in the journal."""
        result = self._result(variant, compiled)
        self.failures[variant] += isinstance(result, str)
        with self.stopwatch.time("journal"):
            self.journal.add(self.problem, self.environment, variant, result, self.digests(variant))
        return result

    def passing(self) -> list[Any]:
        """The variants that have not failed often enough for that to be a fact about them."""
        return [v for v, why in self.failed.items() if self.failures[v] < times_to_be_a_fact(why)]

    def try_again(self) -> None:
        """Try again, one by one, the variants whose failure may pass: at the end, when the machine may be quieter."""
        for variant in self.passing()[:MOST_AGAIN]:
            if time.monotonic() > self.deadline:
                return
            self._tell("trying again what may have failed for lack of time or room")
            self.lost |= self.failed[variant].startswith(LOST_WORKER)  # try it in a process that has tried nothing else
            result = self._tried(variant, self._compile(variant))
            if isinstance(result, str):
                self.failed[variant] = result
            else:
                del self.failed[variant]
                self.times[variant], self.errors[variant] = result

    def _result(self, variant: Any, compiled: concurrent.futures.Future[Any]) -> Result:
        with self.stopwatch.time("compile"):
            needs = result_of(compiled)
        reason = hopeless(needs, self.environment["capability"])
        if isinstance(needs, str) or reason is not None:
            return reason or str(needs)
        # Variants of equal code launch the same machine code, in the same way, on the same grid equally often, so take
        # the same time.
        code = tuple((need.machine_code, need.programs, need.launches, need.at_launch) for need in needs)
        if code in self.codes:
            self.same += 1
            return self.codes[code]
        result = self._on_gpu(variant)
        if not isinstance(result, str) or times_to_be_a_fact(result) == 1:
            self.codes[code] = result
        return result

    def _on_gpu(self, variant: Any) -> Result:
        self._revive()
        try:
            with self.stopwatch.time("measure"):
                measured = self.worker.measure(variant)
        except TrialFailedError as error:
            return str(error)
        except WorkerLostError as error:
            self.lost = True  # the next one starts only after the journal has why this one was lost
            return f"{LOST_WORKER}{error}"
        self.stopwatch.move(measured.check_s, "measure", "check")
        return measured.timing.median_us, measured.error

    def finish(self, default: Any, incumbent: Any, settings: str, finalists: int) -> Outcome:
        """Measure the best few, the default and the incumbent again, interleaved; choose."""
        if not self.times:
            reasons = "; ".join(sorted(set(self.failed.values()))[:3])
            raise WorkerLostError(f"no variant of {self.problem.name} could be measured: {reasons}")
        self._tell("comparing the best")
        ranked = sorted(self.times, key=self.times.__getitem__)
        best = ranked[:finalists]
        # A trial is timed behind launches of itself, which favours dependent launches: add variants without them.
        if any(map(dependent, best)):
            best += [v for v in ranked if not dependent(v)][:FEW]
        last = dict.fromkeys([*best, *(v for v in (incumbent, default) if v in self.times)])
        compared = self._compare(list(last))
        times, noise = counted(compared)
        chosen = choose(times, incumbent, noise)
        timings = {v: c.timing for v, c in compared.items()}
        timing = timings[chosen]
        winner = Winner(
            name=self.problem.name,
            family=self.problem.family,
            spec=self.problem.spec,
            size=self.problem.size,
            variant=chosen,
            digests=self.digests(chosen),
            median_us=round(timing.median_us, 3),
            spread_us=round(timing.spread_us, 3),
            error=round(self.errors[chosen], 4),
            default_us=round(timings[default].median_us, 3) if default in timings else 0.0,
            copy_us=round(self.baselines.copy_us, 3),
            floor_us=round(self.baselines.floor_us, 3),
            eager_us=round(self.baselines.eager_us, 3),
            bytes_moved=self.baselines.bytes_moved,
            trials=len(self.times),
            environment={
                **self.environment,
                "l2": "emptied before each round" if self.baselines.emptied else "left by the sets",
                "memories": len(compared[chosen].rounds),
                "chosen": "behind itself and a foreign kernel" if all_behind(compared) else "behind itself",
            },
        )
        failed = {str(dataclasses.asdict(v)): reason for v, reason in self.failed.items()}
        passing = len(self.passing())
        # A search that was cut short, or whose failures may pass, has not ended.
        if time.monotonic() <= self.deadline and not passing:
            kept = {"winner": dataclasses.asdict(winner), "failed": failed}
            self.journal.finish(self.problem, self.environment, settings, kept)
        pool = len(self.pool.variants)
        return Outcome(winner, len(self.times), failed, pool, self.pool.declared, self.remembered, self.same, passing)

    def _revive(self) -> None:
        """If the worker was lost, start another and stage the problem there."""
        if self.lost:
            self.worker.start()
            self._stage()
            self.lost = False

    def _fail(self, variant: Any, why: str) -> None:
        """Note, also in the journal, that a variant which had been measured has failed since."""
        del self.times[variant], self.errors[variant]
        self.failed[variant] = why
        self.failures[variant] += 1
        with self.stopwatch.time("journal"):
            self.journal.add(self.problem, self.environment, variant, why, self.digests(variant))

    def _compare(self, finalists: list[Any]) -> dict[Any, Compared]:
        """Time the finalists together, twice at most; if one of them breaks that, time each alone and note which fail."""
        timings: dict[Any, Compared] = {}
        why = ""
        for number, together in enumerate((finalists, finalists, *([v] for v in finalists))):
            if len(timings) == len(finalists):
                break
            self._revive()
            try:
                with self.stopwatch.time("compare"):
                    timings |= zip(together, self.worker.compare(together), strict=True)
            except TrialFailedError as error:
                why = str(error)
                if number > 1:  # it was timed alone
                    self._fail(together[0], why)
            except WorkerLostError as error:
                why, self.lost = str(error), True
        if not timings:
            raise WorkerLostError(f"none of the best variants of {self.problem.name} could be timed again: {why}")
        return timings


NO_MORE: Mapping[Any, float] = {}


def choose(times: dict[Any, float], incumbent: Any, noise: Mapping[Any, float] = NO_MORE) -> Any:
    """The winner among variants timed together.

    The incumbent stays unless another beats it by more than the noise. Otherwise the simplest variant within the noise
    of the best wins. ``noise`` says how far the ratio of a variant to the best spread; it counts if it exceeds NOISE.
    """
    best = min(times.values())
    apart = {v: max(NOISE, noise.get(v, 0.0)) for v in times}
    if incumbent in times and times[incumbent] <= best * (1 + apart[incumbent]):
        return incumbent
    return min((v for v, t in times.items() if t <= best * (1 + min(apart[v], MOST_NOISE))), key=lambda v: v.simplicity)


def counted(compared: dict[Any, Compared]) -> tuple[dict[Any, float], dict[Any, float]]:
    """The times that count of variants timed together, and how far the ratio of each to the best one spreads.

    If all were timed behind a foreign kernel too, the mean of both times counts: which kernel a call comes behind is
    not known, and what a dependent launch wins in the one case is several times what it loses in the other. A drift
    that meets two variants alike is no noise: so the ratio is taken between rounds on one memory at one moment.
    """
    both = all_behind(compared)
    taken = {v: c.mean if both else c.rounds for v, c in compared.items()}
    times = {v: middle(rounds) for v, rounds in taken.items()}
    best = taken[min(times, key=times.__getitem__)]
    return times, {v: half_spread(_ratios(rounds, best)) for v, rounds in taken.items()}


def all_behind(compared: dict[Any, Compared]) -> bool:
    """Whether all were timed behind a foreign kernel."""
    return all(c.behind for c in compared.values())


def _ratios(a: tuple[tuple[float, ...], ...], b: tuple[tuple[float, ...], ...]) -> list[float]:
    return [x / y for one, other in zip(a, b, strict=False) for x, y in zip(one, other, strict=False)]
