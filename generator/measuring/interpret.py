"""Check variants in Triton's interpreter, on small sizes, against the float64 reference.

Run as a process of its own, since Triton decides when a kernel is defined whether it is interpreted:
`python -m generator.measuring.interpret` takes a JSON list of cases and gives one of answers, null for a right result.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from generator.cache import ROOT
from generator.problem import Problem
from generator.workload import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuned.launch import Launch

TIMEOUT_S = 120.0


def small(problem: Problem, variant: Any) -> Problem:
    """The problem with so few tokens that the interpreter takes under a second, and a tile that is not full."""
    size = problem.size
    fields = {"batch": min(size.batch, 2)}
    if hasattr(size, "seq"):
        fields["seq"] = min(size.seq, variant.block_tokens + 1)
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
    import torch  # noqa: PLC0415

    from generator.measuring.check import WrongResultError, check  # noqa: PLC0415
    from generator.measuring.guard import probe  # noqa: PLC0415

    work = WORKLOADS[values["family"]]
    family = work.family
    spec, size = family.spec_type(**values["spec"]), family.size_type(**values["size"])
    variant = family.variant_type(**values["variant"])
    if getattr(variant, "pdl", False):  # it orders launches and changes no result; the interpreter does not have it
        variant = dataclasses.replace(variant, pdl=False)
    problem = small(Problem(values["name"], values["family"], spec, size), variant)
    call = probe(work.inputs(spec, problem.size, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    tensors = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    inputs = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor) and t is not call.out}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    for launch in family.launches(spec, variant, call):
        _run(launch)
    try:
        # The interpreter drops the low bits of a bfloat16 store where a GPU rounds: twice the error of one rounding.
        check(call.out, wanted, 2 * bound, {n: (inputs[n], before[n]) for n in inputs})
    except WrongResultError as error:
        return str(error)
    return None


def _run(launch: Launch) -> None:
    import numpy as np  # noqa: PLC0415

    from generator.rendering.modules import load  # noqa: PLC0415

    with np.errstate(all="ignore"):
        load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)


if __name__ == "__main__":
    json.dump([_case(values) for values in json.load(sys.stdin)], sys.stdout)
