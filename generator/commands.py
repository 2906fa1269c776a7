"""The commands of tune.py, a function each, which returns the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.text import Text

from tuned.families.outside import FamilyError
from tuned.lookup import place
from tuned.lookup.record import RecordError, Winner, device_slug

from . import gpu
from .answer import plain, put
from .disk import around, folder_lock, gpu_identity, gpu_lock, naming, put_between, write_whole
from .estimating.targets import UnknownTargetError, target_named
from .evaluation.portfolio import candidates
from .failures import INTERRUPTED, TuningError
from .figures import steps
from .places import CONTRIBUTIONS, FAMILY, HOME, LANDSCAPES, OUTSIDE, OWN, PROGRAM, ROOT, TUNE, tune_into
from .problem import Problem, SelectionError
from .processes.compiler import CompilerPool
from .processes.worker import Worker
from .publishing.archive import ArchiveError
from .publishing.files import render_all, write_table
from .rendering.structures import digests_of
from .reporting.progress import bar
from .reporting.report import Funnel, funnel_of, knobs, percent_of_floor, problem_lines, stages_table, winners_table
from .searching.pool import legal_pool, same_problem
from .searching.run import Display, Orders, Run, Tools, trouble, tune_all
from .searching.search import TRIALS, Outcome
from .searching.search import planned as to_measure
from .selection import select
from .storage.backends import EXTRA, journal_path, opened_storage
from .storage.journal import Journal
from .storage.landscape import LandscapeError
from .storage.record import WINNERS, named, read_record, record_path, recorded_devices, save_winners, write_record
from .storage.samples import SamplesError
from .workload import WORKLOADS, default_problems, default_variant

DEFAULT_TARGET = "nvidia_h200"
STYLES = {"hard": "red", "unverified": "yellow", "soft": "yellow", "note": "dim"}  # of what --check finds


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of tune.py."""

    gpu: str = "auto"
    target: str | None = None
    family: str | None = None
    problems: str | None = None
    trials: int | None = None
    budget_s: float = math.inf
    out: Path | None = None
    gpus: str | None = None
    ray: str | None = None  # the address of a cluster
    storage: str | None = None
    quick: bool = False  # measure the portfolio only


def tune(options: Options, console: Console) -> int:
    """Tune on the GPU of this machine; without a GPU, or for a named target, compile, check and estimate."""
    problems = select(options.family, options.problems, folder=options.out)
    if not problems:  # a file without lines: there is nothing to compile, measure or estimate
        put(problems=[])
        say(console, f"nothing to tune: {options.problems} names no problem")
        return 0
    if options.target is not None:
        return estimate(options, options.target, console)
    indices: list[int] = []
    if options.ray is None:
        facts = gpu.gather()
        answer = gpu.diagnose(facts)
        if answer.kind != "ready":
            if asked := _asked_of_a_gpu(options):
                reason = answer.message.partition(" Run the same command")[0].rstrip(".")
                raise NoGpuError(
                    f"{asked} asks for a GPU, and there is none to tune on: {reason}. Run the same command where there is "
                    "one, or leave this option out for what is true without: compiling, checking and estimating"
                )
            say(console, answer.message, style="yellow")
            return estimate(options, DEFAULT_TARGET, console)
        indices = (
            gpu.choose_gpus(facts.names, options.gpus)
            if options.gpus is not None
            else [gpu.choose_gpu(facts.names, options.gpu)]
        )
    end = time.monotonic() + options.budget_s
    orders = Orders(problems, options.trials or TRIALS, end, options.out, candidates if options.quick else None)
    shipped = options.out is None or options.out.resolve() == WINNERS.resolve()
    if (
        shipped and not OWN
    ):  # models import tables generated from the package's record; a user's own records are read directly
        orders = dataclasses.replace(orders, write_table=write_table, render=render_all)
    if options.storage is not None:
        with opened_storage(options.storage, ""):  # an unreachable database is reported before a GPU is woken
            pass
    start = time.monotonic()
    run = Run(problems)
    with bar(console, len(problems), options.budget_s) as report:
        display = _display(orders, report, console)
        try:
            if len(indices) == 1:
                _measure(run, orders, indices[0], options.storage, display)
            else:
                _measure_on_many(run, orders, indices, options, display)
        except KeyboardInterrupt:  # before the first problem
            run.interrupted = True
    return _tell(run, options, time.monotonic() - start, console)


