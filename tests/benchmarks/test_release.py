"""A release is of one commit, goes on where it was interrupted, and puts nothing half-made into the checkout."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import subprocess
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gru, peers, plan, release, rope, shipped
from benchmarks.gpus import visible
from benchmarks.release import INTERRUPTED, OUT_OF_TIME, REQUIRED, Journal, ReleaseError
from benchmarks.release_plan import Stage, stages
from generator.places import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.processes

ENVIRONMENT = {"device": "Test GPU", "torch": "2.13.0", "peers": dict.fromkeys(peers.PACKAGES, "1.0")}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ENDLESS = "import time\nwhile True: time.sleep(600)"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit in place of this checkout, with separate caches."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # lanes get the GPUs that it lists
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    for name in ("source.py", "table.py", "README.md"):
        (folder / name).write_text("committed\n")
    (folder / ".gitignore").write_text("*.ignored\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    monkeypatch.setattr(release, "ROOT", folder)
    monkeypatch.setattr(release, "stamp", lambda device: folder / f"{device}.ignored")
    monkeypatch.setattr(release.signal, "signal", lambda *_: None)
    monkeypatch.setattr(release, "here", lambda: ENVIRONMENT)
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    return folder


def stage(tmp_path: Path, name: str, program: str = "", **rest: Any) -> Stage:
    """A stage that adds a dot to the file ``name`` for each run, then runs a program in the checkout."""
    begin = f"import os, pathlib, sys; open({str(tmp_path / name)!r}, 'a').write('.')\n"
    return Stage(name, (("-c", begin + program),), **rest)


def runs(tmp_path: Path) -> str:
    """The one-letter names of the stages that ran, each repeated for every run."""
    return "".join(path.name * len(path.read_text()) for path in sorted(tmp_path.glob("?")))


def journal(tmp_path: Path, commit: str | None = None, **changes: Any) -> Journal:
    commit = commit or git(tmp_path / "checkout", "rev-parse", "HEAD")
    (tmp_path / "kept").mkdir(exist_ok=True)
    return Journal.open(tmp_path / "kept" / "journal.json", commit, {**ENVIRONMENT, **changes}, {})


def run(tmp_path: Path, given: Sequence[Stage], **rest: Any) -> int:
    return release.release(given, journal(tmp_path), **rest)


def clock(monkeypatch: pytest.MonkeyPatch, times: Any) -> None:
    monkeypatch.setattr(release, "time", types.SimpleNamespace(monotonic=lambda: next(times)))


# The plan -------------------------------------------------------------------------------------------------------------


def test_the_plan_tunes_verifies_and_measures_every_suite() -> None:
    made = stages("test_gpu", COMMIT, Path("kept"))
    suites = [*plan.SUITES, "gru", "gru_cell"]
    random = ["random_rope", "random_gru", "random_steps", "training", "qk_norm"]
    names = ["tune", "render", "verify", *suites, *random, "append", "mla", "summary", "plot", "table", "check"]
    assert [one.name for one in made] == names
    assert [one.name for one in made if one.from_empty] == ["tune"]
    seeds = {c[c.index("--seed") + 1] for one in made if one.name in random for c in one.commands}
    assert seeds == {str(0x0123456)}, "chosen by nobody, and the same after a cut"


def test_the_plan_changes_nothing_in_the_checkout_but_what_it_may() -> None:
    made = {one.name: one for one in stages("test_gpu", COMMIT, ROOT / ".cache" / "kept")}
    changed = {name: [str(p.relative_to(ROOT)) for p in one.changes] for name, one in made.items() if one.changes}
    assert changed.pop("plot")[:2] == ["benchmarks/results/test_gpu.json", "benchmarks/results/gru/test_gpu.json"]
    assert changed == {
        "tune": ["tuned/winners/test_gpu.json"],
        "render": ["tuned/kernels", "tuned/tables"],
        "verify": ["benchmarks/results/verified"],
        "table": ["README.md", "docs/results.md", "docs/results-test_gpu.md", "docs/images"],
        "check": ["benchmarks/results/release/test_gpu.json"],
    }
    outs = [Path(c[c.index("--out") + 1]) for one in made.values() for c in one.commands if "--out" in c]
    assert all(path.is_relative_to(ROOT / ".cache" / "kept") for path in outs)
    assert len(outs) == 2 + len(plan.SUITES) + 2 + 8


@pytest.mark.parametrize("by_row", [False, True])
def test_the_suites_understand_their_commands(by_row: bool) -> None:
    for one in stages("test_gpu", COMMIT, Path("kept"), by_row=by_row):
        for _, module, *rest in (c for c in one.commands if c[1] in ("benchmarks.rope", "benchmarks.gru")):
            main = rope.main if module == "benchmarks.rope" else gru.main
            assert main([*rest, "--dry-run"]) == 0
            assert "--whole" in rest
            assert ("--missing" in rest) is by_row


def test_the_plan_is_listed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(release, "here", lambda: pytest.fail("it looks for a GPU"))
    (tmp_path / "checkout" / "source.py").write_text("edited")
    assert release.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "tune\n    python tune.py --gpu auto --out " in said
    assert "    python -m benchmarks.verify\n" in said
    assert not (tmp_path / "cache").exists()


def test_every_peer_that_is_a_package_can_be_looked_for() -> None:
    assert set(peers.IMPORTED_AS.values()) == set(peers.PACKAGES)
    assert set(peers.IMPORTED_AS) <= set(peers.PEERS)
    assert REQUIRED == ("flash-attention", "TransformerEngine", "Liger-Kernel")


def test_make_runs_it() -> None:
    assert "$(BIN)/python -m benchmarks.release" in (ROOT / "Makefile").read_text()


# What is refused ------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(release, "here", lambda: {"device": None})
    assert release.main([]) == 1
    assert "needs a GPU, and PyTorch sees none: run it where there is one; --list shows" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["source.py", "new.py", "folder/new.py"])
def test_sources_that_differ_from_the_commit_are_refused(tmp_path: Path, capsys: Any, name: str) -> None:
    path = tmp_path / "checkout" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("edited")
    assert run(tmp_path, [stage(tmp_path, "a")]) == 1
    said = capsys.readouterr().out
    assert name in said
    assert "Commit them, or put them away" in said
    assert not runs(tmp_path)


def test_what_git_ignores_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "checkout" / "a.ignored").write_text("")
    assert run(tmp_path, [stage(tmp_path, "a")]) == 0


def test_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.main([]) == 1
    assert "is no git checkout: clone the repository" in capsys.readouterr().out


def test_sources_that_change_while_a_stage_runs_undo_it(tmp_path: Path, capsys: Any) -> None:
    given = [stage(tmp_path, "a", "pathlib.Path('source.py').write_text('edited')"), stage(tmp_path, "b")]
    assert run(tmp_path, given) == 1
    assert "source.py" in capsys.readouterr().out
    assert runs(tmp_path) == "a"
    git(tmp_path / "checkout", "checkout", "-q", "source.py")
    assert run(tmp_path, [stage(tmp_path, "a"), given[1]]) == 0
    assert runs(tmp_path) == "aab"
    (tmp_path / "checkout" / "source.py").write_text("edited")
    capsys.readouterr()
    assert run(tmp_path, given) == 1, "though every stage is done"
    assert "source.py" in capsys.readouterr().out


def test_another_commit_meanwhile_ends_it(tmp_path: Path, capsys: Any) -> None:
    kept = journal(tmp_path)
    git(tmp_path / "checkout", "commit", "-q", "--allow-empty", "-m", "two")
    assert release.release([stage(tmp_path, "a")], kept) == 1
    assert "another is checked out now" in capsys.readouterr().out
    assert not runs(tmp_path)


def test_what_a_stage_writes_may_differ_once_it_has_begun(tmp_path: Path, checkout: Path) -> None:
    write = "pathlib.Path('table.py').write_text('generated'); pathlib.Path('new.py').write_text('generated')"
    wrote = stage(tmp_path, "b", write, writes=(checkout / "table.py", checkout / "new.py"))
    (checkout / "table.py").write_text("by hand")
    assert run(tmp_path, [stage(tmp_path, "a"), wrote]) == 1
    git(checkout, "checkout", "-q", "table.py")
    cut = [stage(tmp_path, "a"), wrote, stage(tmp_path, "c", "sys.exit(1)")]
    assert run(tmp_path, cut) == 1
    assert (checkout / "table.py").read_text() == "generated"
    assert run(tmp_path, [*cut[:2], stage(tmp_path, "c")]) == 0
    assert runs(tmp_path) == "abcc"


def test_a_required_peer_that_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(release, "here", lambda: {**ENVIRONMENT, "peers": {"flash_attn": "2.8", "fla": "1"}})
    monkeypatch.setattr(release, "stages", lambda *_, **__: [stage(tmp_path, "a")])
    assert release.main([]) == 1
    said = capsys.readouterr().out
    assert "measured beside TransformerEngine, Liger-Kernel, not installed here" in said
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]' liger-kernel" in said
    assert release.main(["--without-peers", "TransformerEngine"]) == 1
    assert not runs(tmp_path)
    assert release.main(["--without-peers", "TransformerEngine,Liger-Kernel"]) == 0
    assert runs(tmp_path) == "a"
    assert "left out: TransformerEngine, Liger-Kernel, FlashInfer, vLLM, quack" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--without-peers", "vLLM,nobody"],
            "required peers are flash-attention, TransformerEngine, Liger-Kernel, got",
        ),
        (["--budget", "soon"], "90s, 10m or 1h, got 'soon'"),
    ],
)
def test_options_that_mean_nothing_are_refused(given: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        release.main(given)
    assert said in " ".join(capsys.readouterr().err.split())


def test_other_options_than_it_began_with_are_refused(tmp_path: Path) -> None:
    """Stages that are done under the options of before would count under those of now."""
    begun = Journal(tmp_path / "journal.json", COMMIT, dict(ENVIRONMENT), settings={"tuned": True, "seconds": 5})
    begun.save()
    with pytest.raises(ReleaseError, match=r"one set of options.*seconds was 5, is 60; tuned was True, is False"):
        Journal.open(begun.path, COMMIT, dict(ENVIRONMENT), {"tuned": False, "seconds": 60})
    again = Journal.open(begun.path, COMMIT, dict(ENVIRONMENT), {"tuned": True, "seconds": 5})
    assert again.settings == begun.settings


def test_what_a_user_set_or_tuned_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*shipped.UNSET, "XDG_DATA_HOME"):
        monkeypatch.setenv(name, "of a user")
    monkeypatch.setenv("KEPT", "it is")
    program = f"import os, json; json.dump(dict(os.environ), open({str(tmp_path / 'told')!r}, 'w'))"
    assert run(tmp_path, [stage(tmp_path, "a", program)]) == 0
    told = json.loads((tmp_path / "told").read_text())
    assert told["KEPT"] == "it is"
    assert not told.keys() & set(shipped.UNSET)
    assert not list(Path(told["XDG_DATA_HOME"]).iterdir())


def test_another_environment_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, [stage(tmp_path, "a")]) == 0
    with pytest.raises(release.ReleaseError, match=r"torch was 2\.13\.0, is 2\.14\.0\. Put it back, or remove .*kept"):
        journal(tmp_path, torch="2.14.0")


def test_a_second_release_is_refused_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(release, "stages", lambda *_, **__: [stage(tmp_path, "a")])
    folder = tmp_path / "cache" / "release"
    folder.mkdir(parents=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert release.main([]) == 1
    assert "a release runs here" in capsys.readouterr().out
    assert not runs(tmp_path)


def test_a_command_holds_the_lock_too(tmp_path: Path) -> None:
    """A command that outlives a killed release must keep the next release from measuring beside it."""
    with (tmp_path / "lock").open("a") as lock:
        assert run(tmp_path, [stage(tmp_path, "a", f"os.fstat({lock.fileno()})")], lock=lock.fileno()) == 0


# What is kept ---------------------------------------------------------------------------------------------------------


def test_a_stage_that_failed_stops_it_and_the_next_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    clock(monkeypatch, itertools.count(step=10.0))
    failing = [stage(tmp_path, "a"), stage(tmp_path, "b", "print('why'); sys.exit(3)"), stage(tmp_path, "c")]
    assert run(tmp_path, failing) == 1
    said = capsys.readouterr().out
    log = tmp_path / "kept" / "logs" / "b.log"
    assert "b failed: python -c " in said
    assert f"ended with 3, {log} says why" in said
    assert "not done: b, c" in said
    assert "why\n" in log.read_text()
    assert runs(tmp_path) == "ab"
    before = json.loads((tmp_path / "kept" / "journal.json").read_text())["stages"]
    assert {name: (row["sittings"], row["done"]) for name, row in before.items()} == {"a": (1, True), "b": (1, False)}
    assert run(tmp_path, [failing[0], stage(tmp_path, "b"), failing[2]]) == 0
    assert runs(tmp_path) == "abbc"
    after = journal(tmp_path).stages
    assert {name: (row["sittings"], row["done"]) for name, row in after.items()} == {
        "a": (1, True), "b": (2, True), "c": (1, True),
    }  # fmt: skip
    assert after["a"] == before["a"]
    assert after["b"]["seconds"] > before["b"]["seconds"] >= 10, "the time of all sittings"
    table = capsys.readouterr().out
    assert f"{'b':18}{after['b']['seconds']:9.1f}{2:10}\n" in table
    assert f"{'sum':18}{sum(row['seconds'] for row in after.values()):9.1f}\n" in table


def test_all_commands_of_a_stage_must_end_well(tmp_path: Path) -> None:
    first, second = stage(tmp_path, "a"), stage(tmp_path, "b", "sys.exit(1)")
    both = Stage("ab", (*first.commands, *second.commands))
    assert run(tmp_path, [both]) == 1
    assert run(tmp_path, [both]) == 1
    assert runs(tmp_path) == "aabb"


def test_files_go_into_the_checkout_when_all_commands_have_ended_well(tmp_path: Path, checkout: Path) -> None:
    made, there = tmp_path / "record.json", checkout / "winners" / "record.json"
    write = f"pathlib.Path({str(made)!r}).write_text('new')"
    copies = ((made, there),)
    assert run(tmp_path, [stage(tmp_path, "a", f"{write}; sys.exit(1)", copies=copies)]) == 1
    assert not there.exists()
    assert run(tmp_path, [stage(tmp_path, "a", write, copies=copies), stage(tmp_path, "b")]) == 0
    assert there.read_text() == "new"
    assert [path.name for path in there.parent.iterdir()] == ["record.json"]


def test_a_file_that_was_not_made_fails_the_stage(tmp_path: Path, checkout: Path, capsys: Any) -> None:
    assert run(tmp_path, [stage(tmp_path, "a", copies=((tmp_path / "none", checkout / "table.py"),))]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().out
    assert (checkout / "table.py").read_text() == "committed\n"


def test_tuning_begins_with_empty_caches_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_TABLES", "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "usual")
    told = "pathlib.Path(os.environ['TOLD']).write_text(repr([os.environ.get(n) for n in ('TUNED_CACHE', 'TRITON_CACHE_DIR', 'TUNED_TABLES')]))"
    for name, empty in (("a", True), ("b", False)):
        monkeypatch.setenv("TOLD", str(tmp_path / f"{name}.told"))
        assert run(tmp_path, [stage(tmp_path, name, told, from_empty=empty)]) == 0
    kept = tmp_path / "kept"
    assert (tmp_path / "a.told").read_text() == repr([str(kept / "cache"), str(kept / "triton"), None])
    assert (tmp_path / "b.told").read_text() == repr([str(tmp_path / "cache"), "usual", None])
    assert (kept / "cache" / "locks").resolve() == tmp_path / "cache" / "locks", "other tuners wait for this one"
    trial = kept / "cache" / "trial"
    trial.write_text("measured")
    assert run(tmp_path, [stage(tmp_path, "c", from_empty=True)]) == 0
    assert trial.read_text() == "measured"


# How it is cut --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The exit codes of the commands when the release stopped them; None for a command that still runs."""
    found: list[int | None] = []
    stop = release.stop
    monkeypatch.setattr(release, "stop", lambda process, s: (stop(process, s), found.append(process.poll())))
    return found


