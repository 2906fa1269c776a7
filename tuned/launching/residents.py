"""How many programs may wait for each other: fewer than a GPU's multiprocessors if a process has only a part of them.

A program that waits for others must be resident together with them. So such a launch is cooperative, with at most one
program per multiprocessor. A green context has fewer multiprocessors than its GPU reports, and only the driver knows how
many: it is asked when a call is decided. If it cannot be asked, the first launch that fails shows it; none like it is tried again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

import torch

from tuned.launching.launcher import raw_stream

TOO_LARGE = "too many blocks in cooperative launch"  # cuGetErrorString(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
RESOURCE_BYTES = 512  # at least sizeof(CUdevResource), which is 144 in CUDA 12
SM_COUNT_OFFSET = 96  # offset of sm.smCount in a CUdevResource: after the type (4 bytes) and 92 bytes of padding

MAX_PLACES = 1024  # (device, context, stream) triples remembered

_PLACES: dict[tuple[int, int, int], int | None] = {}  # (device, context, stream) -> what ``allowed`` returns there
_SEEN: list[int] = []  # the first limit that was met; empty in nearly every process, so the hot path looks here first


def too_large(error: BaseException) -> bool:
    """Whether a launch failed because its programs cannot all be resident; then nothing has run."""
    return isinstance(error, RuntimeError) and TOO_LARGE in str(error)


def forbid(device: int) -> None:
    """Remember that a cooperative launch was too large for the current stream of a device."""
    _note(_here(device), 1)


def place(device: int) -> Any:
    """The limit that the choice of a variant depends on besides its device; False until a limit was met anywhere."""
    return bool(_SEEN) and allowed(device)


def allowed(device: int) -> int | None:
    """How many programs may wait for each other on the current stream of a device; None if the device sets the limit.

    It is 1 where a launch failed although the driver had allowed it. The driver may reuse the handle of a stream or
    context, and then the answer may be old: the variant is smaller than needed, or a launch fails and is repeated.
    """
    if _driver() is None and not _SEEN:
        return None
    here = _here(device)
    with contextlib.suppress(KeyError):  # another thread may clear what was noted
        return _PLACES[here]
    limit = _multiprocessors(device)
    if limit is None and _SEEN and torch.cuda.is_current_stream_capturing():
        # A graph capture has a stream of its own, and no launch may fail in it: take the limit of this context's other streams.
        return min((n for p, n in list(_PLACES.items()) if p[:2] == here[:2] and n is not None), default=None)
    _note(here, limit)
    return limit


def _note(here: tuple[int, int, int], limit: int | None) -> None:
    if len(_PLACES) >= MAX_PLACES:
        _PLACES.clear()
    _PLACES[here] = limit
    if limit is not None and not _SEEN:
        _SEEN.append(limit)


def _here(device: int) -> tuple[int, int, int]:
    context = ctypes.c_void_p()
    driver = _driver()
    if driver is not None:
        driver.cuCtxGetCurrent(ctypes.byref(context))
    return device, context.value or 0, raw_stream()(device)


def _multiprocessors(device: int) -> int | None:
    """Multiprocessors of the current stream's green context, or else of the current context; None if all of the GPU's."""
    driver = _driver()
    if driver is None:
        return None
    resource = (ctypes.c_uint32 * (RESOURCE_BYTES // 4))()
    green = ctypes.c_void_p()
    stream = ctypes.c_void_p(raw_stream()(device))
    found = driver.cuStreamGetGreenCtx(stream, ctypes.byref(green)) == 0 and green.value
    if found:
        status = driver.cuGreenCtxGetDevResource(green, ctypes.byref(resource), SM_RESOURCE)
    else:
        context = ctypes.c_void_p()
        if torch.cuda.current_device() != device or driver.cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
            return None
        status = driver.cuCtxGetDevResource(context, ctypes.byref(resource), SM_RESOURCE)
    count = resource[SM_COUNT_OFFSET // 4]
    if status or resource[0] != SM_RESOURCE or not count:
        return None
    return count if count < torch.cuda.get_device_properties(device).multi_processor_count else None


@functools.cache
def _driver() -> Any:
    """The CUDA driver library, or None if it is missing or has no green contexts (CUDA 12.4)."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in ("cuCtxGetCurrent", "cuStreamGetGreenCtx", "cuGreenCtxGetDevResource", "cuCtxGetDevResource"):
            getattr(driver, name).restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return driver