class NoGpuError(Exception):
    """A GPU was asked for, and there is none; the message says why."""


def _asked_of_a_gpu(options: Options) -> str:
    """The given option that needs a GPU; empty if none was given."""
    if options.gpu != "auto":
        return f"--gpu {options.gpu}"
    if options.gpus is not None:
        return f"--gpus {options.gpus}"
    return "--storage" if options.storage is not None else ""  # without its value, which may hold a password


def refusal(error: BaseException) -> tuple[str, int] | None:
    """The sentence and the exit code for an error that ends a command; None if the error is a defect of this program."""
    if isinstance(
        error, SelectionError | FamilyError | gpu.NoSuchGpuError | UnknownTargetError
    ):  # the user asked for something that does not exist
        return str(error), 2
    if isinstance(error, RecordError | ArchiveError | LandscapeError | SamplesError | NoGpuError):
        return str(error), 1
    if isinstance(
        error, KeyboardInterrupt
    ):  # a tuning run handles Ctrl-C itself; no other command leaves anything half done
        return "interrupted", INTERRUPTED
    if isinstance(error, jinja2.TemplateError):  # in a family from outside: the templates of this tree are tested
        where = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return f"a template is none{where}: {type(error).__name__}: {error}", 2
    said = trouble(error)
    return None if said is None else (said, 1)


@contextlib.contextmanager
def on_gpu(
    index: int, compilers: int | None, waiting: Callable[[str], None]
) -> Iterator[tuple[Worker, CompilerPool, dict[str, Any]]]:
    """A worker on a GPU, compilers beside it (one a core), and the worker's environment; the block's end stops both.

    ``waiting`` is told which other process measures on that GPU.
    """
    with gpu_lock(gpu_identity(index), waiting):
        worker = Worker(index)
        compiler = CompilerPool(compilers)
        try:
            worker.start()
            yield worker, compiler, worker.environment()
        finally:
            worker.stop()
            compiler.shutdown(wait=False, cancel_futures=True)


def _measure(run: Run, orders: Orders, index: int, storage: str | None, display: Display) -> None:
    """On one GPU, from this process."""
    with (
        on_gpu(index, None, display.say) as (worker, compiler, environment),
        opened_storage(storage, environment["device"]) as opened,
    ):
        display.started("", environment, os.cpu_count() or 1)
        tune_all(run, Tools(worker, compiler, Journal(opened), environment), orders, display)


def _measure_on_many(run: Run, orders: Orders, indices: list[int], options: Options, display: Display) -> None:
    """On several GPUs of this host, or on those of a cluster, through Ray."""
    if importlib.util.find_spec("ray") is None:
        raise TuningError(f"several GPUs (--gpus) and clusters (--ray) need Ray: {EXTRA}")
    from .searching.cluster import Driver  # noqa: PLC0415 - one GPU needs no Ray
    from .searching.connection import connected  # noqa: PLC0415

    with connected(options.ray, indices) as tuners:
        Driver(run, orders, on_gpu, options.storage, display, tuners).tune()


def _display(orders: Orders, report: Callable[..., None], console: Console) -> Display:
    def started(gpu_name: str, environment: dict[str, Any], compilers: int) -> None:
        put(environment=environment)
        say(
            console,
            f"{gpu_name}{gpu_name and ': '}{environment['device_name']} (sm_{environment['capability']}), driver "
            f"{environment['driver']}, torch {environment['torch']}, Triton {environment['triton']}: "
            f"{len(orders.problems)} problems, {compilers} processes to compile with",
        )

    return Display(started, report, lambda p, found: say(console, _line(p, found)), lambda text: say(console, text))


def _line(problem: Problem, result: Outcome | str) -> str:
    if isinstance(result, str):
        return f"{problem.name}: skipped: {result}"
    winner = result.winner
    failed = f", {len(result.failed)} failed" if result.failed else ""
    if result.passing:
        failed += f", {result.passing} of them to be tried again by the next run"
    return (
        f"{problem.name}: {winner.median_us:.2f} us, {percent_of_floor(winner):.1f}% of the floor, "
        f"{result.measured} of {result.pool} measured ({result.remembered} before{failed}): {knobs(winner.variant, default_variant(problem))}"
    )


