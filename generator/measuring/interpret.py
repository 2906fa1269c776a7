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
from collections.abc import Sequence
from typing import Any

from tuned.families.launch import Launch

from ..places import GENERATOR, ROOT
from ..problem import Problem
from ..workload import WORKLOADS
from .mended import mended_interpreter

CPU_SECONDS = 600  # of all threads: a kernel that hangs there spins, and a busy machine makes none of it pass faster
TIMEOUT_S = 3600.0


def small(problem: Problem, variant: Any) -> Problem:
    """The problem at a size that takes the interpreter under a second."""
    return dataclasses.replace(problem, size=WORKLOADS[problem.family].small(problem.size, variant))


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
    command = [sys.executable, "-m", f"{GENERATOR}.measuring.interpret"]
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
    from tuned.launching.launcher import run_step  # noqa: PLC0415

    from .check import WrongResultError, check  # noqa: PLC0415
    from .guard import inputs_of, probe  # noqa: PLC0415

    work = WORKLOADS[values["family"]]
    family = work.family
    spec, size = family.spec_type(**values["spec"]), family.size_type(**values["size"])
    variant = family.variant_type(**values["variant"])
    if getattr(variant, "pdl", False):  # the interpreter has no order of launches, on which no result depends
        variant = dataclasses.replace(variant, pdl=False)
    problem = small(Problem(values["name"], values["family"], spec, size), variant)
    call = probe(work.inputs(spec, problem.size, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    inputs = inputs_of(call)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    with mended_interpreter():
        for step in (work.interpreted or family.launches)(spec, variant, call):
            run_step(step, _launch)
    try:
        # The interpreter drops the low bits of a bfloat16 store where a GPU rounds: twice the error of one rounding.
        check(call.out, wanted, 2 * bound, {n: (inputs[n], before[n]) for n in inputs})
    except WrongResultError as error:
        return str(error)
    return None


def _launch(launch: Launch) -> None:
    import numpy as np  # noqa: PLC0415

    from ..rendering.modules import load  # noqa: PLC0415

    with np.errstate(all="ignore"):
        load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # Linux and macOS have it
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    json.dump([_case(values) for values in json.load(sys.stdin)], sys.stdout)
