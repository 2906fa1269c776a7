"""The wall time of a run, by stages."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

# "stage" puts a problem on the GPU and times the baselines; "compile" is the time spent waiting for compilers; "check"
# and "measure" are parts of a trial; "compare" times the best again; "search" is Optuna's ask and tell, with the
# sampler's model; "journal" keeps trials; "record" saves winners; "render" writes table and kernels.
STAGES = ("stage", "compile", "check", "measure", "compare", "search", "journal", "record", "render")
ON_GPU = ("stage", "check", "measure", "compare")


@dataclasses.dataclass
class Stopwatch:
    """Seconds by stage. One thread at a time; stages do not nest."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _begun: tuple[float, float] | None = None  # when the first trial was measured, and the seconds on the GPU before

    def on_gpu(self) -> float:
        """Seconds in which the GPU was at work."""
        return sum(self.seconds[stage] for stage in ON_GPU)

    def busy_share(self) -> float | None:
        """Share of the time since the first trial in which the GPU was at work; None before it, or for several GPUs."""
        if self._begun is None:
            return None
        at, before = self._begun
        return (self.on_gpu() - before) / max(time.perf_counter() - at, 1e-9)

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage, whether the block raises or not."""
        start = time.perf_counter()
        if stage == "measure" and self._begun is None:
            self._begun = start, self.on_gpu()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds of the stage ``source`` as seconds of ``target``."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def add(self, other: dict[str, float]) -> None:
        """Add the seconds of another stopwatch, for example of another GPU."""
        for stage, seconds in other.items():
            self.seconds[stage] += seconds
