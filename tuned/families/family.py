"""A kernel family as a record of functions, which dispatch and the generator both use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tuned.families.launch import Step

BUILT_IN = "tuned"  # home of the families that ship with it


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
    fit: Callable[[Any, int], Any]  # (variant, capability) -> the variant, without what the architecture lacks
    kernel_names: Callable[
        [Any, Any], tuple[str, ...]
    ]  # (spec, variant) -> modules in ``kernels`` of its home, in order
    launches: Callable[..., tuple[Step, ...]]  # (spec, variant, call) -> all steps, in order
    home: str = BUILT_IN  # the package whose ``kernels`` and ``tables`` are those of this family


def described(name: str, prefix: str, spec: Any, variant: Any, launches: Any) -> Family:
    """The family whose types start with ``prefix`` and whose functions are in three modules of its folder."""
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
    )
