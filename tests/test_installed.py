"""The installed layout of docs/decisions/0043: generator and templates are inside ``tuned``, and no checkout is visible."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.kernels
from generator.places import INSIDE, ROOT
from tests.support import installed
from tests.support.processes import BACKSTOP_SECONDS
from tests.support.pythons import python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.processes

BUILD = "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])"
NO_CACHES = shutil.ignore_patterns("__pycache__")


def files(folder: Path) -> set[str]:
    """The files of a folder, by their paths below it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Inside, one process works while the other processes of a test run wait."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run share: one process makes a file and the others find it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "installed"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def wheel(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the present checkout, unpacked; nothing is written into the checkout."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("this setuptools is older than pyproject.toml asks for")
    unpacked = shared / "wheel"
    with alone(shared / "wheel.lock"):
        if not unpacked.exists():
            unpack(*(tmp_path_factory.mktemp(name) for name in ("source", "built", "site")), unpacked)
    return unpacked


def unpack(source: Path, built: Path, site: Path, unpacked: Path) -> None:
    """Build a wheel of the checkout and unpack it, completely or not at all."""
    for name in ("tuned", "generator", "templates"):
        shutil.copytree(ROOT / name, source / name, ignore=NO_CACHES)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(built)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=BACKSTOP_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = built.glob("*.whl")
    zipfile.ZipFile(path).extractall(site)
    site.rename(unpacked)
    compileall.compile_dir(unpacked, quiet=1)  # as pip does, so that no process has to


def test_the_wheel_has_every_file_of_the_package_and_within_it_those_of_the_generator(wheel: Path) -> None:
    found = {name for name in files(wheel) if ".dist-info/" not in name and "__pycache__" not in name}
    folders = {"tuned": "tuned", "generator": f"tuned/{INSIDE}", "templates": f"tuned/{INSIDE}/templates"}
    assert found == {
        f"{there}/{name}" for here, there in folders.items() for name in files(ROOT / here) if "__pycache__" not in name
    }


def test_the_command_is_named_tuned(wheel: Path) -> None:
    (entries,) = wheel.glob("*.dist-info/entry_points.txt")
    assert entries.read_text().split() == ["[console_scripts]", "tuned", "=", f"tuned.{INSIDE}.command_line:program"]


def libraries() -> list[str]:
    """The folders of packages, without the folder of the checkout."""
    return [path for path in sys.path if Path(path).is_dir() and not (Path(path) / "generator").is_dir()]


def at_home(home: Path) -> dict[str, str]:
    """The environment of a user with this home folder."""
    others = ("PYTHONPATH", "TRITON_INTERPRET", "TUNED_CACHE", "TUNED_TABLES")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    return environment | {
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "share"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture(scope="module")
def both(wheel: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the generator says about itself here, and where it is installed."""
    found = shared / "told.json"
    with alone(shared / "told.lock"):
        if not found.exists():
            told = ask(wheel, tmp_path_factory.mktemp("home"))
            found.write_text(json.dumps(told))
    here, there = json.loads(found.read_text())
    return here, there


def ask(wheel: Path, home: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    before = files(wheel)
    # -I and -S: no PYTHONPATH, no folder of the script, and no editable installation of the checkout.
    program = [sys.executable, "-I", "-S", "-B", installed.__file__, str(wheel), f"tuned.{INSIDE}", *libraries()]
    with subprocess.Popen(program, cwd=home, env=at_home(home), stdout=PIPE, stderr=PIPE, text=True) as child:
        here = installed.told("generator")  # at the same time
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
    for finding in here["findings"]:
        words = finding[1].replace("python tune.py landscape", "tuned landscape")
        finding[1] = words.replace("python tune.py", "tuned tune")
    assert {name: answer[name] for name in here} == here


def test_it_imports_nothing_from_elsewhere_and_writes_only_into_the_cache_of_the_user(answer: dict[str, Any]) -> None:
    assert answer["elsewhere"] == []
    assert answer["written"] == []
    assert all(name.startswith("cache/tuned-kernels/") for name in answer["cached"])


def test_nothing_in_the_checkout_is_taken_for_the_installed_layout() -> None:
    assert not importlib.import_module("generator.places").INSTALLED
    assert not (ROOT / "tuned" / INSIDE).exists()


# The command, as a user has it -------------------------------------------------------------------------------------------

START = "import sys; sys.path[:] = [sys.argv[1], *sys.path, *sys.argv[2].split(__import__('os').pathsep)]; del sys.argv[1:3]; "
COMMAND = START + f"from tuned.{INSIDE}.command_line import program; program()"


@pytest.fixture
def command(wheel: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs the program ``tuned`` of the wheel, without a GPU, for a user whose home is tmp_path.

    ``new``: as tests.support.pythons says, and then also with -I and -S, as above.
    """
    before = files(wheel)

    def run(*arguments: str, code: str = COMMAND, new: bool = False) -> subprocess.CompletedProcess[str]:
        alone = ("-I", "-S", "-B") if new else ()
        program = [*alone, "-c", code, str(wheel), os.pathsep.join(libraries()), *arguments]
        done = python(*program, cwd=tmp_path, environment=at_home(tmp_path) | {"CUDA_VISIBLE_DEVICES": ""}, new=new)
        assert files(wheel) == before, "what is installed was written to"
        return done

    return run


ONE = "llama3_8b_2x4096"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is done without a GPU")
def test_a_user_of_the_wheel_tunes(command: Any, tmp_path: Path) -> None:
    done = command("tune", "--gpu", "auto", "--problems", ONE, "--trials", "2", new=True)
    assert done.returncode == 0, done.stderr
    assert "no GPU was found on this machine" in done.stdout
    assert "2 of 2 right" in done.stdout, "its processes start by the names that they have there"
    assert "On a machine with the GPU, tuned tune --gpu auto does it." in done.stdout
    made = files(tmp_path)
    assert {tuple(name.split("/")[:2]) for name in made} == {("cache", "tuned-kernels")}
    assert {"candidates", "estimates"} <= {name.split("/")[2] for name in made}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--help",), "Usage: tuned [OPTIONS] COMMAND"),
        (("tune", "--help"), "Usage: tuned tune [OPTIONS] COMMAND"),
        (("tune", "--list", "--problems", ONE), ONE),
        (("explain", ONE), "winner: measured for this spec and size in tuned.tables.nvidia_h200"),
        (("show", ONE), "import triton"),
    ],
)
def test_every_command_is_there(command: Any, arguments: tuple[str, ...], said: str) -> None:
    done = command(*arguments, new="--help" in arguments)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is done without a GPU")
