"""A small call or more of every shipped kernel, for compute-sanitizer; each share of them runs in its own process.

`python -m tests.gpu.sanitized SHARE [no-library]` ends with 0 if all results are right. Tensors are strided and
misaligned, and have no memory around them, so an access past the end of one is past its allocation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch

import tests.support.copies
import tests.support.gru_case
import tests.support.gru_gradients
import tests.support.gru_sequences
import tests.support.linear_cat_forms
import tests.support.rope_case
import tuned.nn
from generator.families.gru.texts import gru_texts
from generator.families.gru_cell.texts import gru_gates_specs
from generator.families.rope.texts import (
    angle_gradient_specs,
    append_specs,
    mla_specs,
    norm_specs,
    rope_specs,
    row_specs,
)
from generator.measuring.check import inputs_of
from generator.workload import WORKLOADS
from tests.support.gru_case import GruCase
from tests.support.gru_cell_forms import FORMS as CELLS
from tests.support.gru_sequences import Sequences
from tests.support.linear_cat_forms import FORMS as LINEAR
from tests.support.rope_case import RopeCase
from tests.support.rope_plans import CASES, check
from tests.support.rope_rows import PACKED, PACKED_SEQ
from tests.support.run import run
from tuned.families.choices import choices
from tuned.families.copying import KERNEL as COPY
from tuned.families.gru.launches import kernel_name as gru_name
from tuned.families.gru.launches import launches as gru_launches
from tuned.families.gru.spec import LAYOUTS, GruSpec
from tuned.families.gru.variant import GruVariant, row_variant, widths
from tuned.families.gru_backward.launches import kernel_name as gradient_name
from tuned.families.gru_backward.launches import launches as gradient_launches
from tuned.families.gru_cell.launches import kernel_name as cell_name
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.linear_cat.launches import kernel_name as linear_name
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.rope.launches import kernel_name as rope_name
from tuned.families.rope.launches import kernel_names as rope_names
from tuned.families.rope.launches import launches as rope_launches
from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, default_variant
from tuned.kernels import DIGESTS
from tuned.launching.launcher import PROBE_KERNEL, run_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARES = 12  # processes for each tool: most of their time is PyTorch's start and compiling
X_VIEWS = ("offset", "thirds", "transposed", "swapped", "qkv", "contiguous")
ANGLE_VIEWS = ("strided", "contiguous", "transposed", "strided")
DTYPES = ("float32", "bfloat16", "float16")
NORM_SIZE = RopeSize(2, 7)


@dataclasses.dataclass(frozen=True)
class Deed:
    """Something that runs under the sanitizer."""

    kernels: tuple[str, ...]  # kernels that it launches
    run: Callable[[], Any]
    library: bool = False  # it contains products by the library, whose races are not ours to judge


def deeds() -> list[Deed]:
    """All deeds, always in the same order."""
    return [
        *_rope(),
        *_norms(),
        *_latent(),
        *_learned(),
        *_caches(),
        *_cells(),
        *_linear(),
        *(Deed((COPY,), functools.partial(tests.support.copies.check, seed)) for seed in range(4)),
        *_sequences(),
        *_gradients(),
        *_calls(),
    ]


def share(index: int) -> list[Deed]:
    """The deeds of one process."""
    return deeds()[index::SHARES]


def _rope() -> Iterator[Deed]:
    pairs = RopeVariant(block_tokens=4, block_heads=4)
    both = ((rope_specs(), pairs), (row_specs(), dataclasses.replace(pairs, whole_rows=True)))
    texts = [(spec, variant) for specs, variant in both for spec in specs]
    ships = [(spec, variant) for spec, variant in texts if rope_name(spec, variant) in DIGESTS]
    for at, (spec, variant) in enumerate(ships):
        complete = spec.key_heads > 0
        odd = dataclasses.replace(
            spec,
            layout=("thd", "bshd", "sbhd")[at % 3] if complete else spec.layout,
            dtype=DTYPES[at // 2 % 3],
            heads=5,
            key_heads=2 if complete else 0,
            head_dim=(20, 12)[at % 2],
            rotary_dim=12,
        )
        even = dataclasses.replace(odd, head_dim=128, rotary_dim=(128, 64)[at % 2])
        views = {"x_view": X_VIEWS[at % 6], "angle_view": ANGLE_VIEWS[at % 4], "out_view": "offset"}
        if complete:  # features of both must have the same stride
            views["key_view"] = "packed"
        for case in (_rope_case(odd, **views), _rope_case(even)):
            yield Deed(
                (rope_name(spec, variant),), functools.partial(tests.support.rope_case.assert_right, case, variant)
            )


def _rope_case(spec: Any, **views: str) -> RopeCase:
    if spec.packed:
        return RopeCase(spec, seq=PACKED_SEQ, cu_seqlens=PACKED, **views)
    return RopeCase(spec, seq=7, batch=2, **views)


def _norms() -> Iterator[Deed]:
    """Every text of a rotation with a norm, with odd sizes that no tile divides and even ones; weights' gradients too."""
    for at, plain in enumerate(norm_specs()):
        both = dataclasses.replace(
            plain, layout=("thd", "bshd", "sbhd")[at % 3], dtype=DTYPES[at // 2 % 3], norm=("head", "all")[at // 3 % 2]
        )
        odd = dataclasses.replace(both, heads=5, key_heads=2, head_dim=(20, 12)[at % 2], rotary_dim=12)
        even = dataclasses.replace(both, heads=6, key_heads=1, rotary_dim=(128, 64)[at % 2])
        for spec in (odd, even):
            variant = default_variant(spec, NORM_SIZE)
            yield Deed(rope_names(spec, variant), functools.partial(_normed, spec, variant))


def _latent() -> Iterator[Deed]:
    """Every text of MLA, odd sizes that no tile divides, and even ones; in place threads write what others read."""
    for at, plain in enumerate(mla_specs()):
        both = dataclasses.replace(plain, layout=("thd", "bshd", "sbhd")[at % 3], dtype=DTYPES[at // 2 % 3])
        odd = dataclasses.replace(both, heads=5, head_dim=19, rotary_dim=12, value_dim=9 if both.splits else 0)
        even = dataclasses.replace(
            both, heads=17, deinterleaves=both.deinterleaves or (both.splits and both.style == "half")
        )
        for spec in (odd, even):
            variant = default_variant(spec, NORM_SIZE)
            yield Deed(rope_names(spec, variant), functools.partial(_normed, spec, variant))


def _learned() -> Iterator[Deed]:
    """Every text of the gradient of angles, with odd sizes that no tile divides and even ones."""
    for at, plain in enumerate(angle_gradient_specs()):
        both = dataclasses.replace(
            plain,
            layout=("thd", "bshd", "sbhd")[at % 3],
            dtype=DTYPES[at // 2 % 3],
            angle_entries=("pair", "feature")[at % 2],
        )
        odd = dataclasses.replace(both, heads=5, key_heads=2, head_dim=(20, 12)[at % 2], rotary_dim=12)
        even = dataclasses.replace(both, heads=17, key_heads=1, rotary_dim=(128, 64)[at % 2])
        for spec in (odd, even):
            variant = default_variant(spec, NORM_SIZE)
            yield Deed(rope_names(spec, variant), functools.partial(_normed, spec, variant))


def _normed(spec: RopeSpec, variant: RopeVariant, device: str = "cuda") -> None:
    work = WORKLOADS["rope"]
    size = dataclasses.replace(NORM_SIZE, batch=1) if spec.packed else NORM_SIZE
    call = work.inputs(spec, size, device, 0)
    wanted, bound = work.reference(spec, call)
    before = {name: t.clone() for name, t in inputs_of(call).items()}
    written = [
        call.weight_grad,
        call.key_weight_grad,
        call.partials,
        call.angle_grad,
        None if spec.inplace else call.out,
    ]
    for t in written:
        if t is not None:
            t.fill_(torch.nan)
    run(rope_launches(spec, variant, call))
    assert bool(((call.out.double() - wanted).abs() <= bound).all())
    for name, t in inputs_of(call).items():
        assert torch.equal(t, before[name]), f"{name} was changed"
    for t in (call.weight_grad, call.key_weight_grad, call.angle_grad):
        assert t is None or bool(t.isfinite().all())


def _caches() -> Iterator[Deed]:
    """Every text of a rotation that writes a cache, with odd sizes and even ones; caches of its dtype and of float8."""
    size = RopeSize(1, 19)  # the 16th token has no slot
    for at, plain in enumerate(append_specs()):
        both = dataclasses.replace(
            plain,
            dtype=DTYPES[at // 2 % 3],
            cache_layout=("NHD", "HND")[at % 2],
            key_inplace=at % 3 == 0,
            positions="ids",
        )
        odd = dataclasses.replace(both, heads=5, key_heads=2, head_dim=(20, 12)[at % 2], rotary_dim=12)
        even = dataclasses.replace(both, heads=6, key_heads=1, rotary_dim=(128, 64)[at % 2], cache="float8")
        for spec in (odd, even):
            variant = default_variant(spec, size)
            yield Deed(rope_names(spec, variant), functools.partial(_cached, spec, variant, size))


def _cached(spec: RopeSpec, variant: RopeVariant, size: RopeSize, device: str = "cuda") -> None:
    work = WORKLOADS["rope"]
    call = work.inputs(spec, size, device, 0)
    wanted, bound = work.reference(spec, call)
    before = {name: t.clone() for name, t in inputs_of(call).items()}
    run(rope_launches(spec, variant, call))
    assert bool(((call.out.double() - wanted).abs() <= bound).all())
    for name, t in inputs_of(call).items():
        assert torch.equal(t, before[name]), f"{name} was changed"


def _cells() -> Iterator[Deed]:
    def deed(spec: GruCellSpec, form: str, view: str) -> Deed:
        case = GruCase(spec, batch=5, view=view)
        name = cell_name(spec, CELLS[form])
        library = CELLS[form].by_library
        return Deed((name,), functools.partial(tests.support.gru_case.assert_right, case, CELLS[form]), library)

    for text, view in itertools.product(gru_gates_specs(), ("contiguous", "wide", "transposed")):
        yield deed(GruCellSpec("bfloat16", 70, (20, 3), bias=text.bias, inplace=text.inplace), "library", view)
    for form in ("split", "tile", "padded", "padded_library", "vector", "outer"):
        for dtype, view in (("float32", "wide"), ("bfloat16", "wide"), ("float16", "contiguous")):
            precision = "tf32" if dtype == "float32" else ""
            yield deed(GruCellSpec(dtype, 19, (33, 100), precision=precision), form, view)
        yield deed(GruCellSpec("bfloat16", 64, (64, 128)), form, "contiguous")


def _linear() -> Iterator[Deed]:
    for form, (dtype, view, rows) in itertools.product(
        LINEAR, (("float32", "wide", 5), ("bfloat16", "wide", 17), ("float16", "contiguous", 64))
    ):
        width = 64 if view == "contiguous" else 33
        spec = LinearCatSpec(dtype, (width, 128, 5), 37, precision="tf32" if dtype == "float32" else "")
        right = tests.support.linear_cat_forms.assert_right
        yield Deed((linear_name(spec, LINEAR[form]),), functools.partial(right, spec, rows, LINEAR[form], view))


def _sequences() -> Iterator[Deed]:
    """Every text and way to wait, with rows together and apart; and a program that waits for no other."""
    for text, structure in gru_texts():
        name = gru_name(text, structure)
        if name not in DIGESTS:
            continue
        units, rows = (16, 8) if structure.splits_columns else (32, 32)
        for at, exchange in enumerate(choices(GruVariant)["exchange"]):
            dtype = ("bfloat16", "float32", "float16", "bfloat16")[at]
            spec = dataclasses.replace(text, dtype=dtype, hidden=96, directions=1 if text.stacked else 1 + at % 2)
            if structure.by_row:  # one variant for each size, which waits for nothing
                spec = dataclasses.replace(spec, hidden=(96, 33, 64, 128)[at])
                yield _sequence(name, spec, row_variant(spec.hidden), ("steps", "rows", "apart")[at % 3])
                continue
            if structure.staged:  # with 32 rows, 600 columns are several pieces
                spec, rows = dataclasses.replace(spec, hidden=600), 32
            variant = dataclasses.replace(
                structure,
                block_hidden=units,
                block_batch=rows,
                exchange=exchange,
                prefetch="early" if structure.in_turn else ("early", "late")[at % 2],
                num_warps=8 if structure.staged else 4,
            )
            assert not structure.staged or len(widths(spec, variant)) > 1
            yield _sequence(name, spec, variant, ("steps", "rows", "apart")[at % 3])
    alone = GruVariant("persistent", block_hidden=64)
    yield _sequence("gru_dense_layer_split", GruSpec("bfloat16", 60), alone, "rows")
    steps = GruVariant("steps")
    yield _sequence("gru_thd_layer_split", GruSpec("bfloat16", 90, "thd"), steps, "apart")


def _sequence(name: str, spec: GruSpec, variant: GruVariant, view: str) -> Deed:
    lengths = {"dense": (4, 4, 4), "packed": (4, 3, 1), "thd": (3, 4, 1)}[spec.layout]

    def launch() -> None:
        built = tests.support.gru_sequences.build(Sequences(spec, lengths, view), "cuda")
        for step in gru_launches(spec, variant, built.call):
            run_step(step, lambda found: run([found]))
        torch.cuda.synchronize()
        tests.support.gru_sequences.assert_steps_right(built, keeps_state=variant.by_row)

    return Deed((name,), launch)


def _gradients() -> Iterator[Deed]:
    """Every text of a gradient, with each of its ways to wait, alone and in turn."""
    texts = itertools.product(LAYOUTS, ("counter", "poll", "spin"), (False, True))
    for at, (layout, exchange, resets) in enumerate(texts):
        dtype = ("bfloat16", "float32", "float16")[at // 2 % 3]
        spec = GruSpec(dtype, 96, layout, 1 + at // 2 % 2, resets=resets)
        variant = GruVariant("persistent", block_hidden=16, block_batch=8, exchange=exchange, turns=1 + at // 2 % 2)
        if layout != "thd" or exchange == "counter":
            yield _gradient(spec, variant, ("steps", "rows", "apart")[at // 2 % 3])


def _gradient(spec: GruSpec, variant: GruVariant, view: str) -> Deed:
    lengths = {"dense": (4,) * 17, "packed": (4, 3, 1), "thd": (3, 4, 1)}[spec.layout]

    def launch() -> None:
        built = tests.support.gru_gradients.build(Sequences(spec, lengths, view), "cuda")
        for step in gradient_launches(spec, variant, built.call):
            run_step(step, lambda found: run([found]))
        torch.cuda.synchronize()
        tests.support.gru_gradients.assert_gradients_right(built)

    return Deed((gradient_name(spec, variant),), launch)


def _calls() -> Iterator[Deed]:
    """Public calls: first calls, which look things up, and later ones, which use their plan."""
    for name, case in CASES.items():
        for seq, view in itertools.product((2, 10), ("contiguous", "packed", "offset")):
            if (name, view) == ("qkv in place", "packed"):  # refused, because its heads are not contiguous
                continue
            changed = dataclasses.replace(case, seq=seq, view=view)
            yield Deed((PROBE_KERNEL,), functools.partial(_rope_call, changed))
    for dtype, batch, precise in itertools.product((torch.float32, torch.bfloat16), (1, 3), (False, True)):
        yield Deed((), functools.partial(_gru_call, dtype, batch, precise), library=True)


def _rope_call(case: Any) -> None:
    for _ in range(3):
        check(case, "cuda")


def _gru_call(dtype: torch.dtype, batch: int, precise: bool) -> None:
    """A convolution's result as input: features are strided, and with one sequence a stride has no meaning."""
    module = tuned.nn.GRU(48, 96, batch_first=True, device="cuda", dtype=dtype)
    x = torch.randn(batch, 48, 9, device="cuda", dtype=dtype).transpose(1, 2)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=not precise):
        for _ in range(3):
            module(x)


# The process ----------------------------------------------------------------------------------------------------------


def bare(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Like ``guarded`` but with nothing around it: an access outside of the tensor is outside of its allocation."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def main(index: int, *, library: bool) -> None:
    harnesses: tuple[Any, ...] = (
        tests.support.rope_case, tests.support.gru_case, tests.support.gru_sequences, tests.support.linear_cat_forms
    )  # fmt: skip
    for harness in harnesses:
        harness.guarded, harness.intact = bare, lambda _: True
    torch.manual_seed(0)
    for deed in share(index):
        if library or not deed.library:
            deed.run()
            torch.cuda.synchronize()
    print("all right")  # noqa: T201 - for the test that waits for it


if __name__ == "__main__":
    main(int(sys.argv[1]), library="no-library" not in sys.argv)