def test_a_budget_ends_it_between_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(release, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    given = [stage(tmp_path, name) for name in "abc"]
    command = release._ended

    def for_a_minute(*rest: Any) -> int:
        code = command(*rest)
        now[0] += 60
        return code

    monkeypatch.setattr(release, "_ended", for_a_minute)
    assert run(tmp_path, given, ends=90) == OUT_OF_TIME == 75
    assert runs(tmp_path) == "ab", "a stage that has ended is kept, though the time was over before its end"
    said = capsys.readouterr().out
    assert "the budget is used up\nnot done: c; the same command goes on" in said
    assert "c" not in journal(tmp_path).stages, "it was not begun"
    assert f"{'sum':18}{120:9.1f}" in said
    assert run(tmp_path, given, ends=now[0] + 90) == 0
    assert runs(tmp_path) == "abc"


def test_a_budget_ends_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, ended: list[int | None]
) -> None:
    clock(monkeypatch, itertools.count())
    monkeypatch.setattr(release, "BEAT_SECONDS", 0.01)
    assert run(tmp_path, [stage(tmp_path, "b", ENDLESS)], ends=100) == OUT_OF_TIME
    assert "not done: b" in capsys.readouterr().out
    assert ended[-1], "it goes on, or ended by itself"
    assert journal(tmp_path).stages["b"]["done"] is False
    assert run(tmp_path, [stage(tmp_path, "b")]) == 0


