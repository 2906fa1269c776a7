"""The grid of arguments on a GPU: cases through the public call and autograd, against float64 and the studies' formula.

Compiling takes far longer than running.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import TYPE_CHECKING, Any

import torch

from tuned.dispatch import rope

if TYPE_CHECKING:
    from collections.abc import Iterator

U32 = 2.0**-24  # unit roundoff of float32
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DIMS = (  # heads, head_dim, rotary_dim
    (16, 64, 64),
    (8, 128, 128),
    (5, 128, 64),
    (3, 80, 20),
    (2, 96, 48),
    (4, 256, 64),
    (1, 512, 512),
    (7, 5, 4),
)
# batch, seq; in thd the batch is a number of sequences. Most sizes need no new kernel, although bounds are new.
SIZES = (
    *((1, 1), (8, 1), (1, 7), (2, 16), (3, 33), (1, 64), (2, 130), (1, 257)),
    *((5, 1), (3, 2), (2, 9), (4, 16), (1, 31), (2, 48), (7, 65), (3, 127)),
    *((6, 1), (16, 1), (1, 2), (3, 5), (9, 3), (4, 4), (5, 12), (1, 16)),
    *((4, 17), (2, 33), (8, 31), (2, 64), (1, 100), (1, 128), (2, 255), (1, 300)),
)
VIEWS = ("contiguous", "tokens", "features")  # transposed as in TransformerEngine's tests: axes (0, 1), and axes (2, 3)
PADDING = 3  # tokens of no sequence at the end of a packed tensor


@dataclasses.dataclass(frozen=True)
class Combination:
    """The arguments that one test function keeps fixed."""

    layout: str
    style: str
    dtype: str
    angles: str  # "freqs" or "cos_sin"
    entries: str
    inplace: bool

    def __str__(self) -> str:
        output = "inplace" if self.inplace else "copy"
        return f"{self.layout}-{self.style}-{self.dtype}-{self.angles}-{self.entries}-{output}"

    def dims(self) -> tuple[int, int, int]:
        """A row of DIMS; an eighth of the combinations shares each row, to save compiling; every two values meet."""
        return DIMS[zlib.crc32(str(self).encode()) % len(DIMS)]


COMBINATIONS = [
    Combination(*values)
    for values in itertools.product(
        ("sbhd", "bshd", "thd"),
        ("half", "interleaved"),
        DTYPES,
        ("freqs", "cos_sin"),
        ("feature", "pair"),
        (False, True),
    )
]


@dataclasses.dataclass
class Report:
    """The results of one combination."""

    forward: int = 0  # cases
    backward: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)  # one sentence for each
    ulps: float = 0.0  # float32: the largest distance to the studies' formula, in units of a pair's size


@dataclasses.dataclass(frozen=True)
class Case:
    """One call."""

    combination: Combination
    heads: int
    head_dim: int
    rotary_dim: int
    batch: int
    seq: int
    view: str

    def __str__(self) -> str:
        rest = (self.heads, self.head_dim, self.rotary_dim, self.batch, self.seq, self.view)
        return f"{self.combination} h, d, r, b, s, view = {rest}"


def cases(combination: Combination, every: int = 1) -> Iterator[Case]:
    """The cases of a combination, or each ``every``th."""
    for size, view in itertools.islice(itertools.product(SIZES, VIEWS), 0, None, every):
        yield Case(combination, *combination.dims(), *size, view)


def _tensor(case: Case, draw: torch.Generator) -> torch.Tensor:
    """Normal numbers in the case's layout, transposed in memory as its view says."""
    lengths = _lengths(case)
    tokens = {
        "bshd": (case.batch, case.seq),
        "sbhd": (case.seq, case.batch),
        "thd": (sum(lengths) + PADDING,),
    }[case.combination.layout]
    shape = (*tokens, case.heads, case.head_dim)
    swap = {"contiguous": None, "tokens": (0, 1), "features": (-2, -1)}[case.view]
    axes = list(shape)
    if swap is not None:
        axes[swap[0]], axes[swap[1]] = axes[swap[1]], axes[swap[0]]
    x = torch.randn(axes, generator=draw, device="cuda").to(DTYPES[case.combination.dtype])
    return x if swap is None else x.transpose(*swap)


