"""What a measurement is made with: the GPU and the versions that it depends on."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from tuned.lookup.record import METHOD, device_slug

from .bench import TIMING


def driver_version() -> str:
    """The NVIDIA driver's version, or "unknown" where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0]


def environment(device: int) -> dict[str, Any]:
    """Name, size and software of a GPU, as the record keeps them. Initialises CUDA in this process."""
    import triton  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": device_slug(properties.name),
        "device_name": properties.name,
        "capability": properties.major * 10 + properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": driver_version(),
        "torch": torch.__version__.split("+")[0],
        "triton": triton.__version__,
        "method": METHOD,  # rows of another method do not count
        "timing": TIMING,  # rows of another timing count, and are worth tuning again
    }