def _tell(run: Run, options: Options, elapsed_s: float, console: Console) -> int:
    put(
        problems=[p.name for p in run.problems],
        winners=run.winners,
        skipped=run.skipped,
        record=run.record,
        interrupted=run.interrupted,
        elapsed_s=round(elapsed_s, 3),
    )
    if run.winners:
        console.print(winners_table(run.winners, f"Measured in {elapsed_s / 60:.1f} minutes"))
    if run.outcomes:
        console.print(stages_table(run.stopwatch.seconds, elapsed_s, run.gpus, run.stopwatch.busy_share()))
        say(console, str(sum(map(funnel_of, run.outcomes.values()), Funnel())))
    say(console, *(f"skipped {name}: {reason}" for name, reason in run.skipped.items()), style="yellow")
    if run.record is not None:
        if options.out is None and OUTSIDE:
            say(console, f"its calls use it: {HOME / 'tables' / run.record.stem}.py")
            say(console, f"the record: {run.record}")
        elif options.out is None and OWN:
            say(console, "models find it: tuned.dispatch reads it before what ships")
            say(console, f"the record: {run.record}")
        elif options.out is None:
            say(console, f"models import it: tuned.dispatch, through tuned/tables/{run.record.stem}.py")
            say(console, f"the record: {run.record.relative_to(ROOT)}")
        else:
            say(console, f"models use it with TUNED_TABLES={options.out}")
            say(console, f"the record: {run.record}")
    if run.interrupted:
        say(
            console,
            f"Interrupted. {len(run.winners)} of {len(run.problems)} problems are done and every trial is kept: "
            "the same command goes on from here.",
        )
        return INTERRUPTED
    return 0 if run.winners or not run.problems else 1


def say(console: Console, *lines: str, style: str = "") -> None:
    """Print lines as they are, without markup or wrapping; on a terminal, in a style."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def render(console: Console) -> int:
    """Write every generated file again."""
    if OWN:
        raise SelectionError("--render writes what a checkout generates: what is installed is as it was built")
    written, deleted = render_all()
    put(written=written, deleted=deleted)
    say(
        console,
        *(f"wrote {HOME.name}/{name}" for name in written),
        *(f"deleted {HOME.name}/{name}" for name in deleted),
        f"{len(written)} written, {len(deleted)} deleted; every other generated file is as it should be",
    )
    return 0


def new_family(name: str, folder: Path, console: Console) -> int:
    """Write the files of a family of a user's own."""
    from .scaffold.write import write_family  # noqa: PLC0415

    written = list(write_family(name, folder))
    put(written=written)
    say(console, *(f"wrote {path}" for path in written), style="green")
    say(console, f"next: {place.TUNE} --family {shlex.quote(f'{folder / name}.py')} --gpu auto")
    return 0


def list_problems(options: Options, console: Console) -> int:
    """List the problems, with their measured times in the target's record."""
    device = _meant(options.target, options.out) or DEFAULT_TARGET
    winners = read_record(device, options.out)
    problems = select(options.family, options.problems, folder=options.out)
    times = {(w.family, w.spec, w.size): w.median_us for w in winners}
    put(
        device=device,
        problems=[{**plain(p), "median_us": times.get((p.family, p.spec, p.size))} for p in problems],
    )
    for index, line in enumerate(problem_lines(problems, winners, device)):
        shown = Text(line, style="bold" if not index else "")
        if console.is_terminal:  # a pipe gets all of it
            shown.truncate(console.width, overflow="ellipsis")
        console.print(shown, soft_wrap=True)
    return 0


def _meant(target: str | None, folder: Path | None) -> str | None:
    """The device that --target means: one with a record, by a part of its name, or a known card; None without --target.

    Raises:
        UnknownTargetError: it is neither.
    """
    if target is None:
        return None
    found = named(target, recorded_devices(folder))
    return found[0] if len(found) == 1 else target_named(target).device


