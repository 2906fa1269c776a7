"""Kernels that Triton cannot compile, or a GPU cannot hold: PyTorch's own operators serve their calls.

Another version of Triton may fail to compile a kernel that ours compiles: 3.6 did, on rows of 6 features in float32. By then
nothing that the caller sees has been written, so the code that launches falls back to PyTorch's operators, as it does for
launches that are only noted. Kernels from outside of this package have no such fallback: their compiler errors are raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch

from tuned.families.launch import Launch
from tuned.launching.rehearsal import NotedError

_KINDS = {"CompilationError", "OutOfResources", "PTXASError"}
_SAID = "PassManager::run failed"  # all that Triton raises where a pass of its compiler breaks
_CHARACTERS = 200  # of what Triton says, which may be its whole intermediate code
_UNCOMPILED: dict[Any, str] = {}  # properties of a launch -> what Triton said of it


class UncompiledError(NotedError):
    """A kernel does not compile: PyTorch's operators must serve the call. No user sees this error."""


def refuse_known(launch: Launch) -> None:
    """Refuse a launch that did not compile before: trying again takes seconds.

    Raises:
        UncompiledError: a launch with the same properties did not compile.
    """
    if _UNCOMPILED and (said := _UNCOMPILED.get(_properties(launch))) is not None:
        raise UncompiledError(said)


def remember_failure(launch: Launch, error: Exception) -> None:
    """If the error is the compiler's, remember that the launch does not compile, and warn once for each kernel.

    Raises:
        UncompiledError: the error is the compiler's.
    """
    if (why := _why(error)) is None:
        return
    from tuned.launching.plan import remember  # noqa: PLC0415 - it imports the launcher, which imports this module
    from tuned.lookup.caller import outside  # noqa: PLC0415 - as above
    from tuned.lookup.misses import TunedWarning  # noqa: PLC0415 - as above

    said = f"Triton cannot compile {launch.kernel} for this call ({why})"
    told = any(launch.kernel == kernel for _, kernel, *_ in _UNCOMPILED)
    remember(_UNCOMPILED, _properties(launch), said)
    if not told:
        warnings.warn(
            f"{said}: PyTorch's own operators serve it and calls like it, with the same result in more time. Another version of "
            "Triton may compile it; docs/support.md lists those that were tried. This is said once for each kernel.",
            TunedWarning,
            stacklevel=outside(),
        )
    raise UncompiledError(said) from error


def said_of(kernels: Collection[str]) -> str | None:
    """What Triton said of some call of one of these kernels that it could not compile, or None."""
    return next((said for (_, kernel, *_), said in list(_UNCOMPILED.items()) if kernel in kernels), None)


def _why(error: Exception) -> str | None:
    """What the compiler said, or None if the error is not the compiler's. Its errors are known by name: a newer Triton may move them."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if not kinds & _KINDS and _SAID not in str(error):
        return None
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_CHARACTERS]


def _properties(launch: Launch) -> tuple[Any, ...]:
    """All that the compiled code depends on, the kernel second."""
    from tuned.launching.plan import properties  # noqa: PLC0415 - as above

    device = next((t.get_device() for t in launch.arguments if isinstance(t, torch.Tensor)), -1)
    return properties(device, launch)
