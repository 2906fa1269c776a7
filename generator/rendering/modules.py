"""Load a kernel as the templates give it now, whatever is committed."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from generator.cache import cache_folder
from generator.rendering.structures import structures


def write_if_different(path: Path, text: str) -> bool:
    """Write a file whole or not at all, and not when it already says this; True if it was written."""
    if path.exists() and path.read_text() == text:
        return False
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # noqa: PTH101 - mkstemp makes 0600; what is committed must be readable
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        os.unlink(temporary)  # noqa: PTH108
        raise
    return True


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
