"""Many GPUs through Ray: nodes die, drivers die, Ctrl-C. No measurement is lost, and the record is that of one machine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from generator.places import ROOT
from generator.searching.run import Display, Run
from tests.support.many_gpus import PROBLEMS, Place, everything, one_machine, tools
from tests.support.processes import BACKSTOP_SECONDS, alive, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from generator.searching.cluster import Driver
from generator.searching.connection import Tuners, connected

pytestmark = pytest.mark.processes

# A killed node refuses connections and is missed after a second; a node that is slow to answer is only waited for.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False, "include_log_monitor": False}
NOTHING = Tuners(list)  # how a tuner's process begins: these fork nothing
LAST = 12  # the number of the killed node's last measurement


class Nodes:
    """A Ray cluster on this machine: its head has no GPU, each other node one, and a name in its environment.

    Each node has its own folder in ``root``, as hosts have. In a shared folder nodes would unpack the same files over each
    other, and a tuner that finds half of a file dies or waits for a minute.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**SMALL, "no_monitor": True, "num_gpus": 0, "_system_config": HEALTH}
        )
        self.nodes: dict[str, Any] = {}

    def add(self, *names: str) -> None:
        for name in names:
            own = {"env_vars": {"NODE": name}, "temp_dir": tempfile.mkdtemp(dir=self.root)}
            self.nodes[name] = self.cluster.add_node(**SMALL, **own, num_gpus=1, wait=False)
        self.cluster.wait_for_nodes(BACKSTOP_SECONDS)

    def only(self, *names: str) -> None:
        for name in set(self.nodes) - set(names):
            self.kill(name)
        self.add(*(name for name in names if name not in self.nodes))

    def kill(self, name: str) -> None:
        """End a node with SIGKILL; its workers see that its raylet is gone and end too."""
        node = self.nodes.pop(name)
        self.cluster.worker_nodes.discard(node)
        for kind in node.all_processes.values():
            for process in kind:
                process.process.kill()
                process.process.wait()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # A folder under /tmp: paths of sockets have at most 107 characters.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else tuners on a busy machine would wait for all other processes
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray would count the GPUs that it lists
        made = Nodes(Path(root))
        yield made
        made.cluster.shutdown()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Place]:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    return lambda **nodes: Place(tmp_path, nodes)


def all_is_done(run: Run, place: Place) -> None:
    assert not run.skipped
    assert not run.interrupted
    assert [w.name for w in run.winners] == [p.name for p in PROBLEMS]
    assert run.record == place.folder / "out" / "test_gpu.json"
    assert set(place.measured()) == everything()
    assert place.kept() == len(everything()), "each trial is kept once"
    assert place.record() == one_machine()


def test_a_node_that_is_killed_costs_its_trial_and_one_that_comes_takes_over(nodes: Nodes, place: Any) -> None:
    """Node a waits, b is killed, and c joins later; only then does a go on."""
    three = place(a={"waits_at": 2}, b={"waits_at": LAST, "said": "waits for its GPU"})
    nodes.only("a", "b")
    said: list[str] = []
    started: list[str] = []

    display = Display(say=said.append, started=lambda name, *_: started.append(name))
    run = Run(PROBLEMS)
    with connected(nodes.cluster.address, []), concurrent.futures.ThreadPoolExecutor(1) as pool:
        driver = Driver(run, three.orders(), functools.partial(tools, three), None, display, NOTHING)
        tuning = pool.submit(driver.tune)

        def wait(condition: Callable[[], bool]) -> None:
            wait_for(lambda: condition() or tuning.done())

        wait(lambda: three.by() == {"a": 2, "b": LAST} and three.kept() == 1 + LAST - 1)
        nodes.kill("b")
        nodes.add("c")
        wait(lambda: three.by()["c"] > LAST)
        three.go()
        tuning.result()
    all_is_done(run, three)
    assert sum(three.measured().values()) == len(everything()) + 1, (
        "the trial under way was measured again, nothing else"
    )
    assert set(three.by()) == {"a", "b", "c"}
    assert "waits for its GPU" in said
    (died,) = (s for s in said if "which is tried again" in s)
    assert "node" in died.partition("tried again: ")[2]
    assert len(started) == 3
    assert run.gpus == 2


DRIVER = """
import functools, json, sys
from pathlib import Path
from generator.searching.cluster import Driver
from generator.searching.connection import Tuners, connected
from generator.searching.run import Run, SILENT
from tests.support.many_gpus import PROBLEMS, Place, tools
place = Place(Path(sys.argv[1]), json.loads(sys.argv[2]))
with connected(sys.argv[3], []):
    Driver(Run(PROBLEMS), place.orders(), functools.partial(tools, place), None, SILENT, Tuners(list)).tune()
"""


def test_a_driver_that_is_killed_goes_on_where_it_was(nodes: Nodes, place: Any, tmp_path: Path) -> None:
    told = {"a": {"waits_at": 33}, "c": {"waits_at": 7}}
    two = place(**told)
    nodes.only("a", "c")  # the test before leaves these nodes if it ran in the same process
    command = [sys.executable, "-c", DRIVER, str(tmp_path), json.dumps(told), nodes.cluster.address]
    with subprocess.Popen(command, cwd=ROOT) as driver:
        wait_for(lambda: two.kept() == 32 + 6 or driver.poll() is not None)
        driver.kill()
    assert two.by() == {"a": 33, "c": 7}
    tuners = two.tuners()
    assert len(tuners) == 2
    wait_for(lambda: not any(map(alive, tuners)))
    nodes.only("a")  # one GPU goes on with what two have left over
    two.go()
    run = Run(PROBLEMS)
    with connected(nodes.cluster.address, []):
        Driver(run, two.orders(), functools.partial(tools, two), None, Display(), NOTHING).tune()
    all_is_done(run, two)
    assert sum(two.measured().values()) == len(everything()) + 2, "but for the two trials under way"


def test_ctrl_c_ends_all_gpus_of_a_host_and_keeps_their_trials(place: Any, tmp_path: Path) -> None:
    told = {"gpu0": {"waits_at": 4}, "gpu1": {"waits_at": 6}}
    two = place(**told)
    command = [sys.executable, "-m", "tests.support.many_gpus", str(tmp_path), json.dumps(told), "--gpus", "all"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1", "RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as tuner:
        wait_for(lambda: two.kept() == 3 + 5 or tuner.poll() is not None)
        os.killpg(tuner.pid, signal.SIGINT)  # as a terminal does
        output, _ = tuner.communicate()
    assert tuner.returncode == 130, output
    count = len(PROBLEMS)
    assert f"GPU 0: Test GPU (sm_90), driver 1.2.3, torch 2.11.0, Triton 3.6.0: {count} problems, " in output
    assert "GPU 1: Test GPU" in output
    assert f"Interrupted. 0 of {count} problems are done and every trial is kept" in output
    assert "raylet" not in output
    assert two.by() == {"gpu0": 4, "gpu1": 6}
    assert len(two.tuners()) == 2
    (address,) = two.forked_by()
    assert address.startswith(f"\0tuned-{tuner.pid}-"), "what forks for both is what this process began with"
    wait_for(lambda: not left_behind(tmp_path))


def left_behind(folder: Path) -> list[int]:
    """The other processes that have ``folder`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found
