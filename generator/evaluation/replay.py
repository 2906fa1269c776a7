"""Replay searches on recorded landscapes, with no GPU: how near they come to the best after how many evaluations."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution

from tuned.families.choices import choices
from tuned.families.registry import FAMILIES

from ..measuring.bench import Timing
from ..measuring.compile import Resources
from ..measuring.stage import Baselines, Compared, Measured
from ..problem import Problem
from ..processes.worker import TrialFailedError
from ..searching.pool import MAX_SEEDS
from ..searching.sampler import STARTUP
from ..searching.search import TRIALS, tune
from ..searching.space import Space, space_of
from ..storage.landscape import Landscape
from .foreign import Foreign

SHARE, LEAST = 0.15, 60  # a search may measure SHARE of a pool, or LEAST variants, whichever is more
MARKS = (15, 30, 60)  # evaluations after which the regret is reported, beside the end
NOISE = 0.004  # of one timing of a trial, relative: interleaved repetitions on an H200 show so much for small kernels
PROPOSALS = 2  # a plain sampler is stopped after so many times as many proposals as evaluations


@dataclasses.dataclass(frozen=True)
class Replay:
    """One search on one landscape."""

    problem: str
    regrets: tuple[float, ...]  # of the best so far, after 1, 2, ... evaluations: 0.01 is 1 percent slower
    regret: float  # of the variant that the search names as winner; a pool of up to 300 is then measured whole
    variant: Any
    wasted: int  # proposals that were illegal or seen before
    seconds: float  # spent on proposing
    gpu_s: float  # of all measured variants, if the landscape tells

    def after(self, evaluations: int) -> float:
        """Regret of the best variant among the first so many evaluations."""
        return self.regrets[min(evaluations, len(self.regrets)) - 1]


def evaluations(landscape: Landscape) -> int:
    """How many variants of a landscape's pool a search may measure: a share; on a foreign one as many as ``tune.py`` does."""
    pool = len(landscape.times) + len(landscape.failed)
    if isinstance(landscape, Foreign):
        return min(pool, TRIALS)
    return min(pool, max(LEAST, round(SHARE * pool)))


def _space(landscape: Landscape) -> Space:
    """The space that a search of a landscape chooses from."""
    if isinstance(landscape, Foreign):
        return landscape.space
    return space_of(landscape.problem, landscape.environment["capability"], landscape.environment["multiprocessors"])


class _Gpu:
    """A worker that answers from a landscape; ``noise`` is the relative deviation of one timing."""

    def __init__(self, landscape: Landscape, seed: int, noise: float) -> None:
        self.landscape, self.noise = landscape, noise
        self.random = np.random.default_rng(seed)
        self.measured: list[Any] = []

    def start(self) -> None:
        """Do nothing: this worker is never lost."""

    def stage(self, _problem: Problem) -> Baselines:
        """The baselines that were measured with the landscape."""
        return Baselines(self.landscape.copy_us, self.landscape.floor_us, 1.0, 1)

    def _timing(self, variant: Any, noise: float) -> Timing:
        return Timing(self.landscape.times[variant] * float(np.exp(self.random.normal(0, noise))), 0.01)

    def measure(self, variant: Any) -> Measured:
        """The variant's time in the landscape, or its failure."""
        self.measured.append(variant)
        if variant in self.landscape.failed:
            raise TrialFailedError(self.landscape.failed[variant])
        return Measured(self._timing(variant, self.noise), 0.5)

    def compare(self, variants: list[Any]) -> list[Compared]:
        """One time each, with half a trial's noise, as of five interleaved timings (the tuner takes six); a landscape tells no spread, nor ``behind``."""
        return [Compared(((self._timing(v, self.noise / math.sqrt(5)).median_us,),)) for v in variants]