def dry_run(options: Options, console: Console, *, details: bool = False) -> int:
    """Show how many variants there are to try, and which rules leave out the others; nothing is compiled.

    A few problems are listed one by one. More are counted by family, unless ``details`` is set.
    """
    from .reporting import planned  # noqa: PLC0415

    target = target_named(options.target or DEFAULT_TARGET)
    problems = select(options.family, options.problems, folder=options.out)
    plans = []
    with steps(console, "counting variants", len(problems)) as step:
        for problem in problems:
            pool = legal_pool(problem, target.capability, target.processors)
            measured = to_measure(options.trials or TRIALS, len(pool.variants))
            plans.append(planned.Plan(problem, pool, measured))
            step()
    put(target=target.device, problems=[planned.facts(plan) for plan in plans])
    if details or len(plans) <= planned.FEW:
        say(console, *(line for plan in plans for line in planned.lines(plan, details=details)))
    else:
        console.print(planned.table(plans, target.device))
        say(console, *planned.reasons(plans))
        say(console, "--details tells of every problem, --problems NAMES of some, --json to a program")
    return 0


def check(options: Options, console: Console, *, release: bool = False) -> int:
    """List what is out of date: exit code 1 if a row does not count or a file differs, 0 if the rest is only worth doing.

    ``release``: exit code 1 also if the sources were not verified on their GPU.
    """
    from .publishing.audit import KINDS, findings  # noqa: PLC0415

    problems = select(options.family, options.problems, folder=options.out)
    device = _meant(options.target, options.out)
    found = sorted(findings(problems, device, options.out), key=lambda f: KINDS.index(f.kind))
    to_do = ("hard", "unverified") if release else ("hard",)
    hard = sum(f.kind in to_do for f in found)
    soft = sum(f.kind != "note" for f in found) - hard
    put(findings=found, to_do=hard, worth_doing=soft)
    for finding in found:
        say(console, finding.text, style=STYLES[finding.kind])
    if hard or soft:
        say(console, f"{hard} to do, {soft} worth doing", style="bold")
    else:
        say(console, "every row and every generated file is up to date", style="green")
    return 1 if hard else 0


def regret(device: str, folder: Path | None, console: Console) -> int:
    """Tell the regret of each rule that picks variants for untuned problems; exit code 1 if the bars are not met."""
    from .evaluation import portfolio  # noqa: PLC0415
    from .evaluation import regret as rules  # noqa: PLC0415
    from .storage import landscape  # noqa: PLC0415

    measured = landscape.load_landscapes(device)
    if not measured:
        there = ", ".join(sorted(p.name for p in LANDSCAPES.glob("*") if p.is_dir())) or "none"
        raise SelectionError(f"no landscape of {device}: measured whole are {there}")
    by_problem = rules.scores(measured)
    if not by_problem:
        raise SelectionError(
            f"regret leaves each problem of a family out in turn, and no family has two landscapes of {device}: "
            f"{PROGRAM} landscape PROBLEMS records more on it"
        )
    console.print(rules.regret_table(by_problem, f"{len(measured)} problems of {device}, each left out in turn"))
    by_shape = rules.scores(measured, rules.same_shape)
    console.print(rules.regret_table(by_shape, "The same, with every layout and direction of its shape left out"))
    served = next(s for s in by_problem if s.rule == rules.SERVED)
    winners = read_record(device, folder)
    rows = (
        (lambda *_: False, "the record's rows, as they are"),
        (same_problem, "the record's rows without the problem's own"),
        (rules.same_shape, "the record's rows without all of its shape"),
    )
    for left_out, what in rows:
        if score := rules.from_record(measured, winners, left_out):
            say(console, f"{what}: {score.text}")
    say(
        console,
        f"best of a portfolio that was chosen without the problem (--quick): {portfolio.left_out(measured).text}",
    )
    good = rules.best_rule(by_problem).rule == rules.SERVED
    met = served.median <= rules.MEDIAN and served.worst[0] <= rules.WORST
    put(device=device, problem_left_out=by_problem, shape_left_out=by_shape, serves=rules.SERVED, bars_met=met)
    say(
        console,
        f"bars: median {100 * rules.MEDIAN:g} %, worst {100 * rules.WORST:g} %: {'met' if met else 'not met'}; "
        f"the rule that serves is {'the best' if good else 'not the best'} of them",
    )
    return 0 if met and good else 1


