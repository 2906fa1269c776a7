"""Kernel Tuner's own strategies beside our search on the landscapes of `python tune.py replay --foreign FOLDER`, in the same tables.

    pip install kernel_tuner
    python -m benchmarks.kernel_tuner FOLDER

The strategies run in Kernel Tuner's simulation mode with as many evaluations as our search, none counted twice. They
choose their own starting points, and get the recorded times without noise.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.metadata
import io
import itertools
import json
import logging
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import count
from generator.evaluation.comparing import comparison_markdown, runs
from generator.evaluation.foreign import Foreign, load_folder
from generator.evaluation.replay import Replay, evaluations, strategies
from tuned.families.choices import choices

# Strategies that Kernel Tuner's authors recommend or published, and that need no further package.
STRATEGIES = (
    "genetic_algorithm",
    "diff_evo",
    "greedy_ils",
    "dual_annealing",
    "hybrid_vndx",
    "adaptive_tabu_greywolf",
    "bayes_opt",
)


def run(strategy: str, landscape: Foreign, content: dict[str, Any], cache: Path, seed: int) -> Replay:
    """One search; ``cache`` is a file of ``content``."""
    import kernel_tuner  # noqa: PLC0415 - a separate package, which nothing else needs

    names, knobs = content["tune_params_keys"], choices(landscape.space.variant_type)
    legal = {tuple(row[name] for name in names) for row in content["cache"].values()}

    def allowed(*values: Any, **named: Any) -> bool:
        """Whether these are the values of a row: Kernel Tuner passes them as positions, as keywords or as a dictionary."""
        if values and isinstance(values[0], dict):
            named = values[0]
        return (tuple(named[name] for name in names) if named else values) in legal

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - Kernel Tuner draws from this generator
    start, budget = time.perf_counter(), evaluations(landscape)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, _ = kernel_tuner.tune_kernel(
            content["kernel_name"],
            "",
            content["problem_size"],
            [],
            content["tune_params"],
            restrictions=allowed,
            strategy=strategy,
            strategy_options={"max_fevals": budget},
            simulation_mode=True,
            cache=str(cache),
            lang="CUDA",
            objective="time",
            quiet=True,
        )
    seconds = time.perf_counter() - start
    found = (landscape.space.variant_type(**{name: row[name] for name in knobs}) for row in rows)
    measured = list(dict.fromkeys(found))[:budget]
    regrets = tuple(itertools.accumulate(map(landscape.regret, measured), min))
    gpu_s = sum(landscape.gpu_s.get(v, 0.0) for v in measured)
    best = min(measured, key=landscape.regret)
    return Replay(landscape.problem.name, regrets, regrets[-1], best, len(rows) - len(measured), seconds, gpu_s)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=count, default=10)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)

    names = [f"Kernel Tuner {strategy}" for strategy in options.strategies.split(",")]
    landscapes = load_folder(options.folder)
    ours = runs(landscapes, strategies(landscapes)["tune.py"], options.seeds)
    found: dict[str, list[list[Replay]]] = {"tune.py": ours, **{name: [] for name in names}}
    with tempfile.TemporaryDirectory() as folder:
        for one in landscapes:
            path = next(options.folder.glob(f"{one.problem.name}.json*"))
            raw = path.read_bytes()
            text = gzip.decompress(raw) if path.suffix == ".gz" else raw
            cache = Path(folder) / "cache.json"
            cache.write_bytes(text)
            content = json.loads(text)
            for name, strategy in zip(names, options.strategies.split(","), strict=True):
                found[name].append([run(strategy, one, content, cache, seed) for seed in range(options.seeds)])
    print(f"kernel_tuner {importlib.metadata.version('kernel_tuner')}, {options.seeds} seeds\n")
    print(comparison_markdown(landscapes, found))
    for name, searches in found.items():
        counts = [len(r.regrets) for one in searches for r in one]
        print(f"\n{name}: {min(counts)} to {max(counts)} evaluations a search")


if __name__ == "__main__":
    main()
