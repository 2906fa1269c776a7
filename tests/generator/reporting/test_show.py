"""`tune.py show`: the file runs on its own, and its results are those of the reference."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generator.families.text import Shown
from generator.measuring.check import worst_error
from generator.rendering.structures import structures
from generator.reporting.show import standalone, winner_of
from generator.selection import SelectionError
from generator.workload import WORKLOADS
from tests.support.records import winner
from tests.support.run import DEVICE, truncates
from tests.support.shown_gru import load
from tuned import dispatch
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.launch import Launch
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant
from tuned.lookup.record import RecordError

SIZE = RopeSize(2, 5)
TILE = {"block_tokens": 2, "block_heads": 2, "num_warps": 1}


def rope(layout: str, rotary: int = 16, variant: dict[str, Any] | None = None, **spec: Any) -> Any:
    made = RopeSpec(layout, spec.pop("dtype", "float32"), 3, 16, rotary, **spec)
    return made, SIZE, RopeVariant(**{**TILE, **(variant or {})})


GATES = GruCellVariant("library", 1, 64, num_warps=2)
FAMILY_OF = {RopeSpec: "rope", GruCellSpec: "gru_cell", LinearCatSpec: "linear_cat"}
CASES = {
    "bshd": rope("bshd"),
    "sbhd-partial-tokens-first": rope("sbhd", 8, {"order": "tokens"}),
    "thd-interleaved": rope("thd", style="interleaved"),
    "bshd-inplace-partial": rope("bshd", 8, inplace=True),
    "bshd-cos-sin-bf16": rope("bshd", angles="cos_sin", angle_dtype="bfloat16", dtype="bfloat16"),
    "bshd-feature-backward": rope("bshd", angle_entries="feature", direction="backward", dtype="float16"),
    "thd-pdl": rope("thd", variant={"pdl": True}),
    "sbhd-inplace": rope("sbhd", 16, inplace=True),
    "bshd-no-hints": rope("bshd", 4, {"cache": "keep"}),
    "gru-cell-split": (
        GruCellSpec("float32", 70, (33, 8), precision="tf32"),
        GruCellSize(3),
        GruCellVariant("split", 16, 32, 64, k_parts=2, num_stages=2, num_warps=2, pdl=True),
    ),
    "gru-cell-padded": (
        GruCellSpec("float16", 27, (33, 8)),
        GruCellSize(17),
        GruCellVariant("padded", 64, 16, 64, k_parts=1, num_stages=2, pdl=True),
    ),
    "gru-cell-padded-library": (
        GruCellSpec("float16", 27, (33, 8), bias=False),
        GruCellSize(17),
        GruCellVariant("padded_library", 2, 64, num_warps=2),
    ),
    "gru-cell-vector": (
        GruCellSpec("float16", 24, (16,), bias=False),
        GruCellSize(2),
        GruCellVariant("vector", 2, 4, 256),
    ),
    "gru-cell-outer": (
        GruCellSpec("float32", 27, (16, 3), precision="ieee"),
        GruCellSize(9),
        GruCellVariant("outer", 4, 8),
    ),
    "gru-cell-library": (GruCellSpec("float32", 70, (8, 3), precision="ieee"), GruCellSize(3), GATES),
    "gru-cell-inplace": (GruCellSpec("float16", 64, (64,), bias=False, inplace=True), GruCellSize(2), GATES),
    "linear-cat-tile": (
        LinearCatSpec("float32", (33, 8), 20, precision="ieee"),
        LinearCatSize(5),
        LinearCatVariant("tile", 16, 16, 64, pdl=True),
    ),
    "linear-cat-padded": (
        LinearCatSpec("float16", (33, 8), 20, bias=False),
        LinearCatSize(17),
        LinearCatVariant("padded", 32, 16, 64, pdl=True),
    ),
    "linear-cat-vector": (
        LinearCatSpec("float16", (33, 8, 4), 20, bias=False),
        LinearCatSize(3),
        LinearCatVariant("vector", 4, 8, 256),
    ),
    "linear-cat-outer": (
        LinearCatSpec("float32", (16, 3), 20, precision="ieee"),
        LinearCatSize(9),
        LinearCatVariant("outer", 4, 8),
    ),
}


def shown(spec: Any, size: Any, variant: Any) -> str:
    family = FAMILY_OF[type(spec)]
    names = WORKLOADS[family].family.kernel_names(spec, variant)
    digests = {name: structures()[name].digest for name in names}
    return standalone(
        dataclasses.replace(
            winner(), name="a_problem", family=family, spec=spec, size=size, variant=variant, digests=digests
        )
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_shown_runs_and_is_right(case: Any, tmp_path: Path) -> None:
    spec, size, variant = case
    family = FAMILY_OF[type(spec)]
    module = load(shown(spec, size, variant), tmp_path)
    work = WORKLOADS[family]
    call = work.inputs(spec, size, DEVICE, 1)
    wanted, bound = work.reference(spec, call)
    if family == "rope":
        function = module.rope_backward if spec.direction == "backward" else module.rope
        angles = [call.cos] if spec.computes_sincos else [call.cos, call.sin]
        with np.errstate(invalid="ignore"):  # NumPy warns of the NaN that an angle past the rows gives
            out = function(call.x, *angles, *([call.cu_seqlens] if spec.packed else []))
        assert (out is call.x) == spec.inplace
    elif family == "gru_cell":
        bias = [call.bias_ih, call.bias_hh] if spec.bias else []
        out = module.gru_cell(*call.segments, call.h, call.weight_ih, call.weight_hh, *bias)
        assert (out is call.h) == spec.inplace
    else:
        out = module.linear_cat(*call.segments, call.weight, *([call.bias] if spec.bias else []))
    # The interpreter truncates bfloat16 stores, which doubles the error of one rounding.
    assert worst_error(out, wanted, bound * (2 if truncates(spec.dtype) else 1)) <= 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_shown_is_self_contained(case: Any) -> None:
    text = shown(*case)
    tree = ast.parse(text)
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert imported == {"torch", "triton", "triton.language"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    kernels = [
        n
        for n in tree.body
        if isinstance(n, ast.FunctionDef) and any("do_not" in ast.dump(d) for d in n.decorator_list)
    ]
    names = WORKLOADS[FAMILY_OF[type(case[0])]].family.kernel_names(*case[::2])
    assert {kernel.name for kernel in kernels} == set(names) - {"copy_rows"}, "PyTorch pads, where a call copies first"
    for kernel in kernels:
        constants = [a for a in kernel.args.args if a.annotation is not None]
        assert len(kernel.args.defaults) == len(constants) > 0
        assert all(isinstance(d, ast.Constant) for d in kernel.args.defaults), "numbers are literals"


def test_any_number_of_tokens_and_any_strides_are_right(tmp_path: Path) -> None:
    spec, _, variant = CASES["bshd"]
    module = load(shown(*CASES["bshd"]), tmp_path)
    work = WORKLOADS["rope"]
    size = RopeSize(1, 7)
    call = work.inputs(spec, size, DEVICE, 2)
    wanted, bound = work.reference(spec, call)
    del variant
    strided = torch.empty(1, 3, 7, 16, device=DEVICE).transpose(1, 2)
    strided.copy_(call.x)
    assert worst_error(module.rope(strided, call.cos[:, None, None, :]), wanted, bound) <= 1
    assert module.rope(strided[:, :0], call.cos).shape == (1, 0, 3, 16)


@pytest.mark.parametrize("name", ["bshd", "thd-interleaved", "bshd-cos-sin-bf16", "bshd-feature-backward"])
@pytest.mark.parametrize("entries", ["pair", "feature"])
@pytest.mark.parametrize("angle_dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_angles_that_dispatch_takes_are_taken(name: str, entries: str, angle_dtype: str, tmp_path: Path) -> None:
    made, size, variant = CASES[name]
    module = load(shown(made, size, variant), tmp_path)
    spec = dataclasses.replace(made, angle_entries=entries, angle_dtype=angle_dtype)
    work = WORKLOADS["rope"]
    if made.computes_sincos and angle_dtype != "float32":
        call = work.inputs(made, size, DEVICE, 1)
        with pytest.raises(ValueError, match=f"freqs must be float32.*, got torch.{angle_dtype}"):
            getattr(module, "rope_backward" if made.direction == "backward" else "rope")(
                call.x, call.cos.to(getattr(torch, angle_dtype)), *([call.cu_seqlens] if made.packed else [])
            )
        return
    call = work.inputs(spec, size, DEVICE, 1)
    wanted, bound = work.reference(spec, call)
    angles = [call.cos] if spec.computes_sincos else [call.cos, call.sin]
    packed = [call.cu_seqlens] if spec.packed else []
    function = module.rope_backward if spec.direction == "backward" else module.rope
    out = function(call.x, *[a[:, None, None, :] for a in angles], *packed)
    assert worst_error(out, wanted, bound * (2 if truncates(spec.dtype) else 1)) <= 1
    backward = spec.direction == "backward"
    served = (dispatch.rope_backward if backward else dispatch.rope)(
        call.x,
        **({"freqs": angles[0]} if spec.computes_sincos else {"cos": angles[0], "sin": angles[1]}),
        tensor_format=spec.layout,
        interleaved=spec.style == "interleaved",
        angle_entries=entries,
        **({"cu_seqlens": call.cu_seqlens} if packed else {}),
    )
    assert worst_error(served, wanted, bound * (2 if truncates(spec.dtype) else 1)) <= 1, "dispatch takes them too"


def test_strides_that_the_problem_had_not_are_right(tmp_path: Path) -> None:
    """For rows of 24 the kernel assumes that 4 divides all strides, but a caller's strides may be others."""
    spec, size, variant = RopeSpec("bshd", "float32", 3, 24, 24), SIZE, RopeVariant(**TILE)
    module = load(shown(spec, size, variant), tmp_path)
    assert "MULTIPLE=multiple" in shown(spec, size, variant)
    work = WORKLOADS["rope"]
    call = work.inputs(spec, size, DEVICE, 2)
    wanted, bound = work.reference(spec, call)
    assert worst_error(module.rope(call.x, call.cos), wanted, bound) <= 1
    odd = torch.empty(2, 5, 3, 25, device=DEVICE)[..., :24]
    odd.copy_(call.x)
    assert worst_error(module.rope(odd, call.cos), wanted, bound) <= 1
    table = torch.empty(call.cos.shape[0], 13, device=DEVICE)[:, :12]
    table.copy_(call.cos)
    assert worst_error(module.rope(call.x, table), wanted, bound) <= 1


