"""The command line: python tune.py in a checkout, tuned where the package is installed. --help tells more.

Each command imports what it needs itself: torch takes seconds, and --family must first set this process's family.
"""
# ruff: noqa: FBT002 - flags of a command line are booleans with a default

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import importlib.metadata
import importlib.util
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

from tuned.lookup.place import CHECKOUT

from .failures import INTERRUPTED, not_installed

NAME = "tune.py" if CHECKOUT else "tuned"  # of the program, in its messages
try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    sys.exit(f"{NAME}: {not_installed(missing.name)}")

# Set before numpy is imported: matrices of a hundred rows are slower on 32 threads, and the compilers need these.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
if os.environ.get("COLUMNS") == "0":  # some terminals set 0 for an unknown width: Rich would print nothing
    del os.environ["COLUMNS"]
console = Console()
errors = Console(stderr=True)
# What Typer's help shows below the options; a line is an example, and a blank line keeps it one.
EXAMPLES = f"""Examples:

{NAME} --gpu auto: tune every problem that has no row here

{NAME} --quick --problems 'llama3*': a minute, on a new GPU

{NAME} --target a100 --problems llama3_8b_2x4096: no GPU needed; compile and estimate

{NAME} --dry-run: how many variants there are to try

{NAME} explain llama3_8b_2x4096 --gpu h200: what serves it, and why

{NAME} show llama3_8b_2x4096 --out rope.py: the winner as one file

{NAME} --list --json: any command, as one object for programs"""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
WHERE, WHAT, HOW, STOP = "Where to tune", "What to tune", "How, and where it is kept", "Instead of tuning"
SEE, SHARE, STUDY = "Look at what was found", "Share it, or add to it", "Study the search"
Json = Annotated[
    bool,
    typer.Option("--json", help="One object on stdout, for programs; what people read goes to stderr."),
]


def seconds(text: str | None) -> float:
    """A time such as 90s, 10m or 1h in seconds; without one there is no limit.

    Raises:
        typer.BadParameter: for anything else.
    """
    from .duration import seconds_of  # noqa: PLC0415

    try:
        return math.inf if text is None else seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def outside(family: str | None) -> bool:
    """Whether a family is one from outside: a file, a package's folder, or an entry point ``tuned.families``.

    If so, TUNED_FAMILY is set to it, and generator/places.py reads that: it is then the only family of this process and
    of all processes that this one starts.
    """
    if family is None:
        return False
    if not family:
        raise typer.BadParameter("--family must name a family, got '': leave it out for all that are built in")
    found = importlib.metadata.entry_points(group="tuned.families", name=family)
    name = next((point.module for point in found), family)
    path = Path(name)
    if not found and path.suffix != ".py" and not path.is_dir():
        return False
    if not found and not path.exists():
        raise typer.BadParameter(
            f"--family {family}: there is no such file. Name one, an entry point, or a built-in family"
        )
    if not found and path.is_dir() and not (path / "__init__.py").is_file():
        files = ", ".join(str(file) for file in sorted(path.glob("*.py")) if not file.name.startswith("test_"))
        raise typer.BadParameter(
            f"--family {family}: a folder must be a package, and this one has no __init__.py: name the file"
            + (f", {files}" if files else "")
        )
    os.environ["TUNED_FAMILY"] = name if found else str(path.resolve())
    return True


@dataclasses.dataclass(frozen=True)
class Before:
    """The options that may stand before the name of a command (--out DIR report), kept as Typer's ``context.obj``.

    ``context.params`` would not do: earlier versions of Typer keep a path there as the typed string, not as a Path.
    """

    gpu: str = "auto"
    out: Path | None = None
    storage: str | None = None
    json: bool = False

    @property
    def device(self) -> str | None:
        """The device that --gpu means to a command about a record; None for auto."""
        return None if self.gpu == "auto" else self.gpu


def _refuse_empty(option: str, value: Any) -> None:
    """Refuse an empty value, such as an unset shell variable: it would mean the default, or no name."""
    if value is not None and not str(value).strip():
        raise typer.BadParameter(
            f"{option} must say something, got {value!r}: leave it out, or set what it was taken from"
        )


