"""What the fuzz draws where there is no GPU: calls by PyTorch's operators, or by kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import triton
from torch.torch_version import TorchVersion as Version

from tests.fuzz import case as cases
from tests.fuzz.draw import World, case

SEED = 11
KERNELS = World(
    truncates=True, sees_values=False, most=1000, hidden=16, long=0, modes=("plain", "no_grad", "inference", "grad")
)
ROPE = dataclasses.replace(KERNELS, kinds=("rope", "dropin"))
# The interpreter of older Tritons cannot count from a number of the call, as sequences need.
SEQUENCES = ("gru",) if Version(triton.__version__) >= Version("3.7") else ()
FAMILIES = dataclasses.replace(KERNELS, kinds=(*SEQUENCES, "gru_cell", "linear_cat"), modes=("no_grad", "inference"))


def assert_right(world: World, indices: range, repeats: int = 2) -> int:
    """Run cases; each failure is shown with its script."""
    wrong, calls = [], 0
    for index in indices:
        made, failure = cases.run(case(world, SEED, index, repeats), "cpu")
        calls += made
        wrong += [] if failure is None else [f"{failure.message}\n{failure.script}"]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    return calls
