"""Covering sets: a few of many combinations that hold every pair of values the many hold."""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def covering(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A small subset of ``rows`` with every pair of values of two fields that any row has, chosen greedily."""
    rows = list(rows)
    masks = _masks(rows)
    # A row brings at most what it brought when it was looked at last: only what may be the best is counted again.
    heap = [(-mask.bit_count(), at) for at, mask in enumerate(masks)]
    heapq.heapify(heap)
    left, chosen = functools.reduce(operator.or_, masks, 0), []
    while left:
        _, at = heapq.heappop(heap)
        again = (-(masks[at] & left).bit_count(), at)
        if heap and heap[0] < again:
            heapq.heappush(heap, again)
            continue
        chosen.append(rows[at])
        left &= ~masks[at]
    return chosen


def _masks(rows: list[dict[str, Any]]) -> list[int]:
    """For each row a number with a bit for each pair of values of two fields: wherever tests are collected, so with NumPy."""
    if not rows:
        return []
    numbers: list[np.ndarray] = []
    for field in rows[0]:
        ids: dict[Any, int] = {}
        numbers.append(np.array([ids.setdefault(row[field], len(ids)) for row in rows]))
    bits = []
    for first, second in itertools.combinations(numbers, 2):
        codes = first * (int(second.max()) + 1) + second
        bits.append(codes[:, None] == np.unique(codes))
    if not bits:
        return [0] * len(rows)
    packed = np.packbits(np.concatenate(bits, axis=1), axis=1)
    return [int.from_bytes(line.tobytes(), "big") for line in packed]


def product(axes: dict[str, tuple[Any, ...]], legal: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Every legal combination of the values of ``axes``."""
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [row for row in rows if legal(row)]


def sample(
    axes: dict[str, tuple[Any, ...]], legal: Callable[[dict[str, Any]], bool], count: int
) -> list[dict[str, Any]]:
    """``count`` legal combinations drawn at random, the same each time: for axes whose product is too large."""
    # What random.choice does, in half the time: hundreds of thousands are drawn wherever tests are collected.
    bits = random.Random(0).getrandbits
    counted = [(name, values, len(values), len(values).bit_length()) for name, values in axes.items()]
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        row = {}
        for name, values, many, width in counted:
            index = bits(width)
            while index >= many:
                index = bits(width)
            row[name] = values[index]
        if legal(row):
            rows.append(row)
    return rows


def on_a_gpu(count: int) -> int:
    """So many rows where there is a GPU: elsewhere their tests are collected and not run, which a few show as well."""
    return count if torch.cuda.is_available() else count // 50
