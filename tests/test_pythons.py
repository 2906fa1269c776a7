"""A forked Python process gives what a new one does, and has imported nothing of this project before its command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.pythons import python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys
import beside
print(__name__, sys.argv, sys.path[0], os.environ["TUNED_GIVEN"], "ABSENT" in os.environ, beside.__file__)
"""
COMMANDS = {
    "a script": ("script.py", "an argument"),
    "a module": ("-m", "script", "an argument"),
    "a text": ("-c", SCRIPT, "an argument"),
    "a message": ("-c", "import sys; sys.exit('a message')"),
    "a code": ("-c", "import sys; print('out'); sys.exit(3)"),
    "no code": ("-c", "import sys; print('err', file=sys.stderr); sys.exit()"),
    "an error": ("-c", "1 / 0"),
    "a signal": ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    "an end": ("-c", "import atexit, threading; atexit.register(print, 'end'); threading.Thread(target=print).start()"),
    "no module": ("-m", "no_such_module"),
    "nothing of ours": (
        "-c",
        "import sys; print([m for m in sys.modules if m.split('.')[0] in ('tuned', 'generator', 'tests', 'tune')])",
    ),
    "no bytecode": ("-c", "import sys; print(sys.dont_write_bytecode)"),
    "threads": ("-c", "import os; print(len(os.listdir('/proc/self/task')))"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_forked_process_gives_what_a_new_one_does(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "beside.py").touch()
    environment = {**os.environ, "TUNED_GIVEN": "given", "PYTHONPATH": str(tmp_path / "elsewhere")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    forked, new = (python(*COMMANDS[name], cwd=tmp_path, environment=environment, new=new) for new in (False, True))
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    assert forked.stdout or forked.stderr or name == "a signal"


def test_no_two_processes_draw_the_same_numbers() -> None:
    draw = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = (python("-c", draw).stdout.split() for _ in range(2))
    assert len({*first, *second}) == 4
