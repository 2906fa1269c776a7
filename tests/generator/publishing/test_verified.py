"""Records of verification: the digest changes only with the code that runs, and --check reports what is not verified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from generator import command_line
from generator.places import ROOT
from generator.publishing import audit, verified
from generator.publishing.verified import SUITES, Suite, Verified, digest, not_verified, read_verified, verified_text
from tuned.kernels import DIGESTS

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.processes

KERNEL = "kernels/rope_bshd.py"
TABLE = "tables/nvidia_h200.py"
RECORD = "winners/nvidia_h200.json"
RUNTIME = "calls/gru/run.py"
FILES = {
    KERNEL: '"""A kernel."""\n\n\ndef rope(x, BLOCK):\n    """Rotate."""\n    return x * BLOCK + 1  # a token\n',
    TABLE: 'ROWS = (\n    ("rope", {"heads": 8}, 1.5),  # llama\n)\n',
    RECORD: '{"schema": 1, "winners": [{"name": "llama", "median_us": 1.5}]}\n',
    RUNTIME: 'class Run:\n    """One."""\n\n    def why(self, n: int = 3) -> str:\n        return f"{n!r:>{n}} of {self}"\n',
}

# Everything that the syntax trees (or their texts) of two Pythons show differently. The digest is from 3.11.
ODD = '''"""Module."""
from __future__ import annotations
import os as system, sys
__all__ = []
async def later(a, /, b=-1, *c: int, d, e=None, **f) -> None: "Alone."
class Empty(dict, metaclass=type):
    """Nothing."""
@property
def named(self): return f"{self}" f"{self!r:>{3}}" "tail" f"{self.x:}" f"{{}}{'inner'}" + f"""{1}\\u2028\\N{BULLET}"""
def walrus(x):
    if (y := x[1:, ..., ::2]) is not None: return *y, 1e400, 1j, b"\\xff", u"u", "\\U0001f600\\ufffe", True, 1.0, 1
    match x:
        case {"a": [1, *_], **rest} | None: return rest
    with (open("a") as p, open("b")): yield lambda *, k=None: (k, {**x}, {None: 1})
    try: pass
    except (ValueError, TypeError) as error: raise error from None
    for a, in x: continue
    else: del a
    return [i async for i in x if i if not i]
'''
ODD_DIGEST = "df77d41ad396"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (KERNEL, "# a token", "# a row"),
        (KERNEL, "x * BLOCK + 1", "(\n        x * BLOCK + 1\n    )"),
        (KERNEL, "A kernel.", "The kernel."),
        (KERNEL, '    """Rotate."""\n', ""),
        (TABLE, "# llama", "# llama3"),
        (TABLE, '{"heads": 8}, 1.5', "{'heads': 8,},   1.50"),
        (RECORD, '{"schema": 1, ', '{\n "schema":1,\n'),
        (RUNTIME, '"""One."""', "'''Another.'''"),
    ],
)
def test_a_comment_a_docstring_and_layout_change_nothing(package: Path, name: str, before: str, after: str) -> None:
    was = digest(package)
    _edit(package / name, before, after)
    assert digest(package) == was


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (KERNEL, "+ 1", "+ 2"),
        (KERNEL, "+ 1", "+ 1.0"),
        (KERNEL, "x * BLOCK", "BLOCK * x"),
        (KERNEL, "def rope(x, BLOCK)", "def rope(BLOCK, x)"),
        (TABLE, "1.5", "1.6"),
        (TABLE, '"heads": 8', '"heads": 16'),
        (RECORD, "1.5", "1.6"),
        (RUNTIME, "n: int = 3", "n: int = 4"),
        (RUNTIME, " of {self}", " in {self}"),
        (RUNTIME, "!r", "!s"),
    ],
)
def test_a_constant_a_row_and_an_operator_change_it(package: Path, name: str, before: str, after: str) -> None:
    was = digest(package)
    _edit(package / name, before, after)
    assert digest(package) != was


def _edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def _rename(package: Path) -> None:
    (package / KERNEL).rename(package / "kernels" / "rope_sbhd.py")


def _exchange(package: Path) -> None:
    one, other = package / KERNEL, package / TABLE
    text = one.read_text()
    one.write_text(other.read_text())
    other.write_text(text)


def _remove(package: Path) -> None:
    (package / RUNTIME).unlink()


def _add(package: Path) -> None:
    (package / "empty.py").write_text("")


@pytest.mark.parametrize("change", [_rename, _exchange, _remove, _add])
def test_the_names_of_the_files_count(package: Path, change: Callable[[Path], None]) -> None:
    was = digest(package)
    change(package)
    assert digest(package) != was


def test_what_is_no_source_does_not_count(package: Path) -> None:
    was = digest(package)
    (package / "py.typed").write_text("")
    (package / "kernels" / "__pycache__").mkdir()
    (package / "kernels" / "__pycache__" / "rope_bshd.pyc").write_bytes(b"\0")
    assert digest(package) == was


def test_all_that_ships_counts() -> None:
    names = [name for name, _ in verified.shipped()]
    assert {f"kernels/{name}.py" for name in DIGESTS} <= set(names)
    assert {TABLE, RECORD, RUNTIME, "tables/_portfolio.py", "kernels/__init__.py", "compat/vllm.py", "nn.py"} <= set(
        names
    )
    assert names == sorted(set(names))


def pythons() -> list[Path]:
    """The Pythons from 3.10 on that are installed, in order: on the path, or where pyenv keeps them."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for minor in range(10, 16):
        name = f"python3.{minor}"
        here = shutil.which(name)
        found += [*sorted(kept.glob(f"3.{minor}.*/bin/{name}"))[-1:], *([Path(here)] if here else [])][:1]
    return found


