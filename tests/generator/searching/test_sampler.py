"""The sampler over a pool: nothing illegal, nothing twice, everything in the end."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import optuna
import pytest

from generator.searching.pool import legal_pool
from generator.searching.sampler import PoolSampler
from generator.selection import problem_named
from tuned.families.choices import choices
from tuned.families.rope.variant import RopeVariant

KNOBS: dict[str, tuple[Any, ...]] = {"a": (1, 2, 4, 8), "b": ("x", "y"), "c": (False, True), "d": (0, 1)}
# Not a product: half of the combinations are illegal.
POOL = [
    {"a": a, "b": b, "c": c, "d": d}
    for a in KNOBS["a"]
    for b in KNOBS["b"]
    for c in KNOBS["c"]
    for d in KNOBS["d"]
    if c == (a > 2) and not (b == "y" and d and a == 1)
]


def space(knobs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: optuna.distributions.CategoricalDistribution(values) for name, values in knobs.items()}


def proposals(sampler: PoolSampler, knobs: dict[str, tuple[Any, ...]], count: int) -> list[dict[str, Any]]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    asked = []
    for i in range(count):
        trial = study.ask(space(knobs))
        asked.append(trial.params)
        study.tell(trial, 1 + float(i % 7))  # the logarithm of a time
    return asked


@pytest.mark.parametrize("seed", range(3))
def test_every_variant_is_proposed_once_and_no_other(seed: int) -> None:
    sampler = PoolSampler(KNOBS, POOL, seed)
    asked = proposals(sampler, KNOBS, len(POOL))
    assert sorted(map(str, asked)) == sorted(map(str, POOL))
    assert sampler.left == 0


def test_an_exhausted_pool_says_so() -> None:
    sampler = PoolSampler(KNOBS, POOL, 0)
    proposals(sampler, KNOBS, len(POOL))
    with pytest.raises(RuntimeError, match="every variant of the pool has had its trial"):
        proposals(sampler, KNOBS, 1)


def test_what_is_to_come_next_comes_next_and_once() -> None:
    sampler = PoolSampler(KNOBS, POOL, 0)
    sampler.propose_next(POOL[5])
    sampler.propose_next(POOL[2])
    asked = proposals(sampler, KNOBS, len(POOL))
    sampler.propose_next(POOL[5])  # has had its trial already
    assert asked[:2] == [POOL[5], POOL[2]]
    assert len({str(row) for row in asked}) == len(POOL)


def test_the_same_seed_and_times_give_the_same_proposals() -> None:
    first, second = (proposals(PoolSampler(KNOBS, POOL, 1), KNOBS, 12) for _ in range(2))
    assert first == second


def test_a_real_pool_gives_legal_variants_only() -> None:
    problem = problem_named("llama3_8b_decode_64x1")
    pool = legal_pool(problem, 90)
    knobs = choices(RopeVariant)
    sampler = PoolSampler(knobs, [dataclasses.asdict(v) for v in pool.variants], 0)
    asked = [RopeVariant(**row) for row in proposals(sampler, knobs, 60)]
    assert set(asked) <= set(pool.variants)
    assert len(set(asked)) == 60


def test_features_are_levels_of_any_number_and_help_or_are_left_out() -> None:
    cost = {str(row): math.log(10 + abs(row["a"] - 4) + row["d"]) for row in POOL}
    best = min(cost.values())
    for features in ((), [(row["a"] * 3, -row["d"]) for row in POOL]):
        sampler = PoolSampler(KNOBS, POOL, 0, features)
        study = optuna.create_study(sampler=sampler)
        for _ in range(len(POOL)):
            trial = study.ask(space(KNOBS))
            study.tell(trial, cost[str(trial.params)])
        assert study.best_value == best


def test_trials_that_run_are_believed_and_not_proposed_again() -> None:
    problem = problem_named("llama3_8b_2x4096")
    pool = legal_pool(problem, 90)
    knobs = choices(RopeVariant)
    sampler = PoolSampler(knobs, [dataclasses.asdict(v) for v in pool.variants], 0)
    study = optuna.create_study(sampler=sampler)
    asked = []
    for i in range(48):  # results arrive 16 trials late
        asked.append(study.ask(space(knobs)))
        if i >= 16:
            study.tell(asked[i - 16], float(asked[i - 16].params["block_tokens"]))
    assert len({str(trial.params) for trial in asked}) == len(asked)
    # By now the model knows that fewer tokens a program are faster.
    assert sum(trial.params["block_tokens"] == 1 for trial in asked[32:]) >= 12