def _either(option: str, before: Any, behind: Any) -> Any:
    """The value of an option that may stand in front of a command's name or behind it; None for auto or nowhere.

    Raises:
        typer.BadParameter: it stands in both places with two values, or its value is empty.
    """
    _refuse_empty(option, behind)
    if before is not None and behind is not None and before != behind:
        raise typer.BadParameter(f"{option} {before} and {option} {behind} exclude each other: give one of them")
    return before if behind in (None, "auto") else behind


def _refuse_beside_quick(quick: bool, target: str | None, trials: int | None) -> None:  # noqa: FBT001
    """Refuse what --quick would ignore, or what would ignore --quick."""
    other = f"--target {target} measures nothing" if target is not None else f"--trials {trials} is of a search"
    if quick and (target is not None or trials is not None):
        raise typer.BadParameter(f"--quick measures a few variants that are good elsewhere, and {other}: leave one out")


# The options in front of a command, or beside an option that stops, that it reads; --json is read by all.
READ = {
    "show": {"--gpu", "--out"},
    "report": {"--gpu", "--out", "--storage"},
    "explain": {"--gpu", "--out", "--storage"},
    "regret": {"--out"},
    "submit": {"--gpu", "--out"},
    "carry": {"--out"},
    "landscape": {"--gpu"},
    "model": {"--gpu"},
    "--list": {"--family", "--problems", "--target", "--out"},
    "--dry-run": {"--family", "--problems", "--target", "--out", "--trials", "--details"},
    "--check": {"--family", "--problems", "--target", "--out", "--release"},
}


def _in_front(name: str) -> str:
    """What the help of a command says below its options: what it reads that only stands in front of its name."""
    of_record = {"--out": "--out DIRECTORY (the folder of the record)", "--storage": "--storage (the trials)"}
    return f"In front of {name}: " + " and ".join(of_record[option] for option in of_record if option in READ[name])


