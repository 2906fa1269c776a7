"""What tuning needs to know of the GRU cell besides its kernels: inputs, the float64 reference, baselines, problems."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from generator.families.rope import SMALLEST, UNIT_ROUNDOFF
from generator.problem import Problem
from tuned.families.gru_cell.eager import cell
from tuned.families.gru_cell.launches import GruCellCall, call_of
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant

if TYPE_CHECKING:
    from collections.abc import Iterator

TF32_ROUNDOFF = 2.0**-11  # of an operand: 10 bits of fraction


def inputs(spec: GruCellSpec, size: GruCellSize, device: str, seed: int) -> GruCellCall:
    """One set of random inputs, weights as torch.nn.GRUCell draws them; out not filled."""
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor if generator is None else tensor.uniform_(-scale, scale, generator=generator)

    wide, scale = 3 * spec.hidden, spec.hidden**-0.5
    segments = tuple(drawn(size.batch, width, scale=1.7) for width in spec.inputs)  # of variance 1
    h = drawn(size.batch, spec.hidden)
    weights = drawn(wide, spec.input_size, scale=scale), drawn(wide, spec.hidden, scale=scale)
    biases = (drawn(wide, scale=scale), drawn(wide, scale=scale)) if spec.bias else ()
    return call_of(segments, h, *weights, h if spec.inplace else torch.empty_like(h), *biases)


def product_error(spec: Any, sizes: torch.Tensor) -> torch.Tensor:
    """What float32 sums of products may be off by, given the sums of the products' sizes.

    Any order of at most 2^12 additions stays well within 2^-17 of that sum: a bound for each would be 2^-24 times the
    longest chain, and tensor cores keep a few bits fewer while they add. TF32 rounds both operands first.
    """
    operands = 2 * TF32_ROUNDOFF if spec.precision == "tf32" else 0.0
    return sizes * (2.0**-17 + operands)


def reference(spec: GruCellSpec, call: GruCellCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that may be left, per element.

    The bound: half a unit in the last place of the result; 32 x 2^-24 of the terms, for the float32 operations of the
    gates; and the errors of the six sums: those of ``product_error``, and one rounding to the dtype, since the
    library's products are stored, as those of torch.nn.GRUCell are. They reach the result through slopes of at most 1/4
    (sigmoid), 1 (tanh), |g_n| (of r) and |h - n| (of z).
    """
    x = torch.cat([segment.double() for segment in call.segments], -1)
    h, zero = call.h.double(), torch.zeros((), dtype=torch.float64, device=call.h.device)
    w_ih, w_hh = call.weight_ih.double(), call.weight_hh.double()
    b_ih, b_hh = (call.bias_ih.double(), call.bias_hh.double()) if spec.bias else (zero, zero)
    i, g = x @ w_ih.T, h @ w_hh.T
    rounding = UNIT_ROUNDOFF[spec.dtype]
    error_i = product_error(spec, x.abs() @ w_ih.abs().T) + rounding * i.abs()
    error_g = product_error(spec, h.abs() @ w_hh.abs().T) + rounding * g.abs()
    i_r, i_z, i_n = (i + b_ih).chunk(3, -1)
    g_r, g_z, g_n = (g + b_hh).chunk(3, -1)
    r, z = torch.sigmoid(i_r + g_r), torch.sigmoid(i_z + g_z)
    n = torch.tanh(i_n + r * g_n)
    out = n + z * (h - n)
    (error_ir, error_iz, error_in), (error_gr, error_gz, error_gn) = error_i.chunk(3, -1), error_g.chunk(3, -1)
    error_n = error_in + error_gn + 0.25 * (error_ir + error_gr) * g_n.abs()
    products = error_n + 0.25 * (error_iz + error_gz) * (h - n).abs()
    scale = 1 + h.abs() + i_n.abs() + g_n.abs()
    return out, products + out.abs() * rounding + SMALLEST[spec.dtype] + 32 * 2.0**-24 * scale


def eager(spec: GruCellSpec, call: GruCellCall) -> Any:
    """The baseline: torch's own cell."""
    return lambda: cell(spec, call)


def bytes_moved(spec: GruCellSpec, size: GruCellSize) -> int:
    """Bytes that must move: weights, x and h read, h' written."""
    return spec.weight_bytes() + size.batch * spec.bytes_per_row()


def tensor_bytes(spec: GruCellSpec, size: GruCellSize) -> int:
    """Bytes of one set of inputs and outputs, weights too: so that in turn each set's are cold."""
    return bytes_moved(spec, size)


def features(variant: GruCellVariant) -> tuple[int, ...]:
    """What a model of the time should see beside the knobs, in octaves: units x rows of a tile, and of a warp."""
    elements = variant.block_batch * variant.block_hidden
    return round(math.log2(elements)), round(math.log2(elements / variant.num_warps))


def tile(spec: GruCellSpec, variant: GruCellVariant) -> tuple[int, int]:
    """Rows, and units of each, that a program takes at a time."""
    del spec
    return variant.block_batch, variant.block_hidden


def problems() -> Iterator[Problem]:
    """The default problems: steps that models take one at a time, most common first."""

    def problem(name: str, spec: GruCellSpec, batch: int) -> Problem:
        return Problem(f"gru_cell_{name}_{batch}", "gru_cell", spec, GruCellSize(batch))

    def square(hidden: int, dtype: str = "bfloat16", **rest: Any) -> GruCellSpec:
        return GruCellSpec(dtype, hidden, (hidden,), **rest)

    for hidden, batch in ((512, 1), (1024, 1), (1024, 16), (1024, 64), (1024, 256), (2048, 1), (2048, 64), (512, 1024)):
        yield problem(str(hidden), square(hidden), batch)
    yield problem("512", square(512), 64)
    yield problem("1024_inplace", square(1024, inplace=True), 64)
    for batch in (1, 128):  # of embedding and context: the seq2seq decoder of examples/
        yield problem("decoder", GruCellSpec("bfloat16", 512, (256, 512)), batch)
    # github.com/bentrevett/pytorch-seq2seq, notebook 3: embedding 256, context of both directions 2 * 512
    yield problem("bahdanau", GruCellSpec("bfloat16", 512, (256, 1024)), 128)
    for hidden, batch in ((128, 256), (128, 4096), (256, 256), (256, 4096)):  # PPO's policies, acting
        yield problem(f"ppo_{hidden}", square(hidden), batch)
    for hidden, batch in ((200, 16), (200, 1024), (600, 16), (600, 1024)):  # Dreamer: a step, and its imagination
        yield problem(f"dreamer_{hidden}", square(hidden), batch)
    for hidden, batch in ((512, 11), (896, 1), (896, 11)):  # WaveRNN, generating; github.com/fatchord/WaveRNN has 512
        yield problem(f"wavernn_{hidden}", square(hidden), batch)
    for batch in (1, 64):
        yield problem("512_tf32", square(512, "float32", precision="tf32"), batch)
    yield problem("1024_fp16", square(1024, "float16"), 64)