def estimate(options: Options, target: str, console: Console) -> int:
    """Compile, check and estimate without the device; exit code 0 unless a result in the interpreter was wrong."""
    from .estimating.offline import SAMPLE  # noqa: PLC0415
    from .reporting.estimates import run_offline, style_of  # noqa: PLC0415

    problems = select(options.family, options.problems, representative=True, folder=options.out)
    with steps(console, "compiling and estimating", len(problems)) as step:
        right = run_offline(
            problems,
            target_named(target),
            options.trials or SAMPLE,
            options.out,
            options.budget_s,
            lambda text: say(console, text, style=style_of(text)),
            step,
        )
    return 0 if right else 1


def show(  # noqa: PLR0913 - what is shown, and where to
    name: str, device: str | None, folder: Path | None, path: Path | None, console: Console, *, as_json: bool = False
) -> int:
    """Write the winner of a problem as one file, to ``path`` or to stdout."""
    from .reporting.show import standalone, winner_of  # noqa: PLC0415

    winner = winner_of(name, device, folder)
    text = standalone(winner)
    put(problem=winner.name, device=winner.environment["device"], path=path, source=text)
    if path is not None:
        write(path, text)
        say(console, f"wrote {path}", style="green")
    elif not as_json:
        sys.stdout.write(text)
    return 0


def report(device: str | None, folder: Path | None, storage: str | None, path: Path | None, console: Console) -> int:
    """Write the page of a device: one HTML file that needs no network."""
    from .reporting.html.page import collect, page  # noqa: PLC0415
    from .reporting.show import recorded_device  # noqa: PLC0415

    device = recorded_device(device, folder)
    path = path or Path(f"report-{FAMILY.stem}-{device}.html" if FAMILY else f"report-{device}.html")
    with _journal(device, storage) as journal:
        write(path, page(collect(device, folder, journal)))
    put(device=device, path=path)
    say(console, f"wrote {path}", style="green")
    return 0


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all; a pipe or a device is written directly."""
    if path.is_file() or not path.exists():
        write_whole(path, text.encode())
    else:  # a pipe or a device, such as /dev/stdout
        with naming(path):
            path.write_text(text, encoding="utf-8")


def explain(name: str, device: str | None, folder: Path | None, storage: str | None, console: Console) -> int:
    """Tell what serves a problem on a device, and what each choice of the winner is worth."""
    from .reporting import explain as explaining  # noqa: PLC0415
    from .reporting.show import one_of, recorded_device  # noqa: PLC0415
    from .selection import problem_named  # noqa: PLC0415

    if device is not None:
        device = one_of(device, recorded_devices(folder)) or target_named(device).device
    with contextlib.suppress(RecordError):
        device = device or recorded_device(None, folder)
    device = device or DEFAULT_TARGET
    with _journal(device, storage) as journal:
        say(console, *explaining.explain(problem_named(name, folder), device, folder, journal))
    return 0


@contextlib.contextmanager
def _journal(device: str, storage: str | None) -> Iterator[Journal | None]:
    """The trials of a device, or None if there are none; no empty journal is created."""
    if storage is None and not journal_path(device).exists():
        yield None
        return
    with opened_storage(storage, device, reads=True) as opened:
        yield Journal(opened)


def replay(device: str, seeds: int, write: Path | None, console: Console, *, plain: bool) -> int:
    """Print how well the search and the estimate do on the landscapes of a device."""
    from .estimating import model  # noqa: PLC0415
    from .evaluation import evidence  # noqa: PLC0415 - scipy and Optuna's samplers take seconds to import
    from .storage.landscape import load_landscapes  # noqa: PLC0415

    landscapes = load_landscapes(device)
    if not landscapes:
        raise SelectionError(f"there are no landscapes of {device}: {PROGRAM} landscape PROBLEMS records them on it")
    if write is not None:
        check_marks(write, "replay")
    with console.status("replaying") as status:
        searched = evidence.searches(landscapes, seeds, plain=plain, tell=status.update)
        console.print(evidence.search_table(landscapes, searched))
        put(
            device=device,
            searches={name: {"searches": count, **cells} for name, (count, cells) in searched.items()},
        )
        if write is not None:
            put_between(write, "replay", evidence.search_markdown(searched))
        found = evidence.agreements(landscapes, seeds)
        say(
            console,
            f"two independent tunings of one problem end {100 * statistics.median(found):.2f}% apart in the median, "
            f"{100 * max(found):.2f}% in the worst of {len(found)}",
        )
        guesses = evidence.guesses(landscapes)
        put(two_tunings_apart=found, estimate=guesses)
        if guesses:
            console.print(evidence.guess_table(guesses))
        else:
            needed = f"a landscape of another problem of the family, of {model.DEVICE}"
            say(
                console,
                f"no table of the estimate: the model that makes it must not have seen the problem, and takes {needed}",
            )
    return 0


def check_marks(path: Path, mark: str) -> None:
    """Check that a table can be put into a file, before minutes are spent on the table.

    Raises:
        SelectionError: the file does not have the marks, or is no text.
        OSError: the file cannot be read.
    """
    try:
        with naming(path):
            around(path, mark)
    except ValueError as error:
        raise SelectionError(f"--write {error}") from error


def replay_foreign(folder: Path, seeds: int, write: Path | None, console: Console, *, plain: bool) -> int:
    """Print how well the search does on landscapes of others' kernels, from a folder and the folders in it."""
    from .evaluation import comparing, foreign  # noqa: PLC0415 - as above

    landscapes = foreign.load_folder(folder)
    if write is not None:
        check_marks(write, "foreign")
    with console.status("replaying") as status:
        found = comparing.compare(landscapes, seeds, slow=plain, tell=status.update)
    put(
        landscapes=[one.problem.name for one in landscapes],
        strategies={name: comparing.figures(of, next(iter(found.values()))) for name, of in found.items()},
    )
    console.print(comparing.comparison_table(landscapes, found))
    console.print(comparing.landscape_table(landscapes, found))
    if write is not None:
        put_between(write, "foreign", comparing.comparison_markdown(landscapes, found))
    return 0