def _lengths(case: Case) -> list[int]:
    """Lengths of the packed sequences: ragged, and an empty one comes after the first."""
    return [case.seq, 0, *(case.seq - index % case.seq for index in range(1, case.batch))]


def _positions(case: Case) -> torch.Tensor:
    """Positions [tokens] of the tokens that rotate, without the padding of a packed call."""
    if case.combination.layout != "thd":
        return torch.arange(case.seq, device="cuda")
    return torch.cat([torch.arange(length, device="cuda") for length in _lengths(case)])


def formula(
    case: Case, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """The studies' PyTorch formula in the dtype of x; cos and sin have a row a token, an entry a feature.

    ``transposed``: its gradient, as PyTorch's autograd would compute it in the same dtype.
    """
    layout, interleaved = case.combination.layout, case.combination.style == "interleaved"
    rows = {"bshd": (1, -1, 1), "sbhd": (-1, 1, 1), "thd": (-1, 1)}[layout]
    cos, sin = (a.to(x.dtype).reshape(*(len(a) if n == -1 else n for n in rows), a.shape[-1]) for a in (cos, sin))
    tokens = cos.shape[0] if layout == "thd" else None
    padding, held = (x[tokens:], x[:tokens]) if layout == "thd" else (None, x)
    turning, tail = held[..., : case.rotary_dim], held[..., case.rotary_dim :]

    def exchanged(t: torch.Tensor, sign: int) -> torch.Tensor:
        if interleaved:
            return torch.stack((-sign * t[..., 1::2], sign * t[..., 0::2]), -1).flatten(-2)
        low, high = t.chunk(2, -1)
        return torch.cat((-sign * high, sign * low), -1)

    other = exchanged(turning * sin, -1) if transposed else exchanged(turning, 1) * sin
    turned = turning * cos + other
    out = torch.cat((turned, tail), -1)
    return out if padding is None else torch.cat((out, padding), 0)


def _size(case: Case, x: torch.Tensor) -> torch.Tensor:
    """|first| + |second| of each element's pair, zero where a value is copied: float32 errors are fractions of it."""
    ones = torch.ones((len(_positions(case)), case.rotary_dim), dtype=x.dtype, device=x.device)
    moved = formula(case, x.abs(), ones * 0, ones)  # the other feature of the pair, up to its sign
    size = x.abs() + moved.abs()
    size[..., case.rotary_dim :] = 0
    if case.combination.layout == "thd":
        size[-PADDING:] = 0
    return size


def _ulp(values: torch.Tensor, dtype: str) -> torch.Tensor:
    precision, smallest = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}[dtype]
    _, exponent = torch.frexp(values)
    return torch.ldexp(torch.ones_like(values), (exponent - precision).clamp(min=smallest))


class _Angles:
    """The angles of a case: those of the call, and for the formulas a row a token, an entry a feature."""

    def __init__(self, case: Case, draw: torch.Generator) -> None:
        combination = case.combination
        width = case.rotary_dim if combination.entries == "feature" else case.rotary_dim // 2
        rows = case.seq + 5
        rows += rows == case.heads  # the call would warn of a table that fits only the heads, as one of [b, h, s, d]
        freqs = torch.randn((rows, width), generator=draw, device="cuda")
        self.given: dict[str, torch.Tensor]
        if combination.angles == "freqs":
            self.given = {"freqs": freqs[:, None, None] if combination.entries == "feature" else freqs}
            self.exact = freqs.double().cos(), freqs.double().sin()
            self.plain = freqs.cos(), freqs.sin()
        else:
            # 16-bit calls with an entry for each pair get 16-bit tables, as from flash-attention's callers.
            dtype = DTYPES[combination.dtype] if combination.entries == "pair" else torch.float32
            self.given = {"cos": freqs.cos().to(dtype), "sin": freqs.sin().to(dtype)}
            self.exact = self.given["cos"].double(), self.given["sin"].double()
            self.plain = self.given["cos"], self.given["sin"]
        self.exact = tuple(self._rows(case, a) for a in self.exact)
        self.plain = tuple(self._rows(case, a) for a in self.plain)

    @staticmethod
    def _rows(case: Case, a: torch.Tensor) -> torch.Tensor:
        if case.combination.entries == "pair":
            a = a.repeat_interleave(2, -1) if case.combination.style == "interleaved" else torch.cat((a, a), -1)
        return a[_positions(case)]