class _Compiler(concurrent.futures.Executor):
    """A compiler for which every variant compiles, to code of its own."""

    def submit(self, _fn: Any, /, *args: Any, **_kwargs: Any) -> concurrent.futures.Future[Any]:
        """Answer at once."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result((Resources(32, 0, 0, repr(args[1])),))
        return future


class _Journal:
    """A journal that knows nothing and keeps nothing."""

    def finished(self, *_args: Any) -> None:
        """No search ended before."""

    def recalled(self, *_args: Any) -> tuple[dict[Any, Any], collections.Counter[Any]]:
        """Nothing was measured before."""
        return {}, collections.Counter()

    def add(self, *_args: Any) -> None:
        """Drop a trial."""

    def finish(self, *_args: Any) -> None:
        """Drop the end of a search."""


def searched(landscape: Landscape, seed: int = 0, *, noise: float = 0.0, warm: Sequence[Landscape] = ()) -> Replay:
    """Run the search of ``tune.py`` as it is, cold or seeded with the best variants of other landscapes."""
    gpu = _Gpu(landscape, seed, noise)
    start = time.perf_counter()
    outcome = tune(
        landscape.problem,
        gpu,  # type: ignore[arg-type]
        _Compiler(),
        _Journal(),  # type: ignore[arg-type]
        landscape.environment,
        trials=evaluations(landscape),
        seeds=_seeds(landscape, warm),
        seed=seed,
        space=_space(landscape),
    )
    return _replay(landscape, gpu.measured, outcome.winner.variant, 0, time.perf_counter() - start)


def _seeds(landscape: Landscape, others: Sequence[Landscape]) -> list[Any]:
    """The best variants of the most similar other problems, as generator.searching.pool takes them from a record."""
    own = landscape.problem

    def unlike(other: Landscape) -> tuple[float, float, str]:
        distance = FAMILIES[own.family].distance(own.spec, other.problem.spec)
        return distance, abs(math.log2(other.problem.size.tokens / own.size.tokens)), other.problem.name

    ranked = sorted((other for other in others if other.problem != own), key=unlike)
    best = dict.fromkeys(min(other.times, key=other.times.__getitem__) for other in ranked)
    return [variant for variant in best if variant in landscape.times][:MAX_SEEDS]


def at_random(landscape: Landscape, seed: int = 0) -> Replay:
    """Measure the default first, as every search does, then random variants of the pool, none twice."""
    first = _space(landscape).default
    pool = [v for v in (*landscape.times, *landscape.failed) if v != first]
    order = np.random.default_rng(seed).permutation(len(pool))[: evaluations(landscape) - 1]
    return _replay(landscape, [first, *(pool[i] for i in order)], None, 0, 0.0)


def _knobs(landscape: Landscape) -> dict[str, tuple[Any, ...]]:
    """The knobs of a landscape's variants and their choices, without newer knobs, which have one value in all of them."""
    kind = _space(landscape).variant_type
    newer = {f.name for f in dataclasses.fields(kind) if f.metadata.get("older")}
    recorded = [*landscape.times, *landscape.failed]
    return {
        name: values
        for name, values in choices(kind).items()
        if name not in newer or len({getattr(variant, name) for variant in recorded}) > 1
    }


def plain(landscape: Landscape, sampler: optuna.samplers.BaseSampler, budget: int | None = None) -> Replay:
    """Run a sampler of Optuna as it comes: it proposes knob by knob, also illegal and already measured variants.

    The sampler is told the outcome of those too (twice the worst time, or the known time). They cost no evaluation,
    until there were PROPOSALS times as many proposals as evaluations.
    """
    kind, knobs = _space(landscape).variant_type, _knobs(landscape)
    space, study = _distributions(knobs), optuna.create_study(sampler=sampler)
    penalty = math.log(2 * max(landscape.times.values()))
    budget, measured, wasted = budget or evaluations(landscape), dict[Any, None](), 0
    spent = 0.0
    while len(measured) < budget and wasted + len(measured) < PROPOSALS * budget:
        start = time.perf_counter()
        trial = study.ask(space)
        variant = kind(**{name: values[trial.params[name]] for name, values in knobs.items()})
        known = variant in landscape.times or variant in landscape.failed
        if not known or variant in measured:
            wasted += 1
        if known:
            measured[variant] = None
        study.tell(trial, math.log(landscape.times[variant]) if variant in landscape.times else penalty)
        spent += time.perf_counter() - start
    return _replay(landscape, list(measured), None, wasted, spent)


def pooled(landscape: Landscape, sampler: optuna.samplers.BaseSampler, seed: int = 0) -> Replay:
    """Run a sampler of Optuna over the pool: measure the default, then the unmeasured variant nearest to each proposal.

    The sampler is told the measured variant, in an added trial if it proposed another one. So no proposal is wasted.
    """
    knobs, random = _knobs(landscape), np.random.default_rng(seed)
    pool = [*landscape.times, *landscape.failed]
    levels = np.array([[knobs[name].index(getattr(v, name)) for name in knobs] for v in pool])
    ordered = [_ordered(values) for values in knobs.values()]
    most = [max(1, len(values) - 1) for values in knobs.values()]
    space = _distributions(knobs)
    study, penalty = optuna.create_study(sampler=sampler), math.log(2 * max(landscape.times.values()))
    unseen, measured, spent = np.ones(len(pool), dtype=bool), list[Any](), 0.0
    while len(measured) < evaluations(landscape):
        start = time.perf_counter()
        trial = study.ask(space)
        asked = np.array([trial.params[name] for name in knobs])
        if measured:
            steps = np.abs(levels - asked)
            away = np.where(ordered, steps / most, steps > 0).sum(1) + random.random(len(pool)) / 1e3
            place = int(np.argmin(np.where(unseen, away, math.inf)))
        else:
            place = pool.index(_space(landscape).default)
        unseen[place], variant = False, pool[place]
        measured.append(variant)
        us = landscape.times.get(variant)
        value = penalty if us is None else math.log(us) + random.normal(0, NOISE)
        if np.array_equal(levels[place], asked):
            study.tell(trial, value)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            params = dict(zip(knobs, levels[place].tolist(), strict=True))
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=value))
        spent += time.perf_counter() - start
    return _replay(landscape, measured, None, 0, spent)


