"""Check variants in Triton's interpreter, on small sizes, against the float64 reference.

This runs as a process of its own, since Triton decides when a kernel is defined whether it is interpreted:
`python -m generator.measuring.interpret` reads a pickled list of cases and prints JSON, with null for a right result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tuned.families.launch import Launch

from ..places import GENERATOR, ROOT
from ..problem import Problem
from ..workload import WORKLOADS
from .mended import mended_interpreter

CPU_SECONDS = 600  # of all threads: an interpreted kernel that hangs spins, and CPU time does not depend on other load
TIMEOUT_S = 3600.0


def small(problem: Problem, variant: Any) -> Problem:
    """The problem at a size that takes the interpreter under a second."""
    return dataclasses.replace(problem, size=WORKLOADS[problem.family].small(problem.size, variant))


def interpreted(cases: Sequence[tuple[Problem, Any]]) -> list[str | None]:
    """For each problem and variant, what is wrong with its result in the interpreter, or None."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", f"{GENERATOR}.measuring.interpret"]
    try:
        done = subprocess.run(  # noqa: S603 - this very module
            command,
            input=pickle.dumps(cases),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
            cwd=ROOT,
            env=environment,
        )
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)
        return [f"the interpreter did not finish: {said.splitlines()[-1]}"] * len(cases)
    return json.loads(done.stdout.splitlines()[-1])


def _told(problem: Problem, variant: Any) -> str | None:
    """``_case``, with an exception returned as text, so that it ends only this case."""
    try:
        return _case(problem, variant)
    except Exception as error:  # noqa: BLE001 - a family from outside may raise anything
        return f"{type(error).__name__}: {error}"


def _case(problem: Problem, variant: Any) -> str | None:
    from tuned.launching.launcher import run_step  # noqa: PLC0415

    from .check import WrongResultError, check, inputs_of, probe  # noqa: PLC0415

    work, spec = WORKLOADS[problem.family], problem.spec
    if getattr(variant, "pdl", False):  # the interpreter has no dependent launches, and no result depends on them
        variant = dataclasses.replace(variant, pdl=False)
    call = probe(work.inputs(spec, small(problem, variant).size, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    inputs = inputs_of(call)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    with mended_interpreter():
        for step in (work.interpreted or work.family.launches)(spec, variant, call):
            run_step(step, _launch)
    try:
        # The interpreter drops the low bits of a bfloat16 store where a GPU rounds: twice the error of one rounding.
        check(call.out, wanted, 2 * bound, {n: (inputs[n], before[n]) for n in inputs})
    except WrongResultError as error:
        return str(error)
    return None


def _launch(launch: Launch) -> None:
    import numpy as np  # noqa: PLC0415

    from ..rendering.structures import load  # noqa: PLC0415

    with np.errstate(all="ignore"):
        load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # Linux and macOS have it
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    found = [_told(*case) for case in pickle.load(sys.stdin.buffer)]  # noqa: S301 - this module pickled it
    sys.stdout.write("\n" + json.dumps(found) + "\n")  # on a line of its own: a family from outside may print
