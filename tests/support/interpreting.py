"""Small kernels for what the interpreter does and refuses: python -m tests.support.interpreting prints results as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from generator.measuring.quick import quick_interpreter
from generator.measuring.shortcuts import FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator


@triton.jit
def operated(a, b, OPERATION: tl.constexpr):  # noqa: PLR0912 - a kernel cannot look an operator up
    if OPERATION == "add":
        c = a + b
    elif OPERATION == "sub":
        c = a - b
    elif OPERATION == "mul":
        c = a * b
    elif OPERATION == "truediv":
        c = a / b
    elif OPERATION == "floordiv":
        c = a // b
    elif OPERATION == "mod":
        c = a % b
    elif OPERATION == "and":
        c = a & b
    elif OPERATION == "or":
        c = a | b
    elif OPERATION == "xor":
        c = a ^ b
    elif OPERATION == "lt":
        c = a < b
    elif OPERATION == "le":
        c = a <= b
    elif OPERATION == "gt":
        c = a > b
    elif OPERATION == "ge":
        c = a >= b
    elif OPERATION == "eq":
        c = a == b
    else:
        c = a != b
    return c


@triton.jit
def numbers(x, y, out, SIZE: tl.constexpr, OPERATION: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i), tl.load(y + i)
    if OPERATION == "scalar":
        c = a + 1
    elif OPERATION == "where":
        c = tl.where((a < b) & (i > 1), a, b).to(tl.float32) * 0.5
    else:
        c = operated(a, b, OPERATION)
    tl.store(out + i, c)


@triton.jit
def shapes(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SECOND: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    a = tl.load(x + rows * COLUMNS + columns, mask=(rows > 0) & (columns < 3), other=2.0)
    b = tl.arange(0, SECOND)
    c = a + b[None, :] + tl.sum(a.to(tl.float32), 1)[:, None]
    product = tl.dot(c.to(tl.float32), tl.trans(c.to(tl.float32)))
    tl.store(out + rows * ROWS + tl.arange(0, ROWS)[None, :], product)


@triton.jit
def operators(x, y, out, number, SIZE: tl.constexpr, OPERATION: tl.constexpr, CONSTANT: tl.constexpr):
    """An operator between two blocks, between a block and a number on either side, and between two scalars."""
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i)[:, None], tl.load(y + i)[None, :]
    first, second = tl.load(x), tl.load(y + 1)
    at = out + SIZE * i[:, None] + i[None, :]
    tl.store(at, operated(a, b, OPERATION).to(tl.float32))
    tl.store(at + SIZE * SIZE, operated(a, CONSTANT, OPERATION).to(tl.float32))
    tl.store(at + 2 * SIZE * SIZE, operated(CONSTANT, b, OPERATION).to(tl.float32))
    tl.store(at + 3 * SIZE * SIZE, operated(a, first, OPERATION).to(tl.float32), mask=(a < second) & (i[None, :] > 0))
    tl.store(at + 4 * SIZE * SIZE, operated(number, b, OPERATION).to(tl.int32).to(tl.float32))
    tl.store(out + 5 * SIZE * SIZE, operated(first, second, OPERATION).to(tl.float32))


INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
OPERATIONS = ("add", "sub", "mul", "scalar", "where")


def tried(kernel: Any, *arguments: Any, out: torch.Tensor) -> str:
    try:
        kernel[(1,)](*arguments)
    except Exception as error:  # noqa: BLE001 - what it says is what counts
        return f"{type(error).__name__}: {error}, after {out.tolist()}"
    return str(out.tolist())


def of_operators() -> Iterator[tuple[str, str]]:
    """Every operator twice for each pair of types, with other numbers: the second run uses what was cached for the first."""
    alone = (
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
    beside = {
        torch.int32: (torch.bool, torch.uint8, torch.int64, torch.float32),
        torch.float32: (torch.int32, torch.float16, torch.bfloat16, torch.float64),
    }
    pairs = [(dtype, dtype) for dtype in alone] + [(a, b) for a, others in beside.items() for b in others]
    for operation in FUNCTIONS:
        for first, second in pairs:
            constant = 0.1 if first.is_floating_point and operation in ("add", "mul", "lt") else 3
            for values in ([7, -6, 5, 1], [0, -1, 2**24 + 1, -9]):
                x, y = torch.tensor(values).to(first), torch.tensor(values[::-1]).to(second)
                y = torch.where(y == 0, torch.ones_like(y), y)  # no division by zero
                out = torch.zeros(6, 4, 4)
                name = f"{operation} {first} {second} {values[0]}"
                yield name, tried(operators, x, y, out, values[1], 4, operation, constant, out=out)


def told() -> dict[str, str]:
    """What each kernel gives for each type, or why it refuses."""
    found = {}
    for dtype in (*INTEGERS, torch.float16, torch.bfloat16, torch.float32):
        most = int(torch.iinfo(dtype).max) if dtype in INTEGERS else 1000
        least = int(torch.iinfo(dtype).min) if dtype in INTEGERS else -1000
        for name, first, second in (
            ("small", [1, 2, 3, 4], [4, 3, 2, 1]),
            ("most", [1, 2, 3, most], [1, 1, 1, 1]),
            ("least", [1, 2, 3, least], [1, 1, 1, 2]),
        ):
            x, y = torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype)
            for operation in OPERATIONS:
                out = torch.zeros(4, dtype=torch.float32 if operation == "where" else dtype)
                found[f"{operation} {name} {dtype}"] = tried(numbers, x, y, out, 4, operation, out=out)
    for dtype in (torch.float16, torch.float32, torch.int32):
        for second in (1, 2, 4):  # 2 cannot be broadcast to 4; 1 can
            x, out = torch.arange(16).view(4, 4).to(dtype), torch.zeros(4, 4)
            found[f"shapes {second} {dtype}"] = tried(shapes, x, out, 4, 4, second, out=out)
    found |= of_operators()
    x, out = torch.zeros(4), torch.zeros(4)
    found["no power of two"] = tried(numbers, x, x, out, 3, "add", out=out)
    found["no number"] = tried(numbers, x, x, out, 2.0, "add", out=out)
    found["two types"] = tried(numbers, x, torch.zeros(4, dtype=torch.int64), out, 4, "mul", out=out)
    found["pointers"] = tried(numbers, x, 7, out, 4, "add", out=out)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "quick":
        with quick_interpreter():
            sys.stdout.write(json.dumps(told()))
    else:
        sys.stdout.write(json.dumps(told()))