def model(family: str | None, gpu_option: str, seconds: float, seed: int, console: Console) -> int:
    """Take samples on this GPU, if there is one; write the models, and tell the regret of their picks."""
    if OWN:
        raise SelectionError("model writes what a checkout generates: what is installed is as it was built")
    from .evaluation import fitting  # noqa: PLC0415
    from .measuring.replaced import replaced  # noqa: PLC0415
    from .storage import samples  # noqa: PLC0415

    modelled = [name for name, work in WORKLOADS.items() if work.family.model is not None]
    family = family or next(iter(modelled), None)
    if family not in modelled:
        there = ", ".join(modelled) or f"none of {', '.join(WORKLOADS)} has one"
        raise SelectionError(
            f"--family must be one that has a model ({there}), got {family!r}: tuned/families/gru/model.py is one"
        )
    facts = gpu.gather()
    answer = gpu.diagnose(facts)
    if answer.kind == "ready":
        with on_gpu(gpu.choose_gpu(facts.names, gpu_option), None, lambda text: say(console, text)) as (
            _,
            _,
            environment,
        ):
            times = {}
            with opened_storage(None, environment["device"]) as storage:
                journal = Journal(storage)
                for problem in default_problems(family):
                    known = journal.remembered(problem, environment, functools.partial(digests_of, problem))
                    if right := {v: r[0] for v, r in known.items() if not isinstance(r, str)}:
                        times[problem] = right
            if not times:  # do not overwrite existing samples with none
                say(console, f"the journal has no time of {family} on this GPU: {TUNE} --family {family} first")
                return 1
            found = [samples.Replaced(p.spec, p.size, us, by) for p, us, by in replaced(family, seconds, seed)]
        path = samples.save(samples.Samples(family, environment, times, tuple(found)))
        put(samples=path)
        say(
            console,
            f"{sum(map(len, times.values()))} times of {len(times)} problems, {len(found)} of PyTorch's own: {path}",
        )
    else:
        say(console, f"{answer.message} The models are fitted to the samples that there are.")
    every = samples.load_all()
    for one in every:
        others = [other for other in every if other.family == one.family and other is not one]
        cost = fitting.summary(fitting.regrets(one, fitting.same_part, others))
        put(**{f"{one.family} on {one.environment['device']}, hidden sizes left out": cost})
        say(console, f"{one.family} on {one.environment['device']}: hidden sizes left out cost {cost}")
    render_all()
    return 0


