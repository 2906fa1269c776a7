"""A family from outside the tree has all that the built-in families have, and no file of this tree changes.

It is listed, rendered, compiled, tuned, recorded, dispatched, explained, shown and reported.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import types
from typing import TYPE_CHECKING, Any

import pytest

from generator.families.outside import _texts, answers
from generator.places import PACKAGE
from generator.problem import SelectionError
from generator.scaffold.write import write_family
from tests.support import strangers
from tests.support.outside import EXAMPLES, PATHS, ROOT, changed, copied, run, tune
from tuned.families.choices import one_of
from tuned.families.outside import FamilyError, described, home_folder, load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes
PROBLEM = "softmax_float32_8x128256"
MODEL = """
import contextlib, torch, tuned, tuned.own
from softmax import softmax
from tuned.lookup.lookup import Gpu
tuned.own.why_eager = lambda t, **_: None
tuned.own.gpu_of = lambda _: Gpu("test_gpu", 90, 132, "Test GPU")
tuned.own.modes = lambda device: (False, device)
torch.cuda.device = lambda _: contextlib.nullcontext()
tuned.own.Own._learn = lambda *_: None
for rows, columns in ((8, 128256), (16, 100000), (8, 128)):
    x = torch.randn(rows, columns)
    found = tuned.explain(softmax, x)
    right = rows * columns > 10000 or bool(torch.allclose(softmax(x), torch.softmax(x, -1)))
    print(found.rule, found.kernels[0], found.variant.block_columns, found.variant.num_warps, right, sep=",")
