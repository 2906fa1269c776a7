"""Print digests and machine code of a record's rows (JSON) in a tree of this repository: python codes.py TREE PACKAGE.

``carry`` runs this file on older revisions too, so it uses only names that exist in all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

AT_LAUNCH = ("launch_pdl", "launch_cooperative_grid")  # as in measuring/compile.py, which older revisions lack


def code_of(row: dict[str, Any], package: str) -> dict[str, Any]:
    """The digests of a row's kernels; its steps; code, grid, count, shared memory, numbers and options of distinct launches."""
    from tuned.families.registry import FAMILIES  # noqa: PLC0415 - from the tree that was named
    from tuned.lookup.record import build  # noqa: PLC0415

    compiling = importlib.import_module(f"{package}.measuring.compile")
    digests = importlib.import_module(f"{package}.rendering.structures").digests()
    work = importlib.import_module(f"{package}.workload").WORKLOADS[row["family"]]
    family = FAMILIES[row["family"]]
    spec = build(family.spec_type, row["spec"], row["name"], may_lack=True)
    size, variant = (
        build(family.size_type, row["size"], row["name"]),
        build(family.variant_type, row["variant"], row["name"]),
    )
    call = work.inputs(spec, size, "meta", 0)
    target = compiling.target_of(f"sm_{row['environment']['capability']}")
    steps = family.launches(spec, variant, call)
    code = []
    for launch, count in compiling.distinct(steps):
        one = compiling.resources(launch, target, count)
        numbers = [value for value in launch.arguments if isinstance(value, (int, float))]
        options = [name for name in AT_LAUNCH if launch.options.get(name)]
        code.append([one.machine_code, one.programs, one.launches, one.shared_bytes, numbers, options])
    return {
        "digests": {name: digests[name] for name in family.kernel_names(spec, variant)},
        "code": [[type(step).__name__ for step in steps], *code],
    }


def main() -> None:
    """Write one line of JSON to standard output; a row that does not compile has its error there."""
    tree, package = Path(sys.argv[1]).resolve(), sys.argv[2]
    sys.path[0] = str(tree)
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or tree not in Path(found.origin).parents:  # found an installed package
        raise SystemExit(f"{tree} is no tree of this repository")
    answers = {}
    for row in json.load(sys.stdin):
        try:
            answers[row["name"]] = code_of(row, package)
        except Exception as error:  # noqa: BLE001, PERF203 - from Triton's compiler, or an older tree lacks such a row
            answers[row["name"]] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
