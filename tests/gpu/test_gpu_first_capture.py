"""In a new process a call alone warms up for its capture, although another form may serve in the graph."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.otherwise import drawn_otherwise
from tuned.lookup.gpu import gpu_of

if TYPE_CHECKING:
    from benchmarks.random_gru import Shape

ROOT = Path(__file__).parents[2]
PROCESS_SECONDS = 180
BEGIN = """
import torch, tuned, tuned.nn
torch.manual_seed(0)
device = torch.device("cuda")
def gru(steps, batch, features, hidden, **settings):
    x = torch.randn(steps, batch, features, device=device, dtype=settings.get("dtype"))
    return tuned.nn.GRU(features, hidden, device=device, **settings), x
"""
END = """
def step():
    found = run()
    return found if isinstance(found, tuple) else (found,)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = step()
graph.replay()
for ours, called in zip(out, step(), strict=True):
    torch.testing.assert_close(ours, called, rtol=0, atol=2e-2 * max(1.0, float(called.abs().max())))
print("alike")
"""
FORWARD = "module, x = gru({shape})\ndef run():\n    with torch.no_grad():\n        return module(x)\n"
TRAINING = (
    "module, x = gru({shape})\ntensors = [x.requires_grad_(), *module.parameters()]\n"
    "def run():\n    return torch.autograd.grad(module(x)[0].sum(), tensors)\n"
)
PROGRAMS = {
    "layers both ways": FORWARD.format(shape="9, 3, 24, 128, num_layers=2, bidirectional=True"),
    "many rows": FORWARD.format(shape="64, 400, 1200, 1200, dtype=torch.bfloat16"),
    "a training that cuDNN has in one launch": TRAINING.format(
        shape="101, 47, 72, 72, num_layers=2, bidirectional=True"
    ),
    "a short training": TRAINING.format(shape="20, 33, 256, 256, dtype=torch.bfloat16"),
    "narrow rows, which a graph leaves to cuDNN": FORWARD.format(
        shape="162, 18, 707, 707, num_layers=3, dtype=torch.bfloat16"
    ),
    "a training that a graph leaves to cuDNN": TRAINING.format(shape="462, 294, 130, 130"),
    "layers both ways whose training a graph leaves to cuDNN": TRAINING.format(
        shape="630, 294, 201, 201, num_layers=3, bidirectional=True"
    ),
    "a gradient by kernels that cuDNN's output begins": TRAINING.format(shape="64, 190, 128, 128"),
    "a step": "cell = tuned.nn.GRUCell(512, 512).to(device)\nx, h = torch.randn(2, 64, 512, device=device)\n"
    "def run():\n    with torch.no_grad():\n        return cell(x, h)\n",
    "a linear of segments": "from tuned.dispatch import linear_cat\n"
    "x, h, w = torch.randn(64, 512, device=device), torch.randn(64, 512, device=device), "
    "torch.randn(1000, 1024, device=device) / 32\ndef run():\n    with torch.no_grad():\n        return linear_cat((x, h), w)\n",
}


RANDOM, SEED = 6, 5


def complaint_of(program: str) -> str | None:
    """The error of a new process whose graph cannot be captured or gives another result; else None."""
    command = [sys.executable, "-c", BEGIN + program + END]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    return None if done.stdout.endswith("alike\n") else (done.stdout + done.stderr)[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_warms_up_is_enough_for_its_capture(name: str) -> None:
    assert complaint_of(PROGRAMS[name]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
def test_it_is_enough_for_random_grus_whose_graph_something_else_serves(*, trained: bool) -> None:
    shapes = drawn_otherwise(RANDOM, SEED, gpu_of(torch.device("cuda", 0)), trained=trained)
    assert len(shapes) == RANDOM
    program = TRAINING if trained else FORWARD
    programs = {shape: program.format(shape=arguments(shape)) for shape in shapes}
    with concurrent.futures.ThreadPoolExecutor(RANDOM) as pool:
        told = dict(zip(programs, pool.map(complaint_of, programs.values()), strict=True))
    assert not any(told.values()), {shape: complaint for shape, complaint in told.items() if complaint}


@pytest.mark.gpu
def test_what_is_set_up_warns_of_nothing() -> None:
    """PyTorch warns of weights that cuDNN must copy; the weights for setting up are not the user's."""
    program = (
        "import warnings, torch\nfrom tuned.launching import library\nwarnings.simplefilter('error')\n"
        "library.set_up(torch.device('cuda', 0), gradients=True)\n"
        "library.set_up_recurrences(torch.device('cuda', 0), gradients=True)\nassert len(library._WITH_GRADIENTS) == 2"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def arguments(shape: Shape) -> str:
    """The arguments of ``gru`` in a program, as text."""
    return (
        f"{shape.steps}, {shape.batch}, {shape.hidden}, {shape.hidden}, num_layers={shape.layers}, "
        f"bidirectional={shape.bidirectional}, dtype=torch.{shape.dtype}"
    )
