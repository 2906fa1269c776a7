"""What the command lines of several programs share: checks of their arguments, and how a program ends."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tuned.lookup.record import parsed


def file(text: str) -> Path:
    """A file that exists, as the ``type`` of an argument."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


def results(field: str) -> Callable[[str], Path]:
    """The ``type`` of an argument that is a file of results, of which each row has ``field``."""

    def checked(text: str) -> Path:
        path = file(text)
        try:
            rows = parsed(path.read_bytes())["rows"]
            rows = rows.values() if isinstance(rows, dict) else rows
            right = all(isinstance(row, dict) and field in row for row in rows)
        except (ValueError, LookupError, TypeError):  # no JSON, or another
            right = False
        if not right:
            raise argparse.ArgumentTypeError(f"{text!r} is no file of results whose rows have {field!r}")
        return path

    return checked


def folder(text: str) -> Path:
    """A folder that exists, as the ``type`` of an argument."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return path


def output(text: str) -> Path:
    """A file that can be written, as the ``type`` of an argument: else it would be told only once all is measured."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, not a file")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {str(there)!r} is no folder")
    if not os.access(path if path.exists() else there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return path


def count(text: str) -> int:
    """A number of at least 1, as the ``type`` of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def duration(text: str) -> float:
    """A time in seconds, as the ``type`` of an argument."""
    number = float(text)
    if not 0 < number < math.inf:  # a loop until "nan" measures nothing, and ends as if all were right
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


def minutes(text: str) -> float:
    """Minutes after which nothing is begun, from 0 on, as the ``type`` of an argument."""
    number = float(text)
    if not number >= 0:  # neither "nan", whose end is never there
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text}")
    return number


def ended(program: Callable[[], int | None]) -> int:
    """The exit code of a program; 1, without a word, if the reader of its output has gone, such as ``head``."""
    try:
        try:
            return program() or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes the rest when it ends
        return 1
