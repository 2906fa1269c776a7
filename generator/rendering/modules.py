"""Load a kernel as the templates give it now, whatever is committed."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from ..cache import cache_folder
from ..disk import write_if_different
from .structures import structures


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
