"""One process of the fuzz: runs its share of the cases and reports each as a line of JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz import case as cases
from tests.fuzz import forced
from tests.fuzz.draw import CPU, GPU, case

if TYPE_CHECKING:
    from collections.abc import Iterator


def world() -> Any:
    """The World of this machine."""
    return GPU if torch.cuda.is_available() else CPU


def tell(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def work(seed: int, indices: Iterator[int], repeats: int, seconds: float, crash: int = -1) -> None:
    """Run the cases of these indices until the time is over."""
    here, end = world(), time.monotonic() + seconds
    torch.set_num_threads(1)
    came, known_kernels, known_variants = forced.Came(), set[str](), set[Any]()
    with came.watched():
        for index in itertools.takewhile(lambda _: time.monotonic() < end, indices):
            tell(begin=index)
            if index == crash:
                os._exit(9)
            failure, calls, keys = None, 0, []
            try:
                made = case(here, seed, index, repeats)
                calls, found = cases.run(made, here.device)
                keys = [hash_of(call.key()) for call in made.calls]
                failure = None if found is None else dataclasses.asdict(found)
            except Exception as error:  # noqa: BLE001 - the fuzz itself failed, or the CUDA context is lost
                text = "".join(traceback.format_exception(error)[-3:])
                failure = lost(seed, index, text)
                if "CUDA" in str(error):
                    tell(end=index, calls=0, keys=[], failure=failure, kernels=[], rows=[])
                    sys.exit(3)
            new_kernels, new_rows = came.kernels - known_kernels, forced.SERVED - known_variants
            known_kernels |= new_kernels
            known_variants |= new_rows
            tell(end=index, calls=calls, keys=keys, failure=failure, kernels=sorted(new_kernels), rows=sorted(new_rows))


def lost(seed: int, index: int, message: str) -> dict[str, Any]:
    """The failure of a whole case, if no single call can be named."""
    told = script_of(seed, index)
    return {"seed": seed, "index": index, "step": -1, "message": message, "script": told, "whole": told}


def hash_of(key: str) -> str:
    import hashlib  # noqa: PLC0415

    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def script_of(seed: int, index: int) -> str:
    """The script of a whole case, without running the case."""
    here = world()
    try:
        return cases.script(case(here, seed, index), here.device)
    except Exception as error:  # noqa: BLE001 - the case cannot even be drawn
        return f"# the case cannot be drawn: {error}"
