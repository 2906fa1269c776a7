"""The stages of a release run, as data: their commands, the files that they may change, and the files copied after them.

All measurements go to a folder of the release first. The record is copied into the package when every problem has a
row, and results are copied to the committed folders when every suite is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gru_plan, plan
from benchmarks.record import Row
from benchmarks.session import RESULTS
from generator.places import PACKAGE, ROOT
from generator.publishing.verified import FOLDER as VERIFIED
from generator.storage.record import record_path

PICTURE = "docs/images/speedups.png"  # of the summary
SECONDS = 240  # of random calls of each kind
RANDOM = {
    "random_rope": "rope-",
    "random_gru": "",
    "random_steps": "steps-",
    "training": "training-",
}  # random_tiles measures nothing


@dataclasses.dataclass(frozen=True)
class Stage:
    """Commands that run one after the other; the stage is done if all end well."""

    name: str
    commands: tuple[tuple[str, ...], ...]  # arguments of Python
    writes: tuple[Path, ...] = ()  # files and folders of the checkout that the commands may change
    copies: tuple[tuple[Path, Path], ...] = ()  # then: (source, target in the checkout), each whole or not at all
    from_empty: bool = False  # uses only the caches of the release, which begin empty
    lane: str = ""  # on several GPUs lanes run at once; stages that write the same file share a lane

    @property
    def changes(self) -> tuple[Path, ...]:
        """Files and folders of the checkout that the stage may change."""
        return (*self.writes, *(target for _, target in self.copies))


def stages(  # noqa: PLR0913 - of what, and how
    device: str,
    commit: str,
    folder: Path,
    *,
    by_row: bool = False,
    tuned: bool = False,
    gpus: str = "1",
    seconds: int = SECONDS,
) -> list[Stage]:
    """The plan. ``folder`` holds files that are not in the checkout yet; the commit gives the seed of random calls.

    A suite that was cut begins again, so that all rows are of one sitting; ``by_row``: it measures only the rows it
    lacks. ``tuned``: nothing is tuned, and every committed row must count. ``gpus``: a number, or "all". ``seconds``:
    for random calls of each kind.
    """
    winners, results, seed = folder / "record", folder / "results", str(int(commit[:7], 16))
    found = tuple(results / sub / f"{device}.json" for sub in ("", "gru"))
    random = {name: results / "random" / f"{device}-{part}{seed}.json" for name, part in RANDOM.items()}
    summary, norms, caches, latent = (
        results / name / f"{device}.json" for name in ("summary", "qk_norm", "append", "mla")
    )
    plots = [plan.png_path(found[0], name) for name in plan.SWEEPS]
    whole = ("--whole", *(("--missing",) if by_row else ()))

    def suites(module: str, rows: Iterable[Row[Any]], out: Path) -> list[Stage]:
        names = dict.fromkeys(row.suite for row in rows)
        commands = {name: ("-m", module, "--suite", name, *whole, "--out", str(out)) for name in names}
        return [Stage(name, (command,), lane=name) for name, command in commands.items()]

    def alone(name: str, *rest: str) -> Stage:
        return Stage(name, (("-m", f"benchmarks.{name}", *rest),), lane=name)

    def shipped(path: Path) -> Path:
        return RESULTS / path.relative_to(results)

    several = gpus if gpus == "all" else ",".join(map(str, range(int(gpus))))
    out, on = ("--out", str(winners)), ("--gpu", "auto") if gpus == "1" else ("--gpus", several)
    tune = Stage(
        "tune",
        (("tune.py", *on, *out), ("tune.py", "--check", *out)),
        copies=((record_path(device, winners), record_path(device)),),
        from_empty=True,
    )
    return [
        Stage("tuned", (("tune.py", "--check", "--target", device),)) if tuned else tune,
        Stage("render", (("tune.py", "--render"),), (PACKAGE / "kernels", PACKAGE / "tables")),
        Stage("verify", (("-m", "benchmarks.verify", *(() if gpus == "1" else ("--gpus", gpus))),), (VERIFIED,)),
        *suites("benchmarks.rope", plan.rows(), results),
        *suites("benchmarks.gru", [*gru_plan.sequences(), *gru_plan.steps()], results / "gru"),
        *(alone(name, f"--seconds={seconds}", "--seed", seed, "--out", str(path)) for name, path in random.items()),
        alone("qk_norm", "--seed", seed, "--out", str(norms)),
        alone("append", "--out", str(caches)),
        alone("mla", "--out", str(latent)),
        alone("summary", "--out", str(summary)),
        Stage(
            "plot",
            (("-m", "benchmarks.plot", str(found[0])),),
            copies=(
                *((path, shipped(path)) for path in (*found, *random.values(), summary, norms, caches, latent)),
                *((path, RESULTS / "sweep" / path.name) for path in plots),
            ),
        ),
        Stage(
            "table",
            (
                *(("-m", "benchmarks.table", str(shipped(path)), "--write", "docs/results.md") for path in found),
                (
                    "-m",
                    "benchmarks.summary",
                    "--results",
                    str(shipped(summary)),
                    "--write",
                    "README.md",
                    "--plot",
                    PICTURE,
                ),
                ("-m", "benchmarks.pages", "--released", device, commit),
                *(("-m", "benchmarks.table", str(shipped(path)), "--bars") for path in found),
            ),
            (
                ROOT / "README.md",
                ROOT / "docs" / "results.md",
                ROOT / "docs" / f"results-{device}.md",
                ROOT / "docs" / "images",
            ),
        ),
        Stage("check", (("tune.py", "--check", "--release", "--target", device),), (stamp(device),)),
    ]


def stamp(device: str) -> Path:
    """The file that a whole release leaves: its commit, its environment, and the time of each stage."""
    return RESULTS / "release" / f"{device}.json"


def listed(plan: Sequence[Stage]) -> str:
    """The plan as text, with paths relative to the checkout."""
    lines = []
    for stage in plan:
        lines += [stage.name, *(f"    python {' '.join(command)}" for command in stage.commands)]
        lines += [f"    {source} -> {target}" for source, target in stage.copies]
    return "\n".join(lines).replace(f"{ROOT}/", "")