"""


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "torch.float16"), ("columns", "float('inf')"), ("columns", "[128]"), ("dtype", "len")],
)
def test_a_problem_that_no_record_could_keep_is_refused(tmp_path: Path, field: str, value: str) -> None:
    """It is refused at once, not only when its row is written after the trials."""
    family = copied("softmax", tmp_path)
    kept = "import torch\n_problems = problems\ndef problems():\n    for p in _problems():\n        yield dataclasses.replace(p, spec="
    family.write_text(f"{family.read_text()}\n{kept}dataclasses.replace(p.spec, {field}={value}))\n")
    with pytest.raises(
        FamilyError, match=rf"the problem 'softmax_.*spec\.{field} must be .*: a record keeps str, bool, int"
    ):
        answers(load(str(family)), described(load(str(family))), ())


def status() -> str:
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


COMMANDS = {
    "--list": f"{PROBLEM} ",
    "--check": "softmax_bfloat16_524288x128 has no row",
    f"show {PROBLEM} --device test_gpu --out shown.py": "wrote shown.py",
    f"explain {PROBLEM} --device test_gpu": "on test_gpu, winner: measured for this spec and size in _tuned_",
    "report --device test_gpu --out report.html": "wrote report.html",
}


@pytest.fixture(scope="module")
def tuned_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A softmax family in a user's folder, tuned on a fake GPU, and the output of commands about it."""
    file, before = copied("softmax", tmp_path_factory.mktemp("user")), status()
    problems = f"{PROBLEM},softmax_float32_8192x128"
    done = run(file.parent, "-m", "tests.support.tuning_outside", problems, *COMMANDS, family=file, new=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status() == before, "a file of the tree changed"
    return file, json.loads(done.stdout.splitlines()[-1])


def test_it_is_tuned_and_its_failures_are_data(tuned_one: tuple[Path, dict[str, Any]]) -> None:
    variant, failed = tuned_one[1]["winners"][PROBLEM]
    assert variant == {"strategy": "split", "block_rows": 1, "block_columns": 1024, "num_warps": 2}
    _, failed = tuned_one[1]["winners"]["softmax_float32_8192x128"]
    assert failed == ["WrongResultError: the worst error is 9 times what rounding allows"]


def test_all_is_written_beside_the_family(tuned_one: tuple[Path, dict[str, Any]]) -> None:
    home = home_folder(tuned_one[0])
    found = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    kernels = {"kernels/__init__.py", "kernels/softmax_split.py", "kernels/softmax_whole.py"}
    assert found == kernels | {"tables/test_gpu.py", "winners/test_gpu.json"}
    record = json.loads((home / "winners" / "test_gpu.json").read_text())
    assert [w["family"] for w in record["winners"]] == ["softmax"] * 2
    assert [set(w["digests"]) for w in record["winners"]] == [{"softmax_whole"}, {"softmax_split"}]
    assert not list((PACKAGE / "kernels").glob("softmax*"))


def test_a_model_gets_the_row_the_nearest_row_and_the_default(tuned_one: tuple[Path, dict[str, Any]]) -> None:
    done = run(tuned_one[0].parent, "-c", MODEL, TRITON_INTERPRET="1", new=True)
    assert done.returncode == 0, done.stderr
    told = [line.split(",") for line in done.stdout.splitlines()]
    assert told[0] == ["winner", "softmax_split", "1024", "2", "True"]
    assert told[1][0] == "closest spec"
    assert told[2][-1] == "True"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_built_in_families_know_it(tuned_one: tuple[Path, dict[str, Any]], command: str) -> None:
    code, said = tuned_one[1]["said"][command]
    assert code == (command == "--check"), said
    assert " ".join(COMMANDS[command].split()) in said


def test_what_is_shown_runs_by_itself(tuned_one: tuple[Path, dict[str, Any]]) -> None:
    folder = tuned_one[0].parent
    program = """
import contextlib, torch
torch.cuda.device_of = lambda _: contextlib.nullcontext()
from shown import softmax_launch
x = torch.randn(2, 128256)
out = torch.empty_like(x)
softmax_launch((252, 252), x, out, torch.empty(2, 126, 2), 2, x.stride(0))
assert torch.allclose(out, torch.softmax(x, -1)), (out - torch.softmax(x, -1)).abs().max()
"""
    done = run(folder, "-c", program, TRITON_INTERPRET="1", PYTHONPATH=f"{folder}:{PATHS}")
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_it_is_compiled_checked_and_estimated_and_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    """Two variants are checked. The one with one row a program is right, the other is wrong."""
    file = copied("rmsnorm", tmp_path)
    changed(file.with_suffix(".py.jinja"), ("x * scale * weight", "x * scale * (weight if BLOCK_ROWS == 1 else 1.0)"))
    problem = "rmsnorm_float32_4096x1152"
    done = tune(
        tmp_path, "--family", str(file), "--target", "nvidia_h200", "--problems", problem, "--trials", "4", new=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "1 kernels rendered; 1 problems" in told
    assert "checked in the interpreter against float64: 1 of 2 right" in told
    assert "WRONG" in told
    assert "times what rounding allows" in told
    assert "estimated" in told


def test_a_template_may_read_only_what_its_name_says(tmp_path: Path) -> None:
    file = copied("softmax", tmp_path)
    changed(file.with_suffix(".py.jinja"), ('variant.strategy == "whole"', "spec.columns > 9"))
    done = tune(tmp_path, "--family", str(file), "--render")
    assert done.returncode == 2
    assert "a template may read only what TEXT names, and it reads spec.columns" in done.stderr
    assert not list(home_folder(file).rglob("*.py"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"": "", ".jinja": "@triton.jit\ndef KERNEL(\n"}, "no variant of softmax_float32_8x128256 compiles"),
        ({"": "\ndef rejection(*_):\n    return 'never'\n"}, "skipped: no variant of it is legal here"),
        ({"": "", ".jinja": "# {% if spec.dtype %}\n"}, "a template is none, line 7: TemplateSyntaxError"),
        ({"": "\ndef rejection(*_):\n    return True\n"}, "rejection must return None or a sentence that says why, got True"),
        ({"": "\ndef launches(*_):\n    return None\n"}, "launches must return a tuple of what own.launch(...) gives, got None"),
        ({"": "\ndef default_variant(*_):\n    return 3\n"}, "default_variant must return a Variant, got 3"),
        ({"": "\ndef problems():\n    return None\n"}, "problems must return problems, got None"),
        ({"": "\ndef problems():\n    return ()\n"}, "problems must give at least one, got none"),
        ({"": "\ndef problems():\n    return [3]\n"}, "problems must give own.Problem(..., 'softmax', ...), got 3"),
        (
            {"": "\ndef problems():\n    yield own.Problem('a', 'rope', Spec('float32', 128), Size(8))\n"},
            "problems must give own.Problem(..., 'softmax', ...)",
        ),
        *(
            (
                {"": f"\ndef problems():\n    for n in (8, 16):\n        yield own.Problem({name}, 'softmax', Spec('float32', 128), Size(n))\n"},
                "a name must be one printable line without commas, and of one problem alone",
            )
            for name in ("f'a\\n{n}'", "f'a,{n}'", "'a'", "' ' * n")
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_family_is_a_sentence_and_no_success(files: dict[str, str], said: str, tmp_path: Path) -> None:
    file = copied("softmax", tmp_path)
    file.write_text(file.read_text() + files[""])
    if ".jinja" in files:
        template = file.with_suffix(".py.jinja")
        head, _, _ = template.read_text().partition("@triton.jit")
        template.write_text(head + files[".jinja"])
    named = () if "def problems" in files[""] else ("--problems", PROBLEM)
    done = tune(tmp_path, "--family", str(file), "--target", "nvidia_h200", *named, "--trials", "2")
    assert done.returncode in {1, 2}, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert said in " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("name", ["numpy", "pytest", "optuna"])
def test_a_new_family_hides_no_module_that_is_installed(tmp_path: Path, name: str) -> None:
    with pytest.raises(SelectionError, match=f"or one that is installed, got '{name}': name it otherwise"):
        write_family(name, tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["own", "call", "torch", "triton", "random"])
def test_a_new_family_is_not_named_as_what_its_file_uses(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        SelectionError,
        match=f"what its file uses, or a module of Python's or one that is installed, got '{name}': name it otherwise",
    ):
        write_family(name, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_what_a_family_prints_breaks_neither_answers_nor_the_check(tmp_path: Path) -> None:
    file = copied("softmax", tmp_path)
    file.write_text(file.read_text() + "\nprint('it loads')\n")
    done = tune(tmp_path, "--family", str(file), "--list", "--json", new=True)
    assert json.loads(done.stdout)["command"] == "list"
    assert "it loads" in done.stderr
    raising = '    if spec.dtype == "float32":\n        raise ValueError("not this one")\n'
    reference = next(line for line in file.read_text().splitlines() if line.startswith("def reference("))
    changed(file, (reference + "\n", reference + "\n" + raising))
    done = run(tmp_path, "-c", CHECKED, family=file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['ValueError: not this one', None]"


# The reference of one of two problems raises, and only that problem is wrong.
CHECKED = """
from generator.measuring.interpret import interpreted
from generator.workload import default_problems, default_variant
found = {p.spec.dtype: (p, default_variant(p)) for p in default_problems()}
print(interpreted([found["float32"], found["bfloat16"]]))
"""


@pytest.mark.parametrize(
    ("modes", "tails", "said"),
    [
        (("a", "a_b"), ("b_c", "c"), r"\('a', 'b_c'\) and \('a_b', 'c'\) are both col_a_b_c"),
        (("A", "a"), ("c", "d"), r"\('A', 'c'\) and \('a', 'c'\) are both col_a_c"),
        (("a-b", "a"), ("c", "d"), "whose name must be one of Python's, got 'col_a-b_c'"),
    ],
)
def test_each_text_has_a_name_of_its_own(modes: tuple[str, str], tails: tuple[str, str], said: str) -> None:
    @dataclasses.dataclass(frozen=True)
    class Spec:
        mode: str = one_of(*modes, default=modes[0])

    @dataclasses.dataclass(frozen=True)
    class Variant:
        tail: str = one_of(*tails, default=tails[0])

    module: Any = types.SimpleNamespace(Spec=Spec, Variant=Variant, TEXT=("mode", "tail"))
    with pytest.raises(FamilyError, match=said):
        list(_texts(module, "col"))


SEEN = 3  # problems of each family that are compared


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("name", strangers.PREFIXES)
def test_a_built_in_family_registers_as_a_stranger_does_and_is_the_same(tmp_path: Path, name: str) -> None:
    """The built-in families have nothing beyond the protocol for families from outside."""
    file = strangers.stranger(name, tmp_path)
    done = run(tmp_path, "-m", "tests.support.strangers", name, str(SEEN), family=file)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(strangers.seen(name, SEEN)))


@pytest.mark.parametrize("name", ["softmax", "rmsnorm"])
def test_what_is_committed_of_the_examples_is_theirs(tmp_path: Path, name: str) -> None:
    done = tune(tmp_path, "--family", str(EXAMPLES / f"{name}.py"), "--check")
    assert done.returncode == 0, done.stdout
    assert "0 to do" in done.stdout or "every row and every generated file is up to date" in done.stdout


def test_what_check_tells_to_run_renders_this_family(tmp_path: Path) -> None:
    """Without --family the command would render the package's kernels."""
    file = copied("softmax", tmp_path)
    told = [line for line in tune(tmp_path, "--family", file.name, "--check").stdout.splitlines() if "--render" in line]
    assert len(told) == 3, told
    for line in told:
        arguments = shlex.split(line.partition("python tune.py ")[2])
        assert arguments == ["--family", str(file), "--render"]
    assert tune(tmp_path, *arguments).returncode == 0
    assert "--render" not in tune(tmp_path, "--family", file.name, "--check").stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"import triton\ndef KERNEL(:\n", "gives no Python, line 2: def softmax_split(:"), (b"# \xe9", "no UTF-8 text")],
)
def test_a_template_that_gives_no_python_is_a_sentence(tmp_path: Path, text: bytes, said: str) -> None:
    file = copied("softmax", tmp_path)
    file.with_name("softmax.py.jinja").write_bytes(text)
    done = tune(tmp_path, "--family", file.name, "--render")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("tune.py: the template ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    for arguments, said in (
        (("--family", "absent.py", "--list"), "there is no such file"),
        (("--family", "sftmax", "--list"), "no family 'sftmax'"),
        (("--family", str(copied("softmax", tmp_path)), "--out", "x", "--list"), "its record lies beside it"),
    ):
        done = tune(tmp_path, *arguments)
        assert done.returncode == 2, done.stdout
        assert " ".join(said.split()) in " ".join(done.stderr.replace("│", " ").split())
    changed(tmp_path / "softmax.py", ("def bytes_moved", "def bytes_maved"))
    done = tune(tmp_path, "--family", "softmax.py", "--list")
    assert done.returncode == 2
    assert "is no family yet, it lacks bytes_moved" in done.stderr


def test_a_new_family_works_and_so_do_its_tests(tmp_path: Path) -> None:
    done = tune(tmp_path, "new-family", "mine")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        "README.md", "mine.py", "mine.py.jinja", "test_mine.py",
    ]  # fmt: skip
    done = run(tmp_path / "mine", "-m", "pytest", "-q", "-p", "no:cacheprovider", cache=tmp_path / "cache")
    assert "3 passed" in done.stdout, done.stdout
    kept = (tmp_path / "mine" / "mine.py").read_text()
    done = tune(tmp_path, "new-family", "mine")
    assert done.returncode == 2
    assert "are there already, and kept" in done.stderr
    assert (tmp_path / "mine" / "mine.py").read_text() == kept


def test_the_page_of_a_new_family_names_the_file_where_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "families of mine"
    write_family("mine", folder)
    lines = (folder / "README.md").read_text().splitlines()
    commands = [shlex.split(line.partition("#")[0]) for line in lines if line.startswith("    python tune.py")]
    assert [command[command.index("--family") + 1] for command in commands] == [str(folder / "mine.py")] * 2


def test_an_entry_point_names_a_family(tmp_path: Path) -> None:
    copied("softmax", tmp_path / "site" / "somebody").with_name("__init__.py").touch()
    facts = tmp_path / "site" / "somebody-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[tuned.families]\nrow_softmax = somebody.softmax\n")
    path = f"{PATHS}:{tmp_path / 'site'}"
    done = run(tmp_path, str(ROOT / "tune.py"), "--family", "row_softmax", "--render", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "somebody" / "softmax_tuned" / "kernels" / "softmax_whole.py").exists()
