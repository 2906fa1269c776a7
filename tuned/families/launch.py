"""What a call consists of: kernel launches, fills, GEMMs and copies, before anything decides how to launch them."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, its grid and everything it is called with.

    ``arguments`` and ``constants`` follow the kernel's signature: first what varies at run time (tensors,
    integers), then every ``tl.constexpr`` by name.
    """

    kernel: str  # module and function name in tuned.kernels
    programs: int  # size of the one-dimensional grid
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]  # num_warps, num_stages, launch_pdl: compile options, never seen by the kernel


@dataclasses.dataclass(frozen=True)
class Fill:
    """Set every bit of a tensor to 0 or to 1, before a kernel that waits for another value."""

    tensor: Any
    bits: int  # 0 or -1


@dataclasses.dataclass(frozen=True)
class Product:
    """A GEMM of the library: out = a @ b.T."""

    a: Any  # [rows, k]
    b: Any  # [columns, k]
    out: Any  # [rows, columns]


@dataclasses.dataclass(frozen=True)
class Copy:
    """out = x, elementwise."""

    x: Any
    out: Any


Step = Launch | Fill | Product | Copy


def check_rows(**tensors: Any) -> None:
    """Check that the last stride of each tensor is 1, as the kernels assume; None is skipped.

    Every function that makes a launch calls it: with other strides a kernel would silently read the wrong elements.

    Raises:
        ValueError: a last stride is not 1.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"the last stride of {name} must be 1 in a launch, got shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}: give .contiguous()"
            )


def ceil_div(a: int, b: int) -> int:
    """Smallest integer at or above a / b, for positive integers."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two at or above n; 1 for n = 1."""
    return 1 << (n - 1).bit_length()
