"""A kernel family, as a record of functions: what dispatch and the generator both ask of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tuned.gru.launches
import tuned.gru.spec
import tuned.gru.variant
import tuned.gru_cell.launches
import tuned.gru_cell.spec
import tuned.gru_cell.variant
import tuned.linear_cat.launches
import tuned.linear_cat.spec
import tuned.linear_cat.variant
import tuned.rope.launches
import tuned.rope.spec
import tuned.rope.variant
from tuned.launch import Step


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family must answer; spec, size and variant are frozen dataclasses of the types named here."""

    name: str
    spec_type: type
    size_type: type
    variant_type: type
    core_knobs: tuple[str, ...]  # what excludes a variant whatever the other knobs say
    # (spec, size or None, variant, capability, multiprocessors or None) -> why it is not tried, or None
    rejection: Callable[..., str | None]
    default_variant: Callable[..., Any]  # (spec, size or None) -> a legal variant for any spec
    distance: Callable[[Any, Any], float]  # (spec, spec) -> how unlike for the choice of a variant, in octaves
    adapt: Callable[[Any, Any, Any], Any]  # (variant, its spec, another) -> it, as the other should take it
    fit: Callable[[Any, int], Any]  # (variant, capability) -> it, without what the architecture lacks
    kernel_names: Callable[[Any, Any], tuple[str, ...]]  # (spec, variant) -> modules in tuned.kernels, in order
    launches: Callable[..., tuple[Step, ...]]  # (spec, variant, call) -> all that runs, in order


FAMILIES = {
    "rope": Family(
        name="rope",
        spec_type=tuned.rope.spec.RopeSpec,
        size_type=tuned.rope.spec.RopeSize,
        variant_type=tuned.rope.variant.RopeVariant,
        core_knobs=tuned.rope.variant.CORE_KNOBS,
        rejection=tuned.rope.variant.rejection,
        default_variant=tuned.rope.variant.default_variant,
        distance=tuned.rope.variant.distance,
        adapt=tuned.rope.variant.adapt,
        fit=tuned.rope.variant.fit,
        kernel_names=tuned.rope.launches.kernel_names,
        launches=tuned.rope.launches.launches,
    ),
    "gru_cell": Family(
        name="gru_cell",
        spec_type=tuned.gru_cell.spec.GruCellSpec,
        size_type=tuned.gru_cell.spec.GruCellSize,
        variant_type=tuned.gru_cell.variant.GruCellVariant,
        core_knobs=tuned.gru_cell.variant.CORE_KNOBS,
        rejection=tuned.gru_cell.variant.rejection,
        default_variant=tuned.gru_cell.variant.default_variant,
        distance=tuned.gru_cell.variant.distance,
        adapt=tuned.gru_cell.variant.adapt,
        fit=tuned.gru_cell.variant.fit,
        kernel_names=tuned.gru_cell.launches.kernel_names,
        launches=tuned.gru_cell.launches.launches,
    ),
    "linear_cat": Family(
        name="linear_cat",
        spec_type=tuned.linear_cat.spec.LinearCatSpec,
        size_type=tuned.linear_cat.spec.LinearCatSize,
        variant_type=tuned.linear_cat.variant.LinearCatVariant,
        core_knobs=tuned.linear_cat.variant.CORE_KNOBS,
        rejection=tuned.linear_cat.variant.rejection,
        default_variant=tuned.linear_cat.variant.default_variant,
        distance=tuned.linear_cat.variant.distance,
        adapt=tuned.linear_cat.variant.adapt,
        fit=tuned.linear_cat.variant.fit,
        kernel_names=tuned.linear_cat.launches.kernel_names,
        launches=tuned.linear_cat.launches.launches,
    ),
    "gru": Family(
        name="gru",
        spec_type=tuned.gru.spec.GruSpec,
        size_type=tuned.gru.spec.GruSize,
        variant_type=tuned.gru.variant.GruVariant,
        core_knobs=tuned.gru.variant.CORE_KNOBS,
        rejection=tuned.gru.variant.rejection,
        default_variant=tuned.gru.variant.default_variant,
        distance=tuned.gru.variant.distance,
        adapt=tuned.gru.variant.adapt,
        fit=tuned.gru.variant.fit,
        kernel_names=tuned.gru.launches.kernel_names,
        launches=tuned.gru.launches.launches,
    ),
}
