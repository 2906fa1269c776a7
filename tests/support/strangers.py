"""The built-in families as modules from outside the tree, and what a tuner sees of them: python -m tests.support.strangers.

It prints JSON: for each problem the legal variants, the default and the estimate's work, and for each kernel the digest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

PREFIXES = {"rope": "Rope", "gru": "Gru", "gru_backward": "Gru", "gru_cell": "GruCell", "linear_cat": "LinearCat"}
STRANGER = """
import math

from tuned.families.{name}.launches import *
from tuned.families.{name}.launches import kernel_names, launches
from tuned.families.{name}.spec import {prefix}Size as Size
from tuned.families.{name}.spec import {prefix}Spec as Spec
from tuned.families.{name} import variant
from tuned.families.{name}.variant import CORE_KNOBS, adapt, default_variant, distance, fit, rejection
from tuned.families.{name}.variant import {prefix}Variant as Variant
from generator.families.{name}.problems import problems
from generator.families.{name}.reference import *
from generator.families.{name}.texts import *
from generator.families.{name} import GROUPS, REPRESENTATIVE, TITLE

TEXT = ()
REACH, sized = getattr(variant, "REACH", math.inf), getattr(variant, "sized", None)


def call(*_):
    raise NotImplementedError("calls are those of tuned.dispatch")
"""


def stranger(name: str, folder: Path) -> Path:
    """Write a built-in family as one module, as families from outside the tree are, and return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(STRANGER.format(name=name, prefix=PREFIXES[name]))
    return file


def seen(name: str, count: int) -> dict[str, Any]:
    """What a tuner sees of a family: of every kernel, and of about ``count`` of its problems, evenly spaced."""
    from generator.rendering.structures import render  # noqa: PLC0415 - of the family of this process
    from generator.searching.pool import legal_pool  # noqa: PLC0415
    from generator.workload import WORKLOADS, default_variant  # noqa: PLC0415

    work = WORKLOADS[name]
    listed, problems = list(work.problems()), {}
    for problem in listed[:: -(-len(listed) // count)]:
        pool = legal_pool(problem, 90, 132).variants
        told = [repr(pool), repr(default_variant(problem)), repr([work.work(problem, v) for v in pool[:9]])]
        told += [repr(work.family.kernel_names(problem.spec, v)) for v in pool[:9]]
        told += [str(work.bytes_moved(problem.spec, problem.size)), str(work.tensor_bytes(problem.spec, problem.size))]
        problems[problem.name] = len(pool), hashlib.sha256("".join(told).encode()).hexdigest()
    kernels = {text[1]: render(*text[:4]).digest for text in work.texts()}
    facts = work.title, work.groups, work.representative, work.family.core_knobs, work.family.reach
    return {"problems": problems, "kernels": kernels, "facts": repr(facts)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(seen(sys.argv[1], int(sys.argv[2]))))