def test_angles_that_dispatch_refuses_are_refused(tmp_path: Path) -> None:
    module = load(shown(*CASES["bshd"]), tmp_path)
    x = torch.zeros(2, 5, 3, 16)
    for wrong in (torch.zeros(5, 9), torch.zeros(5, 2, 4), torch.zeros(5, 4)):
        with pytest.raises(ValueError, match=r"freqs must be \[positions, 8\] or \[positions, 16\], got "):
            module.rope(x, wrong)
    module = load(shown(*CASES["bshd-cos-sin-bf16"]), tmp_path)
    x, cos = x.bfloat16(), torch.zeros(5, 8)
    for sin in (cos[:, :4], cos.half()):
        with pytest.raises(ValueError, match="sin must be as cos, got "):
            module.rope(x, cos, sin)
    with pytest.raises(ValueError, match="cos must be float16, bfloat16, float32 or float64, a row a position"):
        module.rope(x, cos.int(), cos.int())


def test_constants_that_not_every_gpu_takes_are_no_defaults() -> None:
    text = shown(*CASES["thd-pdl"])
    assert "    PDL: tl.constexpr = False," in text
    assert "torch.cuda.get_device_capability(x.device) >= (9, 0)" in text
    assert "PDL=dependent, launch_pdl=dependent" in " ".join(text.split())
    assert "dependent" not in shown(*CASES["bshd"]).partition("def rope(")[2]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    module = load(shown(*CASES["bshd"]), tmp_path)
    x, freqs = torch.zeros(2, 5, 3, 16), torch.zeros(5, 8)
    with pytest.raises(ValueError, match=r"x must be float32 \[..., 3, 16\], got torch.float16"):
        module.rope(x.half(), freqs)
    with pytest.raises(ValueError, match=r"x must be float32 \[..., 3, 16\], got .*\(2, 5, 4, 16\)"):
        module.rope(torch.zeros(2, 5, 4, 16), freqs)
    with pytest.raises(ValueError, match=r"freqs must be float32, a row a position, got torch.float32 \(4, 8\)"):
        module.rope(x, freqs[:4])


