"""The product of a GRU's input and its weights, for all steps at once: by the library, or in TensorFloat-32 by a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuned.calls.products import precision_of, rows_of, weight_of
from tuned.families.launch import Launch
from tuned.families.linear_cat import FAMILY as LINEAR_CAT
from tuned.families.linear_cat.launches import LinearCatCall
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.launching.launcher import run_steps
from tuned.launching.plan import compiled_before, direct_launch, launch_known
from tuned.lookup import misses
from tuned.lookup.gpu import gpu_of
from tuned.lookup.lookup import Gpu, choose, usable

SMALL_PRODUCT = 2**29  # multiplications: 20 us at the 50 TFLOP/s that an H200 has for float32


def by_library(rows: int, weight: torch.Tensor, precision: str) -> bool:
    """Whether the library multiplies the input of a layer.

    It does for 16-bit weights, and if torch's precision of float32 GEMMs is the GRU's. If torch's is "ieee" and the GRU's is "tf32",
    it also does where the product is too small for the difference in time to matter, or where rows have an odd width: these our
    kernel loads an element at a time, and took 1.8 to 2.5 times as long as the library without tensor cores.
    """
    if weight.dtype is not torch.float32 or precision_of(torch.float32) == precision:
        return True
    return precision == "tf32" and (rows * weight.numel() <= SMALL_PRODUCT or weight.shape[1] % 2 == 1)


def of_both(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The library's products ``[2, rows, 3 * H]`` of rows and the weights of two directions, at once: half of the host's time.

    None if the products are so large that device time counts, or if the weights do not lie in one memory like rows of one tensor.
    """
    first, second = weights
    width, features = first.shape
    if rows.shape[0] * width * features > SMALL_PRODUCT or not (first.is_contiguous() and second.is_contiguous()):
        return None
    apart, rest = divmod(second.data_ptr() - first.data_ptr(), first.element_size())
    together = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if apart < width * features or rest or not together:
        return None
    both = first.as_strided((2, features, width), (apart, 1, features))
    return torch.bmm(rows.expand(2, *rows.shape), both)


def project(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, precision: str) -> None:
    """``out = rows @ weight.T``, in the precision that a GRU's products must have."""
    if not by_library(rows.shape[0], weight, precision):
        spec = LinearCatSpec("float32", (rows.shape[1],), weight.shape[0], bias=False, precision=precision)
        variant = _projection(spec, LinearCatSize(rows.shape[0]), gpu_of(rows.device))
        if variant is not None:
            call = LinearCatCall.of((rows_of(rows),), weight_of(weight), out)
            run_steps(LINEAR_CAT.launches(spec, variant, call), functools.partial(launch_known, rows.device.index))
            return
    torch.mm(rows, weight.t(), out=out)


def product_of(
    rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, precision: str
) -> Callable[[torch.Tensor, torch.Tensor, int], None] | None:
    """``project`` of tensors like these, as a function (rows, weight, address of the result); None if it has to decide each time."""
    if by_library(rows.shape[0], weight, precision) or rows_of(rows) is not rows or weight_of(weight) is not weight:
        return None
    spec = LinearCatSpec("float32", (rows.shape[1],), weight.shape[0], bias=False, precision=precision)
    variant = _projection(spec, LinearCatSize(rows.shape[0]), gpu_of(rows.device))
    if variant is None:
        return None
    (launch,) = LINEAR_CAT.launches(spec, variant, LinearCatCall.of((rows,), weight, out))
    assert isinstance(launch, Launch), "it is one kernel"
    index = rows.get_device()
    compiled = compiled_before(index, launch)
    direct = None if compiled is None else direct_launch(launch, compiled, index)
    if direct is None:
        return None
    run, function, head, programs, rest, stream_of, _, _ = direct
    of_weight = sum(isinstance(t, torch.Tensor) for t in launch.arguments) - 2  # it stands for missing tensors, too

    def product(rows: torch.Tensor, weight: torch.Tensor, out: int) -> None:
        given = (rows.data_ptr(), *(weight.data_ptr(),) * of_weight, out)
        run(programs, 1, 1, stream_of(index), function, *head, *given, *rest)

    return product


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def _projection(spec: LinearCatSpec, size: LinearCatSize, gpu: Gpu) -> Any:
    """The variant of a product that is not ``by_library``; None where no kernel fits.

    A kernel serves even where a row says that it is slower: PyTorch's product follows a setting, and would have another precision.
    """
    variant = choose(LINEAR_CAT, spec, size, gpu).variant
    if variant is not None:
        return variant
    default = LINEAR_CAT.fit(LINEAR_CAT.default_variant(spec, size), spec, gpu.capability)
    return default if usable(LINEAR_CAT, spec, size, default, gpu.capability, gpu.multiprocessors) else None
