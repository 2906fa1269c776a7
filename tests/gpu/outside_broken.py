"""Tune the family of TUNED_FAMILY on a real GPU, with some broken variants: python -m tests.gpu.outside_broken."""

from __future__ import annotations

import ast
import dataclasses
import json
from typing import Any

from generator.processes.compiler import CompilerPool
from generator.processes.worker import Worker
from generator.searching.run import Orders, Run, Tools, tune_all
from generator.selection import problem_named
from generator.storage.backends import opened_storage
from generator.storage.journal import Journal
from generator.workload import default_variant
from tuned.families.choices import choices

HANG_SECONDS = 5.0


def broken(problem: Any, _capability: int, _multiprocessors: int) -> list[Any]:
    """The default variant with each of the deeds."""
    good = default_variant(problem)
    return [dataclasses.replace(good, deed=deed) for deed in choices(type(good))["deed"]]


def main() -> None:
    problem = problem_named("softmax_float32_1048x1000")
    run, worker, compiler = Run([problem]), Worker(0, trial_seconds=HANG_SECONDS, pause_seconds=0.0), CompilerPool(2)
    worker.start()
    try:
        environment = worker.environment()
        with opened_storage(None, environment["device"]) as storage:
            tools = Tools(worker, compiler, Journal(storage), environment)
            tune_all(run, tools, Orders([problem], trials=8, candidates=broken))
    finally:
        worker.stop()
        compiler.shutdown(wait=False)
    (outcome,) = run.outcomes.values()
    failed = {ast.literal_eval(knobs)["deed"]: reason for knobs, reason in outcome.failed.items()}
    print(json.dumps({"winner": outcome.winner.variant.deed, "failed": failed}))  # noqa: T201


if __name__ == "__main__":
    main()
