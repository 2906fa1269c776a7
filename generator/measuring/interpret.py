"""Check variants in Triton's interpreter, on small sizes, against the float64 reference.

Run as a process of its own, since Triton decides when a kernel is defined whether it is interpreted:
`python -m generator.measuring.interpret` takes a JSON list of cases and gives one of answers, null for a right result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from generator.cache import ROOT
from generator.measuring.mended import mended_interpreter
from generator.problem import Problem
from generator.workload import WORKLOADS
from tuned.families.gru.launches import sequence
from tuned.families.gru.variant import PTX_EXCHANGES
from tuned.families.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuned.families.launch import Step

CPU_SECONDS = 600  # of all threads: a kernel that hangs there spins, and a busy machine makes none of it pass faster
TIMEOUT_S = 3600.0


def small(problem: Problem, variant: Any) -> Problem:
    """The problem with so few tokens that the interpreter takes under a second, and a tile that is not full."""
    size = problem.size
    fields = {"batch": min(size.batch, 3)}
    if problem.family == "rope":
        fields = {"batch": min(size.batch, 2), "seq": min(size.seq, variant.block_tokens + 1)}
    elif hasattr(size, "seq"):
        fields["seq"] = min(size.seq, 4)
    return dataclasses.replace(problem, size=dataclasses.replace(size, **fields))


def interpreted(cases: Sequence[tuple[Problem, Any]]) -> list[str | None]:
    """For each problem and variant, what is wrong with its result in the interpreter, or None."""
    asked = [
        {
            "name": problem.name,
            "family": problem.family,
            **{key: dataclasses.asdict(part) for key, part in (("spec", problem.spec), ("size", problem.size))},
            "variant": dataclasses.asdict(variant),
        }
        for problem, variant in cases
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "generator.measuring.interpret"]
    try:
        done = subprocess.run(  # noqa: S603 - this very module
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            cwd=ROOT,
            env=environment,
        )
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return [f"the interpreter did not finish: {said[-1] if said else error}"] * len(cases)
    answers: list[str | None] = json.loads(done.stdout)
    return answers


def _case(values: dict[str, Any]) -> str | None:
    from generator.measuring.check import WrongResultError, check  # noqa: PLC0415
    from generator.measuring.guard import inputs_of, probe  # noqa: PLC0415
    from tuned.launching.launcher import run_step  # noqa: PLC0415

    work = WORKLOADS[values["family"]]
    family = work.family
    spec, size = family.spec_type(**values["spec"]), family.size_type(**values["size"])
    variant = family.variant_type(**values["variant"])
    variant = _interpretable(variant)
    problem = small(Problem(values["name"], values["family"], spec, size), variant)
    call = probe(work.inputs(spec, problem.size, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    inputs = inputs_of(call)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    with mended_interpreter():
        for step in family.launches(spec, variant, call):
            for part in _without_waiting(spec, variant, call, step):
                run_step(part, _launch)
    try:
        # The interpreter drops the low bits of a bfloat16 store where a GPU rounds: twice the error of one rounding.
        check(call.out, wanted, 2 * bound, {n: (inputs[n], before[n]) for n in inputs})
    except WrongResultError as error:
        return str(error)
    return None


def _interpretable(variant: Any) -> Any:
    """The variant without what the interpreter does not have and no result depends on: the order of launches, PTX."""
    if getattr(variant, "pdl", False):
        variant = dataclasses.replace(variant, pdl=False)
    if getattr(variant, "exchange", "") in PTX_EXCHANGES:
        variant = dataclasses.replace(variant, exchange="poll")
    return variant


def _without_waiting(spec: Any, variant: Any, call: Any, step: Step) -> tuple[Step, ...]:
    """A step, as one launch a time step where its programs wait for each other: the interpreter runs them in turn."""
    if not isinstance(step, Launch) or not step.options.get("launch_cooperative_grid"):
        return (step,)
    return tuple(sequence(spec, variant, call, time, time + 1) for time in range(call.seq))


def _launch(launch: Launch) -> None:
    import numpy as np  # noqa: PLC0415

    from generator.rendering.modules import load  # noqa: PLC0415

    with np.errstate(all="ignore"):
        load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # Linux and macOS have it
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    json.dump([_case(values) for values in json.load(sys.stdin)], sys.stdout)