def _given(context: Any) -> list[str]:  # Typer has two types of it
    """The options that stand on the command line of a context, in the order of its --help."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    names = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return [f"--{ {'as_json': 'json'}.get(name, name).strip('_').replace('_', '-') }" for name in names]


def _refuse_unread(context: typer.Context, name: str | None, *, also: str | None) -> None:
    """Refuse an option that ``name`` would ignore: the answer would be another than what was asked for."""
    if name is None or name == "tune":  # tune itself says where its options must stand
        return
    unread = [one for one in _given(context) if one not in {name, "--json", also, *READ.get(name, ())}]
    if unread:
        listed = f"{NAME} --help" if name.startswith("--") else f"{NAME} {name} --help"
        raise typer.BadParameter(f"{name} does not read {unread[0]}: leave it out ({listed} has the options)")


def run(name: str, command: Callable[[Any], int], as_json: bool = False) -> NoReturn:  # noqa: FBT001
    """Run ``command`` on generator.commands and exit with its code; an error is told as a sentence and sets the code.

    ``as_json``: stdout gets one object: the command's name, the exit code, the facts that it ``put``, and any error.
    """
    if not as_json:
        raise typer.Exit(_code(command)[0])
    from .answer import collected, text_of  # noqa: PLC0415

    before, console.stderr = console.stderr, True
    try:
        with collected() as facts, contextlib.redirect_stdout(sys.stderr):  # a family from outside may print
            code, error = _code(command)
    finally:
        console.stderr = before
    failed = {} if error is None else {"error": error}
    try:
        sys.stdout.write(text_of({"command": name, "exit_code": code, **failed, **facts}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as full:
        _stdout_is_full(full)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


def _stdout_is_full(error: OSError) -> None:
    errors.print(f"{NAME}: stdout cannot be written: {error.strerror}", style="red", markup=False, highlight=False)
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - else Python writes the rest when it ends


@contextlib.contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """Delay Ctrl-C to the end of a block that imports: Python drops what is raised in a callback of its import system."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _code(command: Callable[[Any], int]) -> tuple[int, str | None]:
    """(exit code, error message or None) of a command."""
    try:
        with _ctrl_c_afterwards():
            from . import commands  # noqa: PLC0415
    except KeyboardInterrupt:
        errors.print(f"{NAME}: interrupted", style="red", markup=False, highlight=False)
        return INTERRUPTED, "interrupted"
    except ModuleNotFoundError as missing:
        errors.print(
            f"{NAME}: {not_installed(missing.name)}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return 1, not_installed(missing.name)
    except TypeError as error:
        from tuned.families.outside import FamilyError  # noqa: PLC0415

        if not isinstance(error, FamilyError):
            raise
        errors.print(f"{NAME}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2, str(error)
    try:
        return command(commands), None
    except BaseException as error:
        refused = commands.refusal(error)
        if refused is None:
            raise
        said, code = refused
        commands.say(errors, f"{NAME}: {said}", style="red")
        return code, said


def folder(name: str) -> Path:
    """The folder of --out."""
    if not name:  # such as an unset shell variable; Path("") would be the current folder
        raise typer.BadParameter("--out must be a folder, got an empty name: . is the current one")
    path = Path(name)
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"--out must be a folder, of records, got {path}, which is none")
    return path


def named(name: str) -> Path:
    """The file or folder of an option; an empty name, such as an unset shell variable, would be the current folder."""
    if not name:
        raise typer.BadParameter("it must name a file or a folder, got an empty name: . is the current folder")
    return Path(name)


# Typer reads these annotations when the program runs, on Python 3.10 too.
@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def main(  # noqa: PLR0913 - one parameter an option
    context: typer.Context,
    gpu: Annotated[
        str,
        typer.Option(help="The GPU to tune on: auto (the first), an index, or part of a name.", rich_help_panel=WHERE),
    ] = "auto",
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Several GPUs of this host, of one model, through Ray: all, or 0,1. Instead of --gpu.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="The GPUs of a Ray cluster that runs: auto, or HOST:PORT. Instead of --gpu.", rich_help_panel=WHERE
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Keep trials in a database instead of a file: postgresql://USER@HOST/DATABASE.", rich_help_panel=HOW
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Measure nothing: compile and estimate for this device, as without a GPU.", rich_help_panel=WHERE
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Only this kernel family; or one of your own: its file, its folder, or its entry point.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    problems: Annotated[
        str | None,
        typer.Option(
            help="Names or patterns, with commas between, or all; or a .jsonl file of TUNED_RECORD.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Variants to measure a problem (96); without a GPU, to compile (40).", rich_help_panel=HOW
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Measure a few variants a problem that are good elsewhere, and search nothing.",
            rich_help_panel=HOW,
        ),
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="Time for the whole run: 90s, 10m, 1h.", rich_help_panel=HOW)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=folder,
            metavar="DIRECTORY",
            help="Keep the record in this folder; the package's tables stay as they are.",
            rich_help_panel=HOW,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the problems, and stop.", rich_help_panel=STOP)] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show how many variants there are to try, on an H200 or --target, and stop.",
            rich_help_panel=STOP,
        ),
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="With --dry-run: every problem, and every rule that leaves variants out.",
            rich_help_panel=STOP,
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="List rows and files that are out of date; exit 1 if a row does not count or is missing, or a file differs.",
            rich_help_panel=STOP,
        ),
    ] = False,
    release: Annotated[
        bool,
        typer.Option(
            "--release",
            help="With --check: exit 1 also if what is here was not verified on its GPU.",
            rich_help_panel=STOP,
        ),
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Write every generated file again, and stop.", rich_help_panel=STOP)
    ] = False,
    as_json: Json = False,
) -> None:
    """Tune every problem on this GPU, most common first; Ctrl-C keeps what was measured, the same command goes on."""
    of_ones_own = outside(family)
    if of_ones_own:
        family = None
        if out is not None:
            raise typer.BadParameter(
                f"--out {out} and a family of your own exclude each other: its record lies beside it"
            )
        if ray is not None:
            raise typer.BadParameter(
                f"--ray {ray} and a family of your own exclude each other: hosts are sent this checkout only"
            )
    where = {"--gpu": gpu, "--gpus": gpus, "--ray": ray, "--storage": storage, "--target": target}
    for option, value in where.items():
        _refuse_empty(option, value)
    if details and not dry_run:
        raise typer.BadParameter("--details is of --dry-run: give both")
    context.obj = Before(gpu, out, storage, as_json)
    everywhere = "--family" if of_ones_own else None  # a family of one's own is that of the whole process
    _refuse_unread(context, context.invoked_subcommand, also=everywhere)
    if context.invoked_subcommand is not None:
        return
    limit_s = seconds(budget)
    named = {"--gpu": None if gpu == "auto" else gpu, "--gpus": gpus, "--ray": ray, "--target": target}
    given = " and ".join(f"{option} {value}" for option, value in named.items() if value is not None)
    if " and " in given:
        raise typer.BadParameter(
            f"{given} exclude each other: one GPU, several of this host, those of a cluster, or one that is not here"
        )
    if target is not None and storage is not None:
        raise typer.BadParameter(
            f"--storage keeps what is measured, and --target {target} measures nothing: leave one out"
        )  # without the value of --storage, which may hold a password
    _refuse_beside_quick(quick, target, trials)
    instead = [
        f"--{name}"
        for name, given in (("render", render), ("check", check), ("dry-run", dry_run), ("list", list_))
        if given
    ]
    if len(instead) > 1:
        raise typer.BadParameter(f"{' and '.join(instead)} exclude each other: each is done instead of tuning")
    if release and (not check or out is not None):
        raise typer.BadParameter("--release makes --check strict about what ships: give both, and no --out")
    _refuse_unread(context, instead[0] if instead else None, also=everywhere)
    if _started and not (render or check or list_ or dry_run or ray):
        _begin(on_all_gpus=gpus == "all" and target is None)

    def command(commands: Any) -> int:
        options = commands.Options(
            gpu, target, family, problems, trials, limit_s, out, gpus=gpus, ray=ray, storage=storage, quick=quick
        )
        if render:
            return commands.render(console)
        if check:
            return commands.check(options, console, release=release)
        if dry_run:
            return commands.dry_run(options, console, details=details)
        return commands.list_problems(options, console) if list_ else commands.tune(options, console)

    flags = {"render": render, "check": check, "dry-run": dry_run, "list": list_}
    run(next((name for name, given in flags.items() if given), "tune"), command, as_json)


