"""Covering sets: a few combinations of many, with every pair of values that occurs in the many."""

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
    """A small subset of ``rows``, chosen greedily, with every pair of values of two fields that any row has."""
    rows = list(rows)
    masks = _masks(rows)
    # A row never brings more new pairs than when it was counted last, so only rows that may be the best are counted again.
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
    """For each row a number with a bit for each pair of values of two fields. With NumPy: each collection of tests runs this."""
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
    # As random.choice, in half the time: each collection of tests draws hundreds of thousands of values.
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
    """``count`` with a GPU, else a fiftieth: tests are then collected and not run, which a few rows show as well."""
    return count if torch.cuda.is_available() else count // 50
