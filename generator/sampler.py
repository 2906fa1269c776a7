"""An Optuna sampler over a legal pool: no trial is illegal, and none is seen twice."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna

if TYPE_CHECKING:
    from collections.abc import Sequence


class PoolSampler(optuna.samplers.BaseSampler):
    """Take what a TPE sampler proposes to the nearest variant of the pool that no trial has had.

    Plain TPE proposes illegal or seen variants more than half of the time, and learns nothing from failed trials.
    Distance: the number of knobs that differ, then the steps between their choices; ties go to the first in the pool.
    """

    def __init__(self, knobs: dict[str, tuple[Any, ...]], pool: Sequence[dict[str, Any]], seed: int) -> None:
        """``pool`` holds one value for each of ``knobs``; ``seed`` fixes the order of proposals."""
        self._knobs = knobs
        self._rows = np.array([[knobs[name].index(row[name]) for name in knobs] for row in pool], dtype=np.int16)
        self._index = {tuple(row): i for i, row in enumerate(self._rows.tolist())}
        self._unseen = np.ones(len(pool), dtype=bool)
        self._next: collections.deque[dict[str, Any]] = collections.deque()
        self._pool = pool
        self._random = np.random.default_rng(seed)
        self._tpe = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, n_startup_trials=16, seed=seed)
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in knobs.items()
        }

    @property
    def left(self) -> int:
        """How many variants no trial has had."""
        return int(self._unseen.sum())

    def mark_seen(self, row: dict[str, Any]) -> None:
        """Never propose this variant; for what was enqueued, or measured in an earlier run."""
        index = self._index.get(tuple(self._knobs[name].index(row[name]) for name in self._knobs))
        if index is not None:
            self._unseen[index] = False

    def propose_next(self, row: dict[str, Any]) -> None:
        """Let the next trial have this variant.

        Not study.enqueue_trial: a run that is interrupted leaves its queue in the journal, and the next run's trials
        would take from it what was not meant for them.
        """
        self.mark_seen(row)
        self._next.append(row)

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
        """The nearest unseen variant to TPE's proposal; a random one while TPE has too little to go by."""
        if self._next:
            return dict(self._next.popleft())
        proposal = self._tpe.sample_relative(study, trial, search_space)
        unseen = np.flatnonzero(self._unseen)
        if not len(unseen):
            raise RuntimeError("every variant of the pool has had its trial")
        if proposal:
            wanted = np.array([self._knobs[name].index(proposal[name]) for name in self._knobs])
            steps = np.abs(self._rows[unseen] - wanted)
            chosen = unseen[np.argmin((steps != 0).sum(1) * 1000 + steps.sum(1))]
        else:
            chosen = self._random.choice(unseen)
        self._unseen[chosen] = False
        return dict(self._pool[chosen])

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: optuna.distributions.BaseDistribution,
    ) -> Any:
        """Never asked: every knob is in the relative space."""
        raise NotImplementedError(f"knob {param_name} is not part of the pool")
