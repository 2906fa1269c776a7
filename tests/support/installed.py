"""What the generator says about itself, in the checkout or (run as a program) where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock


def told(name: str) -> dict[str, Any]:
    """Facts that must be the same wherever the generator is; ``name`` is the package name that it is imported by."""
    package = importlib.import_module(name)
    needing_ray = (
        () if importlib.util.find_spec("ray") else (".searching.cluster", ".searching.connection", ".searching.tuner")
    )
    found = pkgutil.walk_packages(package.__path__, f"{name}.")
    modules = [m.name for m in found if not m.name.endswith(needing_ray)]
    for module in modules:
        importlib.import_module(module)
    part = {m.removeprefix(name): sys.modules[m] for m in modules}
    listed = importlib.import_module("rich.console").Console(file=io.StringIO(), width=200)
    assert part[".commands"].list_problems(part[".commands"].Options(), listed) == 0
    problems = part[".workload"].default_problems()
    with mock.patch.object(part[".publishing.audit"], "not_verified", return_value=None):  # it needs a checkout
        findings = list(part[".publishing.audit"].findings(problems, None, None))
    return {
        "modules": sorted(part),
        "digests": part[".rendering.structures"].digests(),
        "problems": listed.file.getvalue(),
        "findings": [(found.kind, found.text) for found in findings],
        # The texts behind the digest of all that ships. The digest takes seconds, and is the same for the same texts.
        "verified": {name: path.read_text() for name, path in part[".publishing.verified"].shipped()},
        "landscapes": sorted(path.name for path in part[".places"].LANDSCAPES.rglob("*.gz")),
        "page": part[".reporting.html.page"].page(part[".reporting.html.page"].Sources("none")),
    }


if __name__ == "__main__":
    site, name, *libraries = sys.argv[1:]
    sys.path[:] = [site, *sys.path, *libraries]
    assert importlib.util.find_spec("generator") is None, "the checkout is importable"
    answer = told(name)
    folder = Path(site)
    answer["elsewhere"] = sorted(
        module
        for module, held in sys.modules.items()
        if module.partition(".")[0] == "tuned" and folder not in Path(held.__file__ or "/").parents
    )
    json.dump(answer, sys.stdout)
