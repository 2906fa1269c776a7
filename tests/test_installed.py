"""The installed layout: generator and templates within ``tuned``, as docs/decisions/0043 lays down, with no checkout to be seen."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

import tuned.kernels
from generator.places import INSIDE, ROOT, TEMPLATES
from tests.support import installed
from tests.support.processes import BACKSTOP_SECONDS

pytestmark = pytest.mark.processes

BUILD = "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])"
NO_CACHES = shutil.ignore_patterns("__pycache__")


def files(folder: Path) -> set[str]:
    """The files of a folder, by their names below it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel that is built today unpacks to; nothing is written into the checkout."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("this setuptools is older than pyproject.toml asks for")
    source, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "built", "site"))
    shutil.copytree(ROOT / "tuned", source / "tuned", ignore=NO_CACHES)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(built)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=BACKSTOP_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = built.glob("*.whl")
    zipfile.ZipFile(path).extractall(unpacked)
    return unpacked


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    found = {name for name in files(wheel) if ".dist-info/" not in name}
    assert found == {name for name in files(ROOT) if name.startswith("tuned/") and "__pycache__" not in name}


@pytest.fixture(scope="module")
def both(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the generator tells here, and where it is installed."""
    inside, home = wheel / "tuned" / INSIDE, tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "generator", inside, ignore=NO_CACHES)
    shutil.copytree(TEMPLATES, inside / "templates")
    before = files(wheel)
    # -I and -S: no PYTHONPATH, no folder of the script, and no editable installation of the checkout.
    program = [sys.executable, "-I", "-S", "-B", installed.__file__, str(wheel), f"tuned.{INSIDE}"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "TRITON_INTERPRET", "TUNED_CACHE")
    }
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    # Where packages are, without what has the checkout's own.
    paths = [path for path in sys.path if Path(path).is_dir() and not (Path(path) / "generator").is_dir()]
    with subprocess.Popen([*program, *paths], cwd=home, env=environment, stdout=PIPE, stderr=PIPE, text=True) as child:
        here = json.loads(json.dumps(installed.told("generator")))  # beside it
        told, said = child.communicate(timeout=BACKSTOP_SECONDS)
    assert child.returncode == 0, said
    return here, json.loads(told) | {"written": sorted(files(wheel) - before), "cached": sorted(files(home))}


@pytest.fixture
def answer(both: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return both[1]


def test_the_generator_is_the_same_where_it_is_installed(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    here, answer = both
    assert here["digests"].items() >= tuned.kernels.DIGESTS.items()
    assert here["landscapes"]
    assert {name: answer[name] for name in here} == here


def test_it_starts_its_processes_by_the_names_that_they_have_there(answer: dict[str, Any]) -> None:
    assert answer["interpreted"] == [None]
    (needs, *_) = answer["compiled"]
    assert needs["registers"] > 0


def test_it_imports_nothing_from_elsewhere_and_writes_only_into_the_cache_of_the_user(answer: dict[str, Any]) -> None:
    assert answer["elsewhere"] == []
    assert answer["written"] == []
    assert any("/candidates/" in f"/{name}" for name in answer["cached"])
    assert {name.partition("/")[0] for name in answer["cached"]} == {"tuned-kernels"}


def test_nothing_in_the_checkout_is_taken_for_the_installed_layout() -> None:
    assert not importlib.import_module("generator.places").INSTALLED
    assert not (ROOT / "tuned" / INSIDE).exists()
