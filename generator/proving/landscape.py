"""Landscapes: the time of every legal variant of a problem, measured once, so that searches can be replayed anywhere."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.keeping.disk import write_whole
from generator.keeping.failures import LOADED, LOST_WORKER, times_to_be_a_fact
from generator.problem import Problem
from generator.processes.compiler import compile_variant, hopeless
from generator.processes.compiler import compiled as result_of
from generator.processes.worker import TrialFailedError, WorkerLostError
from generator.rendering.structures import structures
from generator.searching.pool import legal_pool
from tuned.families.choices import choices, undeclared
from tuned.families.registry import FAMILIES

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterable, Iterator

    from generator.processes.worker import Worker

SCHEMA = 1
FOLDER = Path(__file__).parent.parent / "landscapes"
AHEAD = 96  # variants compiled before they are measured: the pool of processes never waits
AGAIN = 16  # the best by a first timing are timed again together: the least of a thousand noisy times is too low


class LandscapeError(ValueError):
    """A file is no landscape that this version reads; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Landscape:
    """What was measured of one problem: microseconds, or why not, of every legal variant."""

    problem: Problem
    environment: dict[str, Any]
    digests: dict[str, str]  # kernel -> digest of the text that was measured
    copy_us: float
    floor_us: float
    times: dict[Any, float]
    failed: dict[Any, str]
    registers: dict[Any, int]

    @property
    def best_us(self) -> float:
        """The least time of all variants."""
        return min(self.times.values())

    def regret(self, variant: Any) -> float:
        """How much slower than the best a variant is, as a fraction; infinite where it failed or is unknown."""
        return self.times.get(variant, math.inf) / self.best_us - 1

    @property
    def fresh(self) -> bool:
        """The templates still give the texts that were measured."""
        known = structures()
        return all(name in known and known[name].digest == digest for name, digest in self.digests.items())


def record(  # noqa: PLR0913 - the parts are independent of each other
    problem: Problem,
    worker: Worker,
    compiler: concurrent.futures.Executor,
    environment: dict[str, Any],
    *,
    deadline: float = math.inf,
    report: Callable[[int, int], None] = lambda _done, _total: None,
) -> Landscape | None:
    """Measure every legal variant of a problem; None if ``deadline`` (time.monotonic) came first."""
    family = FAMILIES[problem.family]
    variants = legal_pool(problem, environment["capability"], environment["multiprocessors"]).variants
    architecture = f"sm_{environment['capability']}"
    baselines = worker.stage(problem)
    times: dict[Any, float] = {}
    failed: dict[Any, str] = {}
    registers: dict[Any, int] = {}
    names: set[str] = set()
    waiting: collections.deque[tuple[Any, Any]] = collections.deque()
    following = iter(variants)

    def submit() -> None:
        variant = next(following, None)
        if variant is not None:
            waiting.append((variant, compiler.submit(compile_variant, problem, variant, architecture)))

    for _ in range(AHEAD):
        submit()

    def attempt(variant: Any, future: Any) -> None:
        needs = result_of(future)
        names.update(family.kernel_names(problem.spec, variant))
        if not isinstance(needs, str):
            registers[variant] = max((need.registers for need in needs), default=0)
        reason = hopeless(needs, environment["capability"])
        if reason is None:
            try:
                times[variant] = worker.measure(variant).timing.median_us
            except TrialFailedError as error:
                reason = str(error)
            except WorkerLostError as error:
                reason = f"{LOST_WORKER}{error}"
                worker.start()
                worker.stage(problem)
        failed.pop(variant, None)
        if reason is not None:
            failed[variant] = reason
        report(len(times) + len(failed), len(variants))

    while waiting:
        if time.monotonic() > deadline:
            return None
        variant, future = waiting.popleft()
        submit()
        attempt(variant, future)
    for tries in range(1, LOADED):  # what may have failed by a busy machine: generator.keeping.failures
        for variant in [v for v, why in failed.items() if tries < times_to_be_a_fact(why)]:
            if time.monotonic() > deadline:
                return None
            attempt(variant, compiler.submit(compile_variant, problem, variant, architecture))
    best = sorted(times, key=times.__getitem__)[:AGAIN]
    times |= {v: t.median_us for v, t in zip(best, worker.compare(best), strict=True)}
    digests = {name: structures()[name].digest for name in sorted(names)}
    return Landscape(problem, environment, digests, baselines.copy_us, baselines.floor_us, times, failed, registers)