def test_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, ended: list[int | None]) -> None:
    wait = subprocess.Popen.wait

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if ENDLESS in self.args[-1] and timeout == release.BEAT_SECONDS:
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    clock(monkeypatch, itertools.count(step=10.0))
    given = [stage(tmp_path, "a"), stage(tmp_path, "b", ENDLESS), stage(tmp_path, "c")]
    assert run(tmp_path, given) == INTERRUPTED == 130
    assert "interrupted\nnot done: b, c; the same command goes on" in capsys.readouterr().out
    assert ended[-1], "it goes on, or ended by itself"
    cut = journal(tmp_path).stages["b"]
    assert (cut["sittings"], cut["done"]) == (1, False)
    assert cut["seconds"] >= 10, "what it took counts, though it is run again"
    assert run(tmp_path, [given[0], stage(tmp_path, "b"), given[2]]) == 0
    assert runs(tmp_path).replace("b", "") == "ac"
    assert journal(tmp_path).stages["b"]["seconds"] > cut["seconds"]


def test_ctrl_c_while_it_looks_around(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(release, "here", interrupted)
    assert release.main([]) == INTERRUPTED
    assert capsys.readouterr().out == "interrupted\n"


def test_the_time_of_a_release_that_is_killed_is_in_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is written while a command runs, since a killed release can write nothing more."""
    saved, go_on = [], tmp_path / "go_on"
    save = Journal.save

    def watched(self: Journal, *rest: Any) -> None:
        save(self, *rest)
        saved.append(json.loads(self.path.read_text())["stages"]["a"]["seconds"])
        if len(saved) > 3:
            go_on.write_text("")

    clock(monkeypatch, itertools.count(step=10.0))
    monkeypatch.setattr(release, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(Journal, "save", watched)
    waiting = f"import time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    assert run(tmp_path, [stage(tmp_path, "a", waiting)]) == 0
    assert saved[0] < saved[1] < saved[2]


# The whole command ----------------------------------------------------------------------------------------------------


def test_a_whole_release_leaves_a_stamp_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path, capsys: Any
) -> None:
    asked = []

    def made(device: str, commit: str, folder: Path, **settings: Any) -> list[Stage]:
        asked.append((device, commit, folder, settings))
        return [stage(tmp_path, "a"), stage(tmp_path, "b")]

    monkeypatch.setattr(release, "stages", made)
    commit = git(checkout, "rev-parse", "HEAD")
    assert release.main(["--by-row"]) == 0
    assert f"{commit}: every stage is done" in capsys.readouterr().out
    settings = {"by_row": True, "tuned": False, "gpus": "1", "seconds": 240}
    assert asked == [("test_gpu", commit, tmp_path / "cache" / "release" / f"test_gpu-{commit[:12]}", settings)]
    stamp = json.loads((checkout / "test_gpu.ignored").read_text())
    assert (stamp["commit"], stamp["environment"], list(stamp["stages"])) == (commit, ENVIRONMENT, ["a", "b"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", stamp["ended"])
    assert release.main([]) == 0
    assert runs(tmp_path) == "ab"
    git(checkout, "commit", "-q", "--allow-empty", "-m", "two")
    assert release.main([]) == 0
    assert runs(tmp_path) == "aabb", "another commit begins from empty"


# On several GPUs ------------------------------------------------------------------------------------------------------

SEEN = "print(os.environ['CUDA_VISIBLE_DEVICES'], file=open({path!r}, 'a'))\n"


def test_what_writes_one_file_at_once_measures_other_suites_of_it() -> None:
    """``benchmarks.record.Results`` keeps the rows that other suites wrote in the meantime."""
    lanes: dict[str, list[str]] = {}
    for one in stages("test_gpu", COMMIT, Path("kept"), gpus="all", seconds=7):
        for command in one.commands:
            if one.lane:
                lanes.setdefault(command[command.index("--out") + 1], []).append(one.lane)
                assert command[1] not in ("benchmarks.rope", "benchmarks.gru") or command[3] == one.lane == one.name
                assert ("--seconds=7" in command) == (
                    one.name in ("random_rope", "random_gru", "random_steps", "training")
                )
    assert len(lanes) == 10
    assert all(len(set(names)) == len(names) for names in lanes.values()), lanes


def test_the_plan_of_several_gpus_or_of_committed_rows() -> None:
    for gpus, on in (
        ("1", "tune.py --gpu auto --out"),
        ("3", "tune.py --gpus 0,1,2 --out"),
        ("all", "tune.py --gpus all"),
    ):
        plan = {one.name: " ".join(one.commands[0]) for one in stages("test_gpu", COMMIT, Path("kept"), gpus=gpus)}
        assert plan["tune"].startswith(on)
        assert plan["verify"].endswith("benchmarks.verify" if gpus == "1" else f"--gpus {gpus}")
    first = stages("test_gpu", COMMIT, Path("kept"), tuned=True)[0]
    assert first == Stage("tuned", (("tune.py", "--check", "--target", "test_gpu"),))


def test_lanes_run_at_once_each_on_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages wait for each other, so they end only if both run at once; the stages of a lane run in order on one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,8")
    monkeypatch.setattr(release, "BEAT_SECONDS", 0.05)

    def meets(mine: str, other: str) -> str:
        wait = f"while not pathlib.Path({str(tmp_path / other)!r}).exists(): time.sleep(0.01)\n"
        return "import time\n" + SEEN.format(path=str(tmp_path / f"gpu-{mine}")) + wait

    given = [
        stage(tmp_path, "a"),
        stage(tmp_path, "b", meets("b", "c"), lane="one"),
        stage(tmp_path, "c", meets("c", "b"), lane="two"),
        stage(
            tmp_path,
            "d",
            SEEN.format(path=str(tmp_path / "gpu-b")) + f"assert os.path.exists({str(tmp_path / 'b')!r})\n",
            lane="one",
        ),
        stage(tmp_path, "e", f"assert os.path.exists({str(tmp_path / 'd')!r})\n"),
    ]
    assert run(tmp_path, given, gpus=2) == 0
    assert runs(tmp_path) == "abcde"
    seen = {name: (tmp_path / f"gpu-{name}").read_text().split() for name in "bc"}
    assert {tuple(gpus) for gpus in seen.values()} in ({("5", "5"), ("7",)}, {("7", "7"), ("5",)})
    assert run(tmp_path, given, gpus=2) == 0
    assert runs(tmp_path) == "abcde", "what is done is not run again"


@pytest.mark.parametrize(
    ("program", "rest", "code"),
    [("sys.exit(3)", {}, 1), (ENDLESS, {"ends": 100}, OUT_OF_TIME)],
    ids=["a command fails", "the budget ends"],
)
def test_what_ends_one_lane_ends_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: list[int | None],
    program: str,
    rest: dict[str, Any],
    code: int,
) -> None:
    clock(monkeypatch, itertools.count())
    monkeypatch.setattr(release, "BEAT_SECONDS", 0.05)
    given = [
        stage(tmp_path, "b", ENDLESS, lane="one"),
        stage(tmp_path, "c", program, lane="two"),
        stage(tmp_path, "d", lane="three"),
        stage(tmp_path, "e"),
    ]
    assert run(tmp_path, given, gpus=2, **rest) == code
    assert len(ended) == 2
    assert None not in ended, "a command goes on"
    assert set(runs(tmp_path)) <= {"b", "c"}
    assert not any(row["done"] for row in journal(tmp_path).stages.values())


def test_ctrl_c_ends_all_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, ended: list[int | None]
) -> None:
    join = threading.Thread.join

    def interrupted(self: Any, timeout: float | None = None) -> None:
        if timeout == release.BEAT_SECONDS and runs(tmp_path) == "bc":
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    monkeypatch.setattr(release, "BEAT_SECONDS", 0.05)
    given = [stage(tmp_path, "b", ENDLESS, lane="one"), stage(tmp_path, "c", ENDLESS, lane="two")]
    assert run(tmp_path, given, gpus=2) == INTERRUPTED
    assert "interrupted\nnot done: b, c" in capsys.readouterr().out
    assert len(ended) == 2
    assert None not in ended


@pytest.mark.parametrize(("shown", "count"), [("3", 1), ("", 0), ("0,", 1)])
def test_fewer_gpus_than_are_wanted_are_no_lanes_that_never_end(
    monkeypatch: pytest.MonkeyPatch, shown: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with pytest.raises(ValueError, match=f"2 GPUs are wanted, and CUDA_VISIBLE_DEVICES='{shown}' shows {count}"):
        visible(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7,8")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in visible(2)] == ["5", "7"]


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(release, "here", lambda: {**ENVIRONMENT, "gpus": 2})
    assert release.main(["--gpus", "3"]) == 1
    assert capsys.readouterr().out == "--gpus 3, and PyTorch sees 2 here: ask for no more, or for all\n"
    with pytest.raises(SystemExit):
        release.main(["--gpus", "none"])
    assert "GPUs are a number from 1 on, or all, got 'none'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        release.main(["--seconds", "0"])
    assert "seconds are a number from 1 on, got '0'" in capsys.readouterr().err


def test_a_release_that_is_cut_leaves_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    monkeypatch.setattr(release, "stages", lambda *_, **__: [stage(tmp_path, "a", "sys.exit(1)")])
    assert release.main([]) == 1
    assert not (checkout / "test_gpu.ignored").exists()


def test_what_is_here_is_asked_of_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"device": None}
    done = types.SimpleNamespace(returncode=0, stdout=f"a peer says hello\n{json.dumps(said)}\n", stderr="")
    monkeypatch.undo()
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: done)
    assert release.here() == said
    done.returncode, done.stderr = 1, "Traceback\nOSError: undefined symbol\n"
    with pytest.raises(release.ReleaseError, match="OSError: undefined symbol"):
        release.here()


def test_facts_are_a_line_of_json(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    release.facts()
    assert json.loads(capsys.readouterr().out) == {"device": None}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("generator.measuring.environment.driver_version", lambda: "580")
    monkeypatch.setattr(release.record, "environment", lambda packages: {"device": "A", "asked": sorted(packages)})
    release.facts()
    asked = sorted([*peers.PACKAGES, "flashrnn"])
    assert json.loads(capsys.readouterr().out) == {"device": "A", "asked": asked, "driver": "580", "gpus": 3}
