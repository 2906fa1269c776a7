"""Covering sets: a few of many combinations that hold every pair of values the many hold."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def covering(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A small subset of ``rows`` with every pair of values of two fields that any row has, chosen greedily."""
    bit_of: dict[Any, int] = {}
    masks: list[tuple[int, dict[str, Any]]] = []
    for row in rows:
        mask = 0
        for pair in itertools.combinations(row.items(), 2):
            mask |= 1 << bit_of.setdefault(pair, len(bit_of))
        masks.append((mask, row))
    left, chosen = (1 << len(bit_of)) - 1, []
    while left:
        best, row = max(masks, key=lambda entry: (entry[0] & left).bit_count())
        chosen.append(row)
        left &= ~best
        masks = [entry for entry in masks if entry[0] & left]
    return chosen


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
