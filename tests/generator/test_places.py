"""Where files are kept, also for a user without a home folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import BACKSTOP_SECONDS

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
HOMELESS = """
from pathlib import Path
def nobody(_path):
    raise RuntimeError("Could not determine home directory.")
Path.expanduser = nobody
"""
ASKED = "from generator import places; print(places.cache_path('trials'))"


@pytest.mark.parametrize(
    ("before", "cache", "wanted"),
    [
        ("", "~/of-mine", "{home}/of-mine/trials"),
        ("", "", "{root}/.cache/trials"),
        (HOMELESS, "", "{root}/.cache/trials"),
        (HOMELESS, "~/of-mine", "~/of-mine/trials"),
    ],
    ids=["home", "none named", "no home", "no home to begin with"],
)
def test_the_cache_is_where_it_was_said_to_be(before: str, cache: str, wanted: str, tmp_path: Path) -> None:
    without = {name: value for name, value in os.environ.items() if name not in {"TUNED_CACHE", "XDG_CACHE_HOME"}}
    named = {"HOME": str(tmp_path)} | ({"TUNED_CACHE": cache} if cache else {})
    done = subprocess.run(
        [sys.executable, "-c", before + ASKED], cwd=ROOT, env=without | named, capture_output=True, text=True,
        timeout=BACKSTOP_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout == wanted.format(home=tmp_path, root=ROOT) + "\n", done.stderr
