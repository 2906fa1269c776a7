"""Ray, and the processes that tune on its GPUs. Nothing here imports torch, which takes seconds: Ray starts beside it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from ..failures import TuningError
from ..places import INSTALLED, PACKAGE, ROOT
from ..processes.forkserver import fork_server
from .remote import RemoteTuner

REACH_SECONDS = 10.0  # for the head of a cluster to answer
# Options of a Ray that is started on this host. The memory is the least that Ray takes: nothing large is sent.
HERE = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
LEFT_OUT = (".git", "benchmarks/results", "docs")  # folders of the checkout that the hosts of a cluster are not sent


class Tuners:
    """The actors that tune, one a GPU."""

    def __init__(self, begin: Callable[[], object] = fork_server) -> None:
        """``begin`` is the first that an actor's process calls: see ``RemoteTuner``."""
        self._begin = begin
        self._made: list[Any] = []

    def make(self, count: int) -> None:
        """Make so many actors before they are asked for."""
        self._made += [self._new() for _ in range(count)]

    def one(self) -> Any:
        """An actor that was not given out yet."""
        return self._made.pop() if self._made else self._new()

    def _new(self) -> Any:
        return ray.remote(RemoteTuner).options(num_gpus=1).remote(self._begin)


def _tuners_of_this_host() -> Tuners:
    """Actors that fork their compilers and workers from this process's fork server, which has imported everything by then."""
    server = fork_server()
    server.prepare()
    return Tuners(functools.partial(fork_server, server.address))


def sent() -> dict[str, Any]:
    """What the hosts of a cluster are sent, since each runs this host's texts: the checkout, or the installed package."""
    if INSTALLED:
        return {"py_modules": [str(PACKAGE)]}
    return {"working_dir": str(ROOT), "excludes": list(LEFT_OUT)}


# (number of GPUs, their tuners) of a Ray that was started before torch was imported.
_ahead: list[tuple[int, Tuners]] = []


def start_ahead() -> None:
    """Start Ray, and a tuner on each GPU, if this host seems to have several GPUs; ``connected`` takes them over."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = visible.split(",") if visible else list(Path("/dev").glob("nvidia[0-9]*"))
    if len(seen) <= 1:
        return
    with contextlib.suppress(TuningError, OSError):  # the command will meet the same error, and report it
        _init("on this host", "local", **HERE)
        count = int(ray.cluster_resources().get("GPU", 0))
        tuners = _tuners_of_this_host()
        tuners.make(count)
        _ahead.append((count, tuners))


@contextlib.contextmanager
def connected(address: str | None, gpus: list[int]) -> Iterator[Tuners]:
    """Connect to Ray for the length of a block: to the cluster at an address, or to a new one on these GPUs of this host.

    Raises:
        TuningError: there is no such cluster, or it is of another version.
    """
    count, tuners = _ahead.pop() if _ahead else (0, Tuners())
    try:
        if address is not None:
            _reach(address)
            _init(f"at {address}", address, runtime_env=sent())
        elif count != len(gpus):
            ray.shutdown()  # the Ray that was started ahead has other GPUs
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else [str(i) for i in range(max(gpus) + 1)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in gpus)  # Ray gives these to its tuners
            _init("on this host", "local", num_gpus=len(gpus), **HERE)
            tuners = _tuners_of_this_host()
        yield tuners
    finally:
        ray.shutdown()


def _init(where: str, address: str, **options: Any) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Else Ray starts a process for each core ahead, which tuners do not need: 2 s of 12.
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else the measuring process yields to others on the host
    ray._private.worker.print_to_stdstream = lambda *_, **__: None  # noqa: SLF001 - a raylet's log, which Ray prints when a node dies
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise TuningError(
            f"no Ray {where} can be used: {' '.join(str(error).split())}. Start one with ray start --head, and see with ray "
            "status that it has GPUs; --ray takes auto or the HOST:PORT that ray start printed"
        ) from error


def _reach(address: str) -> None:
    """Check that an address has the form HOST:PORT and that something answers there: Ray would try for minutes, silently.

    Raises:
        TuningError: it has another form, or nothing answers.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise TuningError(f"--ray takes auto or the HOST:PORT that ray start --head printed, got {address!r}")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise TuningError(
            f"nothing answers at {address} ({error}): start a cluster with ray start --head, and let this host reach that port"
        ) from error
