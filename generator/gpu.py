"""Say whether there is a GPU to tune on, or why not and the way out: a pure function of a few facts."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import os
import shutil
import warnings
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that ``diagnose`` depends on."""

    torch_version: str = ""
    torch_cuda: str | None = None  # CUDA that this torch was built with; None for a CPU-only or ROCm build
    torch_hip: str | None = None  # ROCm that this torch was built with
    names: tuple[str, ...] = ()  # GPUs that torch can use, by index
    signs: tuple[str, ...] = ()  # files and programs on the system that tell of an NVIDIA GPU
    driver_cuda: int = 0  # newest CUDA that the driver supports, as 12040 for 12.4; 0 when there is no driver
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    error: str = ""  # what torch said when CUDA was initialised


@dataclasses.dataclass(frozen=True)
class Answer:
    """Whether this machine can tune, and if not, what to tell."""

    kind: str  # "ready", "no_gpu", "cpu_only_torch", "old_driver", "hidden", "rocm" or "broken"
    message: str = ""


class NoSuchGpuError(ValueError):
    """The GPU that was asked for is not here; the message lists the GPUs here."""


def diagnose(facts: Facts) -> Answer:
    """Whether there is a GPU to tune on; otherwise the first of the usual reasons that holds, with its way out."""
    signs, version = ", ".join(facts.signs), facts.driver_cuda
    newest = f"{version // 1000}.{version % 1000 // 10}" if version else ""
    driver = f"supports CUDA up to {newest}" if newest else "is older than that"
    seen = bool(facts.signs or facts.driver_cuda)
    hidden = facts.visible is not None and facts.visible.strip() in ("", "-1")
    answers = (
        ("ready", bool(facts.names) and facts.torch_hip is None, ""),
        (
            "rocm",
            facts.torch_hip is not None,
            (
                f"this torch is built for ROCm {facts.torch_hip}: the kernels run on AMD GPUs with untuned variants, but "
                "measuring there is not supported yet. Tune on an NVIDIA GPU."
            ),
        ),
        (
            "cpu_only_torch",
            facts.torch_cuda is None and seen,
            (
                f"this machine shows signs of an NVIDIA GPU ({signs or 'an NVIDIA driver'}), but torch {facts.torch_version} is a "
                f"CPU-only build. Install a CUDA build of torch, of a CUDA version up to {newest or 'what nvidia-smi shows'}: "
                "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cuXXX, "
                "XXX being that version without the dot."
            ),
        ),
        (
            "old_driver",
            facts.torch_cuda is not None and _too_old(facts),
            (
                f"torch {facts.torch_version} is built for CUDA {facts.torch_cuda}, but the NVIDIA driver {driver}: it is too old "
                "for this torch. Update the driver, or install a torch built for the driver's CUDA: "
                "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cuXXX."
            ),
        ),
        (
            "hidden",
            hidden and seen,
            f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides every GPU from torch. Unset it, or set it to an index.",
        ),
        (
            "broken",
            seen,
            (
                f"this machine shows signs of an NVIDIA GPU ({signs or 'a driver'}), but torch {facts.torch_version} cannot use "
                f"one: {facts.error or 'it does not say why'}. Check nvidia-smi; in a container, pass the GPU through "
                "(docker run --gpus all)."
            ),
        ),
        (
            "no_gpu",
            True,
            "no GPU was found on this machine. Run the same command where there is one; what is true without one follows.",
        ),
    )
    return next(Answer(kind, message) for kind, holds, message in answers if holds)


def _too_old(facts: Facts) -> bool:
    said = ("driver" in facts.error and "too old" in facts.error) or "insufficient" in facts.error
    # Within a major version an older driver serves (CUDA minor version compatibility, from 11 on).
    return said or 0 < facts.driver_cuda // 1000 < int((facts.torch_cuda or "0").split(".")[0])


def choose_gpu(names: tuple[str, ...], wanted: str) -> int:
    """The index of the GPU that ``wanted`` asks for: "auto", an index or a part of its name.

    Raises:
        NoSuchGpuError: there is none.
    """
    if wanted == "auto" and names:
        return 0
    if wanted.isdecimal() and int(wanted) < len(names):
        return int(wanted)
    for index, name in enumerate(names):
        if not wanted.isdecimal() and wanted.lower() in name.lower():
            return index
    there = ", ".join(f"{i}: {n}" for i, n in enumerate(names)) or "none"
    raise NoSuchGpuError(f"--gpu must be auto, an index or part of a name of a GPU here ({there}), got {wanted!r}")


def choose_gpus(names: tuple[str, ...], wanted: str) -> list[int]:
    """The indices of the GPUs that ``wanted`` asks for: "all", or indices with commas between; all of one model.

    Raises:
        NoSuchGpuError: one is not there, or they are of different models.
    """
    parts = [part.strip() for part in wanted.split(",")]
    there = ", ".join(f"{i}: {n}" for i, n in enumerate(names)) or "none"
    if wanted == "all":
        indices = list(range(len(names)))
    elif all(part.isdecimal() and int(part) < len(names) for part in parts):
        indices = sorted({int(part) for part in parts})
    else:
        raise NoSuchGpuError(f"--gpus must be all or indices of GPUs here ({there}), as in 0,1, got {wanted!r}")
    models = {names[i] for i in indices}
    if len(models) > 1:
        alike = ",".join(str(i) for i in indices if names[i] == names[indices[0]])
        raise NoSuchGpuError(
            "GPUs that share the problems must be of one model, since a winner is the winner of one model; these are of "
            f"{len(models)} ({there}). Name those of one, as in --gpus {alike}, and run again for the other."
        )
    return indices


def gather() -> Facts:
    """The facts of this machine and this torch."""
    names: tuple[str, ...] = ()
    error = ""
    if torch.version.cuda is not None or torch.version.hip is not None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                if torch.cuda.is_available():
                    names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
                else:
                    torch.cuda.init()
            except (RuntimeError, AssertionError) as problem:
                error = (str(problem).splitlines() or [""])[0]
        if not names and said:
            error = f"{error} {str(said[0].message).splitlines()[0]}".strip()
    return Facts(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        names=names,
        signs=_signs(),
        driver_cuda=0 if names else _driver_cuda(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        error=error,
    )


def _signs() -> tuple[str, ...]:
    found = [str(p) for p in (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/proc/driver/nvidia")) if p.exists()]
    return (*found, *(["nvidia-smi"] if shutil.which("nvidia-smi") else []))


def _driver_cuda() -> int:
    """The newest CUDA that the installed driver supports, as the driver library reports it."""
    version = ctypes.c_int(0)
    try:
        library = ctypes.CDLL(ctypes.util.find_library("cuda") or "libcuda.so.1")
        return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
    except (OSError, AttributeError):
        return 0
