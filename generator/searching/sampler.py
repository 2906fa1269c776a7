"""An Optuna sampler over a legal pool: it proposes no illegal variant, and none twice."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna

BATCH = 8  # proposals made at once from one model: their order is that of expected improvement
STARTUP = 16  # trials before the model proposes any: those of propose_next, and random variants
LEAST_RESULTS = 8  # results that a model needs
FITS = 12  # length scales and noises tried for each batch; the likeliest are kept, and the next batch starts from them
ADDITIVE = 0.3  # share of a kernel that sums over knobs, beside their product: most knobs act on their own
WARP = 0.03  # the model sees log(time / best - 1 + WARP): it resolves 3 percent and hardly tells slow variants apart


class PoolSampler(optuna.samplers.BaseSampler):
    """Bayesian optimisation over a pool: a Gaussian process on the knobs, expected improvement, batches of BATCH.

    Chosen by replay on exhaustive landscapes (``python tune.py replay``) against random search and Optuna's own TPE and
    Gaussian process, which also propose illegal variants and seen ones: docs/decisions/0008-*.md has the figures. The
    kernel is Matérn 3/2 on the places of ordered choices and exchangeable on others; 0.7 of the product over knobs and
    0.3 of their mean (after additive Gaussian processes, Duvenaud et al. 2011). Length scales and noise are chosen by
    marginal likelihood among random candidates. Trials that were asked and not told count as if they had the mean that
    the model gives them (kriging believer, Ginsbourger et al. 2010), so proposals can be compiled ahead. The same
    results give the same proposals.
    """

    def __init__(
        self,
        knobs: dict[str, tuple[Any, ...]],
        pool: Sequence[dict[str, Any]],
        seed: int,
        features: Sequence[Sequence[int]] = (),
    ) -> None:
        """``seed`` fixes the order of proposals.

        Each variant of ``pool`` has a value for each of ``knobs``. ``features``, if any, gives it more ordered levels.
        """
        self._knobs, self._pool = knobs, pool
        rows = np.array([[knobs[name].index(row[name]) for name in knobs] for row in pool], dtype=np.intp)
        self._index = {tuple(row): i for i, row in enumerate(rows.tolist())}
        extra = np.array([list(f) for f in features], dtype=np.intp).reshape(len(pool), -1)
        levels = np.concatenate((rows, extra - extra.min(0, initial=0)), axis=1).T  # [dimensions, pool]
        ordered = [all(type(v) in (int, float) for v in values) for values in knobs.values()]
        # A knob that is the same in the whole pool, such as one for other calls of the family, only dilutes the
        # kernel's mean.
        told = [bool(np.ptp(places)) for places in levels] if any(map(np.ptp, levels)) else [True] * len(levels)
        self._levels = levels[told]
        self._ordered = [
            is_so for is_so, tells in zip([*ordered, *[True] * extra.shape[1]], told, strict=True) if tells
        ]
        self._unseen = np.ones(len(pool), dtype=bool)
        self._next: collections.deque[int] = collections.deque()
        self._asked: dict[int, int] = {}  # trial number -> place in the pool
        self._random = np.random.default_rng(seed)
        self._scales, self._noise = np.full(len(self._levels), 2.0), 1e-2
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in knobs.items()
        }

    @property
    def left(self) -> int:
        """How many variants are neither tried nor promised to a trial."""
        return int(self._unseen.sum())

    @property
    def promised(self) -> int:
        """How many proposals are ready without a new model."""
        return len(self._next)

    def propose_next(self, row: dict[str, Any]) -> None:
        """Promise this variant of the pool to the next trial without one, if the variant is neither tried nor promised.

        study.enqueue_trial would put a trial of another kind into the storage.
        """
        place = self._index[tuple(self._knobs[name].index(row[name]) for name in self._knobs)]
        if self._unseen[place]:
            self._promise(place)

    def _promise(self, place: int) -> None:
        self._unseen[place] = False
        self._next.append(place)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, optuna.distributions.BaseDistribution]:
        """All knobs, always: a variant is proposed whole."""
        del study, trial
        return self._space

    def sample_relative(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        search_space: dict[str, optuna.distributions.BaseDistribution],
    ) -> dict[str, Any]:
        """A promised variant, or the first of a new batch. The study's values are logarithms of times."""
        del search_space
        if not self._next:
            if not self.left:
                raise RuntimeError("every variant of the pool has had its trial")
            self._plan(study)
        place = self._next.popleft()
        self._asked[trial.number] = place
        return dict(self._pool[place])

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: optuna.distributions.BaseDistribution,
    ) -> Any:
        """Never asked: every knob is in the relative space."""
        raise NotImplementedError(f"knob {param_name} is not part of the pool")

    def _plan(self, study: optuna.Study) -> None:
        """Promise the next batch."""
        told = {
            self._asked[t.number]: t.value
            for t in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
            if t.number in self._asked and t.value is not None
        }
        rest = np.flatnonzero(self._unseen)
        want = min(BATCH, len(rest))
        if len(self._asked) < STARTUP or len(told) < LEAST_RESULTS:
            count = min(want, max(1, STARTUP - len(self._asked)))
            picks: list[int] = self._random.choice(rest, count, replace=False).tolist()
        else:
            pending = np.array([p for p in self._asked.values() if p not in told], dtype=np.intp)
            picks = self._improving(np.array(list(told)), np.array(list(told.values())), pending, rest, want)
        for place in picks:
            self._promise(place)

    def _improving(
        self, seen: np.ndarray, values: np.ndarray, pending: np.ndarray, rest: np.ndarray, want: int
    ) -> list[int]:
        """The variants of ``rest`` with the largest expected improvement, each as if those before it were measured."""
        warped = np.log(np.expm1(values - values.min()) + WARP)
        target = (warped - warped.mean()) / (warped.std() + 1e-9)
        tables = self._fit(seen, target)
        noise = self._noise
        chol = np.linalg.cholesky(self._kernel(tables, seen, seen) + noise * np.eye(len(seen)))
        weights = np.linalg.solve(chol.T, np.linalg.solve(chol, target))
        best = (self._kernel(tables, seen, seen) @ weights).min()
        if len(pending):
            believed = self._kernel(tables, pending, seen) @ weights
            seen, target = np.concatenate((seen, pending)), np.concatenate((target, believed))
            chol = np.linalg.cholesky(self._kernel(tables, seen, seen) + noise * np.eye(len(seen)))
        half = np.linalg.solve(chol, self._kernel(tables, seen, rest))  # [seen, rest]
        mean = half.T @ np.linalg.solve(chol, target)
        variance = np.maximum(1 - (half**2).sum(0), 1e-9)
        alive = np.ones(len(rest), dtype=bool)
        picks = []
        for _ in range(want):
            pick = int(np.argmax(np.where(alive, _expected_improvement(best - mean, np.sqrt(variance)), -1.0)))
            alive[pick] = False
            picks.append(int(rest[pick]))
            # Once measured, the pick would lower the variance of similar variants.
            covariance = self._kernel(tables, rest, rest[[pick]])[:, 0] - half.T @ half[:, pick]
            shared = covariance / math.sqrt(variance[pick] + noise)
            variance = np.maximum(variance - shared**2, 1e-9)
            half = np.vstack((half, shared[None]))
        return picks

    def _fit(self, seen: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
        """Keep the likeliest of FITS length scales and noises; returns the kernel's table of each dimension."""
        best: tuple[float, Any, float, Any] | None = None
        for attempt in range(FITS):
            scales, noise = self._scales, self._noise
            if attempt:
                near = attempt <= FITS // 2
                random = self._random
                jumps = random.normal(0, 0.4, len(scales)), random.uniform(math.log(0.5), math.log(8), len(scales))
                scales = scales * np.exp(jumps[0]) if near else np.exp(jumps[1])
                noise = math.exp(random.uniform(math.log(1e-3), math.log(0.3)))
            tables = self._tables(scales)
            chol = np.linalg.cholesky(self._kernel(tables, seen, seen) + noise * np.eye(len(seen)))
            solved = np.linalg.solve(chol, target)
            likelihood = float(-0.5 * solved @ solved - np.log(np.diag(chol)).sum())
            if best is None or likelihood > best[0]:
                best = likelihood, scales, noise, tables
        assert best is not None
        _, self._scales, self._noise, tables = best
        return tables  # type: ignore[no-any-return]

    def _tables(self, scales: np.ndarray) -> list[np.ndarray]:
        """Correlation of every two levels of a dimension, one table each."""
        found = []
        for levels, ordered, scale in zip(self._levels, self._ordered, scales, strict=True):
            count = int(levels.max()) + 1
            if ordered:
                steps = math.sqrt(3) * np.abs(np.subtract.outer(np.arange(count), np.arange(count))) / scale
                found.append((1 + steps) * np.exp(-steps))
            else:
                found.append(np.where(np.eye(count, dtype=bool), 1.0, math.exp(-1 / scale)))
        return found

    def _kernel(self, tables: list[np.ndarray], a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Covariance of the variants at places ``a`` with those at ``b``: [a, b]."""
        product, total = np.ones((len(a), len(b))), np.zeros((len(a), len(b)))
        for table, levels in zip(tables, self._levels, strict=True):
            part = table[levels[a]][:, levels[b]]
            product *= part
            total += part
        return (1 - ADDITIVE) * product + ADDITIVE / len(tables) * total


def _expected_improvement(gain: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Mean of max(0, improvement) where the improvement is normal with these means and deviations."""
    score = gain / spread
    density = np.exp(-(score**2) / 2) / math.sqrt(2 * math.pi)
    # The upper tail of the normal distribution within 1e-7: Abramowitz and Stegun, 26.2.17.
    t = 1 / (1 + 0.2316419 * np.abs(score))
    tail = density * t * np.polyval((1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530), t)
    return gain * np.where(score < 0, tail, 1 - tail) + spread * density  # type: ignore[no-any-return]