def test_every_python_gives_the_same_digests(tmp_path: Path) -> None:
    """The digest of all that ships, and those of every eighth kernel; else another Python would take every row for stale."""
    (tmp_path / "odd.py").write_text(ODD)
    assert digest(tmp_path) == ODD_DIGEST
    program = (
        "import pathlib, sys; from generator.publishing.verified import digest; from generator.rendering import syntax;"
        "assert 'torch' not in sys.modules; folder = pathlib.Path('tuned/kernels');"
        "exec((folder / '__init__.py').read_text());"
        "some = list(DIGESTS)[::8];"
        "assert [DIGESTS[n] for n in some] == [syntax.digest((folder / f'{n}.py').read_text()) for n in some], 'of kernels';"
        "print(digest(pathlib.Path(sys.argv[1])), digest())"
    )
    here = pythons()
    for python in dict.fromkeys((*here[:1], *here[-1:])):  # the oldest and the newest
        done = subprocess.run(
            [python, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:  # a shim without a Python behind it ends with an error
            assert done.stdout.split() == [ODD_DIGEST, digest()], python
        else:
            assert "Error" not in done.stderr, done.stderr


# The record -----------------------------------------------------------------------------------------------------------


def record(kernels: str, **changes: Any) -> Verified:
    suites = {name: Suite(name, 100, 0, 2, 60.5) for name in SUITES}
    suites |= {name: Suite(name, *counts, 1.0) for name, counts in changes.items()}
    return Verified({"device": "nvidia_h200"}, kernels, tuple(suites[name] for name in reversed(SUITES)))


def told(folder: Path, package: Path, text: str | None) -> str | None:
    if text is not None:
        (folder / "nvidia_h200.json").write_text(text)
    return not_verified("nvidia_h200", folder, package)


def test_what_was_verified_and_is_here_is_not_mentioned(package: Path) -> None:
    assert told(package, package, verified_text(record(digest(package)))) is None


def test_a_record_reads_back(tmp_path: Path) -> None:
    text = verified_text(record("0123456789ab"))
    (tmp_path / "a.json").write_text(text)
    read = read_verified(tmp_path / "a.json")
    assert verified_text(read) == text
    assert [suite.name for suite in read.suites] == list(SUITES)
    assert list(json.loads(text)) == ["environment", "kernels", "suites"]
    assert list(json.loads(text)["suites"][0]) == ["name", "passed", "failed", "skipped", "seconds"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fuzz": (99_999, 1, 0)}, "1 of suite fuzz failed"),
        ({"sanitizers": (0, 0, 40)}, "nothing of suite sanitizers was run"),
        ({"plain": (1, 2, 0), "gpu": (1, 3, 0)}, "2 of suite plain failed; 3 of suite gpu failed"),
    ],
)
def test_a_suite_that_failed_or_ran_nothing_is_told(package: Path, changes: dict[str, Any], said: str) -> None:
    found = told(package, package, verified_text(record(digest(package), **changes)))
    assert found == f"nvidia_h200: not verified, {said}: make verify on that GPU"


def test_a_suite_that_is_missing_is_told(package: Path) -> None:
    content = json.loads(verified_text(record(digest(package))))
    del content["suites"][2]
    assert "suite fuzz was not run" in str(told(package, package, json.dumps(content)))


def test_another_digest_and_no_file_are_told(package: Path) -> None:
    assert "there is no nvidia_h200.json" in str(told(package, package, None))
    text = verified_text(record(digest(package)))
    _edit(package / KERNEL, "+ 1", "+ 2")
    found = str(told(package, package, text))
    assert "and" in found
    assert digest(package) in found
    assert read_verified(package / "nvidia_h200.json").kernels in found
    assert "those here" not in found


def test_where_else_these_sources_were_verified_is_told(package: Path) -> None:
    here = record(digest(package))
    (package / "some_gpu.json").write_text(verified_text(here))
    (package / "failed_gpu.json").write_text(verified_text(record(digest(package), gpu=(1, 1, 0))))
    (package / "older_gpu.json").write_text(verified_text(record("0123456789ab")))
    (package / "torn_gpu.json").write_text("{")
    found = str(told(package, package, verified_text(record("0123456789ab"))))
    assert "0123456789ab were verified; those here were on some_gpu: make verify on that GPU" in found


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"environment": {}, "kernels": "a", "suites": [{}]}', '{"environment": 1, "kernels": "a", "suites": []}'],
)  # fmt: skip
def test_a_file_that_is_no_record_is_told_by_name(package: Path, text: str) -> None:
    found = str(told(package, package, text))
    assert "nvidia_h200.json is no record of what was verified" in found


