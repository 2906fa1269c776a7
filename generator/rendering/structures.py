"""Render a kernel's source from its template, a pure function of family, spec and variant; list every possible kernel."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext

from tuned.families.outside import FamilyError

from ..disk import write_if_different
from ..families.text import Text
from ..places import FAMILY, TEMPLATES, cache_folder
from ..problem import Problem
from ..workload import WORKLOADS
from .syntax import digest

NAME = "KERNEL"  # stands for the kernel's name in a template: {{ name }} could not be the name of a function in valid Python


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Rendered source of one kernel structure, and a digest of its syntax tree."""

    name: str  # of the module and of its @triton.jit function
    source: str

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the syntax tree, which comments and docstrings do not change. It takes longer than rendering.

        Raises:
            FamilyError: the source is not Python; the templates of this tree are tested, so a user's template is wrong.
        """
        try:
            return digest(self.source)
        except SyntaxError as error:
            line = f"line {error.lineno}: {(error.text or '').strip()}"
            raise FamilyError(f"the template of {self.name} gives no Python, {line} ({error.msg})") from error


class _IndentedIncludes(jinja2.ext.Extension):
    """Indent an included file like its include mark: statements of a function's body can then be a file of valid Python."""

    MARK = re.compile(r'^( +)(# \{% include "[^"]+" %\}\n)', re.MULTILINE)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:  # noqa: ARG002 - Jinja's
        return self.MARK.sub(
            lambda m: f"# {{% filter indent({len(m[1])}, true) %}}\n{m[2]}# {{% endfilter %}}\n", source
        )


@functools.cache
def _environment() -> jinja2.Environment:
    # Block marks are inside comments, so that a template is valid Python; {{ x }} is a legal expression anyway.
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*([FAMILY.parent] if FAMILY else []), TEMPLATES]),
        extensions=[_IndentedIncludes],
        undefined=jinja2.StrictUndefined,
        block_start_string="# {%",
        block_end_string="%}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is Python, not HTML
    )


def render(template: str, name: str, spec: Any, variant: Any) -> Kernel:
    """The kernel ``name`` that ``template`` gives for ``spec`` and ``variant``; the same arguments, the same bytes.

    Raises:
        FamilyError: the template is not UTF-8.
    """
    file = f"{template}.py.jinja"
    try:
        source = _environment().get_template(file).render(spec=spec, variant=variant).replace(NAME, name)
    except UnicodeDecodeError as error:
        raise FamilyError(f"the template {file} is no UTF-8 text: {error}") from error
    return Kernel(name, source)


def texts() -> Iterator[Text]:
    """The texts of every family."""
    return itertools.chain.from_iterable(work.texts() for work in WORKLOADS.values())


@functools.cache
def structures() -> dict[str, Kernel]:
    """Every kernel by name, rendered from today's templates."""
    return {name: render(template, name, spec, variant) for template, name, spec, variant, _ in texts()}


@functools.cache
def digests() -> dict[str, str]:
    """Kernel -> digest of its text now, for all kernels. This takes seconds: ``current`` does it for a few."""
    return current(structures())


def current(names: Iterable[str]) -> dict[str, str]:
    """Kernel -> digest of its text now, for those of ``names`` that are still kernels."""
    return {name: structures()[name].digest for name in names if name in structures()}


def digests_of(problem: Problem, variant: Any) -> dict[str, str]:
    """The digests of the kernels that a variant launches."""
    return current(WORKLOADS[problem.family].family.kernel_names(problem.spec, variant))


def fresh(measured: dict[str, str]) -> bool:
    """Whether the templates still render the texts that were measured."""
    return measured == current(measured)


@functools.cache
def default_names() -> frozenset[str]:
    """The kernels that a call can get without a table: these are always committed."""
    return frozenset(name for _, name, _, _, default in texts() if default)


@functools.cache
def load(name: str) -> Any:
    """The @triton.jit function of kernel ``name``.

    The source is written to a real file, since Triton reads a function's source and a traceback must have a file to
    show.

    Raises:
        KeyError: if no family has a kernel of this name.
    """
    source = structures()[name].source
    text = hashlib.sha256(source.encode()).hexdigest()[:12]  # Kernel.digest takes longer than the import
    path = cache_folder("candidates", text) / f"{name}.py"
    write_if_different(path, source)
    module_spec = importlib.util.spec_from_file_location(f"candidate_{text}_{name}", path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"cannot import the rendered kernel {path}")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, name)
