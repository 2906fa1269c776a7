"""Commands on several GPUs of a machine at once: how many GPUs are asked for, and which GPU each command sees."""

from __future__ import annotations

import argparse
import os

ALL = 0  # all GPUs that PyTorch sees


def number_of_gpus(text: str) -> int:
    """A number from 1 on, or ALL; argparse tells why it is neither."""
    if text == "all":
        return ALL
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"GPUs are a number from 1 on, or all, got {text!r}")
    return int(text)


def refusal(asked: int, there: int) -> str:
    """Why there are not ``asked`` GPUs, with the way out; empty if there are."""
    return (
        f"--gpus {asked}, and PyTorch sees {there} here: ask for no more, or for all" if asked > max(there, 1) else ""
    )


def visible(gpus: int) -> list[dict[str, str]]:
    """For each of ``gpus`` commands, the environment variables that make it see one GPU only.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES shows fewer GPUs.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(index) for index in range(gpus)] if given is None else [n.strip() for n in given.split(",") if n.strip()]
    )
    if len(names) < gpus:
        raise ValueError(
            f"{gpus} GPUs are wanted, and CUDA_VISIBLE_DEVICES={given!r} shows {len(names)}: show more, or unset it"
        )
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:gpus]]
