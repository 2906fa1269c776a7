"""Every kernel text there can be: those of each family, rendered; and each as a kernel that can be launched."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

from ..disk import write_if_different
from ..families.text import Text
from ..places import cache_folder
from ..problem import Problem
from ..workload import WORKLOADS
from .render import Kernel, render


def texts() -> Iterator[Text]:
    """The texts of every family."""
    return itertools.chain.from_iterable(work.texts() for work in WORKLOADS.values())


@functools.cache
def structures() -> dict[str, Kernel]:
    """Every kernel by name, rendered from the templates as they are now."""
    return {name: render(template, name, spec, variant) for template, name, spec, variant, _ in texts()}


@functools.cache
def digests() -> dict[str, str]:
    """Kernel -> digest of its text now."""
    return {name: kernel.digest for name, kernel in structures().items()}


def digests_of(problem: Problem, variant: Any) -> dict[str, str]:
    """Those of the kernels that a variant launches."""
    return {name: digests()[name] for name in WORKLOADS[problem.family].family.kernel_names(problem.spec, variant)}


def fresh(measured: dict[str, str]) -> bool:
    """Whether the templates still give the texts that were measured."""
    return measured.items() <= digests().items()


@functools.cache
def default_names() -> frozenset[str]:
    """The kernels that a call can get where no table says more: these are always committed."""
    return frozenset(name for _, name, _, _, default in texts() if default)


@functools.cache
def load(name: str) -> Any:
    """The @triton.jit function of kernel ``name``.

    The source is a real file, since Triton reads a function's source and a traceback must be openable.

    Raises:
        KeyError: if no family has a kernel of this name.
    """
    kernel = structures()[name]
    path = cache_folder("candidates", kernel.digest) / f"{name}.py"
    write_if_different(path, kernel.source)
    module_spec = importlib.util.spec_from_file_location(f"candidate_{kernel.digest}_{name}", path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"cannot import the rendered kernel {path}")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, name)