@pytest.mark.parametrize("count", [-1, 1.5, True, None, "3"])
def test_a_count_that_is_none_is_told(package: Path, count: Any) -> None:
    content = json.loads(verified_text(record(digest(package))))
    content["suites"][0]["failed"] = count
    assert "is no record of what was verified" in str(told(package, package, json.dumps(content)))


# tune.py --check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "options", "code", "counts"),
    [
        ("here", [], 0, "up to date"),
        ("here", ["--release"], 0, "up to date"),
        ("other", [], 0, "0 to do, 1 worth doing"),
        ("other", ["--release"], 1, "1 to do, 0 worth doing"),
    ],
)
def test_check_warns_of_what_was_not_verified_and_a_release_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, options: list[str], code: int, counts: str
) -> None:
    """The checks of rows and files are switched off: they have separate tests, and depend on what is installed."""
    (tmp_path / "nvidia_h200.json").write_text(verified_text(record(digest() if kernels == "here" else kernels)))
    monkeypatch.setattr(audit, "not_verified", lambda device: not_verified(device, tmp_path))
    monkeypatch.setattr(audit, "_device", lambda *_: ())
    monkeypatch.setattr(audit, "_files", tuple)
    done = CliRunner().invoke(command_line.app, ["--check", "--target", "nvidia_h200", *options])
    assert done.exit_code == code, done.output
    assert counts in done.output
    assert ("nvidia_h200: not verified" in done.output) == (kernels == "other")


@pytest.mark.parametrize("options", [["--release"], ["--check", "--release", "--out", "x"]])
def test_a_release_is_checked_and_of_what_ships(options: list[str]) -> None:
    done = CliRunner().invoke(command_line.app, options)
    assert done.exit_code == 2
    assert "--release makes --check strict" in done.output


def test_a_record_elsewhere_is_not_held_against_what_was_verified(tmp_path: Path) -> None:
    assert all(f.kind != "unverified" for f in audit.findings([], "no_such_gpu", tmp_path))