def test_a_complete_call_is_refused_instead_of_written_wrong() -> None:
    with pytest.raises(RecordError, match="a_problem is a complete RoPE call"):
        shown(*rope("bshd", key_heads=1))


def test_the_arguments_follow_the_names_of_the_parameters() -> None:
    launch = Launch("kernel", 1, (), {}, {"num_warps": 4, "launch_pdl": True})
    names = ("x", "out", "seq", "x_stride_s", "x_stride_b", "out_stride_d", "w_stride", "bias_stride")
    text = Shown(launch, names).text("grid", {"x": "s", "out": "bd"}, {"w": "weight", "bias_stride": "0"}, indent=0)
    arguments = "x, out, seq, x.stride(0), 0, out.stride(1), weight.stride(0), 0"
    assert (
        " ".join(text.split()) == f"kernel[(grid,)]( {arguments}, num_warps=4, PDL=dependent, launch_pdl=dependent, )"
    )


def test_the_header_names_problem_device_and_time() -> None:
    text = shown(*CASES["bshd"])
    doc = ast.get_docstring(ast.parse(text))
    for part in (
        "a_problem",
        "34.50 us on Test GPU",
        "rotary_dim=16",
        "block_tokens=2",
        "python tune.py show a_problem",
    ):
        assert part in doc
    assert str(Path.cwd()) not in text
    assert shown(*CASES["bshd"]) == text