def _distributions(knobs: dict[str, tuple[Any, ...]]) -> dict[str, optuna.distributions.BaseDistribution]:
    """For each knob, a distribution over the places of its choices."""
    return {
        name: IntDistribution(0, len(values) - 1) if _ordered(values) else CategoricalDistribution(range(len(values)))
        for name, values in knobs.items()
    }


def _ordered(values: tuple[Any, ...]) -> bool:
    return all(type(v) in (int, float) for v in values)


def _replay(landscape: Landscape, measured: list[Any], chosen: Any, wasted: int, seconds: float) -> Replay:
    regrets = tuple(itertools.accumulate(map(landscape.regret, measured[: evaluations(landscape)]), min))
    if chosen is None:
        chosen = min(measured, key=landscape.regret)
    spent = sum(landscape.gpu_s.get(v, 0.0) for v in measured) if isinstance(landscape, Foreign) else 0.0
    return Replay(landscape.problem.name, regrets, landscape.regret(chosen), chosen, wasted, seconds, spent)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to search, and on how many landscapes there is time to run it."""

    run: Callable[[Landscape, int], Replay]
    every: int = 1  # 3: on every third landscape
    plain: bool = False  # a sampler of Optuna as it comes, or one that is slow: replayed for few seeds


def strategies(landscapes: Sequence[Landscape]) -> dict[str, Strategy]:
    """The strategies to compare, by name."""
    samplers = optuna.samplers
    found = {
        "tune.py, seeded by other problems": Strategy(lambda x, s: searched(x, s, noise=NOISE, warm=landscapes)),
        "tune.py": Strategy(lambda x, s: searched(x, s, noise=NOISE)),
        "the default, then random, none twice": Strategy(at_random),
        "Optuna TPE over the pool": Strategy(
            lambda x, s: pooled(x, samplers.TPESampler(seed=s, multivariate=True, n_startup_trials=STARTUP), s)
        ),
        "Optuna TPE": Strategy(lambda x, s: plain(x, samplers.TPESampler(seed=s, multivariate=True)), 3, plain=True),
    }
    if importlib.util.find_spec("scipy"):  # Optuna does not install it
        # A tenth to a third of a second a proposal, and more the more it has seen: few seeds, and "Optuna GP" to the last mark only.
        found["Optuna GP over the pool"] = Strategy(
            lambda x, s: pooled(x, samplers.GPSampler(seed=s, n_startup_trials=STARTUP), s), 3, plain=True
        )
        found["Optuna GP"] = Strategy(lambda x, s: plain(x, samplers.GPSampler(seed=s), LEAST), 6, plain=True)
    return found


def agreement(landscape: Landscape, seeds: tuple[int, int]) -> float:
    """How much slower the worse of two independent tunings ends, by the landscape's own times."""
    first, second = (searched(landscape, seed, noise=NOISE) for seed in seeds)
    slow, fast = sorted((landscape.times[second.variant], landscape.times[first.variant]), reverse=True)
    return slow / fast - 1


def summary(replays: Sequence[Replay]) -> dict[str, float]:
    """Regrets of many replays: the median and the worst, at the end and on the way."""
    return {
        **{f"median at {mark}": statistics.median(r.after(mark) for r in replays) for mark in MARKS},
        "median": statistics.median(r.regrets[-1] for r in replays),
        "95th": sorted(r.regrets[-1] for r in replays)[math.ceil(0.95 * len(replays)) - 1],
        "worst": max(r.regrets[-1] for r in replays),
        "median winner": statistics.median(r.regret for r in replays),
        "worst winner": max(r.regret for r in replays),
        "wasted": sum(r.wasted for r in replays) / sum(r.wasted + len(r.regrets) for r in replays),
        "ms a proposal": 1e3 * sum(r.seconds for r in replays) / sum(r.wasted + len(r.regrets) for r in replays),
    }
