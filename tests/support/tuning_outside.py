"""A process that tunes the family of TUNED_FAMILY on a fake GPU, then runs commands of tune.py and prints JSON.

python -m tests.support.tuning_outside PROBLEMS ["a command" ...]. Times are made up, so that the winner is known: the smaller a
variant's knobs are, the faster it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from typer.testing import CliRunner

from generator import command_line
from generator.publishing.files import render_all, write_table
from generator.searching.run import Orders, Run, Tools, tune_all
from generator.selection import select
from generator.storage.backends import opened_storage
from generator.storage.journal import Journal
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker, TrialFailedError


def cost(_problem: Any, variant: Any) -> float:
    knobs = vars(variant)
    if knobs.get("num_warps") == 1:
        raise TrialFailedError("WrongResultError: the worst error is 9 times what rounding allows")
    return 10.0 + sum(value / 100 for value in knobs.values() if isinstance(value, int))


def main() -> int:
    problems = select(None, sys.argv[1])
    worker: Any = FakeWorker(cost)
    worker.start()
    run = Run(problems)
    with opened_storage(None, ENVIRONMENT["device"]) as storage:
        tools = Tools(worker, FakeCompiler(), Journal(storage), ENVIRONMENT)
        tune_all(run, tools, Orders(problems, trials=20, write_table=write_table, render=render_all))
    found = {n: (vars(o.winner.variant), sorted(set(o.failed.values()))) for n, o in run.outcomes.items()}
    said = {}
    for command in sys.argv[2:]:
        done = CliRunner().invoke(command_line.app, command.split())
        said[command] = done.exit_code, " ".join(done.output.split())
    print(json.dumps({"winners": found, "said": said}))  # noqa: T201
    return 0 if run.outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
