"""The program of a process that compiles kernels into Triton's cache: ``tuned.launching.ahead`` starts this file.

It imports only Triton and the files of kernels, neither torch nor this package. So it is ready in a fraction of a second,
and asks no GPU for anything.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import sys
from typing import Any


class Driver:
    """A stand-in for Triton's driver of a GPU: to compile, Triton asks it for which GPU, and nothing else."""

    def __init__(self, target: Any, device: int) -> None:
        self.target, self.device = target, device

    def get_current_device(self) -> int:
        """The index under which a kernel keeps what it compiled."""
        return self.device

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        return self.target


@functools.cache
def module(name: str, file: str) -> Any:
    """The module of a file with kernels, loaded without importing the packages that it lies in."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def main() -> None:
    """Compile what comes by standard input until that ends; answer each request with what went wrong, or nothing."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Triton prints must not mix with the answers
    requests = sys.stdin.buffer
    sys.path[:] = pickle.load(requests)  # noqa: S301 - of the process that started this one
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - it is found now that sys.path is set
    from triton.runtime import driver  # noqa: PLC0415

    while True:
        try:
            name, file, function, data, target, device = pickle.load(requests)  # noqa: S301
        except EOFError:
            return
        wrong = ""
        try:
            driver.set_active(Driver(GPUTarget(*target), device))
            getattr(module(name, file), function).preload(data)
        except Exception as error:  # noqa: BLE001 - the process that asked compiles it again, and gets the error
            wrong = f"{type(error).__name__}: {error}"
        pickle.dump(wrong, answers)
        answers.flush()


if __name__ == "__main__":
    main()
