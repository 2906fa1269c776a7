"""Search one problem on one GPU: propose, compile, measure, compare the best again, name the winner."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import optuna

from generator.compiler import compile_variant, hopeless
from generator.compiler import compiled as result_of
from generator.pool import legal_pool, neighbours
from generator.sampler import PoolSampler
from generator.structures import structures
from generator.worker import TrialFailedError, Worker, WorkerLostError
from generator.workload import WORKLOADS
from tuned.choices import choices
from tuned.record import Winner

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterable

    from generator.journal import Journal
    from generator.problem import Problem

EXHAUSTIVE = 300  # a pool up to this size is measured whole: at 30 ms a variant, under 10 s
FINALISTS = 6  # measured again, interleaved: re-measuring a handful is the cheapest cure for the winner's curse
NOISE = 0.01  # a new winner must beat the incumbent by more; inside it the simpler variant wins
BATCH = 8  # proposals compiled ahead while the ones before are measured
SEED = 0


@dataclasses.dataclass
class Progress:
    """What a progress bar shows; the same object each time, changed in place."""

    problem: str = ""
    trial: int = 0
    trials: int = 0
    best_us: float = math.inf
    failed: int = 0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the search of one problem ended."""

    winner: Winner
    measured: int  # right and timed, earlier runs included
    failed: dict[str, str]  # a failed variant's knobs -> the reason
    pool: int
    remembered: int  # taken from the journal instead of measured again


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
    deadline: float = math.inf,
    report: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """The winner of a problem, after at most ``trials`` measurements or at ``deadline`` (time.monotonic).

    ``seeds`` are tried first, after the default and the ``incumbent``: winners of problems like this one.

    Raises:
        WorkerLostError: the GPU could not be brought to measure even the default variant.
    """
    search = _Search(problem, worker, compiler, journal, environment, deadline, report)
    default = WORKLOADS[problem.family].family.default_variant(problem.spec, problem.size)
    search.prepare(trials)
    first = [default, *([incumbent] if incumbent is not None else []), *seeds]
    search.run_all(v for v in dict.fromkeys(first) if v in search.legal)
    search.explore(trials)
    search.polish(trials)
    return search.finish(default, incumbent)


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
        report: Callable[[Progress], None],
    ) -> None:
        self.problem, self.worker, self.compiler, self.deadline = problem, worker, compiler, deadline
        self.environment, self.report = environment, report
        self.family = WORKLOADS[problem.family].family
        self.pool = legal_pool(problem, environment["capability"])
        self.legal = frozenset(self.pool.variants)
        self.architecture = f"sm_{environment['capability']}"
        self.times: dict[Any, float] = {}
        self.errors: dict[Any, float] = {}
        self.failed: dict[Any, str] = {}
        self.progress = Progress(problem=problem.name)
        rows = [dataclasses.asdict(v) for v in self.pool.variants]
        self.sampler = PoolSampler(choices(self.family.variant_type), rows, SEED)
        self.study = journal.study(problem, environment, self.sampler)
        self.journal = journal
        self.remembered = 0

    def digests(self, variant: Any) -> dict[str, str]:
        """Kernel -> digest of its text now, for every kernel that a variant launches."""
        return {n: structures()[n].digest for n in self.family.kernel_names(self.problem.spec, variant)}

    def prepare(self, trials: int) -> None:
        """Stage the problem and take over what earlier runs measured."""
        for variant, result in self.journal.remembered(self.problem, self.environment, self.digests):
            if variant not in self.legal:
                continue
            self.sampler.mark_seen(dataclasses.asdict(variant))
            if isinstance(result, str):
                self.failed[variant] = result
            else:
                self.times[variant], self.errors[variant] = result
        self.remembered = len(self.times)
        self.progress.trials = min(trials, len(self.pool.variants))
        self.progress.trial = len(self.times) + len(self.failed)
        self.progress.best_us = min(self.times.values(), default=math.inf)
        self.progress.note = "staging"
        self.report(self.progress)
        self.baselines = self._stage()

    def _stage(self) -> Any:
        try:
            return self.worker.stage(self.problem)
        except WorkerLostError:
            self.worker.start()
            return self.worker.stage(self.problem)

    def _left(self, trials: int) -> int:
        return 0 if time.monotonic() > self.deadline else trials - len(self.times) - len(self.failed)

    def run_all(self, variants: Iterable[Any]) -> None:
        """Measure these variants, those that have not been; compiled ahead together."""
        self._measure_all([(self._enqueue(v), v) for v in variants if v not in self.times and v not in self.failed])

    def _enqueue(self, variant: Any) -> optuna.Trial:
        self.sampler.propose_next(dataclasses.asdict(variant))
        return self.study.ask(self._space())

    def _space(self) -> dict[str, optuna.distributions.BaseDistribution]:
        knobs = choices(self.family.variant_type)
        return {name: optuna.distributions.CategoricalDistribution(values) for name, values in knobs.items()}

    def explore(self, trials: int) -> None:
        """Ask the study for variants until the trials are used up, or the pool is."""
        small = len(self.pool.variants) <= EXHAUSTIVE
        goal = len(self.pool.variants) if small else round(trials * 0.75)  # the rest is for the polish
        pending = self._ask(min(BATCH, self._left(goal)))
        while pending:
            ahead = self._ask(min(BATCH, self._left(goal) - len(pending)))
            self._measure_all(pending)
            pending = ahead

    def _ask(self, count: int) -> list[tuple[optuna.Trial, Any]]:
        asked = []
        for _ in range(min(count, self.sampler.left)):
            trial = self.study.ask(self._space())
            asked.append((trial, self.family.variant_type(**trial.params)))
        return [(t, v, self._compile(v)) for t, v in asked]  # type: ignore[misc]

    def _compile(self, variant: Any) -> concurrent.futures.Future[Any]:
        return self.compiler.submit(compile_variant, self.problem, variant, self.architecture)

    def polish(self, trials: int) -> None:
        """Measure the neighbours of the best, one knob and one step away, until none is better."""
        while self.times and self._left(trials) > 0:
            best = min(self.times, key=self.times.__getitem__)
            near = [v for v in neighbours(best, self.pool) if v not in self.times and v not in self.failed]
            if not near:
                return
            self.run_all(near[: min(self._left(trials), 2 * BATCH)])
            if min(self.times, key=self.times.__getitem__) == best and len(near) <= 2 * BATCH:
                return

    def _measure_all(self, asked: list[Any]) -> None:
        work = [(item[0], item[1], item[2] if len(item) > 2 else self._compile(item[1])) for item in asked]  # noqa: PLR2004
        for trial, variant, compiled in work:
            result = self._measure(variant, compiled)
            self.journal.note(trial, variant, result, self.digests(variant), self.environment)
            if isinstance(result, str):
                self.failed[variant] = result
                # Not FAIL: samplers ignore failed trials and propose the like again.
                value = math.log(2 * max(self.times.values(), default=1e6))
            else:
                self.times[variant], self.errors[variant] = result
                value = math.log(result[0])
            self.study.tell(trial, value)
            self.progress.trial = len(self.times) + len(self.failed)
            self.progress.failed = len(self.failed)
            self.progress.best_us = min(self.times.values(), default=math.inf)
            self.progress.note = ""
            self.report(self.progress)

    def _measure(self, variant: Any, compiled: concurrent.futures.Future[Any]) -> tuple[float, float] | str:
        reason = hopeless(result_of(compiled), self.environment["capability"])
        if reason is not None:
            return reason
        try:
            measured = self.worker.measure(variant)
        except TrialFailedError as error:
            return str(error)
        except WorkerLostError as error:
            self.worker.start()
            self._stage()
            return f"lost the worker: {error}"
        return measured.timing.median_us, measured.error

    def finish(self, default: Any, incumbent: Any) -> Outcome:
        """Measure the best few, the default and the incumbent again, interleaved; choose."""
        if not self.times:
            reasons = "; ".join(sorted(set(self.failed.values()))[:3])
            raise WorkerLostError(f"no variant of {self.problem.name} could be measured: {reasons}")
        self.progress.note = "comparing the best"
        self.report(self.progress)
        ranked = sorted(self.times, key=self.times.__getitem__)
        finalists = list(dict.fromkeys([*ranked[:FINALISTS], *(v for v in (incumbent, default) if v in self.times)]))
        timings = self._compare(finalists)
        chosen = choose({v: t.median_us for v, t in timings.items()}, incumbent)
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
            environment=self.environment,
        )
        failed = {str(dataclasses.asdict(v)): reason for v, reason in self.failed.items()}
        return Outcome(winner, len(self.times), failed, len(self.pool.variants), self.remembered)

    def _compare(self, finalists: list[Any]) -> dict[Any, Any]:
        try:
            timings = self.worker.compare(finalists)
        except WorkerLostError:
            self.worker.start()
            self._stage()
            timings = self.worker.compare(finalists)
        return dict(zip(finalists, timings, strict=True))


def choose(times: dict[Any, float], incumbent: Any) -> Any:
    """The winner among variants timed together.

    The incumbent, unless another beats it by more than the noise; else the simplest of those within the noise of the best.
    """
    best = min(times.values())
    if incumbent in times and times[incumbent] <= best * (1 + NOISE):
        return incumbent
    close = [v for v, t in times.items() if t <= best * (1 + NOISE)]
    return min(close, key=lambda v: v.simplicity)