def test_a_new_family_of_the_installed_program_works_and_names_it(command: Any, wheel: Path, tmp_path: Path) -> None:
    """Its test ran a tune.py that only a checkout has."""
    done = command("new-family", "mine")
    assert done.returncode == 0, done.stderr
    assert "tuned tune --family mine/mine.py --gpu auto" in (tmp_path / "mine" / "README.md").read_text()
    assert not any(
        "tune.py" in path.read_text() for path in (tmp_path / "mine").glob("*.[mpj]*") if "test_" not in path.name
    )
    environment = at_home(tmp_path) | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(wheel)}
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "mine")
    done = python(*arguments, cwd=tmp_path, environment=environment, new=True)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_options_before_tune_are_not_dropped(command: Any) -> None:
    done = command("--problems", ONE, "tune", "--list")
    assert done.returncode == 2
    assert "--problems must stand behind tune: tuned tune --help" in done.stderr


def test_what_only_a_checkout_can_is_refused(command: Any) -> None:
    done = command("--render")
    assert done.returncode == 2
    assert done.stderr.startswith("tuned: --render writes what a checkout generates")


OWN = """
import dataclasses
from tuned.families.registry import FAMILIES
from tuned._generator.storage.record import read_record, save_winner
device = "nvidia_h200"
row = next(w for w in read_record(device) if w.name == "ONE")
mine = dataclasses.replace(row, median_us=1.2345, variant=FAMILIES["rope"].default_variant(row.spec, row.size))
new = dataclasses.replace(mine, name="a new one", size=dataclasses.replace(row.size, seq=4097))
paths = {save_winner(w) for w in (mine, new)}
print(*paths)
merged = read_record(device)
print(len(merged), sum(w.median_us == 1.2345 for w in merged))
""".replace("ONE", ONE)
FOUND = """
from tuned.lookup.lookup import Gpu, choose
from tuned.families.registry import FAMILIES
from tuned.lookup.table import tables
table = tables()["nvidia_h200"]
mine = [row for row in table.rows["rope"] if row.median_us == 1.2345]
print(len(table.rows["rope"]), len(mine))
for row in mine:
    choice = choose(FAMILIES["rope"], row.spec, row.size, Gpu("nvidia_h200", 90, 132, "NVIDIA H200"))
    print(choice.rule, choice.variant == FAMILIES["rope"].default_variant(row.spec, row.size), choice.row.source)
"""


def test_what_a_user_measured_is_in_his_data_folder_and_dispatch_finds_it_before_what_ships(
    command: Any, tmp_path: Path
) -> None:
    before = command(code=START + FOUND).stdout.split()
    assert before[1] == "0"
    written = command(code=START + OWN)
    assert written.returncode == 0, written.stderr
    path, counts = written.stdout.splitlines()
    assert path == str(tmp_path / "share" / "tuned-kernels" / "winners" / "nvidia_h200.json")
    assert len(json.loads(Path(path).read_text())["winners"]) == 2, "rows that ship are not copied"
    assert counts.split()[1] == "2"
    first, *rules = command(code=START + FOUND).stdout.splitlines()
    assert first.split() == [str(int(before[0]) + 1), "2"]
    assert rules == [f"winner True {path}"] * 2