def test_nothing_that_a_record_says_is_run() -> None:
    """A contribution may contain anything: its names and devices are shown as text and never run."""
    worst = 'x"""; import os; os.system("echo run"); """ \\'
    row = winner()
    evil = dataclasses.replace(row, name=worst, environment=row.environment | {"device_name": worst, "triton": worst})
    tree = ast.parse(standalone(evil))
    said = ast.get_docstring(tree) or ""
    assert 'os.system("echo run")' in " ".join(said.split())
    assert {type(node) for node in tree.body} <= {ast.Expr, ast.Import, ast.FunctionDef}
    assert sum(isinstance(node, ast.Expr) for node in tree.body) == 1, "the docstring"


def test_a_problem_or_a_row_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="Did you mean llama3_8b_2x4096"):
        winner_of("llama3_8b_2x409", None, tmp_path)
    with pytest.raises(
        RecordError,
        match=rf"no record of any device in {tmp_path} \(there are: none\): run python tune.py --gpu auto --out {tmp_path}$",
    ):
        winner_of("llama3_8b_2x4096", None, tmp_path)
    with pytest.raises(RecordError, match="no single record of nvidia: name one of nvidia_h100_80gb_hbm3, nvidia_h200"):
        winner_of("llama3_8b_2x4096", "nvidia")
