"""How many programs may wait for each other: fewer than a GPU's multiprocessors where a process is given a part of them.

A program that waits must run beside those that it waits for, so such a launch is cooperative and has at most as many
programs as multiprocessors. A green context has fewer than its GPU says, and only the driver knows: it is asked where a
call is decided. Where it cannot be asked, the launch that fails tells, and is not tried again there.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from tuned.launching.launcher import raw_stream

TOO_LARGE = "too many blocks in cooperative launch"  # cuGetErrorString(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
RESOURCE_BYTES = 512  # of a CUdevResource, and more: 144 in CUDA 12
SM_COUNT_OFFSET = 96  # of sm.smCount in it: the type, 92 bytes of padding, the union

MAX_PLACES = 1024  # streams and contexts remembered

_PLACES: dict[tuple[int, int, int], int | None] = {}  # (device, context, stream) -> what ``allowed`` says there
_SEEN: list[int] = []  # limits that were met: empty in nearly every process, which a hot path asks for first


def too_large(error: BaseException) -> bool:
    """Whether a launch failed because its programs cannot all run at once; nothing has run then."""
    return isinstance(error, RuntimeError) and TOO_LARGE in str(error)


def forbid(device: int) -> None:
    """Remember that a launch of waiting programs was too large on the current stream of a device."""
    _note(_here(device), 1)


def place(device: int) -> Any:
    """What the choice of a variant depends on beside its device: False until a limit was met anywhere."""
    return bool(_SEEN) and allowed(device)


def allowed(device: int) -> int | None:
    """How many programs may wait for each other on the current stream of a device; None if as many as it says itself.

    1 where a launch has failed although the driver had allowed it. A handle that the driver gives out once more may
    bring an old answer: a smaller variant than would do, or a launch that fails and is made again.
    """
    if _driver() is None and not _SEEN:
        return None
    here = _here(device)
    if here not in _PLACES:
        limit = _multiprocessors(device)
        if limit is None and _SEEN and torch.cuda.is_current_stream_capturing():
            # Nothing may fail while a graph is captured, and that is on a stream of its own: as others of this context.
            return min((n for p, n in _PLACES.items() if p[:2] == here[:2] and n is not None), default=None)
        _note(here, limit)
    return _PLACES[here]


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
    """Those of the green context that the current stream, or else the current context, belongs to."""
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
    whole = torch.cuda.get_device_properties(device).multi_processor_count
    return count if count < whole else None


@functools.cache
def _driver() -> Any:
    """CUDA's driver, if it is there and knows green contexts (12.4)."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in ("cuCtxGetCurrent", "cuStreamGetGreenCtx", "cuGreenCtxGetDevResource", "cuCtxGetDevResource"):
            getattr(driver, name).restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return driver
