"""A family from outside of this package: one module that describes it, and a folder beside it for generated files.

The module is the whole description: ``Outside`` lists what it must have, ``OPTIONAL`` what it may have. Its kernels, record
and tables lie in ``home_folder`` of its file, so families of one name in two packages never meet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tuned.families.architecture import LEAST_SHARED, PDL_CAPABILITY
from tuned.families.choices import choices
from tuned.families.family import Family
from tuned.families.launch import Launch, Step

if TYPE_CHECKING:
    from tuned.families.family import Problem


class FamilyError(TypeError):
    """A module is no family; the message says what it lacks, and where that is described."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A base class for a Size: the sizes that a kernel takes at run time, all of them integers."""

    @property
    def tokens(self) -> int:
        """How large a call is; lengths are compared in octaves of it. By default the product of all sizes."""
        return math.prod(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A base class for a Variant: its fields are knobs, each declared by ``one_of``."""

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key: within the noise the smaller one wins. By default the earlier of the declared choices."""
        return tuple(values.index(getattr(self, name)) for name, values in choices(type(self)).items())


class Outside(Protocol):
    """What the module of a family must have. Spec, Size, Variant and the call are frozen dataclasses."""

    Spec: type  # what a caller asks for, which tuning may not change
    Size: type  # what varies from call to call; has ``tokens``
    Variant: type  # knobs; has ``simplicity`` and a field num_warps
    TEXT: tuple[
        str, ...
    ]  # the fields of Spec and Variant that the template may read: a kernel for each of their values

    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """(spec, size, call) of what the function is called with; the call's tensors, ``out`` among them, are not filled."""

    def launches(self, spec: Any, variant: Any, call: Any) -> tuple[Step, ...]:
        """The launches of a call, in order. A launch without a kernel's name is of the kernel that TEXT chooses."""

    def inputs(self, spec: Any, size: Any, device: str, seed: int) -> Any:
        """A call with random inputs."""

    def reference(self, spec: Any, call: Any) -> tuple[Any, Any]:
        """The result in float64, and the largest error that is right, an element."""

    def bytes_moved(self, spec: Any, size: Any) -> int:
        """Bytes that must be read and written."""

    def problems(self) -> Iterator[Problem]:
        """The calls that are worth tuning."""


REQUIRED = ("Spec", "Size", "Variant", "TEXT", "call", "launches", "inputs", "reference", "bytes_moved", "problems")
# Each has a default: in generator.workload for what tuning asks for, in this module for what dispatch asks for.
OPTIONAL = {
    "rejection": "(spec, size or None, variant, capability) -> why a variant is not tried, or None",
    "default_variant": "(spec, size or None) -> a variant that is legal on any GPU",
    "distance": "(spec, spec) -> how far apart two specs are, in octaves; infinite where a row cannot stand in",
    "eager": "(spec, call) -> a function that computes the call with PyTorch's operators, and returns the result",
    "gradient": "(gradient of the result, *arguments) -> a gradient, or None, for each argument",
    "operations": "(spec, size) -> floating-point operations of a call, for the estimate",
    "small": "(size, variant) -> a size for the interpreter",
    # What the built-in families have beside these, for a finer estimate, search or page: see Family and Workload.
    "adapt": "(variant, its spec, another spec) -> the variant for the other spec",
    "fit": "(variant, spec, capability) -> the variant, without what the architecture lacks for this spec",
    "kernel_names": "(spec, variant) -> the kernels, in order, where there are several",
    "texts": "() -> (template, name, spec, variant, True) of every kernel, where TEXT does not say it",
    "work": "(problem, variant) -> what its launches do, for the estimate",
    "tile": "(spec, variant) -> rows and features that a program takes at a time",
    "features": "(variant) -> levels for a model of the time",
    "tensor_bytes": "(spec, size) -> bytes of one set of inputs and outputs",
    "interpreted": "(spec, variant, call) -> the steps in the interpreter, if they are others",
    "wrapper": "(winner, shown) -> the function of a shown winner",
    "shown_size": "(size) -> that which a shown winner is made for",
    "group": "(spec) -> which of GROUPS it is of, in a chart",
    "sized": "(variant, spec, size, multiprocessors) -> a row's variant as a call of that size needs it",
    "REACH": "octaves; a call further than that from every row gets the default variant",
    "CORE_KNOBS": "knobs; if a rule excludes their values, it does so whatever the others are",
    "TITLE": "what a page calls the family",
    "GROUPS": "kinds of calls",
    "REPRESENTATIVE": "names of problems for a first look",
}
DOCUMENTED = "docs/own-kernel.md describes each"


def load(name: str) -> types.ModuleType:
    """The module of a family, by the path of a file or of a package's folder, or by the dotted name of a module.

    Raises:
        FamilyError: there is none, or it cannot be imported.
    """
    path = Path(name)
    try:
        if path.suffix != ".py" and not path.is_dir():
            return importlib.import_module(name)
        file = (path / "__init__.py" if path.is_dir() else path).resolve()
        unique = f"_family_{family_name(file)}_{_digest(file)}"
        if unique in sys.modules:
            return sys.modules[unique]
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(unique, file, submodule_search_locations=inside)
        module = sys.modules[unique] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        try:
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[unique]
            raise
    except Exception as error:
        raise FamilyError(f"the family {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def family_name(file: Path) -> str:
    """The name of a family: that of its file, or of its package's folder."""
    return file.parent.name if file.name == "__init__.py" else file.stem


def home_folder(file: Path) -> Path:
    """Where the kernels, tables and records of a family lie: beside its file."""
    return file.parent / f"{family_name(file)}_tuned"


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:12]


def _home(folder: Path) -> str:
    """The package that the generated modules of a folder are imported from; no other folder has its name."""
    name = f"_tuned_{_digest(folder)}"
    if name not in sys.modules:
        package = types.ModuleType(name, f"What was generated in {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


def kernel_name(family: str, text: tuple[str, ...], spec: Any, variant: Any) -> str:
    """Module and function name of a kernel: the family, then each field of TEXT."""
    values = (getattr(variant if hasattr(variant, name) else spec, name) for name in text)
    return "_".join([family, *(str(value).lower() for value in values)])


def described(module: types.ModuleType) -> Family:
    """The family that a module describes.

    Raises:
        FamilyError: something is missing, or is not what it must be.
    """
    _check(module)
    file = Path(str(module.__file__)).resolve()
    name, text, variant_type = family_name(file), tuple(module.TEXT), module.Variant
    own: Callable[..., str | None] = getattr(module, "rejection", lambda *_: None)
    whole = len(inspect.signature(own).parameters) > 4  # noqa: PLR2004 - ``rejection`` takes the multiprocessors too

    def rule(spec: Any, size: Any, variant: Any, capability: int, multiprocessors: Any = None) -> str | None:
        reason = own(spec, size, variant, capability, *([multiprocessors] if whole else []))
        if reason is not None and not isinstance(reason, str):
            raise FamilyError(f"{file}: rejection must return None or a sentence that says why, got {reason!r}")
        return reason

    def rejection(spec: Any, size: Any, variant: Any, capability: int = 90, multiprocessors: Any = None) -> str | None:
        if getattr(variant, "launch_pdl", False) and capability < PDL_CAPABILITY:
            return f"programmatic dependent launch needs compute capability 9.0, not {capability / 10}"
        return rule(spec, size, variant, capability, multiprocessors)

    def default_variant(spec: Any, size: Any = None) -> Any:
        declared = choices(variant_type)
        every = (dict(zip(declared, values, strict=True)) for values in itertools.product(*declared.values()))
        tried = itertools.chain([variant_type()], (variant_type(**knobs) for knobs in every))
        legal = (v for v in tried if all(rule(spec, size, v, capability) is None for capability in LEAST_SHARED))
        return next(legal, variant_type())

    def kernel_names(spec: Any, variant: Any) -> tuple[str, ...]:
        return (kernel_name(name, text, spec, variant),)

    def launches(spec: Any, variant: Any, call: Any) -> tuple[Step, ...]:
        named = kernel_names(spec, variant)[0]
        steps = module.launches(spec, variant, call)
        if not isinstance(steps, (tuple, list)) or not all(isinstance(step, Step) for step in steps) or not steps:
            raise FamilyError(f"{file}: launches must return a tuple of what own.launch(...) gives, got {steps!r:.200}")
        return tuple(
            dataclasses.replace(step, kernel=named) if isinstance(step, Launch) and not step.kernel else step
            for step in steps
        )

    def named_default(spec: Any, size: Any = None) -> Any:
        variant = module.default_variant(spec, size)
        if not isinstance(variant, variant_type):
            raise FamilyError(f"{file}: default_variant must return a Variant, got {variant!r:.200}")
        return variant

    return Family(
        name=name,
        spec_type=module.Spec,
        size_type=module.Size,
        variant_type=variant_type,
        core_knobs=getattr(module, "CORE_KNOBS", tuple(choices(variant_type))),
        rejection=rejection,
        default_variant=named_default if hasattr(module, "default_variant") else default_variant,
        distance=getattr(module, "distance", octaves),
        adapt=getattr(module, "adapt", lambda variant, _spec, _to: variant),
        fit=getattr(module, "fit", _fitted),
        kernel_names=getattr(module, "kernel_names", kernel_names),
        launches=launches,
        sized=getattr(module, "sized", None),
        reach=getattr(module, "REACH", math.inf),
        home=_home(home_folder(file)),
    )


def octaves(a: Any, b: Any) -> float:
    """How far apart two specs are: octaves of each number; infinite where anything else differs."""
    away = 0.0
    for one, other in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True):
        if type(one) is int and type(other) is int and one > 0 < other:
            away += abs(math.log2(one / other))
        elif one != other:
            return math.inf
    return away


def _fitted(variant: Any, _spec: Any, capability: int) -> Any:
    if getattr(variant, "launch_pdl", False) and capability < PDL_CAPABILITY:
        return dataclasses.replace(variant, launch_pdl=False)
    return variant


def _check(module: types.ModuleType) -> None:
    where = getattr(module, "__file__", None) or module.__name__
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    if missing:
        raise FamilyError(f"{where} is no family yet, it lacks {', '.join(missing)}: {DOCUMENTED}")
    if not re.fullmatch("[a-z][a-z0-9_]*", family_name(Path(where))):
        raise FamilyError(f"the file of a family must be named with small letters, digits and _, got {where}")
    for name, needed in (("Spec", ()), ("Size", ("tokens",)), ("Variant", ("simplicity",))):
        kind = getattr(module, name)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise FamilyError(f"{where}: {name} must be a frozen dataclass, got {kind!r}")
        for attribute in needed:
            if not hasattr(kind, attribute):
                raise FamilyError(
                    f"{where}: {name} must have {attribute!r}: derive it from tuned.own.{name}, or write the property"
                )
        if "__dataclass_fields__" not in vars(kind) and vars(kind).get("__annotations__"):
            raise FamilyError(
                f"{where}: {name} must be a dataclass itself, not by what it derives from: write @dataclass(frozen=True)"
            )
    if "num_warps" not in {field.name for field in dataclasses.fields(module.Variant)}:
        raise FamilyError(
            f"{where}: Variant must have num_warps, the warps of a program: num_warps: int = one_of(1, 2, 4, 8)"
        )
    undeclared = [field.name for field in dataclasses.fields(module.Variant) if "choices" not in field.metadata]
    if undeclared:
        raise FamilyError(f"{where}: each field of Variant must be declared by one_of, got {', '.join(undeclared)}")
    known = {field.name for kind in (module.Spec, module.Variant) for field in dataclasses.fields(kind)}
    strange = [name for name in module.TEXT if name not in known]
    if strange:
        raise FamilyError(f"{where}: TEXT must name fields of Spec or Variant, got {', '.join(strange)}")