def save(landscape: Landscape, folder: Path) -> Path:
    """Write a landscape; the same landscape, the same bytes."""
    problem = landscape.problem
    declared = choices(FAMILIES[problem.family].variant_type)
    content = {
        "format": "tuned-landscape",
        "schema": SCHEMA,
        "name": problem.name,
        "family": problem.family,
        "spec": dataclasses.asdict(problem.spec),
        "size": dataclasses.asdict(problem.size),
        "environment": landscape.environment,
        "digests": landscape.digests,
        "copy_us": landscape.copy_us,
        "floor_us": landscape.floor_us,
        "knobs": declared,
        # variant number in the product of the knobs -> microseconds
        "times": {_number(v, declared): round(t, 4) for v, t in landscape.times.items()},
        "failed": {_number(v, declared): reason for v, reason in landscape.failed.items()},
        "registers": {_number(v, declared): n for v, n in landscape.registers.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{problem.name}.json.gz"
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    write_whole(path, gzip.compress(text.encode(), mtime=0))
    return path


def load(path: Path) -> Landscape:
    """Read a landscape; variants that the space no longer has are left out.

    Raises:
        LandscapeError: the file is none, or of another version.
    """
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise LandscapeError(f"{path.name} cannot be read as gzipped JSON: {error}") from error
    if content.get("format") != "tuned-landscape" or content.get("schema") != SCHEMA:
        raise LandscapeError(
            f"{path.name} is no landscape of schema {SCHEMA}: record it again, python tune.py landscape"
        )
    family = FAMILIES[content["family"]]
    spec, size = family.spec_type(**content["spec"]), family.size_type(**content["size"])
    problem = Problem(content["name"], content["family"], spec, size)

    # A variant's number counts in the order of declaration; the keys of the file are sorted.
    knobs = content["knobs"]
    if set(knobs) == set(choices(family.variant_type)):
        knobs = {name: knobs[name] for name in choices(family.variant_type)}

    def named(numbers: dict[str, Any]) -> dict[Any, Any]:
        rows = ((_variant(int(n), knobs, family.variant_type), value) for n, value in numbers.items())
        return {variant: value for variant, value in rows if variant is not None}

    return Landscape(
        problem,
        content["environment"],
        content["digests"],
        content["copy_us"],
        content["floor_us"],
        named(content["times"]),
        named(content["failed"]),
        named(content["registers"]),
    )


def load_landscapes(device: str, folder: Path = FOLDER) -> list[Landscape]:
    """The landscapes of a device, by name of the problem."""
    return [load(path) for path in sorted((folder / device).glob("*.json.gz"))]


def _number(variant: Any, declared: dict[str, Any]) -> int:
    number = 0
    for name, values in declared.items():
        number = number * len(values) + list(values).index(getattr(variant, name))
    return number


def _variant(number: int, declared: dict[str, Any], kind: Any) -> Any:
    picked: dict[str, Any] = {}
    for name, values in reversed(declared.items()):
        number, index = divmod(number, len(values))
        picked[name] = values[index]
    if set(picked) != set(choices(kind)):
        return None
    variant = kind(**picked)
    return None if undeclared(variant) else variant


def record_all(  # noqa: PLR0913 - the parts are independent of each other
    problems: Iterable[Problem],
    worker: Worker,
    compiler: concurrent.futures.Executor,
    environment: dict[str, Any],
    folder: Path,
    *,
    deadline: float = math.inf,
) -> Iterator[tuple[Problem, Path | None, float]]:
    """Record and save landscapes, one after the other; yields (problem, file or None when out of time, seconds)."""
    for problem in problems:
        start = time.monotonic()
        landscape = record(problem, worker, compiler, environment, deadline=deadline)
        path = None if landscape is None else save(landscape, folder / environment["device"])
        yield problem, path, time.monotonic() - start