def carry(revision: str, device: str, folder: Path | None, console: Console) -> int:
    """Keep the rows whose kernels changed in text but not in machine code; exit code 1 if others must be measured again."""
    from .publishing import carry as carrying  # noqa: PLC0415

    winners = read_record(device, folder)
    if not winners:
        there = ", ".join(recorded_devices(folder)) or "none"
        raise SelectionError(f"there is no record of {device} (there are: {there}): --device names one of them")
    with console.status("compiling what was measured and what is here"):
        found = carrying.carry(winners, revision)
    if found.kept:
        _put_carried(winners, found.winners, record_path(device, folder))
        if folder is None and not OWN:  # an installed package is not rendered again; a user's record is read directly
            render_all()
    put(device=device, kept=found.kept, changed=found.changed)
    nothing = "" if found.kept or found.changed else ": the kernels of all rows are as they were measured"
    say(console, f"{device}: {len(found.kept)} rows kept, whose machine code is what it was at {revision}{nothing}")
    for name, why in found.changed.items():
        say(console, f"    {name}: {why}")
    return int(bool(found.changed))


def _put_carried(before: Sequence[Winner], after: Sequence[Winner], path: Path) -> None:
    """Put carried rows into a record. Compiling took minutes: a row that a tuner has saved meanwhile stays as it is."""
    with folder_lock(path.parent):
        rows = read_record(path.stem, path.parent)
        for old, new in (pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]):
            rows = [new if row == old else row for row in rows]
        write_record(path, path.stem, rows)


def submit(wanted: str, folder: Path | None, to: Path | None, kernels: int, console: Console) -> int:
    """Make a contribution of the record of a device: an archive, and the text of a pull request beside it."""
    from .publishing import contribution as contributing  # noqa: PLC0415

    if OUTSIDE:
        raise SelectionError("a contribution is of the families that ship: submit without --family")
    device = submitted_device(wanted, folder)
    data, contribution = contributing.made(read_record(device, folder))
    found = _judged(data, kernels)
    put(device=device, accepted=not found.reasons, reasons=found.reasons)
    if found.reasons:
        say(console, *_refused(found.reasons, f"the record of {device}"))
        return 1
    to = CONTRIBUTIONS if to is None else to
    with naming(to):
        to.mkdir(parents=True, exist_ok=True)
    archive, beside = to / f"{contribution.name}.zip", to / f"{contribution.name}.md"
    text = contributing.pull_request(contribution, archive.name)
    write_whole(beside, text.encode())
    try:
        write_whole(archive, data)
    except BaseException:
        beside.unlink()  # it describes an archive that was not written
        raise
    put(archive=archive, text=beside, digest=contribution.digest)
    say(console, text, f"wrote {archive}", f"wrote {beside}: the text above, the title first")
    return 0


def submitted_device(wanted: str, folder: Path | None) -> str:
    """The device whose record is submitted: the first GPU here, a GPU by its index, or a part of a record's name.

    Raises:
        SelectionError: the device has no record, or ``wanted`` means no record or several.
    """
    there = recorded_devices(folder)
    names = gpu.gather().names if wanted == "auto" or wanted.isdecimal() else ()
    if names:
        found = [device_slug(names[gpu.choose_gpu(names, wanted)])]
    elif wanted == "auto":
        found = there if folder is not None and len(there) == 1 else []  # the records that ship were not measured here
    else:
        found = named(wanted, there)
    if len(found) != 1 or found[0] not in there:
        meant = f"the record of {found[0]}" if len(found) == 1 else "one record"
        where = folder or (f"{OWN} and {WINNERS}" if OWN else WINNERS)
        raise SelectionError(
            f"--gpu {wanted} must mean {meant} in {where}, which has {', '.join(there) or 'none'}: name one, or "
            f"run {tune_into('--gpu auto', folder)} first"
        )
    return found[0]


