"""Every kernel text there can be: those of each family, rendered."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from generator.families.text import Text
from generator.rendering.render import Kernel, render
from generator.workload import WORKLOADS


def texts() -> Iterator[Text]:
    """The texts of every family."""
    return itertools.chain.from_iterable(work.texts() for work in WORKLOADS.values())


@functools.cache
def structures() -> dict[str, Kernel]:
    """Every kernel by name, rendered from the templates as they are now."""
    return {name: render(template, name, spec, variant) for template, name, spec, variant, _ in texts()}


@functools.cache
def default_names() -> frozenset[str]:
    """The kernels that a call can get where no table says more: these are always committed."""
    return frozenset(name for _, name, _, _, default in texts() if default)
