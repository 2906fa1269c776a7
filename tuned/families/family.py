"""A kernel family as a record of functions, which dispatch and the generator both use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from tuned.families.launch import Step

BUILT_IN = "tuned"  # home of the families that ship with this package


@dataclasses.dataclass(frozen=True)
class Model:
    """What the time of a call is made of. tuned.lookup.model weighs the amounts, and picks."""

    kernels: Callable[[Any, Any, Any], dict[str, float]]  # (spec, size, variant) -> amounts
    library: Callable[
        [Any, Any], tuple[str, dict[str, float]]
    ]  # (spec, size) -> which weights, amounts of PyTorch's operator
    projection: Callable[[Any, Any], dict[str, float]]  # (spec, size) -> amounts of what runs beside the kernels
    candidates: Callable[[Any, Any, int, int], tuple[Any, ...]]  # (spec, size, capability, multiprocessors) -> variants
    handicap: Callable[[Any, Any], float]  # (variant, variant -> octaves to a row that it won) -> factor on its time
    octaves: Callable[[Any, Any, Any, Any], float]  # (spec, size, another spec, its size) -> how far they are apart
    margin: Callable[
        [Any, Any], float
    ]  # (spec, variant) -> the largest part of PyTorch's time that the variant's estimate may be if it is to be chosen
    alike: Callable[[Any], Any]  # (size) -> the size that stands for all lengths that share its pick
    covers: Callable[[Any], bool]  # (variant) -> whether ``kernels`` describes it
    # (spec, size) -> the variant with a product of the library and a kernel for each step, and its amounts; None if it does not take
    # the spec, or was not measured
    steps: Callable[[Any, Any], tuple[Any, dict[str, float]] | None]


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family must provide; spec, size and variant are frozen dataclasses of the types named here."""

    name: str
    spec_type: type
    size_type: type
    variant_type: type
    core_knobs: tuple[str, ...]  # if a rule excludes their values, it does so whatever the other knobs are
    # (spec, size or None, variant, capability, multiprocessors or None) -> why it is not tried, or None
    rejection: Callable[..., str | None]
    default_variant: Callable[..., Any]  # (spec, size or None) -> a legal variant for any spec
    distance: Callable[[Any, Any], float]  # (spec, spec) -> distance for the choice of a variant, in octaves
    adapt: Callable[[Any, Any, Any], Any]  # (variant, its spec, another spec) -> the variant for the other spec
    # (variant, spec, capability) -> the variant, without what the architecture lacks for this spec
    fit: Callable[[Any, Any, int], Any]
    kernel_names: Callable[
        [Any, Any], tuple[str, ...]
    ]  # (spec, variant) -> modules in ``kernels`` of its home, in order
    launches: Callable[..., tuple[Step, ...]]  # (spec, variant, call) -> all steps, in order
    # (spec of a row, spec, size, octaves between) -> why the row does not say that a kernel beats PyTorch's operator there, or None
    doubt: Callable[[Any, Any, Any, float], str | None] | None = None
    # (row, spec, size) -> the lead over PyTorch's operator that the row must have for each octave to a call; None: the usual lead
    lead: Callable[[Any, Any, Any], float | None] | None = None
    # (row, spec, size) -> how many times as long as at the row its kernel takes at a call, at least; None: as long
    grows: Callable[[Any, Any, Any], float] | None = None
    # (spec, size) -> the least time of a call of PyTorch's operator, us, whatever a row says that its kernels take; 0: the device decides
    least_us: Callable[[Any, Any], float] | None = None
    # (spec, size, variant) -> why a call takes the host longer with the variant than with PyTorch's operator, or None
    spends: Callable[[Any, Any, Any], str | None] | None = None
    # (variant of a row, spec, size, multiprocessors) -> the variant as a call of that size needs it
    sized: Callable[[Any, Any, Any, int], Any] | None = None
    reach: float = math.inf  # octaves: a call further than that from every row gets the default variant
    model: Model | None = None  # of the time, if a model serves calls without a row
    home: str = BUILT_IN  # the package whose ``kernels`` and ``tables`` are those of this family


def brought(family: Family, variant: Any, spec: Any, to: Any, capability: int) -> Any:
    """A variant that was tuned for one spec, brought to another spec and any GPU: what a GPU lacks depends on the new spec."""
    return family.fit(family.adapt(variant, spec, to), to, capability)


def described(  # noqa: PLR0913 - the modules of a family
    name: str, prefix: str, spec: Any, variant: Any, launches: Any, model: Any = None
) -> Family:
    """The family whose types start with ``prefix`` and whose functions are in three or four modules of its folder."""
    return Family(
        name=name,
        spec_type=getattr(spec, f"{prefix}Spec"),
        size_type=getattr(spec, f"{prefix}Size"),
        variant_type=getattr(variant, f"{prefix}Variant"),
        core_knobs=variant.CORE_KNOBS,
        rejection=variant.rejection,
        default_variant=variant.default_variant,
        distance=variant.distance,
        adapt=variant.adapt,
        fit=variant.fit,
        kernel_names=launches.kernel_names,
        launches=launches.launches,
        doubt=getattr(variant, "doubt", None),
        lead=getattr(variant, "lead", None),
        grows=getattr(variant, "grows", None),
        sized=getattr(variant, "sized", None),
        reach=getattr(variant, "REACH", math.inf),
        model=None if model is None else Model(**{f.name: getattr(model, f.name) for f in dataclasses.fields(Model)}),
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call worth timing."""

    name: str  # unique: model, tensor, layout, size
    family: str
    spec: Any
    size: Any