def check_submission(path: Path, to: Path | None, kernels: int, console: Console) -> int:
    """Judge a contribution without its GPU; exit code 1 if it is not accepted. ``to``: write an accepted record there."""
    from .publishing.contribution import read_archive  # noqa: PLC0415

    found = _judged(read_archive(path), kernels)
    put(archive=path, accepted=not found.reasons and found.contribution is not None, reasons=found.reasons)
    if found.reasons or found.contribution is None:
        say(console, *_refused(found.reasons, path.name))
        return 1
    one = found.contribution
    put(
        device=one.device, rows=len(one.winners), kernels=found.kernels, compiled=len(found.compiled), digest=one.digest
    )
    say(
        console,
        f"{path.name} is accepted: {len(one.winners)} rows of {one.environment['device_name']}; digests, sizes, rules of "
        f"{one.card.architecture} with {one.card.processors} multiprocessors and times hold, and {len(found.compiled)} of "
        f"its {found.kernels} kernels were compiled for it, all without an error (--kernels says how many)",
        f"digest {one.digest}",
    )
    if to is not None:
        with naming(to):
            to.mkdir(parents=True, exist_ok=True)
        say(console, f"wrote {save_winners(one.winners, to)}")
    return 0


def _judged(data: bytes, kernels: int) -> Any:
    from .evaluation.cards import COMPILE_SECONDS  # noqa: PLC0415
    from .publishing.contribution import verdict  # noqa: PLC0415

    compiler = CompilerPool(seconds=COMPILE_SECONDS)
    try:
        return verdict(data, compiler, kernels)
    finally:
        compiler.shutdown(wait=False, cancel_futures=True)


REASONS = 20  # at most shown for a contribution that is not accepted


def _refused(reasons: Sequence[str], what: str) -> Iterator[str]:
    yield f"{what} is not accepted:"
    yield from (f"    {reason}" for reason in reasons[:REASONS])
    if len(reasons) > REASONS:
        yield f"    and {len(reasons) - REASONS} more"


def cards(names: str | None, shapes: int, seed: int, kernels: int | None, console: Console) -> int:
    """Tell which variants calls would get on cards that nobody measured; exit code 1 if one does not hold there."""
    from .evaluation import cards as looking  # noqa: PLC0415
    from .reporting.cards import card_lines, card_table  # noqa: PLC0415

    right, found = True, {}
    compiler = CompilerPool(seconds=looking.COMPILE_SECONDS)
    try:
        for target in looking.cards_named(names):
            card = looking.look(target, shapes, seed, compiler, kernels)
            console.print(card_table(card))
            say(console, *card_lines(card), "")
            right = right and not card.wrong
            found[target.device] = {
                "shapes": len(card.asked),
                "rules": Counter(a.choice.rule for a in card.asked),
                "kernels": card.distinct,
                "compiled": len(card.kernels),
                "wrong": card.wrong,
            }
    finally:
        compiler.shutdown(wait=False, cancel_futures=True)
    put(cards=found, shapes=shapes, seed=seed)
    say(
        console,
        f"{shapes} shapes of seed {seed} a card, chosen by its architecture and processors; nothing was measured",
    )
    return 0 if right else 1


def landscape(names: str, gpu_option: str, folder: Path | None, console: Console) -> int:
    """Measure every legal variant of some problems."""
    from .evaluation.recording import record_all  # noqa: PLC0415

    problems = select(None, names)
    facts = gpu.gather()
    answer = gpu.diagnose(facts)
    if answer.kind != "ready":
        reason = answer.message.partition(" Run the same command")[0]
        raise NoGpuError(f"landscape measures, and there is no GPU to measure on: {reason}")
    index = gpu.choose_gpu(facts.names, gpu_option)
    with on_gpu(index, None, lambda text: say(console, text)) as (worker, compiler, environment):
        recorded: dict[str, Path] = {}
        put(landscapes=recorded)
        for problem, path, seconds in record_all(problems, worker, compiler, environment, folder or LANDSCAPES):
            if path is None:
                why = f"{PROGRAM} --problems {problem.name} tells why"
                say(console, f"{problem.name}: no variant of it ran, so no landscape is saved: {why}", style="yellow")
                continue
            recorded[problem.name] = path
            say(console, f"{problem.name}: {seconds:.0f} s, {path}")
    return int(len(recorded) < len(problems))