@app.command(rich_help_panel=SEE, epilog=_in_front("show"))
def show(
    context: typer.Context,
    problem: Annotated[str, typer.Argument(help="A name from --list.")],
    device: Annotated[
        str | None,
        typer.Option("--gpu", "--device", help="Whose winner. [default: nvidia_h200, or the first record]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=named, metavar="PATH", help="Write to this file instead of the terminal.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the winner of PROBLEM as one self-contained Triton file, to paste into another project."""
    as_json, device = as_json or context.obj.json, _either("--gpu", context.obj.device, device)
    run("show", lambda commands: commands.show(problem, device, context.obj.out, out, errors, as_json=as_json), as_json)


@app.command(rich_help_panel=SHARE)
def new_family(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Its name, as of a Python module.")],
    out: Annotated[Path | None, typer.Option(parser=named, metavar="PATH", help="The folder. [default: NAME]")] = None,
    as_json: Json = False,
) -> None:
    """Write a kernel family of your own that works, with its template and tests, to begin with."""
    run(
        "new-family", lambda commands: commands.new_family(name, out or Path(name), errors), as_json or context.obj.json
    )


@app.command(rich_help_panel=SEE, epilog=_in_front("report"))
def report(
    context: typer.Context,
    device: Annotated[
        str | None,
        typer.Option("--gpu", "--device", help="Whose record. [default: nvidia_h200, or the first one]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=named, metavar="PATH", help="The file. [default: report-DEVICE.html]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write what is known of a device as one HTML file: winners, floor, peers, knobs, failures; it needs no network."""
    device = _either("--gpu", context.obj.device, device)
    run(
        "report",
        lambda commands: commands.report(device, context.obj.out, context.obj.storage, out, errors),
        as_json or context.obj.json,
    )


@app.command(rich_help_panel=SEE, epilog=_in_front("explain"))
def explain(
    context: typer.Context,
    problem: Annotated[str, typer.Argument(help="A name from --list.")],
    device: Annotated[
        str | None,
        typer.Option(
            "--gpu", "--device", help="On which GPU, which need not be here: a record's, or one of --target; or a part."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what serves PROBLEM, how near to the floor it is, and what every choice of its winner is worth."""
    given = context.obj
    device = _either("--gpu", given.device, device)
    run(
        "explain",
        lambda commands: commands.explain(problem, device, given.out, given.storage, console),
        as_json or context.obj.json,
    )


@app.command(rich_help_panel=STUDY, epilog=_in_front("regret"))
def regret(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="Whose landscapes.")] = "nvidia_h200",
    as_json: Json = False,
) -> None:
    """Tell, for each rule that was tried, how far from the best its pick for a problem without a row is."""
    _refuse_empty("--device", device)
    run("regret", lambda commands: commands.regret(device, context.obj.out, console), as_json or context.obj.json)


@app.command(rich_help_panel=STUDY)
def replay(  # noqa: PLR0913 - one parameter an option
    context: typer.Context,
    device: Annotated[str | None, typer.Option(help="Whose landscapes. [default: nvidia_h200]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Searches of each landscape.")] = 3,
    plain: Annotated[
        bool, typer.Option(help="Also run Optuna's own samplers unmodified, which takes a minute.")
    ] = True,
    write: Annotated[
        Path | None,
        typer.Option(parser=named, metavar="PATH", help="Put the table between the marks of this file too."),
    ] = None,
    foreign: Annotated[
        Path | None,
        typer.Option(
            parser=named,
            metavar="PATH",
            help="On others' kernels instead: a folder of cache files of Kernel Tuner, spaces measured whole.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay searches on recorded landscapes, without a GPU: how near the best they end, and the estimate beside them."""
    _refuse_empty("--device", device)
    if foreign is not None:
        if device is not None:
            raise typer.BadParameter(
                f"--device {device} and --foreign {foreign} exclude each other: a folder is read whole"
            )
        run(
            "replay",
            lambda commands: commands.replay_foreign(foreign, seeds, write, console, plain=plain),
            as_json or context.obj.json,
        )
    run(
        "replay",
        lambda commands: commands.replay(device or "nvidia_h200", seeds, write, console, plain=plain),
        as_json or context.obj.json,
    )


@app.command(rich_help_panel=SHARE)
def submit(  # noqa: PLR0913 - one parameter an option
    context: typer.Context,
    gpu: Annotated[
        str | None, typer.Option(help="Whose record: auto (the first GPU here), an index, or part of a record's name.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=folder, metavar="DIRECTORY", help="The folder of the record. [default: the package's]"),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(parser=named, metavar="PATH", help="The folder for the archive. [default: contributions]"),
    ] = None,
    kernels: Annotated[int, typer.Option(min=0, help="Compile the kernels of at most so many rows.")] = 24,
    as_json: Json = False,
) -> None:
    """Make a contribution of what was measured on this GPU: an archive, and the text of a pull request."""
    given = context.obj
    gpu, out = _either("--gpu", given.device, gpu) or "auto", _either("--out", given.out, out)
    run(
        "submit",
        lambda commands: commands.submit(gpu, out, to, kernels, console),
        as_json or context.obj.json,
    )


@app.command(rich_help_panel=SHARE, epilog=_in_front("carry"))
def carry(
    context: typer.Context,
    revision: Annotated[str, typer.Argument(help="The commit or tag that the rows were measured at.")],
    device: Annotated[str, typer.Option(help="Whose record.")] = "nvidia_h200",
    as_json: Json = False,
) -> None:
    """Keep rows whose kernels changed in text and not in machine code: both are compiled and compared; needs no GPU."""
    _refuse_empty("--device", device)
    run(
        "carry",
        lambda commands: commands.carry(revision, device, context.obj.out, console),
        as_json or context.obj.json,
    )


@app.command(rich_help_panel=SHARE)
def check_submission(
    context: typer.Context,
    archive: Annotated[Path, typer.Argument(help="What submit wrote.")],
    to: Annotated[
        Path | None,
        typer.Option(
            parser=named, metavar="PATH", help="If it is accepted, put its record into this folder, for TUNED_TABLES."
        ),
    ] = None,
    kernels: Annotated[int, typer.Option(min=0, help="Compile the kernels of at most so many rows.")] = 24,
    as_json: Json = False,
) -> None:
    """Judge a contribution without its GPU: digests, sizes, rules, times, kernels; exit 1 if it is not accepted."""
    run(
        "check-submission",
        lambda commands: commands.check_submission(archive, to, kernels, console),
        as_json or context.obj.json,
    )


@app.command(rich_help_panel=STUDY)
def cards(  # noqa: PLR0913 - one parameter an option
    context: typer.Context,
    names: Annotated[
        str | None,
        typer.Argument(help="Cards, or parts of their names, with commas between. [default: those without a table]"),
    ] = None,
    shapes: Annotated[int, typer.Option(min=1, help="Shapes a card, of all families in turn.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the shapes.")] = 0,
    kernels: Annotated[
        int | None, typer.Option(min=0, help="At most so many kernels a card are compiled. [default: all]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what calls would get on cards that nobody measured, and see that it compiles and fits; needs no GPU."""
    run("cards", lambda commands: commands.cards(names, shapes, seed, kernels, console), as_json or context.obj.json)


@app.command(rich_help_panel=STUDY)
def landscape(
    context: typer.Context,
    problems: Annotated[str, typer.Argument(help="Names or patterns, with commas between.")],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=named,
            metavar="PATH",
            help="The folder of the landscapes. [default: that of those that ship with the source]",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU to measure on: auto (the first), an index, or part of a name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure EVERY legal variant of PROBLEMS on this GPU, for replay, regret and the estimate: about 15 s each."""
    gpu = _either("--gpu", context.obj.device, gpu) or "auto"
    run(
        "landscape",
        lambda commands: commands.landscape(problems, gpu, out, console),
        as_json or context.obj.json,
    )


@app.command(rich_help_panel=STUDY)
def model(  # noqa: PLR0913 - one parameter an option
    context: typer.Context,
    family: Annotated[str | None, typer.Option(help="The kernel family. [default: the first that has a model]")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to time PyTorch's own on random shapes.")] = 25.0,
    seed: Annotated[int, typer.Option(help="Of the shapes.")] = 7,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU to measure on: auto (the first), an index, or part of a name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit the model that picks for shapes without a row; on a GPU, to what was tuned there and PyTorch's own times."""
    gpu = _either("--gpu", context.obj.device, gpu) or "auto"
    _refuse_empty("--family", family)
    if not math.isfinite(seconds):  # no end, or, where Typer takes nan, no time of PyTorch's own
        raise typer.BadParameter(f"--seconds must be a number from 1 on, got {seconds}")
    run(
        "model",
        lambda commands: commands.model(family, gpu, seconds, seed, console),
        as_json or context.obj.json,
    )


@app.command(
    rich_help_panel="Tune",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def tune(context: typer.Context) -> None:
    """Tune, as without a command; options go after ``tune``."""
    given = [] if context.parent is None else _given(context.parent)
    if given:
        raise typer.BadParameter(f"{given[0]} must stand behind tune: {NAME} tune --help")
    app(context.args, prog_name=f"{NAME} tune")


def _begin(*, on_all_gpus: bool) -> None:
    """Start the fork server and Ray now: they take seconds, beside the imports of this process, which take as long."""
    from .processes.forkserver import fork_server  # noqa: PLC0415

    with contextlib.suppress(OSError):  # the command meets the same error again, and says what cannot be written
        fork_server()  # compilers and workers are forked from it
    if on_all_gpus and importlib.util.find_spec("ray") is not None:
        threading.Thread(target=_import_commands).start()
        from .searching.connection import start_ahead  # noqa: PLC0415

        start_ahead()


def _import_commands() -> None:
    with contextlib.suppress(Exception):  # the command meets the same error again
        importlib.import_module(".commands", __package__)


_started = False  # True if this process runs the program, and so tunes once


def program() -> None:
    """Run the command of this process."""
    global _started  # noqa: PLW0603 - of the process
    if sys.stdout is None:  # closed by who started it
        if sys.stderr is not None:
            errors.print(f"{NAME}: stdout cannot be written: it is closed", style="red", markup=False, highlight=False)
        sys.exit(1)
    _started = True
    os.environ.pop("TRITON_INTERPRET", None)  # the processes that compile and measure inherit this environment
    try:
        app(prog_name=NAME)
    except OSError as full:  # of --help, which Typer prints: a command tells its own errors
        if full.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _stdout_is_full(full)
        sys.exit(1)