def _judge(case: Case, what: str, got: torch.Tensor, x: torch.Tensor, *, angles: _Angles, report: Report) -> None:
    """Compare a result with float64 and with the studies' formula in the dtype of x."""
    transposed = what == "backward"
    exact = formula(case, x.double(), *angles.exact, transposed=transposed)
    plain = formula(case, x, *angles.plain, transposed=transposed)
    size = _size(case, x.double())
    # 2 units in the last place of sine and cosine, a product and a sum, twice: tests/support/oracle.py explains it.
    arithmetic = 4 * U32 * size
    error = (got.double() - exact).abs()
    right = error <= arithmetic + 0.5 * _ulp(exact.abs() + arithmetic, case.combination.dtype) * (size > 0)
    distance = (got.double() - plain.double()).abs()
    if case.combination.dtype == "float32":
        # The formula may err as much as the kernel.
        near = distance <= 2 * arithmetic
        report.ulps = max(report.ulps, float((distance / _ulp(size, "float32")).max())) if got.numel() else report.ulps
    else:
        # Both are 16-bit numbers; the kernel's is the nearest one, up to the float32 arithmetic before.
        near = error <= (plain.double() - exact).abs() + 2 * arithmetic
    if not bool((right & near).all()):
        worst = float((error / (arithmetic + 1e-300)).nan_to_num(nan=torch.inf).max())
        report.wrong.append(
            f"{what} {case}: {int((~right).sum())} of {got.numel()} elements beyond one rounding of float64, "
            f"{int((~near).sum())} further off than the formula; worst error {worst:.3g} times float32's"
        )


def run_case(case: Case, report: Report) -> None:
    """Run one forward case and one backward case."""
    draw = torch.Generator("cuda").manual_seed(zlib.crc32(str(case).encode()))
    combination = case.combination
    x = _tensor(case, draw)
    angles = _Angles(case, draw)
    arguments: dict[str, Any] = {
        **angles.given,
        "tensor_format": combination.layout,
        "interleaved": combination.style == "interleaved",
        "inplace": combination.inplace,
        "angle_entries": combination.entries,
    }
    if combination.layout == "thd":
        bounds = [0, *itertools.accumulate(_lengths(case))]
        arguments["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    before = x.clone()
    leaf = x.detach().requires_grad_()
    if combination.inplace:
        target = x.detach().clone(memory_format=torch.preserve_format)  # a leaf cannot be overwritten, this can
        out = rope(target, **arguments)
        if out.data_ptr() != target.data_ptr():
            report.wrong.append(f"forward {case}: the result in place is another tensor")
        result = rope(leaf.clone(memory_format=torch.preserve_format), **arguments)
    else:
        out = result = rope(leaf, **arguments)
    report.forward += 1
    _judge(case, "forward", out.detach(), before, angles=angles, report=report)
    grad = torch.randn(x.shape, generator=draw, device="cuda").to(x.dtype)
    grad_before = grad.clone()
    result.backward(grad)
    report.backward += 1
    _judge(case, "backward", leaf.grad, grad_before, angles=angles, report=report)
    if not (torch.equal(x, before) and torch.equal(grad, grad_before)):
        report.wrong.append(f"{case}: an input was changed")


def run_combination(combination: Combination, every: int = 1) -> Report:
    """Run every case of a combination, or each ``every``th."""
    report = Report()
    for case in cases(combination, every):
        try:
            run_case(case, report)
        except Exception as error:  # noqa: BLE001, PERF203 - the other cases still say something
            report.wrong.append(f"{case}: {type(error).__name__}: {error}")
            if "CUDA" in str(error):
                break  # the CUDA context may be lost
    return report
