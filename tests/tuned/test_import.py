"""``import tuned`` loads only what is asked for, and each name is the one that the package defines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import BACKSTOP_SECONDS

pytestmark = pytest.mark.processes

NOTHING = "import sys, tuned; assert not {'torch', 'triton', 'numpy'} & set(sys.modules), 'a command waits for seconds'"
PARTS = (
    "import tuned; print(tuned.dispatch.rope, tuned.nn.GRU, tuned.compat, tuned.own, tuned.warm, tuned.TunedWarning)"
)
# Because a profiler wraps functions before explain is first used.
WRAPPED = """
import functools, torch, tuned.dispatch
genuine = {name: getattr(tuned.dispatch, name) for name in ("rope", "gru_cell", "linear_cat")}
for name, function in genuine.items():
    setattr(tuned.dispatch, name, functools.partial(function))
import tuned, tuned.nn
assert tuned.explain(genuine["rope"], torch.ones(1, 2, 1, 4), torch.ones(2, 2), angle_entries="pair").rule == "eager"
assert tuned.explain(genuine["linear_cat"], (torch.ones(1, 2),), torch.ones(3, 2)).rule == "eager"
assert tuned.explain(tuned.nn.GRUCell(2, 3), torch.ones(1, 2)).rule == "eager"
"""
VERSION = """
import importlib.metadata, tuned
try:
    installed = importlib.metadata.version("tuned-kernels")
except importlib.metadata.PackageNotFoundError:  # a checkout on a path
    installed = "0+unknown"
assert tuned.__version__ == installed
def none(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = none
assert tuned.__version__ == "0+unknown", "files on a path, which are no installation"
"""
UNKNOWN = """
import tuned
try:
    tuned.no_such_name
except AttributeError as error:
    assert str(error) == "module 'tuned' has no attribute 'no_such_name'", error
else:
    raise SystemExit("it has one")
"""


@pytest.mark.parametrize(
    "code", [NOTHING, PARTS, WRAPPED, VERSION, UNKNOWN], ids=["nothing", "parts", "wrapped", "version", "unknown"]
)
def test_in_a_process_of_its_own(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=BACKSTOP_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
